/*
 * Collectives of several processes as one table, and the library that fills it: _mpi.so beside the extension, which is
 * opened when the first process asks for it, so that the core needs no MPI.
 *
 * All processes call the same collectives in the same order. A call returns when this process's part is done; memory is
 * the CPU's. While it waits it gives way to other threads of the machine, and it fails where a process has left that
 * has not taken part.
 */
#ifndef ONT_DIST_COLLECTIVES_H
#define ONT_DIST_COLLECTIVES_H

#include "base/dtype.h"

enum { ONT_COLLECTIVES_VERSION = 2, ONT_COLLECTIVES_MESSAGE = 512 };

/* Of one call. */
typedef struct ont_wait {
    bool (*interrupted)(void *context); /* asked about ten times a second; true: the call fails with ONT_ESTATE */
    void *context;
    bool pending; /* the call has failed, but the library may still read and write its memory, until the process ends */
    char message[ONT_COLLECTIVES_MESSAGE]; /* of a failure; the library has no part in base/status.c */
} ont_wait;

/* Sums are of the dtype's own precision; float16 and bfloat16 are added in float32 and rounded. n counts elements. */
typedef struct ont_collectives {
    int version;
    char about[ONT_COLLECTIVES_MESSAGE]; /* the library's own version */
    int rank, size;                      /* of this process among all */
    int local_rank, local_size;          /* among those on its machine */
    /* data (n,) = the sum over all processes */
    ont_status (*all_reduce)(void *data, size_t n, ont_dtype dtype, ont_wait *wait);
    /* own (n,) = this process's part of the sum of all data (size * n,) */
    ont_status (*reduce_scatter)(void *own, const void *data, size_t n, ont_dtype dtype, ont_wait *wait);
    /* data (size * n,) = all own (n,), in the order of ranks */
    ont_status (*all_gather)(void *data, const void *own, size_t n, ont_dtype dtype, ont_wait *wait);
    /* data (n,) = that of process root */
    ont_status (*broadcast)(void *data, size_t n, ont_dtype dtype, int root, ont_wait *wait);
    ont_status (*barrier)(ont_wait *wait);
    /* Says goodbye and waits until all have; ends all processes where a collective has failed. Nothing follows it. */
    ont_status (*leave)(ont_wait *wait);
} ont_collectives;

/* What the library exports: meets the others and fills the table. */
typedef ont_status (*ont_collectives_open_fn)(ont_collectives *table, ont_wait *wait);

/* Opens the library; later calls return the same table. EIO: it is not there, or MPI cannot be initialised. */
ont_status ont_collectives_get(const ont_collectives **table) ONT_MUST_USE;

#endif
