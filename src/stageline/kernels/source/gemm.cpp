// Linear layers of one variant; called by gemm.py, which checks.
//
// x_stride is in words of two elements, steps is half of in_features, threads is how many may share the work.
#include "exported.h"
#include "gemm.h"

using namespace STAGELINE_VARIANT;

static LinearArguments arguments(const void* x, const void* packed, const void* bias, void* out, int64_t x_stride,
                                 int64_t rows, int64_t out_features, int64_t steps) {
    return {(const uint32_t*)x, (const uint32_t*)packed, (const bf16*)bias, out, x_stride, rows, out_features, steps};
}

EXPORT(gemm)
(const void* x, const void* packed, const void* bias, void* out, int64_t x_stride, int64_t rows, int64_t out_features,
 int64_t steps, int32_t threads, int32_t gives_bf16) {
    LinearArguments args = arguments(x, packed, bias, out, x_stride, rows, out_features, steps);
    if (gives_bf16)
        linear_in_parts<Stored<bf16>>(args, parts_of<Stored<bf16>>(args, threads), [&](int) { return Stored<bf16>{args}; });
    else
        linear_in_parts<Stored<float>>(args, parts_of<Stored<float>>(args, threads), [&](int) { return Stored<float>{args}; });
}
BY_WORDS(gemm)

EXPORT(gemm_gated)
(const void* x, const void* packed, const void* bias, void* out, int64_t x_stride, int64_t rows, int64_t out_features,
 int64_t steps, int32_t threads, int32_t is_gelu) {
    LinearArguments args = arguments(x, packed, bias, out, x_stride, rows, out_features, steps);
    linear_in_parts<Gated>(args, parts_of<Gated>(args, threads), [&](int) { return Gated{args, is_gelu != 0}; });
}
BY_WORDS(gemm_gated)

// places, values: [threads][rows]; the first of them becomes the result.
EXPORT(gemm_largest)
(const void* x, const void* packed, const void* bias, int64_t* places, float* values, int64_t x_stride, int64_t rows,
 int64_t out_features, int64_t steps, int32_t threads) {
    LinearArguments args = arguments(x, packed, bias, nullptr, x_stride, rows, out_features, steps);
    const int parts = parts_of<Largest>(args, threads);
    linear_in_parts<Largest>(args, parts, [&](int part) {
        return Largest(args, places + part * rows, values + part * rows);
    });
    for (int64_t i = rows; i < parts * rows; i++)
        if (is_larger(values[i], values[i % rows])) values[i % rows] = values[i], places[i % rows] = places[i];
}

// zeros: 4 steps bytes of zeros.
EXPORT(gemm_pack)
(const void* weight, void* packed, const void* zeros, int64_t out_features, int64_t steps, int32_t is_gated) {
    pack_linear((const uint32_t*)weight, (uint32_t*)packed, (const uint32_t*)zeros, out_features, steps, is_gated);
}

EXPORT(gemm_unpack)(const void* packed, const int64_t* rows, void* out, int64_t num_rows, int64_t steps) {
    unpack_rows((const uint32_t*)packed, rows, (uint32_t*)out, num_rows, steps);
}
