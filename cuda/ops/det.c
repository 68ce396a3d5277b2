/*
 * Det and its gradient on a device.
 */
#include "ops_common.h"

typedef struct det_state {
    int64_t batch, n;
    int dtype;
} det_state;

static ont_status det_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    det_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (det_state){.batch = ont_shape_count_range(&x->shape, 0, x->shape.rank - 2),
                     .n = x->shape.dims[x->shape.rank - 1], .dtype = (int)x->dtype};
    out->state = s;
    out->work_bytes = ont_det_work(s->batch, s->n, *node->op->domain != '\0');
    return ONT_OK;
}

static ont_status det_run(const ont_call *call)
{
    const det_state *s = call->state;
    return ont_launched(ont_launch_det(s->dtype, s->batch, s->n, call->in[0], call->out[0], call->work, call->stream));
}

static ont_status det_grad_run(const ont_call *call)
{
    const det_state *s = call->state;
    return ont_launched(ont_launch_det_grad(s->dtype, s->batch, s->n, call->in, call->out[0], call->work,
                                            call->stream));
}

const ont_kernel ont_cuda_det_kernels[2] = {
    {.name = "cuda_det", .accept = ont_cuda_accept_wide, .prepare = det_prepare, .run = det_run},
    {.name = "cuda_det_grad", .accept = ont_cuda_accept_wide, .prepare = det_prepare, .run = det_grad_run},
};
