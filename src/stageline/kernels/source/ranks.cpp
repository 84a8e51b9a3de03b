// Ranks of one machine that compute together: their sums, and what they tell one another, through shared memory.
//
// One idea: every operation is a step with a number. A rank writes its part into its slot of that step, publishes the
// number, waits for the others' numbers and reads. There are two slots in turn: who writes into one again has seen
// everybody publish the step in between, which nobody does before having read. Sums are added up in the order of ranks,
// so every rank has the same bits. Who has to wait long sleeps in the kernel, on the other's number.
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>

#include "exported.h"
#include "vector.h"

using namespace STAGELINE_VARIANT;

namespace STAGELINE_VARIANT {

// Until the number is another one; may return early.
static void sleep_on(std::atomic<uint32_t>& number, uint32_t found) {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAIT, found, nullptr, nullptr, 0);
#else
    sched_yield();
#endif
}

static void wake_all(std::atomic<uint32_t>& number) {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

constexpr int LOOKS_BEFORE_SLEEP = 200;  // a few microseconds: what a rank that is nearly there needs

// One line of the memory for each rank, then the slots. Zeroed before its first use.
struct Line {
    std::atomic<uint32_t> step;
    std::atomic<uint32_t> sleepers;
    char rest[120];
};

// Of this process. Laid out by kernels/ranks.py.
struct Group {
    char* memory;
    int64_t rank, num_ranks, slot_bytes;

    Line& line(int64_t rank) { return ((Line*)memory)[rank]; }
    char* slot(uint32_t step, int64_t rank) {
        return memory + num_ranks * sizeof(Line) + ((step & 1) * num_ranks + rank) * slot_bytes;
    }

    void wait_for(int64_t other, uint32_t step) {
        Line& line = this->line(other);
        for (int look = 0;; look++) {
            uint32_t found = line.step.load(std::memory_order_acquire);
            if ((int32_t)(found - step) >= 0) return;
            if (look < LOOKS_BEFORE_SLEEP) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
                continue;
            }
            line.sleepers.fetch_add(1);
            sleep_on(line.step, found);
            line.sleepers.fetch_sub(1);
        }
    }

    // The next step's number; its slot may be written.
    uint32_t begin() {
        uint32_t step = line(rank).step.load(std::memory_order_relaxed) + 1;
        for (int64_t other = 0; other < num_ranks; other++)
            if (other != rank) wait_for(other, step - 1);
        return step;
    }

    void publish(uint32_t step) {
        line(rank).step.store(step);
        if (line(rank).sleepers.load()) wake_all(line(rank).step);
    }

    void wait_for_all(uint32_t step) {
        for (int64_t other = 0; other < num_ranks; other++)
            if (other != rank) wait_for(other, step);
    }
};

template <class T>
static void sum_slots(Group& group, uint32_t step, T* out, int64_t count) {
    for (int64_t i = 0; i < count; i += W) {
        vf total = load((const T*)group.slot(step, 0) + i, count - i);
        for (int64_t rank = 1; rank < group.num_ranks; rank++)
            total += load((const T*)group.slot(step, rank) + i, count - i);
        store(out + i, total, count - i);
    }
}

template <class T>
static void all_reduce(Group& group, const T* x, T* out, int64_t count) {
    int64_t most = group.slot_bytes / sizeof(T);
    for (int64_t first = 0; first < count; first += most) {
        int64_t part = std::min(most, count - first);
        uint32_t step = group.begin();
        memcpy(group.slot(step, group.rank), x + first, part * sizeof(T));
        group.publish(step);
        group.wait_for_all(step);
        sum_slots(group, step, out + first, part);
    }
}

}  // namespace STAGELINE_VARIANT

EXPORT(all_reduce)(void* group, const void* x, void* out, int64_t rows, int64_t size, int32_t is_bf16) {
    if (is_bf16)
        all_reduce(*(Group*)group, (const bf16*)x, (bf16*)out, rows * size);
    else
        all_reduce(*(Group*)group, (const float*)x, (float*)out, rows * size);
}
BY_WORDS(all_reduce)

// out: every rank's bytes, one behind the other.
EXPORT(all_gather)(void* handle, const char* x, char* out, int64_t num_bytes) {
    Group& group = *(Group*)handle;
    for (int64_t first = 0; first < num_bytes; first += group.slot_bytes) {
        int64_t part = std::min(group.slot_bytes, num_bytes - first);
        uint32_t step = group.begin();
        memcpy(group.slot(step, group.rank), x + first, part);
        group.publish(step);
        for (int64_t rank = 0; rank < group.num_ranks; rank++) {
            if (rank != group.rank) group.wait_for(rank, step);
            memcpy(out + rank * num_bytes + first, group.slot(step, rank), part);
        }
    }
}

// x: the first rank's bytes, everybody's afterwards. The first rank waits for nobody.
EXPORT(broadcast)(void* handle, char* x, int64_t num_bytes) {
    Group& group = *(Group*)handle;
    for (int64_t first = 0; first < num_bytes; first += group.slot_bytes) {
        int64_t part = std::min(group.slot_bytes, num_bytes - first);
        uint32_t step = group.begin();
        if (group.rank == 0) memcpy(group.slot(step, 0), x + first, part);
        group.publish(step);
        if (group.rank == 0) continue;
        group.wait_for(0, step);
        memcpy(x + first, group.slot(step, 0), part);
    }
}
