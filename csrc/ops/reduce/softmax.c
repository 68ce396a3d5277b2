/*
 * Softmax and LogSoftmax over one axis, and their gradients from the saved output.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"
#include "simd/simd.h"

typedef struct softmax_state {
    int64_t outer, n, inner; /* the axis has n entries with stride `inner` */
    bool log;
    const ont_simd_table *simd;
} softmax_state;

/* From opset 13 on, softmax is over one axis; before, over all dims from `axis` on. */
static ont_status softmax_layout(const ont_node *node, const ont_shape *x, softmax_state *s)
{
    bool flattens = !*node->op->domain && node->version < 13;
    int axis;
    if (!x->rank) {
        s->outer = s->n = s->inner = 1;
        return ONT_OK;
    }
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", flattens ? 1 : -1), x->rank, &axis));
    s->outer = ont_shape_count_range(x, 0, axis);
    s->n = flattens ? ont_shape_count_range(x, axis, x->rank) : x->dims[axis];
    s->inner = flattens ? 1 : ont_shape_count_range(x, axis + 1, x->rank);
    return ONT_OK;
}

static ont_status softmax_infer(ont_graph *g, ont_node *node)
{
    softmax_state s;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(softmax_layout(node, &x->shape, &s));
    return ont_infer_same(g, node);
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    softmax_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(softmax_layout(node, &ont_node_in(node, 0)->shape, s));
    s->log = ONT_IS(node, LogSoftmax) || ONT_IS(node, LogSoftmaxGrad);
    s->simd = ont_simd();
    out->state = s;
    return ONT_OK;
}

static const char *accept_rows(const ont_node *node)
{
    softmax_state s;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32) return "dtype";
    return softmax_layout(node, &ont_node_in(node, 0)->shape, &s) == ONT_OK && s.inner == 1 ? NULL
                                                                                            : "axis is not the last";
}

static int64_t row_grain(const softmax_state *s)
{
    return 4096 / (s->n + 1) + 1;
}

/* ---- float32, last axis: contiguous rows ---- */

static void forward_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const softmax_state *s = call->state;
    const float *x = call->in[0];
    float *y = call->out[0];
    for (int64_t i = first; i < last && s->n; i++)
        (s->log ? s->simd->log_softmax : s->simd->softmax)(x + i * s->n, y + i * s->n, s->n);
}

static ont_status forward_simd(const ont_call *call)
{
    const softmax_state *s = call->state;
    ont_parallel(s->outer, row_grain(s), forward_rows, (void *)call);
    return ONT_OK;
}

static void backward_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const softmax_state *s = call->state;
    const float *y = call->in[0], *dy = call->in[1];
    float *dx = call->out[0];
    for (int64_t i = first * s->n; i < last * s->n; i += s->n)
        (s->log ? s->simd->log_softmax_grad : s->simd->softmax_grad)(y + i, dy + i, dx + i, s->n);
}

static ont_status backward_simd(const ont_call *call)
{
    const softmax_state *s = call->state;
    ont_parallel(s->outer, row_grain(s), backward_rows, (void *)call);
    return ONT_OK;
}

/* ---- float32, any other axis: strips of neighbouring columns, row by row ---- */

enum { STRIP = 256, NARROW = 8 };

static const char *accept_columns(const ont_node *node)
{
    softmax_state s;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32) return "dtype";
    if (softmax_layout(node, &ont_node_in(node, 0)->shape, &s) != ONT_OK || !s.n) return "nothing along the axis";
    return s.inner < NARROW ? "few columns lie side by side" : NULL;
}

static void forward_strip(const softmax_state *s, const float *x, float *y, int64_t w)
{
    float row_max[STRIP], sum[STRIP] = {0}, e[STRIP];
    memcpy(row_max, x, (size_t)w * sizeof *row_max);
    for (int64_t k = 1; k < s->n; k++)
        s->simd->binary[ONT_LOOP_Max][ONT_FLOAT32](row_max, 1, x + k * s->inner, 1, row_max, w, NULL);
    for (int64_t k = 0; k < s->n; k++) {
        float *row = y + k * s->inner, *exponentials = s->log ? e : row;
        s->simd->binary[ONT_LOOP_Sub][ONT_FLOAT32](x + k * s->inner, 1, row_max, 1, row, w, NULL);
        s->simd->unary[ONT_LOOP_Exp][ONT_FLOAT32](row, exponentials, w, NULL);
        s->simd->add_to(sum, exponentials, w);
    }
    s->simd->unary[s->log ? ONT_LOOP_Log : ONT_LOOP_Reciprocal][ONT_FLOAT32](sum, sum, w, NULL);
    ont_binary_loop last = s->simd->binary[s->log ? ONT_LOOP_Sub : ONT_LOOP_Mul][ONT_FLOAT32];
    for (int64_t k = 0; k < s->n; k++) last(y + k * s->inner, 1, sum, 1, y + k * s->inner, w, NULL);
}

static void backward_strip(const softmax_state *s, const float *y, const float *dy, float *dx, int64_t w)
{
    float sum[STRIP] = {0}, t[STRIP];
    ont_binary_loop mul = s->simd->binary[ONT_LOOP_Mul][ONT_FLOAT32], less = s->simd->binary[ONT_LOOP_Sub][ONT_FLOAT32];
    for (int64_t k = 0; k < s->n; k++) {
        if (!s->log) mul(dy + k * s->inner, 1, y + k * s->inner, 1, t, w, NULL);
        s->simd->add_to(sum, s->log ? dy + k * s->inner : t, w);
    }
    for (int64_t k = 0; k < s->n; k++) {
        int64_t at = k * s->inner;
        if (s->log) {
            s->simd->unary[ONT_LOOP_Exp][ONT_FLOAT32](y + at, t, w, NULL);
            mul(t, 1, sum, 1, t, w, NULL);
            less(dy + at, 1, t, 1, dx + at, w, NULL);
        } else {
            less(dy + at, 1, sum, 1, t, w, NULL);
            mul(y + at, 1, t, 1, dx + at, w, NULL);
        }
    }
}

/* The first element of a strip, and the number of its columns. */
static int64_t strip_at(const softmax_state *s, int64_t i, int64_t *w)
{
    int64_t strips = (s->inner + STRIP - 1) / STRIP, from = i % strips * STRIP;
    *w = s->inner - from < STRIP ? s->inner - from : STRIP;
    return i / strips * s->n * s->inner + from;
}

static void forward_strips(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    for (int64_t i = first, w; i < last; i++) {
        int64_t at = strip_at(call->state, i, &w);
        forward_strip(call->state, (const float *)call->in[0] + at, (float *)call->out[0] + at, w);
    }
}

static void backward_strips(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    for (int64_t i = first, w; i < last; i++) {
        int64_t at = strip_at(call->state, i, &w);
        backward_strip(call->state, (const float *)call->in[0] + at, (const float *)call->in[1] + at,
                       (float *)call->out[0] + at, w);
    }
}

static void for_strips(const ont_call *call, ont_range_fn body)
{
    const softmax_state *s = call->state;
    int64_t strips = (s->inner + STRIP - 1) / STRIP, w = s->inner < STRIP ? s->inner : STRIP;
    ont_parallel(s->outer * strips, 4096 / (s->n * w) + 1, body, (void *)call);
}

static ont_status forward_columns(const ont_call *call)
{
    for_strips(call, forward_strips);
    return ONT_OK;
}

static ont_status backward_columns(const ont_call *call)
{
    for_strips(call, backward_strips);
    return ONT_OK;
}

/* ---- reference: any axis, float32 and float64 ---- */

/* Columns [first, last) of all (outer, inner); entry k of a column is k * inner elements behind its first. */
#define REFERENCE(suffix, type, exp_, log_) \
    static void forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const softmax_state *s = call->state; \
        int64_t stride = s->inner; \
        for (int64_t c = first; c < last; c++) { \
            int64_t at = c / stride * s->n * stride + c % stride; \
            const type *in = (const type *)call->in[0] + at; \
            type *out = (type *)call->out[0] + at, row_max = in[0], sum = 0; \
            for (int64_t k = 1; k < s->n; k++) \
                row_max = in[k * stride] > row_max || isnan(in[k * stride]) ? in[k * stride] : row_max; \
            for (int64_t k = 0; k < s->n; k++) sum += exp_(in[k * stride] - row_max); \
            for (int64_t k = 0; k < s->n; k++) \
                out[k * stride] = s->log ? in[k * stride] - row_max - log_(sum) \
                                         : exp_(in[k * stride] - row_max) / sum; \
        } \
    } \
    static void backward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const softmax_state *s = call->state; \
        int64_t stride = s->inner; \
        for (int64_t c = first; c < last; c++) { \
            int64_t at = c / stride * s->n * stride + c % stride; \
            const type *y = (const type *)call->in[0] + at, *dy = (const type *)call->in[1] + at; \
            type *dx = (type *)call->out[0] + at, sum = 0; \
            for (int64_t k = 0; k < s->n; k++) sum += dy[k * stride] * (s->log ? 1 : y[k * stride]); \
            for (int64_t k = 0; k < s->n; k++) { \
                int64_t e = k * stride; \
                dx[e] = s->log ? dy[e] - exp_(y[e]) * sum : y[e] * (dy[e] - sum); \
            } \
        } \
    }
REFERENCE(f32, float, expf, logf)
REFERENCE(f64, double, exp, log)

static ont_status reference(const ont_call *call, ont_range_fn f32, ont_range_fn f64)
{
    const softmax_state *s = call->state;
    bool wide = call->node->outputs[0]->dtype == ONT_FLOAT64;
    if (s->n) ont_parallel(s->outer * s->inner, row_grain(s), wide ? f64 : f32, (void *)call);
    return ONT_OK;
}

static ont_status forward_ref(const ont_call *call) { return reference(call, forward_f32, forward_f64); }
static ont_status backward_ref(const ont_call *call) { return reference(call, backward_f32, backward_f64); }

/* ---- gradient: <name>Grad(y, dy), with the axis resolved as in the forward ---- */

static void softmax_grad_as(ont_grad *g, const char *op_type)
{
    ont_builder *b = &g->b;
    softmax_state s;
    const ont_shape *shape = &O(0)->shape;
    if (softmax_layout(g->node, shape, &s) != ONT_OK) return;
    /* As (outer, n, inner) the axis is 1 in every opset. */
    ont_shape flat = ont_shape_of(3, (int64_t[]){s.outer, s.n, s.inner});
    int64_t axis = 1;
    if (s.inner == 1) flat.rank = 2;
    ont_value *operands[] = {ont_build_reshape(b, O(0), &flat), ont_build_reshape(b, GO(0), &flat)};
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, op_type, operands, 2, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", axis);
    GI(0, ont_build_reshape(b, ont_build_done(b, node), shape));
}

static void softmax_grad(ont_grad *g) { softmax_grad_as(g, "SoftmaxGrad"); }
static void log_softmax_grad(ont_grad *g) { softmax_grad_as(g, "LogSoftmaxGrad"); }

static const ont_kernel forward_kernels[] = {
    {.name = "softmax_f32_rows", .accept = accept_rows, .prepare = prepare, .run = forward_simd, .inplace = 1},
    {.name = "softmax_f32_columns", .accept = accept_columns, .prepare = prepare, .run = forward_columns,
     .inplace = 1},
    {.name = "softmax_ref", .accept = ont_accept_float, .prepare = prepare, .run = forward_ref},
};
static const ont_kernel backward_kernels[] = {
    {.name = "softmax_grad_f32_rows", .accept = accept_rows, .prepare = prepare, .run = backward_simd, .inplace = 2},
    {.name = "softmax_grad_f32_columns", .accept = accept_columns, .prepare = prepare, .run = backward_columns,
     .inplace = 2},
    {.name = "softmax_grad_ref", .accept = ont_accept_float, .prepare = prepare, .run = backward_ref},
};

const ont_op ont_op_Softmax = {.domain = "", .name = "Softmax", .since = 1, .min_inputs = 1, .max_inputs = 1,
                               .flags = ONT_OP_MEMORY_BOUND, .attributes = "axis:i", .infer = softmax_infer,
                               .grad = softmax_grad, .rows = ONT_ROWS_NORM,
                               ONT_KERNELS(forward_kernels)};
const ont_op ont_op_LogSoftmax = {.domain = "", .name = "LogSoftmax", .since = 1, .min_inputs = 1, .max_inputs = 1,
                                  .attributes = "axis:i", .infer = softmax_infer, .grad = log_softmax_grad,
                                  .rows = ONT_ROWS_NORM,
                                  ONT_KERNELS(forward_kernels)};
const ont_op ont_op_SoftmaxGrad = {.domain = ONT_DOMAIN, .name = "SoftmaxGrad", .since = 1, .min_inputs = 2,
                                   .max_inputs = 2, .attributes = "axis:i",
                                   .infer = softmax_infer,
                                   ONT_KERNELS(backward_kernels)};
const ont_op ont_op_LogSoftmaxGrad = {.domain = ONT_DOMAIN, .name = "LogSoftmaxGrad", .since = 1, .min_inputs = 2,
                                      .max_inputs = 2, .attributes = "axis:i",
                                      .infer = softmax_infer,
                                      ONT_KERNELS(backward_kernels)};
