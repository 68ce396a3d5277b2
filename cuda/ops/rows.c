/*
 * Operators over rows on a device: reductions, LayerNormalization, Softmax, the losses, and their gradients. Each reads
 * its node into what its launcher takes.
 */
#include <string.h>

#include "ops_common.h"

/* ---- reductions ---- */

static const char *reduce_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    ont_dtype d = x->dtype;
    ont_reduce r;
    if (ont_reduce_read(node, &r) != ONT_OK) return "axes";
    if (d == ONT_BOOL) return r.kind == ONT_REDUCE_MAX || r.kind == ONT_REDUCE_MIN ? NULL : "bool";
    if (!ont_dtype_is_float(d) && d != ONT_INT32 && d != ONT_INT64 && d != ONT_UINT64) return "dtype";
    if (!ont_shape_count(&x->shape) && r.kind == ONT_REDUCE_MEAN && !ont_dtype_is_float(d)) return "nothing to reduce";
    return NULL;
}

static ont_status reduce_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_reduce r;
    ont_reduction *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_reduce_read(node, &r));
    *s = (ont_reduction){.kind = r.kind, .dtype = ont_node_in(node, 0)->dtype, .n_kept = r.n_kept,
                           .n_reduced = r.n_reduced,
                         .outputs = r.outputs, .each = r.each, .lead = r.lead, .n = r.n, .tail = r.tail};
    memcpy(s->kept, r.kept, sizeof r.kept);
    memcpy(s->kept_stride, r.kept_stride, sizeof r.kept_stride);
    memcpy(s->reduced, r.reduced, sizeof r.reduced);
    memcpy(s->reduced_stride, r.reduced_stride, sizeof r.reduced_stride);
    out->state = s;
    out->work_bytes = ont_reduce_work(s);
    return ONT_OK;
}

static ont_status reduce_run(const ont_call *call)
{
    return ont_launched(ont_launch_reduce(call->state, call->in[0], call->out[0], call->work, call->stream));
}

const ont_kernel ont_cuda_reduce_kernels[1] = {
    {.name = "cuda_reduce", .accept = reduce_accept, .prepare = reduce_prepare, .run = reduce_run},
};

/* ---- LayerNormalization, alone and with what a pass has fused (csrc/ops/norm/fused_norm.c) ---- */

static bool is_norm_grad(const ont_node *node) { return strstr(node->op->name, "Grad") != NULL; }

/* Whether an operand may be 16-bit: x, its addend, y and its copy; x, dy, its addends, dx and its copy. */
static bool may_be_half(const ont_node *node, bool input, uint32_t index)
{
    const uint32_t inputs = is_norm_grad(node) ? 0x71 : 0x09, outputs = is_norm_grad(node) ? 0x09 : 0x11;
    return (input ? inputs : outputs) >> index & 1;
}

/* The dtype of the 16-bit values among the operands; 0: none. -1: they differ, or another one is not `wide`. */
static int half_among(const ont_node *node, ont_dtype wide)
{
    int half = 0;
    for (uint32_t i = 0; i < node->n_inputs + node->n_outputs; i++) {
        const bool input = i < node->n_inputs;
        const uint32_t index = input ? i : i - node->n_inputs;
        const ont_value *v = input ? ont_node_in(node, index) : ont_node_out(node, index);
        if (!v || v->dtype == wide) continue;
        if (wide != ONT_FLOAT32 || !ont_dtype_is_half(v->dtype) || !may_be_half(node, input, index)) return -1;
        if (half && half != (int)v->dtype) return -1;
        half = (int)v->dtype;
    }
    return half;
}

static const char *fused_norm_accept(const ont_node *node)
{
    ont_dtype wide = ont_node_in(node, 1)->dtype;
    return ont_is_float32_or_64(wide) && half_among(node, wide) >= 0 ? NULL : "dtypes";
}

static bool is_half(const ont_value *v) { return v && ont_dtype_is_half(v->dtype); }

static ont_status norm_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    const ont_dtype wide = ont_node_in(node, 1)->dtype;
    ont_norm *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", -1), x->shape.rank, &axis));
    *s = (ont_norm){.rows = ont_shape_count_range(&x->shape, 0, axis),
                    .n = ont_shape_count_range(&x->shape, axis, x->shape.rank),
                    .eps = ont_attr_float(node, "epsilon", 1e-5), .dtype = wide, .half = half_among(node, wide),
                    .rms = ont_attr_int(node, "rms", 0) != 0};
    for (uint32_t i = 0; i < node->n_inputs; i++) s->half_in |= (uint32_t)is_half(ont_node_in(node, i)) << i;
    for (uint32_t i = 0; i < node->n_outputs; i++) s->half_out |= (uint32_t)is_half(ont_node_out(node, i)) << i;
    if (is_norm_grad(node)) out->work_bytes = ont_norm_grad_work(s);
    out->state = s;
    return ONT_OK;
}

static ont_status norm_run(const ont_call *call)
{
    const void *in[] = {call->in[0], call->in[1], ont_operand(call, 2), ont_operand(call, 3)};
    void *out[] = {call->out[0], ont_result(call, 1), ont_result(call, 2), ont_result(call, 3), ont_result(call, 4)};
    return ont_launched(ont_launch_norm(call->state, in, out, call->stream));
}

static ont_status norm_grad_run(const ont_call *call)
{
    const void *in[] = {call->in[0], call->in[1], call->in[2], call->in[3], call->in[4], ont_operand(call, 5),
                        ont_operand(call, 6)};
    void *out[] = {call->out[0], ont_result(call, 1), ont_result(call, 2), ont_result(call, 3)};
    return ont_launched(ont_launch_norm_grad(call->state, in, out, call->work, call->stream));
}

const ont_kernel ont_cuda_norm_kernels[4] = {
    {.name = "cuda_norm", .accept = ont_cuda_accept_wide, .prepare = norm_prepare, .run = norm_run},
    {.name = "cuda_norm_grad", .accept = ont_cuda_accept_wide, .prepare = norm_prepare, .run = norm_grad_run},
    {.name = "cuda_fused_norm", .accept = fused_norm_accept, .prepare = norm_prepare, .run = norm_run},
    {.name = "cuda_fused_norm_grad", .accept = fused_norm_accept, .prepare = norm_prepare, .run = norm_grad_run},
};

/* ---- Softmax ---- */

/* From opset 13 on one axis; before, everything from `axis` on counts as one. */
static ont_status softmax_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    bool flattens = !*node->op->domain && node->version < 13;
    ont_softmax *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    *s = (ont_softmax){1, 1, 1, ont_node_in(node, 0)->dtype, !strncmp(node->op->name, "Log", 3)};
    out->state = s;
    if (!x->rank) return ONT_OK;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", flattens ? 1 : -1), x->rank, &axis));
    s->outer = ont_shape_count_range(x, 0, axis);
    s->n = flattens ? ont_shape_count_range(x, axis, x->rank) : x->dims[axis];
    s->inner = flattens ? 1 : ont_shape_count_range(x, axis + 1, x->rank);
    return ONT_OK;
}

static ont_status softmax_run(const ont_call *call)
{
    return ont_launched(ont_launch_softmax(call->state, call->in[0], call->out[0], call->stream));
}

static ont_status softmax_grad_run(const ont_call *call)
{
    return ont_launched(ont_launch_softmax_grad(call->state, call->in[0], call->in[1], call->out[0], call->stream));
}

const ont_kernel ont_cuda_softmax_kernels[2] = {
    {.name = "cuda_softmax",
     .accept = ont_cuda_accept_floats,
     .prepare = softmax_prepare,
     .run = softmax_run,
     .inplace = 1},
    {.name = "cuda_softmax_grad",
     .accept = ont_cuda_accept_floats,
     .prepare = softmax_prepare,
     .run = softmax_grad_run,
     .inplace = 3},
};

/* ---- losses ---- */

/* Whether the value, if there is one, is float32 or has the dtype of the 16-bit scores. */
static bool is_float32_or_as(const ont_value *v, const ont_value *scores)
{
    return !v || v->dtype == ONT_FLOAT32 || v->dtype == scores->dtype;
}

static const char *loss_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0), *stats = ont_node_out(node, 2);
    if (!ont_dtype_is_half(x->dtype)) return ont_cuda_accept_wide(node);
    if (stats && stats->dtype != ONT_FLOAT32) return "statistics";
    return is_float32_or_as(ont_node_in(node, 2), x) && is_float32_or_as(ont_node_out(node, 0), x) ? NULL : "dtypes";
}

static const char *loss_grad_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0), *stats = ont_node_in(node, 4);
    ont_dtype to = (ont_dtype)ont_attr_int(node, "to", x->dtype);
    if (to != x->dtype && (x->dtype != ONT_FLOAT32 || !ont_dtype_is_half(to))) return "dtype of the gradient";
    if (!ont_dtype_is_half(x->dtype)) return ont_cuda_accept_wide(node);
    if (stats && stats->dtype != ONT_FLOAT32) return "statistics";
    return is_float32_or_as(ont_node_in(node, 2), x) && is_float32_or_as(ont_node_in(node, 3), x) ? NULL : "dtypes";
}

/* `loss`: the loss, or its gradient */
static ont_status loss_read(const ont_node *node, const ont_value *loss, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *label = ont_node_in(node, 1), *weights = ont_node_in(node, 2);
    const char *reduction = ont_attr_string(node, "reduction", "mean");
    const ont_attr *ignore = ont_attr_find(node, "ignore_index", ONT_ATTR_INT);
    bool half = ont_dtype_is_half(x->dtype);
    ont_loss *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_loss){.rows = x->shape.dims[0], .classes = ont_attr_int(node, "classes", x->shape.dims[1]),
                    .columns = x->shape.dims[1], .inner = ont_shape_count_range(&x->shape, 2, x->shape.rank),
                    .ignores = ignore != NULL,
                    .ignored = ignore ? ignore->i : 0, .wide = label->dtype == ONT_INT64, .dtype = x->dtype,
                    .grad_dtype = (int32_t)ont_attr_int(node, "to", x->dtype),
                    .softmax = !strncmp(node->op->name, "SoftmaxCross", 12),
                    .wide_loss = !half || loss->dtype == ONT_FLOAT32,
                    .wide_weights = !half || (weights && weights->dtype == ONT_FLOAT32),
                    .reduction = !strcmp(reduction, "none") ? 0 : !strcmp(reduction, "sum") ? 1 : 2};
    out->state = s;
    out->work_bytes = ont_loss_work(s);
    return ONT_OK;
}

static ont_status loss_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return loss_read(node, ont_node_out(node, 0), arena, out);
}

static ont_status loss_grad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return loss_read(node, ont_node_in(node, 3), arena, out);
}

static ont_loss loss_of(const ont_call *call)
{
    ont_loss s = *(const ont_loss *)call->state;
    s.fault = call->fault;
    s.step = call->step;
    return s;
}

static ont_status loss_run(const ont_call *call)
{
    ont_loss s = loss_of(call);
    const void *in[] = {call->in[0], call->in[1], ont_operand(call, 2)};
    void *out[] = {call->out[0], ont_result(call, 1), ont_result(call, 2)};
    return ont_launched(ont_launch_loss(&s, in, out, call->work, call->stream));
}

static ont_status loss_grad_run(const ont_call *call)
{
    ont_loss s = loss_of(call);
    const void *in[] = {call->in[0], call->in[1], call->in[2], call->in[3], ont_operand(call, 4)};
    return ont_launched(ont_launch_loss_grad(&s, in, call->out[0], call->work, call->stream));
}

const ont_kernel ont_cuda_loss_kernels[2] = {
    {.name = "cuda_cross_entropy", .accept = loss_accept, .prepare = loss_prepare, .run = loss_run},
    {.name = "cuda_cross_entropy_grad",
     .accept = loss_grad_accept,
     .prepare = loss_grad_prepare,
     .run = loss_grad_run,
     .inplace = 1},
};
