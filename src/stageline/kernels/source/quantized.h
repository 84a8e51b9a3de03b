// What a model does with quantised weights: linear layers, a gated MLP's first half, an LM head, an embedding's rows.
//
// One idea: rows of x are quantised once, as many as fit on the stack, and then every panel of every matrix meets them;
// the endings differ in what becomes of a panel's sums. Threads share the panels.
#pragma once
#include "crew.h"
#include "quantized_panel.h"

namespace STAGELINE_VARIANT {

constexpr int64_t SCRATCH_BYTES = 256 * 1024;  // for rows of x that are quantised, then multiplied

// Matrices that share their input; their outputs lie side by side.
struct QuantizedPlan {
    const QuantizedMatrix* matrices;
    const float* bias;
    int64_t num_matrices;
    int64_t num_columns;
};

// Rows of x, quantised; `rows` of them in tiles.
struct QuantizedRows {
    const int8_t* quants;
    const BlockOfX* blocks;
    int64_t rows;
    int64_t num_blocks;
};

// Of exact integers, so the order does not matter.
INLINE int32_t sum_of_quants(vf x) {
#if defined(STAGELINE_AVX512)
    return (int32_t)_mm512_reduce_add_ps((__m512)x);
#else
    return (int32_t)sum(x);
#endif
}

INLINE float largest_of_block(vf x) {
#if defined(STAGELINE_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    return largest(x);
#endif
}

template <class T>
INLINE void quantize_block(const T* x, int8_t* quants, BlockOfX& block) {
    vf largest_lanes = {};
    for (int i = 0; i < BLOCK; i += W) {
        vf v = load(x + i);
        largest_lanes = maximum(largest_lanes, maximum(v, -v));
    }
    float bound = largest_of_block(largest_lanes), to_quants = bound > 0 ? 127.0f / bound : 0.0f;
    vf sums[2] = {};
    for (int i = 0; i < BLOCK; i += W) {
        const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
        vf rounded = (load(x + i) * splat(to_quants) + shift) - shift;
        sums[i / (BLOCK / 2)] = sums[i / (BLOCK / 2)] + rounded;
        *(vq_anywhere*)(quants + i) = __builtin_convertvector(__builtin_convertvector(rounded, vi), vq);
    }
    int32_t first = sum_of_quants(sums[0]), second = sum_of_quants(sums[1]);
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

// A thread's part of a matrix: the rows of whole panels.
struct Share {
    int64_t begin, end;

    Share(int64_t begin, int64_t end) : begin(begin), end(end) {}

    Share(int64_t num_rows, int part, int parts) {
        int64_t panels = (num_rows + QUANTIZED_PANEL - 1) / QUANTIZED_PANEL;
        begin = panels * part / parts * QUANTIZED_PANEL;
        end = panels * (part + 1) / parts * QUANTIZED_PANEL;
        if (end > num_rows) end = num_rows;
    }
};

// Which panel is read, and which one after it.
struct Reading {
    int64_t kind;
    PanelStart panel, next;

    Reading(const QuantizedMatrix& matrix, int64_t column, const QuantizedMatrix& next_matrix, int64_t next_column,
            int64_t num_blocks)
        : kind(matrix.kind), panel(panel_of(matrix, column, num_blocks)),
          next(next_column < next_matrix.num_rows ? panel_of(next_matrix, next_column, num_blocks) : panel) {}
};

// A panel with a tile of rows, from `row` on, into `sums`.
INLINE void multiply_tile_of(const Reading& reading, const QuantizedRows& x, int64_t row, int64_t rows, float* sums) {
    panel_function(reading.kind, rows)(reading.panel, reading.next, x.num_blocks, x.quants + row * x.num_blocks * BLOCK,
                                       x.blocks + row * x.num_blocks, sums);
}

INLINE vf with_bias(const float* sums, const float* bias, int64_t count) {
    return bias ? load(sums) + load(bias, count) : load(sums);
}

INLINE void look_for_larger(float* sums, const float* bias, int64_t count, int64_t column, int64_t& place,
                            float& value) {
    vi is_above = {};
    for (int64_t c = 0; c < count; c += W) {
        vf y = with_bias(sums + c, bias ? bias + c : nullptr, count - c);
        store(sums + c, y);
        is_above |= ~(y <= splat(value));
    }
    if (!is_any(is_above)) return;
    for (int64_t c = 0; c < count; c++)
        if (!(sums[c] <= value) && value == value) place = column + c, value = sums[c];
}

// out: the first row's output of the matrix's first row; stride: elements from one row of x to the next.
template <class Y>
static void multiply_matrix(const QuantizedMatrix& matrix, Share share, const float* bias, const QuantizedRows& x,
                            Y* out, int64_t stride) {
    alignas(64) float sums[MOST_ROWS_OF_TILE * QUANTIZED_PANEL];
    for (int64_t column = share.begin; column < share.end; column += QUANTIZED_PANEL) {
        Reading reading(matrix, column, matrix, column + QUANTIZED_PANEL, x.num_blocks);
        for (int64_t row = 0, rows; row < x.rows; row += rows) {
            rows = rows_of_tile(x.rows - row);
            multiply_tile_of(reading, x, row, rows, sums);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = column; c < column + QUANTIZED_PANEL && c < matrix.num_rows; c += W) {
                    int64_t count = matrix.num_rows - c;
                    vf y = with_bias(sums + r * QUANTIZED_PANEL + c - column, bias ? bias + c : nullptr, count);
                    store(out + (row + r) * stride + c, y, count);
                }
        }
    }
}

// join(gate, up), of matrices with the same number of rows; one rounding, at the end.
template <class Y, class Join>
static void multiply_gated(const QuantizedMatrix& gate, const QuantizedMatrix& up, Share share, const float* bias,
                           const QuantizedRows& x, Y* out, const Join& join) {
    alignas(64) float gates[MOST_ROWS_OF_TILE * QUANTIZED_PANEL], ups[MOST_ROWS_OF_TILE * QUANTIZED_PANEL];
    int64_t size = gate.num_rows;
    for (int64_t column = share.begin; column < share.end; column += QUANTIZED_PANEL) {
        Reading gate_reading(gate, column, up, column, x.num_blocks);
        Reading up_reading(up, column, gate, column + QUANTIZED_PANEL, x.num_blocks);
        for (int64_t row = 0, rows; row < x.rows; row += rows) {
            rows = rows_of_tile(x.rows - row);
            multiply_tile_of(gate_reading, x, row, rows, gates);
            multiply_tile_of(up_reading, x, row, rows, ups);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = column; c < column + QUANTIZED_PANEL && c < size; c += W) {
                    int64_t at = r * QUANTIZED_PANEL + c - column, count = size - c;
                    vf g = with_bias(gates + at, bias ? bias + c : nullptr, count);
                    vf u = with_bias(ups + at, bias ? bias + size + c : nullptr, count);
                    store(out + (row + r) * size + c, join(g, u), count);
                }
        }
    }
}

// The place of a row's largest y, of equals the first; a NaN counts as the largest, as in torch.
static void find_largest(const QuantizedMatrix& matrix, Share share, const float* bias, const QuantizedRows& x,
                         int64_t* places, float* values) {
    alignas(64) float sums[MOST_ROWS_OF_TILE * QUANTIZED_PANEL];
    for (int64_t row = 0; row < x.rows; row++) places[row] = share.begin, values[row] = -__builtin_inff();
    for (int64_t column = share.begin; column < share.end; column += QUANTIZED_PANEL) {
        Reading reading(matrix, column, matrix, column + QUANTIZED_PANEL, x.num_blocks);
        int64_t count = matrix.num_rows - column < QUANTIZED_PANEL ? matrix.num_rows - column : QUANTIZED_PANEL;
        for (int64_t row = 0, rows; row < x.rows; row += rows) {
            rows = rows_of_tile(x.rows - row);
            multiply_tile_of(reading, x, row, rows, sums);
            for (int64_t r = 0; r < rows; r++)
                look_for_larger(sums + r * QUANTIZED_PANEL, bias ? bias + column : nullptr, count, column,
                                places[row + r], values[row + r]);
        }
    }
}

// Quantises rows of x, as many at once as fit, and hands them to every part: multiply(first row, rows, part).
template <class X, class Multiply>
static void quantize_and(const X* x, int64_t num_rows, int64_t num_columns, int parts, const Multiply& multiply) {
    alignas(64) char scratch[SCRATCH_BYTES];
    int64_t num_blocks = num_columns / BLOCK, row_bytes = num_blocks * (BLOCK + (int64_t)sizeof(BlockOfX));
    int64_t at_once = SCRATCH_BYTES / row_bytes;
    if (at_once > MOST_ROWS_OF_TILE) at_once -= at_once % MOST_ROWS_OF_TILE;
    BlockOfX* blocks = (BlockOfX*)scratch;
    int8_t* quants = (int8_t*)(blocks + at_once * num_blocks);
    for (int64_t row = 0; row < num_rows; row += at_once) {
        int64_t rows = num_rows - row < at_once ? num_rows - row : at_once;
        quantize_rows(x + row * num_columns, rows, num_blocks, quants, blocks);
        QuantizedRows quantized = {quants, blocks, rows, num_blocks};
        Crew::run(parts, [&](int part) { multiply(row, quantized, part); });
    }
}

// How many of the threads share the work of all the plan's matrices.
static int parts_of(const QuantizedPlan& plan, int64_t num_rows, int threads) {
    double bytes = 0, numbers = 0;
    for (int64_t m = 0; m < plan.num_matrices; m++) {
        const QuantizedMatrix& matrix = plan.matrices[m];
        const PanelStart second = panel_of(matrix, QUANTIZED_PANEL, plan.num_columns / BLOCK);
        const double panels = (double)matrix.num_rows / QUANTIZED_PANEL;
        bytes += panels * ((second.quants - matrix.quants) + (second.scales - matrix.scales) * sizeof(uint16_t));
        numbers += (double)matrix.num_rows * plan.num_columns;
    }
    return worth_sharing(threads, bytes, numbers * num_rows, INT8_PRODUCTS_PER_S);
}

template <class X, class Y>
static void quantized_linear(const QuantizedPlan& plan, const X* x, int64_t num_rows, Y* out, int threads) {
    const int parts = parts_of(plan, num_rows, threads);
    int64_t stride = 0;
    for (int64_t m = 0; m < plan.num_matrices; m++) stride += plan.matrices[m].num_rows;
    quantize_and(x, num_rows, plan.num_columns, parts, [&](int64_t row, const QuantizedRows& rows, int part) {
        int64_t column = 0;
        for (int64_t m = 0; m < plan.num_matrices; column += plan.matrices[m++].num_rows)
            multiply_matrix(plan.matrices[m], Share(plan.matrices[m].num_rows, part, parts),
                            plan.bias ? plan.bias + column : nullptr, rows, out + row * stride + column, stride);
    });
}

// Of the plan's only matrix. places, values: [threads][num_rows]; the first of them becomes the result.
template <class X>
static void quantized_largest(const QuantizedPlan& plan, const X* x, int64_t num_rows, int64_t* places, float* values,
                              int threads) {
    const int parts = parts_of(plan, num_rows, threads);
    quantize_and(x, num_rows, plan.num_columns, parts, [&](int64_t row, const QuantizedRows& rows, int part) {
        int64_t first = part * num_rows + row;
        find_largest(plan.matrices[0], Share(plan.matrices[0].num_rows, part, parts), plan.bias, rows, places + first,
                     values + first);
    });
    // Of equals the first: parts are in order.
    for (int64_t i = num_rows; i < parts * num_rows; i++)
        if (values[i] > values[i % num_rows]) values[i % num_rows] = values[i], places[i % num_rows] = places[i];
}

template <class X, class Y>
static void quantized_gated(const QuantizedPlan& plan, const X* x, int64_t num_rows, Y* out, int threads,
                            bool is_gelu) {
    const int parts = parts_of(plan, num_rows, threads);
    int64_t size = plan.matrices[0].num_rows;
    quantize_and(x, num_rows, plan.num_columns, parts, [&](int64_t row, const QuantizedRows& rows, int part) {
        multiply_gated(plan.matrices[0], plan.matrices[1], Share(size, part, parts), plan.bias, rows, out + row * size,
                       [&](vf gate, vf up) { return activated(gate, is_gelu) * up; });
    });
}

// One row of a matrix as floating-point numbers: an embedding's.
template <int KIND, class T>
static void make_row(const QuantizedMatrix& matrix, int64_t place, int64_t num_blocks, T* out) {
    using L = Layout<KIND>;
    PanelStart panel = panel_of<KIND>(matrix, place, num_blocks);
    int64_t group = place % QUANTIZED_PANEL / GROUP, row = place % GROUP;
    for (int64_t b = 0; b < num_blocks; b++, out += BLOCK) {
        const uint8_t* quants = panel.quants + b * L::BLOCK_BYTES + group * L::GROUP_BYTES + row * 4;
        const uint16_t* scales = panel.scales + b * L::BLOCK_SCALES + group * L::GROUP_SCALES + row / W * W;
        float first = load_halves(scales)[row % W];
        float second = L::GROUP_SCALES > GROUP ? load_halves(scales + GROUP)[row % W] : 0.0f;
        float weights[BLOCK];
        for (int64_t k = 0; k < BLOCK; k++) {
            int64_t at = L::IS_FOUR ? k % (BLOCK / 2) : k;
            int32_t quant = quants[at / 4 * GROUP * 4 + at % 4];
            if (L::IS_FOUR) quant = k < BLOCK / 2 ? quant & 15 : quant >> 4;
            if (KIND == FOUR_BITS_MINIMUM)
                weights[k] = quant * first + second;
            else
                weights[k] = (quant - (L::IS_FOUR ? 8 : 128)) *
                             (KIND == EIGHT_BITS_HALVES && k >= BLOCK / 2 ? second : first);
        }
        for (int64_t k = 0; k < BLOCK; k += W) store(out + k, load(weights + k));
    }
}

template <class T>
static void quantized_rows(const QuantizedPlan& plan, const int64_t* places, int64_t num_rows, T* out) {
    const QuantizedMatrix& matrix = plan.matrices[0];
    auto make = matrix.kind == FOUR_BITS           ? make_row<FOUR_BITS, T>
                : matrix.kind == FOUR_BITS_MINIMUM ? make_row<FOUR_BITS_MINIMUM, T>
                : matrix.kind == EIGHT_BITS        ? make_row<EIGHT_BITS, T>
                                                   : make_row<EIGHT_BITS_HALVES, T>;
    for (int64_t i = 0; i < num_rows; i++)
        make(matrix, places[i], plan.num_columns / BLOCK, out + i * plan.num_columns);
}

}  // namespace STAGELINE_VARIANT
