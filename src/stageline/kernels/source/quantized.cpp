// Quantised linear layers of one variant, under names that end with the variant's; called by quantized.py, which checks.
#include "quantized.h"

#define JOIN_(name, variant) stageline_##name##_##variant
#define JOIN(name, variant) JOIN_(name, variant)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void JOIN(name, STAGELINE_VARIANT)

using namespace STAGELINE_VARIANT;

// x: [num_rows][columns] -> out: [num_rows][rows of all matrices].
EXPORT(quantized_linear)
(const QuantizedPlan* plan, const void* x, int64_t num_rows, void* out, void* scratch, int32_t takes_bf16,
 int32_t gives_bf16) {
    if (takes_bf16 && gives_bf16)
        quantized_linear(*plan, (const bf16*)x, num_rows, (bf16*)out, (int8_t*)scratch);
    else if (takes_bf16)
        quantized_linear(*plan, (const bf16*)x, num_rows, (float*)out, (int8_t*)scratch);
    else
        quantized_linear(*plan, (const float*)x, num_rows, (float*)out, (int8_t*)scratch);
}
