/*
 * Depthwise convolution of stride 1, of rows (Conv1d) and volumes (Conv3d). A row of the result is a sum of shifted
 * input rows, one for each tap; so is a row of the input's gradient, with the filter reversed. The filter's gradient is
 * a dot product of two rows for each tap. Libraries first reorder rows into blocks of channels, which takes longer than
 * the convolution, and have no fast loop for volumes.
 */
#include "ops/conv/depthwise.h"

#include <string.h>

#include "base/parallel.h"
#include "ops/conv/conv_onednn.h"
#include "simd/simd.h"

enum { MAX_TAPS = 128 };

typedef struct depthwise_state {
    int64_t n, channels, taps;
    int64_t kernel[3], step[3], pad[3]; /* step: dilation; the filter begins `pad` cells before the output cell */
    int64_t in[3], out[3];              /* dims of the plane that is read, and of the one that is written */
    bool reversed;                      /* the gradient of the input */
} depthwise_state;

const char *ont_depthwise_accept(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32) return "dtype";
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    if (c.groups != c.c || c.groups != c.o) return "not depthwise";
    bool rows = true;
    for (int d = 0; d < 3; d++) {
        if (c.stride[d] != 1) return "strides";
        if (!c.kernel[d] || !c.in[d] || !c.out[d]) return "no elements";
        rows &= d == 2 || (c.kernel[d] == 1 && c.in[d] == c.out[d] && !c.pad[d]);
    }
    if (!rows && c.spatial < 3) return "two spatial dims";
    return (double)c.kernel[0] * (double)c.kernel[1] * (double)c.kernel[2] > MAX_TAPS ? "too many taps" : NULL;
}

ont_status ont_depthwise_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_conv c;
    ont_conv_kind kind;
    depthwise_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_conv_read(node, &c, &kind));
    *s = (depthwise_state){.n = c.n, .channels = c.c, .reversed = kind == ONT_CONV_GRAD_INPUT,
                           .taps = c.kernel[0] * c.kernel[1] * c.kernel[2]};
    for (int d = 0; d < 3; d++) {
        s->kernel[d] = c.kernel[d], s->step[d] = c.dilation[d];
        s->pad[d] = s->reversed ? (c.kernel[d] - 1) * c.dilation[d] - c.pad[d] : c.pad[d];
        s->in[d] = s->reversed ? c.out[d] : c.in[d];
        s->out[d] = s->reversed ? c.in[d] : c.out[d];
    }
    out->state = s;
    return ONT_OK;
}

static int64_t clamp(int64_t v, int64_t low, int64_t high)
{
    return v < low ? low : v > high ? high : v;
}

typedef struct depthwise_line {
    float w[MAX_TAPS];       /* of the taps whose row lies inside the plane */
    int64_t at[MAX_TAPS];    /* offset in the plane of the element that the first output reads */
    int64_t shift[MAX_TAPS]; /* the same in its row */
    int64_t taps;
} depthwise_line;

/* The taps that contribute to line `line` of the written plane. */
static void read_line(const depthwise_state *s, const float *w, int64_t line, depthwise_line *l)
{
    int64_t first = s->out[0] == 1 ? 0 : line / s->out[1], second = s->out[0] == 1 ? line : line % s->out[1];
    l->taps = 0;
    for (int64_t a = 0; a < s->kernel[0]; a++) {
        int64_t z = first + a * s->step[0] - s->pad[0];
        for (int64_t b = 0; b < s->kernel[1] && z >= 0 && z < s->in[0]; b++) {
            int64_t y = second + b * s->step[1] - s->pad[1];
            for (int64_t c = 0; c < s->kernel[2] && y >= 0 && y < s->in[1]; c++) {
                l->shift[l->taps] = c * s->step[2] - s->pad[2];
                l->at[l->taps] = (z * s->in[1] + y) * s->in[2] + l->shift[l->taps];
                l->w[l->taps++] = w[(a * s->kernel[1] + b) * s->kernel[2] + c];
            }
        }
    }
}

/* Elements [first, last) of a line, where the filter reaches beyond the row that is read. */
static void edge(const depthwise_state *s, const depthwise_line *l, const float *x, float *y, int64_t first,
                 int64_t last)
{
    for (int64_t i = first; i < last; i++)
        for (int64_t k = 0; k < l->taps; k++)
            if (i + l->shift[k] >= 0 && i + l->shift[k] < s->in[2]) y[i] += l->w[k] * x[l->at[k] + i];
}

/* Planes [first, last) of the result. */
static void planes(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const depthwise_state *s = call->state;
    const float *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    int64_t lines = s->out[0] * s->out[1], cells = s->in[0] * s->in[1] * s->in[2];
    int64_t low = clamp(s->pad[2], 0, s->out[2]);
    int64_t high = clamp(s->in[2] + s->pad[2] - (s->kernel[2] - 1) * s->step[2], low, s->out[2]);
    for (int64_t plane = first; plane < last; plane++) {
        int64_t channel = plane % s->channels;
        const float *filter = (const float *)call->in[1] + channel * s->taps;
        const float *x = (const float *)call->in[0] + plane * cells;
        float w[MAX_TAPS];
        for (int64_t k = 0; k < s->taps; k++) w[k] = filter[s->reversed ? s->taps - 1 - k : k];
        for (int64_t line = 0; line < lines; line++) {
            float *y = (float *)call->out[0] + (plane * lines + line) * s->out[2];
            depthwise_line l;
            read_line(s, w, line, &l);
            for (int64_t i = 0; i < s->out[2]; i++) y[i] = bias ? bias[channel] : 0;
            edge(s, &l, x, y, 0, low);
            if (high > low) ont_simd()->add_taps(y + low, x + low, l.w, l.at, l.taps, high - low);
            edge(s, &l, x, y, high, s->out[2]);
        }
    }
}

/* Filters [first, last) of the gradient: (dy, x) -> dw */
static void filters(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const depthwise_state *s = call->state;
    int64_t lines = s->out[0] * s->out[1], cells = s->in[0] * s->in[1] * s->in[2];
    float index[MAX_TAPS]; /* in place of weights: read_line() then puts the index of each tap in l.w */
    for (int64_t k = 0; k < s->taps; k++) index[k] = (float)k;
    for (int64_t c = first; c < last; c++) {
        double sums[MAX_TAPS] = {0};
        for (int64_t plane = c; plane < s->n * s->channels; plane += s->channels)
            for (int64_t line = 0; line < lines; line++) {
                const float *dy = (const float *)call->in[0] + (plane * lines + line) * s->out[2];
                const float *x = (const float *)call->in[1] + plane * cells;
                depthwise_line l;
                read_line(s, index, line, &l);
                for (int64_t k = 0; k < l.taps; k++) {
                    int64_t low = clamp(-l.shift[k], 0, s->out[2]);
                    int64_t high = clamp(s->in[2] - l.shift[k], low, s->out[2]);
                    if (high > low)
                        sums[(int)l.w[k]] += (double)ont_simd()->dot(dy + low, x + l.at[k] + low, high - low);
                }
            }
        for (int64_t k = 0; k < s->taps; k++) ((float *)call->out[0])[c * s->taps + k] = (float)sums[k];
    }
}

/* Multiplications of a plane. */
static int64_t work_of(const depthwise_state *s)
{
    return s->out[0] * s->out[1] * s->out[2] * s->taps;
}

ont_status ont_depthwise_run(const ont_call *call)
{
    const depthwise_state *s = call->state;
    ont_parallel(s->n * s->channels, 16384 / (work_of(s) + 1) + 1, planes, (void *)call);
    return ONT_OK;
}

ont_status ont_depthwise_run_filters(const ont_call *call)
{
    const depthwise_state *s = call->state;
    ont_parallel(s->channels, 16384 / (s->n * work_of(s) + 1) + 1, filters, (void *)call);
    return ONT_OK;
}
