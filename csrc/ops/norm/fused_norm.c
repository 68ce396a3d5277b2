/*
 * LayerNormalization, or RMSNormalization where the attribute rms is 1, with what stands around it: an addition before
 * it, and Casts to and from 16 bits. Only passes/fuse_norm.c and passes/fuse_rms_norm.c create these nodes. The kernels
 * here are the reference, without 16-bit operands.
 *
 *   FusedNorm     (x, scale, bias, addend) -> (y, mean, inv_std, sum, copy)
 *   FusedNormGrad (x, scale, mean, inv_std, dy, dy2, addend) -> (dx, dscale, dbias, copy)
 *
 * The sum x + addend is what is normalized; dy2 is added to dy, and addend to dx. `copy` is y or dx once more, in the
 * dtype that the attribute copy names; the attribute "to" names that of y or dx itself. Scale, statistics and sum have
 * the dtype of the arithmetic. All inputs but x, scale, inv_std and dy may be absent; without mean, none is subtracted.
 */
#include <math.h>

#include "ops/op.h"

typedef struct norm_shape {
    int64_t rows, n;
    int axis;
    double eps;
    bool rms;
} norm_shape;

static ont_status read_shape(const ont_node *node, norm_shape *s)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", -1), x->rank, &s->axis));
    s->rows = ont_shape_count_range(x, 0, s->axis);
    s->n = ont_shape_count_range(x, s->axis, x->rank);
    s->eps = ont_attr_float(node, "epsilon", 1e-5);
    s->rms = ont_attr_int(node, "rms", 0) != 0;
    return ONT_OK;
}

static ont_status same_shape(const ont_node *node, uint32_t index)
{
    const ont_value *v = ont_node_in(node, index);
    if (!v || ont_shape_equal(&v->shape, &ont_node_in(node, 0)->shape)) return ONT_OK;
    return ont_fail(ONT_EINVAL, "input %u '%s' must have the shape of x", index, v->name);
}

static ont_status fused_norm_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *scale;
    const ont_value *bias = ont_node_in(node, 2);
    norm_shape s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &scale));
    ONT_TRY(read_shape(node, &s));
    ONT_TRY(same_shape(node, 3));
    if (ont_shape_count(&scale->shape) != s.n || (bias && ont_shape_count(&bias->shape) != s.n) ||
        (bias && bias->dtype != scale->dtype))
        return ont_fail(ONT_EINVAL, "scale and bias must have %lld entries of one dtype", (long long)s.n);
    ont_shape saved = x->shape;
    for (int d = s.axis; d < saved.rank; d++) saved.dims[d] = 1;
    ONT_TRY(ont_infer_out(node, 1, scale->dtype, &saved));
    ONT_TRY(ont_infer_out(node, 2, scale->dtype, &saved));
    ONT_TRY(ont_infer_out(node, 3, scale->dtype, &x->shape));
    ONT_TRY(ont_infer_out(node, 4, (ont_dtype)ont_attr_int(node, "copy", scale->dtype), &x->shape));
    return ont_infer_out(node, 0, (ont_dtype)ont_attr_int(node, "to", scale->dtype), &x->shape);
}

static ont_status fused_norm_grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *scale;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &scale));
    for (uint32_t i = 4; i < 7; i++) ONT_TRY(same_shape(node, i));
    ONT_TRY(ont_infer_out(node, 1, scale->dtype, &scale->shape));
    ONT_TRY(ont_infer_out(node, 2, scale->dtype, &scale->shape));
    ONT_TRY(ont_infer_out(node, 3, (ont_dtype)ont_attr_int(node, "copy", scale->dtype), &x->shape));
    return ont_infer_out(node, 0, (ont_dtype)ont_attr_int(node, "to", scale->dtype), &x->shape);
}

static void fused_norm_gradient(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *mean = NULL, *inv;
    for (uint32_t i = 1; i < g->node->n_outputs; i++)
        if (g->out_grads[i]) {
            ont_grad_refuse(g, "from an output other than the first");
            return;
        }
    if (!ont_attr_int(g->node, "rms", 0)) b->status = ont_node_ensure_output(b->graph, g->node, 1, &mean);
    if (b->status == ONT_OK) b->status = ont_node_ensure_output(b->graph, g->node, 2, &inv);
    if (b->status == ONT_OK) b->status = fused_norm_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {I(0), I(1), mean, inv, GO(0)};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "FusedNormGrad", operands, 5, 3);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (!ont_build_done(b, node)) return;
    GI(0, node->outputs[0]);
    if (WANTS(1)) GI(1, ont_build_reshape(b, node->outputs[1], &I(1)->shape));
    if (WANTS(2)) GI(2, ont_build_reshape(b, node->outputs[2], &I(2)->shape));
}

/* ---- reference ---- */

static const char *one_dtype(const ont_node *node)
{
    const char *refusal = ont_accept_float(node);
    for (uint32_t i = 0; i < node->n_inputs + node->n_outputs && !refusal; i++) {
        const ont_value *v = i < node->n_inputs ? ont_node_in(node, i) : ont_node_out(node, i - node->n_inputs);
        if (v && v->dtype != ont_node_in(node, 0)->dtype) refusal = "operands differ in dtype";
    }
    return refusal;
}

static double at(const void *data, ont_dtype dtype, int64_t i)
{
    return !data ? 0 : dtype == ONT_FLOAT32 ? ((const float *)data)[i] : ((const double *)data)[i];
}

static void put(void *data, ont_dtype dtype, int64_t i, double v)
{
    if (data && dtype == ONT_FLOAT32) ((float *)data)[i] = (float)v;
    if (data && dtype == ONT_FLOAT64) ((double *)data)[i] = v;
}

static const void *operand(const ont_call *call, uint32_t index)
{
    return index < call->node->n_inputs ? call->in[index] : NULL;
}

static void *result(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

static void forward_row(const ont_call *call, const norm_shape *s, int64_t row)
{
    const ont_dtype t = ont_node_in(call->node, 0)->dtype;
    const void *x = call->in[0], *bias = operand(call, 2), *addend = operand(call, 3);
    double mean = 0, var = 0;
    for (int64_t i = row * s->n; i < (row + 1) * s->n && !s->rms; i++)
        mean += (at(x, t, i) + at(addend, t, i)) / (double)s->n;
    for (int64_t i = row * s->n; i < (row + 1) * s->n; i++) {
        double v = at(x, t, i) + at(addend, t, i) - mean;
        var += v * v / (double)s->n;
    }
    double inv = 1 / sqrt(var + s->eps);
    for (int64_t k = 0; k < s->n; k++) {
        int64_t i = row * s->n + k;
        double v = at(x, t, i) + at(addend, t, i), y = (v - mean) * inv * at(call->in[1], t, k) + at(bias, t, k);
        put(call->out[0], t, i, y);
        put(result(call, 3), t, i, v);
        put(result(call, 4), t, i, y);
    }
    put(result(call, 1), t, row, mean);
    put(result(call, 2), t, row, inv);
}

static ont_status forward_ref(const ont_call *call)
{
    norm_shape s;
    ONT_TRY(read_shape(call->node, &s));
    for (int64_t row = 0; row < s.rows; row++) forward_row(call, &s, row);
    return ONT_OK;
}

static void grad_row(const ont_call *call, const norm_shape *s, int64_t row)
{
    const ont_dtype t = ont_node_in(call->node, 0)->dtype;
    const void *dy2 = operand(call, 5), *addend = operand(call, 6);
    void *dscale = result(call, 1), *dbias = result(call, 2);
    double mean = at(call->in[2], t, row), inv = at(call->in[3], t, row), g_mean = 0, gx_mean = 0;
    for (int64_t k = 0; k < s->n; k++) {
        int64_t i = row * s->n + k;
        double d = at(call->in[4], t, i) + at(dy2, t, i), hat = (at(call->in[0], t, i) - mean) * inv;
        if (!s->rms) g_mean += d * at(call->in[1], t, k) / (double)s->n;
        gx_mean += d * at(call->in[1], t, k) * hat / (double)s->n;
        put(dscale, t, k, (row ? at(dscale, t, k) : 0) + d * hat);
        put(dbias, t, k, (row ? at(dbias, t, k) : 0) + d);
    }
    for (int64_t k = 0; k < s->n; k++) {
        int64_t i = row * s->n + k;
        double d = at(call->in[4], t, i) + at(dy2, t, i), hat = (at(call->in[0], t, i) - mean) * inv;
        double dx = inv * (d * at(call->in[1], t, k) - g_mean - hat * gx_mean) + at(addend, t, i);
        put(call->out[0], t, i, dx);
        put(result(call, 3), t, i, dx);
    }
}

static ont_status grad_ref(const ont_call *call)
{
    norm_shape s;
    ONT_TRY(read_shape(call->node, &s));
    for (int64_t k = 0; k < s.n && !s.rows; k++)
        for (uint32_t i = 1; i < 3; i++) put(result(call, i), ont_node_in(call->node, 0)->dtype, k, 0);
    for (int64_t row = 0; row < s.rows; row++) grad_row(call, &s, row);
    return ONT_OK;
}

static const ont_kernel forward_kernels[] = {
    {.name = "fused_norm_ref", .accept = one_dtype, .run = forward_ref},
};
static const ont_kernel grad_kernels[] = {
    {.name = "fused_norm_grad_ref", .accept = one_dtype, .run = grad_ref},
};

#define NORM_ATTRIBUTES "axis:i epsilon:f stash_type:i rms:i to:i copy:i"
const ont_op ont_op_FusedNorm = {.domain = ONT_DOMAIN, .name = "FusedNorm", .since = 1, .min_inputs = 2,
                                 .max_inputs = 4, .flags = ONT_OP_MEMORY_BOUND,
                                 .attributes = NORM_ATTRIBUTES, .infer = fused_norm_infer, .grad = fused_norm_gradient,
                                 .rows = ONT_ROWS_NORM, ONT_KERNELS(forward_kernels)};
const ont_op ont_op_FusedNormGrad = {.domain = ONT_DOMAIN, .name = "FusedNormGrad", .since = 1, .min_inputs = 5,
                                     .max_inputs = 7, .attributes = NORM_ATTRIBUTES,
                                     .infer = fused_norm_grad_infer, ONT_KERNELS(grad_kernels)};
