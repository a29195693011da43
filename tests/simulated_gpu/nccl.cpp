// libnccl without a GPU: ranks are processes of one machine, and exchange through shared memory.
//
// A collective is computed when it is issued: the ranks meet, compare what each of them wants, lay their part into a slot
// that all can read, and meet again. Sums are taken in the order of the ranks; NCCL's rings have other orders.
#include "simulated.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <functional>
#include <map>
#include <nccl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

static const size_t SLOT = 4 << 20;
static const int MOST = 64;  // ranks

struct Shared {
    std::atomic<int> here, round, aborted;
    int pids[MOST];
    char wants[MOST][128];
    char slots[1];
};
struct ncclComm {
    Shared* shared;
    int size, rank, device;
    std::string name, doing = "nothing";
    int splits = 0;
    std::map<int, double> factors = {};  // of sums that multiply first, by their number
};

static thread_local std::string last_error;

static ncclResult_t fail(ncclResult_t result, const std::string& text) {
    last_error = text;
    fprintf(stderr, "[simulated NCCL] %s\n", text.c_str());
    return result;
}

static char* slot(ncclComm* comm, int rank) { return comm->shared->slots + SLOT * rank; }

// All ranks have come to this point. A rank that has died, or does not come, is an error.
static ncclResult_t meet(ncclComm* comm) {
    Shared* all = comm->shared;
    int round = all->round;
    if (all->here.fetch_add(1) + 1 == comm->size) {
        all->here = 0;
        all->round++;
        return ncclSuccess;
    }
    const char* setting = getenv("ZERO_TIMEOUT");
    time_t until = time(nullptr) + (setting ? atoi(setting) : 120);
    for (int turn = 0; all->round == round; turn++) {
        if (turn > 50) usleep(turn < 2000 ? 50 : 1000);
        std::string where = "rank " + std::to_string(comm->rank) + " waits in " + comm->doing + " of " + comm->name;
        if (all->aborted) return fail(ncclRemoteError, where + ", which was aborted");
        if (turn % 256 != 255) continue;
        for (int rank = 0; rank < comm->size; rank++)
            if (all->pids[rank] && kill(all->pids[rank], 0) && errno == ESRCH && all->round == round)
                return fail(ncclRemoteError, where + ", and rank " + std::to_string(rank) + " has died");
        if (time(nullptr) > until) return fail(ncclRemoteError, where + ", and not all ranks come");
    }
    return ncclSuccess;
}

#define MEET(comm) if (ncclResult_t failed = meet(comm)) return failed

// Numbers.

static const char* NAMES[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                              "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct BFloat16 {  // as the hardware rounds: to nearest, ties to even
    uint16_t bits;
    BFloat16(float value) {
        uint32_t all;
        memcpy(&all, &value, 4);
        bits = value != value ? 0x7fc0 : (all + 0x7fff + ((all >> 16) & 1)) >> 16;
    }
    operator float() const {
        uint32_t all = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &all, 4);
        return value;
    }
};

// The sum, or what `op` says, of the first `count` numbers in all slots.
template <class T, class Wide = T>
static void reduce(ncclComm* comm, void* out, size_t count, int op, double factor) {
    auto value = [&](int rank, size_t i) {
        Wide number = (Wide)((T*)slot(comm, rank))[i];
        return factor == 1 ? number : (Wide)(T)(number * (Wide)factor);
    };
    for (size_t i = 0; i < count; i++) {
        Wide all = value(0, i);
        for (int rank = 1; rank < comm->size; rank++) {
            Wide next = value(rank, i);
            all = op == ncclProd ? all * next : op == ncclMax ? std::max(all, next) : op == ncclMin ? std::min(all, next) : all + next;
            all = (Wide)(T)all;
        }
        ((T*)out)[i] = (T)all;
    }
}

static ncclResult_t reduce(ncclComm* comm, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    double factor = op == ncclAvg ? 1.0 / comm->size : (int)op >= (int)ncclNumOps ? comm->factors[op] : 1;
    switch ((int)type) {
        case ncclInt8: reduce<int8_t>(comm, out, count, op, 1); break;
        case ncclUint8: reduce<uint8_t>(comm, out, count, op, 1); break;
        case ncclInt32: reduce<int32_t>(comm, out, count, op, 1); break;
        case ncclInt64: reduce<int64_t>(comm, out, count, op, 1); break;
        case ncclFloat16: reduce<_Float16, float>(comm, out, count, op, factor); break;
        case ncclFloat32: reduce<float>(comm, out, count, op, factor); break;
        case ncclFloat64: reduce<double>(comm, out, count, op, factor); break;
        case ncclBfloat16: reduce<BFloat16, float>(comm, out, count, op, factor); break;
        default: return fail(ncclInvalidArgument, std::string("a sum of ") + NAMES[type] + " is not simulated");
    }
    return ncclSuccess;
}

// Begin a collective: is the memory this GPU's, and do all ranks want the same? `in` and `out` become ours to use.
static ncclResult_t begin(ncclComm* comm, const char* name, const void*& in, size_t in_count, void*& out, size_t out_count,
                          ncclDataType_t type, int more, cudaStream_t stream) {
    char wanted[128];
    snprintf(wanted, sizeof wanted, "%s from %zu to %zu %s (%d)", name, in_count, out_count, NAMES[type], more);
    comm->doing = wanted;
    size_t bytes[2] = {in_count * SIZES[type], out_count * SIZES[type]};
    const void* ends[2] = {in, out};
    void* mine[2] = {};
    for (int i = 0; i < 2; i++) {
        int device = -2;
        mine[i] = bytes[i] && ends[i] ? simulated_memory(ends[i], bytes[i], &device) : nullptr;
        if (!bytes[i] || !ends[i] || (mine[i] && device == comm->device)) continue;
        std::string where = device >= 0 ? "memory of GPU " + std::to_string(device) : device == -1 ? "pinned memory" : simulated_error();
        comm->shared->aborted = 1;  // the others need not wait
        return fail(ncclInvalidArgument, "rank " + std::to_string(comm->rank) + " on GPU " + std::to_string(comm->device) +
                    " issues " + wanted + " with " + (i ? "an output" : "an input") + " on the wrong device: " + where);
    }
    simulated_is_nccls(stream);
    Access accesses[2] = {{in, in ? bytes[0] : 0, false, ""}, {out, out ? bytes[1] : 0, true, ""}};
    simulated_operation(stream, name, 2, accesses);
    in = mine[0], out = mine[1];
    memcpy(comm->shared->wants[comm->rank], wanted, sizeof wanted);
    MEET(comm);
    std::string others;
    for (int rank = 0; rank < comm->size; rank++)
        if (strcmp(comm->shared->wants[rank], wanted))
            others += ", rank " + std::to_string(rank) + " " + comm->shared->wants[rank];
    MEET(comm);
    if (others.empty()) return ncclSuccess;
    return fail(ncclInvalidUsage, "the ranks issue different collectives: rank " + std::to_string(comm->rank) + " " + wanted + others);
}

// In steps that fit into a slot: `lay` puts something into this rank's slot, and `take` reads all slots.
static ncclResult_t exchange(ncclComm* comm, size_t count, size_t size, std::function<void(size_t, size_t)> lay,
                             std::function<ncclResult_t(size_t, size_t)> take) {
    for (size_t at = 0, most = SLOT / size; at < count; at += most) {
        size_t here = std::min(most, count - at);
        lay(at, here);
        MEET(comm);
        ncclResult_t failed = take(at, here);
        MEET(comm);
        if (failed) return failed;
    }
    return ncclSuccess;
}

#define BEGIN(...) if (ncclResult_t failed = begin(comm, __VA_ARGS__, stream)) return failed

extern "C" {

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm* comm, cudaStream_t stream) {
    BEGIN("all-gather", in, count, out, count * comm->size, type, 0);
    size_t size = SIZES[type];
    return exchange(comm, count, size, [&](size_t at, size_t n) { memcpy(slot(comm, comm->rank), (char*)in + at * size, n * size); },
                    [&](size_t at, size_t n) {
                        for (int rank = 0; rank < comm->size; rank++)
                            memcpy((char*)out + (rank * count + at) * size, slot(comm, rank), n * size);
                        return ncclSuccess;
                    });
}

ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm* comm,
                               cudaStream_t stream) {
    BEGIN("reduce-scatter", in, count * comm->size, out, count, type, op);
    size_t size = SIZES[type];
    std::vector<char> result(count * size);  // `out` may be a part of `in`
    for (int owner = 0; owner < comm->size; owner++) {
        ncclResult_t failed = exchange(
            comm, count, size,
            [&](size_t at, size_t n) { memcpy(slot(comm, comm->rank), (char*)in + (owner * count + at) * size, n * size); },
            [&](size_t at, size_t n) { return owner == comm->rank ? reduce(comm, &result[at * size], n, type, op) : ncclSuccess; });
        if (failed) return failed;
    }
    if (count) memcpy(out, result.data(), result.size());
    return ncclSuccess;
}

static ncclResult_t all_reduce(const char* name, const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               int root, ncclComm* comm, cudaStream_t stream) {
    bool receives = root < 0 || root == comm->rank;
    if (!receives) out = nullptr;
    BEGIN(name, in, count, out, count, type, op + 1000 * (root + 1));
    size_t size = SIZES[type];
    std::vector<char> result(std::min(count * size, SLOT));
    size_t from = 0, many = 0;  // what `result` holds goes into `out` when all ranks have read their slots
    auto put = [&] { if (many && receives) memcpy((char*)out + from * size, result.data(), many * size); };
    ncclResult_t failed = exchange(comm, count, size,
                                   [&](size_t at, size_t n) { put(), memcpy(slot(comm, comm->rank), (char*)in + at * size, n * size); },
                                   [&](size_t at, size_t n) { return from = at, many = n, reduce(comm, result.data(), n, type, op); });
    put();
    return failed;
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm* comm,
                           cudaStream_t stream) {
    return all_reduce("all-reduce", in, out, count, type, op, -1, comm, stream);
}
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm* comm,
                        cudaStream_t stream) {
    return all_reduce("reduce", in, out, count, type, op, root, comm, stream);
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm* comm,
                           cudaStream_t stream) {
    if (comm->rank != root) in = nullptr;
    BEGIN("broadcast", in, count, out, count, type, root);
    size_t size = SIZES[type];
    return exchange(comm, count, size,
                    [&](size_t at, size_t n) { if (in) memcpy(slot(comm, root), (char*)in + at * size, n * size); },
                    [&](size_t at, size_t n) { return memmove((char*)out + at * size, slot(comm, root), n * size), ncclSuccess; });
}
ncclResult_t ncclBcast(void* both, size_t count, ncclDataType_t type, int root, ncclComm* comm, cudaStream_t stream) {
    return ncclBroadcast(both, both, count, type, root, comm, stream);
}

// Communicators.

ncclResult_t ncclCommInitRankConfig(ncclComm** out, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
    ncclComm* comm = new ncclComm{nullptr, size, rank, 0, id.internal};
    cudaGetDevice(&comm->device);
    size_t bytes = sizeof(Shared) + SLOT * size;
    int file = size <= MOST ? shm_open(("/" + comm->name).c_str(), O_RDWR | O_CREAT, 0600) : -1;
    void* memory = file < 0 || ftruncate(file, bytes) ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return fail(ncclSystemError, "no shared memory for " + std::to_string(size) + " ranks");
    close(file);
    comm->shared = (Shared*)memory;
    comm->shared->pids[rank] = getpid();
    comm->doing = "its beginning";
    memcpy(slot(comm, rank), &comm->device, sizeof(int));
    MEET(comm);
    if (rank == 0) shm_unlink(("/" + comm->name).c_str());
    for (int other = 0; other < size; other++)
        if (other != rank && *(int*)slot(comm, other) == comm->device)
            return fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                        std::to_string(other) + " both on CUDA device " + std::to_string(comm->device));
    MEET(comm);
    return *out = comm, ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm** out, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm** out, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
    return ncclCommInitRankConfig(out, size, ids[0], rank, config);
}
// Ranks of the same color form a new communicator, in the order of their keys.
ncclResult_t ncclCommSplit(ncclComm* comm, int color, int key, ncclComm** out, ncclConfig_t* config) {
    int mine[2] = {color, key}, number = comm->splits++;
    comm->doing = "a split";
    memcpy(slot(comm, comm->rank), mine, sizeof mine);
    MEET(comm);
    std::vector<std::pair<int, int>> members;
    for (int rank = 0; rank < comm->size; rank++) {
        int* other = (int*)slot(comm, rank);
        if (other[0] == color) members.push_back({other[1], rank});
    }
    MEET(comm);
    if (color < 0) return *out = nullptr, ncclSuccess;
    std::sort(members.begin(), members.end());
    auto me = std::find_if(members.begin(), members.end(), [&](auto& member) { return member.second == comm->rank; });
    ncclUniqueId id = {};
    snprintf(id.internal, sizeof id.internal, "%s-%d-%d", comm->name.c_str(), number, color);
    return ncclCommInitRankConfig(out, (int)members.size(), id, (int)(me - members.begin()), config);
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
    static int count = 0;
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *out = {};
    snprintf(out->internal, sizeof out->internal, "simulated-%d-%d-%lx%lx", getpid(), count++, (long)now.tv_sec, now.tv_nsec);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm* comm) { return comm->shared->aborted = 1, ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm*) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm*) { return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm*, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) { return *size = comm->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { return *device = comm->device, ncclSuccess; }
// A group begins and ends: within it NCCL may change the order. Ours come one after the other.
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t type, ncclScalarResidence_t, ncclComm* comm) {
    int number = ncclNumOps + 1 + (int)comm->factors.size();
    comm->factors[number] = type == ncclFloat64    ? *(double*)factor
                            : type == ncclFloat32  ? *(float*)factor
                            : type == ncclBfloat16 ? (float)*(BFloat16*)factor
                                                   : (double)*(_Float16*)factor;
    return *op = (ncclRedOp_t)number, ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm*) { return ncclSuccess; }
ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char* ncclGetLastError(ncclComm*) { return last_error.c_str(); }
const char* ncclGetErrorString(ncclResult_t) {
    if (last_error.empty()) last_error = simulated_error();  // of what is not simulated
    return last_error.c_str();
}
}
