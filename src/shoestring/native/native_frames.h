// Samples the native functions in which operators spend their own time. Each thread has a timer on its processor time.
// The timer's signal interrupts the thread, which walks its own stack up to the running operator and writes the
// addresses into a ring buffer that Python drains. The handler takes no lock and allocates nothing, since the signal
// may interrupt malloc.
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
    uint64_t ready = 0;  // number of the sample, from 1, once it is complete
    uint32_t thread, node, size, whole;  // `whole` if the walk reached the operator
    uint64_t frames[FRAMES];  // addresses, innermost first
};

struct Running {  // an operator that is running
    uint32_t thread, node;
    uintptr_t stack;  // an address in the stack frame of torch's function that called us
};

Sample ring[ROOM];
std::atomic<uint64_t> written{0}, taken{0}, dropped{0};
std::atomic<bool> on{false};
bool (*running_in)(Running&) = nullptr;  // writes the operator that the calling thread runs; false if it runs none

struct Walk {
    Sample* into;
    uintptr_t until;
    bool inside = false, arrived = false;
};

_Unwind_Reason_Code step(_Unwind_Context* context, void* argument) {
    auto& walk = *static_cast<Walk*>(argument);
    int interrupted = 0;
    uint64_t address = _Unwind_GetIPInfo(context, &interrupted);
    if (!walk.inside && !interrupted) return _URC_NO_REASON;  // frames of the signal handler
    // The CFA is the stack pointer at the call; frames of functions that the operator called lie below it.
    if (walk.inside && _Unwind_GetCFA(context) > walk.until) {
        walk.arrived = true;
        return _URC_END_OF_STACK;
    }
    walk.inside = true;
    if (walk.into->size == FRAMES) return _URC_END_OF_STACK;
    // A return address may already belong to the next line or function, so step back into the call.
    walk.into->frames[walk.into->size++] = interrupted ? address : address - 1;
    return _URC_NO_REASON;
}

void sampled(int, siginfo_t*, void*) {
    int saved_errno = errno;
    Running running;
    if (on.load(std::memory_order_relaxed) && running_in(running)) {
        uint64_t number = written.load(std::memory_order_relaxed);
        do {
            if (number - taken.load(std::memory_order_acquire) >= ROOM) {
                dropped.fetch_add(1, std::memory_order_relaxed);
                errno = saved_errno;
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
        // The last frame is torch's function that called us, in whose stack frame `until` lies.
        if (walk.arrived && sample.size) sample.size--;
        std::atomic_ref(sample.ready).store(number + 1, std::memory_order_release);
    }
    errno = saved_errno;
}

_Unwind_Reason_Code nowhere(_Unwind_Context*, void*) { return _URC_END_OF_STACK; }

// Install the handler of SIGPROF; false if another library has one.
bool begin() {
    struct sigaction before = {}, ours = {};
    if (sigaction(SIGPROF, nullptr, &before)) return false;
    bool free = !(before.sa_flags & SA_SIGINFO) && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN);
    if (!free && before.sa_sigaction != sampled) return false;
    _Unwind_Backtrace(nowhere, nullptr);  // the first unwinding loads a library, which a signal handler must not do
    ours.sa_sigaction = sampled;
    ours.sa_flags = SA_SIGINFO | SA_RESTART;
    // The handler stays installed: a signal pending when a profile ends would otherwise end the program.
    if (!free || sigaction(SIGPROF, &ours, nullptr) == 0) on = true;
    return on;
}

// Start a timer on this thread's processor time; false if the system has none left.
bool watch(int64_t nanoseconds, timer_t& timer) {
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGPROF;
#ifdef sigev_notify_thread_id
    event.sigev_notify_thread_id = pid_t(syscall(SYS_gettid));
#else
    event._sigev_un._tid = pid_t(syscall(SYS_gettid));
#endif
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer)) return false;
    itimerspec every = {};
    every.it_interval.tv_sec = every.it_value.tv_sec = nanoseconds / 1'000'000'000;
    every.it_interval.tv_nsec = every.it_value.tv_nsec = nanoseconds % 1'000'000'000;
    timer_settime(timer, 0, &every, nullptr);
    return true;
}

// Take the next complete sample; returns its number of frames plus 1, or 0 if there is none.
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

// "library<TAB>function" of an instruction. A function without a name in its library is given as its offset; for code
// in no library both are empty.
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
