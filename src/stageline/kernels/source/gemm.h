// Linear layers in bfloat16: y = x Wᵀ + b, with weights packed once; and what may follow a product before it is stored.
// The products themselves can also be of float32 (experts.h uses both).
//
// One idea: a panel of 32 packed columns meets every tile of rows while it is in the second-level cache, and meanwhile
// the tiles fetch the next panel: memory is read once, at its own pace, and nobody waits for it. A row's sums run over
// k from first to last whatever its company, so they do not depend on how many rows there are.
//
// Packed weights are [ceil(out / 32)] panels of [steps][32] words (tile.h), steps = in / 2. A gated layer's panel is
// 16 columns of the gate and the 16 of the other half that they multiply.
#pragma once
#include "crew.h"
#include "tile.h"

namespace STAGELINE_VARIANT {

constexpr int GATED = PANEL / 2;
constexpr int ROWS_PER_TILE = MAX_TILE_ROWS < 8 ? MAX_TILE_ROWS : 8;  // more gain nothing: loads are hidden from 3 on
constexpr int64_t MAX_ROWS_AT_ONCE = 256;
constexpr int64_t MIN_ROWS_AT_ONCE = 64;
constexpr int64_t BYTES_OF_ROWS_AT_ONCE = 384 * 1024;  // rows of x that share the second-level cache with two panels
constexpr int64_t STEPS_AT_ONCE = 2048;                // of a panel: 256 KiB
constexpr int64_t BYTES_AHEAD_IN_ONE_PASS = 8192;      // how far one pass fetches ahead of itself

struct LinearArguments {
    const uint32_t* x;
    const uint32_t* packed;
    const bf16* bias;
    void* out;
    int64_t x_stride;  // words
    int64_t rows;
    int64_t out_features;  // of what is stored: half of the products' columns if gated
    int64_t steps;
};

// weight: [out_features][steps], twice that if gated: the gate first. zeros: [steps], for columns that fill a panel up.
static void pack_linear(const uint32_t* weight, uint32_t* packed, const uint32_t* zeros, int64_t out_features,
                        int64_t steps, bool is_gated) {
    const int64_t columns = is_gated ? GATED : PANEL;
    for (int64_t first = 0; first < out_features; first += columns, packed += steps * PANEL) {
        const uint32_t* rows[PANEL];
        for (int64_t i = 0; i < PANEL; i++) {
            int64_t feature = first + i % columns;
            rows[i] = feature < out_features ? weight + (i / columns * out_features + feature) * steps : zeros;
        }
        pack_panel(rows, steps, packed);
    }
}

// Rows of the weight as they were before packing (not gated): an embedding may share its matrix with the LM head.
static void unpack_rows(const uint32_t* packed, const int64_t* rows, uint32_t* out, int64_t num_rows, int64_t steps) {
    for (int64_t i = 0; i < num_rows; i++) {
        const uint32_t* column = packed + rows[i] / PANEL * PANEL * steps + rows[i] % PANEL;
        for (int64_t s = 0; s < steps; s++) out[i * steps + s] = column[s * PANEL];
    }
}

// y, as bfloat16 or float32.
template <class Out>
struct Stored {
    static constexpr int COLUMNS = PANEL;
    const LinearArguments& args;

    void operator()(int64_t row, int64_t column, const float* sums) const {
        Out* out = (Out*)args.out + row * args.out_features;
        for (int64_t c = 0, n = args.out_features - column; c < PANEL && c < n; c += W) {
            vf y = load(sums + c);
            if (args.bias) y = y + load(args.bias + column + c, n - c);
            store(out + column + c, y, n - c);
        }
    }
};

// activated(gate) * up, as bfloat16, rounded once.
struct Gated {
    static constexpr int COLUMNS = GATED;
    const LinearArguments& args;
    bool is_gelu;

    void operator()(int64_t row, int64_t column, const float* sums) const {
        bf16* out = (bf16*)args.out + row * args.out_features;
        const bf16* up_bias = args.bias + args.out_features;
        for (int64_t c = 0, n = args.out_features - column; c < GATED && c < n; c += W) {
            vf gate = load(sums + c), up = load(sums + GATED + c);
            if (args.bias) {
                gate = gate + load(args.bias + column + c, n - c);
                up = up + load(up_bias + column + c, n - c);
            }
            store(out + column + c, activated(gate, is_gelu) * up, n - c);
        }
    }
};

// NaN is the largest, as in torch.
INLINE bool is_larger(float a, float b) { return !(a <= b) && b == b; }

// The place of a row's largest y, of equals the first; nothing else is stored.
struct Largest {
    static constexpr int COLUMNS = PANEL;
    const LinearArguments& args;
    int64_t* places;
    float* values;

    Largest(const LinearArguments& args, int64_t* places, float* values) : args(args), places(places), values(values) {
        for (int64_t row = 0; row < args.rows; row++) places[row] = 0, values[row] = -__builtin_inff();
    }

    void operator()(int64_t row, int64_t column, const float* sums) const {
        alignas(64) float lanes[PANEL];
        vi is_above = {};
        for (int64_t c = 0, n = args.out_features - column; c < PANEL; c += W) {
            vf y = load(sums + c);
            if (args.bias && c < n) y = y + load(args.bias + column + c, n - c);
            store(lanes + c, y);
            is_above |= ~(y <= splat(values[row]));
        }
        if (!is_any(is_above)) return;
        for (int64_t c = 0, n = args.out_features - column; c < PANEL && c < n; c++)
            if (is_larger(lanes[c], values[row])) places[row] = column + c, values[row] = lanes[c];
    }
};

// Fetches ahead: a single tile fetches its own panel's continuation, several share the fetching of what comes next.
template <class T>
static void multiply_block(const LinearArguments& args, const RowTiles& tiles, int64_t tile, const uint32_t* x,
                           const uint32_t* block, int64_t steps, float* sums, const float* ones) {
    int64_t first = tiles.begin(tile), count = tiles.begin(tile + 1) - first;
    TileFunction function;
    Ahead ahead;
    if (tiles.count == 1) {
        bool is_memory_bound = count <= 4;
        function = is_memory_bound ? tile_function<T, ROWS_PER_TILE, 2, 3>(count)
                                   : tile_function<T, ROWS_PER_TILE, 2, 2>(count);
        ahead = {(const char*)block + BYTES_AHEAD_IN_ONE_PASS, PANEL * 4};
    } else {
        function = tile_function<T, ROWS_PER_TILE, 1, 2>(count);
        ahead = {(const char*)(block + (steps + steps * tile / tiles.count) * PANEL),
                 (PANEL * 4 + tiles.count - 1) / tiles.count};
    }
    function(x + first * args.x_stride, args.x_stride, block, steps, sums + first * PANEL, PANEL, ones, ahead);
}

INLINE int64_t rows_at_once(int64_t steps) {
    int64_t rows = BYTES_OF_ROWS_AT_ONCE / (steps * 4);
    return rows < MIN_ROWS_AT_ONCE ? MIN_ROWS_AT_ONCE : rows > MAX_ROWS_AT_ONCE ? MAX_ROWS_AT_ONCE : rows;
}

// The panels in [begin, end). T: what x and the weights are of.
template <class T = bf16, class Finish>
static void linear(const LinearArguments& args, const Finish& finish, int64_t begin, int64_t end) {
    alignas(64) float sums[MAX_ROWS_AT_ONCE * PANEL];
    float ones[ROWS_PER_TILE];
    for (float& one : ones) one = 1.0f;
    const int64_t at_once = rows_at_once(args.steps);
    for (int64_t start = 0; start < args.rows; start += at_once) {
        RowTiles tiles(args.rows - start < at_once ? args.rows - start : at_once, ROWS_PER_TILE);
        const uint32_t* x = args.x + start * args.x_stride;
        for (int64_t p = begin; p < end; p++) {
            const uint32_t* panel = args.packed + p * args.steps * PANEL;
            for (int64_t s = 0; s < args.steps; s += STEPS_AT_ONCE) {
                int64_t steps = args.steps - s < STEPS_AT_ONCE ? args.steps - s : STEPS_AT_ONCE;
                for (int64_t tile = 0; tile < tiles.count; tile++) {
                    multiply_block<T>(args, tiles, tile, x + s, panel + s * PANEL, steps, sums, s ? ones : nullptr);
                    if (s + steps < args.steps) continue;
                    for (int64_t r = tiles.begin(tile); r < tiles.begin(tile + 1); r++)
                        finish(start + r, p * Finish::COLUMNS, sums + r * PANEL);
                }
            }
        }
    }
}

template <class Finish>
INLINE int64_t panels_of(const LinearArguments& args) {
    return (args.out_features + Finish::COLUMNS - 1) / Finish::COLUMNS;
}

// How many of the threads share the work.
template <class Finish>
static int parts_of(const LinearArguments& args, int threads) {
    const double panel_bytes = (double)args.steps * PANEL * sizeof(uint32_t), bytes = panels_of<Finish>(args) * panel_bytes;
    const int parts = worth_sharing(threads, bytes, args.rows * bytes, BF16_FLOPS_PER_S);
    return parts < panels_of<Finish>(args) ? parts : panels_of<Finish>(args);
}

// Part by part of the panels, each on its own thread. finish_part(part) makes what ends the part's products.
template <class Finish, class FinishPart>
static void linear_in_parts(const LinearArguments& args, int parts, const FinishPart& finish_part) {
    const int64_t panels = panels_of<Finish>(args);
    Crew::run(parts, [&](int part) {
        linear(args, finish_part(part), panels * part / parts, panels * (part + 1) / parts);
    });
}

}  // namespace STAGELINE_VARIANT
