/*
 * The choice of a GEMM implementation. See gemm.h. In order of the sections below:
 *
 * 1. Benchmark of the candidates on scratch memory.
 * 2. Cache of the results, by size class (sizes within a factor of 1.4), epilogue and number of threads.
 * 3. Policy: override by ONNXTRAIN_GEMM, deterministic mode, or the cache.
 * 4. Online tuning: where scratch memory holds only a fraction of a GEMM, its own first runs decide.
 * 5. Export and import of the cache as text.
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/autotune.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "device/gemm_native.h"
#include "device/matmul.h"

/* ---- benchmark ---- */

typedef struct candidate {
    ont_gemm_impl impl;
    const ont_gemm_backend *backend; /* with ONT_GEMM_BACKEND; NULL otherwise */
    double seconds;                  /* of the fastest run; negative: not measured, or not available */
} candidate;

enum { A, B, C, BIAS, SUMS, PRIMITIVE_WORK, NATIVE_WORK, N_BUFFERS, LINE = 64 };

/* Operands of a GEMM in memory whose pages are mapped, and the state of each implementation. */
typedef struct operands {
    void *data[N_BUFFERS];
    size_t bytes[N_BUFFERS];
    ont_dnnl_matmul *primitive;
    ont_gemm_native native;
} operands;

static void init_primitive(operands *s, const ont_gemm *g, ont_dtype out, int epilogue)
{
    ont_matmul m = {.dtype = g->dtype, .out = out, .trans_a = g->trans_a, .trans_b = g->trans_b,
                    .bias = epilogue & ONT_GEMM_BIAS, .alpha = 1};
    m.a = ont_shape_of(2, (int64_t[]){g->trans_a ? g->k : g->m, g->lda});
    m.b = ont_shape_of(2, (int64_t[]){g->trans_b ? g->n : g->k, g->ldb});
    m.c = ont_shape_of(2, (int64_t[]){g->m, g->n});
    if (ont_dnnl_matmul_create(&m, &s->primitive) == ONT_OK)
        s->bytes[PRIMITIVE_WORK] = ont_dnnl_matmul_work_bytes(s->primitive);
}

const ont_gemm_kernel *ont_gemm_native_kernel(ont_gemm_impl impl, ont_dtype dtype)
{
    if (impl == ONT_GEMM_BF16X3 && dtype == ONT_FLOAT32) return ont_simd_gemm_bf16x3();
    if (impl != ONT_GEMM_NATIVE) return NULL;
    return dtype == ONT_FLOAT32 ? ont_simd_gemm() : dtype == ONT_BFLOAT16 ? ont_simd_gemm_bf16() : NULL;
}

static void init_native(operands *s, const ont_gemm_kernel *kernel, const ont_gemm *g, ont_dtype out)
{
    ont_gemm_native_init(&s->native, kernel, g, out, ont_parallel_threads());
    s->bytes[NATIVE_WORK] = ont_gemm_native_work_bytes(&s->native);
}

static bool operands_init(operands *s, const ont_gemm *g, ont_dtype out, int epilogue, const candidate *all, int n)
{
    size_t size = ont_dtype_size(g->dtype);
    memset(s, 0, sizeof *s);
    for (int i = 0; i < n; i++) {
        const ont_gemm_kernel *kernel = ont_gemm_native_kernel(all[i].impl, g->dtype);
        if (all[i].impl == ONT_GEMM_PRIMITIVE) init_primitive(s, g, out, epilogue);
        if (kernel) init_native(s, kernel, g, out);
    }
    s->bytes[A] = (size_t)((g->trans_a ? g->k : g->m) * g->lda) * size;
    s->bytes[B] = (size_t)((g->trans_b ? g->n : g->k) * g->ldb) * size;
    s->bytes[C] = (size_t)(g->m * g->ldc) * ont_dtype_size(out);
    s->bytes[BIAS] = (size_t)g->n * size;
    s->bytes[SUMS] = (size_t)g->m * sizeof(float);
    bool allocated = true;
    for (int i = 0; i < N_BUFFERS; i++) {
        s->data[i] = ont_pages_alloc(s->bytes[i]);
        if (s->data[i]) memset(s->data[i], 0, s->bytes[i]);
        allocated &= s->data[i] != NULL;
    }
    return allocated;
}

static void operands_deinit(operands *s)
{
    for (int i = 0; i < N_BUFFERS; i++) ont_pages_free(s->data[i], s->bytes[i]);
    ont_dnnl_matmul_destroy(s->primitive);
}

static void touch(void *data, int64_t first, int64_t last)
{
    volatile char *lines = data;
    for (int64_t i = first; i < last; i++) lines[i * LINE] = lines[i * LINE];
}

/* Puts caches in the state of a training step: each thread has just written its part of the operands and of C. */
static void warm_caches(const operands *s)
{
    for (int i = A; i <= C; i++) ont_parallel((int64_t)s->bytes[i] / LINE, 1024, touch, s->data[i]);
}

typedef struct trial {
    const candidate *candidates;
    const ont_gemm *gemm;
    int epilogue;
    operands operands;
} trial;

/* Seconds of one run; negative where the implementation is not available. */
static double run_timed(void *context, int index)
{
    const trial *t = context;
    const candidate *p = &t->candidates[index];
    const ont_gemm *g = t->gemm;
    const operands *s = &t->operands;
    void *const *d = s->data, *bias = t->epilogue & ONT_GEMM_BIAS ? d[BIAS] : NULL;
    float *sums = t->epilogue & ONT_GEMM_SUM_A ? d[SUMS] : NULL;
    warm_caches(s);
    double start = ont_seconds();
    switch (p->impl) {
    case ONT_GEMM_BACKEND:
        if (!ont_gemm_is_available(p->backend, g->dtype, ont_parallel_threads())) return -1;
        p->backend->run(g, d[A], d[B], d[C]);
        if (bias) ont_gemm_add_bias(g, 1, bias, d[C]);
        if (sums) ont_gemm_sum_a(g, d[A], sums);
        break;
    case ONT_GEMM_PRIMITIVE:
        if (!s->primitive) return -1;
        if (ont_dnnl_matmul_run(s->primitive, d[A], d[B], bias, d[C], d[PRIMITIVE_WORK]) != ONT_OK) return -1;
        if (sums) ont_gemm_sum_a(g, d[A], sums);
        break;
    case ONT_GEMM_NATIVE:
    case ONT_GEMM_BF16X3:
        if (!s->native.kernel) return -1;
        ont_gemm_native_run(&s->native, d[A], d[B], bias, d[C], sums, d[NATIVE_WORK]);
    }
    return ont_seconds() - start;
}

enum { ROUNDS = 4, MAX_CANDIDATES = 8, MAX_RUNS = 3 };

/* Sets the candidates' seconds. False without memory. */
static bool measure(candidate *all, int n, const ont_gemm *g, ont_dtype out, int epilogue)
{
    double seconds[MAX_CANDIDATES];
    trial t = {.candidates = all, .gemm = g, .epilogue = epilogue};
    bool allocated = operands_init(&t.operands, g, out, epilogue, all, n);
    if (allocated) ont_tune_times(n, ROUNDS, run_timed, &t, seconds);
    for (int i = 0; i < n; i++) all[i].seconds = allocated ? seconds[i] : -1;
    operands_deinit(&t.operands);
    ont_gemm_release_buffers();
    return allocated;
}

double ont_gemm_benchmark(ont_gemm_impl impl, const ont_gemm_backend *backend, const ont_gemm *g, ont_dtype out)
{
    candidate only = {impl, backend, -1};
    return measure(&only, 1, g, out, 0) ? only.seconds : -1;
}

/* ---- cache ---- */

enum { CACHE_ENTRIES = 512 };
static const double
    ONLINE_FLOPS = 4e9,     /* larger GEMMs are tuned online */
    ONLINE_MARGIN = 1.1,    /* times the best: candidates of online tuning */
    SMALL_FLOPS = 1e6,      /* smaller GEMMs are not measured */
    SMALL_HALF_FLOPS = 1e7, /* the same with 16-bit operands */
    REPEAT_MARGIN = 1.05,   /* times the best: candidates that get a third run */
    LIBRARY_PENALTY = 1.03; /* see adjusted_seconds() */

/* Online tuning of one size class. */
struct ont_gemm_tuner {
    ont_gemm shape; /* the first GEMM of the class */
    int epilogue;
    candidate candidates[MAX_CANDIDATES];
    int runs[MAX_CANDIDATES], n, winner; /* winner: an index of candidates, or -1 */
};

typedef struct cache_key {
    int64_t dtype, out, epilogue, threads, trans_a, trans_b, m, n, k; /* the last three: size_class() */
} cache_key;

typedef struct cache_entry {
    cache_key key;
    ont_gemm shape;
    ont_dtype out;
    int epilogue, threads;
    bool measured;
    ont_gemm_impl impl;
    const ont_gemm_backend *best; /* the fastest backend; NULL: none was measured */
    ont_gemm_tuner tuner;         /* under tuner_lock from its first run on */
} cache_entry;

static cache_entry entries[CACHE_ENTRIES];
static ont_tune_cache cache = ONT_TUNE_CACHE(entries);
static pthread_mutex_t tuner_lock = PTHREAD_MUTEX_INITIALIZER;

/* Half powers of two, so that another batch size rarely needs a new measurement. */
static int64_t size_class(int64_t dim)
{
    return dim > 0 ? (int64_t)round(2 * log2((double)dim)) : -1;
}

static cache_key key_of(const ont_gemm *g, ont_dtype out, int epilogue, int threads)
{
    return (cache_key){g->dtype, out, epilogue, threads, g->trans_a, g->trans_b, size_class(g->m), size_class(g->n),
                       size_class(g->k)};
}

static double flops(const ont_gemm *g)
{
    return 2.0 * (double)g->m * (double)g->n * (double)g->k;
}

/*
 * A smaller GEMM of the same form, which takes some 10 ms, because program building must stay short: the longest dim is
 * halved repeatedly. Much smaller samples mislead: some libraries take twice as long for 256x3072x768 as an eighth of
 * it suggests.
 */
static ont_gemm sample_of(const ont_gemm *g)
{
    double limit = flops(g) >= ONLINE_FLOPS ? ONLINE_FLOPS / 2 : ONLINE_FLOPS;
    ont_gemm s = *g;
    while (flops(&s) > limit) {
        int64_t *longest = s.m >= s.n ? &s.m : &s.n;
        if (s.k > *longest) longest = &s.k;
        *longest /= 2;
    }
    s.lda = s.trans_a ? s.m : s.k;
    s.ldb = s.trans_b ? s.k : s.n;
    s.ldc = s.n;
    return s;
}

static const char *candidate_name(const candidate *p)
{
    return p->backend ? p->backend->name : p->impl == ONT_GEMM_PRIMITIVE ? "primitive" : "native";
}

static void log_time(const char *what, const ont_gemm *g, int epilogue, const candidate *p)
{
    static const char *const fused[] = {"", " with bias", " with sums of A", " with bias and sums of A"};
    ont_log(ONT_LOG_DEBUG, "%s %s %lldx%lldx%lld%s: %s %.0f us", what, ont_dtype_name(g->dtype), (long long)g->m,
            (long long)g->n, (long long)g->k, fused[epilogue], candidate_name(p), p->seconds * 1e6);
}

/*
 * Seconds for the comparison. A library that runs one call on several threads keeps large buffers for good, so it must
 * be faster by LIBRARY_PENALTY. The native GEMM and oneDNN's primitive use scratch of the program's slab.
 */
static double adjusted_seconds(const candidate *p)
{
    bool several = p->backend && !p->backend->per_thread && ont_parallel_threads() > 1;
    return several ? p->seconds * LIBRARY_PENALTY : p->seconds;
}

/* Measures all implementations but the reference. False without memory, or where none is available. */
static bool measure_candidates(const ont_gemm *g, ont_dtype out, int epilogue, cache_entry *found)
{
    size_t count;
    const ont_gemm_backend *backends = ont_gemm_backends(&count);
    ont_gemm sample = sample_of(g);
    candidate all[MAX_CANDIDATES] = {{ONT_GEMM_PRIMITIVE, NULL, -1}, {ONT_GEMM_NATIVE, NULL, -1}};
    int n = 2;
    double least = 0, best_backend_seconds = 0;
    for (size_t i = 0; i + 1 < count && g->dtype == out && !ont_dtype_is_half(out); i++)
        all[n++] = (candidate){ONT_GEMM_BACKEND, &backends[i], -1};
    *found = (cache_entry){.shape = *g, .out = out, .epilogue = epilogue, .threads = ont_parallel_threads()};
    found->key = key_of(g, out, epilogue, found->threads);
    if (!measure(all, n, &sample, out, epilogue)) return false;
    for (int i = 0; i < n; i++) {
        double seconds = adjusted_seconds(&all[i]);
        if (seconds < 0) continue;
        log_time("gemm", g, epilogue, &all[i]);
        if (least == 0 || seconds < least) least = seconds, found->impl = all[i].impl;
        if (all[i].impl == ONT_GEMM_BACKEND && (best_backend_seconds == 0 || seconds < best_backend_seconds))
            best_backend_seconds = seconds, found->best = all[i].backend;
    }
    ont_gemm_tuner *tuner = &found->tuner;
    *tuner = (ont_gemm_tuner){.shape = *g, .epilogue = epilogue, .winner = -1};
    for (int i = 0; i < n; i++) { /* only the best backend, since each library keeps its own buffers */
        if (all[i].seconds < 0 || adjusted_seconds(&all[i]) > ONLINE_MARGIN * least) continue;
        if (!all[i].backend || all[i].backend == found->best)
            tuner->candidates[tuner->n++] = (candidate){all[i].impl, all[i].backend, -1};
    }
    return found->measured = least > 0;
}

/*
 * The cache entry, after a measurement where there is none; not `measured` without memory for that. `own` holds it
 * where the cache is full.
 */
static const cache_entry *find_or_measure(const ont_gemm *g, ont_dtype out, int epilogue, cache_entry *own)
{
    cache_key key = key_of(g, out, epilogue, ont_parallel_threads());
    const cache_entry *found = ont_tune_find(&cache, &key);
    if (found) return found;
    if (measure_candidates(g, out, epilogue, own)) found = ont_tune_keep(&cache, own);
    return found ? found : own;
}

/* ---- policy ---- */

/* Names of older versions, in ONNXTRAIN_GEMM and in exported caches, are still accepted. */
static const char *current_name(const char *name)
{
    static const char *const names[][2] = {{"shares", "per_thread"}, {"tiled", "native"}, {"plain", "reference"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i][0])) return names[i][1];
    return name;
}

const char *ont_gemm_requested(void)
{
    const char *name = getenv("ONNXTRAIN_GEMM");
    return name ? current_name(name) : NULL;
}

static bool deterministic;

void ont_gemm_set_deterministic(bool on)
{
    __atomic_store_n(&deterministic, on, __ATOMIC_RELAXED);
}

bool ont_gemm_is_deterministic(void)
{
    return __atomic_load_n(&deterministic, __ATOMIC_RELAXED);
}

/* BLAS takes 32-bit sizes; larger GEMMs use the reference loop. */
static bool fits_int32(const ont_gemm *g)
{
    return g->m <= INT32_MAX && g->n <= INT32_MAX && g->k <= INT32_MAX && g->lda <= INT32_MAX && g->ldb <= INT32_MAX &&
           g->ldc <= INT32_MAX;
}

/* Whether ONNXTRAIN_GEMM names an implementation that is not a backend and is available. */
static bool requested_impl(const char *requested, const ont_gemm *g, ont_gemm_impl *impl)
{
    if (!requested || g->dtype != ONT_FLOAT32) return false;
    if (!strcmp(requested, "primitive") && !ont_dnnl_matmul_refuses(g->dtype)) *impl = ONT_GEMM_PRIMITIVE;
    else if (!strcmp(requested, "native") && ont_simd_gemm()) *impl = ONT_GEMM_NATIVE;
    return *impl != ONT_GEMM_BACKEND;
}

const ont_gemm_backend *ont_gemm_choose(const ont_gemm *g, int epilogue, ont_gemm_impl *impl)
{
    const char *requested = ont_gemm_requested();
    size_t count;
    const ont_gemm_backend *backends = ont_gemm_backends(&count), *first = NULL;
    ont_gemm_impl ignored;
    int libraries = 0;
    bool small = !fits_int32(g) || flops(g) < SMALL_FLOPS;
    if (!impl) impl = &ignored;
    *impl = ONT_GEMM_BACKEND;
    for (size_t i = 0; i < count && (requested || !small || !first); i++) { /* asking for a library opens it */
        if (!fits_int32(g) || !ont_gemm_is_available(&backends[i], g->dtype, ont_parallel_threads())) continue;
        if (requested && !strcmp(requested, backends[i].name)) return &backends[i];
        if (!first) first = &backends[i];
        libraries += &backends[i] != ont_gemm_reference();
    }
    if (!first) first = ont_gemm_reference();
    if (requested_impl(requested, g, impl) || small) return first;
    bool native = ont_gemm_native_kernel(ONT_GEMM_NATIVE, g->dtype) != NULL;
    /* By rule native: its sums do not depend on addresses or the number of threads. */
    if (native && (ont_gemm_is_deterministic() || !libraries)) *impl = ONT_GEMM_NATIVE;
    if (ont_gemm_is_deterministic() || libraries + native < 2) return first;
    cache_entry own;
    const cache_entry *found = find_or_measure(g, g->dtype, epilogue, &own);
    if (!found->best) return first;
    *impl = found->impl;
    return found->best;
}

ont_gemm_impl ont_gemm_choose_half(const ont_gemm *g, ont_dtype out, bool bias)
{
    const char *requested = ont_gemm_requested();
    if (!ont_gemm_native_kernel(ONT_GEMM_NATIVE, g->dtype)) return ONT_GEMM_PRIMITIVE;
    if (requested && *requested) return strcmp(requested, "native") ? ONT_GEMM_PRIMITIVE : ONT_GEMM_NATIVE;
    if (flops(g) < SMALL_HALF_FLOPS || ont_simd_gemm_bf16x3()) return ONT_GEMM_PRIMITIVE; /* oneDNN uses AMX, too */
    if (ont_gemm_is_deterministic()) return ONT_GEMM_NATIVE;
    cache_entry own;
    const cache_entry *found = find_or_measure(g, out, bias ? ONT_GEMM_BIAS : 0, &own);
    return found->measured ? found->impl : ONT_GEMM_PRIMITIVE;
}

/* ---- online tuning ---- */

ont_gemm_tuner *ont_gemm_tuner_find(const ont_gemm *g, int epilogue)
{
    const char *requested = ont_gemm_requested();
    if ((requested && *requested) || flops(g) < ONLINE_FLOPS || g->dtype != ONT_FLOAT32 || ont_gemm_is_deterministic())
        return NULL;
    cache_key key = key_of(g, g->dtype, epilogue, ont_parallel_threads());
    cache_entry *k = ont_tune_find(&cache, &key);
    return k && k->tuner.n > 1 ? &k->tuner : NULL;
}

/* Whether a candidate needs another run: two each, the first being a warm-up, and a third for those near the best. */
static bool needs_run(const ont_gemm_tuner *tuner, int index)
{
    double least = tuner->candidates[index].seconds;
    for (int i = 0; i < tuner->n; i++)
        if (tuner->candidates[i].seconds >= 0 && tuner->candidates[i].seconds < least)
            least = tuner->candidates[i].seconds;
    return tuner->runs[index] < 2 ||
           (tuner->runs[index] < MAX_RUNS && tuner->candidates[index].seconds <= REPEAT_MARGIN * least);
}

/* The candidate of the next run; -1: all have had their runs. */
static int next_candidate(const ont_gemm_tuner *tuner)
{
    int next = -1;
    for (int i = 0; i < tuner->n; i++)
        if (needs_run(tuner, i) && (next < 0 || tuner->runs[i] < tuner->runs[next])) next = i;
    return next;
}

static void decide(ont_gemm_tuner *tuner)
{
    tuner->winner = 0;
    for (int i = 0; i < tuner->n; i++)
        if (tuner->candidates[i].seconds < tuner->candidates[tuner->winner].seconds) tuner->winner = i;
}

ont_gemm_impl ont_gemm_tuner_next(ont_gemm_tuner *tuner, const ont_gemm_backend **backend)
{
    pthread_mutex_lock(&tuner_lock);
    candidate next = tuner->candidates[tuner->winner >= 0 ? tuner->winner : next_candidate(tuner)];
    pthread_mutex_unlock(&tuner_lock);
    *backend = next.backend;
    return next.impl;
}

void ont_gemm_tuner_record(ont_gemm_tuner *tuner, ont_gemm_impl impl, const ont_gemm_backend *backend, double seconds)
{
    pthread_mutex_lock(&tuner_lock);
    for (int i = 0; i < tuner->n && tuner->winner < 0; i++) {
        candidate *p = &tuner->candidates[i];
        if (p->impl != impl || p->backend != backend) continue;
        tuner->runs[i]++;
        if (p->seconds < 0 || seconds < p->seconds) p->seconds = seconds;
    }
    bool finished = tuner->winner < 0 && next_candidate(tuner) < 0;
    if (finished) decide(tuner);
    const ont_gemm_tuner snapshot = *tuner;
    pthread_mutex_unlock(&tuner_lock);
    for (int i = 0; finished && i < snapshot.n; i++) /* outside the lock: the log may wait for the GIL */
        log_time("gemm in place", &snapshot.shape, snapshot.epilogue, &snapshot.candidates[i]);
}

/* ---- export and import ---- */

enum { LINE_BYTES = 320, NAME_BYTES = 16 };
#define NAME_FORMAT "%15s"

static void append_name(char *line, const char *word)
{
    size_t length = strlen(line);
    snprintf(line + length, LINE_BYTES - length, " %s", word);
}

/*
 * dtype, dtype of C, epilogue, threads, trans_a, trans_b, m, n, k, best backend or -, implementation. While online
 * tuning is unfinished, its candidates follow; when it is finished, the implementation is its winner.
 */
static void write_line(const cache_entry *k, char *line)
{
    const ont_gemm *g = &k->shape;
    const ont_gemm_tuner *tuner = &k->tuner;
    bool open = flops(g) >= ONLINE_FLOPS && tuner->n > 1 && tuner->winner < 0;
    candidate impl = {k->impl, k->impl == ONT_GEMM_BACKEND ? k->best : NULL, -1};
    if (tuner->winner >= 0) impl = tuner->candidates[tuner->winner];
    const ont_gemm_backend *best = impl.backend ? impl.backend : k->best;
    snprintf(line, LINE_BYTES, "%s %s %d %d %d %d %" PRId64 " %" PRId64 " %" PRId64, ont_dtype_name(g->dtype),
             ont_dtype_name(k->out), k->epilogue, k->threads, g->trans_a, g->trans_b, g->m, g->n, g->k);
    append_name(line, best ? best->name : "-");
    append_name(line, candidate_name(&impl));
    for (int i = 0; open && i < tuner->n; i++) append_name(line, candidate_name(&tuner->candidates[i]));
    strcat(line, "\n");
}

char *ont_gemm_cache_export(void)
{
    size_t n = ont_tune_count(&cache);
    char *text = ont_calloc(n + 1, LINE_BYTES), *end = text;
    pthread_mutex_lock(&tuner_lock);
    for (size_t i = 0; text && i < n; i++) {
        write_line(&entries[i], end);
        end += strlen(end);
    }
    pthread_mutex_unlock(&tuner_lock);
    return text;
}

static ont_dtype float_dtype_from_name(const char *name)
{
    static const ont_dtype floats[] = {ONT_FLOAT32, ONT_FLOAT64, ONT_BFLOAT16, ONT_FLOAT16};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
        if (!strcmp(ont_dtype_name(floats[i]), name)) return floats[i];
    return ONT_UNDEFINED;
}

/* False where the implementation is not available here. */
static bool candidate_from_name(const char *given, ont_dtype dtype, int threads, candidate *impl)
{
    const char *name = current_name(given);
    *impl = (candidate){ONT_GEMM_PRIMITIVE, NULL, -1};
    if (!strcmp(name, "primitive")) return !ont_dnnl_matmul_refuses(dtype);
    impl->impl = ONT_GEMM_NATIVE;
    if (!strcmp(name, "native")) return ont_gemm_native_kernel(impl->impl, dtype) != NULL;
    impl->impl = ONT_GEMM_BACKEND;
    size_t count;
    const ont_gemm_backend *backends = ont_gemm_backends(&count);
    for (size_t i = 0; i + 1 < count && !ont_dtype_is_half(dtype); i++) {
        if (strcmp(backends[i].name, name)) continue;
        impl->backend = &backends[i];
        return ont_gemm_is_available(impl->backend, dtype, threads);
    }
    return false;
}

/* Whether the line has the format of write_line() and all its implementations are available. */
static bool read_line(const char *line, cache_entry *k)
{
    char dtype[NAME_BYTES], out[NAME_BYTES], best[NAME_BYTES], word[NAME_BYTES];
    int epilogue, threads, trans_a, trans_b, at, length;
    int64_t m, n, depth;
    if (sscanf(line, NAME_FORMAT NAME_FORMAT "%d %d %d %d %" SCNd64 "%" SCNd64 "%" SCNd64 NAME_FORMAT "%n", dtype, out,
               &epilogue, &threads, &trans_a, &trans_b, &m, &n, &depth, best, &at) != 10)
        return false;
    ont_gemm shape = {.dtype = float_dtype_from_name(dtype), .trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n,
                      .k = depth, .lda = trans_a ? m : depth, .ldb = trans_b ? depth : n, .ldc = n, .alpha = 1};
    *k = (cache_entry){.shape = shape, .out = float_dtype_from_name(out), .epilogue = epilogue, .threads = threads,
                       .measured = true, .tuner = {.shape = shape, .epilogue = epilogue, .winner = -1}};
    k->key = key_of(&shape, k->out, epilogue, threads);
    if (!shape.dtype || !k->out || m < 1 || n < 1 || depth < 1) return false;
    candidate impl;
    if (strcmp(best, "-")) {
        if (!candidate_from_name(best, shape.dtype, threads, &impl) || !impl.backend) return false;
        k->best = impl.backend;
    }
    int words = 0;
    for (; sscanf(line + at, NAME_FORMAT "%n", word, &length) == 1; words++, at += length) {
        if (words > MAX_CANDIDATES || !candidate_from_name(word, shape.dtype, threads, &impl)) return false;
        if (words) k->tuner.candidates[k->tuner.n++] = impl;
        else if (impl.backend && impl.backend != k->best) return false;
        else k->impl = impl.impl;
    }
    return words > 0;
}

int ont_gemm_cache_import(const char *text)
{
    int imported = 0;
    char line[LINE_BYTES];
    for (size_t length; *text; text += length + (text[length] == '\n')) {
        length = strcspn(text, "\n");
        if (length >= sizeof line) continue;
        memcpy(line, text, length);
        line[length] = 0;
        cache_entry k;
        if (!read_line(line, &k) || ont_tune_find(&cache, &k.key)) continue;
        imported += ont_tune_keep(&cache, &k) != NULL;
    }
    return imported;
}
