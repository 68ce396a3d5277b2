/*
 * General matrix multiplication (GEMM) on the CPU, and the choice among its implementations:
 *
 *   backend    a function that computes one GEMM: torch's BLAS, torch's BLAS called once per thread, oneDNN's sgemm, or
 *              the reference loop (gemm.c)
 *   primitive  oneDNN's matmul primitive, which needs a handle per shape (matmul.h)
 *   native     the blocked GEMM of this project, which needs scratch (gemm_native.h)
 *
 * The fastest one is found by measurement (autotuning), once per process for each size class (sizes within a factor of
 * 1.4) and number of threads. Results can be exported as text and imported by later processes on the same machine.
 * gemm_choice.c has the policy.
 */
#ifndef ONT_DEVICE_GEMM_H
#define ONT_DEVICE_GEMM_H

#include "base/dtype.h"

/* C (M, N) = alpha * op(A) (M, K) * op(B) (K, N) + beta * C, row-major; ld: elements between rows as stored. */
typedef struct ont_gemm {
    ont_dtype dtype; /* of A and B. Backends: float32 or float64. Primitive and native: also bfloat16. */
    bool trans_a, trans_b;
    int64_t m, n, k;
    int64_t lda, ldb, ldc;
    double alpha, beta;
} ont_gemm;

typedef struct ont_gemm_backend {
    const char *name;
    bool (*available)(ont_dtype dtype); /* see ont_gemm_is_available() */
    void (*run)(const ont_gemm *g, const void *a, const void *b, void *c);
    bool per_thread; /* each thread calls the library for its own part of C */
} ont_gemm_backend;

/* Not sorted by speed. The last one is the reference, which is always available. */
const ont_gemm_backend *ont_gemm_backends(size_t *count);
const ont_gemm_backend *ont_gemm_reference(void);
/* Whether a GEMM on `threads` threads can use the backend: with one thread, `per_thread` ones add nothing. */
bool ont_gemm_is_available(const ont_gemm_backend *backend, ont_dtype dtype, int threads);

typedef enum ont_gemm_impl {
    ONT_GEMM_BACKEND,
    ONT_GEMM_PRIMITIVE,
    ONT_GEMM_NATIVE,
    ONT_GEMM_BF16X3, /* native, float32 emulated by three bfloat16 products: less exact, so never chosen by speed */
} ont_gemm_impl;

/* What is fused with a GEMM, as flags: */
enum {
    ONT_GEMM_BIAS = 1,  /* bias (n) is added to each row of C */
    ONT_GEMM_SUM_A = 2, /* sums (m) = op(A) summed over k; A is float32 and transposed */
};

/*
 * The value of ONNXTRAIN_GEMM: the name of a backend, "primitive" or "native"; NULL where it is not set. The older
 * names shares, tiled and plain are translated to per_thread, native and reference.
 */
const char *ont_gemm_requested(void);

struct ont_gemm_kernel;
/* The native kernel of this implementation; NULL where it has none, or the processor does not support it. */
const struct ont_gemm_kernel *ont_gemm_native_kernel(ont_gemm_impl impl, ont_dtype dtype);

/*
 * With `on`, the choice no longer depends on measurements, for torch.use_deterministic_algorithms(): the same GEMM uses
 * the same implementation in every process on this kind of processor.
 */
void ont_gemm_set_deterministic(bool on);
bool ont_gemm_is_deterministic(void);

/*
 * The fastest backend for GEMMs with these `epilogue` flags, each of which costs a backend another pass over memory.
 * Where `impl` is not NULL, it is set to the fastest implementation; the backend then serves where that one does not
 * apply. ONNXTRAIN_GEMM overrides the choice. Small GEMMs are not measured.
 */
const ont_gemm_backend *ont_gemm_choose(const ont_gemm *g, int epilogue, ont_gemm_impl *impl);
/* The same for bfloat16 operands, C being bfloat16 or float32: ONT_GEMM_PRIMITIVE or ONT_GEMM_NATIVE. */
ont_gemm_impl ont_gemm_choose_half(const ont_gemm *g, ont_dtype out, bool bias);

/*
 * Returns buffers that BLAS libraries cache to the system: not every measured library is used afterwards. Other threads
 * may be in a library meanwhile: tests/ops/test_choice.py found no wrong product of theirs. MKL's manual does not say.
 */
void ont_gemm_release_buffers(void);

/*
 * Online autotuning of GEMMs that are too large for a representative sample: the first runs of a training step are the
 * measurements. Each candidate near the best gets a few runs, then the fastest is used.
 */
typedef struct ont_gemm_tuner ont_gemm_tuner;

/* The tuner of this GEMM, valid until the process ends; NULL: use ont_gemm_choose(). */
ont_gemm_tuner *ont_gemm_tuner_find(const ont_gemm *g, int epilogue);
/* Which implementation the next run is to use. */
ont_gemm_impl ont_gemm_tuner_next(ont_gemm_tuner *tuner, const ont_gemm_backend **backend);
void ont_gemm_tuner_record(ont_gemm_tuner *tuner, ont_gemm_impl impl, const ont_gemm_backend *backend, double seconds);

/* All measured choices as text, one line each. NULL without memory; ont_free() frees it. */
char *ont_gemm_cache_export(void);
/*
 * Adds exported choices, which are then not measured again. Returns how many were added. Skips malformed lines, lines
 * with implementations that this process does not have, and known entries: no text leads to wrong results.
 */
int ont_gemm_cache_import(const char *text);

/* C += bias (n), for `matrices` contiguous matrices C. */
void ont_gemm_add_bias(const ont_gemm *g, int64_t matrices, const void *bias, void *c);
/* sums (m) = A (k, m) summed over k; A is float32, and transposed in the GEMM. */
void ont_gemm_sum_a(const ont_gemm *g, const float *a, float *sums);
/* Seconds of the fastest of a few runs on scratch memory; negative without memory or where it is not available. */
double ont_gemm_benchmark(ont_gemm_impl impl, const ont_gemm_backend *backend, const ont_gemm *g, ont_dtype out);

#endif
