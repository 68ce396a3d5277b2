/*
 * _mpi.so: the collectives by MPI. A library of its own, which knows of the core only dist/collectives.h.
 *
 * Collectives are nonblocking ones that are tested until they are done: so a wait can be interrupted, leaves the
 * processor to others, and ends where a process has left. Each process says goodbye with the number of collectives it
 * has taken part in; one that left before the present one will never join it.
 */
#include "dist/collectives.h"

#include <limits.h>
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    GOODBYE = 1,       /* tag */
    EAGER_TESTS = 4096, /* before a wait sleeps between its tests */
    NAP_NS = 20000,
    LOOK_NS = 100000000, /* between looks at who has left and at interrupts */
};

static struct {
    MPI_Comm work, parting;
    MPI_Op add_half, add_bfloat;
    int rank, size;
    bool ours;      /* MPI was initialised here */
    bool broken;    /* a collective has failed, so that the order of the next ones is unknown */
    uint64_t count; /* collectives so far */
    uint64_t *left; /* of each process that has said goodbye, its count + 1 */
} mpi;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* one call at a time: MPI_THREAD_SERIALIZED */

static ont_status failed(ont_wait *wait, const char *what, int code)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    (void)MPI_Error_string(code, text, &n);
    (void)snprintf(wait->message, sizeof wait->message, "%s: %s", what, text);
    return ONT_ESTATE;
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void nap(void)
{
    nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

/* ---- sums that MPI has not ---- */

static void add_halves(void *in, void *inout, int *n, MPI_Datatype *type)
{
    (void)type;
    const _Float16 *a = in;
    _Float16 *b = inout;
    for (int i = 0; i < *n; i++) b[i] = (_Float16)((float)a[i] + (float)b[i]);
}

static float bfloat_at(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t bfloat(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40); /* NaN stays one */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static void add_bfloats(void *in, void *inout, int *n, MPI_Datatype *type)
{
    (void)type;
    const uint16_t *a = in;
    uint16_t *b = inout;
    for (int i = 0; i < *n; i++) b[i] = bfloat(bfloat_at(a[i]) + bfloat_at(b[i]));
}

/* ---- waiting ---- */

/* Notes goodbyes; false where MPI fails. */
static bool hear_goodbyes(void)
{
    for (;;) {
        int there = 0;
        MPI_Status status;
        uint64_t count;
        if (MPI_Iprobe(MPI_ANY_SOURCE, GOODBYE, mpi.parting, &there, &status) != MPI_SUCCESS) return false;
        if (!there) return true;
        int rank = status.MPI_SOURCE;
        if (MPI_Recv(&count, 1, MPI_UINT64_T, rank, GOODBYE, mpi.parting, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return false;
        mpi.left[rank] = count + 1;
    }
}

/* Whether this call can still end. */
static ont_status look(ont_wait *wait)
{
    if (!hear_goodbyes()) {
        (void)snprintf(wait->message, sizeof wait->message, "%s",
                       "MPI cannot receive the messages with which other ranks end");
        return ONT_ESTATE;
    }
    for (int rank = 0; rank < mpi.size; rank++)
        if (mpi.left[rank] && mpi.left[rank] - 1 < mpi.count) {
            (void)snprintf(wait->message, sizeof wait->message, "rank %d has ended", rank);
            return ONT_ESTATE;
        }
    if (wait->interrupted && wait->interrupted(wait->context)) {
        (void)snprintf(wait->message, sizeof wait->message, "interrupted");
        return ONT_ESTATE;
    }
    return ONT_OK;
}

/* MPI has no way to cancel a collective: one that is given up stays pending. */
static ont_status finish(const char *what, int code, MPI_Request *request, ont_wait *wait)
{
    int64_t next = now_ns() + LOOK_NS;
    wait->pending = code == MPI_SUCCESS;
    for (long tests = 0; code == MPI_SUCCESS; tests++) {
        int done = 0;
        code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) break;
        if (done) {
            wait->pending = false;
            return ONT_OK;
        }
        if (tests < EAGER_TESTS) (void)sched_yield();
        else nap();
        if (now_ns() < next) continue;
        ont_status status = look(wait);
        if (status != ONT_OK) return status;
        next = now_ns() + LOOK_NS;
    }
    return failed(wait, what, code);
}

/* ---- the collectives ---- */

static ont_status begin(ont_wait *wait)
{
    pthread_mutex_lock(&lock);
    if (!mpi.broken) {
        mpi.count++;
        return ONT_OK;
    }
    pthread_mutex_unlock(&lock);
    (void)snprintf(wait->message, sizeof wait->message, "an earlier collective operation has failed");
    return ONT_ESTATE;
}

static ont_status end(ont_status status)
{
    if (status != ONT_OK) mpi.broken = true;
    pthread_mutex_unlock(&lock);
    return status;
}

static bool type_of(ont_dtype dtype, MPI_Datatype *type, MPI_Op *add, ont_wait *wait)
{
    *add = MPI_SUM;
    switch (dtype) {
    case ONT_FLOAT32: *type = MPI_FLOAT; return true;
    case ONT_FLOAT64: *type = MPI_DOUBLE; return true;
    case ONT_INT8: *type = MPI_INT8_T; return true;
    case ONT_INT16: *type = MPI_INT16_T; return true;
    case ONT_INT32: *type = MPI_INT32_T; return true;
    case ONT_INT64: *type = MPI_INT64_T; return true;
    case ONT_UINT8: *type = MPI_UINT8_T; return true;
    case ONT_BOOL: *type = MPI_UINT8_T; *add = MPI_LOR; return true;
    case ONT_FLOAT16: *type = MPI_UINT16_T; *add = mpi.add_half; return true;
    case ONT_BFLOAT16: *type = MPI_UINT16_T; *add = mpi.add_bfloat; return true;
    default: break;
    }
    (void)snprintf(wait->message, sizeof wait->message, "ONNX dtype number %d is not supported", (int)dtype);
    return false;
}

/* MPI counts in int. */
static bool counts(size_t n, ont_wait *wait)
{
    if (n <= INT_MAX) return true;
    (void)snprintf(wait->message, sizeof wait->message, "%zu elements, MPI supports at most %d", n, INT_MAX);
    return false;
}

/* begin() of a collective of n numbers, with MPI's names of their type and sum. */
static ont_status begin_numbers(size_t n, ont_dtype dtype, MPI_Datatype *type, MPI_Op *add, ont_wait *wait)
{
    return type_of(dtype, type, add, wait) && counts(n, wait) ? begin(wait) : ONT_EINVAL;
}

static ont_status all_reduce(void *data, size_t n, ont_dtype dtype, ont_wait *wait)
{
    MPI_Datatype type;
    MPI_Op add;
    MPI_Request request;
    ont_status status = begin_numbers(n, dtype, &type, &add, wait);
    if (status != ONT_OK) return status;
    int code = MPI_Iallreduce(MPI_IN_PLACE, data, (int)n, type, add, mpi.work, &request);
    return end(finish("MPI_Iallreduce", code, &request, wait));
}

static ont_status reduce_scatter(void *own, const void *data, size_t n, ont_dtype dtype, ont_wait *wait)
{
    MPI_Datatype type;
    MPI_Op add;
    MPI_Request request;
    ont_status status = begin_numbers(n, dtype, &type, &add, wait);
    if (status != ONT_OK) return status;
    int code = MPI_Ireduce_scatter_block(data, own, (int)n, type, add, mpi.work, &request);
    return end(finish("MPI_Ireduce_scatter_block", code, &request, wait));
}

static ont_status all_gather(void *data, const void *own, size_t n, ont_dtype dtype, ont_wait *wait)
{
    MPI_Datatype type;
    MPI_Op add;
    MPI_Request request;
    ont_status status = begin_numbers(n, dtype, &type, &add, wait);
    if (status != ONT_OK) return status;
    int code = MPI_Iallgather(own, (int)n, type, data, (int)n, type, mpi.work, &request);
    return end(finish("MPI_Iallgather", code, &request, wait));
}

static ont_status broadcast(void *data, size_t n, ont_dtype dtype, int root, ont_wait *wait)
{
    MPI_Datatype type;
    MPI_Op add;
    MPI_Request request;
    if (!type_of(dtype, &type, &add, wait) || !counts(n, wait)) return ONT_EINVAL;
    if (root < 0 || root >= mpi.size) {
        (void)snprintf(wait->message, sizeof wait->message, "root is rank %d, expected 0 to %d", root, mpi.size - 1);
        return ONT_EINVAL;
    }
    ont_status status = begin(wait);
    if (status != ONT_OK) return status;
    int code = MPI_Ibcast(data, (int)n, type, root, mpi.work, &request);
    return end(finish("MPI_Ibcast", code, &request, wait));
}

static ont_status barrier(ont_wait *wait)
{
    MPI_Request request;
    ont_status status = begin(wait);
    if (status != ONT_OK) return status;
    int code = MPI_Ibarrier(mpi.work, &request);
    return end(finish("MPI_Ibarrier", code, &request, wait));
}

/* ---- first and last ---- */

static bool all_have_left(void)
{
    for (int rank = 0; rank < mpi.size; rank++)
        if (rank != mpi.rank && !mpi.left[rank]) return false;
    return true;
}

static ont_status leave(ont_wait *wait)
{
    int finalized = 0;
    (void)MPI_Finalized(&finalized);
    if (finalized) return ONT_OK;
    pthread_mutex_lock(&lock);
    if (mpi.broken) (void)MPI_Abort(MPI_COMM_WORLD, 1); /* does not return */
    for (int rank = 0; rank < mpi.size; rank++)
        if (rank != mpi.rank) (void)MPI_Send(&mpi.count, 1, MPI_UINT64_T, rank, GOODBYE, mpi.parting);
    ont_status status = ONT_OK;
    while (status == ONT_OK && hear_goodbyes() && !all_have_left()) {
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        if (wait->interrupted && wait->interrupted(wait->context)) status = ONT_ESTATE;
    }
    if (status == ONT_OK && mpi.ours) (void)MPI_Finalize();
    pthread_mutex_unlock(&lock);
    if (status != ONT_OK) (void)snprintf(wait->message, sizeof wait->message, "interrupted");
    return status;
}

static int meet(ont_collectives *table)
{
    MPI_Comm machine;
    int there = 0, provided, code = MPI_Initialized(&there);
    if (code == MPI_SUCCESS && !there) {
        code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
        mpi.ours = code == MPI_SUCCESS;
    }
    if (code == MPI_SUCCESS) code = MPI_Comm_dup(MPI_COMM_WORLD, &mpi.work);
    if (code == MPI_SUCCESS) code = MPI_Comm_dup(MPI_COMM_WORLD, &mpi.parting);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(mpi.work, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(mpi.parting, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) code = MPI_Op_create(add_halves, 1, &mpi.add_half);
    if (code == MPI_SUCCESS) code = MPI_Op_create(add_bfloats, 1, &mpi.add_bfloat);
    if (code == MPI_SUCCESS) code = MPI_Comm_rank(mpi.work, &mpi.rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(mpi.work, &mpi.size);
    if (code == MPI_SUCCESS)
        code = MPI_Comm_split_type(mpi.work, MPI_COMM_TYPE_SHARED, mpi.rank, MPI_INFO_NULL, &machine);
    if (code == MPI_SUCCESS) code = MPI_Comm_rank(machine, &table->local_rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(machine, &table->local_size);
    if (code == MPI_SUCCESS) code = MPI_Comm_free(&machine);
    return code;
}

__attribute__((visibility("default"))) ont_status ont_mpi_open(ont_collectives *table, ont_wait *wait);

ont_status ont_mpi_open(ont_collectives *table, ont_wait *wait)
{
    static char about[MPI_MAX_LIBRARY_VERSION_STRING];
    int n = 0, code = meet(table);
    if (code != MPI_SUCCESS) return failed(wait, "MPI", code), ONT_EIO;
    mpi.left = calloc((size_t)mpi.size, sizeof *mpi.left);
    if (!mpi.left) {
        (void)snprintf(wait->message, sizeof wait->message, "out of memory");
        return ONT_ENOMEM;
    }
    (void)MPI_Get_library_version(about, &n);
    about[strcspn(about, ",\n")] = '\0'; /* "Open MPI v4.1.4" */
    table->version = ONT_COLLECTIVES_VERSION;
    (void)snprintf(table->about, sizeof table->about, "%s", about);
    table->rank = mpi.rank;
    table->size = mpi.size;
    table->all_reduce = all_reduce;
    table->reduce_scatter = reduce_scatter;
    table->all_gather = all_gather;
    table->broadcast = broadcast;
    table->barrier = barrier;
    table->leave = leave;
    return ONT_OK;
}
