/*
 * GroupedMatMul and its gradient on a device.
 */
#include <string.h>

#include "ops_common.h"

static bool is_grad(const ont_node *node) { return !strcmp(node->op->name, "GroupedMatMulGrad"); }

static ont_grouped read_grouped(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0), *ends = ont_node_in(node, 2), *y = node->outputs[0];
    return (ont_grouped){.rows = x->shape.dims[0], .groups = ends->shape.dims[0], .k = x->shape.dims[1],
                         .n = y->shape.dims[y->shape.rank - 1], .dtype = x->dtype, .wide = ends->dtype == ONT_INT64,
                         .trans = !is_grad(node) && ont_attr_int(node, "transB", 0) != 0};
}

static const char *grouped_accept(const ont_node *node)
{
    ont_grouped s = read_grouped(node);
    if (!ont_dtype_is_float(ont_node_in(node, 0)->dtype)) return "dtype";
    return ont_grouped_blocks(&s, is_grad(node)) > INT32_MAX ? "2^31 tiles or more" : NULL;
}

static ont_status grouped_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_grouped *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = read_grouped(node);
    out->state = s;
    return ONT_OK;
}

static ont_status grouped_run(const ont_call *call)
{
    ont_grouped s = *(const ont_grouped *)call->state;
    s.fault = call->fault;
    s.step = call->step;
    return ont_launched(ont_launch_grouped(&s, is_grad(call->node), call->in, call->out[0], call->stream));
}

const ont_kernel ont_cuda_grouped_kernels[1] = {
    {.name = "cuda_grouped_matmul", .accept = grouped_accept, .prepare = grouped_prepare, .run = grouped_run},
};
