// A layer's mixture of experts, of one variant; called by experts.py, which checks.
#include "experts.h"
#include "exported.h"

using namespace STAGELINE_VARIANT;

template <class T>
static void run(const ExpertsPlan& plan, const void* x, const float* logits, const void* shared,
                const float* shared_gate, void* out, void* scratch, int64_t tokens, int threads) {
    Experts<T>(plan, (const T*)x, tokens, (char*)scratch, threads).run(logits, (const T*)shared, shared_gate, (T*)out);
}

EXPORT(experts)
(const void* plan, const void* x, const float* logits, const void* shared, const float* shared_gate, void* out,
 void* scratch, int64_t tokens, int32_t threads, int32_t is_bf16) {
    (is_bf16 ? run<bf16> : run<float>)(*(const ExpertsPlan*)plan, x, logits, shared, shared_gate, out, scratch, tokens,
                                       threads);
}
BY_WORDS(experts)

// What `scratch` above has to have.
EXPORT(experts_scratch_bytes)(const void* plan, int64_t tokens, int32_t is_bf16, int64_t* num_bytes) {
    const ExpertsPlan& of_layer = *(const ExpertsPlan*)plan;
    *num_bytes = is_bf16 ? ExpertsScratch<bf16>(of_layer, tokens, nullptr).end - (char*)nullptr
                         : ExpertsScratch<float>(of_layer, tokens, nullptr).end - (char*)nullptr;
}
