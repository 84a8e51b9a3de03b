// What is done to each row by itself: norm, activation, rotation with the store into the cache, the largest logits.
#pragma once
#include "cache_layout.h"

namespace STAGELINE_VARIANT {

// total = x + residual (if any); out = round(total / rms(total)) * weight. Rounded to T after each of the three.
template <class T>
static void rms_norm(const T* x, const T* residual, const T* weight, T* total, T* out, int64_t rows, int64_t size,
                     float eps) {
    for (int64_t r = 0; r < rows; r++, x += size, out += size) {
        vf squares[4] = {};
        const T* sum_row = x;
        if (residual) {
            for (int64_t c = 0; c < size; c += W)
                store(total + c, load(x + c, size - c) + load(residual + c, size - c), size - c);
            sum_row = total;
            residual += size;
            total += size;
        }
        for (int64_t c = 0, i = 0; c < size; c += W, i = (i + 1) % 4) {
            vf wide = load(sum_row + c, size - c);
            squares[i] = fma(wide, wide, squares[i]);
        }
        float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size;
        vf inverse_rms = splat(1.0f / __builtin_sqrtf(mean + eps));
        for (int64_t c = 0; c < size; c += W)
            store(out + c, rounded<T>(load(sum_row + c, size - c) * inverse_rms) * load(weight + c, size - c), size - c);
    }
}

// total = x + residual, rounded to T.
template <class T>
static void add(const T* x, const T* residual, T* total, int64_t count) {
    for (int64_t c = 0; c < count; c += W) store(total + c, load(x + c, count - c) + load(residual + c, count - c), count - c);
}

// In place, rounded to T.
template <class T>
static void scale(T* x, int64_t count, float factor) {
    for (int64_t c = 0; c < count; c += W) store(x + c, load(x + c, count - c) * splat(factor), count - c);
}

// Parts of a row one behind the other, each with a norm of its own but the same weight: out = round(x / rms(x)) * weight.
template <class T>
INLINE void normalize_parts(T* x, const T* weight, int64_t parts, int64_t size, float eps) {
    for (int64_t p = 0; p < parts; p++, x += size) rms_norm<T>(x, nullptr, weight, nullptr, x, 1, size, eps);
}

struct NormalizeArguments {
    void* heads;
    const void* query_weight;
    const void* key_weight;
    int64_t num_tokens;
    int64_t row_size;
    int64_t query_parts, query_size;
    int64_t key_parts, key_size;
    float eps;
};

// The queries and keys of each row, in place; what comes behind them is left alone.
template <class T>
static void normalize_heads(const NormalizeArguments& args) {
    for (int64_t t = 0; t < args.num_tokens; t++) {
        T* row = (T*)args.heads + t * args.row_size;
        normalize_parts(row, (const T*)args.query_weight, args.query_parts, args.query_size, args.eps);
        normalize_parts(row + args.query_parts * args.query_size, (const T*)args.key_weight, args.key_parts,
                        args.key_size, args.eps);
    }
}

template <class T>
static void activate_and_mul(const T* gate_up, T* out, int64_t rows, int64_t size, bool is_gelu) {
    for (int64_t r = 0; r < rows; r++, gate_up += 2 * size, out += size)
        for (int64_t c = 0; c < size; c += W) {
            vf gate = load(gate_up + c, size - c), up = load(gate_up + size + c, size - c);
            store(out + c, rounded<T>(activated(gate, is_gelu)) * up, size - c);
        }
}

// Pairs (i, i + half) of one head turned by its angle; each product and the sum rounded to T.
template <class T>
INLINE void rotate_head(const T* x, const T* cosine, const T* sine, T* out, int64_t half) {
    for (int64_t i = 0; i < half; i += W) {
        int64_t n = half - i;
        vf a = load(x + i, n), b = load(x + half + i, n), c = load(cosine + i, n), s = load(sine + i, n);
        store(out + i, rounded<T>(a * c) - rounded<T>(b * s), n);
        store(out + half + i, rounded<T>(b * c) + rounded<T>(a * s), n);
    }
}

INLINE float largest_finite(const float*) { return 3.40282347e38f; }
INLINE float largest_finite(const bf16*) { return 3.38953139e38f; }

// A hidden key has a weight of zero, and zero times infinity is NaN: one token's overflow would reach others.
template <class T>
INLINE void make_finite(T* values, int64_t size) {
    const vf limit = splat(largest_finite(values));
    for (int64_t i = 0; i < size; i += W) {
        vf x = load(values + i, size - i);
        x = x > limit ? limit : x;
        x = x < -limit ? -limit : x;
        store(values + i, x == x ? x : vf{}, size - i);
    }
}

struct RotateArguments {
    void* heads;
    const void* cosine;
    const void* sine;
    const int64_t* positions;
    const int64_t* slots;
    void* keys;
    void* values;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t half;  // pairs of a head that are rotated: (i, i + half)
};

// Queries and keys are rotated in place, and values made finite; keys and values go into the cache. Without a cosine
// nothing is rotated.
template <class T>
static void rotate_and_store(const RotateArguments& args) {
    int64_t d = args.head_dim, half = args.half, heads_per_token = args.num_heads + 2 * args.num_kv_heads;
    for (int64_t t = 0; t < args.num_tokens; t++) {
        T* heads = (T*)args.heads + t * heads_per_token * d;
        if (args.cosine) {
            const T* cosine = (const T*)args.cosine + args.positions[t] * half;
            const T* sine = (const T*)args.sine + args.positions[t] * half;
            for (int64_t h = 0; h < args.num_heads + args.num_kv_heads; h++)
                rotate_head(heads + h * d, cosine, sine, heads + h * d, half);
        }
        int64_t block = args.slots[t] / args.block_size, offset = args.slots[t] % args.block_size;
        for (int64_t h = 0; h < args.num_kv_heads; h++) {
            T* key = heads + (args.num_heads + h) * d;
            T* value = key + args.num_kv_heads * d;
            make_finite(value, d);
            CacheBlock<T>(args.keys, block, h, args.num_kv_heads, args.block_size, d).put_key(offset, key);
            CacheBlock<T>(args.values, block, h, args.num_kv_heads, args.block_size, d).put_value(offset, value);
        }
    }
}

constexpr int64_t CHUNK = 2048;

// NaN if there is one.
template <class T>
static float largest_of_chunk(const T* x, int64_t size) {
    vf best[4];
    for (vf& lanes : best) lanes = splat(-__builtin_inff());
    vi has_nan = {};
    int64_t c = 0;
    for (; c + 4 * W <= size; c += 4 * W)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            vf value = load(x + c + i * W);
            best[i] = maximum(value, best[i]);
            has_nan |= value != value;
        }
    for (; c < size; c++) {
        vf value = splat(load(x + c, 1)[0]);
        best[0] = maximum(value, best[0]);
        has_nan |= value != value;
    }
    return is_any(has_nan) ? __builtin_nanf("")
                           : largest(maximum(maximum(best[0], best[1]), maximum(best[2], best[3])));
}

// The first place of a value that is there; NaN equals NaN.
template <class T>
static int64_t first_equal(const T* x, int64_t size, float wanted) {
    for (int64_t c = 0; c < size; c += W) {
        vf value = load(x + c, size - c);
        vi is_equal = wanted == wanted ? value == splat(wanted) : value != value;
        if (!is_any(is_equal)) continue;
        for (int64_t lane = 0; lane < W && c + lane < size; lane++)
            if (is_equal[lane]) return c + lane;
    }
    return 0;
}

// The place of the largest element; of equals the first. A NaN is larger than everything, as in torch. One pass remembers
// in which chunk the largest was met first; then only that chunk is looked through.
template <class T>
static void argmax(const T* x, int64_t* out, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; r++, x += size) {
        int64_t best_chunk = 0;
        float best = -__builtin_inff();
        for (int64_t c = 0; c < size && best == best; c += CHUNK) {
            float top = largest_of_chunk(x + c, size - c < CHUNK ? size - c : CHUNK);
            if (!(top <= best)) best = top, best_chunk = c;
        }
        int64_t end = size - best_chunk < CHUNK ? size - best_chunk : CHUNK;
        out[r] = best_chunk + first_equal(x + best_chunk, end, best);
    }
}

struct Leading {
    float value;
    int32_t id;
};

INLINE bool is_behind(Leading a, Leading b) { return a.value < b.value || (a.value == b.value && a.id > b.id); }

// A heap whose root stands behind all others.
INLINE void sink(Leading* heap, int64_t size, int64_t at) {
    Leading moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && is_behind(heap[child + 1], heap[child])) child++;
        if (!is_behind(heap[child], moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

INLINE void offer(Leading* heap, int64_t k, const float* x, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++)
        if (x[c] > heap[0].value) {
            heap[0] = {x[c], (int32_t)c};
            sink(heap, k, 0);
        }
}

// The k largest, largest first, equals by rising place. One pass, beside which a heap of k is kept in `heap`.
static void top_k(const float* x, float* values, int64_t* ids, Leading* heap, int64_t rows, int64_t size, int64_t k) {
    for (int64_t r = 0; r < rows; r++, x += size, values += k, ids += k) {
        for (int64_t c = 0; c < k; c++) heap[c] = {x[c], (int32_t)c};
        for (int64_t at = k / 2; at-- > 0;) sink(heap, k, at);
        int64_t c = k;
        for (; c + 4 * W <= size; c += 4 * W) {
            const vf last = splat(heap[0].value);
            vi is_above = {};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) is_above |= load(x + c + i * W) > last;
            if (is_any(is_above)) offer(heap, k, x, c, c + 4 * W);
        }
        offer(heap, k, x, c, size);
        for (int64_t left = k; left-- > 0;) {
            values[left] = heap[0].value;
            ids[left] = heap[0].id;
            heap[0] = heap[left];
            sink(heap, left, 0);
        }
    }
}

}  // namespace STAGELINE_VARIANT
