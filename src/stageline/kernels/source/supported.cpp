// Which variants this machine can run.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) int32_t stageline_is_supported_portable() { return 1; }

#if defined(__x86_64__)
extern "C" __attribute__((visibility("default"))) int32_t stageline_is_supported_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

extern "C" __attribute__((visibility("default"))) int32_t stageline_is_supported_avx512() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#endif
