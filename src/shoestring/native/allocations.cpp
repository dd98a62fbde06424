// Records every allocation of torch while a program runs: what made it, how long it lives, and which allocations were
// alive at the peak.
//
// The CPU's allocator is wrapped, so that the allocations of all threads are seen, including threads started earlier.
// Accelerators report to a thread-local object, which each thread gets at its first operator. An allocation is
// attributed to what runs in its thread: the module that Python entered last, and the outermost and innermost operator;
// in a backward pass, the forward operator whose gradient is computed, found by autograd's sequence number. Outside of
// modules it is attributed to the Python line.
//
// A window lasts from one call of `allocations_fold` to the next. Of the blocks freed in it, only as many are kept as
// the recording was started with room for. Blocks alive at the window's peak are always kept, so the peak is exact
// however long the window is.

#include "frames.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
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

constexpr uint32_t DEPTH = 192, DEVICES = 17, PATHS = 64;
constexpr size_t LINKS = 1 << 16;  // forward operators a thread remembers for their backward functions
constexpr uint64_t NEVER = ~0ull;

enum Phase : uint32_t { OUTSIDE, FORWARD, RECOMPUTED, BACKWARD, OPTIMIZER, BEFORE };
enum Part : uint32_t { NOWHERE, OWN, COMMUNICATION, CHECKPOINT };
enum Flag : uint32_t { SURVIVED = 1, IN_GRAPH = 2 };  // it outlived its outermost operator, which extended the autograd graph

uint64_t nanoseconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// -- the context of an allocation --------------------------------------------------------------------------------------

struct Context {
    uint32_t phase = OUTSIDE, module = 0, outer = 0, inner = 0, place = 0, part = NOWHERE;
    bool operator==(const Context&) const = default;
};

struct Mixed {
    size_t operator()(const Context& c) const {
        uint64_t hash = 0;
        for (uint64_t field : {c.phase, c.module, c.outer, c.inner, c.place, c.part})
            hash = (hash ^ field) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
        return hash;
    }
};

struct Block {
    uint64_t born, died;  // numbers of events
    uint64_t born_at, died_at;  // nanoseconds
    uint64_t address, bytes;
    uint32_t context, flags, device, padding;
};

struct Device {
    uint64_t total = 0, peak = 0, peak_event = 0;
    uint64_t reserved = 0;
};

// Guards the table and the list of threads. A fork waits for it, so that a child never inherits it locked.
std::mutex changing;

struct Table {
    std::vector<Block> blocks;            // blocks alive, and unused places
    std::vector<uint32_t> free;           // the unused places
    std::array<std::unordered_map<uint64_t, uint32_t>, DEVICES> at;  // address -> place
    std::vector<Block> freed;
    size_t most = 0, room = 0;  // freed blocks: to keep, and at which some are dropped
    std::array<Device, DEVICES> devices;
    std::deque<std::string> names{""};
    std::unordered_map<std::string, uint32_t> named{{"", 0}};
    std::vector<Context> contexts{{}};
    std::unordered_map<Context, uint32_t, Mixed> known{{{}, 0}};
    uint64_t events = 0, dropped = 0, failed_bytes = 0, begun_at = nanoseconds();
    uint32_t failed_context = 0;

    uint32_t name(std::string_view text) {
        auto [entry, fresh] = named.try_emplace(std::string(text), uint32_t(names.size()));
        if (fresh) names.emplace_back(text);
        return entry->second;
    }

    uint32_t context(const Context& context) {
        auto [entry, fresh] = known.try_emplace(context, uint32_t(contexts.size()));
        if (fresh) contexts.push_back(context);
        return entry->second;
    }

    uint32_t add(uint64_t address, uint64_t bytes, uint32_t device, uint32_t context, uint32_t flags) {
        Block block{++events, NEVER, nanoseconds(), NEVER, address, bytes, context, flags, device, 0};
        uint32_t place;
        if (free.empty()) {
            place = uint32_t(blocks.size());
            blocks.push_back(block);
        } else {
            place = free.back();
            free.pop_back();
            blocks[place] = block;
        }
        auto [entry, fresh] = at[device].try_emplace(address, place);
        if (!fresh) {  // its release was not seen
            drop(entry->second);
            entry->second = place;
        }
        Device& usage = devices[device];
        usage.total += bytes;
        if (usage.total > usage.peak) usage.peak = usage.total, usage.peak_event = events;
        return place;
    }

    void drop(uint32_t place) {
        Block& block = blocks[place];
        block.died = ++events;
        block.died_at = nanoseconds();
        devices[block.device].total -= block.bytes;
        if (freed.size() >= room) thin();
        freed.push_back(block);
        block.born = 0;
        free.push_back(place);
    }

    bool remove(uint64_t address, uint32_t device) {
        auto entry = at[device].find(address);
        if (entry == at[device].end()) return false;
        drop(entry->second);
        at[device].erase(entry);
        return true;
    }

    bool at_peak(const Block& block) const {
        uint64_t peak = devices[block.device].peak_event;
        return block.born <= peak && peak < block.died;
    }

    // Drop freed blocks that were not alive at a peak. Those that were may exceed the room, which then grows.
    void thin() {
        size_t before = freed.size();
        std::erase_if(freed, [this](const Block& block) { return !at_peak(block); });
        dropped += before - freed.size();
        room = std::max(most, 2 * freed.size());
    }

    void fold() {
        freed.clear();
        room = most;
        dropped = 0;
        begun_at = nanoseconds();
        for (auto& device : devices) device.peak = device.total, device.peak_event = events;
    }
};
Table& table() {
    static Table* instance = new Table;  // never destroyed: memory is freed until the process ends
    return *instance;
}

// -- threads ---------------------------------------------------------------------------------------------------------

struct Open {  // an operator that is running
    const at::RecordFunction* call;
    int64_t sequence;
    uint32_t outer;    // index in `open` of the outermost operator since the last module was entered
    uint32_t modules;  // number of modules entered when it began
    uint32_t first;    // index in `made` when it began; for an outermost operator
    bool backward;     // it is within a function of the backward pass
    uint32_t module, operation;  // in a backward pass: the forward module and operator of its gradient
    const _PyInterpreterFrame* frame;
};

struct Link {
    std::atomic<uint64_t> sequence{NEVER};
    uint32_t module = 0, operation = 0;
};

struct Made {
    uint32_t place;
    uint64_t born;
};

struct Thread {
    Open open[DEPTH];
    uint32_t depth = 0, base = 0;  // modules below `base` were entered before the current backward pass
    Phase phase = OUTSIDE;
    std::vector<uint32_t> modules;
    std::vector<Made> made;
    std::unique_ptr<Link[]> links;
    uint64_t torch_thread = 0;
    std::unordered_map<const char*, std::pair<const char*, uint32_t>> pointers;
    std::unordered_map<Context, uint32_t, Mixed> contexts;
    uint64_t epoch = 0;

    const Open* top() const { return depth && depth <= DEPTH ? &open[depth - 1] : nullptr; }
};

std::vector<Thread*>& everybody() {
    static auto* instance = new std::vector<Thread*>;
    return *instance;
}
thread_local Thread* mine = nullptr;
std::atomic<bool> running{false}, mimicked{false};
std::atomic<uint64_t> epoch{0};
std::atomic<bool> with_devices{false};

struct Leaving {
    ~Leaving() {
        if (mine) {
            std::lock_guard<std::mutex> held(changing);
            std::erase(everybody(), mine);
            delete mine;
        }
        mine = nullptr;
    }
};

Thread& arrived() {
    if (!mine) {
        static thread_local Leaving leaving;
        (void)leaving;
        mine = new Thread;
        mine->torch_thread = at::RecordFunction::currentThreadId();
        std::lock_guard<std::mutex> held(changing);
        everybody().push_back(mine);
    }
    if (mine->epoch != epoch.load(std::memory_order_relaxed)) {  // its state belongs to an earlier recording
        mine->epoch = epoch;
        mine->depth = mine->base = 0;
        mine->modules.clear();
        mine->made.clear();
        mine->contexts.clear();
        mine->pointers.clear();
        mine->links.reset();
        mine->phase = OUTSIDE;
    }
    return *mine;
}

// The number of an operator's name. An address alone does not identify it: a freed name's memory may hold another.
uint32_t spelled(Thread& own, const char* text) {
    auto entry = own.pointers.find(text);
    if (entry != own.pointers.end() && !std::strcmp(entry->second.first, text)) return entry->second.second;
    if (own.pointers.size() > 1 << 11) own.pointers.clear();
    std::lock_guard<std::mutex> held(changing);
    uint32_t name = table().name(text);
    own.pointers[text] = {table().names[name].c_str(), name};
    return name;
}

// -- Python's lines --------------------------------------------------------------------------------------------------

Part part_of(std::string_view file) {
    auto has = [&](std::string_view text) { return file.find(text) != file.npos; };
    if (has("torch/nn/parallel/") || has("torch/distributed/") || has("shoestring/comm/") || has("shoestring/memory/zero"))
        return COMMUNICATION;
    if (has("shoestring/checkpoint/")) return CHECKPOINT;
    bool library = has("/site-packages/") || has("/dist-packages/") || has("/lib/python") || file.starts_with("<");
    return library ? NOWHERE : OWN;
}

// Set the Python line that runs, the innermost one of the program's own code if there is one; searches up to the frame
// `until`, exclusive.
void place(Thread& own, Context& context, const _PyInterpreterFrame* until) {
    PyThreadState* state = PyGILState_GetThisThreadState();
    if (!state) return;
    const _PyInterpreterFrame *shown_first = nullptr, *chosen = nullptr;
    std::string file;
    uint32_t steps = 0;
    for (auto* frame = newest_frame(state); frame && frame != until && steps < PATHS; frame = frame->previous) {
        if (!shown(frame)) continue;
        steps++;
        if (!shown_first) shown_first = frame;
        static thread_local std::unordered_map<const void*, std::pair<const void*, Part>> parts;
        PyCodeObject* code = code_of(frame);
        auto entry = parts.find(code);
        if (entry == parts.end() || entry->second.first != code->co_filename) {
            if (parts.size() > 1 << 12) parts.clear();
            entry = parts.insert_or_assign(code, std::pair(code->co_filename, part_of(text_of(code->co_filename)))).first;
        }
        Part part = entry->second.second;
        if (part > OWN && context.part == NOWHERE) context.part = part;
        if (part == OWN) {
            chosen = frame;
            break;
        }
        if (part != NOWHERE && !chosen) chosen = frame;
    }
    auto* frame = chosen ? chosen : shown_first;
    if (!frame) return;
    PyCodeObject* code = code_of(frame);
    int offset = int((const char*)frame->prev_instr - (const char*)_PyCode_CODE(code));
    int line = PyCode_Addr2Line(code, offset);
    auto text = text_of(code->co_filename) + ":" + std::to_string(std::max(line, 0));
    std::lock_guard<std::mutex> held(changing);
    context.place = table().name(text);
}

// -- contexts --------------------------------------------------------------------------------------------------------

// Operators that only allocate memory: their callers say more.
bool only_makes_room(std::string_view name) {
    for (auto* maker : {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::resize_",
                       "aten::new_empty_strided", "aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::clone",
                       "aten::contiguous", "aten::to", "aten::_to_copy", "aten::zero_", "aten::fill_"})
        if (name == maker) return true;
    return false;
}

bool communicates(std::string_view name) {
    return name.starts_with("c10d::") || name.starts_with("gloo:") || name.starts_with("nccl:") ||
           name.starts_with("_c10d_functional::") || name.starts_with("fsdp::") || name.starts_with("torch.distributed") ||
           name.starts_with("torch::distributed") || name == "record_param_comms";
}

uint32_t context_of(Thread& own) {
    Context now;
    const Open* top = own.top();
    bool backward = top && top->backward;
    uint32_t module = own.modules.size() > own.base ? own.modules.back() : 0;
    now.phase = own.phase == OPTIMIZER ? OPTIMIZER : backward ? (module ? RECOMPUTED : BACKWARD) : module ? FORWARD : OUTSIDE;
    now.module = module;
    if (top) {
        if (!module && backward) now.module = top->module;
        now.outer = spelled(own, own.open[top->outer].call->name());
        for (uint32_t i = own.depth; i-- > top->outer;) {
            const char* name = own.open[i].call->name();
            if (communicates(name)) now.part = COMMUNICATION;
            if (!now.inner && !only_makes_room(name)) now.inner = spelled(own, name);
        }
        if (!now.inner) now.inner = now.outer;
        if (backward && !module && top->operation) now.outer = top->operation;
    }
    if (!module || !top || own.phase == OPTIMIZER) {
        const _PyInterpreterFrame* until = nullptr;
        if (backward)
            for (uint32_t i = own.depth; i-- > 0 && own.open[i].backward;) until = own.open[i].frame;
        place(own, now, until);
    }
    auto entry = own.contexts.find(now);
    if (entry != own.contexts.end()) return entry->second;
    std::lock_guard<std::mutex> held(changing);
    return own.contexts[now] = table().context(now);
}

// -- callbacks of torch: operators -------------------------------------------------------------------------------------

void report_to_us();

void link(Thread& own, int64_t sequence, uint32_t operation) {
    if (!own.links) own.links.reset(new Link[LINKS]);
    Link& link = own.links[sequence % LINKS];
    link.module = own.modules.size() > own.base ? own.modules.back() : 0;
    link.operation = operation;
    link.sequence.store(uint64_t(sequence), std::memory_order_release);
}

void follow(Thread& own, Open& open, uint64_t torch_thread, int64_t sequence) {
    Thread* forward = own.torch_thread == torch_thread ? &own : nullptr;
    std::unique_lock<std::mutex> held(changing, std::defer_lock);
    if (!forward) {
        held.lock();
        for (auto* thread : everybody())
            if (thread->torch_thread == torch_thread) forward = thread;
    }
    if (!forward || !forward->links) return;
    const Link& link = forward->links[sequence % LINKS];
    if (link.sequence.load(std::memory_order_acquire) != uint64_t(sequence)) return;
    open.module = link.module;
    open.operation = link.operation;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn) {
    if (!running.load(std::memory_order_relaxed)) return nullptr;
    Thread& own = arrived();
    if (with_devices.load(std::memory_order_relaxed)) report_to_us();
    if (own.depth >= DEPTH) {
        own.depth++;
        return nullptr;
    }
    const Open* above = own.top();
    uint32_t place = own.depth++;
    Open& open = own.open[place];
    open = {&fn, -1, place, uint32_t(own.modules.size()), uint32_t(own.made.size()), false, 0, 0, nullptr};
    int64_t sequence = fn.seqNr();
    if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
        open.backward = true;
        own.base = uint32_t(own.modules.size());
        PyThreadState* state = PyGILState_GetThisThreadState();
        open.frame = state ? newest_frame(state) : nullptr;
        if (sequence >= 0) follow(own, open, fn.forwardThreadId(), sequence);
        return nullptr;
    }
    if (above) {
        open.backward = above->backward;
        open.module = above->module;
        open.operation = above->operation;
        open.frame = above->frame;
        bool inside = above->modules == open.modules && above->call->scope() == at::RecordScope::FUNCTION;
        if (inside) open.outer = above->outer;
    }
    if (sequence >= 0 && (!open.backward || own.modules.size() > own.base)) {
        // Nested operators share a sequence number; the outermost is the one that the program called.
        open.sequence = sequence;
        bool new_number = !above || above->sequence != sequence;
        if (new_number) link(own, sequence, spelled(own, own.open[open.outer].call->name()));
    }
    return nullptr;
}

void end(const at::RecordFunction& fn, at::ObserverContext*) {
    if (!mine || !mine->depth || mine->epoch != epoch.load(std::memory_order_relaxed)) return;
    Thread& own = *mine;
    if (own.depth > DEPTH) {
        own.depth--;
        return;
    }
    uint32_t place = own.depth - 1;
    while (place && own.open[place].call != &fn) place--;  // operators within it have ended, too
    Open& open = own.open[place];
    if (open.call != &fn) return;  // it began before the recording
    bool outermost = open.outer == place && fn.scope() == at::RecordScope::FUNCTION;
    if (outermost && own.made.size() > open.first) {
        bool graph = open.sequence >= 0 && int64_t(at::sequence_number::peek()) > open.sequence;
        std::lock_guard<std::mutex> held(changing);
        auto& blocks = table().blocks;
        for (size_t i = open.first; i < own.made.size(); i++) {
            Block& block = blocks[own.made[i].place];
            if (block.born == own.made[i].born) block.flags |= SURVIVED | (graph ? IN_GRAPH : 0);
        }
        own.made.resize(open.first);
    }
    if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
        own.made.resize(std::min<size_t>(own.made.size(), open.first));
        if (place && !own.open[place - 1].backward) {  // the engine accumulates gradients after the function, attributed to it
            Open& engine = own.open[place - 1];
            engine.backward = true;
            engine.module = open.module, engine.operation = open.operation, engine.frame = open.frame;
        }
        own.base = 0;
        for (uint32_t i = 0; i < place; i++)
            if (own.open[i].call->scope() == at::RecordScope::BACKWARD_FUNCTION) own.base = own.open[i].modules;
        if (place && own.open[place - 1].backward) own.base = std::max(own.base, own.open[place - 1].modules);
    }
    own.depth = place;
    if (!place) {
        own.made.clear();
        own.base = 0;
    }
}

// -- callbacks of torch: allocations -----------------------------------------------------------------------------------

void allocated(uint64_t address, uint64_t bytes, uint32_t device) {
    Thread& own = arrived();
    uint32_t context = context_of(own);
    std::lock_guard<std::mutex> held(changing);
    uint32_t place = table().add(address, bytes, device, context, 0);
    if (own.depth) own.made.push_back({place, table().blocks[place].born});
    else table().blocks[place].flags = SURVIVED;
}

at::Allocator* plain = nullptr;

void release(void* pointer) {
    if (running.load(std::memory_order_relaxed)) {
        std::lock_guard<std::mutex> held(changing);
        table().remove(uint64_t(pointer), 0);
    }
    plain->raw_deleter()(pointer);
}

struct Watched final : at::Allocator {
    at::DataPtr allocate(size_t bytes) override {
        if (!running.load(std::memory_order_relaxed)) return plain->allocate(bytes);
        at::DataPtr data;
        try {
            data = plain->allocate(bytes);
        } catch (...) {
            uint32_t context = context_of(arrived());
            std::lock_guard<std::mutex> held(changing);
            table().failed_bytes = bytes, table().failed_context = context;
            throw;
        }
        if (data.get() && data.compare_exchange_deleter(plain->raw_deleter(), release))
            allocated(uint64_t(data.get()), bytes, 0);
        return data;
    }
    at::DeleterFnPtr raw_deleter() const override { return release; }
    void copy_data(void* to, const void* from, size_t count) const override { plain->copy_data(to, from, count); }
};
Watched& watched() {
    static Watched* instance = new Watched;  // never destroyed: storages point to it
    return *instance;
}

struct Reporter final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* pointer, int64_t bytes, size_t, size_t reserved, c10::Device device) override {
        if (!running.load(std::memory_order_relaxed)) return;
        if (device.is_cpu() && !mimicked.load(std::memory_order_relaxed)) return;
        uint32_t number = 1 + uint32_t(std::max<int>(0, device.index())) % (DEVICES - 1);
        if (bytes > 0) allocated(uint64_t(pointer), uint64_t(bytes), number);
        std::lock_guard<std::mutex> held(changing);
        if (bytes < 0) table().remove(uint64_t(pointer), number);
        table().devices[number].reserved = reserved;
    }
    bool memoryProfilingEnabled() const override { return running.load(std::memory_order_relaxed); }
};
std::shared_ptr<Reporter>& reporter() {
    static auto* instance = new std::shared_ptr<Reporter>(new Reporter);
    return *instance;
}

void report_to_us() {
    auto kind = c10::DebugInfoKind::PROFILER_STATE;
    if (!c10::ThreadLocalDebugInfo::get(kind)) c10::ThreadLocalDebugInfo::_push(kind, reporter());
}

at::CallbackHandle recorder = 0;

void hold_over_fork() { changing.lock(); }
void release_in_parent() { changing.unlock(); }
void forget_in_child() {
    changing.unlock();
    running = false;
}

}  // namespace

// -- functions called from Python --------------------------------------------------------------------------------------

extern "C" {

// Start a recording that keeps `freed` freed blocks of a window. Returns 0, or 1 if allocations are being recorded
// already, or 2 if another library has replaced the CPU's allocator.
int allocations_start(int devices, int mimic, uint64_t freed) {
    if (running) return 1;
    if (!plain) {
        pthread_atfork(hold_over_fork, release_in_parent, forget_in_child);
        plain = c10::GetDefaultCPUAllocator();
    }
    if (c10::GetCPUAllocator() != plain) return 2;
    {
        std::lock_guard<std::mutex> held(changing);
        table() = Table();
        table().most = table().room = freed;
    }
    epoch++;
    with_devices = devices || mimic;
    mimicked = mimic;
    using enum at::RecordScope;
    recorder = at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes({FUNCTION, BACKWARD_FUNCTION}));
    running = true;
    c10::SetCPUAllocator(&watched());
    return 0;
}

void allocations_stop() {
    if (!running) return;
    c10::SetCPUAllocator(plain);
    at::removeCallback(recorder);
    running = false;
    auto kind = c10::DebugInfoKind::PROFILER_STATE;
    if (with_devices && c10::ThreadLocalDebugInfo::get(kind) == reporter().get()) c10::ThreadLocalDebugInfo::_pop(kind);
}

// Record a CPU storage that was allocated before. Returns 0, or 1 if its memory does not come from the allocator.
int allocations_adopt(c10::StorageImpl* storage) {
    if (storage->device_type() != at::kCPU) return 1;
    at::DataPtr& data = storage->_mutable_data_ptr_no_checks();
    if (!data.get()) return 1;
    if (data.get_deleter() == release || data.compare_exchange_deleter(plain->raw_deleter(), release)) {
        storage->set_allocator(&watched());
        std::lock_guard<std::mutex> held(changing);
        Table& all = table();
        if (all.at[0].contains(uint64_t(data.get()))) return 0;
        uint32_t context = all.context({.phase = BEFORE});
        all.add(uint64_t(data.get()), storage->nbytes(), 0, context, SURVIVED);
        return 0;
    }
    return 1;
}

void allocations_enter(uint32_t module) {
    if (running.load(std::memory_order_relaxed)) arrived().modules.push_back(module);
}

void allocations_leave(uint32_t module) {
    if (!running.load(std::memory_order_relaxed)) return;
    auto& modules = arrived().modules;
    for (size_t i = modules.size(); i-- > mine->base;)
        if (modules[i] == module) {
            modules.resize(i);
            return;
        }
}

void allocations_optimizer(int steps) { arrived().phase = steps ? OPTIMIZER : OUTSIDE; }

uint32_t allocations_name(const char* text) {
    std::lock_guard<std::mutex> held(changing);
    return table().name(text);
}

uint64_t allocations_names() {
    std::lock_guard<std::mutex> held(changing);
    return table().names.size();
}

uint64_t allocations_spelling(uint32_t name, char* room, uint64_t size) {
    std::lock_guard<std::mutex> held(changing);
    const std::string& text = table().names[name];
    std::copy_n(text.data(), std::min<uint64_t>(size, text.size()), room);
    return text.size();
}

// Write (total, peak, event number of the peak, bytes reserved by torch) of a device for the current window.
void allocations_device(uint32_t device, uint64_t* numbers) {
    std::lock_guard<std::mutex> held(changing);
    const Device& usage = table().devices[device];
    uint64_t all[] = {usage.total, usage.peak, usage.peak_event, usage.reserved};
    std::copy_n(all, 4, numbers);
}

// Write (events, blocks of the window that were dropped, bytes of a failed allocation, its context, nanoseconds at the
// start of the window).
void allocations_counts(uint64_t* numbers) {
    std::lock_guard<std::mutex> held(changing);
    const Table& all = table();
    uint64_t values[] = {all.events, all.dropped, all.failed_bytes, all.failed_context, all.begun_at};
    std::copy_n(values, 5, numbers);
}

// Write at most `size` blocks of the window; returns how many there are.
uint64_t allocations_blocks(Block* room, uint64_t size) {
    std::lock_guard<std::mutex> held(changing);
    const Table& all = table();
    uint64_t count = 0;
    auto give = [&](const Block& block) {
        if (count < size) room[count] = block;
        count++;
    };
    for (const Block& block : all.freed) give(block);
    for (const Block& block : all.blocks)
        if (block.born) give(block);
    return count;
}

uint64_t allocations_contexts(Context* room, uint64_t size) {
    std::lock_guard<std::mutex> held(changing);
    const auto& all = table().contexts;
    std::copy_n(all.data(), std::min<uint64_t>(size, all.size()), room);
    return all.size();
}

// Start a new window.
void allocations_fold() {
    std::lock_guard<std::mutex> held(changing);
    table().fold();
}

}  // extern "C"
