/*
 * RNN, GRU and LSTM, and RecurrentGrad, as one node by cuDNN. A node that is declined here is expanded, and its steps
 * run by recurrent.c.
 */
#include "ops/rnn.h"

#include "ops_common.h"
#include "ops/recurrent/recurrent_whole.h"

enum { ALIGN = 256 };
enum { H0 = 5, C0 };             /* inputs of RNN, GRU and LSTM behind X, W, R, B and the lengths */
enum { Y, LAST_H, LAST_C };      /* outputs */
enum { WORK, SPACE, DSPACE, SAVED, OUTPUT, DOUTPUT, DINPUT, PARTS }; /* parts of the scratch memory */

typedef struct rnn_state {
    ont_rnn_shape shape;
    ont_rnn_plan *plan;
    ont_rnn_bytes bytes;
    size_t part[PARTS];
} rnn_state;

static bool is_grad(const ont_node *node) { return node->op->domain[0] != 0; }

static const char *shape_of(const ont_node *node, ont_rnn_shape *s)
{
    const ont_value *x = ont_node_in(node, 0), *w = ont_node_in(node, 1), *r = ont_node_in(node, 2);
    ont_recurrent_form form = {.cell = (ont_cell)ont_attr_int(node, "cell", 0)};
    const char *refusal = is_grad(node) ? NULL : ont_recurrent_read(node, &form);
    if (refusal) return refusal;
    *s = (ont_rnn_shape){.steps = x->shape.dims[0], .batch = x->shape.dims[1], .in = x->shape.dims[2],
                         .hidden = r->shape.dims[2], .directions = (int32_t)w->shape.dims[0],
                         .cell = (int32_t)form.cell, .dtype = (int32_t)x->dtype,
                         .has_bias = ont_node_in(node, 3) != NULL};
    return NULL;
}

/* The plan is made and checked here, before the node is expanded. */
static const char *read_node(const ont_node *node, rnn_state *s)
{
    const char *refusal = shape_of(node, &s->shape);
    if (!refusal) refusal = ont_rnn_plan_get(&s->shape, &s->plan);
    return refusal ? refusal : ont_rnn_check(node, s->plan, &s->shape);
}

static const char *rnn_accept(const ont_node *node)
{
    rnn_state s;
    return read_node(node, &s);
}

/* Memory begins at a multiple of 64; cuDNN gets multiples of 256. */
static void *align(void *at) { return (void *)(((uintptr_t)at + ALIGN - 1) / ALIGN * ALIGN); }

static size_t rnn_saved_bytes(const ont_node *node)
{
    rnn_state s;
    return read_node(node, &s) ? 0 : ont_rnn_plan_bytes(s.plan).saved + ALIGN;
}

/* Elements of the result y, of x, and of a state. */
static int64_t outputs_of(const ont_rnn_shape *s) { return s->steps * s->batch * s->hidden * s->directions; }
static int64_t inputs_of(const ont_rnn_shape *s) { return s->steps * s->batch * s->in; }

static ont_status rnn_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    rnn_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    out->state = s;
    const char *refusal = read_node(node, s);
    if (refusal) return ont_fail(ONT_ESTATE, "cuDNN declined what it had accepted: %s", refusal);
    bool grad = is_grad(node), both = s->shape.directions == 2;
    size_t size = ont_dtype_size((ont_dtype)s->shape.dtype), y = (size_t)outputs_of(&s->shape) * size;
    const ont_value *saved = grad ? ont_node_in(node, ONT_RECURRENT_BYTES) : ont_node_out(node, ONT_RECURRENT_SAVED);
    s->bytes = ont_rnn_plan_bytes(s->plan);
    if (saved && ont_shape_count(&saved->shape) != (int64_t)(s->bytes.saved + ALIGN))
        return ont_fail(ONT_EINVAL, "output %d is not what the kernel saves", ONT_RECURRENT_SAVED);
    const size_t parts[PARTS] = {
        [WORK] = s->bytes.work, [SPACE] = s->bytes.weights, [DSPACE] = grad ? s->bytes.weights : 0,
        [SAVED] = grad ? s->bytes.saved : 0, [OUTPUT] = both || (!grad && !ont_node_out(node, Y)) ? y : 0,
        [DOUTPUT] = grad && (both || !ont_node_in(node, ONT_RECURRENT_DY)) ? y : 0,
        [DINPUT] = grad && !ont_node_out(node, 0) ? (size_t)inputs_of(&s->shape) * size : 0};
    out->work_bytes = ALIGN;
    for (int i = 0; i < PARTS; i++) {
        s->part[i] = (parts[i] + ALIGN - 1) / ALIGN * ALIGN;
        out->work_bytes += s->part[i];
    }
    return ONT_OK;
}

static void parts_of(const ont_call *call, void *part[PARTS])
{
    const rnn_state *s = call->state;
    char *at = align(call->work);
    for (int i = 0; i < PARTS; i++) {
        part[i] = at;
        at += s->part[i];
    }
}

/* y of both directions from (T, B, D, H), as cuDNN has it, to (T, D, B, H), or back. */
static ont_status exchange(const ont_call *call, const void *from, void *to, bool back)
{
    const rnn_state *s = call->state;
    const int64_t b = s->shape.batch, d = s->shape.directions, h = s->shape.hidden;
    const int64_t outer = back ? b : d, inner = back ? d : b; /* of `to` */
    const ont_device_strided layout = {.rank = 4, .dims = {s->shape.steps, outer, inner, h},
                                       .strides = {b * d * h, h, outer * h, 1},
                                       .size = ont_dtype_size((ont_dtype)s->shape.dtype)};
    return call->device->ops->copy_strided(call->device, &layout, from, to, call->stream);
}

static ont_status move_weights(const ont_call *call, const ont_rnn_weights *weights, void *space, bool back)
{
    const rnn_state *s = call->state;
    ont_rnn_parts parts;
    ONT_TRY(ont_rnn_plan_parts(s->plan, weights, space, back, &parts));
    return ont_launched(ont_launch_rnn_parts(&parts, call->stream));
}

static ont_rnn_weights weights_of(const ont_call *call)
{
    return (ont_rnn_weights){(void *)(uintptr_t)call->in[1], (void *)(uintptr_t)call->in[2],
                             (void *)(uintptr_t)ont_operand(call, 3)};
}

static ont_status rnn_run(const ont_call *call)
{
    const rnn_state *s = call->state;
    void *part[PARTS], *saved = ont_result(call, ONT_RECURRENT_SAVED);
    const ont_rnn_weights weights = weights_of(call);
    parts_of(call, part);
    ONT_TRY(move_weights(call, &weights, part[SPACE], false));
    const ont_rnn_operands o = {
        .x = call->in[0], .h = ont_operand(call, H0), .c = ont_operand(call, C0),
        .y = s->part[OUTPUT] ? part[OUTPUT] : call->out[Y], .last_h = ont_result(call, LAST_H),
        .last_c = ont_result(call, LAST_C), .space = part[SPACE], .work = part[WORK],
        .saved = saved ? align(saved) : NULL, .stream = call->stream};
    ONT_TRY(ont_rnn_plan_forward(s->plan, &o));
    return s->part[OUTPUT] && call->out[Y] ? exchange(call, o.y, call->out[Y], false) : ONT_OK;
}

/* y and its gradient in cuDNN's order; a gradient that is absent is zeros. */
static ont_status outputs_for_grad(const ont_call *call, void *const part[PARTS], ont_rnn_grad_operands *o)
{
    const rnn_state *s = call->state;
    const ont_device_ops *ops = call->device->ops;
    const void *dy = ont_operand(call, ONT_RECURRENT_DY);
    o->y = s->part[OUTPUT] ? part[OUTPUT] : call->in[ONT_RECURRENT_Y];
    o->dy = s->part[DOUTPUT] ? part[DOUTPUT] : dy;
    if (s->part[OUTPUT]) ONT_TRY(exchange(call, call->in[ONT_RECURRENT_Y], part[OUTPUT], true));
    if (!dy) return ops->clear(call->device, part[DOUTPUT], s->part[DOUTPUT], call->stream);
    return s->part[DOUTPUT] ? exchange(call, dy, part[DOUTPUT], true) : ONT_OK;
}

/* cuDNN overwrites what forward has saved, which is an input here: it gets a copy. */
static ont_status rnn_grad_run(const ont_call *call)
{
    const rnn_state *s = call->state;
    const ont_device_ops *ops = call->device->ops;
    void *part[PARTS];
    const ont_rnn_weights weights = weights_of(call);
    const ont_rnn_weights grads = {ont_result(call, ONT_RECURRENT_W), ont_result(call, ONT_RECURRENT_R),
                                   ont_result(call, ONT_RECURRENT_B)};
    const bool wanted = grads.w || grads.r || grads.b;
    parts_of(call, part);
    ONT_TRY(move_weights(call, &weights, part[SPACE], false));
    ONT_TRY(ops->copy(call->device, part[SAVED], align((void *)(uintptr_t)call->in[ONT_RECURRENT_BYTES]),
                      s->bytes.saved, call->stream));
    ont_rnn_grad_operands o = {
        .x = call->in[0], .h = ont_operand(call, ONT_RECURRENT_H0), .c = ont_operand(call, ONT_RECURRENT_C0),
        .dlast_h = ont_operand(call, ONT_RECURRENT_DH), .dlast_c = ont_operand(call, ONT_RECURRENT_DC),
        .dx = s->part[DINPUT] ? part[DINPUT] : ont_result(call, ONT_RECURRENT_X),
        .dh = ont_result(call, ONT_RECURRENT_H0), .dc = ont_result(call, ONT_RECURRENT_C0), .space = part[SPACE],
        .dspace = wanted ? part[DSPACE] : NULL, .work = part[WORK], .saved = part[SAVED], .stream = call->stream};
    ONT_TRY(outputs_for_grad(call, part, &o));
    if (wanted) ONT_TRY(ops->clear(call->device, part[DSPACE], s->part[DSPACE], call->stream));
    ONT_TRY(ont_rnn_plan_backward(s->plan, &o));
    return wanted ? move_weights(call, &grads, part[DSPACE], true) : ONT_OK;
}

const ont_kernel ont_cuda_rnn_kernels[2] = {
    {.name = "cuda_rnn_dnn", .accept = rnn_accept, .prepare = rnn_prepare, .run = rnn_run,
     .saved_bytes = rnn_saved_bytes},
    {.name = "cuda_rnn_dnn_grad", .accept = rnn_accept, .prepare = rnn_prepare, .run = rnn_grad_run},
};
