// Builds a calling-context tree of torch's operators and the Python lines that call them, while the program runs.
//
// Every thread has a tree of its own, so recording takes no lock. A node is an operator, a Python line, or a link from
// a backward function to the operator whose gradient it computes. Python's frames are read without the GIL: operators
// release it, but the thread's own frames cannot change while it is inside one. Memory grows with the number of
// distinct call paths, not with time; beyond NODES, all new paths of a thread share one node.
//
// The arguments of operators are inspected only for some calls, because torch boxes the arguments of all calls while any
// callback asks for them: at the first calls of new nodes, and at BURST calls after random intervals. Bytes and FLOP are
// the number of calls times the mean of the inspected ones; of the random ones alone once there are ENOUGH. Inspecting a
// matrix product also samples how much of its factors is zero (zeros.h).

#include "frames.h"
#include "zeros.h"
#if defined(__linux__)
#include "native_frames.h"
#endif

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

constexpr uint32_t NODES = 1 << 18, OPERATORS = 256, THREADS = 1 << 14;
constexpr uint32_t OUTER = 96, INNER = 96;  // Python frames kept of a deeper stack, at either end
constexpr uint32_t DEPTH = OUTER + 1 + INNER;  // with the gap between them
constexpr uint32_t LINKS = 1 << 16;  // forward operators a thread remembers for their backward functions
constexpr uint32_t PLACES = 1 << 10;  // instructions whose lines a thread remembers
constexpr uint32_t NONE = ~0u;
constexpr int64_t LOOKS = 512, BURST = 32;  // operators inspected after a new node, and in a random burst
constexpr uint32_t BETWEEN = 1 << 15;  // mean number of operators between two bursts
constexpr uint32_t ENOUGH = 8, VARIANTS = 8;

enum Kind : uint8_t { ROOT, PYTHON, OPERATOR, BACKWARD, SPAN, LINK, OVERFLOWN };

// -- time: the processor's counter if it has one -----------------------------------------------------------------------

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
    std::deque<std::string> all{""};  // a deque, whose elements never move
    std::unordered_map<std::string, uint32_t> known{{"", 0}};

    uint32_t of(std::string_view text) {
        std::lock_guard<std::mutex> held(lock);
        auto [entry, fresh] = known.try_emplace(std::string(text), uint32_t(all.size()));
        if (fresh) all.emplace_back(text);
        return entry->second;
    }
    const char* spelling(uint32_t name) {
        std::lock_guard<std::mutex> held(lock);
        return all[name].c_str();
    }
};
Names& names() {
    static Names* instance = new Names;  // never destroyed: threads may outlive the main thread
    return *instance;
}

// -- floating-point operations ---------------------------------------------------------------------------------------

// Rules exist for operators that never contain one another. A multiplication and an addition count as two, and a causal
// mask halves nothing, as in torch's FlopCounterMode.
enum Rule : uint8_t { UNKNOWN, PRODUCT, ADDED_PRODUCT, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION, ATTENTION_BACKWARD };

Rule rule_of(std::string_view name) {
    static const std::unordered_map<std::string_view, Rule> rules{
        {"aten::mm", PRODUCT},
        {"aten::bmm", PRODUCT},
        {"aten::mv", PRODUCT},
        {"aten::dot", PRODUCT},
        {"aten::addmm", ADDED_PRODUCT},
        {"aten::baddbmm", ADDED_PRODUCT},
        {"aten::addmv", ADDED_PRODUCT},
        {"aten::_addmm_activation", ADDED_PRODUCT},
        {"aten::convolution", CONVOLUTION},
        {"aten::convolution_backward", CONVOLUTION_BACKWARD},
        {"aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION},
        {"aten::_scaled_dot_product_flash_attention", ATTENTION},
        {"aten::_scaled_dot_product_efficient_attention", ATTENTION},
        {"aten::_scaled_dot_product_cudnn_attention", ATTENTION},
        {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", ATTENTION_BACKWARD},
        {"aten::_scaled_dot_product_flash_attention_backward", ATTENTION_BACKWARD},
        {"aten::_scaled_dot_product_efficient_attention_backward", ATTENTION_BACKWARD},
        {"aten::_scaled_dot_product_cudnn_attention_backward", ATTENTION_BACKWARD},
    };
    auto entry = rules.find(name);
    return entry == rules.end() ? UNKNOWN : entry->second;
}

using Values = c10::ArrayRef<const c10::IValue>;

c10::IntArrayRef sizes_of(const Values& values, size_t index) {
    static const int64_t none[] = {0};
    if (index >= values.size() || !values[index].isTensor() || !values[index].toTensor().defined()) return none;
    return values[index].toTensor().sizes();
}

double product(c10::IntArrayRef sizes, size_t from = 0) {
    double all = 1;
    for (size_t i = from; i < sizes.size(); i++) all *= double(sizes[i]);
    return all;
}

// FLOP of a call; of a convolution FLOP per element of its output, in which case `by_output` is set.
double flops_of(Rule rule, const Values& inputs, bool& by_output) {
    auto first = rule == ADDED_PRODUCT ? 1 : rule == ATTENTION_BACKWARD ? 1 : 0;
    auto a = sizes_of(inputs, first), b = sizes_of(inputs, first + 1), c = sizes_of(inputs, first + 2);
    switch (rule) {
        case PRODUCT:
        case ADDED_PRODUCT:
            return 2 * product(a) * (b.size() > 1 ? double(b.back()) : 1);
        case CONVOLUTION:
            if (inputs.size() > 6 && inputs[6].isBool() && inputs[6].toBool()) return 2 * product(a) * product(b, 1);
            by_output = true;
            return 2 * product(b, 1);
        case CONVOLUTION_BACKWARD: {
            bool transposed = inputs.size() > 7 && inputs[7].isBool() && inputs[7].toBool();
            double wanted = 2;
            if (inputs.size() > 10 && inputs[10].isBoolList())
                wanted = bool(inputs[10].toBoolList()[0]) + bool(inputs[10].toBoolList()[1]);
            return wanted * 2 * product(transposed ? b : a) * product(c, 1);
        }
        case ATTENTION:
        case ATTENTION_BACKWARD:
            if (a.size() != 4 || b.size() != 4 || c.size() != 4) return 0;
            // The forward pass has two products, the backward pass five, of which three are as wide as the keys.
            if (rule == ATTENTION) return 2 * product(a) / a[3] * b[2] * (a[3] + c[3]);
            return 2 * product(a) / a[3] * b[2] * (3. * a[3] + 2. * c[3]);
        default:
            return 0;
    }
}

// -- arguments -------------------------------------------------------------------------------------------------------

const char* spelled(at::ScalarType type) {
    switch (type) {
        case at::kFloat: return "float32";
        case at::kDouble: return "float64";
        case at::kHalf: return "float16";
        case at::kBFloat16: return "bfloat16";
        case at::kLong: return "int64";
        case at::kInt: return "int32";
        case at::kShort: return "int16";
        case at::kChar: return "int8";
        case at::kByte: return "uint8";
        case at::kBool: return "bool";
        default: return c10::toString(type);
    }
}

struct Looked : at::ObserverContext {  // the inspected arguments of a call
    uint32_t node = 0;
    bool drawn = false, described = false, by_output = false, in_place = false, viewed = false;
    uint32_t hash = 2166136261u;
    double bytes = 0, flops = 0;
    int shown = 0;
    std::string text;
    c10::SmallVector<const void*, 4> storages;

    void mix(uint64_t value) {
        hash = (hash ^ uint32_t(value)) * 16777619u;
        hash = (hash ^ uint32_t(value >> 32)) * 16777619u;
    }

    void tensor(const at::Tensor& tensor, bool output) {
        if (!tensor.defined()) return;
        auto* impl = tensor.unsafeGetTensorImpl();
        if (impl->has_symbolic_sizes_strides()) return;
        bool strided = impl->layout() == at::kStrided && tensor.has_storage();
        const char* layout = "";
        double size = double(impl->numel()) * double(tensor.element_size());
        if (strided) {
            auto& storage = tensor.storage();
            const void* where = storage.unsafeGetStorageImpl();
            if (!output) storages.push_back(where);
            else if (!in_place && std::find(storages.begin(), storages.end(), where) != storages.end()) viewed = true;
            size = std::min(size, double(storage.nbytes()));  // an expanded tensor has less memory than its shape says
            if (!tensor.is_contiguous())
                layout = tensor.is_contiguous(at::MemoryFormat::ChannelsLast) ? " channels_last"
                         : tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d) ? " channels_last_3d"
                                                                                  : " strided";
        } else layout = " not strided";
        bytes += size;
        mix(uint64_t(tensor.scalar_type()) << 8 | uint64_t(tensor.device().type()));
        mix(std::string_view(layout).size());
        for (auto size : tensor.sizes()) mix(size);
        if (!described || ++shown > 6) return;
        if (!text.empty() && text.back() != ' ') text += ", ";
        text += spelled(tensor.scalar_type());
        text += '[';
        for (size_t i = 0; i < tensor.sizes().size(); i++) text += (i ? "," : "") + std::to_string(tensor.sizes()[i]);
        text += ']';
        text += layout;
        if (!tensor.device().is_cpu()) text += " " + c10::DeviceTypeName(tensor.device().type(), true);
    }

    void values(const Values& all, bool output) {
        for (auto& value : all) {
            if (value.isTensor()) tensor(value.toTensor(), output);
            else if (value.isTensorList())
                for (const at::Tensor& item : value.toTensorVector()) tensor(item, output);
            else if (value.isOptionalTensorList())
                for (const std::optional<at::Tensor>& item : value.toOptionalTensorList())
                    if (item) tensor(*item, output);
        }
    }
};

// -- the tree of a thread --------------------------------------------------------------------------------------------

struct alignas(64) Node {
    uint32_t parent, name, line;     // of a link: the forward operator's thread and node
    uint32_t last = NONE, next = NONE;  // the child seen last, and the sibling that followed this node last time
    Kind kind;
    uint8_t rule = 0;                // how its FLOP are counted
    const char* text = nullptr;      // address of the operator's name when it was seen last
    const char* spelled = nullptr;   // the name in `names`
    uint64_t count = 0, inclusive = 0;  // ticks
    uint64_t within = 0;             // ticks of its children
    uint64_t least = ~0ull, most = 0, graphed = 0;
    double squares = 0;
    uint32_t arguments = 0;          // index in `Thread::arguments`
};

struct Arguments {  // of the inspected calls of a node
    uint64_t looked = 0, drawn = 0;  // inspected because the node was new, and at random
    double looked_bytes = 0, looked_flops = 0, drawn_bytes = 0, drawn_flops = 0;
    uint32_t text = 0, variants = 0;
    uint32_t hashes[VARIANTS] = {};
    Zeros zeros[2];  // in the two factors of a product
};

struct Place {  // an instruction of Python
    const void *instruction = nullptr, *file = nullptr, *title = nullptr;
    int first = 0;
    uint32_t name = 0, line = 0;  // "file\tqualified name"
};

struct Frame {
    const _PyInterpreterFrame* frame;
    const PyCodeObject* code;
    const void* instruction;
    uint32_t node;
};

enum Work : uint8_t { NESTED, WALKED, LINKED, WORKS };  // work of recording an operator: walking frames, following a link

struct Open {  // an operator that is running
    const at::RecordFunction* call;
    const _PyInterpreterFrame* frame;
    uint64_t begun, paid, within, counted;  // `counted`: its ticks already added to its parent's
    int64_t sequence;
    uint32_t node;
    bool span, graphs;
    Work work;
};

struct Stack {  // the Python frames of a span, which may outlive the function that began it
    uint32_t level;
    std::vector<Frame> frames;   // frames when it began
    uint32_t same = 0;           // how many of these were unchanged at the last operator within
    std::vector<Frame> current;  // frames called from there, with nodes
};

struct Thread {
    Node* nodes;
    std::atomic<uint32_t> size{0};
    uint32_t depth = 0;  // running operators, including those beyond OPERATORS
    uint64_t paid = 0, cost[2 * WORKS] = {};  // ticks of recording: total, and means for the begin and the end of an operator
    uint64_t events = 0, burst = BETWEEN, random = 88172645463325252ull;
    std::unique_ptr<std::atomic<uint64_t>[]> links;  // by sequence number: its lower half and the node
    PyThreadState* state = nullptr;
    Thread* forward = nullptr;  // thread of the last backward function's forward operator
    std::atomic<uint64_t> torch_thread{0};
    uint64_t lost = 0, ident = 0;
    uint32_t index = 0, level = 0;  // `level`: frames in `stack`
    uint32_t profile = 0;  // number of the profile that `open` belongs to; operators of an earlier profile are discarded
    bool lasting = false, fresh = false;
    void* timer = nullptr;  // triggers samples of its native frames; the first of a process may be null
    bool timed = false;  // whether there is one
    Open open[OPERATORS];
    Frame stack[DEPTH];
    Place places[PLACES];
    std::vector<Stack> spans;
    std::vector<std::pair<uint64_t, uint32_t>> table;  // hash table: (hash of parent and child, node)
    std::unordered_map<const void*, std::pair<const char*, uint32_t>> pointers;
    std::deque<Arguments> arguments{Arguments()};

    Thread() : table(1 << 10, {0, NONE}) {
        auto* room = mmap(nullptr, NODES * sizeof(Node), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) throw std::bad_alloc();
        nodes = static_cast<Node*>(room);
        add(NONE, 0, 0, ROOT);
    }
    Node& at(uint32_t index) { return nodes[index]; }

    uint32_t add(uint32_t parent, uint32_t name, uint32_t line, Kind kind) {
        uint32_t index = size.load(std::memory_order_relaxed);
        Node& node = *new (&nodes[index]) Node;
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

    // The node of an operator. Its name is looked up only if it is not the operator that followed here last time.
    uint32_t operation(uint32_t parent, const char* text, Kind kind) {
        Node& above = at(parent);
        uint32_t guess = above.last == NONE ? NONE : at(above.last).next;
        if (guess != NONE) {
            Node& node = at(guess);
            if (node.text == text && node.kind == kind && !std::strcmp(node.spelled, text)) {
                above.last = guess;
                return guess;
            }
        }
        uint32_t name = name_of(text);
        guess = child(parent, name, 0, kind);
        Node& node = at(guess);
        if (!node.spelled) {
            node.spelled = names().spelling(name);
            node.rule = rule_of(text);
            fresh = true;
        }
        node.text = text;
        return guess;
    }

    uint32_t name_of(const char* text) {
        auto entry = pointers.find(text);
        // An address alone does not identify a name: a freed name's memory may hold another.
        if (entry != pointers.end() && !std::strcmp(entry->second.first, text)) return entry->second.second;
        if (pointers.size() > 1 << 11) pointers.clear();
        uint32_t name = names().of(text);
        pointers[text] = {names().spelling(name), name};
        return name;
    }

    // The node of the line that a frame runs, below `above`. Lines are cached: finding one is slow in a long function.
    uint32_t line(uint32_t above, const PyCodeObject* code, const void* instruction) {
        Place& place = places[(uint64_t(instruction) >> 1) * 0x9E3779B97F4A7C15ull >> 54];
        bool same = place.instruction == instruction && place.file == code->co_filename &&
                    place.title == code->co_qualname && place.first == code->co_firstlineno;
        if (!same) {
            auto text = text_of(code->co_filename) + "\t" + text_of(code->co_qualname);
            int offset = int((const char*)instruction - (const char*)_PyCode_CODE(code));
            int number = PyCode_Addr2Line(const_cast<PyCodeObject*>(code), offset);
            place = {instruction, code->co_filename, code->co_qualname, code->co_firstlineno, names().of(text),
                     uint32_t(std::max(number, 0))};
        }
        return child(above, place.name, place.line, PYTHON);
    }

    void link(int64_t sequence, uint32_t node) {
        if (!links) {
            links.reset(new std::atomic<uint64_t>[LINKS]);
            for (uint32_t i = 0; i < LINKS; i++) links[i].store(~0ull, std::memory_order_relaxed);
        }
        links[sequence % LINKS].store(uint64_t(sequence) << 32 | node, std::memory_order_release);
    }

    uint32_t linked(int64_t sequence) const {
        if (!links) return NONE;
        uint64_t link = links[sequence % LINKS].load(std::memory_order_acquire);
        return link >> 32 == (uint64_t(sequence) & ~0u) ? uint32_t(link) : NONE;
    }
};

// Guards the state below. A fork waits for it, so that a child never inherits it locked.
std::mutex changing;
std::atomic<bool> forked{false};
std::atomic<uint32_t> known{0};
Thread* everybody[THREADS];
std::vector<Thread*>& idle() {
    static auto* instance = new std::vector<Thread*>;
    return *instance;
}
__attribute__((tls_model("initial-exec"))) thread_local Thread* mine = nullptr;

#if defined(__linux__)
std::atomic<int64_t> native_every{0};  // nanoseconds of a thread's processor time between samples; 0: no samples

void watch(Thread& own) { own.timed = native_frames::watch(native_every, own.timer); }

void unwatch(Thread& own) {
    if (own.timed) timer_delete(own.timer);
    own.timed = false;
}

bool running_operator(native_frames::Running& current) {
    if (!mine || !mine->depth || mine->depth > OPERATORS || forked) return false;
    const Open& open = mine->open[mine->depth - 1];
    current = {mine->index, open.node, reinterpret_cast<uintptr_t>(open.call)};
    if (open.node >= mine->size) return false;  // its node is being created
    return mine->at(open.node).kind == OPERATOR || mine->at(open.node).kind == BACKWARD;
}
#else
constexpr int64_t native_every = 0;
void watch(Thread&) {}
void unwatch(Thread&) {}
#endif

struct Leaving {  // gives a thread's tree to the next new thread
    ~Leaving() {
        std::lock_guard<std::mutex> held(changing);
        if (!mine) return;
        unwatch(*mine);
        idle().push_back(mine);
        mine = nullptr;
    }
};

Thread* arrive() {
    static thread_local Leaving leaving;
    (void)leaving;
    std::lock_guard<std::mutex> held(changing);
    if (!idle().empty()) {
        mine = idle().back();
        idle().pop_back();
        mine->depth = mine->level = 0;
        mine->spans.clear();
        mine->lasting = false;
        mine->state = nullptr;
    } else {
        if (known == THREADS) return nullptr;
        mine = new Thread;  // never deleted: its tree is part of the profile
        mine->child(0, 0, 0, OVERFLOWN);
        mine->index = known;
        everybody[known] = mine;
        known++;
    }
    mine->torch_thread = at::RecordFunction::currentThreadId();
    return mine;
}

// -- Python's frames -------------------------------------------------------------------------------------------------

uint32_t gap_name = 0;  // name of the node for frames left out; `tree.py` knows it

// A stack of Python frames; of a deep stack only the outermost and the innermost frames, with a gap between them.
struct Frames {
    const _PyInterpreterFrame *inner[INNER], *outer[OUTER];  // newest first; the oldest others in a ring
    uint32_t count = 0;
    bool reached = true;  // whether the walk ended at the requested frame

    void add(const _PyInterpreterFrame* frame) {
        (count < INNER ? inner[count] : outer[(count - INNER) % OUTER]) = frame;
        count++;
    }
    bool deep() const { return count > OUTER + INNER; }
    uint32_t levels() const { return deep() ? DEPTH : count; }
    // The frame at a level, where 0 is the outermost; null at the gap.
    const _PyInterpreterFrame* at(uint32_t level) const {
        uint32_t age = count - 1 - level;
        if (deep() && level >= OUTER) return level == OUTER ? nullptr : inner[DEPTH - 1 - level];
        return age < INNER ? inner[age] : outer[(age - INNER) % OUTER];
    }
};

// Collect this thread's frames from the newest up to `until`, exclusive.
void collect(Thread& own, const _PyInterpreterFrame* until, Frames& frames) {
    auto* frame = newest_frame(own.state);
    for (; frame && frame != until; frame = frame->previous)
        if (shown(frame)) frames.add(frame);
    frames.reached = frame == until;
}

// Whether a frame is at the instruction where it was; two gaps are equal.
bool unmoved(const Frame& then, const _PyInterpreterFrame* frame) {
    if (!frame || !then.code) return !frame && !then.code;
    return then.instruction == frame->prev_instr && then.code == code_of(frame);
}

// The node of a frame, or of a gap, below `above`.
Frame placed(Thread& own, uint32_t above, const _PyInterpreterFrame* frame) {
    if (!frame) return {nullptr, nullptr, nullptr, own.child(above, gap_name, 0, OVERFLOWN)};
    uint32_t node = own.line(above, code_of(frame), frame->prev_instr);
    return {frame, code_of(frame), frame->prev_instr, node};
}

// The node of the Python line that runs in this thread, below the nodes of all its callers.
uint32_t whole_path(Thread& own) {
    Frames frames;
    collect(own, nullptr, frames);
    uint32_t depth = frames.levels(), node = 0, level = 0;
    for (; level < std::min(depth, own.level); level++) {
        auto* frame = frames.at(level);
        Frame& then = own.stack[level];
        if (!unmoved(then, frame)) break;
        then.frame = frame;
        node = then.node;
    }
    for (; level < depth; level++) node = (own.stack[level] = placed(own, node, frames.at(level))).node;
    own.level = depth;
    return node;
}

// The node of the innermost of `frames`, below `node`, without the outermost `skipped` frames. `before` has the frames and
// nodes of the last call, which are reused as far as the frames are unchanged, and is updated.
uint32_t follow(Thread& own, uint32_t node, const Frames& frames, uint32_t skipped, std::vector<Frame>& before) {
    uint32_t depth = frames.levels() - skipped, level = 0;
    for (; level < std::min<size_t>(depth, before.size()); level++) {
        if (!unmoved(before[level], frames.at(skipped + level))) break;
        node = before[level].node;
    }
    before.resize(level);
    for (; level < depth; level++) {
        before.push_back(placed(own, node, frames.at(skipped + level)));
        node = before.back().node;
    }
    return node;
}

// The node of the running line below a span: only frames that were called since it began.
uint32_t path_in_span(Thread& own, const Open& above) {
    Stack& stack = own.spans.back();
    if (stack.same && stack.current.size()) {
        // If the function that began the span still runs, its callers are unchanged.
        Frames frames;
        auto* until = stack.frames[stack.same - 1].frame;
        collect(own, until, frames);
        auto* owner = frames.count ? frames.at(0) : nullptr;
        if (owner && owner == stack.current[0].frame && owner->previous == until &&
            code_of(owner) == stack.current[0].code)
            return follow(own, above.node, frames, 0, stack.current);
    }
    stack.current.clear();
    Frames whole;
    collect(own, nullptr, whole);
    if (!whole.deep()) {
        stack.same = 0;
        for (uint32_t level = 0; level < std::min<size_t>(whole.count, stack.frames.size()); level++) {
            const Frame& then = stack.frames[level];
            if (then.frame != whole.at(level) || !unmoved(then, whole.at(level))) break;
            stack.same++;
        }
        return follow(own, above.node, whole, stack.same, stack.current);
    }
    // Across a gap, levels do not correspond: search for the innermost frame that has not moved since the span began,
    // usually the caller of the function that began it.
    stack.same = uint32_t(stack.frames.size());
    for (uint32_t tried = 0; stack.same && tried < INNER; stack.same--, tried++) {
        const Frame& then = stack.frames[stack.same - 1];
        if (!then.code) break;
        Frames frames;
        collect(own, then.frame, frames);
        if (frames.reached && unmoved(then, then.frame)) return follow(own, above.node, frames, 0, stack.current);
    }
    stack.same = 0;
    return above.node;
}

// The node of the running line below an operator: only frames that it has called.
uint32_t path_below(Thread& own, const Open& above) {
    Frames frames;
    std::vector<Frame> nothing;
    collect(own, above.frame, frames);
    return follow(own, above.node, frames, 0, nothing);
}

// -- callbacks of torch ------------------------------------------------------------------------------------------------

std::atomic<bool> with_frames{true}, looking{false}, at_random{false};
std::atomic<int64_t> looks{0};
at::CallbackHandle recorder = 0, looker = 0;
std::atomic<uint32_t> profiles{0};  // number of profiles begun
bool running = false, paused = false;
uint64_t torch_cost = 0;  // ticks that torch takes to call the callbacks of an operator

void look_at_next(int64_t calls, bool drawn) {
    at_random = drawn;
    looks = calls;
    if (looking) return;
    std::lock_guard<std::mutex> held(changing);
    if (!running || paused || looking) return;
    looking = true;
    at::reenableCallback(looker);
}

void look_no_more() {
    std::lock_guard<std::mutex> held(changing);
    if (!running || paused || !looking) return;
    looking = false;
    at::disableCallback(looker);
}

// Start a random burst, and draw when the next one starts, so that every operator is as likely to be inspected.
void draw(Thread& own) {
    own.random ^= own.random << 13;
    own.random ^= own.random >> 7;
    own.random ^= own.random << 17;
    own.burst = own.events + 1 + own.random % (2 * BETWEEN);
    if (!looking) look_at_next(BURST, true);
}

uint32_t forward_link(Thread& own, uint32_t node, uint64_t torch_thread, int64_t sequence) {
    if (!own.forward || own.forward->torch_thread != torch_thread) {
        own.forward = nullptr;
        for (uint32_t i = 0; i < known && !own.forward; i++)
            if (everybody[i]->torch_thread == torch_thread) own.forward = everybody[i];
    }
    uint32_t target = own.forward ? own.forward->linked(sequence) : NONE;
    return target == NONE ? node : own.child(node, own.forward->index, target, LINK);
}

void remember_stack(Thread& own, uint32_t level) {
    Frames frames;
    collect(own, nullptr, frames);
    own.spans.push_back({.level = level});
    for (uint32_t i = 0; i < frames.levels(); i++) {
        auto* frame = frames.at(i);
        own.spans.back().frames.push_back(frame ? Frame{frame, code_of(frame), frame->prev_instr, 0} : Frame{});
    }
}

// Update a moving average of ticks, in 256ths; large values are clipped, since the thread was interrupted.
void average(uint64_t& mean, uint64_t ticks) {
    uint64_t clipped = std::min<uint64_t>(ticks, 1 << 14) << 8;
    mean = mean ? mean + (int64_t(clipped) - int64_t(mean)) / 16 : clipped;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn) {
    if (__builtin_expect(forked, 0)) return nullptr;
    if (__builtin_expect(!mine, 0) && !arrive()) return nullptr;
    Thread& own = *mine;
    if (__builtin_expect(own.profile != profiles.load(std::memory_order_relaxed), 0)) {
        own.profile = profiles;
        own.depth = 0;
        own.spans.clear();
    }
    if (own.depth >= OPERATORS) {
        own.depth++;
        return nullptr;
    }
    bool measured = !(own.events & 31);  // the cost of recording is measured at every 32nd operator
    if (__builtin_expect(measured && native_every && !own.timed, 0)) watch(own);
    uint64_t entered = measured ? now() : 0;
    const Open* above = own.depth ? &own.open[own.depth - 1] : nullptr;
    const _PyInterpreterFrame* frame = nullptr;
    uint32_t node = above ? above->node : 0;
    Work work = NESTED;
    if (with_frames.load(std::memory_order_relaxed)) {
        // A thread that Python did not start may get a new state each time it runs Python.
        if (!own.lasting) own.state = PyGILState_GetThisThreadState();
        frame = own.state ? newest_frame(own.state) : nullptr;
        if (frame && (!above || above->span || frame != above->frame)) work = WALKED;
        if (frame && !above) node = whole_path(own);
        else if (frame && above->span) node = path_in_span(own, *above);
        else if (frame && frame != above->frame) node = path_below(own, *above);
    }
    auto scope = fn.scope();
    int64_t sequence = fn.seqNr();
    Kind kind = OPERATOR;
    if (scope != at::RecordScope::FUNCTION) {
        kind = scope == at::RecordScope::USER_SCOPE ? SPAN : BACKWARD;
        if (kind == BACKWARD && sequence >= 0) {
            node = forward_link(own, node, fn.forwardThreadId(), sequence);
            work = LINKED;
        }
    }
    node = own.operation(node, fn.name(), kind);
    Open& open = own.open[own.depth++];
    open.call = &fn;
    open.frame = frame;
    open.node = node;
    open.within = open.counted = 0;
    open.span = open.graphs = false;
    open.work = work;
    open.sequence = above ? above->sequence : -1;
    if (kind == OPERATOR && sequence >= 0) {
        // Nested operators share a sequence number; the outermost is the one that the program called.
        if (open.sequence != sequence) own.link(sequence, node);
        open.sequence = sequence;
        open.graphs = true;
    } else if (kind != OPERATOR) {
        open.sequence = -1;
        if (kind == SPAN && frame) {
            remember_stack(own, own.depth);
            open.span = true;
        }
    }
    if (__builtin_expect(own.fresh, 0)) {
        own.fresh = false;
        look_at_next(LOOKS, false);
    }
    if (__builtin_expect(own.events >= own.burst, 0)) draw(own);
    open.paid = own.paid;
    open.begun = now();
    if (measured) average(own.cost[work], open.begun - entered);
    return nullptr;
}

// Count the operator at `place`, which ended at `entered`, perhaps before operators within it (spans may overlap).
void finish(Thread& own, uint32_t place, uint64_t entered) {
    Open& done = own.open[place];
    uint64_t ticks = entered - done.begun, paid = own.paid - done.paid;
    ticks = ticks > paid ? ticks - paid : 0;  // without the cost of recording the operators within
    if (__builtin_expect(place + 1 < own.depth, 0)) {
        Open& child = own.open[place + 1];
        uint64_t so_far = std::min(entered - child.begun, ticks) - child.counted;
        child.counted += so_far;
        done.within += so_far;
    }
    ticks = std::max(ticks, done.within);
    Node& node = own.at(done.node);
    if (__builtin_expect(node.least == ~0ull, 0)) own.fresh |= node.kind == OPERATOR;  // its first call in this profile
    node.count++;
    node.inclusive += ticks;
    node.within += done.within;
    node.least = std::min(node.least, ticks);
    node.most = std::max(node.most, ticks);
    node.squares += double(ticks) * double(ticks);
    if (done.graphs && int64_t(at::sequence_number::peek()) > done.sequence) node.graphed++;
    if (place) own.open[place - 1].within += ticks - std::min(done.counted, ticks);
    if (done.span)
        own.spans.erase(std::find_if(own.spans.begin(), own.spans.end(), [&](Stack& s) { return s.level == place + 1; }));
    own.depth--;
    for (uint32_t i = place; i < own.depth; i++) own.open[i] = own.open[i + 1];
    if (__builtin_expect(place < own.depth, 0))
        for (auto& stack : own.spans) stack.level -= stack.level > place;
}

void end(const at::RecordFunction& fn, at::ObserverContext*) {
    uint64_t entered = now();
    if (!mine || !mine->depth || mine->profile != profiles) return;  // it began before the recording
    Thread& own = *mine;
    if (own.depth > OPERATORS) {
        own.depth--;
        return;
    }
    uint32_t place = own.depth - 1;
    while (own.open[place].call != &fn)
        if (!place--) return;  // it began in another thread
    bool measured = !(own.events & 31);
    Work work = own.open[place].work;
    // What an operator leaves running (a collective) continues elsewhere: later operators do not run within it.
    if (own.at(own.open[place].node).kind == OPERATOR)
        while (place + 1 < own.depth) finish(own, own.depth - 1, entered);
    finish(own, place, entered);
    own.paid += ((own.cost[work] + own.cost[WORKS + work]) >> 8) + torch_cost;
    own.events++;
    if (measured) average(own.cost[WORKS + work], now() - entered);
}

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& fn) {
    if (looks.fetch_sub(1, std::memory_order_relaxed) <= 1) look_no_more();
    if (!mine || !mine->depth || mine->depth > OPERATORS || forked) return nullptr;
    Thread& own = *mine;
    Open& open = own.open[own.depth - 1];
    Node& node = own.at(open.node);
    if (open.call != &fn || node.kind != OPERATOR) return nullptr;
    uint64_t entered = now();
    auto looked = std::make_unique<Looked>();
    try {
        if (!node.arguments) {
            node.arguments = uint32_t(own.arguments.size());
            own.arguments.emplace_back();
        }
        looked->node = open.node;
        looked->drawn = at_random;
        looked->described = !own.arguments[node.arguments].text;
        looked->in_place = node.spelled[std::strlen(node.spelled) - 1] == '_';
        looked->values(fn.inputs(), false);
        bool nested = false;
        for (uint32_t i = 0; i + 1 < own.depth; i++) nested |= own.at(own.open[i].node).rule != UNKNOWN;
        if (node.rule && !nested) looked->flops = flops_of(Rule(node.rule), fn.inputs(), looked->by_output);
        if (node.rule == PRODUCT || node.rule == ADDED_PRODUCT)
            for (uint32_t i = 0; i < 2; i++) {
                size_t index = i + (node.rule == ADDED_PRODUCT);
                if (index < fn.inputs().size() && fn.inputs()[index].isTensor())
                    own.arguments[node.arguments].zeros[i].look(fn.inputs()[index].toTensor());
            }
    } catch (...) {  // of a tensor that has no sizes
        looked = nullptr;
    }
    uint64_t left = now();
    own.paid += left - entered;
    open.paid = own.paid;
    open.begun = left;
    return looked;
}

void looked_at(const at::RecordFunction& fn, at::ObserverContext* context) {
    if (!context || !mine || forked) return;
    Thread& own = *mine;
    uint64_t entered = now();
    auto& looked = static_cast<Looked&>(*context);
    try {
        if (looked.described) looked.text += " -> ";
        looked.shown = 3;
        auto& outputs = fn.outputs();
        if (looked.by_output) {
            bool fits = outputs.size() && outputs[0].isTensor() && outputs[0].toTensor().defined();
            looked.flops *= fits ? double(outputs[0].toTensor().numel()) : 0;
        }
        looked.values(Values(outputs.data(), outputs.size()), true);
        if (looked.viewed) looked.bytes = 0;
        Arguments& totals = own.arguments[own.at(looked.node).arguments];
        (looked.drawn ? totals.drawn : totals.looked)++;
        (looked.drawn ? totals.drawn_bytes : totals.looked_bytes) += looked.bytes;
        (looked.drawn ? totals.drawn_flops : totals.looked_flops) += looked.flops;
        if (!totals.text && looked.described) totals.text = names().of(looked.text);
        auto* end = totals.hashes + totals.variants;
        if (totals.variants < VARIANTS && std::find(totals.hashes, end, looked.hash) == end)
            totals.hashes[totals.variants++] = looked.hash;
    } catch (...) {  // of a tensor that has no sizes
    }
    own.paid += now() - entered;
}

std::unique_ptr<at::ObserverContext> nothing(const at::RecordFunction&) { return nullptr; }
void nothing_ends(const at::RecordFunction&, at::ObserverContext*) {}

// Ticks that torch takes to call a callback: the minimum over some rounds.
uint64_t calling_cost() {
    uint64_t best[2] = {~0ull, ~0ull};
    for (int round = 0; round < 10; round++) {
        at::CallbackHandle some = round % 2 ? at::addGlobalCallback(at::RecordFunctionCallback(nothing, nothing_ends)) : 0;
        uint64_t entered = now();
        for (int i = 0; i < 100; i++) {
            at::RecordFunction guard(at::RecordScope::FUNCTION);
            if (guard.isActive()) guard.before("aten::none", -1);
        }
        best[round % 2] = std::min(best[round % 2], now() - entered);
        if (some) at::removeCallback(some);
    }
    return best[1] > best[0] ? (best[1] - best[0]) / 100 : 0;
}

void hold_over_fork() {
    changing.lock();
    names().lock.lock();
}
void release_in_parent() {
    names().lock.unlock();
    changing.unlock();
}
void forget_in_child() {
    names().lock.unlock();
    changing.unlock();
    if (running) forked = true;  // until the child starts a profile of its own
    if (mine) mine->depth = 0;
    for (uint32_t i = 0; i < known; i++) everybody[i]->timed = false;  // timers are not inherited by a fork
}

void remove_callbacks() {
    for (auto* callback : {&recorder, &looker}) {
        if (*callback) at::removeCallback(*callback);
        *callback = 0;
    }
    looking = running = paused = false;
}

uint64_t ticks_at_start = 0;
std::chrono::steady_clock::time_point time_at_start;

}  // namespace

// -- functions called from Python --------------------------------------------------------------------------------------

extern "C" {

// Start or continue recording. Returns 0, or 1 if a profile is being recorded.
int callpaths_start(int frames) {
    if (forked) {  // what the parent recorded does not belong to this process
        std::lock_guard<std::mutex> held(changing);
        remove_callbacks();
        forked = false;
    }
    if (running) return 1;
    if (!ticks_at_start) {
        gap_name = names().of("\u2026 frames left out \u2026");
        pthread_atfork(hold_over_fork, release_in_parent, forget_in_child);
        ticks_at_start = now();
        time_at_start = std::chrono::steady_clock::now();
        torch_cost = calling_cost();
    }
    if (!mine && !arrive()) return 1;
    mine->state = PyGILState_GetThisThreadState();
    mine->lasting = true;
    if (mine->state) mine->ident = mine->state->thread_id;
    std::lock_guard<std::mutex> held(changing);
    for (uint32_t i = 0; i < known; i++) {  // nodes are kept, but not what an earlier profile recorded of their calls
        for (uint32_t node = 0; node < everybody[i]->size; node++) {
            everybody[i]->at(node).least = ~0ull;
            everybody[i]->at(node).most = 0;
        }
        std::fill(everybody[i]->arguments.begin(), everybody[i]->arguments.end(), Arguments());
    }
    with_frames = frames;
    looks = LOOKS;
    at_random = false;
    profiles++;
    looking = running = true;
    using enum at::RecordScope;
    recorder = at::addGlobalCallback(
        at::RecordFunctionCallback(begin, end).scopes({FUNCTION, BACKWARD_FUNCTION, USER_SCOPE}));
    looker = at::addGlobalCallback(
        at::RecordFunctionCallback(look, looked_at).scopes({FUNCTION}).needsInputs(true).needsOutputs(true));
    return 0;
}

int callpaths_stop() {
    std::lock_guard<std::mutex> held(changing);
    if (!running) return 1;
    remove_callbacks();
#if defined(__linux__)
    native_every = 0;
    native_frames::on = false;
    for (uint32_t i = 0; i < known; i++) unwatch(*everybody[i]);
#endif
    return 0;
}

// Start sampling the native frames of operators, at this interval of a thread's processor time. Returns 0, 1 if the
// system has no such timers, or 2 if another library uses the signal.
int callpaths_native(int64_t nanoseconds) {
#if defined(__linux__)
    std::lock_guard<std::mutex> held(changing);
    native_frames::running_in = running_operator;
    native_frames::taken = native_frames::written.load();
    native_frames::dropped = 0;
    if (!native_frames::begin()) return 2;
    native_every = nanoseconds;
    return 0;
#else
    return 1;
#endif
}

// Write the next sample: (thread, node, whether it is complete) and addresses. Returns their number plus 1, or 0 if there
// is no sample.
uint32_t callpaths_native_sample(uint32_t* about, uint64_t* frames) {
#if defined(__linux__)
    return native_frames::take(about, frames);
#else
    return 0;
#endif
}

uint64_t callpaths_native_dropped() {
#if defined(__linux__)
    return native_frames::dropped;
#else
    return 0;
#endif
}

uint64_t callpaths_native_name(uint64_t address, char* room, uint64_t size) {
#if defined(__linux__)
    std::string text = native_frames::spelled(address);
    std::copy_n(text.data(), std::min<uint64_t>(size, text.size()), room);
    return text.size();
#else
    return 0;
#endif
}

// Have torch call an empty callback for each operator, to measure the minimum cost of a recording. Not thread-safe.
void callpaths_floor(int on) {
    static at::CallbackHandle idle = 0;
    if (idle) at::removeCallback(idle);
    idle = on ? at::addGlobalCallback(at::RecordFunctionCallback(nothing, nothing_ends)) : 0;
}

// Pause recording, or resume it with 0; operators that are running are recorded to their end.
int callpaths_pause(int pause) {
    std::lock_guard<std::mutex> held(changing);
    if (!running || forked || paused == bool(pause)) return 1;
    paused = pause;
    auto change = pause ? at::disableCallback : at::reenableCallback;
    change(recorder);
    if (looking) change(looker);
    return 0;
}

// Begin a span of this name, to be left in the same thread.
at::RecordFunction* callpaths_enter(const char* name) {
    auto* span = new at::RecordFunction(at::RecordScope::USER_SCOPE);
    if (span->isActive()) span->before(std::string_view(name));
    return span;
}

void callpaths_leave(at::RecordFunction* span) { delete span; }

// Nanoseconds a tick, measured since the first start.
double callpaths_nanoseconds() {
    double ticks = double(now() - ticks_at_start);
    std::chrono::duration<double, std::nano> passed = std::chrono::steady_clock::now() - time_at_start;
    return ticks > 0 ? passed.count() / ticks : 1;
}

uint32_t callpaths_threads() { return known; }

uint32_t callpaths_size(uint32_t thread) { return everybody[thread]->size.load(std::memory_order_acquire); }

// Write the first `size` nodes of a thread: integers (parent, name, line, kind, arguments, variants), (count, inclusive,
// within, least, most, graphed), and floats (sum of squared ticks, bytes a call, FLOP a call).
void callpaths_read(uint32_t thread, uint32_t size, uint32_t* places, uint64_t* numbers, double* means) {
    Thread& own = *everybody[thread];
    for (uint32_t i = 0; i < size; i++) {
        const Node& node = own.at(i);
        const Arguments& seen = own.arguments[node.arguments];
        bool drawn = seen.drawn >= ENOUGH;
        double calls = std::max<double>(1, drawn ? seen.drawn : seen.drawn + seen.looked);
        double bytes = seen.drawn_bytes + (drawn ? 0 : seen.looked_bytes);
        double flops = seen.drawn_flops + (drawn ? 0 : seen.looked_flops);
        std::string zeros = seen.zeros[0].spelled(1 + (node.rule == ADDED_PRODUCT));
        zeros += seen.zeros[1].spelled(2 + (node.rule == ADDED_PRODUCT));
        uint32_t text = zeros.empty() ? seen.text : names().of(names().spelling(seen.text) + zeros);
        uint32_t place[] = {node.parent, node.name, node.line, node.kind, text, seen.variants};
        uint64_t number[] = {node.count, node.inclusive, node.within, node.least, node.most, node.graphed};
        double mean[] = {node.squares, bytes / calls, flops / calls};
        std::copy_n(place, 6, places + 6 * i);
        std::copy_n(number, 6, numbers + 6 * i);
        std::copy_n(mean, 3, means + 3 * i);
    }
}

// Write (ticks spent in recording, paths beyond NODES, operators) of a thread.
void callpaths_cost(uint32_t thread, uint64_t* cost) {
    cost[0] = everybody[thread]->paid;
    cost[1] = everybody[thread]->lost;
    cost[2] = everybody[thread]->events;
}

// What the thread with this Python identifier, which must have begun a profile, is running: the node of its innermost
// span, ~0 in an operator or a function of the backward pass and while recording is paused, or else 0.
uint32_t callpaths_inside(uint64_t ident) {
    if (paused) return ~0u;
    for (uint32_t i = 0; i < known; i++) {
        Thread& thread = *everybody[i];
        if (!thread.lasting || thread.ident != ident) continue;
        uint32_t depth = thread.depth;
        if (!depth || thread.profile != profiles) return 0;
        const Open& open = thread.open[std::min(depth, OPERATORS) - 1];
        return depth <= OPERATORS && thread.at(open.node).kind == SPAN ? open.node : ~0u;
    }
    return 0;
}

// Python's identifier of a thread that began a profile; 0 for other threads.
uint64_t callpaths_ident(uint32_t thread) { return everybody[thread]->lasting ? everybody[thread]->ident : 0; }

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
