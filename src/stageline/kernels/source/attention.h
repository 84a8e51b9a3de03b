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
constexpr int MAX_QUERIES_AT_ONCE = 168;
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

    explicit Attention(const AttentionArguments& arguments) : args(arguments) {
        group = args.num_heads / args.num_kv_heads;
        tokens_at_once = group < MAX_QUERIES_AT_ONCE ? MAX_QUERIES_AT_ONCE / group : 1;
        num_queries_at_once = tokens_at_once * group;
        words = args.head_dim / PER_WORD;
        value_panels = (args.head_dim + PANEL - 1) / PANEL;
        lay_out((char*)args.scratch);
    }

    // Bytes of scratch that `lay_out` hands out.
    int64_t scratch_bytes() { return (char*)end - (char*)args.scratch; }

    void run() {
        memset(zeros, 0, words * 4);
        for (int64_t row = 0; row < args.num_rows; row++) {
            int64_t first = args.query_starts[row], tokens = args.query_starts[row + 1] - first;
            int64_t position = args.context_lens[row] - tokens;
            for (int64_t head = 0; head < args.num_kv_heads; head++)
                for (int64_t t = 0; t < tokens; t += tokens_at_once) {
                    int64_t count = tokens - t < tokens_at_once ? tokens - t : tokens_at_once;
                    attend(row, head, first + t, count, position + t);
                }
        }
    }

   private:
    AttentionArguments args;
    int64_t group, tokens_at_once, num_queries_at_once, words, value_panels;
    uint32_t *queries, *key_panels, *value_panel_words, *weights, *zeros, *end;
    float *scores, *sums, *maxima, *totals, *rescale;

    template <class P>
    static P* take(char*& cursor, int64_t count) {
        P* taken = (P*)cursor;
        cursor += (count * sizeof(P) + 63) / 64 * 64;
        return taken;
    }

    void lay_out(char* cursor) {
        int64_t n = num_queries_at_once;
        queries = take<uint32_t>(cursor, n * words);
        key_panels = take<uint32_t>(cursor, KEYS_AT_ONCE * words);
        value_panel_words = take<uint32_t>(cursor, value_panels * KEYS_AT_ONCE / PER_WORD * PANEL);
        weights = take<uint32_t>(cursor, n * KEYS_AT_ONCE / PER_WORD);
        zeros = take<uint32_t>(cursor, words);
        scores = take<float>(cursor, n * KEYS_AT_ONCE);
        sums = take<float>(cursor, n * value_panels * PANEL);
        maxima = take<float>(cursor, n + W);
        totals = take<float>(cursor, n + W);
        rescale = take<float>(cursor, n + W);
        end = (uint32_t*)cursor;
    }

    int64_t first_seen(int64_t position) const {
        int64_t first = args.sliding_window > 0 ? position - args.sliding_window + 1 : 0;
        return first > 0 ? first : 0;
    }

    void attend(int64_t row, int64_t head, int64_t token, int64_t tokens, int64_t position) {
        int64_t n = tokens * group, columns = value_panels * PANEL, num_keys = position + tokens;
        take_queries(head, token, tokens);
        memset(sums, 0, n * columns * sizeof(float));
        for (int64_t q = 0; q < n; q++) maxima[q] = NEVER, totals[q] = 0;
        for (int64_t start = first_seen(position) / KEYS_AT_ONCE * KEYS_AT_ONCE; start < num_keys; start += KEYS_AT_ONCE) {
            int64_t keys = num_keys - start < KEYS_AT_ONCE ? num_keys - start : KEYS_AT_ONCE;
            if (tokens == 1) prefetch(row, head, start + KEYS_AT_ONCE, num_keys);
            pack(row, head, start, keys);
            for (int64_t first = 0; first < keys; first += PANEL)
                multiply_panel<T>(queries, words, n, key_panels + first * words, words, scores + first, KEYS_AT_ONCE,
                                  nullptr);
            bool is_seen_by_all = start >= first_seen(position + tokens - 1) && start + keys <= position + 1;
            if (is_seen_by_all && keys == KEYS_AT_ONCE)
                weigh<false>(n, start, keys, position);
            else
                weigh<true>(n, start, keys, position);
            int64_t steps = (keys + PER_WORD - 1) / PER_WORD;
            for (int64_t panel = 0; panel < value_panels; panel++)
                multiply_panel<T>(weights, KEYS_AT_ONCE / PER_WORD, n,
                                  value_panel_words + panel * KEYS_AT_ONCE / PER_WORD * PANEL, steps,
                                  sums + panel * PANEL, columns, rescale);
        }
        give_results(head, token, tokens);
    }

    void take_queries(int64_t head, int64_t token, int64_t tokens) {
        for (int64_t t = 0; t < tokens; t++) {
            const T* source = (const T*)args.queries + (token + t) * args.query_stride + head * group * args.head_dim;
            memcpy(queries + t * group * words, source, group * words * 4);
        }
    }

    const uint32_t* run_of(const void* cache, int64_t row, int64_t head, int64_t key) const {
        int64_t block = args.block_tables[row * args.table_stride + key / args.block_size];
        return (const uint32_t*)cache +
               ((block * args.num_kv_heads + head) * args.block_size + key % args.block_size) * words;
    }

    void prefetch(int64_t row, int64_t head, int64_t start, int64_t end_key) const {
        if (end_key > start + KEYS_AT_ONCE) end_key = start + KEYS_AT_ONCE;
        for (int64_t key = start; key < end_key;) {
            int64_t count = args.block_size - key % args.block_size;
            if (count > end_key - key) count = end_key - key;
            const char* k = (const char*)run_of(args.keys, row, head, key);
            const char* v = (const char*)run_of(args.values, row, head, key);
            for (int64_t byte = 0; byte < count * words * 4; byte += 64) {
                __builtin_prefetch(k + byte, 0, 2);
                __builtin_prefetch(v + byte, 0, 2);
            }
            key += count;
        }
    }

    // Keys start..start + keys as panels for the scores, and their values as panels for the weighted sums.
    void pack(int64_t row, int64_t head, int64_t start, int64_t keys) {
        const uint32_t *key_rows[KEYS_AT_ONCE], *value_rows[KEYS_AT_ONCE];
        for (int64_t done = 0; done < keys;) {
            int64_t count = args.block_size - (start + done) % args.block_size;
            if (count > keys - done) count = keys - done;
            const uint32_t* k = run_of(args.keys, row, head, start + done);
            const uint32_t* v = run_of(args.values, row, head, start + done);
            for (int64_t i = 0; i < count; i++) {
                key_rows[done + i] = k + i * words;
                value_rows[done + i] = v + i * words;
            }
            done += count;
        }
        for (int64_t i = keys; i < KEYS_AT_ONCE; i++) key_rows[i] = value_rows[i] = zeros;
        for (int64_t first = 0; first < keys; first += PANEL)
            pack_panel(*(const uint32_t* const (*)[PANEL])(key_rows + first), words, key_panels + first * words);
        for (int64_t step = 0; step * PER_WORD < keys; step++)
            pack_values(value_rows + step * PER_WORD, value_panel_words + step * PANEL);
    }

    // Bfloat16: word i of a panel is element 2i of both keys, word 16 + i element 2i + 1: no shuffle is needed here, and
    // none in `give_results`, which joins them again.
    void pack_values(const uint32_t* const* rows, uint32_t* step_of_panel) {
        int64_t stride = KEYS_AT_ONCE / PER_WORD * PANEL, words_per_panel = PANEL / PER_WORD;
        for (int64_t panel = 0; panel < value_panels; panel++, step_of_panel += stride)
            for (int64_t i = 0; i < words_per_panel; i += W) {
                int64_t word = panel * words_per_panel + i;
                vu a = words_at(rows[0], word);
                if constexpr (PER_WORD == 1) {
                    store_bits(step_of_panel + i, a);
                } else {
                    vu b = words_at(rows[1], word);
                    store_bits(step_of_panel + i, (a & 0xFFFF) | (b << 16));
                    store_bits(step_of_panel + words_per_panel + i, (a >> 16) | (b & 0xFFFF0000));
                }
            }
    }

    // Words of a row that ends within the vector, or before it, are followed by zeros.
    vu words_at(const uint32_t* row, int64_t word) const {
        if (word >= words) return vu{};
        return as_bits(load((const float*)row + word, words - word));
    }

    // Scores become weights; `rescale` is what the sums so far must be multiplied by.
    template <bool IS_MASKED>
    void weigh(int64_t n, int64_t start, int64_t keys, int64_t position) {
        const float to_log2 = args.scale * LOG2_E;
        for (int64_t q = 0; q < n; q++) {
            Seen seen = seen_by(q, start, keys, position);
            float best = NEVER;
            if (!IS_MASKED || seen.begin < seen.end) {
                vf vector_best = splat(NEVER);
                for (int64_t j = 0; j < (IS_MASKED ? keys : KEYS_AT_ONCE); j += W) {
                    vf s = load(scores + q * KEYS_AT_ONCE + j) * splat(to_log2);
                    if (IS_MASKED) s = is_seen(seen, j) ? s : splat(NEVER);
                    vector_best = maximum(vector_best, s);
                }
                best = largest(vector_best);
            }
            float new_maximum = best > maxima[q] ? best : maxima[q];
            rescale[q] = maxima[q] - new_maximum;
            maxima[q] = new_maximum;
        }
        for (int64_t q = 0; q < n; q += W) store(rescale + q, exp2(load(rescale + q)));
        for (int64_t q = 0; q < n; q++) {
            Seen seen = seen_by(q, start, keys, position);
            vf total = {};
            T* row = (T*)(weights + q * KEYS_AT_ONCE / PER_WORD);
            for (int64_t j = 0; j < (IS_MASKED ? keys : KEYS_AT_ONCE); j += W) {
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
    Seen seen_by(int64_t q, int64_t start, int64_t keys, int64_t position) const {
        int64_t at = position + q / group;
        int64_t begin = first_seen(at) - start, end_key = at + 1 - start;
        return {(int32_t)(begin > 0 ? begin : 0), (int32_t)(end_key < keys ? end_key : keys)};
    }

    static vi is_seen(Seen seen, int64_t j) {
        vi key = lane_numbers() + (int32_t)j;
        return (key >= seen.begin) & (key < seen.end);
    }

    void give_results(int64_t head, int64_t token, int64_t tokens) {
        for (int64_t q = 0; q < tokens * group; q++) {
            T* out = (T*)args.out + ((token + q / group) * args.num_heads + head * group + q % group) * args.head_dim;
            const float* row = sums + q * value_panels * PANEL;
            vf factor = splat(1.0f / totals[q]);
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
