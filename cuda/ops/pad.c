/*
 * Pad and its gradient on a device.
 */
#include <string.h>

#include "ops_common.h"

static bool is_pad_grad(const ont_node *node) { return *node->op->domain; }

static ont_status read_pad(const ont_node *node, ont_pad *p)
{
    const ont_shape *in = &ont_node_in(node, 0)->shape, *out = &node->outputs[0]->shape;
    return is_pad_grad(node) ? ont_pad_read(node, out, in, p) : ont_pad_read(node, in, out, p);
}

static const char *pad_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    size_t size = ont_dtype_size(x->dtype);
    ont_pad p;
    if (is_pad_grad(node) ? !ont_dtype_is_float(x->dtype) : size != 1 && size != 2 && size != 4 && size != 8)
        return "dtype";
    if (!is_pad_grad(node) && node->version < 11 && !ont_is_float32_or_64(x->dtype) &&
        ont_attr_float(node, "value", 0) != 0)
        return "attribute value of another dtype than float and double";
    if (ont_is_long(x) || ont_is_long(node->outputs[0])) return "2^31 elements or more";
    if (read_pad(node, &p) != ONT_OK) return "pads";
    for (int d = 0; d < p.rank; d++) /* so that no sum of positions overflows */
        if (p.low[d] < -INT32_MAX / 4 || p.low[d] > INT32_MAX / 4 || p.wide[d] > INT32_MAX / 4 ||
            p.narrow[d] > INT32_MAX / 4)
            return "2^29 entries of a dim or more";
    return NULL;
}

static ont_status pad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_pad_shape *s = ont_arena_alloc(arena, sizeof *s);
    ont_pad p;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_pad(node, &p));
    *s = (ont_pad_shape){.mode = p.mode, .rank = p.rank, .narrow_count = 1, .wide_count = 1};
    for (int d = p.rank - 1; d >= 0; d--) {
        s->narrow[d] = (int32_t)p.narrow[d];
        s->wide[d] = (int32_t)p.wide[d];
        s->low[d] = (int32_t)p.low[d];
        s->stride[d] = s->narrow_count;
        s->narrow_count *= p.narrow[d];
        s->wide_count *= p.wide[d];
    }
    if (!is_pad_grad(node) && node->version < 11) {
        double value = ont_attr_float(node, "value", 0);
        float narrow = (float)value;
        bool wide = ont_node_in(node, 0)->dtype == ONT_FLOAT64;
        memcpy(&s->fill, wide ? (const void *)&value : (const void *)&narrow, wide ? sizeof value : sizeof narrow);
    }
    out->state = s;
    return ONT_OK;
}

static ont_status pad_run(const ont_call *call)
{
    const void *value = call->node->version >= 11 ? ont_operand(call, 2) : NULL;
    return ont_launched(ont_launch_pad(call->state, (int)ont_dtype_size(call->node->outputs[0]->dtype), call->in[0],
                                       value, call->out[0], call->stream));
}

static ont_status pad_grad_run(const ont_call *call)
{
    return ont_launched(ont_launch_pad_grad(call->state, call->node->outputs[0]->dtype, call->in[0], call->out[0],
                                            call->stream));
}

const ont_kernel ont_cuda_pad_kernels[2] = {
    {.name = "cuda_pad", .accept = pad_accept, .prepare = pad_prepare, .run = pad_run},
    {.name = "cuda_pad_grad", .accept = pad_accept, .prepare = pad_prepare, .run = pad_grad_run},
};
