// The two matrix products of attention, with keys and values as they lie in the cache (cache_layout.h), in registers.
//
// One idea: a tile of the cache is a few groups of GROUP tokens, each somewhere else. For keys a group is some columns
// of the product, for values some of its steps. Both are read once, while as many lines of the next tile are fetched,
// group by group: the hardware cannot guess which blocks follow, but helps along within one. An output's sum runs over
// the steps from first to last whatever the number of rows and vectors that are under way together.
#pragma once
#include "cache_layout.h"
#include "tile.h"

namespace STAGELINE_VARIANT {

enum class Groups { OF_COLUMNS, OF_STEPS };

// The words of keys or values of one tile: [steps][columns], cut into groups along one of the two.
struct CachedTile {
    const uint32_t* const* groups;
    const uint32_t* const* ahead;  // groups to fetch meanwhile
    int64_t stride;                // words from one step to the next
    int64_t steps;
    int64_t columns;  // a multiple of GROUP
};

// VECTORS columns of vectors, from `column` on: c[r] = c[r] * rescale[r] + a[r] b, or c[r] = a[r] b without rescale.
template <class T, Groups GROUPS, int ROWS, int VECTORS>
INLINE void multiply_columns(const uint32_t* a, int64_t a_stride, const CachedTile& b, int64_t column, float* c,
                             int64_t c_stride, const float* rescale) {
    constexpr bool HAS_COLUMNS = GROUPS == Groups::OF_COLUMNS;
    constexpr int LINES = VECTORS * W < GROUP ? 1 : VECTORS * W / GROUP;  // that a step reads, and fetches
    // While these are multiplied, one group is fetched.
    const int64_t steps_at_once = HAS_COLUMNS ? (b.steps + LINES - 1) / LINES : GROUP * sizeof(T) / 4;
    vf acc[ROWS][VECTORS];
    c += column;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            acc[r][v] = rescale ? load(c + r * c_stride + v * W) * splat(rescale[r]) : vf{};
    for (int64_t begin = 0, run = 0; begin < b.steps; begin += steps_at_once, run++) {
        const int64_t end = begin + steps_at_once < b.steps ? begin + steps_at_once : b.steps;
        const uint32_t* place[VECTORS];
        place[0] = b.groups[run] + column;
#pragma GCC unroll 4
        for (int v = 0; HAS_COLUMNS && v < VECTORS; v++)
            place[v] = b.groups[(column + v * W) / GROUP] + (column + v * W) % GROUP + begin * b.stride;
        const uint32_t* ahead = HAS_COLUMNS ? b.ahead[column / GROUP + run] : b.ahead[run] + column;
        const int64_t line = HAS_COLUMNS ? b.stride : GROUP, next_lines = HAS_COLUMNS ? LINES * b.stride : b.stride;
        for (int64_t s = begin, word = 0; s < end; s++, word += b.stride, ahead += next_lines) {
            vu words[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                words[v] = in_register(load_bits(HAS_COLUMNS ? place[v] + word : place[0] + word + v * W));
                if (v < LINES) __builtin_prefetch(ahead + v * line, 0, 2);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                vu factor = splat_bits(a[r * a_stride + s]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) acc[r][v] = dot<T>(acc[r][v], factor, words[v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + v * W, acc[r][v]);
}

// Few rows take more columns at once: a sum that waits for itself needs company.
template <class T, Groups GROUPS, int ROWS>
static void multiply_cached(const uint32_t* a, int64_t a_stride, const CachedTile& b, float* c, int64_t c_stride,
                            const float* rescale) {
    constexpr int MOST = W == GROUP && ROWS <= 6 ? 4 : 2;
    int64_t column = 0;
    if constexpr (MOST == 4)
        for (; column + 4 * W <= b.columns; column += 4 * W)
            multiply_columns<T, GROUPS, ROWS, 4>(a, a_stride, b, column, c, c_stride, rescale);
    for (; column + 2 * W <= b.columns; column += 2 * W)
        multiply_columns<T, GROUPS, ROWS, 2>(a, a_stride, b, column, c, c_stride, rescale);
    if constexpr (W == GROUP)
        if (column < b.columns) multiply_columns<T, GROUPS, ROWS, 1>(a, a_stride, b, column, c, c_stride, rescale);
}

typedef void (*CachedProduct)(const uint32_t* a, int64_t a_stride, const CachedTile& b, float* c, int64_t c_stride,
                              const float* rescale);

template <class T, Groups GROUPS, int... LESS_ONE>
static CachedProduct cached_product(int64_t rows, std::integer_sequence<int, LESS_ONE...>) {
    static constexpr CachedProduct products[] = {multiply_cached<T, GROUPS, LESS_ONE + 1>...};
    return products[rows - 1];
}

// For any number of rows.
template <class T, Groups GROUPS>
static void multiply_rows(const uint32_t* a, int64_t a_stride, int64_t rows, const CachedTile& b, float* c,
                          int64_t c_stride, const float* rescale) {
    RowTiles tiles(rows);
    for (int64_t tile = 0; tile < tiles.count; tile++) {
        int64_t first = tiles.begin(tile), count = tiles.begin(tile + 1) - first;
        cached_product<T, GROUPS>(count, std::make_integer_sequence<int, MAX_TILE_ROWS>())(
            a + first * a_stride, a_stride, b, c + first * c_stride, c_stride, rescale ? rescale + first : nullptr);
    }
}

}  // namespace STAGELINE_VARIANT
