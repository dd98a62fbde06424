// A calling-context tree of torch's operators and the Python lines that call them, aggregated while the program runs.
//
// Every thread has a tree of its own, so recording takes no lock. A node is an operator, a Python line, or a link from
// a backward function to the operator whose gradient it computes. Python's frames are read without the GIL: operators
// release it, but the thread's own frames cannot change while it is inside one. Memory grows with the number of
// different call paths, never with time; beyond NODES a thread's new paths all become one node.

#define Py_BUILD_CORE
#include <Python.h>
#undef _PyGC_FINALIZED  // torch and Python both define it
#include <internal/pycore_frame.h>

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

constexpr uint32_t NODES = 1 << 18, DEPTH = 192, OPERATORS = 256, CHUNK = 1 << 12;
constexpr uint32_t LINKS = 1 << 16;  // forward operators that are remembered for their backward functions, a thread
constexpr uint32_t NONE = ~0u;

enum Kind : uint8_t { ROOT, PYTHON, OPERATOR, BACKWARD, SPAN, LINK, OVERFLOWN };

// -- time: of the processor's counter where it has one ---------------------------------------------------------------

#if defined(__x86_64__)
#include <x86intrin.h>
inline uint64_t now() { return __rdtsc(); }
#else
inline uint64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}
#endif

// -- names -----------------------------------------------------------------------------------------------------------

struct Names {
    std::mutex lock;
    std::deque<std::string> all{""};  // whose texts stay where they are
    std::unordered_map<std::string, uint32_t> known{{"", 0}};

    uint32_t of(std::string_view text) {
        std::lock_guard<std::mutex> held(lock);
        auto [found, fresh] = known.try_emplace(std::string(text), uint32_t(all.size()));
        if (fresh) all.emplace_back(text);
        return found->second;
    }
    const char* spelling(uint32_t name) {
        std::lock_guard<std::mutex> held(lock);
        return all[name].c_str();
    }
};
Names& names() {
    static Names* kept = new Names;  // never destroyed: threads may outlive the end of the program's main thread
    return *kept;
}

// Text of a str object, without Python's help: the GIL is not held, and nothing may be allocated in it.
std::string text_of(PyObject* object) {
    if (!object || !PyUnicode_Check(object)) return "?";
    auto length = PyUnicode_GET_LENGTH(object);
    int kind = PyUnicode_KIND(object);
    const void* data = PyUnicode_DATA(object);
    std::string text;
    for (Py_ssize_t i = 0; i < length && i < 4096; i++) {
        uint32_t c = PyUnicode_READ(kind, data, i);
        if (c < 0x80) text += char(c);
        else if (c < 0x800) { text += char(0xC0 | c >> 6); text += char(0x80 | (c & 63)); }
        else if (c < 0x10000) { text += char(0xE0 | c >> 12); text += char(0x80 | (c >> 6 & 63)); text += char(0x80 | (c & 63)); }
        else { text += char(0xF0 | c >> 18); text += char(0x80 | (c >> 12 & 63)); text += char(0x80 | (c >> 6 & 63)); text += char(0x80 | (c & 63)); }
    }
    return text;
}

// -- the tree of a thread --------------------------------------------------------------------------------------------

struct Node {
    uint32_t parent, name, line;     // a link's name is the thread, and its line the node, of the forward operator
    uint32_t last = NONE, next = NONE;  // the child seen last, and the sibling seen after this node last time
    Kind kind;
    const char* text = nullptr;  // where an operator's name was when it was seen last
    uint64_t count = 0, inclusive = 0, within = 0, least = ~0ull, most = 0;  // ticks; `within` those of its children
    double squares = 0;
};

struct Function {  // of Python
    PyCodeObject* code = nullptr;
    const void *file = nullptr, *title = nullptr;
    int first = 0;
    uint32_t name = 0;  // "file\tqualified name"
};

struct Frame {
    const _PyInterpreterFrame* frame;
    const PyCodeObject* code;
    const void* instruction;
    uint32_t node;
};

struct Open {  // an operator that runs
    uint32_t node;
    const _PyInterpreterFrame* frame;
    uint64_t begun, own, within;
    std::unique_ptr<std::vector<Frame>> stack;  // of a span, which goes on when the function that began it has returned
};

struct Link {
    int64_t sequence = -1;
    uint32_t node = NONE;
};

struct Thread {
    std::vector<std::unique_ptr<Node[]>> chunks;
    std::atomic<uint32_t> size{0};
    std::vector<std::pair<uint64_t, uint32_t>> table;  // (hash of parent and what the child is, node)
    std::unordered_map<const void*, std::pair<const char*, uint32_t>> pointers;
    std::unordered_map<const PyCodeObject*, Function> functions;
    std::vector<const char*> spelled;  // by name
    std::vector<Open> open;
    std::vector<Frame> stack;
    std::unique_ptr<Link[]> links;
    PyThreadState* state = nullptr;
    uint64_t own = 0;  // ticks spent in here
    uint64_t torch_thread = 0, lost = 0;
    uint32_t index = 0, depth = 0;  // `depth` counts operators beyond OPERATORS as well

    Thread() : table(1 << 10, {0, NONE}), links(new Link[LINKS]) {
        open.reserve(OPERATORS);
        stack.reserve(DEPTH);
        add(NONE, 0, 0, ROOT);
    }
    Node& at(uint32_t index) { return chunks[index / CHUNK][index % CHUNK]; }

    uint32_t add(uint32_t parent, uint32_t name, uint32_t line, Kind kind) {
        uint32_t index = size.load(std::memory_order_relaxed);
        if (index % CHUNK == 0) chunks.emplace_back(new Node[CHUNK]);
        Node& node = at(index);
        node.parent = parent;
        node.name = name;
        node.line = line;
        node.kind = kind;
        size.store(index + 1, std::memory_order_release);
        return index;
    }

    uint32_t child(uint32_t parent, uint32_t name, uint32_t line, Kind kind) {
        Node& above = at(parent);
        auto same = [&](const Node& node) {
            return node.name == name && node.line == line && node.kind == kind && node.parent == parent;
        };
        uint32_t before = above.last, guess = before == NONE ? NONE : at(before).next;
        if (guess == NONE || !same(at(guess))) {
            guess = before != NONE && same(at(before)) ? before : find(parent, name, line, kind);
            if (before != NONE) at(before).next = guess;
        }
        above.last = guess;
        return guess;
    }

    uint32_t find(uint32_t parent, uint32_t name, uint32_t line, Kind kind) {
        uint64_t hash = (uint64_t(parent) << 32 | name) * 0x9E3779B97F4A7C15ull;
        hash = (hash ^ hash >> 29 ^ uint64_t(line) << 8 ^ kind) * 0xBF58476D1CE4E5B9ull;
        hash ^= hash >> 32;
        uint64_t mask = table.size() - 1;
        for (uint64_t slot = hash & mask;; slot = (slot + 1) & mask) {
            auto [key, index] = table[slot];
            if (index == NONE) {
                uint32_t count = size.load(std::memory_order_relaxed);
                if (count >= NODES) {
                    lost++;
                    if (kind == OVERFLOWN) return 0;
                    return at(parent).kind == OVERFLOWN ? parent : 1;
                }
                uint32_t fresh = add(parent, name, line, kind);
                table[slot] = {hash, fresh};
                if (uint64_t(fresh) * 2 > table.size()) grow();
                return fresh;
            }
            const Node& node = at(index);
            if (key == hash && node.parent == parent && node.name == name && node.line == line && node.kind == kind)
                return index;
        }
    }

    void grow() {
        std::vector<std::pair<uint64_t, uint32_t>> larger(table.size() * 2, {0, NONE});
        for (auto& entry : table) {
            if (entry.second == NONE) continue;
            uint64_t slot = entry.first & (larger.size() - 1);
            while (larger[slot].second != NONE) slot = (slot + 1) & (larger.size() - 1);
            larger[slot] = entry;
        }
        table.swap(larger);
    }

    // An operator, whose name is looked up only if it is not the one that followed last time.
    uint32_t operation(uint32_t parent, const char* text, Kind kind) {
        Node& above = at(parent);
        uint32_t guess = above.last == NONE ? NONE : at(above.last).next;
        if (guess != NONE) {
            Node& node = at(guess);
            if (node.text == text && node.kind == kind && !std::strcmp(spelled[node.name], text)) {
                above.last = guess;
                return guess;
            }
        }
        uint32_t name = name_of(text);
        guess = child(parent, name, 0, kind);
        at(guess).text = text;
        if (spelled.size() <= name) spelled.resize(name + 1, "");
        spelled[name] = names().spelling(name);
        return guess;
    }

    uint32_t name_of(const char* text) {
        auto found = pointers.find(text);
        // The same address may hold another text by now, when it was allocated for a name alone.
        if (found != pointers.end() && !std::strcmp(found->second.first, text)) return found->second.second;
        if (pointers.size() > 1 << 16) pointers.clear();
        uint32_t name = names().of(text);
        pointers[text] = {names().spelling(name), name};
        return name;
    }

    uint32_t function_of(PyCodeObject* code) {
        Function& function = functions[code];
        bool same = function.code == code && function.file == code->co_filename &&
                    function.title == code->co_qualname && function.first == code->co_firstlineno;
        if (!same) {
            auto text = text_of(code->co_filename) + "\t" + text_of(code->co_qualname);
            function = {code, code->co_filename, code->co_qualname, code->co_firstlineno, names().of(text)};
        }
        return function.name;
    }
};

std::mutex everybody;
std::vector<Thread*>& threads() {
    static auto* kept = new std::vector<Thread*>;
    return *kept;
}
thread_local Thread* mine = nullptr;

Thread& here() {
    if (!mine) {
        mine = new Thread;  // kept after the thread has ended: its tree is part of the profile
        mine->torch_thread = at::RecordFunction::currentThreadId();
        mine->child(0, 0, 0, OVERFLOWN);
        std::lock_guard<std::mutex> held(everybody);
        mine->index = uint32_t(threads().size());
        threads().push_back(mine);
    }
    return *mine;
}

// -- Python's frames -------------------------------------------------------------------------------------------------

const _PyInterpreterFrame* newest_frame(PyThreadState* state) {
#if PY_VERSION_HEX >= 0x030D0000
    return state->current_frame;
#else
    return state->cframe->current_frame;
#endif
}

PyCodeObject* code_of(const _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
    return (PyCodeObject*)frame->f_executable;
#else
    return frame->f_code;
#endif
}

bool shown(const _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
    if (frame->owner == FRAME_OWNED_BY_CSTACK) return false;
#endif
    PyCodeObject* code = code_of(frame);
    return code && frame->prev_instr >= _PyCode_CODE(code);
}

using Frames = const _PyInterpreterFrame* [DEPTH];

// This thread's frames from the newest to `until`, which is not among them; of a deeper stack the outermost.
uint32_t collect(Thread& own, const _PyInterpreterFrame* until, Frames& found) {
    uint32_t count = 0;
    for (auto* frame = newest_frame(own.state); frame && frame != until; frame = frame->previous)
        if (shown(frame)) found[count++ % DEPTH] = frame;
    return count;
}

uint32_t line_node(Thread& own, uint32_t above, const _PyInterpreterFrame* frame) {
    PyCodeObject* code = code_of(frame);
    int line = PyCode_Addr2Line(code, int((const char*)frame->prev_instr - (const char*)_PyCode_CODE(code)));
    return own.child(above, own.function_of(code), uint32_t(std::max(line, 0)), PYTHON);
}

// The node of the Python line that runs in this thread, with all that called it.
uint32_t whole_path(Thread& own) {
    Frames found;
    uint32_t count = collect(own, nullptr, found), depth = std::min(count, DEPTH), node = 0;
    bool same = true;
    for (uint32_t level = 0; level < depth; level++) {
        auto* frame = found[(count - 1 - level) % DEPTH];
        if (same && level < own.stack.size() && own.stack[level].code == code_of(frame) &&
            own.stack[level].instruction == frame->prev_instr) {
            own.stack[level].frame = frame;
            node = own.stack[level].node;
            continue;
        }
        if (same) own.stack.resize(level);
        same = false;
        node = line_node(own, node, frame);
        own.stack.push_back({frame, code_of(frame), frame->prev_instr, node});
    }
    if (same) own.stack.resize(depth);
    return node;
}

// The same below an operator that runs: only what it has called.
uint32_t path_below(Thread& own, const Open& above) {
    Frames found;
    uint32_t count = collect(own, above.stack ? nullptr : above.frame, found), depth = std::min(count, DEPTH);
    uint32_t level = 0, node = above.node;
    if (above.stack)  // what ran when the span began, up to the function that has gone on since
        for (; level < std::min<size_t>(depth, above.stack->size()); level++) {
            auto* frame = found[(count - 1 - level) % DEPTH];
            const Frame& then = (*above.stack)[level];
            if (then.frame != frame || then.code != code_of(frame) || then.instruction != frame->prev_instr) break;
        }
    for (; level < depth; level++) node = line_node(own, node, found[(count - 1 - level) % DEPTH]);
    return node;
}

// -- what torch calls ------------------------------------------------------------------------------------------------

std::atomic<bool> with_frames{true};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn) {
    uint64_t entered = now();
    Thread& own = here();
    own.depth++;
    if (own.open.size() >= OPERATORS) return nullptr;
    const _PyInterpreterFrame* frame = nullptr;
    bool outermost = own.open.empty();
    uint32_t node = outermost ? 0 : own.open.back().node;
    if (with_frames.load(std::memory_order_relaxed)) {
        if (!own.state) own.state = PyGILState_GetThisThreadState();
        frame = own.state ? newest_frame(own.state) : nullptr;
        if (frame && outermost) node = whole_path(own);
        else if (frame && (own.open.back().stack || frame != own.open.back().frame)) node = path_below(own, own.open.back());
    }
    auto scope = fn.scope();
    int64_t sequence = fn.seqNr();
    Kind kind = OPERATOR;
    if (scope == at::RecordScope::USER_SCOPE) kind = SPAN;
    if (scope == at::RecordScope::BACKWARD_FUNCTION) {
        kind = BACKWARD;
        if (sequence >= 0) {
            std::lock_guard<std::mutex> held(everybody);  // once a backward function, of which there are few
            for (Thread* other : threads()) {
                if (other->torch_thread != fn.forwardThreadId()) continue;
                const Link& link = other->links[sequence % LINKS];
                if (link.sequence == sequence) node = own.child(node, other->index, link.node, LINK);
                break;
            }
        }
    }
    node = own.operation(node, fn.name(), kind);
    if (kind == OPERATOR && sequence >= 0) {
        Link& link = own.links[sequence % LINKS];
        // Of nested operators with one number the outermost is what the program called.
        bool nested = link.sequence == sequence && own.open.size() &&
                      std::any_of(own.open.begin(), own.open.end(), [&](Open& o) { return o.node == link.node; });
        if (!nested) link = {sequence, node};
    }
    uint64_t left = now();
    own.own += left - entered;
    own.open.push_back({node, frame, left, own.own, 0, nullptr});
    if (kind == SPAN && frame) {
        Frames found;
        uint32_t count = collect(own, nullptr, found);
        auto stack = std::make_unique<std::vector<Frame>>();
        for (uint32_t level = 0; level < std::min(count, DEPTH); level++) {
            auto* each = found[(count - 1 - level) % DEPTH];
            stack->push_back({each, code_of(each), each->prev_instr, 0});
        }
        own.open.back().stack = std::move(stack);
    }
    return nullptr;
}

void end(const at::RecordFunction&, at::ObserverContext*) {
    uint64_t entered = now();
    if (!mine || mine->depth == 0) return;  // it began before we did
    Thread& own = *mine;
    if (own.depth-- > OPERATORS) return;
    Open done = std::move(own.open.back());
    own.open.pop_back();
    uint64_t ticks = entered - done.begun, paid = own.own - done.own;
    ticks = ticks > paid ? ticks - paid : 0;  // without the time that recording what ran within has taken
    Node& node = own.at(done.node);
    node.count++;
    node.inclusive += ticks;
    node.within += done.within;
    node.least = std::min(node.least, ticks);
    node.most = std::max(node.most, ticks);
    node.squares += double(ticks) * double(ticks);
    if (!own.open.empty()) own.open.back().within += ticks;
    own.own += now() - entered;
}

at::CallbackHandle handle = 0;
bool running = false;
uint64_t ticks_at_start = 0;
std::chrono::steady_clock::time_point time_at_start;

}  // namespace

// -- what Python calls -----------------------------------------------------------------------------------------------

extern "C" {

// Begin, or go on, to record; `probability` below 1 records that share of operators.
int callpaths_start(double probability, int frames) {
    if (running) return 1;
    with_frames = frames;
    if (!ticks_at_start) {
        ticks_at_start = now();
        time_at_start = std::chrono::steady_clock::now();
    }
    auto callback = at::RecordFunctionCallback(begin, end).scopes(
        {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
    if (probability < 1) callback.samplingProb(probability);
    handle = at::addGlobalCallback(callback);
    running = true;
    return 0;
}

int callpaths_stop() {
    if (!running) return 1;
    at::removeCallback(handle);
    running = false;
    return 0;
}

// Nanoseconds a tick, as measured since the first start.
double callpaths_nanoseconds() {
    double ticks = double(now() - ticks_at_start);
    std::chrono::duration<double, std::nano> passed = std::chrono::steady_clock::now() - time_at_start;
    return ticks > 0 ? passed.count() / ticks : 1;
}

uint32_t callpaths_threads() {
    std::lock_guard<std::mutex> held(everybody);
    return uint32_t(threads().size());
}

uint32_t callpaths_size(uint32_t thread) { return threads()[thread]->size.load(std::memory_order_acquire); }

// The first `size` nodes of a thread: integers (parent, name, line, kind) and (count, inclusive, within, least, most).
void callpaths_read(uint32_t thread, uint32_t size, uint32_t* places, uint64_t* numbers, double* squares) {
    Thread& own = *threads()[thread];
    for (uint32_t i = 0; i < size; i++) {
        const Node& node = own.at(i);
        uint32_t place[] = {node.parent, node.name, node.line, node.kind};
        uint64_t number[] = {node.count, node.inclusive, node.within, node.least, node.most};
        std::copy_n(place, 4, places + 4 * i);
        std::copy_n(number, 5, numbers + 5 * i);
        squares[i] = node.squares;
    }
}

// (ticks spent in recording, paths that found no room) of a thread.
void callpaths_cost(uint32_t thread, uint64_t* cost) {
    cost[0] = threads()[thread]->own;
    cost[1] = threads()[thread]->lost;
}

// How many operators run now in the thread that Python knows as `ident`.
uint32_t callpaths_inside(uint64_t ident) {
    std::lock_guard<std::mutex> held(everybody);
    for (Thread* each : threads())
        if (each->state && each->state->thread_id == ident) return each->depth;
    return 0;
}

// Python's ident of a thread that runs Python, and 0 of one that does not.
uint64_t callpaths_ident(uint32_t thread) {
    PyThreadState* state = threads()[thread]->state;
    return state ? state->thread_id : 0;
}

uint32_t callpaths_names() {
    std::lock_guard<std::mutex> held(names().lock);
    return uint32_t(names().all.size());
}

uint64_t callpaths_name(uint32_t name, char* room, uint64_t size) {
    std::lock_guard<std::mutex> held(names().lock);
    const std::string& text = names().all[name];
    std::copy_n(text.data(), std::min<uint64_t>(size, text.size()), room);
    return text.size();
}

}  // extern "C"
