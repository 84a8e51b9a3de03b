// Attention over a paged cache, reading the block table directly; decodes and chunks of prompts are one case.
//
// One idea: for one row of the batch and one key head, the queries of some tokens and of all heads that share the key
// head are the rows of a matrix. Scores and weighted values are its products with tiles of the cache, which lie there as
// products read them (cached_product.h), joined by an online softmax. Tiles begin at multiples of KEYS_AT_ONCE, and one
// that a query may not see leaves it exactly unchanged: a token's result depends neither on the batch nor on the chunk.
//
// Source: FlashAttention-2 (arXiv 2307.08691) for the softmax.
#pragma once
#include "cached_product.h"

namespace STAGELINE_VARIANT {

constexpr int KEYS_AT_ONCE = 64;
constexpr int GROUPS_AT_ONCE = KEYS_AT_ONCE / GROUP;
constexpr int MAX_QUERIES_AT_ONCE = 42;  // three full tiles of rows
constexpr int MAX_LATENT_QUERIES_AT_ONCE = 128;  // more, as each tile is packed first
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
    float cap;           // scaled scores become cap * tanh(score / cap); 0 for none
    const float* sinks;  // [num_heads] a score that each head gives to nothing; null for none
    bool is_latent;      // keys are values too (the same memory), one token behind the other as [block_size][head_dim]
};

template <class T>
class Attention {
   public:
    static constexpr int PER_WORD = 4 / sizeof(T);
    static constexpr uint32_t ONES = PER_WORD == 1 ? 0x3F800000 : 0x3F803F80;  // a word of ones

    explicit Attention(const AttentionArguments& arguments) : args(arguments) {
        group = args.num_heads / args.num_kv_heads;
        const int64_t most = args.is_latent ? MAX_LATENT_QUERIES_AT_ONCE : MAX_QUERIES_AT_ONCE;
        tokens_at_once = group < most ? most / group : 1;
        words = args.head_dim / PER_WORD;
        lies_in_groups = !args.is_latent && is_in_groups(args.block_size, args.head_dim);
        columns = (args.head_dim + GROUP - 1) / GROUP * GROUP;
        lay_out((char*)args.scratch);
    }

    // Bytes of scratch that `lay_out` hands out.
    int64_t scratch_bytes() { return (char*)end - (char*)args.scratch; }

    void run() {
        Unit unit = first_of_row(0);
        lies_in_groups ? attend_in_place(unit) : attend_packed(unit);
    }

   private:
    // One tile of keys under the queries of some tokens of one row of the batch, for one key head.
    struct Unit {
        int64_t row, head;
        int64_t token, tokens;  // in the row
        int64_t position;       // of the first of these tokens
        int64_t start, keys;    // the tile
    };

    // Where the groups of a unit's tile lie. There are always GROUPS_AT_ONCE, the last of them several times if need be.
    struct Tile {
        const uint32_t *keys[GROUPS_AT_ONCE], *values[GROUPS_AT_ONCE];
    };

    // A unit fetches as many groups of the next as it has; what the next has more is fetched here.
    void attend_in_place(Unit unit) {
        Tile tile, ahead;
        if (unit.row < args.num_rows) {
            find(unit, tile);
            fetch(tile, 0, num_groups(unit));
        }
        while (unit.row < args.num_rows) {
            Unit next = after(unit);
            find(next.row < args.num_rows ? next : unit, ahead);
            if (next.row < args.num_rows) fetch(ahead, num_groups(unit), num_groups(next));
            attend(unit, tile, ahead);
            unit = next;
            tile = ahead;
        }
    }

    static int64_t num_groups(const Unit& unit) { return (unit.keys + GROUP - 1) / GROUP; }

    void fetch(const Tile& tile, int64_t begin, int64_t end) const {
        for (int64_t group = begin; group < end; group++)
            for (int64_t i = 0; i < words; i++) {
                __builtin_prefetch(tile.keys[group] + i * args.block_size, 0, 2);
                __builtin_prefetch(tile.values[group] + i * GROUP, 0, 2);
            }
    }

    void attend_packed(Unit unit) {
        memset(zeros, 0, words * 4);
        for (; unit.row < args.num_rows; unit = after(unit)) {
            Tile tile = pack(unit);
            attend(unit, tile, tile);
        }
    }

    AttentionArguments args;
    int64_t group, tokens_at_once, words, columns;  // columns: head_dim, up to a whole group
    bool lies_in_groups;
    uint32_t *queries, *packed_keys, *packed_values, *weights, *zeros, *end;
    float *scores, *sums, *maxima, *rescale, *totals;  // totals: a vector for each query

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
        packed_keys = take<uint32_t>(cursor, KEYS_AT_ONCE * words);
        packed_values = take<uint32_t>(cursor, KEYS_AT_ONCE / PER_WORD * columns);
        weights = take<uint32_t>(cursor, n * KEYS_AT_ONCE / PER_WORD);
        zeros = take<uint32_t>(cursor, words);
        scores = take<float>(cursor, n * KEYS_AT_ONCE);
        sums = take<float>(cursor, n * columns);
        maxima = take<float>(cursor, n);
        totals = take<float>(cursor, n * W);
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

    void attend(const Unit& unit, const Tile& tile, const Tile& ahead) {
        // The heads of a decode are under way together, each in its part of the scratch memory.
        int64_t n = unit.tokens * group, q = is_decode(unit) ? unit.head * group : 0;
        if (unit.start == first_tile(unit.position)) {
            take_queries(unit, q);
            memset(sums + q * columns, 0, n * columns * sizeof(float));
            for (int64_t i = q; i < q + n; i++) maxima[i] = NEVER;
            memset(totals + q * W, 0, n * W * sizeof(float));
        }
        CachedTile keys = {tile.keys, ahead.keys, args.block_size, words, num_groups(unit) * GROUP};
        CachedTile values = {tile.values, ahead.values, columns, (unit.keys + PER_WORD - 1) / PER_WORD, columns};
        if (!lies_in_groups) keys.stride = PANEL;
        multiply_rows<T, Groups::OF_COLUMNS>(queries + q * words, words, n, keys, scores, KEYS_AT_ONCE, nullptr);
        if (args.cap > 0) cap_scores(n * KEYS_AT_ONCE);
        bool is_seen_by_all = unit.keys == KEYS_AT_ONCE && unit.start + unit.keys <= unit.position + 1 &&
                              unit.start >= first_seen(unit.position + unit.tokens - 1);
        if (is_seen_by_all)
            weigh<false>(unit, n, maxima + q, totals + q * W);
        else
            weigh<true>(unit, n, maxima + q, totals + q * W);
        multiply_rows<T, Groups::OF_STEPS>(weights, KEYS_AT_ONCE / PER_WORD, n, values, sums + q * columns, columns,
                                           rescale);
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

    const int32_t* blocks_of(const Unit& unit) const { return args.block_tables + unit.row * args.table_stride; }

    // The words of the unit's key head in a block.
    int64_t block_words(const Unit& unit, int64_t block) const {
        return (blocks_of(unit)[block] * args.num_kv_heads + unit.head) * args.block_size * words;
    }

    void find(const Unit& unit, Tile& tile) const {
        int64_t last = num_groups(unit) - 1;
        for (int64_t g = 0; g < GROUPS_AT_ONCE; g++) {
            int64_t key = unit.start + (g < last ? g : last) * GROUP;
            int64_t block = key / args.block_size, offset = key % args.block_size, place = block_words(unit, block);
            tile.keys[g] = (const uint32_t*)args.keys + place + offset;
            tile.values[g] = (const uint32_t*)args.values + place + offset * words;
        }
    }

    // Copies a tile of a cache whose blocks are no whole groups; zeros come after its last key.
    Tile pack(const Unit& unit) const {
        const uint32_t *keys[KEYS_AT_ONCE], *values[KEYS_AT_ONCE];
        for (int64_t i = 0; i < KEYS_AT_ONCE; i++) {
            int64_t key = unit.start + i;
            keys[i] = values[i] = zeros;
            if (i >= unit.keys) continue;
            int64_t place = block_words(unit, key / args.block_size) + key % args.block_size * words;
            keys[i] = (const uint32_t*)args.keys + place;
            values[i] = (const uint32_t*)args.values + place;
        }
        for (int64_t first = 0; first < unit.keys; first += PANEL)
            pack_panel(keys + first, words, packed_keys + first * words);
        for (int64_t i = 0; i < unit.keys; i += PER_WORD)
            pack_values(values + i, packed_values + i / PER_WORD * columns);
        Tile tile;
        for (int64_t g = 0; g < GROUPS_AT_ONCE; g++) {
            tile.keys[g] = packed_keys + g * GROUP / PANEL * PANEL * words + g * GROUP % PANEL;
            tile.values[g] = packed_values + g * GROUP / PER_WORD * columns;
        }
        return tile;
    }

    void pack_values(const uint32_t* const* rows, uint32_t* step) const {
        for (int64_t word = 0; word < columns / PER_WORD; word += W, step += W * PER_WORD) {
            vu a = words_at(rows[0], word);
            if constexpr (PER_WORD == 1) {
                store_bits(step, a);
            } else {
                vu b = words_at(rows[1], word), even = (a & 0xFFFF) | (b << 16), odd = (a >> 16) | (b & 0xFFFF0000);
                store_bits(step, interleave_low(even, odd));
                if (word + W / 2 < columns / PER_WORD) store_bits(step + W, interleave_high(even, odd));
            }
        }
    }

    // Words of a row that ends within the vector are followed by zeros.
    vu words_at(const uint32_t* row, int64_t word) const {
        return word < words ? as_bits(load((const float*)row + word, words - word)) : vu{};
    }

    // They are not scaled yet, and are not afterwards.
    void cap_scores(int64_t count) {
        const vf to_tanh = splat(args.scale / args.cap), from_tanh = splat(args.cap / args.scale);
        for (int64_t i = 0; i < count; i += W) store(scores + i, tanh(load(scores + i) * to_tanh) * from_tanh);
    }

    // Of a head's weights, relative to the largest score, before any key: what its sink takes.
    float sink_weight(int64_t head, float maximum) const {
        if (!args.sinks) return 0;
        return exp2(splat((args.sinks[head] - maximum * args.scale) * LOG2_E))[0];
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
                vf s = load(scores + q * KEYS_AT_ONCE + j);
                best = maximum(IS_MASKED ? (is_seen(seen, j) ? s : splat(NEVER)) : s, best);
            }
            rescale[q] = 0;
            if (!is_any(best > splat(maxima[q]))) continue;
            float new_maximum = largest(best);
            rescale[q] = (maxima[q] - new_maximum) * to_log2;
            maxima[q] = new_maximum;
        }
        for (int64_t q = 0; q < n; q += W) store(rescale + q, exp2(load(rescale + q)));
        for (int64_t q = 0; q < n; q++) {
            Seen seen = seen_by(unit, q);
            vf total = load(totals + q * W) * splat(rescale[q]), offset = splat(maxima[q] * -to_log2);
            for (int64_t j = 0; j < keys; j += W * PER_WORD) {
                vf p[PER_WORD];
                for (int i = 0; i < PER_WORD; i++) {
                    p[i] = exp2(fma(load(scores + q * KEYS_AT_ONCE + j + i * W), splat(to_log2), offset));
                    if (IS_MASKED) p[i] = is_seen(seen, j + i * W) ? p[i] : vf{};
                }
                vu words = in_words(p);
                store_bits(weights + (q * KEYS_AT_ONCE + j) / PER_WORD, words);
                total = dot<T>(total, splat_bits(ONES), words);
            }
            store(totals + q * W, total);
        }
    }

    static vu in_words(const vf (&p)[PER_WORD]) {
        if constexpr (PER_WORD == 1)
            return as_bits(p[0]);
        else
            return narrow(p[0], p[1]);
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
            int64_t head = unit.head * group + q % group;
            T* out = (T*)args.out + ((token + q / group) * args.num_heads + head) * args.head_dim;
            const float* row = sums + (first + q) * columns;
            vf factor = splat(1.0f / (sum(load(totals + (first + q) * W)) + sink_weight(head, maxima[first + q])));
            for (int64_t d = 0; d < args.head_dim; d += W) store(out + d, load(row + d) * factor, args.head_dim - d);
        }
    }
};

}  // namespace STAGELINE_VARIANT
