/*
 * Which way a product goes, per kind of product (sizes within a factor of 1.4) and number of threads, once a process:
 * measured on scratch memory, and where that holds a small part of the product only, among those near the best in its
 * own first runs. What was found goes to the next process as text. Where a stopwatch may not decide, a rule does. See
 * gemm.h.
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
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

enum { A, B, C, ROW, SUMS, HANDLE_WORK, TILED_WORK, N_BUFFERS, LINE = 64 };

/* Operands of a product whose pages are touched, and the product as each way takes it. */
typedef struct scratch {
    void *data[N_BUFFERS];
    size_t bytes[N_BUFFERS];
    ont_dnnl_matmul *handle;
    ont_tiled tiled;
} scratch;

static void make_handle(scratch *s, const ont_gemm *g, ont_dtype out, int with)
{
    ont_matmul m = {.dtype = g->dtype, .out = out, .trans_a = g->trans_a, .trans_b = g->trans_b,
                    .bias = with & ONT_GEMM_ROW, .alpha = 1};
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

static bool scratch_init(scratch *s, const ont_gemm *g, ont_dtype out, int with, const contestant *all, int n)
{
    size_t size = ont_dtype_size(g->dtype);
    memset(s, 0, sizeof *s);
    for (int i = 0; i < n; i++) {
        const ont_gemm_kernel *kernel = ont_gemm_kernel_of(all[i].way, g->dtype);
        if (all[i].way == ONT_GEMM_PRIMITIVE) make_handle(s, g, out, with);
        if (kernel) make_tiled(s, kernel, g, out);
    }
    s->bytes[A] = (size_t)((g->trans_a ? g->k : g->m) * g->lda) * size;
    s->bytes[B] = (size_t)((g->trans_b ? g->n : g->k) * g->ldb) * size;
    s->bytes[C] = (size_t)(g->m * g->ldc) * ont_dtype_size(out);
    s->bytes[ROW] = (size_t)g->n * size;
    s->bytes[SUMS] = (size_t)g->m * sizeof(float);
    bool enough = true;
    for (int i = 0; i < N_BUFFERS; i++) {
        s->data[i] = ont_pages_alloc(s->bytes[i]);
        if (s->data[i]) memset(s->data[i], 0, s->bytes[i]);
        enough &= s->data[i] != NULL;
    }
    return enough;
}

static void scratch_deinit(scratch *s)
{
    for (int i = 0; i < N_BUFFERS; i++) ont_pages_free(s->data[i], s->bytes[i]);
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
static double timed(const contestant *p, const ont_gemm *g, int with, const scratch *s)
{
    void *const *d = s->data, *row = with & ONT_GEMM_ROW ? d[ROW] : NULL;
    float *sums = with & ONT_GEMM_SUMS ? d[SUMS] : NULL;
    share_out(s);
    double start = ont_seconds();
    switch (p->way) {
    case ONT_GEMM_PROVIDER:
        if (!ont_gemm_is_there(p->provider, g->dtype, ont_parallel_threads())) return -1;
        p->provider->run(g, d[A], d[B], d[C]);
        if (row) ont_gemm_add_row(g, 1, row, d[C]);
        if (sums) ont_gemm_sum(g, d[A], sums);
        break;
    case ONT_GEMM_PRIMITIVE:
        if (!s->handle) return -1;
        if (ont_dnnl_matmul_run(s->handle, d[A], d[B], row, d[C], d[HANDLE_WORK]) != ONT_OK) return -1;
        if (sums) ont_gemm_sum(g, d[A], sums);
        break;
    case ONT_GEMM_TILED:
    case ONT_GEMM_SPLIT:
        if (!s->tiled.kernel) return -1;
        ont_tiled_run(&s->tiled, d[A], d[B], row, d[C], sums, d[TILED_WORK]);
    }
    return ont_seconds() - start;
}

enum { ROUNDS = 4 }; /* the first warms up */
static const double LONG = 0.02;

/* Everybody takes turns: what slows a moment down meets all of them. False without memory. */
static bool measure(contestant *all, int n, const ont_gemm *g, ont_dtype out, int with)
{
    scratch s;
    bool enough = scratch_init(&s, g, out, with, all, n);
    double start = ont_seconds();
    for (int i = 0; i < n; i++) all[i].took = -1;
    for (int round = 0; enough && round < ROUNDS; round++) {
        for (int i = 0; i < n; i++) {
            double took = timed(&all[i], g, with, &s);
            if (round && took >= 0 && (all[i].took < 0 || took < all[i].took)) all[i].took = took;
        }
        if (round && ont_seconds() - start > LONG * n) break;
    }
    scratch_deinit(&s);
    ont_gemm_release();
    return enough;
}

double ont_gemm_measure(ont_gemm_way way, const ont_gemm_provider *provider, const ont_gemm *g, ont_dtype out)
{
    contestant one = {way, provider, -1};
    return measure(&one, 1, g, out, 0) ? one.took : -1;
}

/* ---- what is known ---- */

enum { KNOWN = 512, WAYS = 8, TURNS = 3 };
static const double HUGE_OPERATIONS = 4e9, NEAR = 1.1, VERY_NEAR = 1.05, SLIGHTLY = 1.03;

/* Ways of a kind of product, whose own runs decide. */
struct ont_gemm_trial {
    ont_gemm shape; /* of the first one */
    int with;
    contestant ways[WAYS];
    int turns[WAYS], n, decided; /* the latter: a way, or -1 */
};

typedef struct known {
    ont_gemm shape;
    ont_dtype out;
    int with, threads;
    bool measured;
    ont_gemm_way way;
    const ont_gemm_provider *best; /* of the providers */
    ont_gemm_trial trial;
} known;

static known cache[KNOWN];
static size_t n_known;
static pthread_mutex_t cache_lock = PTHREAD_MUTEX_INITIALIZER;

/* Half powers of two: a batch of another size is no new measurement, else building its program would be one. */
static int64_t rounded(int64_t dim)
{
    return dim > 0 ? (int64_t)round(2 * log2((double)dim)) : -1;
}

static bool same_kind(const known *k, const ont_gemm *b, ont_dtype out, int with, int threads)
{
    const ont_gemm *a = &k->shape;
    return a->dtype == b->dtype && k->out == out && k->with == with && k->threads == threads &&
           a->trans_a == b->trans_a && a->trans_b == b->trans_b && rounded(a->m) == rounded(b->m) &&
           rounded(a->n) == rounded(b->n) && rounded(a->k) == rounded(b->k);
}

static double operations(const ont_gemm *g)
{
    return 2.0 * (double)g->m * (double)g->n * (double)g->k;
}

/*
 * The same kind of product, its longest dim halved until it takes some 10 ms: building must stay short. A smaller part
 * says too little: there are libraries that take 256x3072x768 twice as long as its eighth lets expect.
 */
static ont_gemm sample_of(const ont_gemm *g)
{
    double limit = operations(g) >= HUGE_OPERATIONS ? HUGE_OPERATIONS / 2 : HUGE_OPERATIONS;
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

static void log_time(const char *what, const ont_gemm *g, int with, const contestant *p)
{
    static const char *const along[] = {"", " and a row", " and sums", " and a row and sums"};
    ont_log(ONT_LOG_DEBUG, "%s %s %lldx%lldx%lld%s: %s %.0f us", what, ont_dtype_name(g->dtype), (long long)g->m,
            (long long)g->n, (long long)g->k, along[with], name_of(p), p->took * 1e6);
}

/*
 * What a time counts as. A library keeps buffers of its own from its first product on, large ones where one call has
 * several threads, which therefore must be slightly faster. Our own kernel and oneDNN's primitive have theirs in the
 * slab.
 */
static double counted(const contestant *p)
{
    bool several = p->provider && !p->provider->alone && ont_parallel_threads() > 1;
    return several ? p->took * SLIGHTLY : p->took;
}

/* The plain loop is not measured. False without memory. */
static bool fastest(const ont_gemm *g, ont_dtype out, int with, known *found)
{
    size_t count;
    const ont_gemm_provider *providers = ont_gemm_providers(&count);
    ont_gemm sample = sample_of(g);
    contestant all[WAYS] = {{ONT_GEMM_PRIMITIVE, NULL, -1}, {ONT_GEMM_TILED, NULL, -1}};
    int n = 2;
    double least = 0, least_provider = 0;
    for (size_t i = 0; i + 1 < count && g->dtype == out && !ont_dtype_is_half(out); i++)
        all[n++] = (contestant){ONT_GEMM_PROVIDER, &providers[i], -1};
    *found = (known){.shape = *g, .out = out, .with = with, .threads = ont_parallel_threads()};
    if (!measure(all, n, &sample, out, with)) return false;
    for (int i = 0; i < n; i++) {
        double took = counted(&all[i]);
        if (took < 0) continue;
        log_time("gemm", g, with, &all[i]);
        if (least == 0 || took < least) least = took, found->way = all[i].way;
        if (all[i].way == ONT_GEMM_PROVIDER && (least_provider == 0 || took < least_provider))
            least_provider = took, found->best = all[i].provider;
    }
    ont_gemm_trial *trial = &found->trial;
    *trial = (ont_gemm_trial){.shape = *g, .with = with, .decided = -1};
    for (int i = 0; i < n; i++) { /* one library: each keeps buffers of its own */
        if (all[i].took < 0 || counted(&all[i]) > NEAR * least) continue;
        if (!all[i].provider || all[i].provider == found->best)
            trial->ways[trial->n++] = (contestant){all[i].way, all[i].provider, -1};
    }
    return found->measured = least > 0;
}

static known *find(const ont_gemm *g, ont_dtype out, int with, int threads)
{
    for (size_t i = 0; i < n_known; i++)
        if (same_kind(&cache[i], g, out, with, threads)) return &cache[i];
    return NULL;
}

/* False where nothing is known of this kind of product yet. */
static bool look_up(const ont_gemm *g, ont_dtype out, int with, known *found)
{
    pthread_mutex_lock(&cache_lock);
    const known *before = find(g, out, with, ont_parallel_threads());
    if (before) *found = *before;
    pthread_mutex_unlock(&cache_lock);
    return before != NULL;
}

/*
 * What is known of this kind of product, measured now where nothing is; not `measured` without memory for it. Nobody
 * waits for a measurement, and a log may do as it likes: no lock is held meanwhile. What another thread has found by
 * then stands.
 */
static known recall(const ont_gemm *g, ont_dtype out, int with)
{
    known found = {.measured = false};
    if (look_up(g, out, with, &found) || !fastest(g, out, with, &found)) return found;
    pthread_mutex_lock(&cache_lock);
    const known *before = find(g, out, with, found.threads);
    if (before) found = *before;
    else if (n_known < KNOWN) cache[n_known++] = found;
    pthread_mutex_unlock(&cache_lock);
    return found;
}

/* ---- choice ---- */

static bool by_rule;

void ont_gemm_by_rule(bool on)
{
    __atomic_store_n(&by_rule, on, __ATOMIC_RELAXED);
}

bool ont_gemm_is_by_rule(void)
{
    return __atomic_load_n(&by_rule, __ATOMIC_RELAXED);
}

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

const ont_gemm_provider *ont_gemm_choose(const ont_gemm *g, int with, ont_gemm_way *way)
{
    const char *asked = getenv("ONNXTRAIN_GEMM");
    size_t count;
    const ont_gemm_provider *providers = ont_gemm_providers(&count), *first = ont_gemm_plain();
    ont_gemm_way ignored;
    int libraries = 0;
    if (!way) way = &ignored;
    *way = ONT_GEMM_PROVIDER;
    for (size_t i = count; i-- > 0;) {
        if (!fits(g) || !ont_gemm_is_there(&providers[i], g->dtype, ont_parallel_threads())) continue;
        if (asked && !strcmp(asked, providers[i].name)) return &providers[i];
        first = &providers[i];
        libraries += first != ont_gemm_plain();
    }
    if (asked_way(asked, g, way) || !fits(g) || operations(g) < 1e6) return first;
    if (ont_gemm_is_by_rule()) { /* our own kernel: its sums depend on no address and no number of threads */
        if (ont_gemm_kernel_of(ONT_GEMM_TILED, g->dtype)) *way = ONT_GEMM_TILED;
        return first;
    }
    if (libraries < 2) return first;
    known found = recall(g, g->dtype, with);
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
    if (ont_gemm_is_by_rule()) return ONT_GEMM_TILED;
    known found = recall(g, out, row ? ONT_GEMM_ROW : 0);
    return found.measured ? found.way : ONT_GEMM_PRIMITIVE;
}

/* ---- trials ---- */

ont_gemm_trial *ont_gemm_try(const ont_gemm *g, int with)
{
    const char *asked = getenv("ONNXTRAIN_GEMM");
    if ((asked && *asked) || operations(g) < HUGE_OPERATIONS || g->dtype != ONT_FLOAT32 || ont_gemm_is_by_rule())
        return NULL;
    pthread_mutex_lock(&cache_lock);
    known *k = find(g, g->dtype, with, ont_parallel_threads());
    pthread_mutex_unlock(&cache_lock);
    return k && k->trial.n > 1 ? &k->trial : NULL;
}

/* Whether the way has turns left: two, of which the first warms up, and more where it was near the best. */
static bool has_turns(const ont_gemm_trial *trial, int way)
{
    double least = trial->ways[way].took;
    for (int i = 0; i < trial->n; i++)
        if (trial->ways[i].took >= 0 && trial->ways[i].took < least) least = trial->ways[i].took;
    return trial->turns[way] < 2 || (trial->turns[way] < TURNS && trial->ways[way].took <= VERY_NEAR * least);
}

/* The way whose turn it is; -1 where none has turns left. */
static int next_turn(const ont_gemm_trial *trial)
{
    int next = -1;
    for (int i = 0; i < trial->n; i++)
        if (has_turns(trial, i) && (next < 0 || trial->turns[i] < trial->turns[next])) next = i;
    return next;
}

static void decide(ont_gemm_trial *trial)
{
    trial->decided = 0;
    for (int i = 0; i < trial->n; i++)
        if (trial->ways[i].took < trial->ways[trial->decided].took) trial->decided = i;
}

ont_gemm_way ont_gemm_trial_next(ont_gemm_trial *trial, const ont_gemm_provider **provider)
{
    pthread_mutex_lock(&cache_lock);
    contestant way = trial->ways[trial->decided >= 0 ? trial->decided : next_turn(trial)];
    pthread_mutex_unlock(&cache_lock);
    *provider = way.provider;
    return way.way;
}

void ont_gemm_trial_note(ont_gemm_trial *trial, ont_gemm_way way, const ont_gemm_provider *provider, double seconds)
{
    pthread_mutex_lock(&cache_lock);
    for (int i = 0; i < trial->n && trial->decided < 0; i++) {
        contestant *p = &trial->ways[i];
        if (p->way != way || p->provider != provider) continue;
        trial->turns[i]++;
        if (p->took < 0 || seconds < p->took) p->took = seconds;
    }
    bool ends = trial->decided < 0 && next_turn(trial) < 0;
    if (ends) decide(trial);
    const ont_gemm_trial ended = *trial;
    pthread_mutex_unlock(&cache_lock);
    for (int i = 0; ends && i < ended.n; i++) /* a log may wait for Python, which may wait for the lock */
        log_time("gemm in place", &ended.shape, ended.with, &ended.ways[i]);
}

/* ---- from process to process ---- */

enum { LINE_BYTES = 320, WORD_BYTES = 16 };
#define WORD "%15s"

static void append(char *line, const char *word)
{
    size_t length = strlen(line);
    snprintf(line + length, LINE_BYTES - length, " %s", word);
}

/* Of a trial that has ended what it chose; of one that has not, those that take part as well. */
static void write_line(const known *k, char *line)
{
    const ont_gemm *g = &k->shape;
    const ont_gemm_trial *trial = &k->trial;
    bool open = operations(g) >= HUGE_OPERATIONS && trial->n > 1 && trial->decided < 0;
    contestant way = {k->way, k->way == ONT_GEMM_PROVIDER ? k->best : NULL, -1};
    if (trial->decided >= 0) way = trial->ways[trial->decided];
    const ont_gemm_provider *best = way.provider ? way.provider : k->best;
    snprintf(line, LINE_BYTES, "%s %s %d %d %d %d %" PRId64 " %" PRId64 " %" PRId64, ont_dtype_name(g->dtype),
             ont_dtype_name(k->out), k->with, k->threads, g->trans_a, g->trans_b, g->m, g->n, g->k);
    append(line, best ? best->name : "-");
    append(line, name_of(&way));
    for (int i = 0; open && i < trial->n; i++) append(line, name_of(&trial->ways[i]));
    strcat(line, "\n");
}

char *ont_gemm_measured(void)
{
    pthread_mutex_lock(&cache_lock);
    char *text = ont_calloc(n_known + 1, LINE_BYTES), *end = text;
    for (size_t i = 0; text && i < n_known; i++) {
        write_line(&cache[i], end);
        end += strlen(end);
    }
    pthread_mutex_unlock(&cache_lock);
    return text;
}

static ont_dtype float_named(const char *name)
{
    static const ont_dtype floats[] = {ONT_FLOAT32, ONT_FLOAT64, ONT_BFLOAT16, ONT_FLOAT16};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
        if (!strcmp(ont_dtype_name(floats[i]), name)) return floats[i];
    return ONT_UNDEFINED;
}

/* False where this process does not have it. */
static bool way_named(const char *name, ont_dtype dtype, int threads, contestant *way)
{
    *way = (contestant){ONT_GEMM_PRIMITIVE, NULL, -1};
    if (!strcmp(name, "primitive")) return !ont_dnnl_matmul_refuses(dtype);
    way->way = ONT_GEMM_TILED;
    if (!strcmp(name, "tiled")) return ont_gemm_kernel_of(way->way, dtype) != NULL;
    way->way = ONT_GEMM_PROVIDER;
    size_t count;
    const ont_gemm_provider *providers = ont_gemm_providers(&count);
    for (size_t i = 0; i + 1 < count && !ont_dtype_is_half(dtype); i++) {
        if (strcmp(providers[i].name, name)) continue;
        way->provider = &providers[i];
        return ont_gemm_is_there(way->provider, dtype, threads);
    }
    return false;
}

/* Whether it is a line of write_line() whose ways are all here. */
static bool read_line(const char *line, known *k)
{
    char dtype[WORD_BYTES], out[WORD_BYTES], best[WORD_BYTES], word[WORD_BYTES];
    int with, threads, trans_a, trans_b, at, length;
    int64_t m, n, depth;
    if (sscanf(line, WORD WORD "%d %d %d %d %" SCNd64 "%" SCNd64 "%" SCNd64 WORD "%n", dtype, out, &with, &threads,
               &trans_a, &trans_b, &m, &n, &depth, best, &at) != 10)
        return false;
    ont_gemm shape = {float_named(dtype), trans_a, trans_b, m, n, depth, trans_a ? m : depth, trans_b ? depth : n, n, 1,
                      0};
    *k = (known){.shape = shape, .out = float_named(out), .with = with, .threads = threads, .measured = true,
                 .trial = {.shape = shape, .with = with, .decided = -1}};
    if (!shape.dtype || !k->out || m < 1 || n < 1 || depth < 1) return false;
    contestant way;
    if (strcmp(best, "-")) {
        if (!way_named(best, shape.dtype, threads, &way) || !way.provider) return false;
        k->best = way.provider;
    }
    int words = 0;
    for (; sscanf(line + at, WORD "%n", word, &length) == 1; words++, at += length) {
        if (words > WAYS || !way_named(word, shape.dtype, threads, &way)) return false;
        if (words) k->trial.ways[k->trial.n++] = way;
        else if (way.provider && way.provider != k->best) return false;
        else k->way = way.way;
    }
    return words > 0;
}

int ont_gemm_remember(const char *text)
{
    int taken = 0;
    char line[LINE_BYTES];
    pthread_mutex_lock(&cache_lock);
    for (size_t length; *text && n_known < KNOWN; text += length + (text[length] == '\n')) {
        length = strcspn(text, "\n");
        if (length >= sizeof line) continue;
        memcpy(line, text, length);
        line[length] = 0;
        known k;
        if (!read_line(line, &k) || find(&k.shape, k.out, k.with, k.threads)) continue;
        cache[n_known++] = k;
        taken++;
    }
    pthread_mutex_unlock(&cache_lock);
    return taken;
}
