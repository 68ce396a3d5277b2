/*
 * GEMM providers and the choice among them. See gemm.h.
 */
#include "device/gemm.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/parallel.h"
#include "device/library.h"
#include "device/matmul.h"

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
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find_providers(void)
{
    void *torch = ont_library_torch(), *dnnl = ont_library_dnnl();
    if (torch) {
        *(void **)&torch_sgemm = dlsym(torch, "sgemm_");
        *(void **)&torch_dgemm = dlsym(torch, "dgemm_");
    }
    if (dnnl) *(void **)&dnnl_sgemm = dlsym(dnnl, "dnnl_sgemm");
}

static bool torch_available(ont_dtype dtype)
{
    pthread_once(&once, find_providers);
    return dtype == ONT_FLOAT32 ? torch_sgemm != NULL : torch_dgemm != NULL;
}

/* Row-major C = A B is column-major C' = B' A': operands swap, flags stay. */
static void torch_run(const ont_gemm *g, const void *a, const void *b, void *c)
{
    int m = (int)g->m, n = (int)g->n, k = (int)g->k, lda = (int)g->lda, ldb = (int)g->ldb, ldc = (int)g->ldc;
    char ta = g->trans_a ? 'T' : 'N', tb = g->trans_b ? 'T' : 'N';
    if (g->dtype == ONT_FLOAT32) {
        float alpha = (float)g->alpha, beta = (float)g->beta;
        torch_sgemm(&tb, &ta, &n, &m, &k, &alpha, b, &ldb, a, &lda, &beta, c, &ldc);
    } else {
        torch_dgemm(&tb, &ta, &n, &m, &k, &g->alpha, b, &ldb, a, &lda, &g->beta, c, &ldc);
    }
}

static bool dnnl_available(ont_dtype dtype)
{
    pthread_once(&once, find_providers);
    return dtype == ONT_FLOAT32 && dnnl_sgemm;
}

static void dnnl_run(const ont_gemm *g, const void *a, const void *b, void *c)
{
    dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->m, g->n, g->k, (float)g->alpha, a, g->lda, b, g->ldb,
               (float)g->beta, c, g->ldc);
}

/* ---- the plain loop: the oracle, and what runs where no library is ---- */

static bool plain_available(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64;
}

typedef struct plain_job {
    const ont_gemm *g;
    const void *a, *b;
    void *c;
} plain_job;

#define PLAIN_ROWS(name, type) \
    static void name(void *context, int64_t first, int64_t last) \
    { \
        const plain_job *j = context; \
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
PLAIN_ROWS(plain_rows_f32, float)
PLAIN_ROWS(plain_rows_f64, double)

static void plain_run(const ont_gemm *g, const void *a, const void *b, void *c)
{
    plain_job j = {g, a, b, c};
    int64_t per_row = g->n * g->k + 1;
    ont_parallel(g->m, 65536 / per_row + 1, g->dtype == ONT_FLOAT32 ? plain_rows_f32 : plain_rows_f64, &j);
}

static const ont_gemm_provider providers[] = {
    {"torch", torch_available, torch_run},
    {"onednn", dnnl_available, dnnl_run},
    {"plain", plain_available, plain_run},
};
enum { N_PROVIDERS = sizeof providers / sizeof *providers };

const ont_gemm_provider *ont_gemm_providers(size_t *count)
{
    *count = N_PROVIDERS;
    return providers;
}

const ont_gemm_provider *ont_gemm_plain(void)
{
    return &providers[N_PROVIDERS - 1];
}

/* ---- choice ---- */

/* The interfaces used take 32-bit sizes; larger products go to the plain loop. */
static bool fits(const ont_gemm *g)
{
    return g->m <= INT32_MAX && g->n <= INT32_MAX && g->k <= INT32_MAX && g->lda <= INT32_MAX && g->ldb <= INT32_MAX &&
           g->ldc <= INT32_MAX;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Operands of a product for a measurement, whose pages are touched, and the product as a handle of matmul.h. */
typedef struct scratch {
    void *data[4]; /* A, B, C, and the handle's */
    size_t bytes[4];
    ont_dnnl_matmul *handle;
} scratch;

static void make_handle(scratch *s, const ont_gemm *g)
{
    ont_matmul m = {.dtype = g->dtype, .out = g->dtype, .trans_a = g->trans_a, .trans_b = g->trans_b, .alpha = 1};
    m.a = ont_shape_of(2, (int64_t[]){g->trans_a ? g->k : g->m, g->lda});
    m.b = ont_shape_of(2, (int64_t[]){g->trans_b ? g->n : g->k, g->ldb});
    m.c = ont_shape_of(2, (int64_t[]){g->m, g->n});
    if (ont_dnnl_matmul_create(&m, &s->handle) == ONT_OK) s->bytes[3] = ont_dnnl_matmul_work_bytes(s->handle);
}

static bool scratch_init(scratch *s, const ont_gemm *g, bool with_handle)
{
    size_t size = ont_dtype_size(g->dtype);
    memset(s, 0, sizeof *s);
    if (with_handle && g->dtype == ONT_FLOAT32) make_handle(s, g);
    s->bytes[0] = (size_t)((g->trans_a ? g->k : g->m) * g->lda) * size;
    s->bytes[1] = (size_t)((g->trans_b ? g->n : g->k) * g->ldb) * size;
    s->bytes[2] = (size_t)(g->m * g->ldc) * size;
    bool all = true;
    for (int i = 0; i < 4; i++) {
        s->data[i] = ont_buffer_alloc(s->bytes[i]);
        if (s->data[i]) memset(s->data[i], 0, s->bytes[i]);
        all &= s->data[i] != NULL;
    }
    return all;
}

static void scratch_deinit(scratch *s)
{
    for (int i = 0; i < 4; i++) ont_buffer_free(s->data[i], s->bytes[i]);
    ont_dnnl_matmul_destroy(s->handle);
}

/* Seconds of one run of a provider, or of the handle where it is NULL; negative where there is none. */
static double timed(const ont_gemm_provider *p, const ont_gemm *g, const scratch *s)
{
    if (p ? !p->available(g->dtype) : !s->handle) return -1;
    double start = seconds();
    if (p)
        p->run(g, s->data[0], s->data[1], s->data[2]);
    else if (ont_dnnl_matmul_run(s->handle, s->data[0], s->data[1], NULL, s->data[2], s->data[3]) != ONT_OK)
        return -1;
    return seconds() - start;
}

enum { ROUNDS = 4 }; /* the first warms up */
static const double LONG = 0.02;

/*
 * Best seconds of each of n providers, NULL being the handle, which take turns: what slows a moment down meets all of
 * them. False without memory; a provider that is not there is left out.
 */
static bool measure(const ont_gemm_provider *const *p, int n, const ont_gemm *g, double *best)
{
    scratch s;
    bool all = scratch_init(&s, g, !p[n - 1]);
    double start = seconds();
    for (int i = 0; i < n; i++) best[i] = -1;
    for (int round = 0; all && round < ROUNDS; round++) {
        for (int i = 0; i < n; i++) {
            double took = timed(p[i], g, &s);
            if (round && took >= 0 && (best[i] < 0 || took < best[i])) best[i] = took;
        }
        if (round && seconds() - start > LONG * n) break;
    }
    scratch_deinit(&s);
    return all;
}

double ont_gemm_measure(const ont_gemm_provider *provider, const ont_gemm *g)
{
    double best;
    return measure(&provider, 1, g, &best) ? best : -1;
}

typedef struct known {
    ont_gemm shape;
    const ont_gemm_provider *best;
    bool primitive;
} known;

enum { KNOWN = 512 };
static known cache[KNOWN];
static size_t n_known;
static pthread_mutex_t cache_lock = PTHREAD_MUTEX_INITIALIZER;

/* Half powers of two: a batch of another size is no new measurement, else building its program would be one. */
static int64_t rounded(int64_t dim)
{
    return dim > 0 ? (int64_t)round(2 * log2((double)dim)) : -1;
}

static bool same_kind(const ont_gemm *a, const ont_gemm *b)
{
    return a->dtype == b->dtype && a->trans_a == b->trans_a && a->trans_b == b->trans_b &&
           rounded(a->m) == rounded(b->m) && rounded(a->n) == rounded(b->n) && rounded(a->k) == rounded(b->k);
}

/* The same kind of product, its longest dim halved until it takes about a millisecond: building must stay short. */
static ont_gemm sample_of(const ont_gemm *g)
{
    ont_gemm s = *g;
    while (2.0 * (double)s.m * (double)s.n * (double)s.k > 2e8) {
        int64_t *longest = s.m >= s.n ? &s.m : &s.n;
        if (s.k > *longest) longest = &s.k;
        *longest /= 2;
    }
    s.lda = s.trans_a ? s.m : s.k;
    s.ldb = s.trans_b ? s.k : s.n;
    s.ldc = s.n;
    return s;
}

/* The plain loop is not measured. False without memory. */
static bool fastest(const ont_gemm *g, known *found)
{
    ont_gemm sample = sample_of(g);
    const ont_gemm_provider *contestants[N_PROVIDERS]; /* the handle stands in the plain loop's place */
    double took[N_PROVIDERS], least = 0;
    for (int i = 0; i < N_PROVIDERS; i++) contestants[i] = i + 1 < N_PROVIDERS ? &providers[i] : NULL;
    *found = (known){.shape = *g};
    if (!measure(contestants, N_PROVIDERS, &sample, took)) return false;
    for (int i = 0; i < N_PROVIDERS; i++) {
        if (took[i] < 0) continue;
        ont_log(ONT_LOG_DEBUG, "gemm %lldx%lldx%lld: %s %.0f us", (long long)g->m, (long long)g->n, (long long)g->k,
                contestants[i] ? contestants[i]->name : "primitive", took[i] * 1e6);
        if (!contestants[i])
            found->primitive = !found->best || took[i] < least;
        else if (!found->best || took[i] < least)
            found->best = contestants[i], least = took[i];
    }
    return found->best != NULL;
}

/* What is known of this kind of product, measured now where nothing is; `first` without memory to measure. */
static known recall(const ont_gemm *g, const ont_gemm_provider *first)
{
    known found = {.best = NULL};
    pthread_mutex_lock(&cache_lock);
    for (size_t i = 0; i < n_known && !found.best; i++)
        if (same_kind(&cache[i].shape, g)) found = cache[i];
    if (!found.best) {
        if (!fastest(g, &found)) found = (known){.best = first};
        else if (n_known < KNOWN) cache[n_known++] = found;
    }
    pthread_mutex_unlock(&cache_lock);
    return found;
}

const ont_gemm_provider *ont_gemm_choose(const ont_gemm *g, bool *primitive)
{
    const char *asked = getenv("ONNXTRAIN_GEMM");
    const ont_gemm_provider *first = ont_gemm_plain();
    bool ignored;
    if (!primitive) primitive = &ignored;
    *primitive = asked && !strcmp(asked, "primitive") && g->dtype == ONT_FLOAT32 && !ont_dnnl_matmul_refuses(g->dtype);
    for (int i = N_PROVIDERS - 1; i >= 0; i--) {
        if (!fits(g) || !providers[i].available(g->dtype)) continue;
        if (asked && !strcmp(asked, providers[i].name)) return &providers[i];
        first = &providers[i];
    }
    double flops = 2.0 * (double)g->m * (double)g->n * (double)g->k;
    if (*primitive || !fits(g) || flops < 1e6 || !dnnl_available(g->dtype) || !torch_available(g->dtype)) return first;
    known found = recall(g, first);
    *primitive = found.primitive;
    return found.best;
}
