/*
 * Convolutions of the emulated device: plain loops in double.
 */
#include <stdlib.h>

#include "libs/dnn.h"
#include "emulate/values.h"

typedef struct plan {
    ont_conv_shape shape;
    ont_conv_kind kind;
} plan;

typedef struct call {
    plan p;
    void *x, *w, *y;
} call;

static const char *accept(const ont_conv_shape *shape, ont_conv_kind kind)
{
    (void)kind;
    return shape->dtype == ONT_FLOAT64 ? "float64" : NULL; /* as in cudnn.c */
}

static ont_status create(const ont_conv_shape *shape, ont_conv_kind kind, void **result)
{
    plan *p = malloc(sizeof *p);
    if (!p) return ont_fail(ONT_ENOMEM, "out of memory");
    *p = (plan){*shape, kind};
    *result = p;
    return ONT_OK;
}

static size_t work_bytes(const void *p)
{
    (void)p;
    return 64; /* not 0, so that the planner reserves it */
}

/* Runs over every product of a convolution: offsets into x, w and y. */
static void visit(const ont_conv_shape *s, void (*use)(void *context, int64_t x, int64_t w, int64_t y), void *context)
{
    int64_t channels = s->c / s->groups, each = s->m / s->groups, outputs = s->n * s->m * s->out_count;
    for (int64_t i = 0; i < outputs; i++) {
        int64_t o = i % s->out_count, m = i / s->out_count % s->m, n = i / s->out_count / s->m;
        int64_t at[3] = {o / s->out[2] / s->out[1], o / s->out[2] % s->out[1], o % s->out[2]};
        for (int64_t c = 0; c < channels; c++)
            for (int64_t k = 0; k < s->kernel_count; k++) {
                int64_t tap[3] = {k / s->kernel[2] / s->kernel[1], k / s->kernel[2] % s->kernel[1], k % s->kernel[2]};
                int64_t cell = 0;
                for (int d = 0; d < 3 && cell >= 0; d++) {
                    int64_t in = at[d] * s->stride[d] - s->pad[d] + tap[d] * s->dilation[d];
                    cell = in < 0 || in >= s->in[d] ? -1 : cell * s->in[d] + in;
                }
                if (cell >= 0)
                    use(context, (n * s->c + m / each * channels + c) * s->in_count + cell,
                        (m * channels + c) * s->kernel_count + k, i);
            }
    }
}

typedef struct sums {
    const call *c;
    double *to;
} sums;

static void add(void *context, int64_t x, int64_t w, int64_t y)
{
    const sums *s = context;
    const call *c = s->c;
    ont_dtype d = (ont_dtype)c->p.shape.dtype;
    if (c->p.kind == ONT_CONV_FORWARD)
        s->to[y] += ont_emulate_get(d, c->x, x) * ont_emulate_get(d, c->w, w);
    else if (c->p.kind == ONT_CONV_GRAD_INPUT)
        s->to[x] += ont_emulate_get(d, c->y, y) * ont_emulate_get(d, c->w, w);
    else
        s->to[w] += ont_emulate_get(d, c->y, y) * ont_emulate_get(d, c->x, x);
}

static int convolve(void *context)
{
    const call *c = context;
    const ont_conv_shape *s = &c->p.shape;
    int64_t n = c->p.kind == ONT_CONV_FORWARD      ? s->n * s->m * s->out_count
                : c->p.kind == ONT_CONV_GRAD_INPUT ? s->n * s->c * s->in_count
                                                   : s->m * (s->c / s->groups) * s->kernel_count;
    void *result = c->p.kind == ONT_CONV_FORWARD ? c->y : c->p.kind == ONT_CONV_GRAD_INPUT ? c->x : c->w;
    sums totals = {c, calloc((size_t)n + 1, sizeof(double))};
    if (!totals.to) return 2;
    visit(s, add, &totals);
    for (int64_t i = 0; i < n; i++) ont_emulate_put((ont_dtype)s->dtype, result, i, totals.to[i]);
    free(totals.to);
    return 0;
}

static ont_status run(void *opaque, void *x, void *w, void *y, void *work, void *stream)
{
    call now = {*(const plan *)opaque, x, w, y}, *kept;
    (void)stream;
    for (int i = 0; i < 64; i++) ((unsigned char *)work)[i] = 0x7f; /* overwrites its workspace, as the library does */
    if (!ont_emulate_recording()) return convolve(&now) ? ont_fail(ONT_ENOMEM, "out of memory") : ONT_OK;
    kept = malloc(sizeof *kept);
    if (!kept) return ont_fail(ONT_ENOMEM, "out of memory");
    *kept = now;
    ont_emulate_record(convolve, kept, free);
    return ONT_OK;
}

static const ont_dnn loops = {
    .name = "loops", .accept = accept, .create = create, .work_bytes = work_bytes, .run = run, .destroy = free};

const ont_dnn *ont_dnn_get(void)
{
    return &loops;
}
