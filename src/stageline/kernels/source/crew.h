// Threads that share the work of one call, for stages that are given more than one.
//
// They wait without spinning: a spinning thread would take a core from another stage. So waking them costs some
// microseconds, and only work of much more than that should be shared.
#pragma once
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace STAGELINE_VARIANT {

// Of one core, roughly: they only tell whether work is worth sharing.
constexpr double READ_BYTES_PER_S = 25e9, BF16_FLOPS_PER_S = 200e9, INT8_PRODUCTS_PER_S = 150e9;
constexpr double WORTH_A_THREAD_S = 400e-6;

// How many threads share some work: none of so little that waking it takes as long.
static inline int worth_sharing(int threads, double bytes_read, double operations, double operations_per_s) {
    const double read_s = bytes_read / READ_BYTES_PER_S, compute_s = operations / operations_per_s;
    const double parts = (read_s > compute_s ? read_s : compute_s) / WORTH_A_THREAD_S;
    return parts < 1 ? 1 : parts < threads ? (int)parts : threads;
}

class Crew {
   public:
    // Calls work(part) for every part in [0, parts) and returns when all are done. Never waits for another call's work:
    // whoever finds the threads taken does its parts by itself.
    template <class Work>
    static void run(int parts, const Work& work) {
        if (parts == 1) return work(0);
        std::unique_lock<std::mutex> lock(one_at_a_time(), std::try_to_lock);
        if (lock.owns_lock())
            current().share(parts, work);
        else
            work_alone(0, parts, work);
    }

   private:
    const pid_t process = getpid();
    std::mutex mutex;
    std::condition_variable start, end;
    std::vector<std::thread> threads;
    uint64_t round = 0;
    int parts = 0, unfinished = 0;
    void (*call)(const void* work, int part) = nullptr;
    const void* work = nullptr;

    static std::mutex& one_at_a_time() {
        static std::mutex mutex;
        return mutex;
    }

    // Never destroyed: threads wait in it until the process ends. A forked process has none and needs its own.
    static Crew& current() {
        static Crew* crew = nullptr;
        if (!crew || crew->process != getpid()) crew = new Crew;
        return *crew;
    }

    template <class Work>
    static void work_alone(int first, int parts, const Work& work) {
        for (int part = first; part < parts; part++) work(part);
    }

    template <class Work>
    void share(int wanted, const Work& shared) {
        int helped = grow(wanted - 1) + 1;
        {
            std::lock_guard<std::mutex> lock(mutex);
            call = [](const void* work, int part) { (*(const Work*)work)(part); };
            work = &shared;
            parts = helped;
            unfinished = helped - 1;
            round++;
        }
        start.notify_all();
        shared(0);
        work_alone(helped, wanted, shared);
        std::unique_lock<std::mutex> lock(mutex);
        end.wait(lock, [this] { return unfinished == 0; });
    }

    // Returns: how many threads help, at most `wanted`; fewer if the system gives no more.
    int grow(int wanted) {
        try {
            while ((int)threads.size() < wanted) {
                int part = threads.size() + 1;
                threads.emplace_back([this, part, seen = round] { help(part, seen); });
            }
        } catch (const std::system_error&) {
        }
        return (int)threads.size() < wanted ? threads.size() : wanted;
    }

    void help(int part, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            start.wait(lock, [&] { return round != seen; });
            seen = round;
            if (part >= parts) continue;
            lock.unlock();
            call(work, part);
            lock.lock();
            if (--unfinished == 0) end.notify_one();
        }
    }
};

}  // namespace STAGELINE_VARIANT
