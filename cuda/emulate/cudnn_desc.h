/*
 * Handles and tensor descriptors of the emulated cuDNN, for its convolutions and recurrent layers.
 */
#ifndef ONT_EMULATE_CUDNN_DESC_H
#define ONT_EMULATE_CUDNN_DESC_H

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "emulate/contract.h"
#include "emulate/devices.h"

/* First members: what an address refers to. */
enum { HANDLE = 0x646e0001, TENSOR, FILTER, CONVOLUTION, RECURRENT, SEQUENCES, DROPOUT };
enum { MOST_RANK = 5 };

typedef struct handle {
    int kind, device;
    bool has_stream;
    cudaStream_t stream;
} handle;

typedef struct tensor { /* and a filter, which has no strides */
    int kind, type, rank, dims[MOST_RANK], strides[MOST_RANK];
} tensor;

#define CHECKED(type, kind_of_it, opaque, what) \
    type *what = opaque; \
    ONT_REQUIRE(what && what->kind == (kind_of_it), "cuDNN: not a descriptor of %s", #what)

static inline void *fresh(size_t bytes, int kind)
{
    int *made = calloc(1, bytes);
    ONT_REQUIRE(made, "out of memory");
    *made = kind;
    return made;
}

static inline int destroy(void *made, int kind)
{
    ONT_REQUIRE(*(int *)made == kind, "cuDNN: a destroy function of another kind of descriptor");
    free(made);
    return 0;
}

/* Of the current device. */
static inline handle *read_handle(void *opaque, const char *function)
{
    CHECKED(handle, HANDLE, opaque, h);
    ONT_REQUIRE(h->device == ont_emulate_device(), "%s: a handle of device %d, but device %d is current", function,
                h->device, ont_emulate_device());
    return h;
}

#endif
