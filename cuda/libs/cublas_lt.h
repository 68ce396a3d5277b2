/*
 * What cublas.c and its emulation need of cuBLASLt, written from its documentation, so that the build does not need
 * NVIDIA's headers. tests/cuda/facts.py compares every number, layout and signature with those headers.
 */
#ifndef ONT_CUDA_CUBLAS_LT_H
#define ONT_CUDA_CUBLAS_LT_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

enum { COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_32F_FAST_TF32 = 77 };
enum { TYPE_32F = 0, TYPE_64F = 1, TYPE_16F = 2, TYPE_16BF = 14 };
enum { DESC_TRANSA = 3, DESC_TRANSB = 4, DESC_EPILOGUE = 7, DESC_BIAS_POINTER = 8, DESC_BIAS_TYPE = 26 };
enum { DESC_AUX_POINTER = 11, DESC_AUX_LD = 12 };
enum { LAYOUT_BATCH_COUNT = 5, LAYOUT_BATCH_OFFSET = 6 };
enum { PREFERENCE_WORKSPACE = 1, PREFERENCE_ALIGNMENT_A = 5, PREFERENCE_ALIGNMENT_D = 8 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4, GELU = 32, DGELU = 64, AUX = 128 };
enum { OP_N = 0, OP_T = 1 };
enum { CUBLAS_SUCCESS = 0, CUBLAS_NOT_SUPPORTED = 15 };

typedef struct algorithm {
    uint64_t data[8];
} algorithm;
typedef struct heuristic {
    algorithm algo;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} heuristic;

typedef struct cublas_functions {
    int (*create)(void **handle);
    int (*desc_create)(void **desc, int compute, int scale);
    int (*desc_destroy)(void *desc);
    int (*desc_set)(void *desc, int attribute, const void *value, size_t size);
    int (*layout_create)(void **layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
    int (*layout_destroy)(void *layout);
    int (*layout_set)(void *layout, int attribute, const void *value, size_t size);
    int (*preference_create)(void **preference);
    int (*preference_destroy)(void *preference);
    int (*preference_set)(void *preference, int attribute, const void *value, size_t size);
    int (*find)(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference, int wanted,
                heuristic *found, int *n);
    int (*matmul)(void *handle, void *desc, const void *alpha, const void *a, void *la, const void *b, void *lb,
                  const void *beta, const void *c, void *lc, void *d, void *ld, const algorithm *algo, void *workspace,
                  size_t bytes, cudaStream_t stream);
} cublas_functions;

/* X(member of the table, name in the library) */
#define ONT_CUBLAS_FUNCTIONS(X) \
    X(create, cublasLtCreate) \
    X(desc_create, cublasLtMatmulDescCreate) \
    X(desc_destroy, cublasLtMatmulDescDestroy) \
    X(desc_set, cublasLtMatmulDescSetAttribute) \
    X(layout_create, cublasLtMatrixLayoutCreate) \
    X(layout_destroy, cublasLtMatrixLayoutDestroy) \
    X(layout_set, cublasLtMatrixLayoutSetAttribute) \
    X(preference_create, cublasLtMatmulPreferenceCreate) \
    X(preference_destroy, cublasLtMatmulPreferenceDestroy) \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute) \
    X(find, cublasLtMatmulAlgoGetHeuristic) \
    X(matmul, cublasLtMatmul)

#endif
