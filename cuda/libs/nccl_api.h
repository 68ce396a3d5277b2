/*
 * What nccl.c and its emulation need of NCCL, written from its documentation, so that the build does not need NVIDIA's
 * headers. tests/cuda/facts.py compares every number and signature with those headers.
 */
#ifndef ONT_CUDA_NCCL_API_H
#define ONT_CUDA_NCCL_API_H

#include <cuda_runtime_api.h>
#include <stddef.h>

enum { NCCL_SUCCESS = 0, NCCL_SYSTEM_ERROR = 2, NCCL_IN_PROGRESS = 7 };
enum { NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16, NCCL_FLOAT32,
       NCCL_FLOAT64, NCCL_BFLOAT16 };
enum { NCCL_SUM = 0, NCCL_MAX = 2 };

typedef struct nccl_id {
    char bytes[128];
} nccl_id;

typedef struct nccl_functions {
    int (*version)(int *version); /* 22809 is 2.28.9 */
    int (*unique_id)(nccl_id *id);
    int (*init_rank)(void **comm, int size, nccl_id id, int rank);
    int (*destroy)(void *comm);
    int (*abort)(void *comm);
    int (*async_error)(void *comm, int *error);
    const char *(*error_text)(int error);
    const char *(*last_error)(void *comm); /* more about it; NULL stands for no communicator */
    int (*all_reduce)(const void *from, void *to, size_t n, int type, int op, void *comm, cudaStream_t stream);
    int (*reduce_scatter)(const void *from, void *to, size_t n, int type, int op, void *comm, cudaStream_t stream);
    int (*all_gather)(const void *from, void *to, size_t n, int type, void *comm, cudaStream_t stream);
    int (*broadcast)(const void *from, void *to, size_t n, int type, int root, void *comm, cudaStream_t stream);
} nccl_functions;

/* X(member of the table, name in the library) */
#define ONT_NCCL_FUNCTIONS(X) \
    X(version, ncclGetVersion) \
    X(unique_id, ncclGetUniqueId) \
    X(init_rank, ncclCommInitRank) \
    X(destroy, ncclCommDestroy) \
    X(abort, ncclCommAbort) \
    X(async_error, ncclCommGetAsyncError) \
    X(error_text, ncclGetErrorString) \
    X(last_error, ncclGetLastError) \
    X(all_reduce, ncclAllReduce) \
    X(reduce_scatter, ncclReduceScatter) \
    X(all_gather, ncclAllGather) \
    X(broadcast, ncclBroadcast)

#endif
