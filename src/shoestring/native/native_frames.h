// Samples of the native functions that operators spend their own time in. Each thread has a timer of its processor
// time; its signal interrupts the thread, which walks its own stack as far as the operator that runs, and leaves the
// addresses in a ring that Python empties. Nothing here takes a lock or memory: a signal may come inside of malloc.
#pragma once

#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <unwind.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>

namespace native_frames {

constexpr uint32_t FRAMES = 64, ROOM = 1 << 12;

struct Sample {
    uint64_t ready = 0;  // its number from 1, once it is whole
    uint32_t thread, node, size, whole;  // `whole` if the walk came as far as the operator
    uint64_t frames[FRAMES];  // addresses, the innermost first
};

struct Running {  // an operator
    uint32_t thread, node;
    uintptr_t stack;  // an address in the frame of torch's function that called us
};

Sample ring[ROOM];
std::atomic<uint64_t> written{0}, taken{0}, dropped{0};
std::atomic<bool> on{false};
bool (*running_in)(Running&) = nullptr;  // of the thread that calls it

struct Walk {
    Sample* into;
    uintptr_t until;
    bool inside = false, arrived = false;
};

_Unwind_Reason_Code step(_Unwind_Context* context, void* given) {
    auto& walk = *static_cast<Walk*>(given);
    int interrupted = 0;
    uint64_t address = _Unwind_GetIPInfo(context, &interrupted);
    if (!walk.inside && !interrupted) return _URC_NO_REASON;  // the handler's own frames
    // The stack pointer when it called the next function; all that was called by the operator is below.
    if (walk.inside && _Unwind_GetCFA(context) > walk.until) {
        walk.arrived = true;
        return _URC_END_OF_STACK;
    }
    walk.inside = true;
    if (walk.into->size == FRAMES) return _URC_END_OF_STACK;
    walk.into->frames[walk.into->size++] = interrupted ? address : address - 1;
    return _URC_NO_REASON;
}

void sampled(int, siginfo_t*, void*) {
    int kept = errno;
    Running running;
    if (on.load(std::memory_order_relaxed) && running_in(running)) {
        uint64_t number = written.load(std::memory_order_relaxed);
        do {
            if (number - taken.load(std::memory_order_acquire) >= ROOM) {
                dropped.fetch_add(1, std::memory_order_relaxed);
                errno = kept;
                return;
            }
        } while (!written.compare_exchange_weak(number, number + 1, std::memory_order_relaxed));
        Sample& sample = ring[number % ROOM];
        sample.thread = running.thread;
        sample.node = running.node;
        sample.size = 0;
        Walk walk{&sample, running.stack};
        _Unwind_Backtrace(step, &walk);
        sample.whole = walk.arrived;
        // The last is torch's function that called us, whose own stack the operator's begins in.
        if (walk.arrived && sample.size) sample.size--;
        std::atomic_ref(sample.ready).store(number + 1, std::memory_order_release);
    }
    errno = kept;
}

_Unwind_Reason_Code nowhere(_Unwind_Context*, void*) { return _URC_END_OF_STACK; }

// Take SIGPROF; false where somebody else has it.
bool begin() {
    struct sigaction before = {}, ours = {};
    if (sigaction(SIGPROF, nullptr, &before)) return false;
    bool free = !(before.sa_flags & SA_SIGINFO) && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN);
    if (!free && before.sa_sigaction != sampled) return false;
    _Unwind_Backtrace(nowhere, nullptr);  // the first call of all loads a library, which no signal's handler may
    ours.sa_sigaction = sampled;
    ours.sa_flags = SA_SIGINFO | SA_RESTART;
    // It stays: a signal that is under way when a profile ends would end the program otherwise.
    if (!free || sigaction(SIGPROF, &ours, nullptr) == 0) on = true;
    return on;
}

// A timer of this thread's processor time, or null where it can have none.
timer_t watch(int64_t nanoseconds) {
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGPROF;
#ifdef sigev_notify_thread_id
    event.sigev_notify_thread_id = pid_t(syscall(SYS_gettid));
#else
    event._sigev_un._tid = pid_t(syscall(SYS_gettid));
#endif
    timer_t timer;
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer)) return nullptr;
    itimerspec every = {};
    every.it_interval.tv_sec = every.it_value.tv_sec = nanoseconds / 1'000'000'000;
    every.it_interval.tv_nsec = every.it_value.tv_nsec = nanoseconds % 1'000'000'000;
    timer_settime(timer, 0, &every, nullptr);
    return timer;
}

// The next sample that is whole; 0 if there is none.
uint32_t take(uint32_t* about, uint64_t* frames) {
    uint64_t number = taken.load(std::memory_order_relaxed);
    Sample& sample = ring[number % ROOM];
    if (std::atomic_ref(sample.ready).load(std::memory_order_acquire) != number + 1) return 0;
    about[0] = sample.thread;
    about[1] = sample.node;
    about[2] = sample.whole;
    std::memcpy(frames, sample.frames, sample.size * sizeof(uint64_t));
    uint32_t size = sample.size;
    taken.store(number + 1, std::memory_order_release);
    return size + 1;
}

// "library<TAB>function" of an instruction. A function that its library does not name is where it starts in it; of
// code that is in no library both are empty.
std::string spelled(uint64_t address) {
    Dl_info about = {};
    if (!dladdr(reinterpret_cast<void*>(address), &about) || !about.dli_fname) return "\t";
    std::string text = std::string(about.dli_fname) + '\t';
    if (about.dli_sname) {
        int failed = 0;
        char* plain = abi::__cxa_demangle(about.dli_sname, nullptr, nullptr, &failed);
        text += failed ? about.dli_sname : plain;
        std::free(plain);
    } else if (auto* start = static_cast<char*>(_Unwind_FindEnclosingFunction(reinterpret_cast<void*>(address)))) {
        char place[24];
        std::snprintf(place, sizeof place, "+%#zx", size_t(start - static_cast<char*>(about.dli_fbase)));
        text += place;
    }
    return text;
}

}  // namespace native_frames
