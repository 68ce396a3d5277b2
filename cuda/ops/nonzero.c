/*
 * CountNonZero and NonZeroOf, the two parts of NonZero, on a device.
 */
#include "ops_common.h"

static const char *nonzero_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    if (!ont_dtype_is_float(x->dtype) && !ont_dtype_is_int(x->dtype) && x->dtype != ONT_BOOL) return "dtype";
    return ont_is_long(x) ? "2^31 elements or more" : NULL;
}

static ont_status nonzero_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    const ont_shape *to = &node->outputs[0]->shape;
    ont_nonzero *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_nonzero){.n = ont_shape_count(&x->shape), .found = to->rank == 2 ? to->dims[1] : 0,
                       .mask = UINT64_MAX, .size = (int32_t)ont_dtype_size(x->dtype), .rank = x->shape.rank};
    if (ont_dtype_is_float(x->dtype)) s->mask >>= 65 - 8 * s->size; /* without the sign: -0 is zero */
    for (int d = 0; d < x->shape.rank; d++) s->dims[d] = x->shape.dims[d];
    out->work_bytes = ont_nonzero_work(s);
    out->state = s;
    return ONT_OK;
}

static ont_status count_run(const ont_call *call)
{
    return ont_launched(ont_launch_count_nonzero(call->state, call->in[0], call->out[0], call->work, call->stream));
}

static ont_status nonzero_run(const ont_call *call)
{
    ont_nonzero s = *(const ont_nonzero *)call->state;
    s.fault = call->fault;
    s.step = call->step;
    return ont_launched(ont_launch_nonzero(&s, call->in[0], call->out[0], call->work, call->stream));
}

const ont_kernel ont_cuda_nonzero_kernels[2] = {
    {.name = "cuda_count_nonzero", .accept = nonzero_accept, .prepare = nonzero_prepare, .run = count_run},
    {.name = "cuda_nonzero", .accept = nonzero_accept, .prepare = nonzero_prepare, .run = nonzero_run},
};
