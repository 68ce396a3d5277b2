/*
 * NCCL behind device/comm.h, opened at run time: PyTorch's CUDA build has it.
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "libs/nccl.h"
#include "libs/nccl_api.h"
#include "libs/symbols.h"

static nccl_functions nccl;
static bool found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

_Static_assert(sizeof(nccl_id) == ONT_COMM_ID, "an id");

static void open_library(void)
{
    static const char *const names[] = {"libnccl.so.2"};
    static const ont_symbol symbols[] = {
#define X(member, name) {#name, offsetof(nccl_functions, member)},
        ONT_NCCL_FUNCTIONS(X)
#undef X
    };
    found = ont_library_open(names, sizeof names / sizeof *names, symbols, sizeof symbols / sizeof *symbols, &nccl);
}

static ont_status check(int error, void *comm, const char *what)
{
    if (error == NCCL_SUCCESS) return ONT_OK;
    const char *more = nccl.last_error(comm);
    return ont_fail(ONT_ESTATE, "NCCL, %s: %s%s%s", what, nccl.error_text(error), more && *more ? ": " : "",
                    more ? more : "");
}

static const char *about(void)
{
    static char text[32];
    int version = 0;
    nccl.version(&version);
    snprintf(text, sizeof text, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return text;
}

static ont_status make_id(char id[ONT_COMM_ID])
{
    nccl_id made;
    ONT_TRY(check(nccl.unique_id(&made), NULL, "an id"));
    memcpy(id, made.bytes, sizeof made.bytes);
    return ONT_OK;
}

static ont_status open_comm(const char id[ONT_COMM_ID], int rank, int size, void **comm)
{
    nccl_id given;
    memcpy(given.bytes, id, sizeof given.bytes);
    return check(nccl.init_rank(comm, size, given, rank), NULL, "a communicator");
}

/* NCCL's number of a dtype, and of the sum: that of booleans is whether any is true. */
static ont_status type_of(ont_dtype dtype, int *type, int *sum)
{
    *sum = dtype == ONT_BOOL ? NCCL_MAX : NCCL_SUM;
    switch (dtype) {
    case ONT_INT8: *type = NCCL_INT8; return ONT_OK;
    case ONT_BOOL:
    case ONT_UINT8: *type = NCCL_UINT8; return ONT_OK;
    case ONT_INT32: *type = NCCL_INT32; return ONT_OK;
    case ONT_UINT32: *type = NCCL_UINT32; return ONT_OK;
    case ONT_INT64: *type = NCCL_INT64; return ONT_OK;
    case ONT_UINT64: *type = NCCL_UINT64; return ONT_OK;
    case ONT_FLOAT16: *type = NCCL_FLOAT16; return ONT_OK;
    case ONT_FLOAT32: *type = NCCL_FLOAT32; return ONT_OK;
    case ONT_FLOAT64: *type = NCCL_FLOAT64; return ONT_OK;
    case ONT_BFLOAT16: *type = NCCL_BFLOAT16; return ONT_OK;
    default: return ont_fail(ONT_EUNSUPPORTED, "NCCL has no dtype %s", ont_dtype_name(dtype));
    }
}

static ont_status enqueue(void *comm, const ont_comm_call *c, void *stream)
{
    int type, sum;
    ONT_TRY(type_of(c->dtype, &type, &sum));
    switch (c->kind) {
    case ONT_COMM_ALL_REDUCE:
        return check(nccl.all_reduce(c->from, c->to, c->n, type, sum, comm, stream), comm, "ncclAllReduce");
    case ONT_COMM_REDUCE_SCATTER:
        return check(nccl.reduce_scatter(c->from, c->to, c->n, type, sum, comm, stream), comm, "ncclReduceScatter");
    case ONT_COMM_ALL_GATHER:
        return check(nccl.all_gather(c->from, c->to, c->n, type, comm, stream), comm, "ncclAllGather");
    default:
        return check(nccl.broadcast(c->from, c->to, c->n, type, c->root, comm, stream), comm, "ncclBroadcast");
    }
}

static ont_status check_comm(void *comm)
{
    int error = NCCL_SUCCESS;
    ONT_TRY(check(nccl.async_error(comm, &error), comm, "a communicator"));
    return check(error == NCCL_IN_PROGRESS ? NCCL_SUCCESS : error, comm, "a collective that was enqueued before");
}

static void close_comm(void *comm, bool failed)
{
    (failed ? nccl.abort : nccl.destroy)(comm);
}

static const ont_comm_ops ops = {.about = about, .id = make_id, .open = open_comm, .enqueue = enqueue,
                                 .check = check_comm, .close = close_comm};

const ont_comm_ops *ont_nccl_get(void)
{
    pthread_once(&once, open_library);
    return found ? &ops : NULL;
}
