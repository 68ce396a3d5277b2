/*
 * GroupNorm and its gradient on a device.
 */
#include <string.h>

#include "ops_common.h"

static const char *group_norm_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0), *scale = ont_node_in(node, 1);
    if (!ont_dtype_is_float(x->dtype) || !ont_is_float32_or_64(scale->dtype)) return "dtype";
    return ont_is_long(x) ? "2^31 elements or more" : NULL;
}

static ont_status group_norm_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    int64_t groups = ont_attr_int(node, "groups", 1);
    ont_groupnorm *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_groupnorm){.n = x->shape.dims[0], .groups = groups, .channels = x->shape.dims[1] / groups,
                         .d = ont_shape_count_range(&x->shape, 2, x->shape.rank),
                         .eps = ont_attr_float(node, "epsilon", 1e-5), .dtype = x->dtype};
    if (!strcmp(node->op->name, "GroupNormGrad")) out->work_bytes = ont_groupnorm_grad_work(s);
    out->state = s;
    return ONT_OK;
}

static ont_status group_norm_run(const ont_call *call)
{
    void *out[] = {call->out[0], ont_result(call, 1), ont_result(call, 2)};
    return ont_launched(ont_launch_groupnorm(call->state, call->in, out, call->stream));
}

static ont_status group_norm_grad_run(const ont_call *call)
{
    void *out[] = {call->out[0], ont_result(call, 1), ont_result(call, 2)};
    return ont_launched(ont_launch_groupnorm_grad(call->state, call->in, out, call->work, call->stream));
}

const ont_kernel ont_cuda_group_norm_kernels[2] = {
    {.name = "cuda_groupnorm", .accept = group_norm_accept, .prepare = group_norm_prepare, .run = group_norm_run},
    {.name = "cuda_groupnorm_grad", .accept = group_norm_accept, .prepare = group_norm_prepare,
     .run = group_norm_grad_run},
};
