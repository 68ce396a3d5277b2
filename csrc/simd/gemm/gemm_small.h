/*
 * Small float32 GEMMs on the calling thread, compiled once per instruction set: for sizes at which the call of a
 * library costs as much as the arithmetic. ops/matmul/matmul_small.c calls them.
 */
#ifndef ONT_SIMD_GEMM_SMALL_H
#define ONT_SIMD_GEMM_SMALL_H

#include <stdbool.h>
#include <stdint.h>

enum { ONT_GEMM_SMALL_MIN_N = 16 }; /* lanes of the widest vector of any instruction set */

/* C (m, n) = op(A) B + bias; n >= ONT_GEMM_SMALL_MIN_N, k >= 0. ld: elements between rows as stored. */
typedef struct ont_gemm_small {
    int64_t m, n, k, lda, ldb, ldc;
    bool trans_a;
    const float *a;    /* (m, k), or (k, m) with trans_a */
    const float *b;    /* (k, n) */
    const float *bias; /* (n), or NULL */
    float *c;
} ont_gemm_small;

/* `count` products C (m, n) = alpha op(A) op(B), n <= ONT_GEMM_BATCH_MAX_N; the matrices C are contiguous. */
enum { ONT_GEMM_BATCH_MAX_N = 8 };
typedef struct ont_gemm_batch {
    int64_t m, n, k;
    int64_t a_row, a_column, b_row, b_column; /* elements between rows and between columns of op(A) and op(B) */
    int64_t count;
    int64_t next_a, next_b; /* elements between matrices; 0: all products use the same one */
    float alpha;
    const float *a, *b;
    float *c;
} ont_gemm_batch;

typedef void (*ont_gemm_small_fn)(const ont_gemm_small *p);
typedef void (*ont_gemm_batch_fn)(const ont_gemm_batch *p);

typedef struct ont_gemm_small_kernels {
    ont_gemm_small_fn single;
    ont_gemm_batch_fn batch;
} ont_gemm_small_kernels;

const ont_gemm_small_kernels *ont_simd_gemm_small(void);

#endif
