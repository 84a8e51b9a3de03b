// Attention over a paged cache, reading the block table directly; decodes and chunks of prompts are one case.
//
// One idea: for one row of the batch and one key head, the queries of some tokens and of all heads that share the key
// head are the rows of a matrix. Keys are packed tile by tile into panels (tile.h), so scores and weighted values are
// matrix products, joined by an online softmax. Tiles of keys begin at multiples of KEYS_AT_ONCE, and a tile that a
// query may not see leaves it exactly unchanged: a token's result depends neither on the batch nor on the chunk.
//
// Source: FlashAttention-2 (arXiv 2307.08691) for the softmax.
#pragma once
#include "tile.h"

namespace STAGELINE_VARIANT {

constexpr int KEYS_AT_ONCE = 64;
constexpr int MAX_QUERIES_AT_ONCE = 84;
constexpr float NEVER = -3.0e38f;

struct AttentionArguments {
    const void* queries;
    void* out;
    const void* keys;
    const void* values;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    void* scratch;
    int64_t query_stride;
    int64_t table_stride;
    int64_t num_rows;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t sliding_window;
    float scale;
};

template <class T>
class Attention {
   public:
    static constexpr int PER_WORD = 4 / sizeof(T);
    // Words of a panel of values; the last line keeps panels from falling into the same sets of the cache.
    static constexpr int64_t value_panel_size = KEYS_AT_ONCE / PER_WORD * PANEL + 16;

    explicit Attention(const AttentionArguments& arguments) : args(arguments) {
        group = args.num_heads / args.num_kv_heads;
        tokens_at_once = group < MAX_QUERIES_AT_ONCE ? MAX_QUERIES_AT_ONCE / group : 1;
        words = args.head_dim / PER_WORD;
        value_panels = (args.head_dim + PANEL - 1) / PANEL;
        lay_out((char*)args.scratch);
    }

    // Bytes of scratch that `lay_out` hands out.
    int64_t scratch_bytes() { return (char*)end - (char*)args.scratch; }

    void run() {
        memset(zeros, 0, words * 4);
        Rows rows, rows_ahead;
        Unit unit = first_of_row(0);
        find_rows(unit, rows);
        while (unit.row < args.num_rows) {
            Unit next = after(unit);
            find_rows(next.row < args.num_rows ? next : unit, rows_ahead);
            attend(unit, rows, rows_ahead);
            unit = next;
            rows = rows_ahead;
        }
    }

   private:
    // One tile of keys under the queries of some tokens of one row of the batch, for one key head.
    struct Unit {
        int64_t row, head;
        int64_t token, tokens;  // in the row
        int64_t position;       // of the first of these tokens
        int64_t start, keys;    // the tile
    };

    // Where the keys and values of a unit's tile lie; zeros after the last.
    struct Rows {
        const uint32_t *keys[KEYS_AT_ONCE], *values[KEYS_AT_ONCE];
    };

    AttentionArguments args;
    int64_t group, tokens_at_once, words, value_panels;
    uint32_t *queries, *key_panels, *value_panel_words, *weights, *zeros, *end;
    float *scores, *sums, *maxima, *totals, *rescale;

    template <class P>
    static P* take(char*& cursor, int64_t count) {
        P* taken = (P*)cursor;
        cursor += (count * sizeof(P) + 63) / 64 * 64;
        return taken;
    }

    void lay_out(char* cursor) {
        int64_t n = tokens_at_once * group;
        if (n < args.num_heads) n = args.num_heads;
        queries = take<uint32_t>(cursor, n * words);
        key_panels = take<uint32_t>(cursor, KEYS_AT_ONCE * words);
        value_panel_words = take<uint32_t>(cursor, value_panels * value_panel_size);
        weights = take<uint32_t>(cursor, n * KEYS_AT_ONCE / PER_WORD);
        zeros = take<uint32_t>(cursor, words);
        scores = take<float>(cursor, n * KEYS_AT_ONCE);
        sums = take<float>(cursor, n * value_panels * PANEL);
        maxima = take<float>(cursor, n);
        totals = take<float>(cursor, n);
        rescale = take<float>(cursor, n + W);
        end = (uint32_t*)cursor;
    }

    int64_t num_tokens(int64_t row) const { return args.query_starts[row + 1] - args.query_starts[row]; }

    int64_t first_seen(int64_t position) const {
        int64_t first = args.sliding_window > 0 ? position - args.sliding_window + 1 : 0;
        return first > 0 ? first : 0;
    }

    // A decode takes one tile of all heads before the next: a block's heads lie one behind the other. A chunk of a
    // prompt takes all tiles of some tokens and one head, whose sums stay in the cache.
    Unit first_of_row(int64_t row) const {
        while (row < args.num_rows && num_tokens(row) == 0) row++;
        if (row >= args.num_rows) return {args.num_rows, 0, 0, 0, 0, 0, 0};
        return first_of_tokens(row, 0, 0);
    }

    Unit first_of_tokens(int64_t row, int64_t head, int64_t token) const {
        int64_t left = num_tokens(row) - token, position = args.context_lens[row] - left;
        int64_t tokens = left < tokens_at_once ? left : tokens_at_once;
        return at_tile({row, head, token, tokens, position, 0, 0}, first_tile(position));
    }

    int64_t first_tile(int64_t position) const { return first_seen(position) / KEYS_AT_ONCE * KEYS_AT_ONCE; }

    static Unit at_tile(Unit unit, int64_t start) {
        int64_t keys = unit.position + unit.tokens - start;
        unit.start = start;
        unit.keys = keys < KEYS_AT_ONCE ? keys : KEYS_AT_ONCE;
        return unit;
    }

    Unit after(Unit unit) const {
        bool is_last_tile = unit.start + unit.keys == unit.position + unit.tokens;
        bool is_last_head = unit.head + 1 == args.num_kv_heads;
        if (is_decode(unit)) {
            unit.head = is_last_head ? 0 : unit.head + 1;
            if (!is_last_head) return unit;
            return is_last_tile ? first_of_row(unit.row + 1) : at_tile(unit, unit.start + KEYS_AT_ONCE);
        }
        if (!is_last_tile) return at_tile(unit, unit.start + KEYS_AT_ONCE);
        int64_t token = unit.token + unit.tokens;
        if (token < num_tokens(unit.row)) return first_of_tokens(unit.row, unit.head, token);
        return is_last_head ? first_of_row(unit.row + 1) : first_of_tokens(unit.row, unit.head + 1, 0);
    }

    bool is_decode(const Unit& unit) const { return num_tokens(unit.row) == 1; }

    // While a tile's keys and values are packed, the next unit's are fetched: the hardware cannot guess which blocks
    // follow. Packing the values late spreads the fetching over the whole unit.
    void attend(const Unit& unit, const Rows& rows, const Rows& rows_ahead) {
        // The heads of a decode are under way together, each in its part of the scratch memory.
        int64_t n = unit.tokens * group, columns = value_panels * PANEL, q = is_decode(unit) ? unit.head * group : 0;
        if (unit.start == first_tile(unit.position)) {
            take_queries(unit, q);
            memset(sums + q * columns, 0, n * columns * sizeof(float));
            for (int64_t i = q; i < q + n; i++) maxima[i] = NEVER, totals[i] = 0;
        }
        for (int64_t first = 0; first < unit.keys; first += PANEL)
            pack_panel<true>(rows.keys + first, rows_ahead.keys + first, words, key_panels + first * words);
        for (int64_t first = 0; first < unit.keys; first += PANEL)
            multiply_panel<T>(queries + q * words, words, n, key_panels + first * words, words, scores + first,
                              KEYS_AT_ONCE, nullptr);
        bool is_seen_by_all = unit.keys == KEYS_AT_ONCE && unit.start + unit.keys <= unit.position + 1 &&
                              unit.start >= first_seen(unit.position + unit.tokens - 1);
        if (is_seen_by_all)
            weigh<false>(unit, n, maxima + q, totals + q);
        else
            weigh<true>(unit, n, maxima + q, totals + q);
        int64_t steps = (unit.keys + PER_WORD - 1) / PER_WORD;
        for (int64_t step = 0; step < steps; step++)
            pack_values(rows.values + step * PER_WORD, rows_ahead.values + step * PER_WORD,
                        value_panel_words + step * PANEL);
        for (int64_t panel = 0; panel < value_panels; panel++)
            multiply_panel<T>(weights, KEYS_AT_ONCE / PER_WORD, n,
                              value_panel_words + panel * value_panel_size, steps,
                              sums + q * columns + panel * PANEL, columns, rescale);
        if (unit.start + unit.keys == unit.position + unit.tokens) give_results(unit, q);
    }

    void take_queries(const Unit& unit, int64_t q) {
        int64_t token = args.query_starts[unit.row] + unit.token, size = group * words;
        for (int64_t t = 0; t < unit.tokens; t++) {
            const T* source =
                (const T*)args.queries + (token + t) * args.query_stride + unit.head * group * args.head_dim;
            memcpy(queries + q * words + t * size, source, size * 4);
        }
    }

    void find_rows(const Unit& unit, Rows& rows) const {
        const int32_t* blocks = args.block_tables + unit.row * args.table_stride;
        for (int64_t done = 0; done < unit.keys;) {
            int64_t block = (unit.start + done) / args.block_size, offset = (unit.start + done) % args.block_size;
            int64_t count = args.block_size - offset;
            if (count > unit.keys - done) count = unit.keys - done;
            int64_t place = ((blocks[block] * args.num_kv_heads + unit.head) * args.block_size + offset) * words;
            for (int64_t i = 0; i < count; i++, done++, place += words) {
                rows.keys[done] = (const uint32_t*)args.keys + place;
                rows.values[done] = (const uint32_t*)args.values + place;
            }
        }
        for (int64_t i = unit.keys; i < KEYS_AT_ONCE; i++) rows.keys[i] = rows.values[i] = zeros;
    }

    // Bfloat16: word i of a panel is element 2i of both keys, word 16 + i element 2i + 1: no shuffle is needed here, and
    // none in `give_results`, which joins them again.
    void pack_values(const uint32_t* const* rows, const uint32_t* const* ahead, uint32_t* step_of_panel) const {
        const int64_t in_panel = PANEL / PER_WORD, num_words = words, whole = num_words - num_words % in_panel;
        const uint32_t *first = rows[0], *second = rows[PER_WORD - 1];
        for (int64_t word = 0; word < whole; word += in_panel, step_of_panel += value_panel_size) {
            for (int key = 0; key < PER_WORD; key++) __builtin_prefetch(ahead[key] + word, 0, 2);
#pragma GCC unroll 8
            for (int64_t i = 0; i < in_panel; i += W)
                store_pair(load_bits(first + word + i), load_bits(second + word + i), step_of_panel + i);
        }
        for (int64_t i = 0; whole < num_words && i < in_panel; i += W)
            store_pair(words_at(first, whole + i), words_at(second, whole + i), step_of_panel + i);
    }

    static void store_pair(vu a, vu b, uint32_t* out) {
        if constexpr (PER_WORD == 1) {
            store_bits(out, a);
        } else {
            store_bits(out, (a & 0xFFFF) | (b << 16));
            store_bits(out + PANEL / PER_WORD, (a >> 16) | (b & 0xFFFF0000));
        }
    }

    // Words of a row that ends within the vector, or before it, are followed by zeros.
    vu words_at(const uint32_t* row, int64_t word) const {
        if (word >= words) return vu{};
        return as_bits(load((const float*)row + word, words - word));
    }

    // Scores become weights; `rescale` is what the sums so far must be multiplied by.
    template <bool IS_MASKED>
    void weigh(const Unit& unit, int64_t n, float* maxima, float* totals) {
        const float to_log2 = args.scale * LOG2_E;
        const int64_t keys = IS_MASKED ? unit.keys : KEYS_AT_ONCE;
        for (int64_t q = 0; q < n; q++) {
            Seen seen = seen_by(unit, q);
            vf best = splat(NEVER);
            for (int64_t j = 0; j < keys; j += W) {
                vf s = load(scores + q * KEYS_AT_ONCE + j) * splat(to_log2);
                best = maximum(IS_MASKED ? (is_seen(seen, j) ? s : splat(NEVER)) : s, best);
            }
            float new_maximum = largest(best);
            if (!(new_maximum > maxima[q])) new_maximum = maxima[q];
            rescale[q] = maxima[q] - new_maximum;
            maxima[q] = new_maximum;
        }
        for (int64_t q = 0; q < n; q += W) store(rescale + q, exp2(load(rescale + q)));
        for (int64_t q = 0; q < n; q++) {
            Seen seen = seen_by(unit, q);
            vf total = {};
            T* row = (T*)(weights + q * KEYS_AT_ONCE / PER_WORD);
            for (int64_t j = 0; j < keys; j += W) {
                vf s = load(scores + q * KEYS_AT_ONCE + j);
                vf p = rounded<T>(exp2(fma(s, splat(to_log2), splat(-maxima[q]))));
                if (IS_MASKED) p = is_seen(seen, j) ? p : vf{};
                total = total + p;
                store(row + j, p);
            }
            totals[q] = totals[q] * rescale[q] + sum(total);
        }
    }

    struct Seen {
        int32_t begin, end;
    };

    // Which keys of the tile a query sees.
    Seen seen_by(const Unit& unit, int64_t q) const {
        int64_t at = unit.position + q / group;
        int64_t begin = first_seen(at) - unit.start, end_key = at + 1 - unit.start;
        return {(int32_t)(begin > 0 ? begin : 0), (int32_t)(end_key < unit.keys ? end_key : unit.keys)};
    }

    static vi is_seen(Seen seen, int64_t j) {
        vi key = lane_numbers() + (int32_t)j;
        return (key >= seen.begin) & (key < seen.end);
    }

    void give_results(const Unit& unit, int64_t first) {
        int64_t token = args.query_starts[unit.row] + unit.token;
        for (int64_t q = 0; q < unit.tokens * group; q++) {
            int64_t head = (token + q / group) * args.num_heads + unit.head * group + q % group;
            T* out = (T*)args.out + head * args.head_dim;
            const float* row = sums + (first + q) * value_panels * PANEL;
            vf factor = splat(1.0f / totals[first + q]);
            if constexpr (PER_WORD == 1) {
                for (int64_t d = 0; d < args.head_dim; d += W)
                    store(out + d, load(row + d) * factor, args.head_dim - d);
            } else {
                for (int64_t word = 0; word < words; word += W) {
                    const float* even = row + word / 16 * PANEL + word % 16;
                    vu low = __builtin_convertvector(narrow(load(even) * factor), vu);
                    vu high = __builtin_convertvector(narrow(load(even + 16) * factor), vu);
                    store((float*)out + word, as_float(low | (high << 16)), words - word);
                }
            }
        }
    }
};

}  // namespace STAGELINE_VARIANT
