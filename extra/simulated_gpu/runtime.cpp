// libcudart and libcuda without a GPU: the CUDA runtime, and of the driver what torch calls.
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
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <utility>

static std::recursive_mutex mutex_;
#define LOCK std::lock_guard<std::recursive_mutex> guard(mutex_)

static const size_t GPU_BYTES = 8e9;
static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local std::string error_text;

static cudaError_t fail(cudaError_t error, const std::string& text = "") {
    error_text = text;
    return last_error = error;
}

static int gpus() {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");  // "": none; else a list of which there are so many
    static const int all = atoi(getenv("SIMULATED_GPUS"));
    static const int count = !visible ? all : std::min<int>(all, *visible ? 1 + std::count(visible, visible + strlen(visible), ',') : 0);
    return count;
}

// What was found.

static std::set<std::string> said;

// The innermost three lines of the program that are not torch's own, if this thread runs Python.
static std::string python_lines() {
    auto dump = (void (*)(int, void*))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    auto state = (void* (*)())dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    void* thread = dump && state ? state() : nullptr;
    if (!thread) return "";
    int file = memfd_create("stack", 0), count = 0;
    dump(file, thread);
    std::ifstream dumped(format("/proc/self/fd/%d", file));
    std::string lines;
    for (std::string line; count < 3 && std::getline(dumped, line);) {
        auto has = [&](const char* word) { return line.find(word) != std::string::npos; };
        if (has("File") && !has("site-packages") && !has("_dispatch__"))
            lines += (count++ ? " < " : " at ") + line.substr(line.find("File"));
    }
    return close(file), lines;
}

// `key`: equal for all findings at one place, so that each place is reported once.
static void found(const std::string& key, const std::string& text) {
    if (!said.insert(key).second) return;
    std::string line = "[simulated GPU] " + text + python_lines() + "\n";
    std::ofstream file(format("%s/%d", getenv("SIMULATED_GPU_FINDINGS"), getpid()), std::ios::app);
    if (!(file << line).flush() || write(2, line.data(), line.size()) < 0) abort();
}

// Clocks.

using Clock = std::map<int, uint64_t>;  // stream -> its last operation that is over

struct Stream {
    int number, device;
    Clock clock = {};
};
struct Event {
    int device, asked = 0;
    double milliseconds = 0;  // 0: not recorded
    Clock clock = {};
};
struct Mark {  // an operation, as the memory remembers it
    int stream;
    uint64_t tick;
    std::string name;
    bool writes;
    bool freed = false;  // it uses other memory, which was freed too early: see `simulated_given`
};

static std::vector<Stream*> streams;  // by number; the first ones are the GPUs' default streams
static Clock host;

static void merge(Clock& into, const Clock& from) {
    for (auto [stream, tick] : from) into[stream] = std::max(into[stream], tick);
}

static bool before(const Mark& mark, const Clock& clock) {
    auto known = clock.find(mark.stream);
    return mark.tick <= (known == clock.end() ? 0 : known->second);
}

// What this thread knows to be over. Python's threads and autograd's hand work to each other and wait for it, so they
// know the same. The threads of NCCL's watchdog and of gloo wait for themselves: training is not ordered by that.
static Clock& known() {
    static thread_local Clock own;
    static thread_local const bool trains = [] {
        char name[17] = {};
        prctl(PR_GET_NAME, name);
        return strncmp(name, "pt_nccl", 7) != 0 && strncmp(name, "pt_gloo", 7) != 0;
    }();
    return trains ? host : own;
}

static Stream* stream_of(cudaStream_t handle, int device = current_device) {
    for (int next; (next = streams.size()) < gpus();) streams.push_back(new Stream{next, next});
    // Null, and two small numbers for "legacy" and "per thread", are the device's default stream.
    return (uintptr_t)handle <= 2 ? streams[device] : (Stream*)handle;
}

static std::string name_of(int stream) {
    return format("%s %d of GPU %d", stream < gpus() ? "the default stream" : "stream", stream, streams[stream]->device);
}

static std::string told(const Mark& mark) {
    return mark.name + " on " + name_of(mark.stream) + (mark.writes ? " writes" : " reads");
}

// Memory.

struct Block {
    size_t bytes;
    int device;  // -1: pinned memory of the host
    bool freed = false;
    std::vector<Mark> users = {};  // of pinned memory: devices that are not known to be over
};
using Placed = std::pair<char* const, Block>;

static std::map<char*, Block> blocks;  // also freed ones, so that a message can say so
static std::set<Placed*> guarded;      // those with users
static size_t used[64];
static const size_t SPACE = 1ull << 42;  // addresses; they cost nothing until they are touched
static char *program, *shadow, *next_address;
static int pages_file;

static size_t to_pages(size_t bytes) { return (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096; }
static bool is_ours(const void* at) { return program && (char*)at >= program && (char*)at < program + SPACE; }

static Placed* block_of(const void* at) {
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

// A fault of the host on our pages is always a mistake: pinned pages are closed only while a device may use them.
static struct sigaction others_handler;
static void protect(Placed& block);

static void on_fault(int, siginfo_t* fault, void* context) {
    if (is_ours(fault->si_addr)) {
        LOCK;
        std::string host = "the host reads ", where = place_of(fault->si_addr, 1);
        if (((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2) host = "the host writes into ";
        auto* block = block_of(fault->si_addr);
        if (block && !block->second.users.empty()) {
            const Mark& other = block->second.users[0];
            found(format("host %d ", other.stream) + other.name,
                  "race: " + told(other) + ", and " + host + where + ": nothing makes the host wait");
            block->second.users.clear();
            return protect(*block);  // said; go on
        }
        found(host, host + "device memory: " + where);
    }
    sigaction(SIGSEGV, &others_handler, nullptr);  // the same instruction faults again, and they say where
}

// Close a block's pages to the host, as far as devices may use them.
static void protect(Placed& block) {
    struct sigaction mine = {}, now;
    mine.sa_sigaction = on_fault;
    mine.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &mine, &now);
    if (now.sa_sigaction != on_fault) others_handler = now;  // Python's faulthandler, which may be turned on at any time
    int may = block.second.device < 0 && !block.second.freed ? PROT_READ | PROT_WRITE : PROT_NONE;
    for (auto& user : block.second.users) may &= user.writes ? PROT_NONE : PROT_READ;
    mprotect(block.first, to_pages(block.second.bytes), may);
}

// This thread has waited: it knows what `clock` knows.
static void learn(const Clock& clock) {
    merge(known(), clock);
    for (auto* block : guarded) {
        std::erase_if(block->second.users, [](auto& user) { return before(user, known()); });
        protect(*block);
    }
    std::erase_if(guarded, [](auto* block) { return block->second.users.empty(); });
}

// How often training has waited: for a device, for a stream, for an event.
static long waits[3];
static void count_wait(int kind) { waits[kind] += &known() == &host; }

static cudaError_t new_block(void** out, size_t bytes, int device) {
    LOCK;
    if (!program) {  // not before: processes that fork do so before they use a GPU
        pages_file = memfd_create("simulated GPUs", MFD_CLOEXEC);
        if (ftruncate(pages_file, SPACE)) abort();
        auto map = [](int may) { return (char*)mmap(nullptr, SPACE, may, MAP_SHARED | MAP_NORESERVE, pages_file, 0); };
        program = next_address = map(PROT_NONE), shadow = map(PROT_READ | PROT_WRITE);
        if (program == MAP_FAILED || shadow == MAP_FAILED) abort();
        madvise(shadow, SPACE, MADV_DONTDUMP);
    }
    if (device >= 0 && used[device] + bytes > GPU_BYTES) return fail(cudaErrorMemoryAllocation, "out of memory");
    char* at = next_address;
    next_address += (to_pages(bytes) + (2 << 20)) / (2 << 20) * (2 << 20);  // a gap behind each block
    if (device >= 0) used[device] += bytes;
    protect(*blocks.emplace(at, Block{bytes, device}).first);
    if (bytes < (64 << 20)) memset(at - program + shadow, 0xff, bytes);  // NaN: what was never written shows
    return *out = at, cudaSuccess;
}

// Races.

struct Part {  // the bytes of a GPU from this address to the next part's. All have the same past:
    std::vector<Mark> users = {};  // who has written them, and who has read them since
    bool given_back = false;
};

static std::map<size_t, Part> parts = {{0, {}}};  // first byte -> part
static std::map<int, std::vector<Mark>> late;     // stream -> who may still use bytes that it was given back

// The part that begins at `at`: the one which lies across it is cut in two.
static std::map<size_t, Part>::iterator cut(size_t at) {
    auto next = parts.upper_bound(at), part = std::prev(next);
    return part->first == at ? part : parts.emplace_hint(next, at, part->second);
}

static void look(const Mark& mine, const Clock& clock, const Access& access) {
    auto from = cut((size_t)access.at), to = cut((size_t)access.at + access.bytes);
    auto where = [&] { return access.what + " in " + place_of(access.at, access.bytes); };
    for (auto part = from; part != to; ++part) {
        auto& users = part->second.users;
        if (part->second.given_back)
            found("freed " + mine.name, told(mine) + " memory that was given back: " + where());
        for (auto& other : users)
            if (other.stream != mine.stream && (other.writes || mine.writes) && !before(other, clock))
                found(format("%s %d %d ", other.name.c_str(), other.stream, mine.stream) + (other.freed ? "" : mine.name),
                      "race: " + told(other) + ", and " + told(mine) + " " + where() +
                          ": and no event, wait or synchronisation orders the two");
        std::erase_if(users, [&](auto& other) { return mine.writes || (other.stream == mine.stream && !other.writes); });
        users.push_back(mine);
    }
    if (access.write) parts.erase(std::next(from), to);
}

void simulated_operation(cudaStream_t handle, const std::string& name, const std::vector<Access>& accesses) {
    LOCK;
    Stream* stream = stream_of(handle);
    merge(stream->clock, known());  // it was issued after all that
    Mark mine{stream->number, ++stream->clock[stream->number], name};
    for (auto& access : accesses) {
        auto* block = access.bytes ? block_of(access.at) : nullptr;
        if (!block) continue;
        mine.writes = access.write;
        look(mine, stream->clock, access);
        if (block->second.device >= 0) continue;
        guarded.insert(block);
        block->second.users.push_back(mine);
        protect(*block);
    }
}

extern "C" {

void simulated_given(const void* at, size_t bytes, cudaStream_t handle, int device, bool back) {
    LOCK;
    Stream* stream = stream_of(handle, device);
    auto over = [&](auto& user) { return user.stream == stream->number || before(user, stream->clock) || before(user, known()); };
    auto& early = late[stream->number];
    if (!back) std::erase_if(early, over);
    auto to = cut((size_t)at + bytes);
    for (auto part = cut((size_t)at); part != to; ++part) {
        auto& users = part->second.users;
        part->second.given_back = back;
        // The next work of this stream may write over them. Who uses them must be over by then.
        for (auto& user : users) {
            if (!back || user.freed || over(user)) continue;
            std::string name = user.name + ", from before these were freed: " + place_of(at, bytes) + ",";
            early.push_back({user.stream, user.tick, name, user.writes, true});
        }
        if (back) continue;
        // Given out: all that was issued on this stream may have used them until now. And the allocator may as well
        // have chosen bytes that came back too early: which it gives is luck.
        std::erase_if(users, [&](auto& user) { return user.stream == stream->number; });
        users.push_back({stream->number, stream->clock[stream->number], "what had this memory before", true});
        users.insert(users.end(), early.begin(), early.end());
    }
}

void* simulated_memory(const void* at, size_t bytes, int* device) {
    LOCK;
    auto* block = block_of(at);
    if (!block || block->second.freed || (char*)at + bytes > block->first + block->second.bytes)
        return error_text = place_of(at, bytes), nullptr;
    *device = block->second.device;
    return (char*)at - program + shadow;
}

const char* simulated_error() { return error_text.c_str(); }

int simulated_missing(const char* name) {
    LOCK;
    fail(cudaErrorNotSupported, format("%s is not simulated", name));
    found(name, error_text);  // not every caller looks at what it gets
    return cudaErrorNotSupported;  // for NCCL, too, a number that means no success
}

void simulated_forget() {
    LOCK;
    said.clear(), late.clear(), parts = {{0, {}}};
}

long simulated_waits(int kind) {
    LOCK;
    return waits[kind];
}

// The runtime's functions. Of many there is nothing to say but what they do: CALL(name, arguments, what it does).

#define CALL(name, arguments, ...) \
    cudaError_t name arguments {   \
        LOCK;                      \
        __VA_ARGS__;               \
        return cudaSuccess;        \
    }

CALL(cudaGetDevice, (int* device), *device = current_device)
CALL(cudaSetDevice, (int device), if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice); current_device = device)
CALL(cudaDriverGetVersion, (int* version), *version = CUDART_VERSION)
CALL(cudaRuntimeGetVersion, (int* version), *version = CUDART_VERSION)
CALL(cudaDeviceGetPCIBusId, (char* text, int size, int device), snprintf(text, size, "0000:%02x:00.0", device + 1))
CALL(cudaMemGetInfo, (size_t* unused, size_t* all), *all = GPU_BYTES, *unused = *all - used[current_device])
CALL(cudaDeviceGetStreamPriorityRange, (int* least, int* greatest), *least = 0, *greatest = -5)
CALL(cudaStreamGetPriority, (cudaStream_t, int* priority), *priority = 0)
CALL(cudaStreamSynchronize, (cudaStream_t stream), count_wait(1); learn(stream_of(stream)->clock))
CALL(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned), merge(stream_of(stream)->clock, ((Event*)event)->clock))
CALL(cudaEventCreateWithFlags, (cudaEvent_t* out, unsigned), *out = (cudaEvent_t) new Event{current_device})
CALL(cudaEventDestroy, (cudaEvent_t event), delete (Event*)event)
CALL(cudaEventSynchronize, (cudaEvent_t event), count_wait(2); learn(((Event*)event)->clock))
CALL(cudaDeviceSynchronize, (), count_wait(0); for (auto* stream : streams) if (stream->device == current_device) learn(stream->clock))
// Graphs are never captured, and torch asks.
CALL(cudaStreamIsCapturing, (cudaStream_t, cudaStreamCaptureStatus* status), *status = cudaStreamCaptureStatusNone)
CALL(cudaStreamGetCaptureInfo, (cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*), *status = cudaStreamCaptureStatusNone)
// The driver's own functions, which torch would take for what is newer than its headers: there are none.
CALL(cudaGetDriverEntryPointByVersion, (const char*, void** function, unsigned, unsigned long long,
     cudaDriverEntryPointQueryResult* result), *function = nullptr; if (result) *result = cudaDriverEntryPointSymbolNotFound)

cudaError_t cudaGetDeviceCount(int* count) { return (*count = gpus()) ? cudaSuccess : fail(cudaErrorNoDevice); }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheSimulation"; }
const char* cudaGetErrorString(cudaError_t error) {
    static thread_local std::string text;
    return (text = format("simulated GPU, error %d: %s", (int)error, error_text.c_str())).c_str();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice);
    *out = {};  // what programs read; kernels, which would read more, do not run
    snprintf(out->name, sizeof out->name, "Simulated GPU");
    out->totalGlobalMem = GPU_BYTES, out->major = 8, out->multiProcessorCount = 108, out->warpSize = 32;
    out->maxThreadsPerMultiProcessor = 2048, out->pciBusID = device + 1, out->uuid.bytes[0] = (char)device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> values = {
        {cudaDevAttrComputeCapabilityMajor, 8}, {cudaDevAttrComputeCapabilityMinor, 0}, {cudaDevAttrMultiProcessorCount, 108}};
    if (values.count(attribute)) return *value = values.at(attribute), cudaSuccess;
    return (cudaError_t)simulated_missing(format("cudaDeviceGetAttribute(%d)", (int)attribute).c_str());
}

cudaError_t cudaMalloc(void** out, size_t bytes) { return new_block(out, bytes, current_device); }
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) { return new_block(out, bytes, -1); }
cudaError_t cudaFree(void* at) {
    if (!at) return cudaSuccess;
    LOCK;
    auto block = blocks.find((char*)at);
    if (block == blocks.end() || block->second.freed)
        return fail(cudaErrorInvalidValue, "freeing what was not allocated: " + place_of(at, 0));
    for (auto* stream : streams) learn(stream->clock);  // freeing waits for all work
    size_t bytes = block->second.bytes;
    if (block->second.device >= 0) used[block->second.device] -= bytes;
    block->second.freed = true;
    auto first = cut((size_t)at), end = cut((size_t)at + bytes);
    first->second = {}, parts.erase(std::next(first), end);
    protect(*block);
    fallocate(pages_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->first - program, to_pages(bytes));
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* at) { return cudaFree(at); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* at) {
    int device = -2;
    *out = {.type = cudaMemoryTypeUnregistered, .device = -2};
    if (!simulated_memory(at, 1, &device)) return cudaSuccess;
    bool pinned = device < 0;
    *out = {pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice, std::max(device, 0), (void*)at, pinned ? (void*)at : nullptr};
    return cudaSuccess;
}

// A copy to or from memory that is not pinned is over when the call returns, whatever its name says.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    LOCK;
    const void* ends[2] = {from, to};
    int device;
    for (auto& end : ends)
        if (is_ours(end) && !(end = simulated_memory(end, bytes, &device)))
            return fail(cudaErrorInvalidValue, "a copy to or from " + error_text);
    memmove((void*)ends[1], ends[0], bytes);
    simulated_operation(stream, "memcpy", {{from, bytes, false}, {to, bytes, true}});
    if (!is_ours(from) || !is_ours(to)) learn(stream_of(stream)->clock);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
    int device;
    void* memory = simulated_memory(at, bytes, &device);
    if (!memory) return fail(cudaErrorInvalidValue, "memset of " + error_text);
    memset(memory, value, bytes);
    return simulated_operation(stream, "memset", {{at, bytes, true}}), cudaSuccess;
}

// The default streams have the first numbers: `stream_of` makes them.
CALL(cudaStreamCreateWithPriority, (cudaStream_t* out, unsigned, int), stream_of(nullptr);
     *out = (cudaStream_t)streams.emplace_back(new Stream{(int)streams.size(), current_device}))
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
    LOCK;
    Event* event = (Event*)handle;
    Stream* stream = stream_of(on);
    if (stream->device != event->device)
        return fail(cudaErrorInvalidResourceHandle, "an event of one GPU is recorded on a stream of another");
    merge(stream->clock, known());
    std::chrono::duration<double, std::milli> now = std::chrono::steady_clock::now().time_since_epoch();
    *event = {event->device, 0, now.count(), stream->clock};
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t on) { return cudaEventRecordWithFlags(event, on, 0); }
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t first, cudaEvent_t second) {
    Event *from = (Event*)first, *to = (Event*)second;
    if (!from->milliseconds || !to->milliseconds || from->device != to->device)
        return fail(cudaErrorInvalidResourceHandle, "elapsed time between events that were not recorded on one GPU");
    return *out = (float)(to->milliseconds - from->milliseconds), cudaSuccess;  // the host's time
}
// Is it over? The answer is "no" if the program has not waited, as on a slow GPU, because luck must not count as an
// order. After a thousand queries the answer is "yes", because a loop may wait in this way.
static cudaError_t query(const Clock& clock, int& asked) {
    Clock all = known();
    merge(all, clock);
    if (&known() == &host && all != known() && asked++ < 1000) return fail(cudaErrorNotReady);
    return learn(clock), cudaSuccess;
}
CALL(cudaEventQuery, (cudaEvent_t event), return query(((Event*)event)->clock, ((Event*)event)->asked))

// Of the driver torch needs these two.

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
}
