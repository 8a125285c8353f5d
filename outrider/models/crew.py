"""Threads of a package: libgomp's, of which a call has the use from its first kernel to its last.

libgomp wakes its threads by a system call at every kernel, and at every barrier in one, whether any of them sleeps or not. Of a step's hundred kernels
most take a few microseconds. Here the threads wait for one another's word in memory, and libgomp is asked for them once a call.

What GCC makes of `#pragma omp` calls by names is defined here, hidden in the package: it goes to the crew. Which thread one is, of how many, is
libgomp's to say as before, so every thread has the part it always had, and sums are the same bits. While a crew serves, what is called of torch
would run on one thread: a package with kernels of torch's own has none of this (`room` writes it or does not), nor has one of another compiler, whose
runtime has other names.
"""

CREW = r"""
#if defined(__GNUC__) && !defined(__clang__) && defined(_OPENMP)
#include <atomic>
#include <omp.h>
#include <thread>
#include <utility>
extern "C" void GOMP_parallel_start(void (*)(void*), void*, unsigned);  // by which the others begin; who calls is one of them
extern "C" void GOMP_parallel_end();
namespace {
class Crew;
thread_local Crew* serving = nullptr;  // for whom this thread works on a kernel
thread_local Crew* hired = nullptr;  // whose call this thread is in

// `crowded`: whoever is waited for may want this very processor.
template <typename Done>
void wait(bool crowded, Done done) {
    for (int looks = crowded ? 64 : 4096; !done();) {
        if (looks == 0) {
            std::this_thread::yield();
            continue;
        }
        looks--;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

class Crew {
    static constexpr unsigned OVER = ~0u;
    alignas(64) std::atomic<unsigned> kernel{0};  // the number of the one under way, or OVER
    void (*task)(void*) = nullptr;  // beside it, for both are read at once
    void* data = nullptr;
    int wanted = 0, hands = 0;
    bool crowded = false;
    Crew* const before;
    alignas(64) std::atomic<int> busy{0};  // others that are not through with it
    alignas(64) std::atomic<int> waiting{0};  // threads at its barrier
    alignas(64) std::atomic<unsigned> passed{0};  // barriers

    static void serve(void* captain) {
        Crew& crew = *static_cast<Crew*>(captain);
        serving = &crew;
        for (unsigned seen = 0;;) {
            wait(crew.crowded, [&] { return crew.kernel.load(std::memory_order_acquire) != seen; });
            if ((seen = crew.kernel.load(std::memory_order_acquire)) == OVER) break;
            crew.task(crew.data);
            crew.busy.fetch_sub(1, std::memory_order_release);
        }
        serving = nullptr;
    }

    void hire(int threads) {
        dismiss();
        wanted = threads, crowded = threads > omp_get_num_procs();
        kernel.store(0, std::memory_order_relaxed);
        GOMP_parallel_start(serve, this, threads);
        hands = omp_get_num_threads();  // which may be fewer
    }

    void dismiss() {
        if (!hands) return;
        kernel.store(OVER, std::memory_order_release);
        GOMP_parallel_end();
        hands = wanted = 0;
    }

public:
    Crew() : before(std::exchange(hired, this)) {}
    Crew(const Crew&) = delete;
    ~Crew() {
        dismiss();
        hired = before;
    }

    void run(void (*kernel_)(void*), void* its, int asked) {
        if (!hands || (asked && asked != wanted)) hire(asked ? asked : omp_get_max_threads());
        task = kernel_, data = its;
        busy.store(hands - 1, std::memory_order_relaxed);
        kernel.store(kernel.load(std::memory_order_relaxed) + 1, std::memory_order_release);
        Crew* const outer = std::exchange(serving, this);
        task(data);
        serving = outer;
        wait(crowded, [&] { return busy.load(std::memory_order_acquire) == 0; });
    }

    void barrier() {
        const unsigned now = passed.load(std::memory_order_acquire);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) + 1 < hands) {
            wait(crowded, [&] { return passed.load(std::memory_order_acquire) != now; });
        } else {
            waiting.store(0, std::memory_order_relaxed);
            passed.store(now + 1, std::memory_order_release);
        }
    }
};
}  // namespace

#define HIDDEN extern "C" __attribute__((visibility("hidden")))
HIDDEN void GOMP_parallel(void (*task)(void*), void* data, unsigned asked, unsigned) {
    if (hired && !serving) return hired->run(task, data, asked);
    Crew own;  // of this kernel alone; inside another libgomp gives it no more than this thread
    own.run(task, data, asked);
}
HIDDEN void GOMP_barrier() {
    if (serving) serving->barrier();
}
HIDDEN bool GOMP_single_start() { return omp_get_thread_num() == 0; }
#else
struct Crew {};
#endif
"""
