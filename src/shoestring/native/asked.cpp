// Asks Python's main thread now and then to look where it is. A thread that looks at another one's frames needs the GIL
// first, and gets it where the other lets go of it: at lines that call operators, however little time they take. This
// one never needs it: what it asks for is done at the end of the instruction that the main thread is in.
//
// Until Python 3.13, a pending call from a thread that is not the main one waits until the main one takes the GIL again,
// because the flag that has it look is computed for the thread that asks. So it is set here, by Python's own headers.

#define Py_BUILD_CORE
#include <Python.h>
#if PY_VERSION_HEX < 0x030D0000
#undef HAVE_STD_ATOMIC  // of C; the compiler's own are the same in C++
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
std::atomic<uint32_t> due{0};  // times that it was asked since it last looked: more than one where an instruction is long

int look(void*) {
    uint32_t times = due.exchange(0);
    PyObject* called = function;
    if (!called || !times) return 0;
    PyObject* done = PyObject_CallFunction(called, "I", times);
    if (!done) PyErr_Clear();  // the program is not to fail for it
    Py_XDECREF(done);
    return 0;
}

// Whether there was room to ask.
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

void forget_in_child() {  // which has no such thread, and cannot end it
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

// From now on, call a function of Python in the main thread, which Python knows as `ident`, where `inside` does not say
// that it runs an operator; with the number of times that this was so. Seconds from one to the next grow from the
// `shortest` to the `longest`. The function must live until the end.
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
