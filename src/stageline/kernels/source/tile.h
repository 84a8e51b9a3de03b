// The one matrix product behind linear layers and attention: a few rows of A times a panel of B, in registers.
//
// A panel is 32 columns of B, packed as [steps][32] words of 32 bits. A word is one float, or the bfloat16 of two
// consecutive k: then a step is two k. A's rows are read as words too, so one loop serves both types. Every output is
// accumulated over k from first to last, whatever the number of rows: a row's result never depends on its company.
#pragma once
#include <utility>

#include "vector.h"

namespace STAGELINE_VARIANT {

constexpr int PANEL = 32;
constexpr int TILE_VECTORS = 2;
constexpr int STRIP = TILE_VECTORS * W;  // columns that are in registers at once

// Memory that is brought into the cache meanwhile: from there, so much further with each step.
struct Ahead {
    const char* from;
    int64_t step_bytes;
};

// c[r] = c[r] * rescale[r] + a[r] b, or c[r] = a[r] b without rescale. Strides in elements.
typedef void (*TileFunction)(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t steps, float* c,
                             int64_t c_stride, const float* rescale, Ahead ahead);

// LINES_AHEAD: cache lines fetched per step. LOCALITY: 3 into the first-level cache, 2 into the second.
template <class T, int ROWS, int LINES_AHEAD, int LOCALITY>
static void multiply_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t steps, float* c,
                          int64_t c_stride, const float* rescale, Ahead ahead) {
    for (int first = 0; first < PANEL; first += STRIP) {
        vf acc[ROWS][TILE_VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++)
                acc[r][v] = rescale ? load(c + r * c_stride + first + v * W) * splat(rescale[r]) : vf{};
        for (int64_t s = 0; s < steps; s++) {
            const uint32_t* row = b + s * PANEL + first;
#pragma GCC unroll 2
            for (int line = 0; line < LINES_AHEAD; line++) __builtin_prefetch(ahead.from + 64 * line, 0, LOCALITY);
            ahead.from += ahead.step_bytes;
            vu column[TILE_VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++) column[v] = in_register(load_bits(row + v * W));
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                vu factor = splat_bits(a[r * a_stride + s]);
#pragma GCC unroll 2
                for (int v = 0; v < TILE_VECTORS; v++) acc[r][v] = dot<T>(acc[r][v], factor, column[v]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++) store(c + r * c_stride + first + v * W, acc[r][v]);
    }
}

template <class T, int LINES_AHEAD = 0, int LOCALITY = 0, int... LESS_ONE>
static TileFunction tile_function(int rows, std::integer_sequence<int, LESS_ONE...>) {
    static constexpr TileFunction functions[] = {multiply_tile<T, LESS_ONE + 1, LINES_AHEAD, LOCALITY>...};
    return functions[rows - 1];
}

template <class T, int MAX_ROWS = MAX_TILE_ROWS, int LINES_AHEAD = 0, int LOCALITY = 0>
static TileFunction tile_function(int rows) {
    return tile_function<T, LINES_AHEAD, LOCALITY>(rows, std::make_integer_sequence<int, MAX_ROWS>());
}

// Cuts rows into tiles of nearly equal size: small tiles read B as often as large ones.
struct RowTiles {
    int64_t rows;
    int64_t count;
    explicit RowTiles(int64_t rows, int64_t most = MAX_TILE_ROWS) : rows(rows), count((rows + most - 1) / most) {}
    int64_t begin(int64_t tile) const { return rows * tile / count; }
};

// Packs one panel: rows[i], of `steps` words, becomes column i.
INLINE void pack_panel(const uint32_t* const* rows, int64_t steps, uint32_t* panel) {
    for (int first = 0; first < PANEL; first += W) {
        int64_t done = 0;
        while (done < steps && steps >= W) {
            if (done + W > steps) done = steps - W;  // the last words once more, rather than one by one
            asm volatile("" ::: "memory");  // or the addresses would take the registers that the words need
            vu words[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) words[i] = load_bits(rows[first + i] + done);
            transpose(words);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_bits(panel + (done + i) * PANEL + first, words[i]);
            done += W;
        }
        for (; done < steps; done++)
            for (int i = 0; i < W; i++) panel[done * PANEL + first + i] = rows[first + i][done];
    }
}

}  // namespace STAGELINE_VARIANT
