// How the functions of one variant are exported: plain C, under names that end with the variant's. They allocate nothing
// and check nothing; whoever calls them does.
//
// EXPORT opens a function's definition. BY_WORDS behind it makes the same function callable with its arguments as words
// of 64 bits, side by side, which is how a program (program.cpp) calls all functions alike.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define JOIN_(name, variant) stageline_##name##_##variant
#define JOIN(name, variant) JOIN_(name, variant)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void JOIN(name, STAGELINE_VARIANT)
#define BY_WORDS(name) \
    EXPORT(name##_by_words)(const int64_t* words) { call_with_words(JOIN(name, STAGELINE_VARIANT), words); }

template <class T>
static T of_word(int64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(word);
    } else if constexpr (std::is_same_v<T, float>) {
        int32_t bits = static_cast<int32_t>(word);
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    } else {
        return static_cast<T>(word);
    }
}

template <class... Arguments, size_t... I>
static void call_with_words(void (*function)(Arguments...), const int64_t* words, std::index_sequence<I...>) {
    function(of_word<Arguments>(words[I])...);
}

template <class... Arguments>
static void call_with_words(void (*function)(Arguments...), const int64_t* words) {
    call_with_words(function, words, std::index_sequence_for<Arguments...>());
}
