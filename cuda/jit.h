/*
 * Compiling generated source at run time: NVRTC (nvrtc.c), or a C++ compiler where kernels are emulated.
 */
#ifndef ONT_CUDA_JIT_H
#define ONT_CUDA_JIT_H

#include "core_shim.h"
#include "ew.h"

enum { ONT_JIT_THREADS = 256, ONT_JIT_STREAMS = 8 };

/* What a generated kernel gets, by value. */
typedef struct ont_jit_args {
    const void *in[ONT_EW_OPERANDS];
    void *out[ONT_EW_RESULTS];
    const uint64_t *seed;
    int64_t n; /* pieces: elements, or vectors of them */
    uint64_t stream[ONT_JIT_STREAMS]; /* of each Dropout, less what stands in the source */
} ont_jit_args;


typedef struct ont_jit {
    const char *preamble; /* in front of every source, math.cuh behind it */
    int (*target)(void);  /* architecture of the device that is current: code of one does not run on another */
    /* Of the device that is current; the function stays for the life of the process. */
    ont_status (*compile)(const char *source, void **function);
    ont_status (*launch)(void *function, unsigned blocks, ont_jit_args *args, void *stream);
} ont_jit;

const ont_jit *ont_jit_get(void); /* NULL: there is no compiler */
extern const char ont_math_text[]; /* math.cuh */

#endif
