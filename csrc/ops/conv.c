/*
 * Convolution over one to three spatial dims as products with unrolled windows: per image and group the windows become
 * columns (channels * kernel, outputs), and forward, input gradient and weight gradient are one GEMM each.
 */
#include <inttypes.h>
#include <string.h>

#include "base/parallel.h"
#include "device/gemm.h"
#include "ops/window.h"

typedef struct conv_state {
    ont_window w;
    int64_t n, c, m, groups;  /* images, input channels, output channels */
    size_t size;
    ont_gemm gemm;
    const ont_gemm_provider *provider;
    bool pointwise;           /* windows of one cell: the image is its own columns */
} conv_state;

static ont_status geometry(const ont_node *node, const ont_shape *x, const ont_shape *weight, conv_state *s)
{
    if (weight->rank != x->rank || x->rank < 3) return ont_fail(ONT_EINVAL, "weight has rank %d, input %d", weight->rank, x->rank);
    s->groups = ont_attr_int(node, "group", 1);
    s->n = x->dims[0];
    s->c = x->dims[1];
    s->m = weight->dims[0];
    if (s->groups < 1 || s->c != weight->dims[1] * s->groups || s->m % s->groups)
        return ont_fail(ONT_EINVAL, "%" PRId64 " channels, weight for %" PRId64 " in %" PRId64 " groups", s->c, weight->dims[1], s->groups);
    int64_t declared[ONT_WINDOW_RANK];
    int n_declared;
    ONT_TRY(ont_const_ints(node, -1, "kernel_shape", declared, ONT_WINDOW_RANK, &n_declared));
    for (int d = 0; d < n_declared; d++)
        if (d + 2 >= weight->rank || declared[d] != weight->dims[d + 2]) return ont_fail(ONT_EINVAL, "kernel_shape is not the weight's");
    ONT_TRY(ont_window_init(node, x, weight->dims + 2, &s->w));
    s->pointwise = s->w.kernel_count == 1 && s->w.in_count == s->w.out_count;
    for (int d = 0; d < s->w.rank; d++) s->pointwise &= s->w.begin[d] == 0 && s->w.stride[d] == 1;
    return ONT_OK;
}

static ont_status conv_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *weight;
    conv_state s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &weight));
    ONT_TRY(geometry(node, &x->shape, &weight->shape, &s));
    const ont_value *bias = ont_node_in(node, 2);
    if (weight->dtype != x->dtype || (bias && (bias->dtype != x->dtype || ont_shape_count(&bias->shape) != s.m)))
        return ont_fail(ONT_EINVAL, "weight or bias does not fit the input");
    ont_shape shape = {.rank = x->shape.rank, .dims = {s.n, s.m}};
    for (int d = 0; d < s.w.rank; d++) shape.dims[d + 2] = s.w.out[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static const char *accept_float(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "dtype";
}

/* ---- columns ---- */

/* Cell of the input that output position `o` reads through kernel position `k`; -1 in the padding. */
static int64_t cell(const ont_window *w, const int64_t *o, const int64_t *k)
{
    int64_t at = 0;
    for (int d = 0; d < w->rank; d++) {
        int64_t i = o[d] * w->stride[d] - w->begin[d] + k[d] * w->dilation[d];
        if (i < 0 || i >= w->in[d]) return -1;
        at = at * w->in[d] + i;
    }
    return at;
}

static void unflatten(int64_t index, const int64_t *dims, int rank, int64_t *out)
{
    for (int d = rank - 1; d >= 0; d--) {
        out[d] = index % dims[d];
        index /= dims[d];
    }
}

typedef struct columns_job {
    const conv_state *s;
    char *image; /* (channels, in) */
    char *columns; /* (channels * kernel, out) */
} columns_job;

/* Rows [first, last) of the columns. Along the last dim a window's cells are `stride` apart. */
#define UNROLL(suffix, type) \
    static void unroll_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const columns_job *j = context; \
        const ont_window *w = &j->s->w; \
        int inner = w->rank - 1; \
        int64_t k[ONT_WINDOW_RANK], o[ONT_WINDOW_RANK] = {0}, step = w->stride[inner], width = w->out[inner]; \
        for (int64_t row = first; row < last; row++) { \
            const type *image = (const type *)j->image + row / w->kernel_count * w->in_count; \
            type *out = (type *)j->columns + row * w->out_count; \
            unflatten(row % w->kernel_count, w->kernel, w->rank, k); \
            for (int64_t line = 0; line < w->out_count / width; line++, out += width) { \
                unflatten(line, w->out, inner, o); \
                for (int64_t i = 0; i < width; i++) { \
                    o[inner] = i; \
                    int64_t at = cell(w, o, k); \
                    if (at < 0) { \
                        out[i] = 0; \
                        continue; \
                    } \
                    /* the rest of the line up to the padding */ \
                    int64_t column = i * step - w->begin[inner] + k[inner] * w->dilation[inner]; \
                    int64_t run = (w->in[inner] - 1 - column) / step + 1; \
                    if (run > width - i) run = width - i; \
                    for (int64_t r = 0; r < run; r++) out[i + r] = image[at + r * step]; \
                    i += run - 1; \
                } \
            } \
        } \
    } \
    /* Channels [first, last): the columns' cells are added to where they came from. */ \
    static void roll_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const columns_job *j = context; \
        const ont_window *w = &j->s->w; \
        int64_t k[ONT_WINDOW_RANK], o[ONT_WINDOW_RANK]; \
        for (int64_t c = first; c < last; c++) { \
            type *image = (type *)j->image + c * w->in_count; \
            memset(image, 0, (size_t)w->in_count * sizeof *image); \
            for (int64_t p = 0; p < w->kernel_count; p++) { \
                const type *from = (const type *)j->columns + (c * w->kernel_count + p) * w->out_count; \
                unflatten(p, w->kernel, w->rank, k); \
                for (int64_t i = 0; i < w->out_count; i++) { \
                    unflatten(i, w->out, w->rank, o); \
                    int64_t at = cell(w, o, k); \
                    if (at >= 0) image[at] += from[i]; \
                } \
            } \
        } \
    }
UNROLL(f32, float)
UNROLL(f64, double)

static const void *unrolled(const conv_state *s, const char *image, void *work)
{
    if (s->pointwise) return image;
    columns_job job = {s, (char *)(uintptr_t)image, work};
    int64_t rows = s->c / s->groups * s->w.kernel_count;
    ont_parallel(rows, 16384 / s->w.out_count + 1, s->size == 4 ? unroll_f32 : unroll_f64, &job);
    return work;
}

/* ---- kernels ---- */

typedef enum conv_part { FORWARD, INPUT_GRAD, WEIGHT_GRAD } conv_part;

static ont_status prepare_part(const ont_node *node, const ont_shape *x, const ont_shape *weight, conv_part part, bool plain,
                               ont_arena *arena, ont_prepared *out)
{
    conv_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(geometry(node, x, weight, s));
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    int64_t rows = s->c / s->groups * s->w.kernel_count, m = s->m / s->groups, o = s->w.out_count;
    s->size = ont_dtype_size(dtype);
    if (part == FORWARD)        /* (m, rows) (rows, o) */
        s->gemm = (ont_gemm){dtype, false, false, m, o, rows, rows, o, o, 1, 0};
    else if (part == INPUT_GRAD) /* (m, rows)' (m, o) */
        s->gemm = (ont_gemm){dtype, true, false, rows, o, m, rows, o, o, 1, 0};
    else                        /* (m, o) (rows, o)' */
        s->gemm = (ont_gemm){dtype, false, true, m, rows, o, o, o, rows, 1, 0};
    bool empty = !(m && o && rows);
    s->provider = plain || empty ? ont_gemm_plain() : ont_gemm_choose(&s->gemm);
    out->state = s;
    out->work_bytes = s->pointwise ? 0 : (size_t)(rows * o) * s->size;
    return ONT_OK;
}

/* Image n, channels of group g; of the input or of the output. */
static size_t input_at(const conv_state *s, int64_t n, int64_t g)
{
    return (size_t)((n * s->c + g * (s->c / s->groups)) * s->w.in_count) * s->size;
}

static size_t output_at(const conv_state *s, int64_t n, int64_t g)
{
    return (size_t)((n * s->m + g * (s->m / s->groups)) * s->w.out_count) * s->size;
}

static size_t weight_at(const conv_state *s, int64_t g)
{
    return (size_t)(g * (s->m / s->groups) * (s->c / s->groups) * s->w.kernel_count) * s->size;
}

static void fill_bias(const conv_state *s, const void *bias, char *y)
{
    for (int64_t m = 0; m < s->m; m++)
        for (int64_t o = 0; o < s->w.out_count; o++)
            memcpy(y + (size_t)(m * s->w.out_count + o) * s->size, (const char *)bias + (size_t)m * s->size, s->size);
}

static ont_status forward_run(const ont_call *call)
{
    const conv_state *s = call->state;
    const void *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    ont_gemm gemm = s->gemm;
    gemm.beta = bias ? 1 : 0;
    for (int64_t n = 0; n < s->n; n++) {
        if (bias) fill_bias(s, bias, (char *)call->out[0] + output_at(s, n, 0));
        for (int64_t g = 0; g < s->groups; g++) {
            const void *columns = unrolled(s, (const char *)call->in[0] + input_at(s, n, g), call->work);
            s->provider->run(&gemm, (const char *)call->in[1] + weight_at(s, g), columns,
                             (char *)call->out[0] + output_at(s, n, g));
        }
    }
    return ONT_OK;
}

/* (dy, weight) -> dx */
static ont_status input_grad_run(const ont_call *call)
{
    const conv_state *s = call->state;
    for (int64_t n = 0; n < s->n; n++)
        for (int64_t g = 0; g < s->groups; g++) {
            char *dx = (char *)call->out[0] + input_at(s, n, g);
            void *columns = s->pointwise ? dx : call->work;
            s->provider->run(&s->gemm, (const char *)call->in[1] + weight_at(s, g),
                             (const char *)call->in[0] + output_at(s, n, g), columns);
            columns_job job = {s, dx, columns};
            if (!s->pointwise) ont_parallel(s->c / s->groups, 1, s->size == 4 ? roll_f32 : roll_f64, &job);
        }
    return ONT_OK;
}

/* (dy, x) -> dweight: images are added one after the other */
static ont_status weight_grad_run(const ont_call *call)
{
    const conv_state *s = call->state;
    const ont_value *dw = call->node->outputs[0];
    ont_gemm gemm = s->gemm;
    gemm.beta = 1;
    memset(call->out[0], 0, (size_t)ont_shape_count(&dw->shape) * s->size);
    for (int64_t n = 0; n < s->n; n++)
        for (int64_t g = 0; g < s->groups; g++) {
            const void *columns = unrolled(s, (const char *)call->in[1] + input_at(s, n, g), call->work);
            s->provider->run(&gemm, (const char *)call->in[0] + output_at(s, n, g), columns,
                             (char *)call->out[0] + weight_at(s, g));
        }
    return ONT_OK;
}

#define PREPARE(name, x, weight, part, plain) \
    static ont_status name(const ont_node *node, ont_arena *arena, ont_prepared *out) \
    { \
        return prepare_part(node, &(x)->shape, &(weight)->shape, part, plain, arena, out); \
    }
PREPARE(forward_prepare, ont_node_in(node, 0), ont_node_in(node, 1), FORWARD, false)
PREPARE(forward_prepare_ref, ont_node_in(node, 0), ont_node_in(node, 1), FORWARD, true)
PREPARE(input_prepare, node->outputs[0], ont_node_in(node, 1), INPUT_GRAD, false)
PREPARE(input_prepare_ref, node->outputs[0], ont_node_in(node, 1), INPUT_GRAD, true)
PREPARE(weight_prepare, ont_node_in(node, 1), node->outputs[0], WEIGHT_GRAD, false)
PREPARE(weight_prepare_ref, ont_node_in(node, 1), node->outputs[0], WEIGHT_GRAD, true)

/* ---- gradient ---- */

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    size_t n;
    const int64_t *dims = ont_attr_ints(node, "shape", &n);
    ont_shape shape = ont_shape_of((int)n, dims);
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

static ont_value *grad_node(ont_grad *g, const char *op_type, ont_value *other, const ont_shape *shape)
{
    ont_builder *b = &g->b;
    ont_value *dy = GO(0);
    if (b->status != ONT_OK) return NULL;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, op_type, (ont_value *[]){dy, other}, 2, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, node, "shape", shape->dims, (size_t)shape->rank);
    return ont_build_done(b, node);
}

static void conv_grad(ont_grad *g)
{
    if (WANTS(0)) GI(0, grad_node(g, "ConvGradInput", I(1), &I(0)->shape));
    if (WANTS(1)) GI(1, grad_node(g, "ConvGradWeight", I(0), &I(1)->shape));
    if (!WANTS(2)) return;
    int64_t axes[ONT_MAX_RANK] = {0};
    size_t n = 1;
    for (int d = 2; d < I(0)->shape.rank; d++) axes[n++] = d;
    GI(2, ont_build_reduce(&g->b, "ReduceSum", GO(0), axes, n, false));
}

static const ont_kernel forward_kernels[] = {
    {.name = "conv_gemm", .accept = accept_float, .prepare = forward_prepare, .run = forward_run},
    {.name = "conv_ref", .accept = accept_float, .prepare = forward_prepare_ref, .run = forward_run},
};
static const ont_kernel input_kernels[] = {
    {.name = "conv_grad_input_gemm", .accept = accept_float, .prepare = input_prepare, .run = input_grad_run},
    {.name = "conv_grad_input_ref", .accept = accept_float, .prepare = input_prepare_ref, .run = input_grad_run},
};
static const ont_kernel weight_kernels[] = {
    {.name = "conv_grad_weight_gemm", .accept = accept_float, .prepare = weight_prepare, .run = weight_grad_run},
    {.name = "conv_grad_weight_ref", .accept = accept_float, .prepare = weight_prepare_ref, .run = weight_grad_run},
};

const ont_op ont_op_Conv = {.domain = "", .name = "Conv", .since = 1, .min_inputs = 2, .max_inputs = 3,
                            .infer = conv_infer, .grad = conv_grad, ONT_KERNELS(forward_kernels)};
const ont_op ont_op_ConvGradInput = {.domain = ONT_DOMAIN, .name = "ConvGradInput", .since = 1, .min_inputs = 2,
                                     .max_inputs = 2, .infer = grad_infer, ONT_KERNELS(input_kernels)};
const ont_op ont_op_ConvGradWeight = {.domain = ONT_DOMAIN, .name = "ConvGradWeight", .since = 1, .min_inputs = 2,
                                      .max_inputs = 2, .infer = grad_infer, ONT_KERNELS(weight_kernels)};
