// Latent attention around its scores: a token's row on its way into the cache, and the two products of each head with
// rows of its own: queries into the space of the rows, and what was attended to out of it.
//
// One idea: a head's matrix is packed like that of a linear layer (gemm.h), and heads lie side by side in their tokens'
// rows, so each head is a linear layer whose rows are further apart.
#pragma once
#include "gemm.h"
#include "rows.h"

namespace STAGELINE_VARIANT {

struct LatentRowArguments {
    const void* inputs;  // [tokens][input_stride]; of each, `rank` numbers from `row_offset` on, then 2 half that rotate
    const void* norm;    // [rank]
    const void* query_norm;  // [query_rank], or null: then there are no queries to norm
    void* queries;           // [tokens][query_rank], normed, from the beginning of `inputs`
    const void* cosine;      // [positions][half]
    const void* sine;
    const int64_t* positions;
    const int64_t* slots;
    void* cache;  // [slots][rank + 2 half]
    int64_t num_tokens, input_stride, row_offset, rank, half, query_rank;
    float eps;
};

template <class T>
static void store_latent_rows(const LatentRowArguments& args) {
    for (int64_t t = 0; t < args.num_tokens; t++) {
        const T* input = (const T*)args.inputs + t * args.input_stride;
        if (args.query_norm)
            rms_norm<T>(input, nullptr, (const T*)args.query_norm, nullptr, (T*)args.queries + t * args.query_rank, 1,
                        args.query_rank, args.eps);
        const T* compressed = input + args.row_offset;
        T* row = (T*)args.cache + args.slots[t] * (args.rank + 2 * args.half);
        rms_norm<T>(compressed, nullptr, (const T*)args.norm, nullptr, row, 1, args.rank, args.eps);
        const int64_t at = args.positions[t] * args.half;
        rotate_head(compressed + args.rank, (const T*)args.cosine + at, (const T*)args.sine + at, row + args.rank,
                    args.half);
        make_finite(row, args.rank + 2 * args.half);
    }
}

// A product's sums, stored where a head's numbers lie in rows that are `stride` apart.
template <class T>
struct HeadStored {
    static constexpr int COLUMNS = PANEL;
    T* out;
    int64_t stride, size;

    void operator()(int64_t row, int64_t column, const float* sums) const {
        for (int64_t c = 0, n = size - column; c < PANEL && c < n; c += W)
            store(out + row * stride + column + c, load(sums + c), n - c);
    }
};

struct HeadArguments {
    const void* x;  // [tokens][x_stride], heads `x_head` apart
    const uint32_t* packed;  // [heads] matrices, each padded to whole panels
    void* out;               // [tokens][out_stride], heads `out_head` apart
    int64_t num_tokens, num_heads, in_features, out_features, x_stride, x_head, out_stride, out_head;
};

template <class T>
static void multiply_heads(const HeadArguments& args, int threads) {
    constexpr int64_t PER_WORD = 4 / sizeof(T);
    const int64_t steps = args.in_features / PER_WORD, panels = (args.out_features + PANEL - 1) / PANEL;
    const double bytes = (double)args.num_heads * panels * steps * PANEL * 4;
    const int most = worth_sharing(threads, bytes, args.num_tokens * bytes, BF16_FLOPS_PER_S);
    const int parts = most < args.num_heads ? most : (int)args.num_heads;
    Crew::run(parts, [&](int part) {
        for (int64_t h = args.num_heads * part / parts; h < args.num_heads * (part + 1) / parts; h++) {
            LinearArguments head = {(const uint32_t*)((const T*)args.x + h * args.x_head),
                                    args.packed + h * panels * steps * PANEL,
                                    nullptr,
                                    nullptr,
                                    args.x_stride / PER_WORD,
                                    args.num_tokens,
                                    args.out_features,
                                    steps};
            linear<T>(head, HeadStored<T>{(T*)args.out + h * args.out_head, args.out_stride, args.out_features}, 0,
                      panels);
        }
    });
}

// The numbers of each head that rotate, from where they lie behind those that do not, to behind what the product gave.
template <class T>
static void rotate_latent_queries(const T* x, const T* cosine, const T* sine, const int64_t* positions, T* out,
                                  int64_t num_tokens, int64_t num_heads, int64_t x_head, int64_t out_head,
                                  int64_t half) {
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t h = 0; h < num_heads; h++) {
            const int64_t i = t * num_heads + h, at = positions[t] * half;
            rotate_head(x + (i + 1) * x_head - 2 * half, cosine + at, sine + at, out + (i + 1) * out_head - 2 * half,
                        half);
        }
}

}  // namespace STAGELINE_VARIANT
