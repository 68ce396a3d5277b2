/*
 * GEMM backends. See gemm.h; gemm_choice.c chooses among them.
 */
#include "device/gemm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "base/parallel.h"
#include "device/library.h"
#include "simd/simd.h"

/* ---- torch's BLAS: Fortran interface, column-major, 32-bit integers ---- */

typedef void (*sgemm_fn)(const char *, const char *, const int *, const int *, const int *, const float *,
                         const float *, const int *, const float *, const int *, const float *, float *, const int *);
typedef void (*dgemm_fn)(const char *, const char *, const int *, const int *, const int *, const double *,
                         const double *, const int *, const double *, const int *, const double *, double *,
                         const int *);
/* oneDNN's C API: row-major. */
typedef int (*dnnl_sgemm_fn)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *,
                             int64_t, float, float *, int64_t);

static sgemm_fn torch_sgemm;
static dgemm_fn torch_dgemm;
static dnnl_sgemm_fn dnnl_sgemm;
static pthread_once_t torch_once = PTHREAD_ONCE_INIT, dnnl_once = PTHREAD_ONCE_INIT;

static void find_torch(void)
{
    void *torch = ont_library_torch();
    if (torch) {
        *(void **)&torch_sgemm = dlsym(torch, "sgemm_");
        *(void **)&torch_dgemm = dlsym(torch, "dgemm_");
    }
}

static void find_dnnl(void)
{
    void *dnnl = ont_library_dnnl();
    if (dnnl) *(void **)&dnnl_sgemm = dlsym(dnnl, "dnnl_sgemm");
}

static bool torch_available(ont_dtype dtype)
{
    pthread_once(&torch_once, find_torch);
    return dtype == ONT_FLOAT32 ? torch_sgemm != NULL : torch_dgemm != NULL;
}

/* Row-major C = A B is column-major C' = B' A': operands swap, flags stay. */
static void torch_run(const ont_gemm *g, const void *a, const void *b, void *c)
{
    int m = (int)g->m, n = (int)g->n, k = (int)g->k, lda = (int)g->lda, ldb = (int)g->ldb, ldc = (int)g->ldc;
    char ta = g->trans_a ? 'T' : 'N', tb = g->trans_b ? 'T' : 'N';
    ont_omp_settings before = ont_omp_enter_library(0);
    if (g->dtype == ONT_FLOAT32) {
        float alpha = (float)g->alpha, beta = (float)g->beta;
        torch_sgemm(&tb, &ta, &n, &m, &k, &alpha, b, &ldb, a, &lda, &beta, c, &ldc);
    } else {
        torch_dgemm(&tb, &ta, &n, &m, &k, &g->alpha, b, &ldb, a, &lda, &g->beta, c, &ldc);
    }
    ont_omp_leave_library(before);
}

/* ---- oneDNN's sgemm ---- */

static bool dnnl_available(ont_dtype dtype)
{
    if (dtype != ONT_FLOAT32) return false;
    pthread_once(&dnnl_once, find_dnnl);
    return dnnl_sgemm != NULL;
}

static void dnnl_run(const ont_gemm *g, const void *a, const void *b, void *c)
{
    ont_omp_settings before = ont_omp_enter_library(0);
    dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->m, g->n, g->k, (float)g->alpha, a, g->lda, b, g->ldb,
               (float)g->beta, c, g->ldc);
    ont_omp_leave_library(before);
}

/* ---- reference loop: tests compare against it; it runs where no library is found ---- */

static bool reference_available(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64;
}

typedef struct reference_job {
    const ont_gemm *g;
    const void *a, *b;
    void *c;
} reference_job;

#define REFERENCE_ROWS(name, type) \
    static void name(void *context, int64_t first, int64_t last) \
    { \
        const reference_job *j = context; \
        const ont_gemm *g = j->g; \
        const type *a = j->a, *b = j->b; \
        type alpha = (type)g->alpha, beta = (type)g->beta; \
        for (int64_t r = first; r < last; r++) { \
            type *c = (type *)j->c + r * g->ldc; \
            for (int64_t i = 0; i < g->n; i++) c[i] = beta == 0 ? 0 : beta * c[i]; \
            for (int64_t k = 0; k < g->k; k++) { \
                type x = alpha * (g->trans_a ? a[k * g->lda + r] : a[r * g->lda + k]); \
                if (g->trans_b) \
                    for (int64_t i = 0; i < g->n; i++) c[i] += x * b[i * g->ldb + k]; \
                else \
                    for (int64_t i = 0; i < g->n; i++) c[i] += x * b[k * g->ldb + i]; \
            } \
        } \
    }
REFERENCE_ROWS(reference_rows_f32, float)
REFERENCE_ROWS(reference_rows_f64, double)

static void reference_run(const ont_gemm *g, const void *a, const void *b, void *c)
{
    reference_job j = {g, a, b, c};
    int64_t per_row = g->n * g->k + 1;
    ont_parallel(g->m, 65536 / per_row + 1, g->dtype == ONT_FLOAT32 ? reference_rows_f32 : reference_rows_f64, &j);
}

static const ont_gemm_backend backends[] = {
    {"torch", torch_available, torch_run},
    {"onednn", dnnl_available, dnnl_run},
    {"reference", reference_available, reference_run},
};
enum { N_BACKENDS = sizeof backends / sizeof *backends };

const ont_gemm_backend *ont_gemm_backends(size_t *count)
{
    *count = N_BACKENDS;
    return backends;
}

const ont_gemm_backend *ont_gemm_reference(void)
{
    return &backends[N_BACKENDS - 1];
}

/* ---- bias ---- */

typedef struct bias_job {
    const ont_gemm *g;
    const void *row;
    void *c;
} bias_job;

#define ADD_BIAS(name, type) \
    static void name(void *context, int64_t first, int64_t last) \
    { \
        const bias_job *j = context; \
        const type *row = j->row; \
        for (int64_t i = first; i < last; i++) { \
            type *c = (type *)j->c + i * j->g->ldc; \
            for (int64_t k = 0; k < j->g->n; k++) c[k] += row[k]; \
        } \
    }
ADD_BIAS(add_bias_f32, float)
ADD_BIAS(add_bias_f64, double)

void ont_gemm_add_bias(const ont_gemm *g, int64_t matrices, const void *row, void *c)
{
    bias_job j = {g, row, c};
    ont_parallel(matrices * g->m, 16384 / g->n + 1, g->dtype == ONT_FLOAT32 ? add_bias_f32 : add_bias_f64, &j);
}

/* ---- sums of A over k ---- */

typedef struct sum_a_job {
    const ont_gemm *g;
    const float *a;
    float *sums;
} sum_a_job;

static void sum_columns(void *context, int64_t first, int64_t last)
{
    const sum_a_job *j = context;
    memset(j->sums + first, 0, (size_t)(last - first) * sizeof *j->sums);
    for (int64_t k = 0; k < j->g->k; k++)
        ont_simd()->add_to(j->sums + first, j->a + k * j->g->lda + first, last - first);
}

void ont_gemm_sum_a(const ont_gemm *g, const float *a, float *sums)
{
    sum_a_job j = {g, a, sums};
    ont_parallel(g->m, 16384 / (g->k + 1) + 16, sum_columns, &j);
}
