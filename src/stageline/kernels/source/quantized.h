// Linear layers over GGUF's quantised weights: integer dot products of blocks, joined in float32.
//
// One idea: every type is blocks of 32 unsigned numbers q of 4 or 8 bits with w = scale * (q - offset), or scale * q +
// minimum. Activations are quantised to int8 per row and block, so a block's product is exact in int32 and its offset
// and minimum need only the sum of the block's activations. Blocks are added in order, whatever the number of rows: a
// row's result does not depend on the others. Layout: kernels/quantized.py.
//
// Source: ggml-quants.c (the types), Intel's VPDPBUSD and Zen 4's throughput of it (the tile sizes).
#pragma once
#include <cmath>

#include "vector.h"

namespace STAGELINE_VARIANT {

constexpr int64_t BLOCK = 32;
constexpr int64_t GROUP = 16;                // weight rows whose numbers lie together, four of each row at a time
constexpr int64_t QUANTIZED_PANEL = 64;      // weight rows that are read together: one stream of memory
constexpr int64_t ROWS_AT_ONCE = 96;         // rows of x that are quantised, then multiplied; a multiple of every tile
constexpr int64_t PREFETCH_BYTES = 4096;

enum QuantizedKind : int32_t { FOUR_BITS = 0, FOUR_BITS_MINIMUM = 1, EIGHT_BITS = 2, EIGHT_BITS_HALVES = 3 };

// One matrix of one type; `quants` and `scales` (float16) are laid out in panels.
struct QuantizedMatrix {
    const uint8_t* quants;
    const uint16_t* scales;
    int64_t num_rows;
    int64_t kind;
};

// Matrices that share their input; their outputs lie side by side.
struct QuantizedPlan {
    const QuantizedMatrix* matrices;
    const float* bias;
    int64_t num_matrices;
    int64_t num_columns;
};

// A block of one row of activations: x = scale * quant. What an offset takes from a block's product is known here.
struct BlockOfX {
    float scale;
    float scaled_sum;
    int32_t minus_8_sum;
    int32_t minus_128_sum;
    int32_t minus_128_half_sums[2];
};

typedef uint8_t vb __attribute__((vector_size(W * 4)));
typedef vb vb_anywhere __attribute__((aligned(1), may_alias));
typedef int8_t vq __attribute__((vector_size(W)));
typedef vq vq_anywhere __attribute__((aligned(1), may_alias));

INLINE vi splat_int(int32_t x) { return x - vi{}; }
INLINE vb load_bytes(const uint8_t* p) { return *(const vb_anywhere*)p; }
INLINE vb low_halves(vb x) { return x & 15; }
INLINE vb high_halves(vb x) { return (vb)((vu)x >> 4) & 15; }

// Finite halves only. Shifted into place they are too small by the difference of the exponents' biases.
INLINE vf load_halves(const uint16_t* p) {
#if defined(STAGELINE_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    vu bits = __builtin_convertvector(*(const vh_anywhere*)p, vu);
    vf magnitude = as_float((bits & 0x7FFF) << 13) * splat(0x1p112f);
    return as_float(as_bits(magnitude) | ((bits & 0x8000) << 16));
#endif
}

INLINE int32_t four_bytes(const int8_t* x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return bytes;
}

#if defined(STAGELINE_AVX2) && !defined(STAGELINE_AVX512)
INLINE vi add_products(vi acc, __m256i unsigned_bytes, __m256i signed_bytes) {
    __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif

// acc[i] + the products of bytes 4i..4i + 3 of `w` with the four bytes at `x`.
INLINE vi dot_bytes(vi acc, vb w, const int8_t* x) {
#if defined(STAGELINE_AVX512)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)splat_int(four_bytes(x)));
#elif defined(STAGELINE_AVX2)
    return add_products(acc, (__m256i)w, (__m256i)splat_int(four_bytes(x)));
#else
    for (int i = 0; i < W; i++)
        acc[i] += w[4 * i] * x[0] + w[4 * i + 1] * x[1] + w[4 * i + 2] * x[2] + w[4 * i + 3] * x[3];
    return acc;
#endif
}

// The same for numbers with an offset of 128, whose share is in `start_of_eight`. Pairs of products of whole unsigned
// bytes would overflow AVX2's 16 bits; there the offset is taken off before, and the sign moves to the other factor.
INLINE vi dot_eight(vi acc, vb w, const int8_t* x) {
#if defined(STAGELINE_AVX2) && !defined(STAGELINE_AVX512)
    __m256i weights = (__m256i)(w ^ 128);
    return add_products(acc, _mm256_abs_epi8(weights),
                        _mm256_sign_epi8((__m256i)splat_int(four_bytes(x)), weights));
#else
    return dot_bytes(acc, w, x);
#endif
}

INLINE vi start_of_eight(int32_t minus_128_sum) {
#if defined(STAGELINE_AVX2) && !defined(STAGELINE_AVX512)
    return vi{};
#else
    return splat_int(minus_128_sum);
#endif
}

INLINE vf add_scaled(vf sum, vi product, vf scale, float scale_of_x) {
    return fma(__builtin_convertvector(product, vf), scale * splat(scale_of_x), sum);
}

#if defined(STAGELINE_AVX512) || defined(STAGELINE_AVX2)
#define UNROLLED _Pragma("GCC unroll 16")
#else
#define UNROLLED _Pragma("GCC unroll 1")
#endif

template <int KIND>
struct Layout {
    static constexpr bool IS_FOUR = KIND == FOUR_BITS || KIND == FOUR_BITS_MINIMUM;
    static constexpr int64_t GROUP_BYTES = IS_FOUR ? GROUP * BLOCK / 2 : GROUP * BLOCK;
    static constexpr int64_t GROUP_SCALES = KIND == FOUR_BITS || KIND == EIGHT_BITS ? GROUP : 2 * GROUP;
    static constexpr int64_t BLOCK_BYTES = GROUP_BYTES * QUANTIZED_PANEL / GROUP;
    static constexpr int64_t BLOCK_SCALES = GROUP_SCALES * QUANTIZED_PANEL / GROUP;
};

// One block of W weight rows times ROWS rows of x, added to `sum`.
template <int KIND, int ROWS>
INLINE void add_block_of_four(const uint8_t* quants, const uint16_t* scales, const int8_t* x, const BlockOfX* blocks,
                              vf* sum) {
    vi acc[ROWS];
    UNROLLED for (int r = 0; r < ROWS; r++) acc[r] = KIND == FOUR_BITS ? splat_int(blocks[r].minus_8_sum) : vi{};
    UNROLLED for (int k = 0; k < BLOCK / 2; k += 4) {
        vb both = load_bytes(quants + k * GROUP), low = low_halves(both), high = high_halves(both);
        UNROLLED for (int r = 0; r < ROWS; r++) acc[r] = dot_bytes(acc[r], low, x + r * BLOCK + k);
        UNROLLED for (int r = 0; r < ROWS; r++) acc[r] = dot_bytes(acc[r], high, x + r * BLOCK + BLOCK / 2 + k);
    }
    vf scale = load_halves(scales);
    UNROLLED for (int r = 0; r < ROWS; r++) sum[r] = add_scaled(sum[r], acc[r], scale, blocks[r].scale);
    if constexpr (KIND == FOUR_BITS_MINIMUM) {
        vf minimum = load_halves(scales + GROUP);
        UNROLLED for (int r = 0; r < ROWS; r++) sum[r] = fma(minimum, splat(blocks[r].scaled_sum), sum[r]);
    }
}

template <int KIND, int ROWS>
INLINE void add_block_of_eight(const uint8_t* quants, const uint16_t* scales, const int8_t* x, const BlockOfX* blocks,
                               vf* sum) {
    constexpr int PARTS = KIND == EIGHT_BITS_HALVES ? 2 : 1, LENGTH = BLOCK / PARTS;
    UNROLLED for (int part = 0; part < PARTS; part++) {
        vi acc[ROWS];
        UNROLLED for (int r = 0; r < ROWS; r++)
            acc[r] = start_of_eight(PARTS == 2 ? blocks[r].minus_128_half_sums[part] : blocks[r].minus_128_sum);
        UNROLLED for (int k = part * LENGTH; k < (part + 1) * LENGTH; k += 4) {
            vb bytes = load_bytes(quants + k * GROUP);
            UNROLLED for (int r = 0; r < ROWS; r++) acc[r] = dot_eight(acc[r], bytes, x + r * BLOCK + k);
        }
        vf scale = load_halves(scales + part * GROUP);
        UNROLLED for (int r = 0; r < ROWS; r++) sum[r] = add_scaled(sum[r], acc[r], scale, blocks[r].scale);
    }
}

// Few rows wait for memory, so they read a panel as one stream and ask for what comes next; many rows compute.
constexpr int vectors_at_once(int rows) {
    int vectors = rows <= 2 ? 4 : rows <= 4 ? 2 : 1;
    return W == 16 ? vectors : 1;
}

template <int KIND>
INLINE void prefetch_block(const uint8_t* quants, const uint16_t* scales) {
    using L = Layout<KIND>;
    constexpr int64_t AHEAD = PREFETCH_BYTES / L::BLOCK_BYTES;
    for (int64_t i = 0; i < L::BLOCK_BYTES; i += 64) __builtin_prefetch(quants + AHEAD * L::BLOCK_BYTES + i);
    for (int64_t i = 0; i < L::BLOCK_SCALES; i += 32) __builtin_prefetch(scales + AHEAD * L::BLOCK_SCALES + i);
}

struct QuantizedOutput {
    void* first;         // the first row's output of the matrix's first row
    int64_t stride;      // elements from one row of x to the next
    const float* bias;   // of the matrix's first row, or null
    bool is_bf16;
};

template <class T>
INLINE void finish(vf y, T* out, const float* bias, int64_t count) {
    if (bias) y = y + load(bias, count);
    store(out, y, count);
}

// Weight rows from `column` on, VECTORS times W of them, with ROWS rows of x, of which the first is `row`.
template <int KIND, int ROWS, int VECTORS>
static void multiply_vectors(const uint8_t* quants, const uint16_t* scales, int64_t num_blocks, const int8_t* x,
                             const BlockOfX* blocks, const QuantizedOutput& out, int64_t row, int64_t column,
                             int64_t num_columns) {
    using L = Layout<KIND>;
    vf sum[VECTORS][ROWS] = {};
    for (int64_t b = 0; b < num_blocks; b++) {
        if constexpr (VECTORS * W == QUANTIZED_PANEL) prefetch_block<KIND>(quants, scales);
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const uint8_t* q = quants + v * W / GROUP * L::GROUP_BYTES + v * W % GROUP * 4;
            const uint16_t* s = scales + v * W / GROUP * L::GROUP_SCALES + v * W % GROUP;
            if constexpr (L::IS_FOUR)
                add_block_of_four<KIND, ROWS>(q, s, x, blocks, sum[v]);
            else
                add_block_of_eight<KIND, ROWS>(q, s, x, blocks, sum[v]);
        }
        quants += L::BLOCK_BYTES, scales += L::BLOCK_SCALES, x += ROWS * BLOCK, blocks += ROWS;
    }
    for (int v = 0; v < VECTORS; v++) {
        int64_t first = column + v * W;
        if (first >= num_columns) return;
        for (int r = 0; r < ROWS; r++) {
            int64_t at = (row + r) * out.stride + first;
            const float* bias = out.bias ? out.bias + first : nullptr;
            if (out.is_bf16)
                finish(sum[v][r], (bf16*)out.first + at, bias, num_columns - first);
            else
                finish(sum[v][r], (float*)out.first + at, bias, num_columns - first);
        }
    }
}

template <int KIND, int ROWS>
static void multiply_panel_rows(const uint8_t* quants, const uint16_t* scales, int64_t num_blocks, const int8_t* x,
                                const BlockOfX* blocks, const QuantizedOutput& out, int64_t row, int64_t column,
                                int64_t num_columns) {
    using L = Layout<KIND>;
    constexpr int VECTORS = vectors_at_once(ROWS);
    for (int64_t first = 0; first < QUANTIZED_PANEL && column + first < num_columns; first += VECTORS * W)
        multiply_vectors<KIND, ROWS, VECTORS>(quants + first / GROUP * L::GROUP_BYTES + first % GROUP * 4,
                                              scales + first / GROUP * L::GROUP_SCALES + first % GROUP, num_blocks, x,
                                              blocks, out, row, column + first, num_columns);
}

// The largest tile that fits; rows are cut alike when they are quantised and when they are multiplied.
INLINE int64_t rows_of_tile(int64_t rows_left) {
#if defined(STAGELINE_AVX512)
    if (rows_left >= 12) return 12;
    if (rows_left >= 8) return 8;
#endif
    return rows_left >= 4 ? 4 : rows_left >= 2 ? 2 : 1;
}

template <int KIND>
static void multiply_matrix(const QuantizedMatrix& matrix, int64_t num_blocks, const int8_t* x, const BlockOfX* blocks,
                            int64_t num_rows, const QuantizedOutput& out) {
    using L = Layout<KIND>;
    for (int64_t column = 0; column < matrix.num_rows; column += QUANTIZED_PANEL) {
        const uint8_t* quants = matrix.quants + column / QUANTIZED_PANEL * num_blocks * L::BLOCK_BYTES;
        const uint16_t* scales = matrix.scales + column / QUANTIZED_PANEL * num_blocks * L::BLOCK_SCALES;
        for (int64_t row = 0, rows; row < num_rows; row += rows) {
            rows = rows_of_tile(num_rows - row);
            auto multiply = rows == 1   ? multiply_panel_rows<KIND, 1>
                            : rows == 2 ? multiply_panel_rows<KIND, 2>
#if defined(STAGELINE_AVX512)
                            : rows == 8  ? multiply_panel_rows<KIND, 8>
                            : rows == 12 ? multiply_panel_rows<KIND, 12>
#endif
                                         : multiply_panel_rows<KIND, 4>;
            multiply(quants, scales, num_blocks, x + row * num_blocks * BLOCK, blocks + row * num_blocks, out, row,
                     column, matrix.num_rows);
        }
    }
}

template <class T>
INLINE void quantize_block(const T* x, int8_t* quants, BlockOfX& block) {
    vf largest_lanes = {};
    for (int i = 0; i < BLOCK; i += W) {
        vf v = load(x + i);
        largest_lanes = maximum(largest_lanes, maximum(v, -v));
    }
    float bound = largest(largest_lanes), to_quants = bound > 0 ? 127.0f / bound : 0.0f;
    vf sums[2] = {};
    for (int i = 0; i < BLOCK; i += W) {
        const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
        vf rounded = (load(x + i) * splat(to_quants) + shift) - shift;
        sums[i / (BLOCK / 2)] = sums[i / (BLOCK / 2)] + rounded;
        *(vq_anywhere*)(quants + i) = __builtin_convertvector(__builtin_convertvector(rounded, vi), vq);
    }
    int32_t first = (int32_t)sum(sums[0]), second = (int32_t)sum(sums[1]);
    int32_t both = first + second;
    float scale = bound / 127.0f;
    block = {scale, scale * (float)both, -8 * both, -128 * both, {-128 * first, -128 * second}};
}

// Per tile [block][row of the tile], so that a tile reads one stream.
template <class T>
static void quantize_rows(const T* x, int64_t num_rows, int64_t num_blocks, int8_t* quants, BlockOfX* blocks) {
    for (int64_t row = 0, rows; row < num_rows; row += rows) {
        rows = rows_of_tile(num_rows - row);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t b = 0; b < num_blocks; b++) {
                int64_t to = row * num_blocks + b * rows + r;
                quantize_block(x + ((row + r) * num_blocks + b) * BLOCK, quants + to * BLOCK, blocks[to]);
            }
    }
}

// scratch: for each of min(num_rows, ROWS_AT_ONCE) rows, one byte a column and a BlockOfX a block.
template <class X, class Y>
static void quantized_linear(const QuantizedPlan& plan, const X* x, int64_t num_rows, Y* out, int8_t* scratch) {
    int64_t num_blocks = plan.num_columns / BLOCK, stride = 0;
    for (int64_t m = 0; m < plan.num_matrices; m++) stride += plan.matrices[m].num_rows;
    BlockOfX* blocks = (BlockOfX*)(scratch + (num_rows < ROWS_AT_ONCE ? num_rows : ROWS_AT_ONCE) * plan.num_columns);
    for (int64_t row = 0; row < num_rows; row += ROWS_AT_ONCE) {
        int64_t rows = num_rows - row < ROWS_AT_ONCE ? num_rows - row : ROWS_AT_ONCE, column = 0;
        quantize_rows(x + row * plan.num_columns, rows, num_blocks, scratch, blocks);
        for (int64_t m = 0; m < plan.num_matrices; m++) {
            const QuantizedMatrix& matrix = plan.matrices[m];
            QuantizedOutput output = {out + row * stride + column, stride, plan.bias ? plan.bias + column : nullptr,
                                      sizeof(Y) == 2};
            auto multiply = matrix.kind == FOUR_BITS           ? multiply_matrix<FOUR_BITS>
                            : matrix.kind == FOUR_BITS_MINIMUM ? multiply_matrix<FOUR_BITS_MINIMUM>
                            : matrix.kind == EIGHT_BITS        ? multiply_matrix<EIGHT_BITS>
                                                               : multiply_matrix<EIGHT_BITS_HALVES>;
            multiply(matrix, num_blocks, scratch, blocks, rows, output);
            column += matrix.num_rows;
        }
    }
}

}  // namespace STAGELINE_VARIANT
