/*
 * RandomNormal, RandomUniform, Bernoulli and Multinomial on a device. The key of a run is read from device memory, so
 * that a replayed graph draws other numbers each time.
 */
#include "ops_common.h"

static bool is_number(ont_dtype dtype)
{
    return ont_dtype_is_float(dtype) || ont_dtype_is_int(dtype) || dtype == ONT_BOOL;
}

static const char *fill_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    return is_number(node->outputs[0]->dtype) && (!x || ont_dtype_is_float(x->dtype)) ? NULL : "dtype";
}

static ont_status fill_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_fill *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ont_fill_read(node, s);
    out->state = s;
    return ONT_OK;
}

static ont_status fill_run(const ont_call *call)
{
    int64_t n = ont_shape_count(&call->node->outputs[0]->shape);
    return ont_launched(ont_launch_fill(call->state, n, call->seed_at, ont_operand(call, 0), call->out[0],
                                        call->stream));
}

static ont_status multinomial_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *y = node->outputs[0];
    ont_multinomial *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_multinomial){.rows = x->shape.dims[0], .n = x->shape.dims[1], .samples = y->shape.dims[1],
                           .stream = ont_random_stream(node), .dtype = x->dtype, .wide = y->dtype == ONT_INT64};
    out->work_bytes = ont_multinomial_work(s);
    out->state = s;
    return ONT_OK;
}

static ont_status multinomial_run(const ont_call *call)
{
    return ont_launched(ont_launch_multinomial(call->state, call->seed_at, call->in[0], call->out[0], call->work,
                                               call->stream));
}

const ont_kernel ont_cuda_random_kernels[2] = {
    {.name = "cuda_random_fill", .accept = fill_accept, .prepare = fill_prepare, .run = fill_run},
    {.name = "cuda_multinomial", .accept = ont_cuda_accept_floats, .prepare = multinomial_prepare,
     .run = multinomial_run},
};
