// Vectors of W floats, for whichever instruction set this file is compiled for.
//
// One idea: GCC's and Clang's vector extensions make the same source serve every width; only fused multiply-add and
// bfloat16's dot product and rounding are spelt per instruction set. Contraction is off (see build.py), so a rounding
// happens where it is written. Everything lives in a namespace per variant: the linker must not merge one variant's
// templates with another's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(STAGELINE_AVX512) || defined(STAGELINE_AVX2)
#include <immintrin.h>
#endif

namespace STAGELINE_VARIANT {

#if defined(STAGELINE_AVX512)
constexpr int W = 16;
constexpr int MAX_TILE_ROWS = 14;  // 28 of 32 registers are accumulators
#elif defined(STAGELINE_AVX2)
constexpr int W = 8;
constexpr int MAX_TILE_ROWS = 4;
#else
constexpr int W = 4;
constexpr int MAX_TILE_ROWS = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef vu vu_anywhere __attribute__((aligned(2), may_alias));
typedef vh vh_anywhere __attribute__((aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

#define INLINE static inline __attribute__((always_inline))

INLINE vf as_float(vu x) { return (vf)x; }
INLINE vu as_bits(vf x) { return (vu)x; }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vu splat_bits(uint32_t x) { return x - vu{}; }
// a > b ? a : b, so b if one of them is NaN.
INLINE vf maximum(vf a, vf b) {
#if defined(STAGELINE_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(STAGELINE_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// a < b ? a : b, so b if one of them is NaN.
INLINE vf minimum(vf a, vf b) {
#if defined(STAGELINE_AVX512)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(STAGELINE_AVX2)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

INLINE vi lane_numbers() {
    vi lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    return lanes;
}

INLINE vf fma(vf a, vf b, vf c) {
#if defined(STAGELINE_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(STAGELINE_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Keeps x in a register: GCC would otherwise load it again for each use, and loads are what a product waits for.
INLINE vu in_register(vu x) {
#if defined(STAGELINE_AVX512)
    asm("" : "+v"(x));
#elif defined(STAGELINE_AVX2)
    asm("" : "+x"(x));
#endif
    return x;
}

INLINE vu load_bits(const void* p) { return *(const vu_anywhere*)p; }
INLINE void store_bits(void* p, vu x) { *(vu_anywhere*)p = x; }

INLINE vf widen(vh x) {
#if defined(STAGELINE_AVX512)
    return as_float((vu)_mm512_cvtepu16_epi32((__m256i)x) << 16);  // GCC would convert two halves and join them
#elif defined(STAGELINE_AVX2)
    return as_float((vu)_mm256_cvtepu16_epi32((__m128i)x) << 16);
#else
    return as_float(__builtin_convertvector(x, vu) << 16);
#endif
}

// Round to nearest, ties to even.
INLINE vh narrow(vf x) {
#if defined(STAGELINE_AVX512)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = as_bits(x);
    vu rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    vu quiet = (bits >> 16) | 0x40;
    return __builtin_convertvector(x == x ? rounded : quiet, vh);
#endif
}

// 2 W floats as W words of two bfloat16, in order.
INLINE vu narrow(vf first, vf second) {
#if defined(STAGELINE_AVX512)
    return (vu)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    vh halves[] = {narrow(first), narrow(second)};
    vu words;
    memcpy(&words, halves, sizeof words);
    return words;
#endif
}

INLINE vf load(const float* p) { return as_float(load_bits(p)); }
INLINE vf load(const bf16* p) { return widen(*(const vh_anywhere*)p); }
INLINE void store(float* p, vf x) { store_bits(p, as_bits(x)); }
INLINE void store(bf16* p, vf x) { *(vh_anywhere*)p = narrow(x); }

// The first n lanes; the others are zero, and their memory is not touched.
template <class T>
INLINE vf load(const T* p, int64_t n) {
    if (n >= W) return load(p);
    T lanes[W] = {};
    memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}

template <class T>
INLINE void store(T* p, vf x, int64_t n) {
    if (n >= W) return store(p, x);
    T lanes[W];
    store(lanes, x);
    memcpy(p, lanes, n * sizeof(T));
}

// To T's precision and back.
template <class T>
INLINE vf rounded(vf x) {
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return widen(narrow(x));
}

INLINE float sum(vf x) {
#if defined(STAGELINE_AVX512)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lanes[W];
    store(lanes, x);
    for (int width = W / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

INLINE float largest(vf x) {
#if defined(STAGELINE_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[W];
    store(lanes, x);
    for (int width = W / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
#endif
}

// Whether a comparison was true in some lane.
INLINE bool is_any(vi lanes) {
#if defined(STAGELINE_AVX512)
    return _mm512_movepi32_mask((__m512i)lanes) != 0;
#elif defined(STAGELINE_AVX2)
    return _mm256_movemask_ps((__m256)lanes) != 0;
#else
    uint64_t halves[2];
    memcpy(halves, &lanes, sizeof halves);
    return (halves[0] | halves[1]) != 0;
#endif
}

// 2^x for x in [-127, 127], more than that is cut off. Relative error below 2e-7.
// Source: x = n + f with |f| <= 1/2; 2^f by the Taylor terms of exp(f ln 2), whose remainder is below 2e-8.
INLINE vf exp2(vf x) {
    x = minimum(maximum(x, splat(-127.0f)), splat(127.0f));
#if defined(STAGELINE_AVX512)
    vf n = (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
    const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = (x + shift) - shift;
#endif
    vf f = x - n;
    vf p = splat(1.5403530e-4f);
    p = fma(p, f, splat(1.3333558e-3f));
    p = fma(p, f, splat(9.6181291e-3f));
    p = fma(p, f, splat(5.5504109e-2f));
    p = fma(p, f, splat(2.4022651e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
#if defined(STAGELINE_AVX512)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return as_float(as_bits(p) + ((vu)__builtin_convertvector(n, vi) << 23));
#endif
}

constexpr float LOG2_E = 1.44269504f;

INLINE vf silu(vf x) { return x / (splat(1.0f) + exp2(x * splat(-LOG2_E))); }

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))), which is x times the sigmoid of twice the tanh's argument.
INLINE vf gelu_tanh(vf x) {
    vf twice = x * fma(x * x, splat(2.0f * 0.7978845608f * 0.044715f), splat(2.0f * 0.7978845608f));
    return x / (splat(1.0f) + exp2(twice * splat(-LOG2_E)));
}

// What a gated MLP does to its gate.
INLINE vf activated(vf gate, bool is_gelu) { return is_gelu ? gelu_tanh(gate) : silu(gate); }

INLINE vf tanh(vf x) { return splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp2(x * splat(2.0f * LOG2_E))); }

// acc + a * b, where a 32-bit lane is one float or two bfloat16.
template <class T>
INLINE vf dot(vf acc, vu a, vu b) {
    if constexpr (sizeof(T) == 4) return fma(as_float(a), as_float(b), acc);
#if defined(STAGELINE_AVX512)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = fma(as_float(a << 16), as_float(b << 16), acc);
    return fma(as_float(a & 0xFFFF0000), as_float(b & 0xFFFF0000), acc);
#endif
}

INLINE vu interleave_low(vu a, vu b) {
#if defined(STAGELINE_AVX512)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(STAGELINE_AVX2)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

INLINE vu interleave_high(vu a, vu b) {
#if defined(STAGELINE_AVX512)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(STAGELINE_AVX2)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// W rows of W 32-bit lanes become their columns: log2(W) perfect shuffles of the rows.
INLINE void transpose(vu (&rows)[W]) {
    vu shuffled[W];
#pragma GCC unroll 4
    for (int width = 1; width < W; width *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; i++) {
            shuffled[2 * i] = interleave_low(rows[i], rows[i + W / 2]);
            shuffled[2 * i + 1] = interleave_high(rows[i], rows[i + W / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) rows[i] = shuffled[i];
    }
}

}  // namespace STAGELINE_VARIANT
