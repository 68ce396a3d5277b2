/*
 * QuantizeLinear to integers on a device.
 */
#include "ops_common.h"

static const char *quantize_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0), *scale = ont_node_in(node, 1);
    ont_quantize q;
    if (!ont_dtype_is_float(x->dtype) && x->dtype != ONT_INT32) return "x is neither a float nor int32";
    if (!ont_dtype_is_float(scale->dtype)) return "the scale is not a float of 16 bits or more";
    if (ont_quantize_read(node, &q) != ONT_OK) return "attributes";
    return q.integer ? NULL : "the result is a float of 8 bits or less";
}

static ont_status quantize_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_quantize *q = ont_arena_alloc(arena, sizeof *q);
    if (!q) return ONT_ENOMEM;
    out->state = q;
    return ont_quantize_read(node, q);
}

static ont_status quantize_run(const ont_call *call)
{
    const void *in[] = {call->in[0], call->in[1], ont_operand(call, 2)};
    int64_t count = ont_shape_count(&call->node->outputs[0]->shape);
    return ont_launched(ont_launch_quantize(call->state, count, in, call->out[0], call->stream));
}

const ont_kernel ont_cuda_quantize_kernels[1] = {
    {.name = "cuda_quantize", .accept = quantize_accept, .prepare = quantize_prepare, .run = quantize_run},
};
