// libcudart without a GPU: the CUDA runtime, as far as torch calls it.
//
// Memory. A GPU's memory and pinned memory are pages of one file in memory, which is mapped twice: at `program`, where
// the addresses are that torch knows, and at `shadow`, where the simulation computes. A GPU's pages cannot be touched at
// `program`, so host code that follows a device pointer is caught by the processor. Addresses are never used twice.
//
// Time. An operation is computed at the moment when it is issued. When it *might* run on a GPU is kept on paper: stream
// s has a clock, and clock[s][t] is the last operation of stream t that is over before the next one of s begins. An
// event carries a clock, a wait merges it into the stream's, a synchronisation into the host's, and whatever the host
// issues comes after all that the host knows to be over. (These are vector clocks, as in tools that look for races
// between threads.) Two operations on the same bytes, one of which writes, and neither before the other: a race.
#include "simulated.h"

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

using Clock = std::vector<uint64_t>;

static std::recursive_mutex mutex_;
#define LOCK std::lock_guard<std::recursive_mutex> guard(mutex_)

static std::string format(const char* pattern, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

static double setting(const char* name, double otherwise) {
    const char* value = getenv(name);
    return value && *value ? atof(value) : otherwise;
}

static int gpus() {
    static const int count = [] {
        const char* visible = getenv("CUDA_VISIBLE_DEVICES");  // "": none; else a list of which there are so many
        int all = (int)setting("SIMULATED_GPUS", 1);
        return !visible ? all : !*visible ? 0 : std::min<int>(all, 1 + std::count(visible, visible + strlen(visible), ','));
    }();
    return count;
}

static size_t gpu_bytes() {
    static const size_t bytes = (size_t)setting("SIMULATED_GPU_BYTES", 8e9);
    return bytes;
}

static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local std::string error_text;

static cudaError_t fail(cudaError_t error, const std::string& text = "") {
    error_text = text;
    return last_error = error;
}

// What was found.

static std::vector<std::string> findings;
static std::set<std::string> said;

// The innermost three lines of the program that are not torch's own, if this thread runs Python.
static std::string python_lines() {
    auto dump = (void (*)(int, void*))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    auto state = (void* (*)())dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    void* thread = dump && state ? state() : nullptr;
    if (!thread) return "";
    int file = memfd_create("stack", 0);
    dump(file, thread);
    std::string text(1 << 14, 0), lines;
    text.resize(std::max<ssize_t>(0, pread(file, text.data(), text.size(), 0)));
    close(file);
    int count = 0;
    for (size_t at = text.find("File"), end; at != std::string::npos && count < 3; at = text.find("File", end)) {
        end = std::min(text.find('\n', at), text.size());
        std::string line = text.substr(at, end - at);
        if (line.find("site-packages") == std::string::npos && line.find("_dispatch__") == std::string::npos) lines += (count++ ? " < " : " at ") + line;
    }
    return lines;
}

// `key`: what is the same for all that is found at one place; it is said once.
static void found(const std::string& key, const std::string& text) {
    if (!said.insert(key).second) return;
    findings.push_back(text + python_lines());
    std::string line = "[simulated GPU] " + findings.back() + "\n";
    if (write(2, line.data(), line.size()) < 0) abort();
    if (const char* folder = getenv("SIMULATED_GPU_FINDINGS")) {
        int file = open(format("%s/%d", folder, getpid()).c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
        if (file < 0 || write(file, line.data(), line.size()) < 0) abort();
        close(file);
    }
}

// Clocks.

struct Stream {
    int number, device;
    bool nccls = false;
    int asked = 0;
    Clock clock = {};
};
struct Event {
    Clock clock;
    double milliseconds = 0;
    int device = 0, asked = 0;
    bool recorded = false;
};
struct Mark {  // an operation, as the memory remembers it
    int stream = -1;
    uint64_t tick = 0;
    const char* name = "";
};

static std::vector<Stream*> streams;  // by number; the first ones are the GPUs' default streams
static Clock host;

static void merge(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

static bool before(const Mark& mark, const Clock& clock) {
    return mark.stream < 0 || (mark.stream < (int)clock.size() && mark.tick <= clock[mark.stream]);
}

// What this thread knows to be over. Python's threads and autograd's hand work to each other and wait for it, so they
// know the same. The threads of NCCL's watchdog and of gloo wait for themselves: training is not ordered by that.
static bool trains() {
    static thread_local const bool answer = [] {
        char name[17] = {};
        prctl(PR_GET_NAME, name);
        return strncmp(name, "pt_nccl", 7) != 0 && strncmp(name, "pt_gloo", 7) != 0;
    }();
    return answer;
}

static Clock& known() {
    static thread_local Clock own;
    return trains() ? host : own;
}

static Stream* new_stream(int device) {
    streams.push_back(new Stream{(int)streams.size(), device});
    return streams.back();
}

static Stream* stream_of(cudaStream_t handle, int device = current_device) {
    while ((int)streams.size() < gpus()) new_stream((int)streams.size());
    // Null, and two small numbers that stand for "legacy" and "per thread": the device's default stream.
    return (uintptr_t)handle <= 2 ? streams[device] : (Stream*)handle;
}

static std::string name_of(int stream) {
    if (stream < 0) return "the host";
    const char* kind = stream < gpus() ? "the default stream" : streams[stream]->nccls ? "NCCL's stream" : "stream";
    return format("%s %d of GPU %d", kind, stream, streams[stream]->device);
}

// Memory.

struct Block {
    size_t bytes;
    int device;  // -1: pinned memory of the host
    bool freed = false;
    std::vector<Mark> reads = {}, writes = {};  // of pinned memory: by devices, and not known to be over
};
struct Part {  // neighbouring bytes of a GPU with the same past
    size_t end;
    Mark write;
    std::vector<Mark> reads;
    bool given_back = false;
    int pool = -1;         // the stream that these bytes were given out for,
    uint64_t turn = 0;     // and when: a number that grows
};
struct Late {  // bytes that were given back while other streams might still use them
    int pool;
    uint64_t turn;
    std::string where;
    std::vector<Mark> users;
};

static std::map<char*, Block> blocks;  // also freed ones, so that a message can say so
static std::map<size_t, Part> parts;   // first byte -> part
static std::vector<Late> late;
static uint64_t turns;
static std::vector<std::pair<char* const, Block>*> guarded;
static size_t used[64];
static const size_t SPACE = 1ull << 42;  // addresses; they cost nothing until they are touched
static char *program, *shadow, *next_address;
static int pages_file;

static size_t to_pages(size_t bytes) { return (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096; }

static std::pair<char* const, Block>* block_of(const void* at) {
    auto next = blocks.upper_bound((char*)at);
    if (next == blocks.begin()) return nullptr;
    auto block = std::prev(next);
    return (char*)at < block->first + std::max<size_t>(block->second.bytes, 1) ? &*block : nullptr;
}

static std::string place_of(const void* at, size_t bytes) {
    auto* block = block_of(at);
    if (!block) return format("%zu bytes at %p, memory of the host that is not pinned", bytes, at);
    size_t first = (char*)at - block->first;
    std::string owner = block->second.device < 0 ? "pinned memory" : format("GPU %d", block->second.device);
    return format("bytes %zu to %zu of a block of %zu at %p on %s%s", first, first + bytes, block->second.bytes,
                  (void*)block->first, owner.c_str(), block->second.freed ? ", which was freed" : "");
}

// A fault of the host on these pages is always a mistake: pinned pages are closed only while a device may use them.
static struct sigaction others_handler;
static void guard_pages();

static void on_fault(int number, siginfo_t* fault, void* context) {
    char* at = (char*)fault->si_addr;
    bool inside = program && at >= program && at < program + SPACE;
    if (inside) {
        LOCK;
        bool writes = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2;
        auto* block = block_of(at);
        const char* verb = writes ? "writes into" : "reads";
        if (block && block->second.device < 0 && !block->second.freed) {
            const Mark& other = block->second.writes.empty() ? block->second.reads[0] : block->second.writes[0];
            found(format("host %d %s", other.stream, other.name),
                  format("race: %s on %s %s, and the host %s %s: nothing makes the host wait", other.name,
                         name_of(other.stream).c_str(), block->second.writes.empty() ? "reads" : "writes", verb,
                         place_of(at, 1).c_str()));
            block->second.reads.clear(), block->second.writes.clear();
            mprotect(block->first, to_pages(block->second.bytes), PROT_READ | PROT_WRITE);
            return;  // said; go on
        }
        found(format("touch %d", writes), format("the host %s device memory: %s", verb, place_of(at, 1).c_str()));
    }
    sigaction(SIGSEGV, &others_handler, nullptr);  // the same instruction faults again, and they say where
}

static void guard_pages() {
    struct sigaction mine = {}, now;
    sigaction(SIGSEGV, nullptr, &now);
    if (now.sa_sigaction == on_fault) return;
    others_handler = now;  // Python's faulthandler, as a rule, which may be turned on at any time
    mine.sa_sigaction = on_fault;
    mine.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &mine, nullptr);
}

static void protect(std::pair<char* const, Block>& block) {
    int may = !block.second.writes.empty() ? PROT_NONE : !block.second.reads.empty() ? PROT_READ : PROT_READ | PROT_WRITE;
    mprotect(block.first, to_pages(block.second.bytes), may);
}

// This thread has waited: it knows what `clock` knows.
static void learn(const Clock& clock) {
    merge(known(), clock);
    auto over = [&](const Mark& mark) { return before(mark, known()); };
    for (auto* block : guarded) {
        auto &reads = block->second.reads, &writes = block->second.writes;
        reads.erase(std::remove_if(reads.begin(), reads.end(), over), reads.end());
        writes.erase(std::remove_if(writes.begin(), writes.end(), over), writes.end());
        if (!block->second.freed) protect(*block);
    }
    guarded.erase(std::remove_if(guarded.begin(), guarded.end(),
                                 [](auto* block) { return block->second.reads.empty() && block->second.writes.empty(); }),
                  guarded.end());
}

static cudaError_t new_block(void** out, size_t bytes, int device) {
    LOCK;
    if (!program) {
        pages_file = memfd_create("simulated GPUs", MFD_CLOEXEC);
        if (ftruncate(pages_file, SPACE)) abort();
        void* both[2];
        for (int i = 0; i < 2; i++) {
            both[i] = mmap(nullptr, SPACE, i ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_SHARED | MAP_NORESERVE, pages_file, 0);
            if (both[i] == MAP_FAILED) return fail(cudaErrorMemoryAllocation, "cannot map memory for the simulation");
        }
        next_address = program = (char*)both[0], shadow = (char*)both[1];
        madvise(shadow, SPACE, MADV_DONTDUMP);
    }
    if (device >= 0 && used[device] + bytes > gpu_bytes()) return fail(cudaErrorMemoryAllocation);
    guard_pages();
    char* at = next_address;
    next_address += (to_pages(bytes) + (2 << 20)) / (2 << 20) * (2 << 20);  // a gap behind each block
    blocks[at] = {bytes, device};
    if (device >= 0) used[device] += bytes;
    else mprotect(at, to_pages(bytes), PROT_READ | PROT_WRITE);
    if (bytes < (64 << 20)) memset(at - program + shadow, 0xff, bytes);  // NaN: what was never written shows
    *out = at;
    return cudaSuccess;
}

static cudaError_t free_block(void* at) {
    if (!at) return cudaSuccess;
    LOCK;
    auto block = blocks.find((char*)at);
    if (block == blocks.end() || block->second.freed)
        return fail(cudaErrorInvalidValue, "freeing what was not allocated: " + place_of(at, 0));
    for (auto* stream : streams) learn(stream->clock);  // freeing waits for all work
    if (block->second.device >= 0) used[block->second.device] -= block->second.bytes;
    block->second.freed = true;
    parts.erase(parts.lower_bound((size_t)at), parts.lower_bound((size_t)at + block->second.bytes));
    mprotect(block->first, to_pages(block->second.bytes), PROT_NONE);
    fallocate(pages_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->first - program, to_pages(block->second.bytes));
    return cudaSuccess;
}

// Races.

static const char* kept(const char* name) {
    static std::set<std::string> names;
    return names.insert(name).first->c_str();
}

// The part that begins at `at`, or the first one behind it; one that lies across `at` is cut in two.
static std::map<size_t, Part>::iterator cut(size_t at) {
    auto next = parts.lower_bound(at);
    if (next != parts.begin()) {
        auto part = std::prev(next);
        if (part->second.end > at) {
            next = parts.emplace_hint(next, at, part->second);
            part->second.end = at;
        }
    }
    return next;
}

static const char* NOTHING_ORDERS = "and no event, wait or synchronisation orders the two";

static void race(const Mark& other, const char* did, const Mark& mine, const char* does, const std::string& where) {
    bool early = !strcmp(does, "may be given");  // once, and not for all that is given out later
    found(format("%s %d %s %d", other.name, other.stream, early ? "" : mine.name, mine.stream),
          format("race: %s on %s %s, and %s on %s %s %s: %s", other.name, name_of(other.stream).c_str(), did, mine.name,
                 name_of(mine.stream).c_str(), does, where.c_str(), NOTHING_ORDERS));
}

static void look(const Mark& mine, const Clock& clock, const Access& access) {
    size_t first = (size_t)access.at, end = first + access.bytes;
    const char* does = access.write ? "writes" : "reads";
    auto where = [&] { return access.what + (" in " + place_of(access.at, access.bytes)); };
    auto clashes = [&](const Mark& other) { return other.stream != mine.stream && !before(other, clock); };
    auto from = cut(first), to = cut(end);
    Part written{end, mine, {}};
    if (from != to) written.pool = from->second.pool, written.turn = from->second.turn;
    size_t covered = first;
    for (auto part = from; part != to; covered = part->second.end, ++part) {
        Part& past = part->second;
        if (past.given_back)
            found(format("freed %s", mine.name), format("%s on %s %s memory that was given back: %s", mine.name,
                                                        name_of(mine.stream).c_str(), does, where().c_str()));
        // The allocator may as well have chosen the bytes that came back too early: which it gives is luck.
        for (auto& early : late)
            for (auto& user : early.users)
                if (early.pool == past.pool && early.turn < past.turn && clashes(user))
                    race(user, "uses what was freed", mine, "may be given", early.where);
        if (clashes(past.write)) race(past.write, "writes", mine, does, where());
        if (access.write) {
            for (auto& read : past.reads)
                if (clashes(read)) race(read, "reads", mine, does, where());
            continue;
        }
        auto again = std::find_if(past.reads.begin(), past.reads.end(), [&](auto& r) { return r.stream == mine.stream; });
        if (again != past.reads.end()) *again = mine;
        else past.reads.push_back(mine);
        if (covered < part->first) parts.emplace(covered, Part{part->first, {}, {mine}});
    }
    if (access.write) {
        parts.erase(from, to);
        parts.emplace(first, written);
    } else if (covered < end) {
        parts.emplace(covered, Part{end, {}, {mine}});
    }
}

extern "C" {

void simulated_operation(cudaStream_t handle, const char* name, int count, const Access* accesses) {
    LOCK;
    Stream* stream = stream_of(handle);
    merge(stream->clock, known());  // it was issued after all that
    if ((int)stream->clock.size() <= stream->number) stream->clock.resize(stream->number + 1);
    Mark mine{stream->number, ++stream->clock[stream->number], kept(name)};
    for (int i = 0; i < count; i++) {
        auto* block = accesses[i].bytes ? block_of(accesses[i].at) : nullptr;
        if (!block) continue;
        look(mine, stream->clock, accesses[i]);
        if (block->second.device >= 0) continue;
        if (block->second.reads.empty() && block->second.writes.empty()) guarded.push_back(block);
        (accesses[i].write ? block->second.writes : block->second.reads).push_back(mine);
        guard_pages();
        protect(*block);
    }
}

// These bytes may have been in use until now, by all that was issued on the stream that they are given out for.
void simulated_given_out(const void* at, size_t bytes, cudaStream_t handle, int device) {
    LOCK;
    Stream* stream = stream_of(handle, device);
    Mark last{stream->number, stream->clock.size() > (size_t)stream->number ? stream->clock[stream->number] : 0,
              "what had this memory before"};
    auto from = cut((size_t)at), to = cut((size_t)at + bytes);
    if (from == to) from = parts.emplace((size_t)at, Part{(size_t)at + bytes, {}, {}}).first;
    for (turns++; from != to; ++from) {
        from->second.given_back = false, from->second.pool = stream->number, from->second.turn = turns;
        if (from->second.write.stream < 0 || from->second.write.stream == stream->number) from->second.write = last;
    }
}

// The next work of the stream that these bytes belong to may write over them. Who uses them must be over by then.
void simulated_given_back(const void* at, size_t bytes, cudaStream_t handle, int device) {
    LOCK;
    Stream* stream = stream_of(handle, device);
    Clock clock = stream->clock;
    merge(clock, known());
    auto over = [&](const Mark& mark) { return mark.stream == stream->number || before(mark, clock); };
    Late early{stream->number, turns, place_of(at, bytes), {}};
    auto to = cut((size_t)at + bytes);
    for (auto part = cut((size_t)at); part != to; ++part) {
        part->second.given_back = true;
        for (auto& user : part->second.reads)
            if (!over(user)) early.users.push_back(user);
        if (!over(part->second.write)) early.users.push_back(part->second.write);
    }
    // Those that were waited for in the meantime are no danger any more.
    late.erase(std::remove_if(late.begin(), late.end(), [&](auto& old) {
        return old.pool == stream->number && std::all_of(old.users.begin(), old.users.end(), over);
    }), late.end());
    if (!early.users.empty()) late.push_back(early);
}

void* simulated_memory(const void* at, size_t bytes, int* device) {
    LOCK;
    auto* block = block_of(at);
    if (!block || block->second.freed || (char*)at + bytes > block->first + block->second.bytes) {
        error_text = place_of(at, bytes);
        return nullptr;
    }
    *device = block->second.device;
    return (char*)at - program + shadow;
}

const char* simulated_error() { return error_text.c_str(); }

int simulated_missing(const char* name) {
    LOCK;
    fail(cudaErrorNotSupported, format("%s is not simulated", name));
    found(name, error_text);  // not every caller looks at what it gets
    return cudaErrorNotSupported;
}

void simulated_is_nccls(cudaStream_t stream) { stream_of(stream)->nccls = true; }

int simulated_findings(char* text, int size) {
    LOCK;
    std::string all;
    for (auto& finding : findings) all += finding + "\n";
    snprintf(text, size, "%s", all.c_str());
    return (int)findings.size();
}

void simulated_forget() {
    LOCK;
    findings.clear(), said.clear(), parts.clear(), late.clear();
}

// The runtime's functions.

static double milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = gpus();
    return gpus() > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice);
    return current_device = device, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheSimulation";
}
const char* cudaGetErrorString(cudaError_t error) {
    if (error == cudaErrorMemoryAllocation) return "out of memory";
    static thread_local std::string text;
    text = format("simulated GPU, error %d: %s", (int)error, error_text.c_str());
    return text.c_str();
}

cudaError_t cudaMalloc(void** out, size_t bytes) { return new_block(out, bytes, current_device); }
cudaError_t cudaFree(void* at) { return free_block(at); }
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) { return new_block(out, bytes, -1); }
cudaError_t cudaMallocHost(void** out, size_t bytes) { return new_block(out, bytes, -1); }
cudaError_t cudaFreeHost(void* at) { return free_block(at); }
cudaError_t cudaMemGetInfo(size_t* unused, size_t* all) {
    LOCK;
    *all = gpu_bytes(), *unused = *all - used[current_device];
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* at) {
    LOCK;
    *out = {};
    out->type = cudaMemoryTypeUnregistered, out->device = -2;
    auto* block = block_of(at);
    if (!block || block->second.freed) return cudaSuccess;
    bool pinned = block->second.device < 0;
    out->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = pinned ? 0 : block->second.device;
    out->devicePointer = (void*)at, out->hostPointer = pinned ? (void*)at : nullptr;
    return cudaSuccess;
}

// A copy to or from memory that is not pinned is over when the call returns, whatever its name says.
static cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool waits) {
    LOCK;
    if (!bytes) return cudaSuccess;
    const void* ends[2] = {from, to};
    char* mine[2];
    for (int i = 0; i < 2; i++) {
        int device;
        bool ours = (char*)ends[i] >= program && (char*)ends[i] < program + SPACE && program;
        mine[i] = ours ? (char*)simulated_memory(ends[i], bytes, &device) : (char*)ends[i];
        if (!mine[i]) return fail(cudaErrorInvalidValue, "a copy to or from " + place_of(ends[i], bytes));
        waits |= !ours;
    }
    memmove(mine[1], mine[0], bytes);
    Access accesses[2] = {{from, bytes, false, ""}, {to, bytes, true, ""}};
    simulated_operation(stream, "memcpy", 2, accesses);
    if (waits) learn(stream_of(stream)->clock);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) { return copy(to, from, n, nullptr, true); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, n, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t stream) {
    return copy(to, from, n, stream, false);
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
    LOCK;
    int device;
    void* mine = simulated_memory(at, bytes, &device);
    if (!mine) return fail(cudaErrorInvalidValue, "memset of " + place_of(at, bytes));
    memset(mine, value, bytes);
    Access access{at, bytes, true, ""};
    simulated_operation(stream, "memset", 1, &access);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* at, int value, size_t bytes) { return cudaMemsetAsync(at, value, bytes, nullptr); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
    LOCK;
    stream_of(nullptr);  // the default streams have the first numbers
    *out = (cudaStream_t)new_stream(current_device);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its number stays
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
// Is it over? Training is told "no" where it has not waited, as on a GPU that is late: what goes well by luck must not
// count as an order. After a thousand questions it is told "yes", for a loop may wait so.
static cudaError_t query(const Clock& clock, int& asked) {
    Clock all = known();
    merge(all, clock);
    if (trains() && all != known() && asked++ < 1000) return fail(cudaErrorNotReady);
    learn(clock);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    LOCK;
    return query(stream_of(stream)->clock, stream_of(stream)->asked);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    LOCK;
    learn(stream_of(stream)->clock);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    LOCK;
    for (auto* stream : streams)
        if (stream->device == current_device) learn(stream->clock);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    LOCK;
    merge(stream_of(stream)->clock, ((Event*)event)->clock);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    simulated_operation(stream, "a host function", 0, nullptr);
    function(data);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
    Event* event = new Event;
    event->device = current_device;
    return *out = (cudaEvent_t)event, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (Event*)event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
    LOCK;
    Event* event = (Event*)handle;
    Stream* stream = stream_of(on);
    if (stream->device != event->device)
        return fail(cudaErrorInvalidResourceHandle, "an event of one GPU is recorded on a stream of another");
    merge(stream->clock, known());
    event->clock = stream->clock, event->milliseconds = milliseconds(), event->recorded = true, event->asked = 0;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t on, unsigned) { return cudaEventRecord(event, on); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
    LOCK;
    return query(((Event*)event)->clock, ((Event*)event)->asked);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    LOCK;
    learn(((Event*)event)->clock);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t first, cudaEvent_t second) {
    Event *from = (Event*)first, *to = (Event*)second;
    if (!from->recorded || !to->recorded || from->device != to->device)
        return fail(cudaErrorInvalidResourceHandle, "elapsed time between events that were not recorded on one GPU");
    return *out = (float)(to->milliseconds - from->milliseconds), cudaSuccess;  // the host's time
}

// Graphs are never captured, and torch asks.
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* number, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
    if (status) *status = cudaStreamCaptureStatusNone;
    if (number) *number = 0;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice);
    *out = {};  // those that torch reads; of an A100, but for the name and the memory
    snprintf(out->name, sizeof out->name, "Simulated GPU");
    out->totalGlobalMem = gpu_bytes(), out->major = 8, out->multiProcessorCount = 108, out->warpSize = 32;
    out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
    out->maxThreadsPerMultiProcessor = 2048, out->sharedMemPerBlock = 49152, out->sharedMemPerBlockOptin = 166912;
    out->sharedMemPerMultiprocessor = 167936, out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->l2CacheSize = 40 << 20, out->maxGridSize[0] = 2147483647, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->concurrentKernels = out->unifiedAddressing = 1, out->pciBusID = device + 1, out->uuid.bytes[0] = (char)device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: return *value = 8, cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor: return *value = 0, cudaSuccess;
        case cudaDevAttrMultiProcessorCount: return *value = 108, cudaSuccess;
        default: return (cudaError_t)simulated_missing(format("cudaDeviceGetAttribute(%d)", (int)attribute).c_str());
    }
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    return snprintf(text, size, "0000:%02x:00.0", device + 1), cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
// The driver's own functions, which torch would take for what is newer than its headers: there are none.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = nullptr;
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// Kernels. A library registers its own when it is loaded. None can run: what torch computes on a GPU is computed in
// kernels.cpp, before it comes to a launch. So a launch is something that kernels.cpp has not thought of.

static std::unordered_map<const void*, std::string> kernels;

void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* handle, char*, const char* name, int, void*, void*, void*, void*, int*) {
    LOCK;
    kernels[handle] = name;
}
struct Launch {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
static thread_local std::vector<Launch> launches;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
    launches.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    Launch launch = launches.back();
    launches.pop_back();
    *grid = launch.grid, *block = launch.block, *shared = launch.shared, *(void**)stream = launch.stream;
    return cudaSuccess;
}
static cudaError_t launch(const void* handle, cudaStream_t stream) {
    LOCK;
    auto kernel = kernels.find(handle);
    std::string name = kernel == kernels.end() ? "of unknown name" : kernel->second;
    if (name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep: it takes time, and computes nothing
        simulated_operation(stream, "sleep", 0, nullptr);
        return cudaSuccess;
    }
    return (cudaError_t)simulated_missing(("the kernel " + name).c_str());
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* handle) { return *kernel = (cudaKernel_t)handle, cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch((const void*)kernel, stream);
}
cudaError_t cudaLaunchKernel(const void* handle, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(handle, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* handle, void**) {
    return launch(handle, config->stream);
}
// Some kernels ask how they should be launched before they are.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
    *out = {};
    out->maxThreadsPerBlock = 1024, out->binaryVersion = out->ptxVersion = 80;
    return cudaSuccess;
}
}
