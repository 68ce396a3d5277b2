/*
 * Convolution over one to three spatial dims by im2col and GEMM: for each image and group the windows are copied to
 * columns (channels * kernel, outputs); forward, input gradient and weight gradient are then one GEMM each.
 */
#include <inttypes.h>
#include <string.h>

#include "base/parallel.h"
#include "device/gemm.h"
#include "ops/conv/conv_onednn.h"
#include "ops/conv/pointwise.h"
#include "ops/conv/depthwise.h"
#include "ops/support/window.h"
#include "ops/conv/winograd.h"

typedef struct conv_state {
    ont_window w;
    int64_t n, c, m, groups;  /* images, input channels, output channels, groups */
    size_t size;
    ont_gemm gemm;
    const ont_gemm_backend *backend;
    bool pointwise;           /* 1 x 1 kernel: the image is used as the columns */
} conv_state;

static ont_status geometry(const ont_node *node, const ont_shape *x, const ont_shape *weight, conv_state *s)
{
    if (weight->rank != x->rank || x->rank < 3)
        return ont_fail(ONT_EINVAL, "weight has rank %d, input %d", weight->rank, x->rank);
    s->groups = ont_attr_int(node, "group", 1);
    s->n = x->dims[0];
    s->c = x->dims[1];
    s->m = weight->dims[0];
    if (s->groups < 1 || s->c != weight->dims[1] * s->groups || s->m % s->groups)
        return ont_fail(ONT_EINVAL, "%" PRId64 " channels, weight for %" PRId64 " in %" PRId64 " groups", s->c,
                        weight->dims[1], s->groups);
    int64_t declared[ONT_WINDOW_RANK];
    int n_declared;
    ONT_TRY(ont_const_ints(node, -1, "kernel_shape", declared, ONT_WINDOW_RANK, &n_declared));
    for (int d = 0; d < n_declared; d++)
        if (d + 2 >= weight->rank || declared[d] != weight->dims[d + 2])
            return ont_fail(ONT_EINVAL, "kernel_shape differs from the shape of the weight");
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
        return ont_fail(ONT_EINVAL, "weight or bias does not fit the input: dtype or number of channels differs");
    ont_shape shape = {.rank = x->shape.rank, .dims = {s.n, s.m}};
    for (int d = 0; d < s.w.rank; d++) shape.dims[d + 2] = s.w.out[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

/* ---- im2col and col2im ---- */

/* Index of the input cell that output position `o` reads at kernel position `k`; -1 in the padding. */
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

/* im2col: rows [first, last) of the columns. Along the last dim, adjacent outputs read cells `stride` apart. */
#define IM2COL(suffix, type) \
    static void im2col_##suffix(void *context, int64_t first, int64_t last) \
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
                    /* copy the rest of the line, up to the padding */ \
                    int64_t column = i * step - w->begin[inner] + k[inner] * w->dilation[inner]; \
                    int64_t run = (w->in[inner] - 1 - column) / step + 1; \
                    if (run > width - i) run = width - i; \
                    for (int64_t r = 0; r < run; r++) out[i + r] = image[at + r * step]; \
                    i += run - 1; \
                } \
            } \
        } \
    } \
    /* col2im: adds the columns of channels [first, last) to the image cells that they came from. */ \
    static void col2im_##suffix(void *context, int64_t first, int64_t last) \
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
IM2COL(f32, float)
IM2COL(f64, double)

static const void *columns_of(const conv_state *s, const char *image, void *work)
{
    if (s->pointwise) return image;
    columns_job job = {s, (char *)(uintptr_t)image, work};
    int64_t rows = s->c / s->groups * s->w.kernel_count;
    ont_parallel(rows, 16384 / s->w.out_count + 1, s->size == 4 ? im2col_f32 : im2col_f64, &job);
    return work;
}

/* ---- kernels ---- */

typedef enum conv_part { FORWARD, INPUT_GRAD, WEIGHT_GRAD } conv_part;

static ont_status prepare_part(const ont_node *node, const ont_shape *x, const ont_shape *weight, conv_part part,
                               bool reference, ont_arena *arena, ont_prepared *out)
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
    s->backend = reference || empty ? ont_gemm_reference() : ont_gemm_choose(&s->gemm);
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

/* Each output channel's plane begins as its bias, to which the GEMM adds. */
#define FILL_BIAS(suffix, type) \
    static void fill_bias_##suffix(const conv_state *s, const type *bias, type *y) \
    { \
        for (int64_t m = 0; m < s->m; m++, y += s->w.out_count) \
            for (int64_t o = 0; o < s->w.out_count; o++) y[o] = bias[m]; \
    }
FILL_BIAS(f32, float)
FILL_BIAS(f64, double)

static ont_status forward_run(const ont_call *call)
{
    const conv_state *s = call->state;
    const void *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    ont_gemm gemm = s->gemm;
    gemm.beta = bias ? 1 : 0;
    for (int64_t n = 0; n < s->n; n++) {
        void *y = (char *)call->out[0] + output_at(s, n, 0);
        if (bias && s->size == sizeof(float)) fill_bias_f32(s, bias, y);
        if (bias && s->size == sizeof(double)) fill_bias_f64(s, bias, y);
        for (int64_t g = 0; g < s->groups; g++) {
            const void *columns = columns_of(s, (const char *)call->in[0] + input_at(s, n, g), call->work);
            s->backend->run(&gemm, (const char *)call->in[1] + weight_at(s, g), columns,
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
            s->backend->run(&s->gemm, (const char *)call->in[1] + weight_at(s, g),
                             (const char *)call->in[0] + output_at(s, n, g), columns);
            columns_job job = {s, dx, columns};
            if (!s->pointwise) ont_parallel(s->c / s->groups, 1, s->size == 4 ? col2im_f32 : col2im_f64, &job);
        }
    return ONT_OK;
}

/* (dy, x) -> dweight: the gradients of the images are summed in order */
static ont_status weight_grad_run(const ont_call *call)
{
    const conv_state *s = call->state;
    const ont_value *dw = call->node->outputs[0];
    ont_gemm gemm = s->gemm;
    gemm.beta = 1;
    memset(call->out[0], 0, (size_t)ont_shape_count(&dw->shape) * s->size);
    for (int64_t n = 0; n < s->n; n++)
        for (int64_t g = 0; g < s->groups; g++) {
            const void *columns = columns_of(s, (const char *)call->in[1] + input_at(s, n, g), call->work);
            s->backend->run(&gemm, (const char *)call->in[0] + output_at(s, n, g), columns,
                             (char *)call->out[0] + weight_at(s, g));
        }
    return ONT_OK;
}

#define PREPARE(name, x, weight, part, reference) \
    static ont_status name(const ont_node *node, ont_arena *arena, ont_prepared *out) \
    { \
        return prepare_part(node, &(x)->shape, &(weight)->shape, part, reference, arena, out); \
    }
PREPARE(forward_prepare, ont_node_in(node, 0), ont_node_in(node, 1), FORWARD, false)
PREPARE(forward_prepare_ref, ont_node_in(node, 0), ont_node_in(node, 1), FORWARD, true)
PREPARE(input_prepare, node->outputs[0], ont_node_in(node, 1), INPUT_GRAD, false)
PREPARE(input_prepare_ref, node->outputs[0], ont_node_in(node, 1), INPUT_GRAD, true)
PREPARE(weight_prepare, ont_node_in(node, 1), node->outputs[0], WEIGHT_GRAD, false)
PREPARE(weight_prepare_ref, ont_node_in(node, 1), node->outputs[0], WEIGHT_GRAD, true)

/* ---- gradient ---- */

static ont_value *grad_node(ont_grad *g, const char *op_type, ont_value *other, const ont_shape *shape)
{
    ont_builder *b = &g->b;
    ont_value *dy = GO(0);
    if (b->status != ONT_OK) return NULL;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, op_type, (ont_value *[]){dy, other}, 2, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_ints(b->graph, node, "shape", shape->dims, (size_t)shape->rank);
    return ont_build_done(b, node);
}

/* Reduces over the cells of each plane, then over images: two dense reductions instead of one over separate dims. */
static void bias_grad(ont_grad *g)
{
    int64_t axes[ONT_WINDOW_RANK] = {2, 3, 4}, images = 0;
    if (!WANTS(2)) return;
    ont_value *planes = ont_build_reduce(&g->b, "ReduceSum", GO(0), axes, (size_t)I(0)->shape.rank - 2, false);
    GI(2, ont_build_reduce(&g->b, "ReduceSum", planes, &images, 1, false));
}

static void conv_grad(ont_grad *g)
{
    if (WANTS(0)) GI(0, grad_node(g, "ConvGradInput", I(1), &I(0)->shape));
    if (WANTS(1)) GI(1, grad_node(g, "ConvGradWeight", I(0), &I(1)->shape));
    bias_grad(g);
}

static const ont_kernel forward_kernels[] = {
    ONT_CONV_DEPTHWISE("conv_f32_depthwise", ont_depthwise_run),
    ONT_CONV_WINOGRAD("conv_f32_winograd"),
    ONT_CONV_ONEDNN("conv_f32_onednn", ont_conv_onednn_accept),
    ONT_CONV_POINTWISE("conv_bf16_pointwise"),
    ONT_CONV_ONEDNN("conv_bf16_onednn", ont_conv_onednn_accept_bf16),
    {.name = "conv_gemm", .accept = ont_accept_float, .prepare = forward_prepare, .run = forward_run},
    {.name = "conv_ref", .accept = ont_accept_float, .prepare = forward_prepare_ref, .run = forward_run},
};
static const ont_kernel input_kernels[] = {
    ONT_CONV_DEPTHWISE("conv_grad_input_f32_depthwise", ont_depthwise_run),
    ONT_CONV_WINOGRAD("conv_grad_input_f32_winograd"),
    ONT_CONV_ONEDNN("conv_grad_input_f32_onednn", ont_conv_onednn_accept),
    ONT_CONV_POINTWISE("conv_grad_input_bf16_pointwise"),
    ONT_CONV_ONEDNN("conv_grad_input_bf16_onednn", ont_conv_onednn_accept_bf16),
    {.name = "conv_grad_input_gemm", .accept = ont_accept_float, .prepare = input_prepare, .run = input_grad_run},
    {.name = "conv_grad_input_ref", .accept = ont_accept_float, .prepare = input_prepare_ref, .run = input_grad_run},
};
static const ont_kernel weight_kernels[] = {
    ONT_CONV_DEPTHWISE("conv_grad_weight_f32_depthwise", ont_depthwise_run_filters),
    ONT_CONV_DEPTHWISE_WEIGHT("conv_grad_weight_f32_depthwise_images"),
    ONT_CONV_WINOGRAD_GRAD("conv_grad_weight_f32_winograd"),
    ONT_CONV_ONEDNN("conv_grad_weight_f32_onednn", ont_conv_onednn_accept),
    ONT_CONV_POINTWISE("conv_grad_weight_bf16_pointwise"),
    ONT_CONV_ONEDNN("conv_grad_weight_bf16_onednn", ont_conv_onednn_accept_bf16),
    {.name = "conv_grad_weight_gemm", .accept = ont_accept_float, .prepare = weight_prepare, .run = weight_grad_run},
    {.name = "conv_grad_weight_ref", .accept = ont_accept_float, .prepare = weight_prepare_ref, .run = weight_grad_run},
};

#define CONV_ATTRIBUTES "auto_pad:s dilations:I group:i kernel_shape:I pads:I strides:I"

const ont_op ont_op_Conv = {.domain = "", .name = "Conv", .since = 1, .min_inputs = 2, .max_inputs = 3,
                            .attributes = CONV_ATTRIBUTES, .infer = conv_infer, .grad = conv_grad,
                            .cost = ONT_COST_CONV, ONT_KERNELS(forward_kernels)};
const ont_op ont_op_ConvGradInput = {.domain = ONT_DOMAIN, .name = "ConvGradInput", .since = 1, .min_inputs = 2,
                                     .max_inputs = 2, .attributes = CONV_ATTRIBUTES " shape:I",
                                     .infer = ont_infer_shape_attr,
                                     .cost = ONT_COST_CONV, ONT_KERNELS(input_kernels)};
const ont_op ont_op_ConvGradWeight = {.domain = ONT_DOMAIN, .name = "ConvGradWeight", .since = 1, .min_inputs = 2,
                                      .max_inputs = 2, .attributes = CONV_ATTRIBUTES " shape:I",
                                      .infer = ont_infer_shape_attr,
                                      .cost = ONT_COST_CONV, ONT_KERNELS(weight_kernels)};

/* ---- ConvTranspose: the input gradient of a convolution as an operator, (y, weight, bias) -> x ---- */

/* Sizes of the result; the convolution back from it gives the input's sizes again. */
static ont_status transpose_shape(const ont_node *node, const ont_value *y, const ont_value *weight, ont_shape *shape)
{
    int rank = y->shape.rank - 2, n;
    int64_t strides[ONT_WINDOW_RANK], dilations[ONT_WINDOW_RANK], extra[ONT_WINDOW_RANK], pads[2 * ONT_WINDOW_RANK];
    *shape = (ont_shape){.rank = rank + 2, .dims = {y->shape.dims[0]}};
    struct {
        const char *name;
        int64_t *values, otherwise, least;
        int count;
    } lists[] = {{"strides", strides, 1, 1, rank}, {"dilations", dilations, 1, 1, rank},
                 {"output_padding", extra, 0, 0, rank},
                 {"pads", pads, 0, 0, 2 * rank}};
    for (size_t k = 0; k < sizeof lists / sizeof *lists; k++) {
        ONT_TRY(ont_const_ints(node, -1, lists[k].name, lists[k].values, lists[k].count, &n));
        if (n >= 0 && n != lists[k].count)
            return ont_fail(ONT_EINVAL, "%s has %d entries, expected %d", lists[k].name, n, lists[k].count);
        for (int i = 0; i < lists[k].count; i++) {
            int64_t *v = &lists[k].values[i];
            if (n < 0) *v = lists[k].otherwise;
            if (*v < lists[k].least || *v > INT32_MAX)
                return ont_fail(ONT_EINVAL, "%s[%d] is %" PRId64, lists[k].name, i, *v);
        }
    }
    for (int d = 0; d < rank; d++) {
        int64_t outputs = y->shape.dims[d + 2], kernel = weight->shape.dims[d + 2];
        if (outputs > INT32_MAX || kernel > INT32_MAX)
            return ont_fail(ONT_EUNSUPPORTED, "spatial dim %d is too large", d);
        if (extra[d] >= strides[d])
            return ont_fail(ONT_EUNSUPPORTED, "output_padding[%d] is %" PRId64 ", it must be less than the stride", d,
                            extra[d]);
        int64_t size = (outputs - 1) * strides[d] + extra[d] + (kernel - 1) * dilations[d] + 1 - pads[d] -
                       pads[rank + d];
        if (outputs < 1 || kernel < 1 || size < 1)
            return ont_fail(ONT_EINVAL, "the result has %" PRId64 " cells in spatial dim %d", size, d);
        shape->dims[d + 2] = size;
    }
    return ONT_OK;
}

static ont_status transpose_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *y, *weight;
    ont_shape shape;
    conv_state s;
    ONT_TRY(ont_need_input(node, 0, &y));
    ONT_TRY(ont_need_input(node, 1, &weight));
    const char *auto_pad = ont_attr_string(node, "auto_pad", "NOTSET");
    if (strcmp(auto_pad, "NOTSET") && strcmp(auto_pad, "VALID"))
        return ont_fail(ONT_EUNSUPPORTED, "auto_pad is '%s', only NOTSET and VALID are supported", auto_pad);
    if (ont_attr_find(node, "output_shape", ONT_ATTR_INTS))
        return ont_fail(ONT_EUNSUPPORTED, "attribute output_shape is not supported");
    if (!strcmp(auto_pad, "VALID") && ont_attr_find(node, "pads", ONT_ATTR_INTS))
        return ont_fail(ONT_EUNSUPPORTED, "pads are not supported beside auto_pad 'VALID'");
    if (y->shape.rank < 3 || y->shape.rank > 2 + ONT_WINDOW_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "%d spatial dims, 1 to %d are supported", y->shape.rank - 2, ONT_WINDOW_RANK);
    if (weight->shape.rank != y->shape.rank)
        return ont_fail(ONT_EINVAL, "weight has rank %d, input %d", weight->shape.rank, y->shape.rank);
    if (weight->shape.dims[0] != y->shape.dims[1])
        return ont_fail(ONT_EINVAL, "the input has %" PRId64 " channels, the weight is for %" PRId64, y->shape.dims[1],
                        weight->shape.dims[0]);
    ONT_TRY(transpose_shape(node, y, weight, &shape));
    int64_t groups = ont_attr_int(node, "group", 1);
    if (groups < 1 || groups > INT32_MAX)
        return ont_fail(ONT_EINVAL, "group is %" PRId64 ", expected 1 to %d", groups, INT32_MAX);
    shape.dims[1] = weight->shape.dims[1] * groups;
    ONT_TRY(geometry(node, &shape, &weight->shape, &s));
    const ont_value *bias = ont_node_in(node, 2);
    if (weight->dtype != y->dtype || (bias && (bias->dtype != y->dtype || ont_shape_count(&bias->shape) != s.c)))
        return ont_fail(ONT_EINVAL, "weight or bias does not fit the input: dtype or number of channels differs");
    return ont_infer_out(node, 0, y->dtype, &shape);
}

#define ADD_BIAS(suffix, type) \
    static void add_bias_##suffix(const conv_state *s, const type *bias, type *x) \
    { \
        for (int64_t plane = 0; plane < s->n * s->c; plane++) \
            for (int64_t i = 0; i < s->w.in_count; i++) x[plane * s->w.in_count + i] += bias[plane % s->c]; \
    }
ADD_BIAS(f32, float)
ADD_BIAS(f64, double)

static ont_status transpose_run(const ont_call *call)
{
    const conv_state *s = call->state;
    ONT_TRY(input_grad_run(call));
    const void *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    if (!bias) return ONT_OK;
    if (s->size == sizeof(float))
        add_bias_f32(s, bias, call->out[0]);
    else
        add_bias_f64(s, bias, call->out[0]);
    return ONT_OK;
}

/* The attributes that a convolution has in common with a transposed one. */
static ont_status copy_window(ont_graph *g, ont_node *to, const ont_node *from)
{
    static const char *const lists[] = {"dilations", "kernel_shape", "pads", "strides"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        const ont_attr *list = ont_attr_find(from, lists[i], ONT_ATTR_INTS);
        if (list) ONT_TRY(ont_attr_set_ints(g, to, list->name, list->ints, list->count));
    }
    const ont_attr *pad = ont_attr_find(from, "auto_pad", ONT_ATTR_STRING);
    if (pad) ONT_TRY(ont_attr_set_string(g, to, pad->name, pad->s, pad->count));
    return ont_attr_set_int(g, to, "group", ont_attr_int(from, "group", 1));
}

/* The convolution back from the result: dy = Conv(dx), and the weight's gradient with the two sides exchanged. */
static void transpose_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *dx = GO(0);
    for (uint32_t i = 0; i < 2; i++) {
        if (!WANTS(i) || b->status != ONT_OK) continue;
        ont_value *operands[] = {i ? I(0) : dx, i ? dx : I(1)};
        ont_node *node = ont_build_node(b, i ? ONT_DOMAIN : "", i ? "ConvGradWeight" : "Conv", operands, 2, 1);
        if (node) b->status = copy_window(b->graph, node, g->node);
        if (node && i && b->status == ONT_OK)
            b->status = ont_attr_set_ints(b->graph, node, "shape", I(i)->shape.dims, (size_t)I(i)->shape.rank);
        GI(i, ont_build_done(b, node));
    }
    bias_grad(g);
}

static const ont_kernel transpose_kernels[] = {
    ONT_CONV_ONEDNN("conv_transpose_f32_onednn", ont_conv_onednn_accept),
    {.name = "conv_transpose_gemm", .accept = ont_accept_float, .prepare = input_prepare, .run = transpose_run},
    {.name = "conv_transpose_ref", .accept = ont_accept_float, .prepare = input_prepare_ref, .run = transpose_run},
};
const ont_op ont_op_ConvTransposePlain = {.domain = ONT_DOMAIN, .name = "ConvTranspose", .since = 1, .min_inputs = 2,
                                     .max_inputs = 3, .attributes = CONV_ATTRIBUTES " output_padding:I",
                                     .infer = transpose_infer, .grad = transpose_grad, ONT_KERNELS(transpose_kernels)};
