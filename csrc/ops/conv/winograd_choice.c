/*
 * Which convolutions use Winograd's algorithm, and the entry points of its kernels. Where it saves enough
 * multiplications, it is compared with oneDNN on a small convolution of the same form, once per process, so that the
 * choice for a shape does not change.
 */
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/autotune.h"
#include "base/clock.h"
#include "base/int_math.h"
#include "base/log.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "ops/conv/conv_onednn.h"
#include "ops/conv/winograd.h"

static bool enabled = true;

void ont_winograd_enable(bool on)
{
    enabled = on;
}

/* ---- benchmark ---- */

enum { SAMPLE_TILES = 128, SAMPLE_CHANNELS = 128, SAMPLE_RESULT = 64, ROUNDS = 4, CACHE_ENTRIES = 256 };
static const double GAIN = 0.9; /* of oneDNN's time: the results are less accurate, so a tie is not enough */
static const double MIN_MULTIPLICATIONS = 1e7;
/* Multiplications of bfloat16 in the time of an element's Cast: 265e9 a second, and 6 bytes at 40 GB/s, on the EPYC. */
static const double CAST = 40;

/* The convolution of images that a convolution of volumes is computed as; see winograd.h. */
static ont_conv flat_of(const ont_conv *c, ont_conv_kind kind)
{
    ont_conv flat = *c;
    bool rotated = kind == ONT_CONV_GRAD_INPUT;
    flat.spatial = 2;
    flat.n *= rotated ? c->in[0] : c->out[0];
    *(rotated ? &flat.o : &flat.c) *= c->kernel[0];
    flat.in[0] = flat.out[0] = flat.kernel[0] = 1;
    flat.pad[0] = flat.pad_end[0] = 0;
    return flat;
}

/* Which part of the slices that the filter covers lies in the volume; a direct convolution leaves the others out. */
static double covered(const ont_conv *c)
{
    int64_t inside = 0;
    for (int64_t z = 0; z < c->out[0]; z++)
        for (int64_t tap = 0; tap < c->kernel[0]; tap++)
            inside += z + tap >= c->pad[0] && z + tap < c->pad[0] + c->in[0];
    return (double)inside / (double)(c->out[0] * c->kernel[0]);
}

/* Time of the Casts around a convolution in float32, relative to the convolution in bfloat16. */
static double relative_casts(const ont_conv *c)
{
    double x = (double)(c->n * c->c) * (double)(c->in[1] * c->in[2]), w = 9.0 * (double)(c->c * c->o),
           y = (double)(c->n * c->o) * (double)(c->out[1] * c->out[2]);
    return CAST * (x + w + y) / ont_conv_multiplications(c);
}

/* Multiplications relative to direct convolution; channels and tiles are rounded up to whole blocks. */
static double relative_cost(const ont_conv *c, ont_conv_kind kind)
{
    const int64_t *out = kind == ONT_CONV_GRAD_INPUT ? c->in : c->out;
    int64_t tiles = c->n * (ont_round_up(out[1], 4) / 4) * (ont_round_up(out[2], 4) / 4);
    return 36.0 * (double)tiles * (double)ont_round_up(c->c, 16) * (double)ont_round_up(c->o, 16) /
           ont_conv_multiplications(c);
}

/*
 * A smaller convolution, which takes a few milliseconds: fewer images, rows and channels. Batch sizes are rounded to
 * powers of two, so that many of them share a sample.
 */
static ont_conv sample_of(const ont_conv *c)
{
    ont_conv s = *c;
    int64_t columns = ont_round_up(s.out[2], 4) / 4, rows = SAMPLE_TILES / columns + 1;
    if (s.out[1] > 4 * rows) {
        s.out[1] = 4 * rows;
        s.in[1] = s.out[1] + 2 - s.pad[1] - s.pad_end[1];
    }
    int64_t each = columns * (ont_round_up(s.out[1], 4) / 4), images = 1;
    while (images < s.n && images * each < SAMPLE_TILES) images *= 2;
    s.n = images;
    if (s.c > SAMPLE_CHANNELS) s.c = SAMPLE_CHANNELS;
    if (s.o > SAMPLE_RESULT) s.o = SAMPLE_RESULT;
    return s;
}

typedef struct benchmark {
    ont_dnnl_conv *direct;
    ont_winograd winograd;
    void *data[4]; /* x, w, y, work */
    size_t bytes[4];
} benchmark;

static bool benchmark_init(benchmark *t, const ont_conv *c, ont_conv_kind kind, int threads)
{
    *t = (benchmark){0};
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

static void benchmark_deinit(benchmark *t)
{
    for (int i = 0; i < 4; i++) ont_buffer_free(t->data[i], t->bytes[i]);
    ont_dnnl_conv_destroy(t->direct);
}

static void run_winograd(const benchmark *t)
{
    float *x = t->data[0], *w = t->data[1], *y = t->data[2];
    switch (t->winograd.kind) {
    case ONT_CONV_FORWARD: ont_winograd_compute(&t->winograd, x, w, NULL, y, t->data[3]); break;
    case ONT_CONV_GRAD_INPUT: ont_winograd_compute(&t->winograd, y, w, NULL, x, t->data[3]); break;
    case ONT_CONV_GRAD_WEIGHT: ont_winograd_compute_grad(&t->winograd, y, x, w, t->data[3]); break;
    }
}

enum { DIRECT, WINOGRAD, N_CANDIDATES };

static double run_timed(void *context, int candidate)
{
    const benchmark *t = context;
    double start = ont_seconds();
    if (candidate == WINOGRAD)
        run_winograd(t);
    else if (ont_dnnl_conv_run(t->direct, t->data[0], t->data[1], t->data[2], NULL, t->data[3]) != ONT_OK)
        return -1;
    return ont_seconds() - start;
}

/* False without memory. */
static bool measure(const ont_conv *c, ont_conv_kind kind, int threads, double *seconds)
{
    benchmark t;
    bool allocated = benchmark_init(&t, c, kind, threads);
    if (allocated) ont_tune_times(N_CANDIDATES, ROUNDS, run_timed, &t, seconds);
    benchmark_deinit(&t);
    return allocated && seconds[DIRECT] >= 0;
}

typedef struct cache_key { /* of the sample */
    int64_t dtype, kind, threads, n, c, o, in[2], out[2], pad[2], pad_end[2];
} cache_key;

typedef struct cache_entry {
    cache_key key;
    double ratio; /* of Winograd's time, in float32, to oneDNN's in the dtype */
} cache_entry;

static cache_entry entries[CACHE_ENTRIES];
static ont_tune_cache cache = ONT_TUNE_CACHE(entries);

/* Winograd's time relative to oneDNN's. Where the cache is full, every convolution of another form is measured. */
static double measured_ratio(const ont_conv *c, ont_conv_kind kind)
{
    const ont_conv s = sample_of(c);
    int threads = ont_parallel_threads();
    cache_entry k = {.key = {c->dtype, kind, threads, s.n, s.c, s.o, {s.in[1], s.in[2]}, {s.out[1], s.out[2]},
                             {s.pad[1], s.pad[2]}, {s.pad_end[1], s.pad_end[2]}}};
    double seconds[N_CANDIDATES];
    const cache_entry *known = ont_tune_find(&cache, &k.key);
    if (known) return known->ratio;
    if (!measure(&s, kind, threads, seconds)) return INFINITY;
    k.ratio = seconds[WINOGRAD] / seconds[DIRECT];
    ont_log(ONT_LOG_DEBUG,
            "convolution of %lld to %lld channels, %lld x %lld, kind %d, %s: oneDNN %.0f us, Winograd %.0f us",
            (long long)c->c, (long long)c->o, (long long)c->out[1], (long long)c->out[2], (int)kind,
            ont_dtype_name(c->dtype), seconds[DIRECT] * 1e6, seconds[WINOGRAD] * 1e6);
    known = ont_tune_keep(&cache, &k);
    return known ? known->ratio : k.ratio;
}

/* ---- kernels ---- */

/* Whether oneDNN's kernel accepts the node. Otherwise the alternative is unrolled windows and GEMM, which is slower. */
static bool onednn_accepts(const ont_node *node)
{
    for (uint32_t i = 0; i < node->op->n_kernels; i++) {
        const ont_kernel *k = &node->op->kernels[i];
        if (k->accept == ont_conv_onednn_accept) return !ont_op_is_disabled(node->op, k) && !k->accept(node);
    }
    return false;
}

/* Whether it is worth while to compare the algorithm with oneDNN. */
static const char *refuses_comparison(const ont_conv *c, ont_conv_kind kind)
{
    if (ont_gemm_is_deterministic()) return "the choice must not depend on measurements";
    const ont_conv flat = flat_of(c, kind);
    if (ont_conv_multiplications(&flat) < MIN_MULTIPLICATIONS || relative_cost(&flat, kind) > GAIN * covered(c))
        return "too few multiplications saved";
    return NULL;
}

const char *ont_winograd_accept(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    if (!enabled) return "winograd is disabled";
    if (ont_node_in(node, 0)->shape.rank < 4) return "one spatial dim";
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    const char *refusal = ont_winograd_refuses(&c);
    return refusal || !onednn_accepts(node) ? refusal : refuses_comparison(&c, kind);
}

bool ont_winograd_is_faster_than_bf16(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    bool conv = ONT_IS(node, Conv) || ONT_IS(node, ConvGradInput) || ONT_IS(node, ConvGradWeight);
    if (!enabled || !conv || ont_conv_onednn_accept_bf16(node) || ont_node_in(node, 0)->shape.rank < 4) return false;
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return false;
    ont_conv wide = c;
    wide.dtype = ONT_FLOAT32;
    if (ont_winograd_refuses(&wide) || refuses_comparison(&c, kind)) return false;
    const ont_conv flat = flat_of(&c, kind);
    return measured_ratio(&flat, kind) + relative_casts(&flat) < GAIN * covered(&c);
}

const char *ont_winograd_measure(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    const ont_conv flat = flat_of(&c, kind);
    if (!onednn_accepts(node) || measured_ratio(&flat, kind) < GAIN * covered(&c)) return NULL;
    return "oneDNN is faster";
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
