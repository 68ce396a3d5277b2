/*
 * CountNonZero and NonZeroOf, the two parts of NonZero, UniqueIndices and NmsFull on a device.
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

/* ---- UniqueIndices ---- */

static const char *unique_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    if (!ont_dtype_is_float(x->dtype) && !ont_dtype_is_int(x->dtype) && x->dtype != ONT_BOOL) return "dtype";
    return ont_is_long(x) ? "2^31 elements or more" : NULL;
}

static ont_status unique_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    const ont_attr *given = ont_attr_find(node, "axis", ONT_ATTR_INT);
    int axis = 0;
    ont_unique *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    if (given) ONT_TRY(ont_shape_axis(given->i, x->shape.rank, &axis));
    *s = (ont_unique){.outer = given ? ont_shape_count_range(&x->shape, 0, axis) : 1,
                      .n = given ? x->shape.dims[axis] : ont_shape_count(&x->shape),
                      .inner = given ? ont_shape_count_range(&x->shape, axis + 1, x->shape.rank) : 1,
                      .dtype = x->dtype, .sorted = ont_attr_int(node, "sorted", 1) != 0};
    out->state = s;
    out->work_bytes = ont_unique_work(s);
    return ONT_OK;
}

static ont_status unique_run(const ont_call *call)
{
    const ont_unique_results to = {call->out[0], ont_result(call, 1), ont_result(call, 2), ont_result(call, 3)};
    return ont_launched(ont_launch_unique(call->state, call->in[0], &to, call->work, call->stream));
}

/* ---- NmsFull ---- */

static const char *nms_accept(const ont_node *node)
{
    return ont_is_long(ont_node_in(node, 0)) || ont_is_long(node->outputs[0]) ? "2^31 elements or more" : NULL;
}

static ont_status nms_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *scores = &ont_node_in(node, 1)->shape;
    ont_nms *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_nms){.batches = scores->dims[0], .classes = scores->dims[1], .n = scores->dims[2],
                   .centre = ont_attr_int(node, "center_point_box", 0) != 0};
    out->state = s;
    out->work_bytes = ont_nms_work(s);
    return ONT_OK;
}

static ont_status nms_run(const ont_call *call)
{
    const void *in[5];
    for (uint32_t i = 0; i < 5; i++) in[i] = ont_operand(call, i);
    return ont_launched(ont_launch_nms(call->state, in, call->out[0], ont_result(call, 1), call->work, call->stream));
}

const ont_kernel ont_cuda_sort_kernels[2] = {
    {.name = "cuda_unique", .accept = unique_accept, .prepare = unique_prepare, .run = unique_run},
    {.name = "cuda_nms", .accept = nms_accept, .prepare = nms_prepare, .run = nms_run},
};
