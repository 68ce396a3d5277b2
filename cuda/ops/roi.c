/*
 * RoiAlign, MaxRoiPool and their gradients on a device. The CPU's kernels of the operators read the nodes.
 */
#include "ops/vision/vision.h"
#include "ops_common.h"

static bool is_roi_grad(const ont_node *node) { return *node->op->domain; }

static const char *roi_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    if (!ont_is_float32_or_64(x->dtype)) return "dtype";
    const ont_value *bins = is_roi_grad(node) ? ont_node_in(node, 3) : node->outputs[0];
    return ont_is_long(x) || ont_is_long(bins) ? "2^31 elements or more" : NULL;
}

static ont_status roi_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_rois *r;
    ont_roi_shape *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_cpu_state(node, arena, (const void **)&r));
    *s = (ont_roi_shape){.rois = r->rois, .n = r->n, .c = r->c, .height = r->height, .width = r->width,
                         .out_h = r->out_h, .out_w = r->out_w, .sampling = r->sampling,
                         .most_samples = ONT_ROI_SAMPLES, .scale = r->scale, .half_pixel = r->half_pixel,
                         .maximum = r->maximum, .align = r->align, .dtype = ont_node_in(node, 0)->dtype};
    out->state = s;
    out->work_bytes = ont_roi_work(s, is_roi_grad(node));
    return ONT_OK;
}

static ont_status roi_run(const ont_call *call)
{
    const bool gradient = is_roi_grad(call->node);
    ont_roi_shape s = *(const ont_roi_shape *)call->state;
    s.step = call->step;
    s.fault = gradient ? NULL : call->fault; /* forward has reported it */
    const void *in[] = {call->in[0], call->in[1], ont_operand(call, 2), ont_operand(call, 3)};
    return ont_launched((gradient ? ont_launch_roi_grad : ont_launch_roi)(&s, in, call->out[0], call->work,
                                                                          call->stream));
}

const ont_kernel ont_cuda_roi_kernels[2] = {
    {.name = "cuda_roi", .accept = roi_accept, .prepare = roi_prepare, .run = roi_run},
    {.name = "cuda_roi_grad", .accept = roi_accept, .prepare = roi_prepare, .run = roi_run},
};
