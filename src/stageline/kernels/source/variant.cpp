// The functions of one variant but for linear layers: pointers, sizes in elements, and a flag for the type (1: bfloat16,
// 0: float32). Called by cpu.py, which checks.
#include "attention.h"
#include "exported.h"
#include "rows.h"

using namespace STAGELINE_VARIANT;

EXPORT(rms_norm)
(const void* x, const void* residual, const void* weight, void* total, void* out, int64_t rows, int64_t size, float eps,
 int32_t is_bf16) {
    if (is_bf16)
        rms_norm((const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)total, (bf16*)out, rows, size, eps);
    else
        rms_norm((const float*)x, (const float*)residual, (const float*)weight, (float*)total, (float*)out, rows, size,
                 eps);
}
BY_WORDS(rms_norm)

EXPORT(activate_and_mul)
(const void* gate_up, void* out, int64_t rows, int64_t size, int32_t is_gelu, int32_t is_bf16) {
    if (is_bf16)
        activate_and_mul((const bf16*)gate_up, (bf16*)out, rows, size, is_gelu);
    else
        activate_and_mul((const float*)gate_up, (float*)out, rows, size, is_gelu);
}
BY_WORDS(activate_and_mul)

EXPORT(add)(const void* x, const void* residual, void* total, int64_t rows, int64_t size, int32_t is_bf16) {
    if (is_bf16)
        add((const bf16*)x, (const bf16*)residual, (bf16*)total, rows * size);
    else
        add((const float*)x, (const float*)residual, (float*)total, rows * size);
}
BY_WORDS(add)

EXPORT(scale)(void* x, int64_t rows, int64_t size, float factor, int32_t is_bf16) {
    if (is_bf16)
        scale((bf16*)x, rows * size, factor);
    else
        scale((float*)x, rows * size, factor);
}
BY_WORDS(scale)

EXPORT(normalize_heads)
(void* heads, const void* query_weight, const void* key_weight, int64_t num_tokens, int64_t row_size,
 int64_t query_parts, int64_t query_size, int64_t key_parts, int64_t key_size, float eps, int32_t is_bf16) {
    NormalizeArguments arguments = {heads,       query_weight, key_weight, num_tokens, row_size,
                                    query_parts, query_size,   key_parts,  key_size,   eps};
    if (is_bf16)
        normalize_heads<bf16>(arguments);
    else
        normalize_heads<float>(arguments);
}
BY_WORDS(normalize_heads)

EXPORT(rotate_and_store)
(void* heads, const void* cosine, const void* sine, const int64_t* positions, const int64_t* slots, void* keys,
 void* values, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
 int64_t half, int32_t is_bf16) {
    RotateArguments arguments = {heads,      cosine,    sine,         positions, slots,     keys,
                                 values,     num_tokens, num_heads, num_kv_heads, head_dim, block_size, half};
    if (is_bf16)
        rotate_and_store<bf16>(arguments);
    else
        rotate_and_store<float>(arguments);
}
BY_WORDS(rotate_and_store)

EXPORT(argmax)(const void* x, int64_t* out, int64_t rows, int64_t size, int32_t is_bf16) {
    if (is_bf16)
        argmax((const bf16*)x, out, rows, size);
    else
        argmax((const float*)x, out, rows, size);
}

// heap: 8 k bytes.
EXPORT(top_k)(const float* x, float* values, int64_t* ids, void* heap, int64_t rows, int64_t size, int64_t k) {
    top_k(x, values, ids, (Leading*)heap, rows, size, k);
}

// Without scratch nothing is computed: `scratch_bytes` is what it has to have.
EXPORT(attention)
(const void* queries, void* out, const void* keys, const void* values, const int32_t* query_starts,
 const int32_t* context_lens, const int32_t* block_tables, void* scratch, int64_t query_stride, int64_t table_stride,
 int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
 int64_t sliding_window, float scale, float cap, const float* sinks, int32_t is_latent,
 int32_t is_bf16, int64_t* scratch_bytes) {
    AttentionArguments arguments = {queries,      out,          keys,       values,   query_starts, context_lens,
                                    block_tables, scratch,      query_stride, table_stride, num_rows, num_heads,
                                    num_kv_heads, head_dim,     block_size, sliding_window, scale, cap, sinks,
                                    (bool)is_latent};
    if (is_bf16) {
        Attention<bf16> attention(arguments);
        if (scratch) return attention.run();
        *scratch_bytes = attention.scratch_bytes();
    } else {
        Attention<float> attention(arguments);
        if (scratch) return attention.run();
        *scratch_bytes = attention.scratch_bytes();
    }
}
BY_WORDS(attention)
