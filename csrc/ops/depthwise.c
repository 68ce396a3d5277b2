/*
 * Convolution of rows, a filter for each channel: Conv1d with as many groups as channels, of stride 1. A row of the
 * result is a sum of shifted rows, as is one of the input's gradient, with the filter turned about; the filter's
 * gradient is a product of two rows for each tap. Libraries lay such rows out in blocks of channels first, which takes
 * longer than all of that.
 */
#include "ops/depthwise.h"

#include <string.h>

#include "base/parallel.h"
#include "ops/conv_onednn.h"
#include "simd/simd.h"

enum { MOST_TAPS = 64 };

typedef struct depthwise_state {
    int64_t n, channels, lines; /* rows of a plane */
    int64_t taps, step, pad;    /* of the row that is the result: its filter begins `pad` before it */
    int64_t in, out;            /* entries of a row that is read, and of one that is written */
    bool turned;
} depthwise_state;

const char *ont_depthwise_accept(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32) return "dtype";
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    if (c.groups != c.c || c.groups != c.o) return "channels are not apart";
    for (int d = 0; d < 3; d++)
        if (c.stride[d] != 1 || (d < 2 && (c.kernel[d] != 1 || c.in[d] != c.out[d] || c.pad[d]))) return "not of rows";
    if (c.kernel[2] > MOST_TAPS) return "many taps";
    return !c.kernel[2] || !c.in[2] || !c.out[2] ? "no elements" : NULL;
}

ont_status ont_depthwise_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_conv c;
    ont_conv_kind kind;
    depthwise_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_conv_read(node, &c, &kind));
    *s = (depthwise_state){.n = c.n, .channels = c.c, .lines = c.in[0] * c.in[1], .taps = c.kernel[2],
                           .step = c.dilation[2], .pad = c.pad[2], .in = c.in[2], .out = c.out[2]};
    if (kind == ONT_CONV_GRAD_INPUT) {
        s->turned = true;
        s->pad = (s->taps - 1) * s->step - s->pad;
        s->in = c.out[2], s->out = c.in[2];
    }
    out->state = s;
    return ONT_OK;
}

static int64_t within(int64_t v, int64_t low, int64_t high)
{
    return v < low ? low : v > high ? high : v;
}

/* Entries [first, last) of a row, whose filter reaches beyond the row that is read. */
static void edge(const depthwise_state *s, const float *x, const float *w, float *y, int64_t first, int64_t last)
{
    for (int64_t i = first; i < last; i++)
        for (int64_t k = 0; k < s->taps; k++) {
            int64_t at = i + k * s->step - s->pad;
            if (at >= 0 && at < s->in) y[i] += w[k] * x[at];
        }
}

/* Planes [first, last) of the result. */
static void planes(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const depthwise_state *s = call->state;
    const float *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    for (int64_t plane = first; plane < last; plane++) {
        int64_t channel = plane % s->channels;
        const float *filter = (const float *)call->in[1] + channel * s->taps;
        float w[MOST_TAPS];
        for (int64_t k = 0; k < s->taps; k++) w[k] = filter[s->turned ? s->taps - 1 - k : k];
        int64_t low = within(s->pad, 0, s->out);
        int64_t high = within(s->in + s->pad - (s->taps - 1) * s->step, low, s->out);
        for (int64_t line = plane * s->lines; line < (plane + 1) * s->lines; line++) {
            const float *x = (const float *)call->in[0] + line * s->in;
            float *y = (float *)call->out[0] + line * s->out;
            for (int64_t i = 0; i < s->out; i++) y[i] = bias ? bias[channel] : 0;
            edge(s, x, w, y, 0, low);
            if (high > low)
                ont_simd()->add_taps(y + low, x + low - s->pad, w, s->taps, s->step, high - low);
            edge(s, x, w, y, high, s->out);
        }
    }
}

/* Filters [first, last) of the gradient: (dy, x) -> dw */
static void filters(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const depthwise_state *s = call->state;
    for (int64_t c = first; c < last; c++) {
        double sums[MOST_TAPS] = {0};
        for (int64_t n = 0; n < s->n; n++)
            for (int64_t line = (n * s->channels + c) * s->lines, end = line + s->lines; line < end; line++)
                for (int64_t k = 0; k < s->taps; k++) {
                    int64_t shift = k * s->step - s->pad, low = within(-shift, 0, s->out);
                    int64_t high = within(s->in - shift, low, s->out);
                    if (high == low) continue;
                    sums[k] += (double)ont_simd()->dot((const float *)call->in[0] + line * s->out + low,
                                                       (const float *)call->in[1] + line * s->in + low + shift,
                                                       high - low);
                }
        for (int64_t k = 0; k < s->taps; k++) ((float *)call->out[0])[c * s->taps + k] = (float)sums[k];
    }
}

ont_status ont_depthwise_run(const ont_call *call)
{
    const depthwise_state *s = call->state;
    ont_parallel(s->n * s->channels, 16384 / (s->lines * s->out * s->taps + 1) + 1, planes, (void *)call);
    return ONT_OK;
}

ont_status ont_depthwise_run_filters(const ont_call *call)
{
    const depthwise_state *s = call->state;
    ont_parallel(s->channels, 16384 / (s->n * s->lines * s->out * s->taps + 1) + 1, filters, (void *)call);
    return ONT_OK;
}
