/*
 * Which convolutions go to Winograd's algorithm, and the kernels' entry points.
 */
#include "base/parallel.h"
#include "ops/conv_onednn.h"
#include "ops/winograd.h"

static bool enabled = true;

void ont_winograd_enable(bool on)
{
    enabled = on;
}

const char *ont_winograd_accept(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    if (!enabled) return "winograd is disabled";
    if (ont_node_in(node, 0)->shape.rank != 4) return "not two spatial dims";
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    return ont_winograd_refuses(&c);
}

ont_status ont_winograd_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_conv c;
    ont_conv_kind kind;
    ont_winograd *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_conv_read(node, &c, &kind));
    ont_winograd_init(&c, kind, ont_parallel_threads(), s);
    out->state = s;
    out->work_bytes = s->work_bytes;
    return ONT_OK;
}

ont_status ont_winograd_run(const ont_call *call)
{
    const ont_winograd *s = call->state;
    const float *bias = s->kind == ONT_CONV_FORWARD && call->node->n_inputs > 2 ? call->in[2] : NULL;
    ont_winograd_compute(s, call->in[0], call->in[1], bias, call->out[0], call->work);
    return ONT_OK;
}

ont_status ont_winograd_grad_run(const ont_call *call)
{
    ont_winograd_compute_grad(call->state, call->in[0], call->in[1], call->out[0], call->work);
    return ONT_OK;
}
