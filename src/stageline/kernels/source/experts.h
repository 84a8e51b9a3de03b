// A mixture of experts: each token is computed by a few of many gated MLPs, which a router chooses for it.
//
// One idea: rows are put in the order of their experts, so each chosen expert is two ordinary products (gemm.h) over
// consecutive rows, and no other expert's weights are read. A row's sums, and the order in which its experts' results
// are added up, do not depend on what other rows chose. Of experts that other ranks have, nothing is computed: a row's
// sum is then without them.
#pragma once
#include <atomic>

#include "gemm.h"
#include "quantized.h"

namespace STAGELINE_VARIANT {

constexpr int64_t MAX_EXPERTS = 1024;
constexpr int64_t COLUMNS_AT_ONCE = 128;  // of one expert, as a piece of work for a thread
constexpr int64_t ELSEWHERE = -1;         // the place of a row whose expert is not there

// The same for all calls of a layer; experts.py has the same fields. Own experts are those whose weights are there.
struct ExpertsPlan {
    const uint32_t* const* gate_up;  // [own] packed, the gate first; null if they stay quantised
    const uint32_t* const* down;     // [own] packed
    const QuantizedMatrix* quantized;  // [own][3] gate, up and down, or null
    const float* gate_up_bias;       // [own][2 size], the gate's first, or null
    const float* down_bias;          // [own][hidden] or null
    const float* selection_bias;     // [experts]; takes part in choosing only; or null
    int64_t num_experts, first_own, num_own, num_chosen, hidden, size;
    int64_t num_groups, num_chosen_groups, group_score_experts;
    int64_t is_sigmoid, normalizes, is_clamped;
    float weight_factor, alpha, limit;
};

// What a call works on between its steps; laid out in memory that the caller gives.
template <class T>
struct ExpertsScratch {
    int32_t* chosen;   // [tokens][num_chosen] experts
    float* weights;    // [tokens][num_chosen]
    int64_t* places;   // [tokens][num_chosen] where the rows stand when ordered by expert; ELSEWHERE
    int64_t* starts;   // [own + 1] first row of each
    int64_t* active;   // [own] those that have rows, counted from the first own one
    T* rows;           // [tokens * num_chosen][hidden]
    T* gated;          // [tokens * num_chosen][size]
    float* results;    // [tokens * num_chosen][hidden]
    int8_t* quants;    // [tokens * num_chosen][hidden or size, whichever is more], and what is known of their blocks
    BlockOfX* blocks;
    char* end;

    ExpertsScratch(const ExpertsPlan& plan, int64_t tokens, char* cursor) {
        const int64_t n = tokens * plan.num_chosen;
        rows = take<T>(cursor, n * plan.hidden);
        gated = take<T>(cursor, n * plan.size);
        results = take<float>(cursor, n * plan.hidden);
        chosen = take<int32_t>(cursor, n);
        weights = take<float>(cursor, n);
        places = take<int64_t>(cursor, n);
        starts = take<int64_t>(cursor, plan.num_own + 1);
        active = take<int64_t>(cursor, plan.num_own);
        const int64_t widest = plan.hidden > plan.size ? plan.hidden : plan.size;
        quants = take<int8_t>(cursor, plan.quantized ? n * widest : 0);
        blocks = take<BlockOfX>(cursor, plan.quantized ? n * (widest / BLOCK) : 0);
        end = cursor;
    }

   private:
    template <class P>
    static P* take(char*& cursor, int64_t count) {
        P* taken = (P*)cursor;
        cursor += (count * sizeof(P) + 63) / 64 * 64;
        return taken;
    }
};

INLINE vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp2(x * splat(-LOG2_E))); }

// Chooses a token's experts.
class ExpertChoice {
   public:
    explicit ExpertChoice(const ExpertsPlan& plan) : plan(plan) {}

    void choose(const float* logits, int32_t* chosen, float* weights) {
        score(logits);
        for (int64_t e = 0; e < plan.num_experts; e++)
            ranks[e] = plan.selection_bias ? scores[e] + plan.selection_bias[e] : scores[e];
        if (plan.num_chosen_groups < plan.num_groups) drop_groups();
        float total = 0;
        for (int64_t j = 0; j < plan.num_chosen; j++) {
            const int64_t best = take_best(ranks, 0, plan.num_experts);
            chosen[j] = (int32_t)best;
            weights[j] = scores[best];
            total += scores[best];
        }
        const float factor = plan.normalizes ? plan.weight_factor / (total + 1e-20f) : plan.weight_factor;
        for (int64_t j = 0; j < plan.num_chosen; j++) weights[j] *= factor;
    }

   private:
    const ExpertsPlan& plan;
    alignas(64) float scores[MAX_EXPERTS];
    float ranks[MAX_EXPERTS];
    float of_group[MAX_EXPERTS], group_scores[MAX_EXPERTS];
    static constexpr float TAKEN = -__builtin_inff();

    void score(const float* logits) {
        const int64_t n = plan.num_experts;
        if (plan.is_sigmoid) {
            for (int64_t e = 0; e < n; e += W) store(scores + e, sigmoid(load(logits + e, n - e)), n - e);
            return;
        }
        float most = logits[0], total = 0;
        for (int64_t e = 1; e < n; e++) most = logits[e] > most ? logits[e] : most;
        for (int64_t e = 0; e < n; e += W)
            store(scores + e, exp2((load(logits + e, n - e) - splat(most)) * splat(LOG2_E)), n - e);
        for (int64_t e = 0; e < n; e++) total += scores[e];
        for (int64_t e = 0; e < n; e++) scores[e] /= total;
    }

    // The place of the largest that was not taken, of equals the first; it is taken now.
    static int64_t take_best(float* values, int64_t begin, int64_t end) {
        int64_t best = begin;
        while (best + 1 < end && values[best] == TAKEN) best++;
        for (int64_t i = best + 1; i < end; i++)
            if (values[i] > values[best]) best = i;
        values[best] = TAKEN;
        return best;
    }

    // Takes all experts of the groups whose best experts score least.
    void drop_groups() {
        const int64_t size = plan.num_experts / plan.num_groups;
        for (int64_t g = 0; g < plan.num_groups; g++) {
            memcpy(of_group, ranks + g * size, size * sizeof(float));
            group_scores[g] = 0;
            for (int64_t j = 0; j < plan.group_score_experts; j++) {
                float best = TAKEN;
                int64_t place = 0;
                for (int64_t i = 0; i < size; i++)
                    if (of_group[i] > best) best = of_group[i], place = i;
                group_scores[g] += best;
                of_group[place] = TAKEN;
            }
        }
        bool is_kept[MAX_EXPERTS] = {};
        for (int64_t j = 0; j < plan.num_chosen_groups; j++) is_kept[take_best(group_scores, 0, plan.num_groups)] = true;
        for (int64_t e = 0; e < plan.num_experts; e++)
            if (!is_kept[e / size]) ranks[e] = TAKEN;
    }
};

// What a gate and its other half make: silu(gate) * up, or its clamped form with a sigmoid of its own gain.
INLINE vf joined(const ExpertsPlan& plan, vf gate, vf up) {
    if (!plan.is_clamped) return silu(gate) * up;
    const vf limit = splat(plan.limit);
    gate = minimum(gate, limit);
    up = minimum(maximum(up, -limit), limit);
    return gate * sigmoid(gate * splat(plan.alpha)) * (up + splat(1.0f));
}

// The first half of an expert.
template <class T>
struct ExpertGate {
    static constexpr int COLUMNS = GATED;
    const ExpertsPlan& plan;
    const float* bias;
    T* out;

    void operator()(int64_t row, int64_t column, const float* sums) const {
        for (int64_t c = 0, n = plan.size - column; c < GATED && c < n; c += W) {
            vf gate = load(sums + c), up = load(sums + GATED + c);
            if (bias) {
                gate = gate + load(bias + column + c, n - c);
                up = up + load(bias + plan.size + column + c, n - c);
            }
            store(out + row * plan.size + column + c, joined(plan, gate, up), n - c);
        }
    }
};

struct ExpertDown {
    static constexpr int COLUMNS = PANEL;
    const ExpertsPlan& plan;
    const float* bias;
    float* out;

    void operator()(int64_t row, int64_t column, const float* sums) const {
        for (int64_t c = 0, n = plan.hidden - column; c < PANEL && c < n; c += W) {
            vf y = load(sums + c);
            if (bias) y = y + load(bias + column + c, n - c);
            store(out + row * plan.hidden + column + c, y, n - c);
        }
    }
};

// x, shared, out: [tokens][hidden]. shared: added to the experts' sum, or null; shared_gate: [tokens], its sigmoid
// weights what is shared; or null.
template <class T>
class Experts {
   public:
    Experts(const ExpertsPlan& plan, const T* x, int64_t tokens, char* scratch, int threads)
        : plan(plan), x(x), tokens(tokens), threads(threads), scratch(plan, tokens, scratch) {}

    void run(const float* logits, const T* shared, const float* shared_gate, T* out) {
        choose(logits);
        order();
        if (plan.quantized)
            multiply_quantized();
        else
            multiply();
        for (int64_t t = 0; t < tokens; t++) combine(t, shared, shared_gate, out);
    }

   private:
    static constexpr int64_t PER_WORD = 4 / sizeof(T);
    const ExpertsPlan& plan;
    const T* x;
    int64_t tokens;
    int threads;
    ExpertsScratch<T> scratch;
    int64_t num_active = 0;

    void choose(const float* logits) {
        ExpertChoice choice(plan);
        for (int64_t t = 0; t < tokens; t++)
            choice.choose(logits + t * plan.num_experts, scratch.chosen + t * plan.num_chosen,
                          scratch.weights + t * plan.num_chosen);
    }

    void order() {
        const int64_t n = tokens * plan.num_chosen;
        int64_t* starts = scratch.starts;
        memset(starts, 0, (plan.num_own + 1) * sizeof(int64_t));
        for (int64_t i = 0; i < n; i++)
            if (is_own(i)) starts[own_expert(i) + 1]++;
        for (int64_t e = 0; e < plan.num_own; e++) {
            if (starts[e + 1]) scratch.active[num_active++] = e;
            starts[e + 1] += starts[e];
        }
        for (int64_t i = 0; i < n; i++) {
            scratch.places[i] = ELSEWHERE;
            if (!is_own(i)) continue;
            const int64_t place = scratch.places[i] = starts[own_expert(i)]++;
            memcpy(scratch.rows + place * plan.hidden, x + i / plan.num_chosen * plan.hidden, plan.hidden * sizeof(T));
        }
        for (int64_t e = plan.num_own; e > 0; e--) starts[e] = starts[e - 1];
        starts[0] = 0;
    }

    // Of a token's choice, counted from the first own expert.
    int64_t own_expert(int64_t i) const { return scratch.chosen[i] - plan.first_own; }
    bool is_own(int64_t i) const { return own_expert(i) >= 0 && own_expert(i) < plan.num_own; }

    void multiply() const {
        const int64_t hidden_steps = plan.hidden / PER_WORD, size_steps = plan.size / PER_WORD;
        const double bytes_per_column = plan.hidden * sizeof(T), bytes_per_result = plan.size * sizeof(T);
        for_each_piece(plan.size, GATED, 2 * bytes_per_column, [&](int64_t e, int64_t begin, int64_t end) {
            LinearArguments args = arguments(e, scratch.rows, plan.gate_up[e], plan.hidden, plan.size, hidden_steps);
            const float* bias = plan.gate_up_bias ? plan.gate_up_bias + e * 2 * plan.size : nullptr;
            linear<T>(args, ExpertGate<T>{plan, bias, scratch.gated + scratch.starts[e] * plan.size}, begin / GATED,
                      (end + GATED - 1) / GATED);
        });
        for_each_piece(plan.hidden, PANEL, bytes_per_result, [&](int64_t e, int64_t begin, int64_t end) {
            LinearArguments args = arguments(e, scratch.gated, plan.down[e], plan.size, plan.hidden, size_steps);
            const float* bias = plan.down_bias ? plan.down_bias + e * plan.hidden : nullptr;
            linear<T>(args, ExpertDown{plan, bias, scratch.results + scratch.starts[e] * plan.hidden}, begin / PANEL,
                      (end + PANEL - 1) / PANEL);
        });
    }

    // Rows are quantised once for each of the two products.
    void multiply_quantized() const {
        quantize(scratch.rows, plan.hidden);
        for_each_piece(plan.size, QUANTIZED_PANEL, 2.0 * plan.hidden, [&](int64_t e, int64_t begin, int64_t end) {
            const QuantizedMatrix* matrices = plan.quantized + 3 * e;
            const float* bias = plan.gate_up_bias ? plan.gate_up_bias + e * 2 * plan.size : nullptr;
            multiply_gated(matrices[0], matrices[1], Share(begin, end), bias, quantized_rows(e, plan.hidden),
                           scratch.gated + scratch.starts[e] * plan.size,
                           [&](vf gate, vf up) { return joined(plan, gate, up); });
        });
        quantize(scratch.gated, plan.size);
        for_each_piece(plan.hidden, QUANTIZED_PANEL, plan.size, [&](int64_t e, int64_t begin, int64_t end) {
            const float* bias = plan.down_bias ? plan.down_bias + e * plan.hidden : nullptr;
            multiply_matrix(plan.quantized[3 * e + 2], Share(begin, end), bias, quantized_rows(e, plan.size),
                            scratch.results + scratch.starts[e] * plan.hidden, plan.hidden);
        });
    }

    void quantize(const T* rows, int64_t columns) const {
        for (int64_t i = 0; i < num_active; i++) {
            const int64_t first = scratch.starts[scratch.active[i]], end = scratch.starts[scratch.active[i] + 1];
            quantize_rows(rows + first * columns, end - first, columns / BLOCK, scratch.quants + first * columns,
                          scratch.blocks + first * (columns / BLOCK));
        }
    }

    QuantizedRows quantized_rows(int64_t e, int64_t columns) const {
        const int64_t first = scratch.starts[e], blocks = columns / BLOCK;
        return {scratch.quants + first * columns, scratch.blocks + first * blocks, scratch.starts[e + 1] - first, blocks};
    }

    LinearArguments arguments(int64_t e, const T* rows, const uint32_t* packed, int64_t in_features,
                              int64_t out_features, int64_t steps) const {
        const int64_t first = scratch.starts[e];
        return {(const uint32_t*)(rows + first * in_features), packed, nullptr, nullptr, steps,
                scratch.starts[e + 1] - first, out_features, steps};
    }

    // Calls work(expert, begin, end) for all columns of the experts that have rows; threads take pieces as they come.
    // panel: columns that must not be parted. column_bytes: of weights.
    template <class Work>
    void for_each_piece(int64_t columns, int64_t panel, double column_bytes, const Work& work) const {
        const double bytes = columns * column_bytes, operations = scratch.starts[plan.num_own] * bytes;
        const int parts = worth_sharing(threads, num_active * bytes, operations, BF16_FLOPS_PER_S);
        const int64_t at_once = COLUMNS_AT_ONCE / panel * panel, per_expert = (columns + at_once - 1) / at_once;
        std::atomic<int64_t> next{0};
        Crew::run(parts, [&](int) {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_active * per_expert;) {
                const int64_t begin = i % per_expert * at_once, end = begin + at_once;
                work(scratch.active[i / per_expert], begin, end < columns ? end : columns);
            }
        });
    }

    // A token's results, weighted, in the order in which its experts were chosen. Sums without a result are zero.
    void combine(int64_t t, const T* shared, const float* shared_gate, T* out) const {
        const int64_t* places = scratch.places + t * plan.num_chosen;
        const float* weights = scratch.weights + t * plan.num_chosen;
        const vf share = shared_gate ? sigmoid(splat(shared_gate[t])) : splat(1.0f);
        for (int64_t c = 0; c < plan.hidden; c += W) {
            const int64_t n = plan.hidden - c;
            vf sum = {};
            for (int64_t j = 0; j < plan.num_chosen; j++)
                if (places[j] != ELSEWHERE)
                    sum = fma(load(scratch.results + places[j] * plan.hidden + c, n), splat(weights[j]), sum);
            if (shared) sum = fma(load(shared + t * plan.hidden + c, n), share, sum);
            store(out + t * plan.hidden + c, sum, n);
        }
    }
};

}  // namespace STAGELINE_VARIANT
