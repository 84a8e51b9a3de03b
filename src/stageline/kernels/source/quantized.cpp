// Quantised linear layers of one variant, under names that end with the variant's; called by quantized.py, which checks.
#include "quantized.h"

#define JOIN_(name, variant) stageline_##name##_##variant
#define JOIN(name, variant) JOIN_(name, variant)
#define EXPORT(type, name) extern "C" __attribute__((visibility("default"))) type JOIN(name, STAGELINE_VARIANT)

using namespace STAGELINE_VARIANT;

// What `plan->scratch` must have.
EXPORT(int64_t, quantized_scratch_bytes)(int64_t num_columns) { return quantized_scratch_bytes(num_columns); }

// x: [num_rows][columns] -> out: [num_rows][rows of all matrices], both of the plan's type.
EXPORT(void, quantized_linear)(const QuantizedPlan* plan, const void* x, int64_t num_rows, void* out) {
    if (plan->is_bf16)
        quantized_linear(*plan, (const bf16*)x, num_rows, (bf16*)out);
    else
        quantized_linear(*plan, (const float*)x, num_rows, (float*)out);
}
