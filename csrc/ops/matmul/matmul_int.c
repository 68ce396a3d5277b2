/*
 * Integer matrix products for MatMul and Gemm. Overflow wraps. Not blocked.
 */
#include "ops/matmul/matmul_int.h"

#include <string.h>

#define INT_GEMM(suffix, type) \
    static void gemm_##suffix(const ont_gemm *g, const type *a, const type *b, type *c) \
    { \
        for (int64_t i = 0; i < g->m; i++) { \
            type *row = c + i * g->ldc; \
            if (g->beta == 0) memset(row, 0, (size_t)g->n * sizeof *row); \
            for (int64_t k = 0; k < g->k; k++) { \
                type v = g->trans_a ? a[k * g->lda + i] : a[i * g->lda + k]; \
                if (g->alpha != 1) v = (type)((type)g->alpha * v); \
                for (int64_t j = 0; j < g->n; j++) row[j] += v * (g->trans_b ? b[j * g->ldb + k] : b[k * g->ldb + j]); \
            } \
        } \
    }
INT_GEMM(u32, uint32_t)
INT_GEMM(u64, uint64_t)

static void run(const ont_gemm *g, const void *a, const void *b, void *c)
{
    if (ont_dtype_size(g->dtype) == 4)
        gemm_u32(g, a, b, c);
    else
        gemm_u64(g, a, b, c);
}

static bool available(ont_dtype dtype)
{
    return dtype == ONT_INT32 || dtype == ONT_INT64 || dtype == ONT_UINT32 || dtype == ONT_UINT64;
}

const ont_gemm_backend ont_gemm_int = {.name = "int", .available = available, .run = run};

#define FILL(name, type) \
    static void name(const type *c, type *y, const int64_t *strides, int64_t m, int64_t n, type beta) \
    { \
        for (int64_t i = 0; i < m; i++) \
            for (int64_t j = 0; j < n; j++) y[i * n + j] = beta * c[i * strides[0] + j * strides[1]]; \
    }
FILL(fill_u32, uint32_t)
FILL(fill_u64, uint64_t)

void ont_gemm_int_fill(ont_dtype dtype, const void *c, void *y, const int64_t *strides, int64_t m, int64_t n,
                       int64_t beta)
{
    if (ont_dtype_size(dtype) == 4)
        fill_u32(c, y, strides, m, n, (uint32_t)beta);
    else
        fill_u64(c, y, strides, m, n, (uint64_t)beta);
}
