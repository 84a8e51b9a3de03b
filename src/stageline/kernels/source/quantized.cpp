// Quantised linear layers of one variant; called by quantized.py, which checks. threads: how many may share the work.
#include "exported.h"
#include "quantized.h"

using namespace STAGELINE_VARIANT;

// x: [num_rows][columns] -> out: [num_rows][rows of all matrices].
EXPORT(quantized_linear)
(const QuantizedPlan* plan, const void* x, int64_t num_rows, void* out, int32_t threads, int32_t takes_bf16,
 int32_t gives_bf16) {
    if (takes_bf16 && gives_bf16)
        quantized_linear(*plan, (const bf16*)x, num_rows, (bf16*)out, threads);
    else if (takes_bf16)
        quantized_linear(*plan, (const bf16*)x, num_rows, (float*)out, threads);
    else
        quantized_linear(*plan, (const float*)x, num_rows, (float*)out, threads);
}
BY_WORDS(quantized_linear)

// The plan has two matrices of the same size, the gate first. x: [num_rows][columns] -> out: [num_rows][size].
EXPORT(quantized_gated)
(const QuantizedPlan* plan, const void* x, int64_t num_rows, void* out, int32_t threads, int32_t is_gelu,
 int32_t is_bf16) {
    if (is_bf16)
        quantized_gated(*plan, (const bf16*)x, num_rows, (bf16*)out, threads, is_gelu);
    else
        quantized_gated(*plan, (const float*)x, num_rows, (float*)out, threads, is_gelu);
}
BY_WORDS(quantized_gated)

// The plan has one matrix. places, values: [threads][num_rows], where the largest result stands, and that result; the
// first of them becomes the result.
EXPORT(quantized_largest)
(const QuantizedPlan* plan, const void* x, int64_t num_rows, int64_t* places, float* values, int32_t threads,
 int32_t takes_bf16) {
    if (takes_bf16)
        quantized_largest(*plan, (const bf16*)x, num_rows, places, values, threads);
    else
        quantized_largest(*plan, (const float*)x, num_rows, places, values, threads);
}

// The plan has one matrix. places: [num_rows], below its number of rows. out: [num_rows][columns].
EXPORT(quantized_rows)
(const QuantizedPlan* plan, const int64_t* places, int64_t num_rows, void* out, int32_t gives_bf16) {
    if (gives_bf16)
        quantized_rows(*plan, places, num_rows, (bf16*)out);
    else
        quantized_rows(*plan, places, num_rows, (float*)out);
}
