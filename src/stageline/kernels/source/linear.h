// Linear layers over bfloat16 weights packed once: [ceil(out / 32)] panels of [in / 2][32] words; see tile.h.
#pragma once
#include "tile.h"

namespace STAGELINE_VARIANT {

constexpr int64_t BYTES_OF_ROWS_AT_ONCE = 512 * 1024;  // rows of x that stay in a core's second-level cache

static void pack_linear(const uint32_t* weight, uint32_t* packed, int64_t out_features, int64_t steps,
                        const uint32_t* zeros) {
    for (int64_t first = 0; first < out_features; first += PANEL) {
        const uint32_t* rows[PANEL];
        for (int64_t i = 0; i < PANEL; i++)
            rows[i] = first + i < out_features ? weight + (first + i) * steps : zeros;
        pack_panel(rows, steps, packed + first * steps);
    }
}

static void unpack_rows(const uint32_t* packed, const int64_t* rows, uint32_t* out, int64_t num_rows, int64_t steps) {
    for (int64_t i = 0; i < num_rows; i++) {
        const uint32_t* column = packed + rows[i] / PANEL * PANEL * steps + rows[i] % PANEL;
        for (int64_t s = 0; s < steps; s++) out[i * steps + s] = column[s * PANEL];
    }
}

template <class Out>
INLINE void finish_row(const float* sums, const bf16* bias, Out* out, int64_t columns) {
    for (int64_t c = 0; c < columns; c += W) {
        vf y = load(sums + c);
        if (bias) y = y + load(bias + c, columns - c);
        store(out + c, y, columns - c);
    }
}

template <class Out>
static void linear(const uint32_t* x, const uint32_t* packed, const bf16* bias, Out* out, int64_t rows,
                   int64_t out_features, int64_t steps) {
    alignas(64) float sums[MAX_TILE_ROWS * PANEL];
    int64_t at_once = BYTES_OF_ROWS_AT_ONCE / (steps * 4) / MAX_TILE_ROWS * MAX_TILE_ROWS;
    if (at_once < MAX_TILE_ROWS) at_once = MAX_TILE_ROWS;
    for (int64_t start = 0; start < rows; start += at_once) {
        RowTiles tiles(rows - start < at_once ? rows - start : at_once);
        for (int64_t column = 0; column < out_features; column += PANEL) {
            const uint32_t* panel = packed + column * steps;
            int64_t columns = out_features - column < PANEL ? out_features - column : PANEL;
            for (int64_t tile = 0; tile < tiles.count; tile++) {
                int64_t first = start + tiles.begin(tile), count = tiles.begin(tile + 1) - tiles.begin(tile);
                // The next panel comes while this one's first tile is computed, so that none waits for memory.
                bool is_followed = tile == 0 && column + PANEL < out_features;
                tile_function<bf16>(count)(x + first * steps, steps, panel, steps, sums, PANEL, nullptr,
                                           is_followed ? panel + PANEL * steps : panel);
                for (int64_t r = 0; r < count; r++)
                    finish_row(sums + r * PANEL, bias ? bias + column : nullptr,
                               out + (first + r) * out_features + column, columns);
            }
        }
    }
}

}  // namespace STAGELINE_VARIANT
