// Where a token's key and value lie within a block of the paged cache, for one key head: as dot products read them.
//
// One idea: a word of 32 bits is one float or a pair of bfloat16, and products take one word of a query, or one word of
// weights, to as many words of the cache as a vector has. So the words of keys are [head_dim / n][block_size], n
// elements of one token each, and those of values [block_size / n][head_dim], n tokens of one element each, where n is
// 1 for float and 2 for bfloat16. Nothing is moved before it is multiplied, and nothing is summed across a vector.
//
// That needs whole vectors: if block_size or head_dim is no multiple of GROUP, tokens lie one behind the other as
// [block_size][head_dim], and attention.h packs them. Either way a block has the same size.
#pragma once
#include "vector.h"

namespace STAGELINE_VARIANT {

constexpr int64_t GROUP = 16;

INLINE bool is_in_groups(int64_t block_size, int64_t head_dim) {
    return block_size % GROUP == 0 && head_dim % GROUP == 0;
}

// One block's keys or values for one key head, as words.
template <class T>
struct CacheBlock {
    static constexpr int PER_WORD = 4 / sizeof(T);

    uint32_t* words;
    int64_t block_size, head_dim;

    CacheBlock(void* cache, int64_t block, int64_t head, int64_t num_kv_heads, int64_t block_size, int64_t head_dim)
        : words((uint32_t*)cache + (block * num_kv_heads + head) * block_size * (head_dim / PER_WORD)),
          block_size(block_size),
          head_dim(head_dim) {}

    void put_key(int64_t offset, const T* key) const {
        const int64_t num_words = head_dim / PER_WORD;
        if (!is_in_groups(block_size, head_dim)) {
            memcpy(words + offset * num_words, key, num_words * 4);
            return;
        }
        for (int64_t i = 0; i < num_words; i++) memcpy(words + i * block_size + offset, key + i * PER_WORD, 4);
    }

    // With pairs the other token's half of each word stays.
    void put_value(int64_t offset, const T* value) const {
        if (PER_WORD == 1 || !is_in_groups(block_size, head_dim)) {
            memcpy(words + offset * (head_dim / PER_WORD), value, head_dim * sizeof(T));
            return;
        }
        uint32_t* row = words + offset / 2 * head_dim;
        const uint32_t kept = offset % 2 ? 0xFFFF : 0xFFFF0000, shift = offset % 2 * 16;
        for (int64_t i = 0; i < head_dim; i += W) {
            vu bits = __builtin_convertvector(*(const vh_anywhere*)(value + i), vu);
            store_bits(row + i, (load_bits(row + i) & kept) | bits << shift);
        }
    }
};

}  // namespace STAGELINE_VARIANT
