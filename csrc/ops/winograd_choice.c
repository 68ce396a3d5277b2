/*
 * Which convolutions go to Winograd's algorithm, and the kernels' entry points. Where the multiplications saved are
 * few, none; else what is faster on a small convolution of the same kind, measured once a process: a shape's choice
 * does not change.
 */
#include <pthread.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "ops/conv_onednn.h"
#include "ops/winograd.h"

static bool enabled = true;

void ont_winograd_enable(bool on)
{
    enabled = on;
}

/* ---- measurement ---- */

enum { SAMPLE_TILES = 128, SAMPLE_CHANNELS = 128, SAMPLE_RESULT = 64, ROUNDS = 4, KNOWN = 256 };
static const double GAIN = 0.9;     /* of oneDNN's time: the results are less accurate, so a tie is not enough */
static const double SMALLEST = 1e7; /* multiplications */

static int64_t ceil_to(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

static double multiplications(const ont_conv *c)
{
    return 9.0 * (double)(c->n * c->out[1] * c->out[2]) * (double)(c->c * c->o);
}

/* Multiplications per one of the direct way; channels and tiles count with what fills their blocks. */
static double share(const ont_conv *c, ont_conv_kind kind)
{
    const int64_t *out = kind == ONT_CONV_GRAD_INPUT ? c->in : c->out;
    double tiles = (double)(c->n * (ceil_to(out[1], 4) / 4) * (ceil_to(out[2], 4) / 4));
    return 36 * tiles * (double)ceil_to(c->c, 16) * (double)ceil_to(c->o, 16) / multiplications(c);
}

/* Fewer images, rows and channels, so that a round takes a few milliseconds; batches of many sizes are one sample. */
static ont_conv sample_of(const ont_conv *c)
{
    ont_conv s = *c;
    int64_t columns = ceil_to(s.out[2], 4) / 4, rows = SAMPLE_TILES / columns + 1;
    if (s.out[1] > 4 * rows) {
        s.out[1] = 4 * rows;
        s.in[1] = s.out[1] + 2 - s.pad[1] - s.pad_end[1];
    }
    int64_t each = columns * (ceil_to(s.out[1], 4) / 4), images = 1;
    while (images < s.n && images * each < SAMPLE_TILES) images *= 2;
    s.n = images;
    if (s.c > SAMPLE_CHANNELS) s.c = SAMPLE_CHANNELS;
    if (s.o > SAMPLE_RESULT) s.o = SAMPLE_RESULT;
    return s;
}

typedef struct trial {
    ont_dnnl_conv *direct;
    ont_winograd winograd;
    void *data[4]; /* x, w, y, work */
    size_t bytes[4];
} trial;

static bool trial_init(trial *t, const ont_conv *c, ont_conv_kind kind, int threads)
{
    *t = (trial){0};
    if (ont_dnnl_conv_create(c, kind, false, &t->direct) != ONT_OK) return false;
    ont_winograd_init(c, kind, threads, &t->winograd);
    size_t work = ont_dnnl_conv_work_bytes(t->direct);
    t->bytes[0] = (size_t)(c->n * c->c * c->in[1] * c->in[2]) * sizeof(float);
    t->bytes[1] = (size_t)(c->o * c->c * 9) * sizeof(float);
    t->bytes[2] = (size_t)(c->n * c->o * c->out[1] * c->out[2]) * sizeof(float);
    t->bytes[3] = work > t->winograd.work_bytes ? work : t->winograd.work_bytes;
    for (int i = 0; i < 4; i++) {
        t->data[i] = ont_buffer_alloc(t->bytes[i]);
        if (!t->data[i]) return false;
        memset(t->data[i], 0, t->bytes[i]);
    }
    return true;
}

static void trial_deinit(trial *t)
{
    for (int i = 0; i < 4; i++) ont_buffer_free(t->data[i], t->bytes[i]);
    ont_dnnl_conv_destroy(t->direct);
}

static void run_winograd(const trial *t)
{
    float *x = t->data[0], *w = t->data[1], *y = t->data[2];
    switch (t->winograd.kind) {
    case ONT_CONV_FORWARD: ont_winograd_compute(&t->winograd, x, w, NULL, y, t->data[3]); break;
    case ONT_CONV_GRAD_INPUT: ont_winograd_compute(&t->winograd, y, w, NULL, x, t->data[3]); break;
    case ONT_CONV_GRAD_WEIGHT: ont_winograd_compute_grad(&t->winograd, y, x, w, t->data[3]); break;
    }
}

/* Least seconds of both, which take turns; the first round warms up. False without memory. */
static bool measure(const ont_conv *c, ont_conv_kind kind, int threads, double best[2])
{
    trial t;
    bool ok = trial_init(&t, c, kind, threads);
    best[0] = best[1] = 1e9;
    for (int round = 0; ok && round < ROUNDS; round++) {
        double start = ont_seconds();
        ok = ont_dnnl_conv_run(t.direct, t.data[0], t.data[1], t.data[2], NULL, t.data[3]) == ONT_OK;
        double middle = ont_seconds();
        run_winograd(&t);
        double took[2] = {middle - start, ont_seconds() - middle};
        for (int i = 0; round && i < 2; i++)
            if (took[i] < best[i]) best[i] = took[i];
    }
    trial_deinit(&t);
    return ok;
}

typedef struct known {
    ont_conv sample;
    ont_conv_kind kind;
    int threads;
    bool faster;
} known;

static known cache[KNOWN];
static size_t n_known;
static pthread_mutex_t cache_lock = PTHREAD_MUTEX_INITIALIZER;

static bool same_sample(const ont_conv *a, const ont_conv *b)
{
    bool same = a->n == b->n && a->c == b->c && a->o == b->o;
    for (int d = 1; d < 3; d++)
        same &= a->in[d] == b->in[d] && a->out[d] == b->out[d] && a->pad[d] == b->pad[d] &&
                a->pad_end[d] == b->pad_end[d];
    return same;
}

static const known *find(const known *k)
{
    for (size_t i = 0; i < n_known; i++)
        if (cache[i].kind == k->kind && cache[i].threads == k->threads && same_sample(&cache[i].sample, &k->sample))
            return &cache[i];
    return NULL;
}

/* What is known of the kind of k, and whether there is room to note more. */
static bool look_up(known *k, bool *room)
{
    pthread_mutex_lock(&cache_lock);
    const known *before = find(k);
    if (before) *k = *before;
    *room = n_known < KNOWN;
    pthread_mutex_unlock(&cache_lock);
    return before != NULL;
}

/* No lock is held while it measures and logs, which may wait for Python; what another thread has found by then stands.
 */
static bool is_faster(const ont_conv *c, ont_conv_kind kind)
{
    known k = {.sample = sample_of(c), .kind = kind, .threads = ont_parallel_threads()};
    double took[2];
    bool room;
    if (look_up(&k, &room)) return k.faster;
    if (!room || !measure(&k.sample, kind, k.threads, took)) return false;
    k.faster = took[1] < GAIN * took[0];
    ont_log(ONT_LOG_DEBUG,
            "convolution of %lld to %lld channels, %lld x %lld, part %d: oneDNN %.0f us, Winograd %.0f us",
            (long long)c->c, (long long)c->o, (long long)c->out[1], (long long)c->out[2], (int)kind, took[0] * 1e6,
            took[1] * 1e6);
    pthread_mutex_lock(&cache_lock);
    const known *before = find(&k);
    if (before) k = *before;
    else if (n_known < KNOWN) cache[n_known++] = k;
    pthread_mutex_unlock(&cache_lock);
    return k.faster;
}

/* ---- kernels ---- */

/* Whether oneDNN's kernel would take the node. Without it there is nothing to compare with: products of windows are
 * slower. */
static bool has_rival(const ont_node *node)
{
    for (uint32_t i = 0; i < node->op->n_kernels; i++) {
        const ont_kernel *k = &node->op->kernels[i];
        if (k->accept == ont_conv_onednn_accept) return !ont_op_is_disabled(node->op, k) && !k->accept(node);
    }
    return false;
}

const char *ont_winograd_accept(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    if (!enabled) return "winograd is disabled";
    if (ont_node_in(node, 0)->shape.rank != 4) return "not two spatial dims";
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    const char *refusal = ont_winograd_refuses(&c);
    if (refusal || !has_rival(node)) return refusal;
    if (ont_gemm_is_by_rule()) return "no stopwatch may decide";
    if (multiplications(&c) < SMALLEST || share(&c, kind) > GAIN) return "too few multiplications saved";
    return is_faster(&c, kind) ? NULL : "oneDNN is faster";
}

ont_status ont_winograd_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_conv c;
    ont_conv_kind kind;
    ont_winograd *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_conv_read(node, &c, &kind));
    ont_winograd_init(&c, kind, ont_parallel_threads(), s);
    out->state = s;
    out->work_bytes = s->work_bytes;
    return ONT_OK;
}

ont_status ont_winograd_run(const ont_call *call)
{
    const ont_winograd *s = call->state;
    const float *bias = s->kind == ONT_CONV_FORWARD && call->node->n_inputs > 2 ? call->in[2] : NULL;
    ont_winograd_compute(s, call->in[0], call->in[1], bias, call->out[0], call->work);
    return ONT_OK;
}

ont_status ont_winograd_grad_run(const ont_call *call)
{
    ont_winograd_compute_grad(call->state, call->in[0], call->in[1], call->out[0], call->work);
    return ONT_OK;
}
