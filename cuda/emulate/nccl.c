/*
 * NCCL for the emulated devices, called by libs/nccl.c: processes, or threads, exchange their parts through shared
 * memory, and add in the order of ranks. A call that breaks a rule of NVIDIA's documentation ends the process
 * (contract.h): another device or stream than the communicator's, memory of another device, buffers that overlap, and
 * calls that differ between ranks, or that one of them does not make, where the library would wait for ever.
 */
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "core_shim.h"
#include "emulate/contract.h"
#include "emulate/devices.h"
#include "emulate/values.h"
#include "libs/nccl_api.h"

enum { COMM = 0x6e630001, MOST_RANKS = 8, SLOT = 1 << 16, VERSION = 22809 };
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };
static const char *const names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast"};

typedef struct request { /* what all ranks have to agree on */
    long number; /* of the call, of this communicator */
    int kind, type, op, root;
    size_t n;
} request;

typedef struct meeting { /* in shared memory */
    atomic_int arrived, rounds, failed;
    request requests[MOST_RANKS];
    int devices[MOST_RANKS];
    char slots[MOST_RANKS][SLOT];
} meeting;

typedef struct comm {
    int kind, rank, size, device;
    long calls;
    meeting *shared;
} comm;

/* A fault that a test asks for: an error of the library at this function. */
static bool has_fault(const char *function)
{
    const char *planted = getenv("ONT_EMULATE_NCCL_FAULT");
    return planted && !strcmp(planted, function);
}

/* ---- meeting ---- */

/* Waits until all ranks are here. */
static void meet(comm *c, const char *what)
{
    int round = atomic_load(&c->shared->rounds);
    const char *given = getenv("ONT_EMULATE_NCCL_LIMIT"); /* seconds */
    time_t begin = time(NULL), limit = given ? atoi(given) : 60;
    if (atomic_fetch_add(&c->shared->arrived, 1) + 1 == c->size) {
        atomic_store(&c->shared->arrived, 0);
        atomic_fetch_add(&c->shared->rounds, 1);
    }
    while (atomic_load(&c->shared->rounds) == round) {
        sched_yield();
        ONT_REQUIRE(time(NULL) - begin < limit, "%s: rank %d of %d waits for ranks that do not call it", what,
                    c->rank, c->size);
    }
}

static int get_version(int *version)
{
    *version = VERSION;
    return NCCL_SUCCESS;
}

static int get_unique_id(nccl_id *id)
{
    static atomic_int made;
    memset(id, 0, sizeof *id);
    if (has_fault("ncclGetUniqueId")) return NCCL_SYSTEM_ERROR;
    snprintf(id->bytes, sizeof id->bytes, "/ont_nccl_%ld_%d", (long)getpid(), atomic_fetch_add(&made, 1));
    int file = shm_open(id->bytes, O_CREAT | O_EXCL | O_RDWR, 0600);
    ONT_REQUIRE(file >= 0 && !ftruncate(file, sizeof(meeting)), "ncclGetUniqueId: no shared memory");
    close(file);
    return NCCL_SUCCESS;
}

static int init_rank(void **made, int size, nccl_id id, int rank)
{
    ont_emulate_outside_capture("ncclCommInitRank");
    ONT_REQUIRE(size > 0 && size <= MOST_RANKS && rank >= 0 && rank < size, "ncclCommInitRank: rank %d of %d", rank,
                size);
    int file = shm_open(id.bytes, O_RDWR, 0);
    ONT_REQUIRE(file >= 0, "ncclCommInitRank: an id that ncclGetUniqueId has not made");
    void *shared = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    comm *c = calloc(1, sizeof *c);
    ONT_REQUIRE(shared != MAP_FAILED && c, "out of memory");
    close(file);
    *c = (comm){.kind = COMM, .rank = rank, .size = size, .device = ont_emulate_device(), .shared = shared};
    if (has_fault("ncclCommInitRank")) atomic_store(&c->shared->failed, 1);
    meet(c, "ncclCommInitRank");
    if (!rank) shm_unlink(id.bytes);
    if (atomic_load(&c->shared->failed)) return NCCL_SYSTEM_ERROR;
    *made = c;
    return NCCL_SUCCESS;
}

static int leave(void *opaque)
{
    comm *c = opaque;
    ONT_REQUIRE(c && c->kind == COMM, "ncclCommDestroy: not a communicator");
    munmap(c->shared, sizeof(meeting));
    c->kind = 0;
    free(c);
    return NCCL_SUCCESS;
}

static int async_error(void *opaque, int *error)
{
    const comm *c = opaque;
    ONT_REQUIRE(c && c->kind == COMM, "ncclCommGetAsyncError: not a communicator");
    *error = has_fault("async") ? NCCL_SYSTEM_ERROR : NCCL_SUCCESS;
    return NCCL_SUCCESS;
}

static const char *error_text(int error)
{
    return error == NCCL_SYSTEM_ERROR ? "unhandled system error" : "an error";
}

static const char *last_error(void *opaque)
{
    (void)opaque;
    return "";
}

/* ---- rules of a call ---- */

static size_t size_of(int type)
{
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    ONT_REQUIRE(type >= 0 && type <= NCCL_BFLOAT16, "NCCL: there is no type %d", type);
    return sizes[type];
}

/* Whether two ranges have a byte in common, but for what may be the same memory: `from` at `to` plus `shift` bytes. */
static void check_overlap(const request *r, const char *from, size_t from_bytes, const char *to, size_t to_bytes,
                          ptrdiff_t shift)
{
    bool apart = from + from_bytes <= to || to + to_bytes <= from;
    ONT_REQUIRE(apart || from == to + shift, "%s: the buffers overlap", names[r->kind]);
}

static void check_memory(const comm *c, const request *r, const void *data)
{
    int owner = ont_emulate_owner(data);
    ONT_REQUIRE(data || !r->n, "%s: a buffer is missing", names[r->kind]);
    ONT_REQUIRE(owner < 0 || owner == c->device, "%s: a buffer of device %d, and the communicator is device %d's",
                names[r->kind], owner, c->device);
}

static void check_alike(const comm *c)
{
    for (int rank = 1; rank < c->size; rank++) {
        const request *first = &c->shared->requests[0], *o = &c->shared->requests[rank];
        ONT_REQUIRE(o->number == first->number && o->kind == first->kind && o->n == first->n &&
                        o->type == first->type && o->op == first->op && o->root == first->root,
                    "%s of %zu elements in rank 0, but %s of %zu in rank %d", names[first->kind], first->n,
                    names[o->kind], o->n, rank);
    }
}

static void begin(comm *c, request *r, const void *from, void *to, cudaStream_t stream)
{
    const char *name = names[r->kind];
    size_t mine = r->n * size_of(r->type), all = mine * (size_t)c->size, own = mine * (size_t)c->rank;
    ONT_REQUIRE(c->device == ont_emulate_device(), "%s: a communicator of device %d, but device %d is current", name,
                c->device, ont_emulate_device());
    ont_emulate_outside_capture(name);
    ont_emulate_check_stream(name, stream);
    check_memory(c, r, from);
    check_memory(c, r, to);
    check_overlap(r, from, r->kind == REDUCE_SCATTER ? all : mine, to, r->kind == ALL_GATHER ? all : mine,
                  r->kind == REDUCE_SCATTER ? -(ptrdiff_t)own : r->kind == ALL_GATHER ? (ptrdiff_t)own : 0);
    r->number = ++c->calls;
    c->shared->requests[c->rank] = *r;
    meet(c, name);
    check_alike(c);
}

/* ---- sums ---- */

static int64_t integer_at(int type, const void *data, size_t i)
{
    switch (type) {
    case NCCL_INT8: return ((const int8_t *)data)[i];
    case NCCL_UINT8: return ((const uint8_t *)data)[i];
    case NCCL_INT32: return ((const int32_t *)data)[i];
    case NCCL_UINT32: return ((const uint32_t *)data)[i];
    default: return ((const int64_t *)data)[i];
    }
}

static void put_integer(int type, void *data, size_t i, int64_t value)
{
    size_t size = size_of(type);
    memcpy((char *)data + i * size, &value, size); /* the low bytes come first */
}

static ont_dtype float_of(int type)
{
    return type == NCCL_FLOAT16 ? ONT_FLOAT16 : type == NCCL_FLOAT32 ? ONT_FLOAT32
           : type == NCCL_FLOAT64 ? ONT_FLOAT64 : ONT_BFLOAT16;
}

/* to += from, rounded to the type. */
static void combine(const request *r, void *to, const void *from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (r->type >= NCCL_FLOAT16) {
            ont_dtype dtype = float_of(r->type);
            ont_emulate_put(dtype, to, (int64_t)i,
                            ont_emulate_get(dtype, to, (int64_t)i) + ont_emulate_get(dtype, from, (int64_t)i));
            continue;
        }
        int64_t a = integer_at(r->type, to, i), b = integer_at(r->type, from, i);
        put_integer(r->type, to, i, r->op == NCCL_MAX ? (a > b ? a : b) : a + b);
    }
}

/* ---- the collectives ---- */

/* Gives all ranks `n` elements of this one. */
static void show(comm *c, const request *r, const char *from, size_t n)
{
    ont_emulate_begin_work(names[r->kind]);
    if (from) memcpy(c->shared->slots[c->rank], from, n * size_of(r->type));
    ont_emulate_end_work();
    meet(c, names[r->kind]);
}

static void read_slot(comm *c, const request *r, char *to, int rank, size_t n)
{
    ont_emulate_begin_work(names[r->kind]);
    memcpy(to, c->shared->slots[rank], n * size_of(r->type));
    ont_emulate_end_work();
}

/* The sum of what all ranks have shown. */
static void read_sum(comm *c, const request *r, char *to, size_t n)
{
    read_slot(c, r, to, 0, n);
    ont_emulate_begin_work(names[r->kind]);
    for (int rank = 1; rank < c->size; rank++) combine(r, to, c->shared->slots[rank], n);
    ont_emulate_end_work();
}

/* A piece of each rank's part, beginning at element `at`. */
static void exchange(comm *c, const request *r, const char *from, char *to, size_t at, size_t n)
{
    size_t size = size_of(r->type), part = r->n * size;
    for (int rank = 0; rank < (r->kind == REDUCE_SCATTER ? c->size : 1); rank++) {
        bool gives = r->kind != BROADCAST || c->rank == r->root;
        show(c, r, gives ? from + (size_t)rank * part + at * size : NULL, n);
        if (r->kind == ALL_REDUCE || (r->kind == REDUCE_SCATTER && rank == c->rank)) read_sum(c, r, to + at * size, n);
        if (r->kind == BROADCAST) read_slot(c, r, to + at * size, r->root, n);
        for (int k = 0; r->kind == ALL_GATHER && k < c->size; k++)
            read_slot(c, r, to + (size_t)k * part + at * size, k, n);
        meet(c, names[r->kind]); /* the slots may be written again */
    }
}

static atomic_int n_calls;

/* How many collectives this process has been part of. */
__attribute__((visibility("default"))) int ont_emulate_nccl_calls(void)
{
    return atomic_load(&n_calls);
}

static int run(request r, const void *from, void *to, void *opaque, cudaStream_t stream)
{
    comm *c = opaque;
    ONT_REQUIRE(c && c->kind == COMM, "%s: not a communicator", names[r.kind]);
    if (has_fault(names[r.kind])) return NCCL_SYSTEM_ERROR;
    begin(c, &r, from, to, stream);
    atomic_fetch_add(&n_calls, 1);
    size_t most = SLOT / size_of(r.type);
    for (size_t at = 0; at < r.n; at += most) exchange(c, &r, from, to, at, r.n - at < most ? r.n - at : most);
    return NCCL_SUCCESS;
}

static int all_reduce(const void *from, void *to, size_t n, int type, int op, void *c, cudaStream_t stream)
{
    return run((request){.kind = ALL_REDUCE, .n = n, .type = type, .op = op}, from, to, c, stream);
}

static int reduce_scatter(const void *from, void *to, size_t n, int type, int op, void *c, cudaStream_t stream)
{
    return run((request){.kind = REDUCE_SCATTER, .n = n, .type = type, .op = op}, from, to, c, stream);
}

static int all_gather(const void *from, void *to, size_t n, int type, void *c, cudaStream_t stream)
{
    return run((request){.kind = ALL_GATHER, .n = n, .type = type}, from, to, c, stream);
}

static int broadcast(const void *from, void *to, size_t n, int type, int root, void *c, cudaStream_t stream)
{
    return run((request){.kind = BROADCAST, .n = n, .type = type, .root = root}, from, to, c, stream);
}

#define FUNCTION(name, function) {name, (void (*)(void))(function)}
const ont_emulate_function ont_emulate_nccl[] = {
    FUNCTION("ncclGetVersion", get_version),
    FUNCTION("ncclGetUniqueId", get_unique_id),
    FUNCTION("ncclCommInitRank", init_rank),
    FUNCTION("ncclCommDestroy", leave),
    FUNCTION("ncclCommAbort", leave),
    FUNCTION("ncclCommGetAsyncError", async_error),
    FUNCTION("ncclGetErrorString", error_text),
    FUNCTION("ncclGetLastError", last_error),
    FUNCTION("ncclAllReduce", all_reduce),
    FUNCTION("ncclReduceScatter", reduce_scatter),
    FUNCTION("ncclAllGather", all_gather),
    FUNCTION("ncclBroadcast", broadcast),
    {NULL, NULL},
};
