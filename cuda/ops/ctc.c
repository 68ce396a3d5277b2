/*
 * CTCLoss and its gradient on a device.
 */
#include <string.h>

#include "ops_common.h"

static bool is_grad(const ont_node *node) { return !strcmp(node->op->name, "CTCLossGrad"); }

static ont_status ctc_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *targets = ont_node_in(node, 1);
    ont_ctc *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_ctc){.steps = x->shape.dims[0], .batch = x->shape.dims[1], .classes = x->shape.dims[2],
                   .padded = targets->shape.rank == 2 ? targets->shape.dims[1] : -1,
                   .total = ont_shape_count(&targets->shape), .blank = ont_attr_int(node, "blank", 0),
                   .zero_infinity = ont_attr_int(node, "zero_infinity", 0) != 0, .dtype = x->dtype};
    for (uint32_t i = 0; i < 3; i++) s->wide[i] = ont_node_in(node, i + 1)->dtype == ONT_INT64;
    out->work_bytes = ont_ctc_work(s, is_grad(node));
    out->state = s;
    return ONT_OK;
}

static ont_status ctc_run(const ont_call *call)
{
    ont_ctc s = *(const ont_ctc *)call->state;
    s.fault = call->fault;
    s.step = call->step;
    return ont_launched(is_grad(call->node)
                            ? ont_launch_ctc_grad(&s, call->in, call->out[0], call->work, call->stream)
                            : ont_launch_ctc(&s, call->in, call->out[0], call->work, call->stream));
}

const ont_kernel ont_cuda_ctc_kernels[1] = {
    {.name = "cuda_ctc", .accept = ont_cuda_accept_wide, .prepare = ctc_prepare, .run = ctc_run},
};
