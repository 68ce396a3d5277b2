/*
 * LpPool and GlobalLpPool, whose kernels are in pool.c, and MaxUnpool, which writes values where MaxPool found them.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/pool/pool.h"

static void lp_grad(ont_grad *g) { ont_pool_grad_as(g, "LpPoolGrad", true); }
static void global_lp_grad(ont_grad *g) { ont_pool_grad_as(g, "GlobalLpPoolGrad", true); }

#define LP_OP(name_, flags_, grad_, attributes_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 1, .min_inputs = 1, .max_inputs = 1, \
                                   .flags = flags_, .attributes = attributes_, .infer = ont_pool_infer, .grad = grad_, \
                                   ONT_KERNELS(ont_pool_kernels)}; \
    const ont_op ont_op_##name_##Grad = {.domain = ONT_DOMAIN, .name = #name_ "Grad", .since = 1, .min_inputs = 3, \
                                         .max_inputs = 3, .flags = flags_, \
                                         .attributes = attributes_ " shape:I", \
                                         .infer = ont_infer_same, \
                                         ONT_KERNELS(ont_pool_grad_kernels)}
LP_OP(LpPool, 0, lp_grad, "auto_pad:s ceil_mode:i dilations:I kernel_shape:I p:if pads:I strides:I");
LP_OP(GlobalLpPool, ONT_OP_GLOBAL, global_lp_grad, "p:if");

/* ---- MaxUnpool ---- */

/* Values of an attribute, one for each spatial dim; `otherwise` where it is absent. */
static ont_status spatial_ints(const ont_node *node, const char *name, int64_t otherwise, int n, int64_t minimum,
                               int64_t *out)
{
    int given;
    ONT_TRY(ont_const_ints(node, -1, name, out, 2 * ONT_MAX_RANK, &given));
    if (given >= 0 && given != n) return ont_fail(ONT_EINVAL, "%s has %d entries, expected %d", name, given, n);
    for (int i = 0; i < n; i++) {
        if (given < 0) out[i] = otherwise;
        if (out[i] < minimum || out[i] > INT32_MAX) return ont_fail(ONT_EINVAL, "%s[%d] is %" PRId64, name, i, out[i]);
    }
    return ONT_OK;
}

/* The input shape of the MaxPool with these attributes, in which the indices count cells. */
static ont_status pooled_from(const ont_node *node, const ont_shape *x, ont_shape *from)
{
    int rank = x->rank - 2;
    int64_t kernel[2 * ONT_MAX_RANK], strides[2 * ONT_MAX_RANK], pads[2 * ONT_MAX_RANK];
    if (rank < 1)
        return ont_fail(ONT_EINVAL, "the input has rank %d, expected (batch, channels, spatial ...)", x->rank);
    ONT_TRY(spatial_ints(node, "kernel_shape", 0, rank, 1, kernel));
    ONT_TRY(spatial_ints(node, "strides", 1, rank, 1, strides));
    ONT_TRY(spatial_ints(node, "pads", 0, 2 * rank, 0, pads));
    *from = *x;
    for (int d = 0; d < rank; d++) {
        from->dims[d + 2] = (x->dims[d + 2] - 1) * strides[d] + kernel[d] - pads[d] - pads[rank + d];
        if (from->dims[d + 2] < 0) return ont_fail(ONT_EINVAL, "the pads leave no cell of spatial dim %d", d);
    }
    return ONT_OK;
}

static ont_status unpool_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *indices;
    ont_shape from;
    int64_t dims[ONT_MAX_RANK];
    int n;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &indices));
    if (indices->dtype != ONT_INT64)
        return ont_fail(ONT_ETYPE, "indices are %s, expected int64", ont_dtype_name(indices->dtype));
    if (!ont_shape_equal(&x->shape, &indices->shape))
        return ont_fail(ONT_EINVAL, "indices do not have the shape of the input");
    ONT_TRY(pooled_from(node, &x->shape, &from));
    ONT_TRY(ont_const_ints(node, 2, NULL, dims, ONT_MAX_RANK, &n));
    if (n < 0) return ont_infer_out(node, 0, x->dtype, &from);
    if (n != x->shape.rank) return ont_fail(ONT_EINVAL, "output_shape has %d entries, expected %d", n, x->shape.rank);
    for (int d = 0; d < n; d++)
        if (dims[d] < (d < 2 ? x->shape.dims[d] : 0) || (d < 2 && dims[d] != x->shape.dims[d]))
            return ont_fail(ONT_EINVAL, "output_shape[%d] is %" PRId64, d, dims[d]);
    ont_shape shape = ont_shape_of(n, dims);
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static const char *accept_any(const ont_node *node)
{
    return ont_dtype_size(ont_node_in(node, 0)->dtype) ? NULL : "dtype";
}

static ont_status unpool_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_unpool *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    bool backward = !*node->op->domain ? false : true;
    const ont_value *values = backward ? node->outputs[0] : ont_node_in(node, 0);
    ONT_TRY(pooled_from(node, &values->shape, &s->from));
    s->to = backward ? ont_node_in(node, 0)->shape : node->outputs[0]->shape;
    s->count = ont_shape_count(&values->shape);
    s->size = ont_dtype_size(values->dtype);
    out->state = s;
    return ONT_OK;
}

/* Offset in shape `to` of cell `index` of shape `from`, with a common first corner; -1 where it is outside. */
static int64_t placed(const ont_unpool *s, int64_t index)
{
    int64_t at = 0, step = 1;
    for (int d = s->from.rank - 1; d >= 0; d--) {
        int64_t i = index % s->from.dims[d];
        index /= s->from.dims[d];
        if (i >= s->to.dims[d]) return -1;
        at += i * step;
        step *= s->to.dims[d];
    }
    return at;
}

static ont_status checked(const ont_unpool *s, int64_t index, int64_t *at)
{
    int64_t limit = ont_shape_count(&s->from);
    if (index < 0 || index >= limit)
        return ont_fail(ONT_EINDEX, "index %" PRId64 " is out of range for %" PRId64 " cells", index, limit);
    *at = placed(s, index);
    if (*at < 0) return ont_fail(ONT_EINDEX, "index %" PRId64 " is outside output_shape", index);
    return ONT_OK;
}

static ont_status unpool_run(const ont_call *call)
{
    const ont_unpool *s = call->state;
    const int64_t *indices = call->in[1];
    int64_t at;
    memset(call->out[0], 0, (size_t)ont_shape_count(&s->to) * s->size);
    for (int64_t i = 0; i < s->count; i++) {
        ONT_TRY(checked(s, indices[i], &at));
        memcpy((char *)call->out[0] + (size_t)at * s->size, (const char *)call->in[0] + (size_t)i * s->size, s->size);
    }
    return ONT_OK;
}

/* (dy, indices) -> dx */
static ont_status unpool_grad_run(const ont_call *call)
{
    const ont_unpool *s = call->state;
    const int64_t *indices = call->in[1];
    int64_t at;
    for (int64_t i = 0; i < s->count; i++) {
        ONT_TRY(checked(s, indices[i], &at));
        memcpy((char *)call->out[0] + (size_t)i * s->size, (const char *)call->in[0] + (size_t)at * s->size, s->size);
    }
    return ONT_OK;
}

static void unpool_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *dy = GO(0);
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "MaxUnpoolGrad", (ont_value *[]){dy, I(1)}, 2, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    GI(0, ont_build_done(b, node));
}

static ont_status unpool_grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &ont_node_in(node, 1)->shape);
}

static const ont_kernel unpool_kernels[] = {
    {.name = "max_unpool_ref", .accept = accept_any, .prepare = unpool_prepare, .run = unpool_run},
};
static const ont_kernel unpool_grad_kernels[] = {
    {.name = "max_unpool_grad_ref", .accept = accept_any, .prepare = unpool_prepare, .run = unpool_grad_run},
};
const ont_op ont_op_MaxUnpool = {.domain = "", .name = "MaxUnpool", .since = 9, .min_inputs = 2, .max_inputs = 3,
                                 .attributes = "kernel_shape:I pads:I strides:I", .nondiff_inputs = 6,
                                 .infer = unpool_infer, .grad = unpool_grad, ONT_KERNELS(unpool_kernels)};
const ont_op ont_op_MaxUnpoolGrad = {.domain = ONT_DOMAIN, .name = "MaxUnpoolGrad", .since = 1, .min_inputs = 2,
                                     .max_inputs = 2, .attributes = "kernel_shape:I pads:I shape:I strides:I",
                                     .infer = unpool_grad_infer, ONT_KERNELS(unpool_grad_kernels)};
