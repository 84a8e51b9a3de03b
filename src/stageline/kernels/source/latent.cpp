// Latent attention of one variant; called by latent.py, which checks.
#include "latent.h"
#include "exported.h"

using namespace STAGELINE_VARIANT;

EXPORT(store_latent_rows)
(const void* inputs, const void* norm, const void* query_norm, void* queries, const void* cosine, const void* sine,
 const int64_t* positions, const int64_t* slots, void* cache, int64_t num_tokens, int64_t input_stride,
 int64_t row_offset, int64_t rank, int64_t half, int64_t query_rank, float eps, int32_t is_bf16) {
    LatentRowArguments args = {inputs, norm,       query_norm,   queries,    cosine, sine, positions,  slots,
                               cache,  num_tokens, input_stride, row_offset, rank,   half, query_rank, eps};
    if (is_bf16)
        store_latent_rows<bf16>(args);
    else
        store_latent_rows<float>(args);
}
BY_WORDS(store_latent_rows)

// x: [tokens][heads][in_features + 2 half]; packed: [heads] of [rank][in_features]; out: [tokens][heads][rank + 2 half].
EXPORT(latent_queries)
(const void* x, const void* packed, const void* cosine, const void* sine, const int64_t* positions, void* out,
 int64_t num_tokens, int64_t num_heads, int64_t in_features, int64_t rank, int64_t half, int32_t threads,
 int32_t is_bf16) {
    const int64_t x_head = in_features + 2 * half, out_head = rank + 2 * half;
    HeadArguments args = {x,    (const uint32_t*)packed, out, num_tokens, num_heads, in_features,
                          rank, num_heads * x_head,      x_head, num_heads * out_head, out_head};
    if (is_bf16) {
        multiply_heads<bf16>(args, threads);
        rotate_latent_queries((const bf16*)x, (const bf16*)cosine, (const bf16*)sine, positions, (bf16*)out, num_tokens,
                              num_heads, x_head, out_head, half);
    } else {
        multiply_heads<float>(args, threads);
        rotate_latent_queries((const float*)x, (const float*)cosine, (const float*)sine, positions, (float*)out,
                              num_tokens, num_heads, x_head, out_head, half);
    }
}
BY_WORDS(latent_queries)

// x: [tokens][heads][row_size], of which the first `rank` count; packed: [heads] of [size][rank]; out: [tokens][heads][size].
EXPORT(latent_values)
(const void* x, const void* packed, void* out, int64_t num_tokens, int64_t num_heads, int64_t rank, int64_t row_size,
 int64_t size, int32_t threads, int32_t is_bf16) {
    HeadArguments args = {x,    (const uint32_t*)packed, out,      num_tokens,       num_heads, rank,
                          size, num_heads * row_size,    row_size, num_heads * size, size};
    if (is_bf16)
        multiply_heads<bf16>(args, threads);
    else
        multiply_heads<float>(args, threads);
}
BY_WORDS(latent_values)
