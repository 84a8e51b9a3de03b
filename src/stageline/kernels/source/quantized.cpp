// Quantised linear layers of one variant, under names that end with the variant's. The caller, quantized.py, checks.
#include "quantized.h"

#define JOIN_(name, variant) stageline_##name##_##variant
#define JOIN(name, variant) JOIN_(name, variant)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void JOIN(name, STAGELINE_VARIANT)

using namespace STAGELINE_VARIANT;

// x: [num_rows][columns] -> out: [num_rows][rows of all matrices]. parts: threads that share the work.
EXPORT(quantized_linear)
(const QuantizedPlan* plan, const void* x, int64_t num_rows, void* out, int32_t parts, int32_t takes_bf16,
 int32_t gives_bf16) {
    if (takes_bf16 && gives_bf16)
        quantized_linear(*plan, (const bf16*)x, num_rows, (bf16*)out, parts);
    else if (takes_bf16)
        quantized_linear(*plan, (const bf16*)x, num_rows, (float*)out, parts);
    else
        quantized_linear(*plan, (const float*)x, num_rows, (float*)out, parts);
}

// The plan has two matrices of the same size, the gate first. x: [num_rows][columns] -> out: [num_rows][size].
EXPORT(quantized_gated)
(const QuantizedPlan* plan, const void* x, int64_t num_rows, void* out, int32_t parts, int32_t is_bf16) {
    if (is_bf16)
        quantized_gated(*plan, (const bf16*)x, num_rows, (bf16*)out, parts);
    else
        quantized_gated(*plan, (const float*)x, num_rows, (float*)out, parts);
}

// The plan has one matrix. places, values: [parts][num_rows], where each part's largest result stands, and that result.
EXPORT(quantized_largest)
(const QuantizedPlan* plan, const void* x, int64_t num_rows, int64_t* places, float* values, int32_t parts,
 int32_t takes_bf16) {
    if (takes_bf16)
        quantized_largest(*plan, (const bf16*)x, num_rows, places, values, parts);
    else
        quantized_largest(*plan, (const float*)x, num_rows, places, values, parts);
}

// The plan has one matrix. places: [num_rows], below its number of rows. out: [num_rows][columns].
EXPORT(quantized_rows)
(const QuantizedPlan* plan, const int64_t* places, int64_t num_rows, void* out, int32_t gives_bf16) {
    if (gives_bf16)
        quantized_rows(*plan, places, num_rows, (bf16*)out);
    else
        quantized_rows(*plan, places, num_rows, (float*)out);
}
