/*
 * A device: memory, streams, and its kernels. NULL in place of a device is the CPU, which uses the process's memory and
 * the kernels listed by the operators.
 *
 * Plugins (device/plugin.c) provide devices. Work goes to the caller's current stream; only synchronize() and read()
 * wait. A device restores whatever device was current before.
 */
#ifndef ONT_DEVICE_DEVICE_H
#define ONT_DEVICE_DEVICE_H

#include "base/dtype.h"

struct ont_kernel_list; /* ops/op.h */
struct ont_cuda_optim;  /* device/multi.h */
struct ont_comm_ops;    /* device/comm.h */
typedef struct ont_device ont_device;

/* An invalid value that a kernel found, in memory that host and device can access. The first fault is kept. */
typedef struct ont_fault {
    int32_t code; /* ont_fault_code; 0: none */
    int32_t step; /* index in the program */
    int64_t value, position, limit;
} ont_fault;

typedef enum ont_fault_code {
    ONT_FAULT_NONE,
    ONT_FAULT_INDEX,
    ONT_FAULT_LABEL,
    ONT_FAULT_ZERO_DIVISION,
    ONT_FAULT_LENGTH, /* the length `value` of sample `position` is outside 0 to `limit` */
    ONT_FAULT_REGION, /* region `position` has an edge that is not below 1e9, or bins of more than `limit` cells */
    ONT_FAULT_COUNT   /* `value` elements are not zero, where `limit` were counted */
} ont_fault_code;

typedef struct ont_memory {
    void *data;
    void *owner;  /* for free() */
    void *tensor; /* torch's own tensor of this memory, which py/torch_abi.h gives to the caller; NULL: there is none */
    void *stream; /* of ont_device_alloc(): the stream that was current; freed memory goes to later work on it */
} ont_memory;

/* State of one phase, from enter() to leave(). */
typedef struct ont_scope {
    void *stream;
    int previous; /* the device that was current before */
} ont_scope;

typedef struct ont_device_strided { /* source of a copy to row-major; strides in elements */
    int32_t rank;
    int64_t dims[12], strides[12];
    size_t size;
} ont_device_strided;

typedef struct ont_device_ops {
    const char *name;
    int32_t dlpack; /* DLPack device type of its tensors */
    bool waits;     /* calls are synchronous: faults are seen at once */
    ont_status (*enter)(const ont_device *device, ont_scope *scope);
    void (*leave)(const ont_device *device, const ont_scope *scope);
    /* dtype: of the elements, if the memory is to be a tensor of torch's; else uint8 */
    ont_status (*alloc)(const ont_device *device, size_t bytes, ont_dtype dtype, ont_memory *memory);
    void (*free)(const ont_device *device, ont_memory *memory, size_t bytes);
    ont_status (*alloc_shared)(const ont_device *device, size_t bytes, void **data); /* zeroed; host-accessible */
    void (*free_shared)(const ont_device *device, void *data);
    ont_status (*write)(const ont_device *device, void *to, const void *host, size_t bytes, void *stream);
    /* One to four words, copied at the call: host memory is not read later. */
    ont_status (*store)(const ont_device *device, void *to, const uint64_t *words, int n, void *stream);
    ont_status (*copy)(const ont_device *device, void *to, const void *from, size_t bytes, void *stream);
    ont_status (*copy_strided)(const ont_device *device, const ont_device_strided *layout, const void *from, void *to,
                               void *stream);
    ont_status (*clear)(const ont_device *device, void *to, size_t bytes, void *stream);
    ont_status (*read)(const ont_device *device, void *host, const void *from, size_t bytes, void *stream); /* waits */
    ont_status (*synchronize)(const ont_device *device, void *stream);
    /* Later work on `stream` waits for the work that is on `other` now. */
    ont_status (*join)(const ont_device *device, void *stream, void *other);
    bool (*capturing)(const ont_device *device, void *stream); /* the stream is being captured */
    /* Until capture_end(), work on the private stream is recorded instead of executed. */
    ont_status (*capture_begin)(const ont_device *device, void *stream, void **private_stream);
    ont_status (*capture_end)(const ont_device *device, void *private_stream, bool keep, void **graph);
    ont_status (*graph_launch)(const ont_device *device, void *graph, void *stream);
    void (*graph_destroy)(const ont_device *device, void *graph);
    /* `what` of many tensors (device/multi.h: ont_optim_work), in a few launches. */
    ont_status (*optim)(const ont_device *device, int what, const struct ont_cuda_optim *job, float *found_inf,
                        void *stream);
    const struct ont_comm_ops *(*comm)(void); /* collectives of several processes; NULL: the library is missing */
    /* For tests, else NULL: memory that kernels may access from now on, or must not. */
    void (*guard)(const ont_device *device, void *data, size_t bytes, bool accessible);
} ont_device_ops;

struct ont_device {
    const ont_device_ops *ops;
    int32_t id;
    int32_t random_blocks; /* blocks of 256 threads that torch launches at most for random numbers; 0: unknown */
    void *state; /* private to the kind */
    const struct ont_kernel_list *lists; /* one for each supported operator */
    size_t n_lists;
};

#endif
