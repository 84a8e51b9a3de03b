// Panels of GGUF's quantised weights times rows of int8: integer dot products of blocks, joined in float32.
//
// One idea: every type is blocks of 32 unsigned numbers q of 4 or 8 bits with w = scale * (q - offset), or scale * q +
// minimum. Activations are quantised to int8 per row and block, so a block's product is exact in int32 and its offset
// and minimum need only the sum of the block's activations. Blocks are added in order, whatever the number of rows: a
// row's result does not depend on the others. Layout: kernels/quantized.py.
//
// Source: ggml-quants.c (the types), Intel's VPDPBUSD and Zen 4's throughput of it (the tile sizes).
#pragma once
#include "vector.h"

namespace STAGELINE_VARIANT {

constexpr int64_t BLOCK = 32;
constexpr int64_t GROUP = 16;            // weight rows whose numbers lie together, four of each row at a time
constexpr int64_t QUANTIZED_PANEL = 64;  // weight rows that are read together: one stream of memory
constexpr int64_t PREFETCH_BYTES = 4096;

enum QuantizedKind : int32_t { FOUR_BITS = 0, FOUR_BITS_MINIMUM = 1, EIGHT_BITS = 2, EIGHT_BITS_HALVES = 3 };

// One matrix of one type; `quants` and `scales` (float16) are laid out in panels.
struct QuantizedMatrix {
    const uint8_t* quants;
    const uint16_t* scales;
    int64_t num_rows;
    int64_t kind;
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

// Where a panel begins.
struct PanelStart {
    const uint8_t* quants;
    const uint16_t* scales;
};

// Fetches what is read some blocks later: of this panel, or then of the next, which may lie elsewhere.
template <int KIND>
INLINE void prefetch_block(const PanelStart& panel, const PanelStart& next, int64_t block, int64_t num_blocks) {
    using L = Layout<KIND>;
    int64_t wanted = block + PREFETCH_BYTES / L::BLOCK_BYTES;
    const PanelStart& from = wanted < num_blocks ? panel : next;
    if (wanted >= num_blocks) wanted -= num_blocks;
    const uint8_t* quants = from.quants + wanted * L::BLOCK_BYTES;
    const uint16_t* scales = from.scales + wanted * L::BLOCK_SCALES;
    for (int64_t i = 0; i < L::BLOCK_BYTES; i += 64) __builtin_prefetch(quants + i);
    for (int64_t i = 0; i < L::BLOCK_SCALES; i += 32) __builtin_prefetch(scales + i);
}

// VECTORS times W weight rows of a panel, from `first` on, with ROWS rows of x, into `sums` [ROWS][QUANTIZED_PANEL].
template <int KIND, int ROWS, int VECTORS>
INLINE void multiply_vectors(const PanelStart& panel, const PanelStart& next, int64_t first, int64_t num_blocks,
                             const int8_t* x, const BlockOfX* blocks, float* sums) {
    using L = Layout<KIND>;
    const uint8_t* quants = panel.quants + first / GROUP * L::GROUP_BYTES + first % GROUP * 4;
    const uint16_t* scales = panel.scales + first / GROUP * L::GROUP_SCALES + first % GROUP;
    vf sum[VECTORS][ROWS] = {};
    for (int64_t b = 0; b < num_blocks; b++) {
        if constexpr (VECTORS * W == QUANTIZED_PANEL) prefetch_block<KIND>(panel, next, b, num_blocks);
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
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) store(sums + r * QUANTIZED_PANEL + first + v * W, sum[v][r]);
}

typedef void (*PanelFunction)(const PanelStart& panel, const PanelStart& next, int64_t num_blocks, const int8_t* x,
                              const BlockOfX* blocks, float* sums);

// A panel with ROWS rows of x, into `sums` [ROWS][QUANTIZED_PANEL].
template <int KIND, int ROWS>
static void multiply_quantized_panel(const PanelStart& panel, const PanelStart& next, int64_t num_blocks,
                                     const int8_t* x, const BlockOfX* blocks, float* sums) {
    constexpr int VECTORS = vectors_at_once(ROWS);
    for (int64_t first = 0; first < QUANTIZED_PANEL; first += VECTORS * W)
        multiply_vectors<KIND, ROWS, VECTORS>(panel, next, first, num_blocks, x, blocks, sums);
}

#if defined(STAGELINE_AVX512)
constexpr int64_t MOST_ROWS_OF_TILE = 12;
#else
constexpr int64_t MOST_ROWS_OF_TILE = 4;
#endif

// The largest tile that fits; rows are cut alike when they are quantised and when they are multiplied.
INLINE int64_t rows_of_tile(int64_t rows_left) {
#if defined(STAGELINE_AVX512)
    if (rows_left >= 12) return 12;
    if (rows_left >= 8) return 8;
#endif
    return rows_left >= 4 ? 4 : rows_left >= 2 ? 2 : 1;
}

template <int KIND>
static PanelFunction panel_function_of(int64_t rows) {
    if (rows == 1) return multiply_quantized_panel<KIND, 1>;
    if (rows == 2) return multiply_quantized_panel<KIND, 2>;
#if defined(STAGELINE_AVX512)
    if (rows == 8) return multiply_quantized_panel<KIND, 8>;
    if (rows == 12) return multiply_quantized_panel<KIND, 12>;
#endif
    return multiply_quantized_panel<KIND, 4>;
}

template <int KIND>
static PanelStart panel_of(const QuantizedMatrix& matrix, int64_t column, int64_t num_blocks) {
    int64_t block = column / QUANTIZED_PANEL * num_blocks;
    return {matrix.quants + block * Layout<KIND>::BLOCK_BYTES, matrix.scales + block * Layout<KIND>::BLOCK_SCALES};
}

static PanelStart panel_of(const QuantizedMatrix& matrix, int64_t column, int64_t num_blocks) {
    switch (matrix.kind) {
        case FOUR_BITS: return panel_of<FOUR_BITS>(matrix, column, num_blocks);
        case FOUR_BITS_MINIMUM: return panel_of<FOUR_BITS_MINIMUM>(matrix, column, num_blocks);
        case EIGHT_BITS: return panel_of<EIGHT_BITS>(matrix, column, num_blocks);
        default: return panel_of<EIGHT_BITS_HALVES>(matrix, column, num_blocks);
    }
}

static PanelFunction panel_function(int64_t kind, int64_t rows) {
    switch (kind) {
        case FOUR_BITS: return panel_function_of<FOUR_BITS>(rows);
        case FOUR_BITS_MINIMUM: return panel_function_of<FOUR_BITS_MINIMUM>(rows);
        case EIGHT_BITS: return panel_function_of<EIGHT_BITS>(rows);
        default: return panel_function_of<EIGHT_BITS_HALVES>(rows);
    }
}

}  // namespace STAGELINE_VARIANT
