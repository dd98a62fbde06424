// Samples the position of Python's main thread by asking it to look itself. A sampling thread that reads another
// thread's frames needs the GIL, and gets it where the other releases it: at lines that call operators, which biases the
// samples towards these lines. The thread here never takes the GIL: it queues a pending call, which the main thread runs
// at the end of its current instruction.
//
// Until Python 3.13, a pending call from another thread waits until the main thread takes the GIL again, because the
// flag that makes it check is computed for the calling thread. So the flag is set here, through Python's headers.

#define Py_BUILD_CORE
#include <Python.h>
#if PY_VERSION_HEX < 0x030D0000
#undef HAVE_STD_ATOMIC  // C's atomics; in C++ the headers use the compiler's builtins
#undef _PyGC_FINALIZED  // defined twice
#include <internal/pycore_interp.h>
#endif

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace {

std::atomic<PyObject*> function{nullptr};
std::atomic<uint32_t> due{0};  // requests since the last call: more than one if an instruction takes long

int look(void*) {
    uint32_t times = due.exchange(0);
    PyObject* called = function;
    if (!called || !times) return 0;
    PyObject* done = PyObject_CallFunction(called, "I", times);
    if (!done) PyErr_Clear();  // an error in the sampler must not fail the program
    Py_XDECREF(done);
    return 0;
}

// Queue the call; false if Python's queue is full.
bool ask() {
    if (Py_AddPendingCall(look, nullptr)) return false;
#if PY_VERSION_HEX < 0x030D0000
    _Py_atomic_store_relaxed(&PyInterpreterState_Main()->ceval.eval_breaker, 1);
#endif
    return true;
}

struct Clock {
    std::mutex lock;
    std::condition_variable woken;
    bool ended = false;
    std::thread thread;
};

Clock* running = nullptr;

void forget_in_child() {  // a forked child does not have the thread, so it cannot join it
    running = nullptr;
    function = nullptr;
}

}  // namespace

extern "C" {

void asked_end() {
    function = nullptr;
    if (!running) return;
    {
        std::lock_guard<std::mutex> held(running->lock);
        running->ended = true;
    }
    running->woken.notify_all();
    running->thread.join();
    delete running;
    running = nullptr;
}

// Start calling a Python function in the main thread, whose Python identifier is `ident`, with the number of sampling
// times since the last call. Times at which `inside` says that the thread runs an operator do not count. The interval
// grows from `shortest` to `longest` seconds. The function must live until `asked_end`.
void asked_begin(
    uint64_t ident, PyObject* called, uint32_t (*inside)(uint64_t), double shortest, double longest, double growth) {
    static int once = pthread_atfork(nullptr, nullptr, forget_in_child);
    (void)once;
    asked_end();
    due = 0;
    function = called;
    Clock* own = running = new Clock;
    own->thread = std::thread([=] {
        double seconds = shortest;
        std::unique_lock<std::mutex> held(own->lock);
        while (!own->woken.wait_for(held, std::chrono::duration<double>(seconds), [=] { return own->ended; })) {
            seconds = std::min(longest, seconds * growth);
            if (inside(ident) != ~0u && due.fetch_add(1) == 0 && !ask()) due = 0;
        }
    });
}

}  // extern "C"
