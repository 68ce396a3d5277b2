/*
 * Which way a product goes: measured on scratch memory per kind of product (sizes within a factor of 1.4), once a
 * process. See gemm.h.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "device/matmul.h"
#include "device/tiled.h"

/* ---- measurement ---- */

typedef struct contestant {
    ont_gemm_way way;
    const ont_gemm_provider *provider; /* of ONT_GEMM_PROVIDER */
    double took;                       /* best seconds; negative where it is not there */
} contestant;

enum { A, B, C, ROW, HANDLE_WORK, TILED_WORK, N_BUFFERS, LINE = 64 };

/* Operands of a product whose pages are touched, and the product as each way takes it. */
typedef struct scratch {
    void *data[N_BUFFERS];
    size_t bytes[N_BUFFERS];
    ont_dnnl_matmul *handle;
    ont_tiled tiled;
} scratch;

static void make_handle(scratch *s, const ont_gemm *g, ont_dtype out, bool row)
{
    ont_matmul m = {.dtype = g->dtype, .out = out, .trans_a = g->trans_a, .trans_b = g->trans_b, .bias = row,
                    .alpha = 1};
    m.a = ont_shape_of(2, (int64_t[]){g->trans_a ? g->k : g->m, g->lda});
    m.b = ont_shape_of(2, (int64_t[]){g->trans_b ? g->n : g->k, g->ldb});
    m.c = ont_shape_of(2, (int64_t[]){g->m, g->n});
    if (ont_dnnl_matmul_create(&m, &s->handle) == ONT_OK) s->bytes[HANDLE_WORK] = ont_dnnl_matmul_work_bytes(s->handle);
}

const ont_gemm_kernel *ont_gemm_kernel_of(ont_gemm_way way, ont_dtype dtype)
{
    if (way == ONT_GEMM_SPLIT && dtype == ONT_FLOAT32) return ont_simd_gemm_split();
    if (way != ONT_GEMM_TILED) return NULL;
    return dtype == ONT_FLOAT32 ? ont_simd_gemm() : dtype == ONT_BFLOAT16 ? ont_simd_gemm_pairs() : NULL;
}

static void make_tiled(scratch *s, const ont_gemm_kernel *kernel, const ont_gemm *g, ont_dtype out)
{
    ont_tiled_cut(&s->tiled, kernel, g, out, ont_parallel_threads());
    s->bytes[TILED_WORK] = ont_tiled_work_bytes(&s->tiled);
}

static bool scratch_init(scratch *s, const ont_gemm *g, ont_dtype out, bool row, const contestant *all, int n)
{
    size_t size = ont_dtype_size(g->dtype);
    memset(s, 0, sizeof *s);
    for (int i = 0; i < n; i++) {
        const ont_gemm_kernel *kernel = ont_gemm_kernel_of(all[i].way, g->dtype);
        if (all[i].way == ONT_GEMM_PRIMITIVE) make_handle(s, g, out, row);
        if (kernel) make_tiled(s, kernel, g, out);
    }
    s->bytes[A] = (size_t)((g->trans_a ? g->k : g->m) * g->lda) * size;
    s->bytes[B] = (size_t)((g->trans_b ? g->n : g->k) * g->ldb) * size;
    s->bytes[C] = (size_t)(g->m * g->ldc) * ont_dtype_size(out);
    s->bytes[ROW] = (size_t)g->n * size;
    bool enough = true;
    for (int i = 0; i < N_BUFFERS; i++) {
        s->data[i] = ont_buffer_alloc(s->bytes[i]);
        if (s->data[i]) memset(s->data[i], 0, s->bytes[i]);
        enough &= s->data[i] != NULL;
    }
    return enough;
}

static void scratch_deinit(scratch *s)
{
    for (int i = 0; i < N_BUFFERS; i++) ont_buffer_free(s->data[i], s->bytes[i]);
    ont_dnnl_matmul_destroy(s->handle);
}

static void touch(void *data, int64_t first, int64_t last)
{
    volatile char *lines = data;
    for (int64_t i = first; i < last; i++) lines[i * LINE] = lines[i * LINE];
}

/* As a step leaves operands and an old result: every thread has written its share, and has it in its cache. */
static void share_out(const scratch *s)
{
    for (int i = A; i <= C; i++) ont_parallel((int64_t)s->bytes[i] / LINE, 1024, touch, s->data[i]);
}

/* Seconds of one run; negative where there is no such way. */
static double timed(const contestant *p, const ont_gemm *g, bool row, const scratch *s)
{
    void *const *d = s->data;
    share_out(s);
    double start = ont_seconds();
    switch (p->way) {
    case ONT_GEMM_PROVIDER:
        if (!p->provider->available(g->dtype)) return -1;
        p->provider->run(g, d[A], d[B], d[C]);
        if (row) ont_gemm_add_row(g, 1, d[ROW], d[C]);
        break;
    case ONT_GEMM_PRIMITIVE:
        if (!s->handle) return -1;
        if (ont_dnnl_matmul_run(s->handle, d[A], d[B], row ? d[ROW] : NULL, d[C], d[HANDLE_WORK]) != ONT_OK) return -1;
        break;
    case ONT_GEMM_TILED:
    case ONT_GEMM_SPLIT:
        if (!s->tiled.kernel) return -1;
        ont_tiled_run(&s->tiled, d[A], d[B], row ? d[ROW] : NULL, d[C], d[TILED_WORK]);
    }
    return ont_seconds() - start;
}

enum { ROUNDS = 4 }; /* the first warms up */
static const double LONG = 0.02;

/* Everybody takes turns: what slows a moment down meets all of them. False without memory. */
static bool measure(contestant *all, int n, const ont_gemm *g, ont_dtype out, bool row)
{
    scratch s;
    bool enough = scratch_init(&s, g, out, row, all, n);
    double start = ont_seconds();
    for (int i = 0; i < n; i++) all[i].took = -1;
    for (int round = 0; enough && round < ROUNDS; round++) {
        for (int i = 0; i < n; i++) {
            double took = timed(&all[i], g, row, &s);
            if (round && took >= 0 && (all[i].took < 0 || took < all[i].took)) all[i].took = took;
        }
        if (round && ont_seconds() - start > LONG * n) break;
    }
    scratch_deinit(&s);
    return enough;
}

double ont_gemm_measure(ont_gemm_way way, const ont_gemm_provider *provider, const ont_gemm *g, ont_dtype out)
{
    contestant one = {way, provider, -1};
    return measure(&one, 1, g, out, false) ? one.took : -1;
}

/* ---- what is known ---- */

typedef struct known {
    ont_gemm shape;
    ont_dtype out;
    bool row;
    bool measured;
    ont_gemm_way way;
    const ont_gemm_provider *best; /* of the providers */
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

static bool same_kind(const known *k, const ont_gemm *b, ont_dtype out, bool row)
{
    const ont_gemm *a = &k->shape;
    return a->dtype == b->dtype && k->out == out && k->row == row && a->trans_a == b->trans_a &&
           a->trans_b == b->trans_b && rounded(a->m) == rounded(b->m) && rounded(a->n) == rounded(b->n) &&
           rounded(a->k) == rounded(b->k);
}

static double operations(const ont_gemm *g)
{
    return 2.0 * (double)g->m * (double)g->n * (double)g->k;
}

/*
 * The same kind of product, its longest dim halved until it takes about a millisecond: building must stay short. Of one
 * with a side that is much longer than the others more is left, or it would no longer be of that kind.
 */
static ont_gemm sample_of(const ont_gemm *g)
{
    double limit = operations(g) >= 4e9 ? 2e9 : 2e8;
    ont_gemm s = *g;
    while (operations(&s) > limit) {
        int64_t *longest = s.m >= s.n ? &s.m : &s.n;
        if (s.k > *longest) longest = &s.k;
        *longest /= 2;
    }
    s.lda = s.trans_a ? s.m : s.k;
    s.ldb = s.trans_b ? s.k : s.n;
    s.ldc = s.n;
    return s;
}

static const char *name_of(const contestant *p)
{
    return p->provider ? p->provider->name : p->way == ONT_GEMM_PRIMITIVE ? "primitive" : "tiled";
}

/* The plain loop is not measured. False without memory. */
static bool fastest(const ont_gemm *g, ont_dtype out, bool row, known *found)
{
    size_t count;
    const ont_gemm_provider *providers = ont_gemm_providers(&count);
    ont_gemm sample = sample_of(g);
    contestant all[8] = {{ONT_GEMM_PRIMITIVE, NULL, -1}, {ONT_GEMM_TILED, NULL, -1}};
    int n = 2;
    double least = 0, least_provider = 0;
    for (size_t i = 0; i + 1 < count && g->dtype == out && !ont_dtype_is_half(out); i++)
        all[n++] = (contestant){ONT_GEMM_PROVIDER, &providers[i], -1};
    *found = (known){.shape = *g, .out = out, .row = row};
    if (!measure(all, n, &sample, out, row)) return false;
    for (int i = 0; i < n; i++) {
        double took = all[i].took;
        if (took < 0) continue;
        ont_log(ONT_LOG_DEBUG, "gemm %s %lldx%lldx%lld%s: %s %.0f us", ont_dtype_name(g->dtype), (long long)g->m,
                (long long)g->n, (long long)g->k, row ? " and a row" : "", name_of(&all[i]), took * 1e6);
        if (least == 0 || took < least) least = took, found->way = all[i].way;
        if (all[i].way == ONT_GEMM_PROVIDER && (least_provider == 0 || took < least_provider))
            least_provider = took, found->best = all[i].provider;
    }
    return found->measured = least > 0;
}

/* What is known of this kind of product, measured now where nothing is; not `measured` without memory for it. */
static known recall(const ont_gemm *g, ont_dtype out, bool row)
{
    known found = {.measured = false};
    pthread_mutex_lock(&cache_lock);
    for (size_t i = 0; i < n_known && !found.measured; i++)
        if (same_kind(&cache[i], g, out, row)) found = cache[i];
    if (!found.measured && fastest(g, out, row, &found) && n_known < KNOWN) cache[n_known++] = found;
    pthread_mutex_unlock(&cache_lock);
    return found;
}

/* ---- choice ---- */

/* The interfaces used take 32-bit sizes; larger products go to the plain loop. */
static bool fits(const ont_gemm *g)
{
    return g->m <= INT32_MAX && g->n <= INT32_MAX && g->k <= INT32_MAX && g->lda <= INT32_MAX && g->ldb <= INT32_MAX &&
           g->ldc <= INT32_MAX;
}

/* The way that ONNXTRAIN_GEMM asks for, as far as it is one of two that are no provider's. */
static bool asked_way(const char *asked, const ont_gemm *g, ont_gemm_way *way)
{
    if (!asked || g->dtype != ONT_FLOAT32) return false;
    if (!strcmp(asked, "primitive") && !ont_dnnl_matmul_refuses(g->dtype)) *way = ONT_GEMM_PRIMITIVE;
    else if (!strcmp(asked, "tiled") && ont_simd_gemm()) *way = ONT_GEMM_TILED;
    return *way != ONT_GEMM_PROVIDER;
}

const ont_gemm_provider *ont_gemm_choose(const ont_gemm *g, bool row, ont_gemm_way *way)
{
    const char *asked = getenv("ONNXTRAIN_GEMM");
    size_t count;
    const ont_gemm_provider *providers = ont_gemm_providers(&count), *first = ont_gemm_plain();
    ont_gemm_way ignored;
    int libraries = 0;
    if (!way) way = &ignored;
    *way = ONT_GEMM_PROVIDER;
    for (size_t i = count; i-- > 0;) {
        if (!fits(g) || !providers[i].available(g->dtype)) continue;
        if (asked && !strcmp(asked, providers[i].name)) return &providers[i];
        first = &providers[i];
        libraries += first != ont_gemm_plain();
    }
    if (asked_way(asked, g, way) || !fits(g) || operations(g) < 1e6 || libraries < 2) return first;
    known found = recall(g, g->dtype, row);
    if (!found.best) return first;
    *way = found.way;
    return found.best;
}

ont_gemm_way ont_gemm_choose_half(const ont_gemm *g, ont_dtype out, bool row)
{
    const char *asked = getenv("ONNXTRAIN_GEMM");
    if (!ont_gemm_kernel_of(ONT_GEMM_TILED, g->dtype)) return ONT_GEMM_PRIMITIVE;
    if (asked && *asked) return strcmp(asked, "tiled") ? ONT_GEMM_PRIMITIVE : ONT_GEMM_TILED;
    if (operations(g) < 1e7 || ont_simd_gemm_split()) return ONT_GEMM_PRIMITIVE; /* oneDNN has the tiles as well */
    known found = recall(g, out, row);
    return found.measured ? found.way : ONT_GEMM_PRIMITIVE;
}
