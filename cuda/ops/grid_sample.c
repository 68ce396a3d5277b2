/*
 * GridSample, DeformCols and their gradients on a device. The CPU's kernels of the operators read the nodes.
 */
#include <string.h>

#include "ops/conv/columns.h"
#include "ops/vision/vision.h"
#include "ops_common.h"

static bool is_grid(const ont_node *node) { return !strncmp(node->op->name, "GridSample", 10); }

static ont_status read_grid(const ont_node *node, ont_arena *arena, ont_sampling *s)
{
    const ont_grid *g;
    ONT_TRY(ont_cpu_state(node, arena, (const void **)&g));
    *s = (ont_sampling){.sampler = g->sampler, .images = g->n, .channels = g->c, .cells = g->cells,
                        .points = g->points};
    return ONT_OK;
}

/* The groups of channels that share offsets are images. */
static ont_status read_deform(const ont_node *node, ont_arena *arena, ont_sampling *s)
{
    const ont_deform *f;
    ONT_TRY(ont_cpu_state(node, arena, (const void **)&f));
    *s = (ont_sampling){.sampler = f->sampler, .images = f->n * f->groups, .channels = f->c / f->groups,
                        .cells = f->w.in_count, .points = f->w.kernel_count * f->w.out_count,
                        .windows = f->w.out_count};
    memcpy(s->out, f->w.out, sizeof s->out);
    memcpy(s->kernel, f->w.kernel, sizeof s->kernel);
    memcpy(s->stride, f->w.stride, sizeof s->stride);
    memcpy(s->dilation, f->w.dilation, sizeof s->dilation);
    memcpy(s->begin, f->w.begin, sizeof s->begin);
    return ONT_OK;
}

static ont_status sample_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_sampling *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(is_grid(node) ? read_grid(node, arena, s) : read_deform(node, arena, s));
    s->dtype = ont_node_in(node, 0)->dtype;
    if (node->n_outputs > 1 && node->outputs[0]) out->work_bytes = ont_sample_grad_work(s);
    out->state = s;
    return ONT_OK;
}

static const char *sample_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0), *at = ont_node_in(node, 1);
    if (!ont_is_float32_or_64(x->dtype)) return "dtype";
    if (at->dtype != x->dtype) return "the grid has another dtype";
    for (int d = 2; d < x->shape.rank; d++)
        if (x->shape.dims[d] > INT32_MAX) return "2^31 elements or more";
    const bool is_long = ont_is_long(x) || (node->n_outputs == 1 && ont_is_long(node->outputs[0]));
    return is_long ? "2^31 elements or more" : NULL;
}

/* A point has at most 64 taps, whose number must fit as well. */
static const char *sample_grad_accept(const ont_node *node)
{
    const char *refusal = sample_accept(node);
    const ont_value *at = ont_node_in(node, 1);
    if (refusal) return refusal;
    const bool cubic = strstr(ont_attr_string(node, "mode", ""), "cubic") != NULL;
    int64_t taps = 1;
    for (int d = 2; d < ont_node_in(node, 0)->shape.rank; d++) taps *= cubic ? 4 : 2;
    return ont_shape_count(&at->shape) > INT32_MAX / taps ? "2^31 taps or more" : NULL;
}

static ont_status sample_run(const ont_call *call)
{
    const void *in[] = {call->in[0], call->in[1], ont_operand(call, 2)};
    return ont_launched(ont_launch_sample(call->state, in, call->out[0], call->stream));
}

static ont_status sample_grad_run(const ont_call *call)
{
    const bool grid = is_grid(call->node);
    const void *in[] = {call->in[0], call->in[1], grid ? NULL : call->in[2], call->in[grid ? 2 : 3]};
    void *out[] = {call->out[0], call->out[1], grid ? NULL : ont_result(call, 2)};
    return ont_launched(ont_launch_sample_grad(call->state, in, out, call->work, call->stream));
}

const ont_kernel ont_cuda_grid_sample_kernels[2] = {
    {.name = "cuda_sample", .accept = sample_accept, .prepare = sample_prepare, .run = sample_run},
    {.name = "cuda_sample_grad", .accept = sample_grad_accept, .prepare = sample_prepare, .run = sample_grad_run},
};
