/*
 * DeformConv: a convolution whose windows sample the image at points that are shifted by offsets and scaled by a mask.
 * ours:DeformCols samples them into columns, and has the gradients of image, offsets and mask; a GEMM follows.
 * Source: Dai et al., Deformable Convolutional Networks, 2017; Zhu et al., Deformable ConvNets v2, 2018.
 */
#include <inttypes.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/conv/columns.h"
#include "ops/support/compose.h"

enum { X, W, OFFSET, B, MASK }; /* inputs of DeformConv; DeformCols has x, offset, mask */

static ont_status read_node(const ont_node *node, const ont_shape *x, const int64_t *kernel, ont_deform *s)
{
    *s = (ont_deform){.groups = ont_attr_int(node, "offset_group", 1)};
    ONT_TRY(ont_window_init(node, x, kernel, &s->w));
    s->n = x->dims[0];
    s->c = x->dims[1];
    if (s->groups < 1 || s->groups > INT32_MAX || s->c % s->groups)
        return ont_fail(ONT_EINVAL, "%" PRId64 " channels are not divisible into offset_group = %" PRId64, s->c,
                        s->groups);
    s->sampler = (ont_sampler){.rank = s->w.rank, .mode = ONT_SAMPLE_LINEAR, .padding = ONT_SAMPLE_ZEROS};
    memcpy(s->sampler.dims, s->w.in, sizeof s->sampler.dims);
    return ONT_OK;
}

/* (batch, groups * window cells * `each`, output dims...) */
static bool has_shape(const ont_value *v, const ont_deform *s, int64_t each)
{
    int64_t channels;
    bool fits = v->shape.rank == s->w.rank + 2 && v->shape.dims[0] == s->n &&
                !__builtin_mul_overflow(s->groups * each, s->w.kernel_count, &channels) && v->shape.dims[1] == channels;
    for (int d = 0; d < s->w.rank && fits; d++) fits = v->shape.dims[d + 2] == s->w.out[d];
    return fits;
}

static ont_status infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *w, *offset, *bias = ont_node_in(node, B), *mask = ont_node_in(node, MASK);
    ont_deform s;
    ONT_TRY(ont_need_input(node, X, &x));
    ONT_TRY(ont_need_input(node, W, &w));
    ONT_TRY(ont_need_input(node, OFFSET, &offset));
    if (w->shape.rank != x->shape.rank || w->shape.rank < 3)
        return ont_fail(ONT_EINVAL, "weight has rank %d, input %d", w->shape.rank, x->shape.rank);
    ONT_TRY(read_node(node, &x->shape, w->shape.dims + 2, &s));
    int64_t groups = ont_attr_int(node, "group", 1), given[2 * ONT_WINDOW_RANK];
    int n;
    ONT_TRY(ont_const_ints(node, -1, "kernel_shape", given, 2 * ONT_WINDOW_RANK, &n));
    if (n >= 0 && (n != s.w.rank || memcmp(given, s.w.kernel, (size_t)n * sizeof *given)))
        return ont_fail(ONT_EINVAL, "kernel_shape differs from the shape of the weight");
    if (groups < 1 || w->shape.dims[1] * groups != s.c || w->shape.dims[0] % groups)
        return ont_fail(ONT_EINVAL, "the weight does not fit %" PRId64 " channels in group = %" PRId64, s.c, groups);
    if (!has_shape(offset, &s, s.w.rank)) return ont_fail(ONT_EINVAL, "the offset does not fit the windows");
    if (mask && !has_shape(mask, &s, 1)) return ont_fail(ONT_EINVAL, "the mask does not fit the windows");
    if (bias && (bias->shape.rank != 1 || bias->shape.dims[0] != w->shape.dims[0]))
        return ont_fail(ONT_EINVAL, "the bias does not fit the weight");
    for (uint32_t i = W; i <= MASK; i++)
        if (ont_node_in(node, i) && ont_node_in(node, i)->dtype != x->dtype)
            return ont_fail(ONT_ETYPE, "all inputs must have one dtype");
    if (!ont_dtype_is_float(x->dtype))
        return ont_fail(ONT_ETYPE, "the input is %s, expected a float", ont_dtype_name(x->dtype));
    ont_shape shape = {.rank = x->shape.rank, .dims = {s.n, w->shape.dims[0]}};
    for (int d = 0; d < s.w.rank; d++) shape.dims[d + 2] = s.w.out[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static void expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *w = ont_node_in(node, W), *bias = ont_node_in(node, B);
    ont_value *operands[] = {ont_node_in(node, X), ont_node_in(node, OFFSET), ont_node_in(node, MASK)};
    ont_shape shape = node->outputs[0]->shape;
    int64_t groups = ont_attr_int(node, "group", 1), out = shape.dims[1] / groups,
            cells = ont_shape_count_range(&shape, 2, shape.rank);
    int64_t depth = ont_shape_count_range(&w->shape, 1, w->shape.rank);
    ont_node *cols = ont_build_node(b, ONT_DOMAIN, "DeformCols", operands, operands[2] ? 3 : 2, 1);
    if (cols) b->status = ont_attr_copy_all(b->graph, cols, node);
    if (b->status == ONT_OK)
        b->status = ont_attr_set_ints(b->graph, cols, "kernel_shape", w->shape.dims + 2, (size_t)w->shape.rank - 2);
    ont_value *columns = ont_build_reshape(b, ont_build_done(b, cols),
                                           &(ont_shape){.rank = 4, .dims = {shape.dims[0], groups, depth, cells}});
    ont_value *weights = ont_build_reshape(b, w, &(ont_shape){.rank = 3, .dims = {groups, out, depth}});
    ont_value *y = ont_build_reshape(b, ont_build_matmul(b, weights, false, columns, false, 1), &shape);
    ont_shape one = {.rank = shape.rank - 1, .dims = {shape.dims[1], 1, 1, 1}};
    outputs[0] = bias ? ont_build2(b, "Add", y, ont_build_reshape(b, bias, &one)) : y;
}

/* ---- (x, offset, mask) -> columns (batch, channels, window cells, output cells) ---- */

static ont_status cols_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *x = ont_node_in(node, 0);
    ont_deform s;
    ONT_TRY(read_node(node, &x->shape, NULL, &s));
    ont_shape shape = {.rank = 4, .dims = {s.n, s.c, s.w.kernel_count, s.w.out_count}};
    return ont_infer_out(node, 0, x->dtype, &shape);
}

/* (x, offset, mask, dy) -> dx, doffset, dmask */
static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    for (uint32_t i = 0; i < 3; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (v) ONT_TRY(ont_infer_out(node, i, v->dtype, &v->shape));
    }
    return ONT_OK;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_deform *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_node(node, &ont_node_in(node, 0)->shape, NULL, s));
    out->state = s;
    return ONT_OK;
}

/* The position of cell k of window o before the offset. */
static void place(const ont_window *w, int64_t k, int64_t o, double *x)
{
    for (int d = w->rank - 1; d >= 0; d--) {
        x[d] = (double)(o % w->out[d] * w->stride[d] + k % w->kernel[d] * w->dilation[d] - w->begin[d]);
        o /= w->out[d];
        k /= w->kernel[d];
    }
}

/* Pairs (image, group) [first, last): no two share channels, offsets or masks. */
#define DEFORM(suffix, type) \
    static void cols_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_deform *s = call->state; \
        const type *mask = call->node->n_inputs > 2 ? call->in[2] : NULL; \
        int64_t channels = s->c / s->groups, points = s->w.out_count, index[ONT_SAMPLE_TAPS]; \
        double x[ONT_SAMPLE_RANK], weight[ONT_SAMPLE_TAPS]; \
        for (int64_t g = first; g < last; g++) \
            for (int64_t k = 0; k < s->w.kernel_count; k++) \
                for (int64_t o = 0; o < points; o++) { \
                    int64_t at = g * s->w.kernel_count + k; \
                    const type *offset = (const type *)call->in[1] + at * s->w.rank * points + o; \
                    place(&s->w, k, o, x); \
                    for (int d = 0; d < s->w.rank; d++) x[d] += (double)offset[d * points]; \
                    int n = ont_sample_taps(&s->sampler, x, index, weight, NULL, 0); \
                    double m = mask ? (double)mask[at * points + o] : 1; \
                    for (int64_t c = g * channels; c < (g + 1) * channels; c++) { \
                        const type *image = (const type *)call->in[0] + c * s->w.in_count; \
                        double sum = 0; \
                        for (int t = 0; t < n; t++) sum += weight[t] * (double)image[index[t]]; \
                        ((type *)call->out[0])[(c * s->w.kernel_count + k) * points + o] = (type)(m * sum); \
                    } \
                } \
    } \
    static void grad_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_deform *s = call->state; \
        const type *mask = call->in[2]; \
        type *dx = call->out[0], *doffset = call->out[1], *dmask = mask ? call->out[2] : NULL; \
        int64_t channels = s->c / s->groups, points = s->w.out_count, cells = s->w.in_count, index[ONT_SAMPLE_TAPS]; \
        double x[ONT_SAMPLE_RANK], weight[ONT_SAMPLE_TAPS], slope[ONT_SAMPLE_RANK * ONT_SAMPLE_TAPS]; \
        if (dx) memset(dx + first * channels * cells, 0, (size_t)((last - first) * channels * cells) * sizeof *dx); \
        for (int64_t g = first; g < last; g++) \
            for (int64_t k = 0; k < s->w.kernel_count; k++) \
                for (int64_t o = 0; o < points; o++) { \
                    int64_t at = g * s->w.kernel_count + k; \
                    const type *offset = (const type *)call->in[1] + at * s->w.rank * points + o; \
                    place(&s->w, k, o, x); \
                    for (int d = 0; d < s->w.rank; d++) x[d] += (double)offset[d * points]; \
                    int n = ont_sample_taps(&s->sampler, x, index, weight, slope, ONT_SAMPLE_TAPS); \
                    double m = mask ? (double)mask[at * points + o] : 1, moved[ONT_SAMPLE_RANK] = {0}, value = 0; \
                    for (int64_t c = g * channels; c < (g + 1) * channels; c++) { \
                        const type *image = (const type *)call->in[0] + c * cells; \
                        double dy = (double)((const type *)call->in[3])[(c * s->w.kernel_count + k) * points + o]; \
                        for (int t = 0; t < n; t++) { \
                            double pixel = (double)image[index[t]]; \
                            value += dy * weight[t] * pixel; \
                            for (int d = 0; d < s->w.rank; d++) moved[d] += dy * slope[d * ONT_SAMPLE_TAPS + t] * \
                                                     pixel; \
                            if (dx) dx[c * cells + index[t]] += (type)(dy * m * weight[t]); \
                        } \
                    } \
                    if (dmask) dmask[at * points + o] = (type)value; \
                    for (int d = 0; doffset && d < s->w.rank; d++) \
                        doffset[(at * s->w.rank + d) * points + o] = (type)(m * moved[d]); \
                } \
    }
DEFORM(f32, float)
DEFORM(f64, double)

static ont_status cols_run(const ont_call *call)
{
    const ont_deform *s = call->state;
    ont_parallel(s->n * s->groups, 1, call->node->outputs[0]->dtype == ONT_FLOAT32 ? cols_f32 : cols_f64, (void *)call);
    return ONT_OK;
}

static ont_status grad_run(const ont_call *call)
{
    const ont_deform *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ont_parallel(s->n * s->groups, 1, f32 ? grad_f32 : grad_f64, (void *)call);
    return ONT_OK;
}

static void cols_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *operands[] = {I(0), I(1), I(2), GO(0)};
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "DeformColsGrad", operands, 4, I(2) ? 3 : 2);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (!ont_build_done(b, node)) return;
    for (uint32_t i = 0; i < g->node->n_inputs; i++) GI(i, node->outputs[i]);
}

#define DEFORM_ATTRIBUTES "dilations:I group:i kernel_shape:I offset_group:i pads:I strides:I"
static const ont_kernel cols_kernels[] = {
    {.name = "deform_cols_ref", .accept = ont_accept_float, .prepare = prepare, .run = cols_run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "deform_cols_grad_ref", .accept = ont_accept_float, .prepare = prepare, .run = grad_run},
};
const ont_op ont_op_DeformConv = {.domain = "", .name = "DeformConv", .since = 19, .min_inputs = 3, .max_inputs = 5,
                                  .attributes = DEFORM_ATTRIBUTES, .infer = infer, .expand = expand};
const ont_op ont_op_DeformCols = {.domain = ONT_DOMAIN, .name = "DeformCols", .since = 1, .min_inputs = 2,
                                  .max_inputs = 3, .attributes = DEFORM_ATTRIBUTES, .infer = cols_infer,
                                  .grad = cols_grad, ONT_KERNELS(cols_kernels)};
const ont_op ont_op_DeformColsGrad = {.domain = ONT_DOMAIN, .name = "DeformColsGrad", .since = 1, .min_inputs = 4,
                                      .max_inputs = 4, .attributes = DEFORM_ATTRIBUTES, .infer = grad_infer,
                                      ONT_KERNELS(grad_kernels)};
