// libnccl without a GPU: ranks are processes of one machine, and exchange through shared memory.
//
// A collective is computed when it is issued: each rank lays what it gives into a slot that all can read, and they meet,
// compare what each of them wants, read the slots, and meet again. Sums are taken in the order of the ranks; NCCL's rings
// have other orders.
#include "simulated.h"

#include <algorithm>
#include <atomic>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t SLOT = 256 << 20;  // bytes that a rank can give; they cost nothing until they are used
static const int MOST = 64;            // ranks

struct Shared {
    std::atomic<int> here, round, aborted;
    char wants[MOST][128];
    alignas(64) char slots[1];
};
struct ncclComm {
    Shared* shared;
    int size, rank, device;
    std::string name, doing = "its beginning";
    int splits = 0;
};

static thread_local std::string last_error;

static ncclResult_t fail(ncclResult_t result, const std::string& text) {
    last_error = text;
    fprintf(stderr, "[simulated NCCL] %s\n", text.c_str());
    return result;
}

static char* slot(ncclComm* comm, int rank) { return comm->shared->slots + SLOT * rank; }

// All ranks have come to this point. A rank that does not come is an error.
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
        if (time(nullptr) > until) return fail(ncclRemoteError, where + ", and not all ranks come");
    }
    return ncclSuccess;
}

#define MEET(comm) if (ncclResult_t failed = meet(comm)) return failed

// The sum, or what `op` says, of `count` numbers from the number `first` on in all slots.
template <class T>
static void reduce_as(ncclComm* comm, void* to, size_t first, size_t count, ncclRedOp_t op) {
    T *out = (T*)to, factor = op == ncclAvg ? 1.0 / comm->size : 1;
    for (size_t i = 0; i < count; i++)
        for (int rank = 0; rank < comm->size; rank++) {
            T next = ((T*)slot(comm, rank))[first + i] * factor;
            out[i] = !rank ? next : op == ncclMax ? std::max(out[i], next) : op == ncclMin ? std::min(out[i], next) : T(out[i] + next);
        }
}

static const struct {  // in the order of ncclDataType_t
    const char* name;
    size_t bytes;
    void (*reduce)(ncclComm*, void*, size_t, size_t, ncclRedOp_t);  // nullptr: not simulated
} TYPES[] = {{"int8", 1}, {"uint8", 1, reduce_as<uint8_t>}, {"int32", 4, reduce_as<int32_t>}, {"uint32", 4},
             {"int64", 8, reduce_as<int64_t>}, {"uint64", 8}, {"float16", 2, reduce_as<c10::Half>},
             {"float32", 4, reduce_as<float>}, {"float64", 8, reduce_as<double>},
             {"bfloat16", 2, reduce_as<c10::BFloat16>}, {"float8e4m3", 1}, {"float8e5m2", 1}};

static ncclResult_t reduce(ncclComm* comm, void* out, size_t first, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    bool known = op == ncclSum || op == ncclMax || op == ncclMin || (op == ncclAvg && type >= ncclFloat16);
    if (known && TYPES[type].reduce) return TYPES[type].reduce(comm, out, first, count, op), ncclSuccess;
    return fail(ncclInvalidArgument, format("reduction %d of %s is not simulated", op, TYPES[type].name));
}

// What all collectives share. `in` or `out` is nullptr where this rank gives nothing, or gets nothing. All ranks must
// want the same, and `more` is what they must agree on besides. `read` fills `out` when all ranks have filled their slots.
template <class Read>
static ncclResult_t collective(ncclComm* comm, const char* name, int more, const void* in, size_t in_count, void* out,
                               size_t out_count, ncclDataType_t type, cudaStream_t stream, Read read) {
    Shared* all = comm->shared;
    const std::string wants = comm->doing = format("%s from %zu to %zu %s (%d)", name, in_count, out_count, TYPES[type].name, more);
    std::string me = "rank " + std::to_string(comm->rank);
    std::vector<Access> accesses = {{in, in ? in_count * TYPES[type].bytes : 0, false}, {out, out ? out_count * TYPES[type].bytes : 0, true}};
    void* memory[2] = {};
    for (int i = 0; i < 2; i++) {
        if (!accesses[i].bytes) continue;
        int device = -2;
        memory[i] = simulated_memory(accesses[i].at, accesses[i].bytes, &device);
        if (memory[i] && device == comm->device && accesses[0].bytes <= SLOT) continue;
        std::string where = device >= 0 ? "memory of GPU " + std::to_string(device) : device == -1 ? "pinned memory" : simulated_error();
        where = (i ? "an output on the wrong device: " : "an input on the wrong device: ") + where;
        all->aborted = 1;  // the others need not wait
        return fail(ncclInvalidArgument, me + " on GPU " + std::to_string(comm->device) + " issues " + wants + " with " +
                    (device == comm->device ? "more than the 256 MiB per rank that are simulated" : where));
    }
    simulated_operation(stream, name, accesses);
    strcpy(all->wants[comm->rank], wants.c_str());
    if (memory[0]) memcpy(slot(comm, comm->rank), memory[0], accesses[0].bytes);
    MEET(comm);
    std::string others;
    for (int rank = 0; rank < comm->size; rank++)
        if (all->wants[rank] != wants) others += ", rank " + std::to_string(rank) + " " + all->wants[rank];
    ncclResult_t result = others.empty() && memory[1] ? read((char*)memory[1], TYPES[type].bytes) : ncclSuccess;
    MEET(comm);
    return others.empty() ? result : fail(ncclInvalidUsage, "the ranks issue different collectives: " + me + " " + wants + others);
}

extern "C" {

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm* comm, cudaStream_t stream) {
    return collective(comm, "all-gather", 0, in, count, out, count * comm->size, type, stream, [&](char* to, size_t size) {
        for (int rank = 0; rank < comm->size; rank++) memcpy(to + rank * count * size, slot(comm, rank), count * size);
        return ncclSuccess;
    });
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm* comm,
                               cudaStream_t stream) {
    return collective(comm, "reduce-scatter", op, in, count * comm->size, out, count, type, stream,
                      [&](char* to, size_t) { return reduce(comm, to, comm->rank * count, count, type, op); });
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm* comm,
                           cudaStream_t stream) {
    return collective(comm, "all-reduce", op, in, count, out, count, type, stream,
                      [&](char* to, size_t) { return reduce(comm, to, 0, count, type, op); });
}
ncclResult_t ncclBcast(void* both, size_t count, ncclDataType_t type, int root, ncclComm* comm, cudaStream_t stream) {
    return collective(comm, "broadcast", root, comm->rank == root ? both : nullptr, count, both, count, type, stream,
                      [&](char* to, size_t size) { return memcpy(to, slot(comm, root), count * size), ncclSuccess; });
}

// Communicators.

ncclResult_t ncclCommInitRankConfig(ncclComm** out, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
    ncclComm* comm = new ncclComm{nullptr, size, rank, 0, id.internal};
    cudaGetDevice(&comm->device);
    size_t bytes = sizeof(Shared) + SLOT * size;
    int file = size <= MOST ? shm_open(("/" + comm->name).c_str(), O_RDWR | O_CREAT, 0600) : -1;
    bool there = file >= 0 && !ftruncate(file, bytes);
    comm->shared = (Shared*)(there ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED);
    if (comm->shared == MAP_FAILED) return fail(ncclSystemError, "no shared memory for " + std::to_string(size) + " ranks");
    close(file);
    memcpy(slot(comm, rank), &comm->device, sizeof(int));
    MEET(comm);
    if (rank == 0) shm_unlink(("/" + comm->name).c_str());
    for (int other = 0; other < size; other++)
        if (other != rank && *(int*)slot(comm, other) == comm->device)
            return fail(ncclInvalidUsage, format("Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", rank, other, comm->device));
    MEET(comm);
    return *out = comm, ncclSuccess;
}
// Ranks of the same color form a new communicator, in the order of their keys.
ncclResult_t ncclCommSplit(ncclComm* comm, int color, int key, ncclComm** out, ncclConfig_t* config) {
    int mine[2] = {color, key}, number = comm->splits++;
    comm->doing = "a split";
    memcpy(slot(comm, comm->rank), mine, sizeof mine);
    MEET(comm);
    int size = 0, place = 0;  // of the new communicator, and of this rank in it
    for (int rank = 0; rank < comm->size; rank++) {
        int* other = (int*)slot(comm, rank);
        size += other[0] == color;
        place += other[0] == color && std::pair(other[1], rank) < std::pair(key, comm->rank);
    }
    MEET(comm);
    if (color < 0) return *out = nullptr, ncclSuccess;
    ncclUniqueId id = {};
    snprintf(id.internal, sizeof id.internal, "%s-%d-%d", comm->name.c_str(), number, color);
    return ncclCommInitRankConfig(out, size, id, place, config);
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
    static std::atomic<int> number;
    *out = {};
    return snprintf(out->internal, sizeof out->internal, "simulated-%d-%d-%ld", getpid(), number++, time(nullptr)), ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm* comm) { return comm->shared->aborted = 1, ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm*, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) { return *size = comm->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char* ncclGetLastError(ncclComm*) { return last_error.c_str(); }
const char* ncclGetErrorString(ncclResult_t) { return last_error.empty() ? simulated_error() : last_error.c_str(); }
}
