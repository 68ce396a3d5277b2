/*
 * General matrix multiplication (GEMM) on the CPU, and the choice among its implementations:
 *
 *   backend    a function that computes one GEMM: torch's BLAS, oneDNN's sgemm, or the reference loop (gemm.c)
 *   primitive  oneDNN's matmul primitive, which needs a handle per shape (matmul.h)
 *   native     the blocked GEMM of this project, which needs scratch (gemm_native.h)
 *
 * The kernels of products that use the primitive and the native GEMM compete with the one of the backend (run/tuner.h).
 * gemm_choice.c has the rules: which implementation a product may use, and which one where nothing competes.
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
    bool (*available)(ont_dtype dtype);
    void (*run)(const ont_gemm *g, const void *a, const void *b, void *c);
} ont_gemm_backend;

/* Not sorted by speed. The last one is the reference, which is always available. */
const ont_gemm_backend *ont_gemm_backends(size_t *count);
const ont_gemm_backend *ont_gemm_reference(void);

/* What ONNXTRAIN_GEMM asks for: the name of a backend, "primitive" or "native"; NULL for nothing, or another name. */
const char *ont_gemm_requested(void);
/* NULL, or why "primitive" or "native" is not to compute this GEMM: small ones are a backend's. */
const char *ont_gemm_refuses(const char *name, const ont_gemm *g);

struct ont_gemm_kernel;
/* The native kernel for operands of this dtype; NULL where there is none, or the processor does not support it. */
const struct ont_gemm_kernel *ont_gemm_native_kernel(ont_dtype dtype);

/*
 * With `on`, the choice no longer depends on measurements, for torch.use_deterministic_algorithms(): the same GEMM uses
 * the same implementation in every process on this kind of processor.
 */
void ont_gemm_set_deterministic(bool on);
bool ont_gemm_is_deterministic(void);
/* Whether kernels are chosen by rule: it is on, or ONNXTRAIN_GEMM names an implementation. */
bool ont_gemm_is_by_rule(void);

/* The backend of a GEMM, by rule; ONNXTRAIN_GEMM overrides it. */
const ont_gemm_backend *ont_gemm_choose(const ont_gemm *g);
/* Whether the native GEMM may compute a product of 16-bit operands: a rule where no tuner decides. */
bool ont_gemm_half_is_native(const ont_gemm *g);

/* C += bias (n), for `matrices` contiguous matrices C. */
void ont_gemm_add_bias(const ont_gemm *g, int64_t matrices, const void *bias, void *c);
/* sums (m) = A (k, m) summed over k; A is float32, and transposed in the GEMM. */
void ont_gemm_sum_a(const ont_gemm *g, const float *a, float *sums);

#endif
