/*
 * Compilation of generated source at run time: by NVRTC (nvrtc.c), or by a C++ compiler where kernels are emulated.
 */
#ifndef ONT_CUDA_JIT_H
#define ONT_CUDA_JIT_H

#include "core_shim.h"
#include "kernels/elementwise.h"

enum { ONT_JIT_THREADS = 256, ONT_JIT_STREAMS = 8 };

/* Arguments of a generated kernel, by value. */
typedef struct ont_jit_args {
    const void *in[ONT_EW_OPERANDS];
    void *out[ONT_EW_RESULTS];
    const uint64_t *seed;
    int64_t n; /* number of elements, or of vectors of them */
    uint64_t stream[ONT_JIT_STREAMS]; /* of each Dropout, less the bits that are in the source */
} ont_jit_args;


typedef struct ont_jit {
    const char *preamble; /* text in front of every source, followed by math.cuh */
    int (*target)(void);  /* architecture of the current device: code for one does not run on another */
    /* For the current device. The function exists until the process ends. */
    ont_status (*compile)(const char *source, void **function);
    ont_status (*launch)(void *function, unsigned blocks, ont_jit_args *args, void *stream);
} ont_jit;

const ont_jit *ont_jit_get(void); /* NULL: there is no compiler */
extern const char ont_math_text[]; /* math.cuh */

#endif
