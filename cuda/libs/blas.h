/*
 * GEMM on a device, as a table of functions: cuBLASLt (cublas.c), or loops on the host where kernels are emulated.
 */
#ifndef ONT_CUDA_BLAS_H
#define ONT_CUDA_BLAS_H

#include "core_shim.h"

typedef enum ont_epilogue {
    ONT_EPILOGUE_NONE,
    ONT_EPILOGUE_BIAS,       /* + bias (n) */
    ONT_EPILOGUE_GELU,       /* gelu(+ bias), tanh approximation */
    ONT_EPILOGUE_GELU_AUX,   /* the same, and aux (m, n) = the input of gelu */
    ONT_EPILOGUE_DGELU,      /* * gelu'(aux) */
} ont_epilogue;

/* C (m, n) = alpha op(A) op(B) + beta C, row-major, `batch` times; ld and strides in elements. */
typedef struct ont_blas_gemm {
    ont_dtype dtype, result; /* of A and B; of C and bias: the same, or float32 for 16-bit operands */
    bool trans_a, trans_b;
    int64_t m, n, k, lda, ldb, ldc;
    int64_t batch, stride_a, stride_b, stride_c;
    double alpha, beta;
    ont_epilogue epilogue;
} ont_blas_gemm;

/* bias and aux: as the epilogue says, or NULL. */
typedef struct ont_blas_operands {
    const void *a, *b;
    void *c, *bias, *aux, *work;
} ont_blas_operands;

typedef struct ont_blas {
    const char *name;
    /* NULL, or why the GEMM is not supported. */
    const char *(*accept)(const ont_blas_gemm *gemm);
    /* For the current device. */
    ont_status (*create)(const ont_blas_gemm *gemm, void **plan);
    size_t (*work_bytes)(const void *plan);
    ont_status (*run)(void *plan, const ont_blas_operands *operands, void *stream);
    void (*destroy)(void *plan);
} ont_blas;

/* The implementation of this plugin; NULL where the library was not found. */
const ont_blas *ont_blas_get(void);

#endif
