/*
 * Collectives of several processes over memory of a device: NCCL, where the plugin finds it. py/comm.c calls them.
 *
 * Each process has one communicator, of one device. All processes enqueue the same calls in the same order; a call
 * returns at once, and its work is done in the order of the stream.
 */
#ifndef ONT_DEVICE_COMM_H
#define ONT_DEVICE_COMM_H

#include "base/dtype.h"

enum { ONT_COMM_ID = 128 }; /* bytes */

typedef enum ont_comm_kind {
    ONT_COMM_ALL_REDUCE,     /* to (n,) = the sum of all from (n,), which may be the same memory */
    ONT_COMM_REDUCE_SCATTER, /* to (n,) = this process's part of the sum of all from (size * n,) */
    ONT_COMM_ALL_GATHER,     /* to (size * n,) = all from (n,), in the order of ranks */
    ONT_COMM_BROADCAST       /* to (n,) = from (n,) of process root */
} ont_comm_kind;

typedef struct ont_comm_call {
    ont_comm_kind kind;
    const void *from;
    void *to;
    size_t n;
    ont_dtype dtype;
    int root;
} ont_comm_call;

typedef struct ont_comm_ops {
    const char *(*about)(void); /* the library's version, for people */
    /* What the processes of one communicator are told: made by one of them. */
    ont_status (*id)(char id[ONT_COMM_ID]);
    /* For the current device; waits for the other processes. */
    ont_status (*open)(const char id[ONT_COMM_ID], int rank, int size, void **comm);
    ont_status (*enqueue)(void *comm, const ont_comm_call *call, void *stream);
    ont_status (*check)(void *comm); /* an error of what was enqueued before */
    void (*close)(void *comm, bool failed); /* failed: what is under way will not end, and is given up */
} ont_comm_ops;

#endif
