/*
 * RecurrentSteps and its gradient on a device: for each step a product by blas.h and a kernel for the cells. What is
 * saved for the gradient has the rows of all sequences at each step, (T, B, runs * H), in contrast to the CPU, which
 * leaves out sequences that have ended.
 */
#include "ops/recurrent.h"

#include <string.h>

enum { X, R, H0, C0, LENS, BIAS };           /* inputs of RecurrentSteps */
enum { SAVED, WEIGHT, LENGTHS, DY, DH, DC }; /* inputs of its gradient */
enum { FIRST, SECOND, THIRD, ROWS };         /* parts of the scratch memory; ROWS: of one step or of all */

ont_steps ont_steps_of(ont_cell cell, ont_dtype dtype, int64_t steps, int64_t batch, int64_t hidden, bool reverse,
                       bool gradient)
{
    ont_steps s = {.steps = steps, .wide = ont_cell_gates(cell) * hidden, .reverse = reverse, .gradient = gradient,
                   .separate = gradient && cell == ONT_CELL_GRU, .blas = ont_blas_get(),
                   .element = ont_dtype_size(dtype)};
    s.cell = (ont_cell_step){.batch = batch, .hidden = hidden, .cell = (int32_t)cell, .gates = ont_cell_gates(cell),
                             .runs = ont_cell_saved(cell), .dtype = dtype};
    return s;
}

/* Of one step: q = h R^T, or the gradient of h through q, dq R. */
static ont_blas_gemm step_product(const ont_steps *s)
{
    int64_t hidden = s->cell.hidden;
    bool gradient = s->gradient;
    return (ont_blas_gemm){.dtype = s->cell.dtype, .result = s->cell.dtype, .trans_b = !gradient,
                           .m = s->cell.batch, .n = gradient ? hidden : s->wide, .k = gradient ? s->wide : hidden,
                           .lda = gradient ? s->wide : hidden, .ldb = hidden, .ldc = gradient ? hidden : s->wide,
                           .batch = 1, .alpha = 1};
}

/* The gradient of R: over all steps, dq^T times the states before them. */
static ont_blas_gemm weight_product(const ont_steps *s)
{
    return (ont_blas_gemm){.dtype = s->cell.dtype, .result = s->cell.dtype, .trans_a = true, .m = s->wide,
                           .n = s->cell.hidden, .k = s->steps * s->cell.batch, .lda = s->wide,
                           .ldb = s->cell.runs * s->cell.hidden, .ldc = s->cell.hidden, .batch = 1, .alpha = 1};
}

const char *ont_steps_refusal(const ont_steps *s)
{
    if (!ont_is_float32_or_64(s->cell.dtype)) return "dtype";
    if (!s->blas) return "cuBLASLt is not found";
    if (!s->steps || !s->cell.batch || !s->cell.hidden) return "nothing to compute";
    ont_blas_gemm step = step_product(s), weight = weight_product(s);
    const char *reason = s->blas->accept(&step);
    return reason || !s->gradient ? reason : s->blas->accept(&weight);
}

ont_status ont_steps_prepare(ont_steps *s, bool weight, size_t *work_bytes)
{
    ont_blas_gemm step = step_product(s), all = weight_product(s);
    ONT_TRY(s->blas->create(&step, &s->step));
    s->plan_bytes = s->blas->work_bytes(s->step);
    if (weight) {
        ONT_TRY(s->blas->create(&all, &s->weight));
        size_t bytes = s->blas->work_bytes(s->weight);
        if (bytes > s->plan_bytes) s->plan_bytes = bytes;
    }
    int64_t state = s->cell.batch * s->cell.hidden, rows = s->cell.batch * s->wide;
    int64_t spare = s->gradient ? (s->separate ? s->steps * rows : 0) : s->cell.batch * s->cell.runs * s->cell.hidden;
    int64_t numbers[ONT_STEPS_PARTS] = {state, state, s->gradient ? state : rows, spare};
    *work_bytes = s->plan_bytes = (s->plan_bytes + 255) / 256 * 256;
    for (int i = 0; i < ONT_STEPS_PARTS; i++) {
        s->part[i] = ((size_t)numbers[i] * s->element + 255) / 256 * 256;
        *work_bytes += s->part[i];
    }
    return ONT_OK;
}

void ont_steps_release(void *opaque)
{
    const ont_steps *s = opaque;
    if (s->step) s->blas->destroy(s->step);
    if (s->weight) s->blas->destroy(s->weight);
}

/* The plans' memory is first in the scratch memory, then the parts. */
static void parts_of(const ont_steps *s, void *work, char *part[ONT_STEPS_PARTS])
{
    char *at = (char *)work + s->plan_bytes;
    for (int i = 0; i < ONT_STEPS_PARTS; i++) {
        part[i] = at;
        at += s->part[i];
    }
}

/* Row t of what has `numbers` elements for each step; NULL stays NULL. */
static void *row(const ont_steps *s, const void *base, int64_t t, int64_t numbers)
{
    return base ? (char *)(uintptr_t)base + (size_t)(t * numbers) * s->element : NULL;
}

/* A state (B, H) as given, or zeros. */
static ont_status begin_state(const ont_steps *s, const ont_device *device, void *to, const void *given, void *stream)
{
    size_t bytes = (size_t)(s->cell.batch * s->cell.hidden) * s->element;
    return given ? device->ops->copy(device, to, given, bytes, stream) : device->ops->clear(device, to, bytes, stream);
}

ont_status ont_steps_run(const ont_steps *s, const ont_device *device, const ont_steps_operands *given)
{
    const bool lstm = s->cell.cell == ONT_CELL_LSTM;
    const int64_t rows = s->cell.batch * s->wide, saved = s->cell.batch * s->cell.runs * s->cell.hidden;
    char *part[ONT_STEPS_PARTS];
    parts_of(s, given->work, part);
    void *h = given->h ? given->h : part[FIRST];
    void *c = !lstm ? NULL : given->c ? given->c : part[SECOND];
    ONT_TRY(begin_state(s, device, h, given->h0, given->stream));
    if (lstm) ONT_TRY(begin_state(s, device, c, given->c0, given->stream));
    const ont_blas_operands product = {.a = h, .b = given->r, .c = part[THIRD], .work = given->work};
    for (int64_t k = 0; k < s->steps; k++) {
        ont_cell_step cell = s->cell;
        cell.t = s->reverse ? s->steps - 1 - k : k;
        const ont_cell_operands o = {
            .x = row(s, given->x, cell.t, rows), .q = part[THIRD], .bias = given->bias, .lengths = given->lengths,
            .h = h, .c = c, .saved = given->saved ? row(s, given->saved, cell.t, saved) : part[ROWS],
            .y = row(s, given->y, cell.t, s->cell.batch * s->cell.hidden)};
        ONT_TRY(s->blas->run(s->step, &product, given->stream));
        ONT_TRY(ont_launched(ont_launch_cell(&cell, &o, given->stream)));
    }
    return ONT_OK;
}

/* The gradients of R, and of the bias of a GRU's candidate. */
static ont_status weight_grads(const ont_steps *s, const ont_steps_grad_operands *given, void *dq)
{
    const int64_t hidden = s->cell.hidden;
    const ont_blas_operands product = {.a = dq, .b = row(s, given->saved, s->cell.runs - 1, hidden), .c = given->dr,
                                       .work = given->work};
    if (s->weight) ONT_TRY(s->blas->run(s->weight, &product, given->stream));
    if (!given->dbias) return ONT_OK;
    return ont_launched(ont_launch_column_sums(s->cell.dtype, s->steps * s->cell.batch, hidden, s->wide,
                                               row(s, dq, 2, hidden), given->dbias, given->stream));
}

ont_status ont_steps_grad_run(const ont_steps *s, const ont_device *device, const ont_steps_grad_operands *given)
{
    const bool lstm = s->cell.cell == ONT_CELL_LSTM;
    const int64_t rows = s->cell.batch * s->wide, state = s->cell.batch * s->cell.hidden;
    char *part[ONT_STEPS_PARTS];
    parts_of(s, given->work, part);
    void *dh = part[FIRST], *dr = part[THIRD];
    void *dq = given->dproducts ? given->dproducts : s->separate ? part[ROWS] : given->dx;
    void *dc = !lstm ? NULL : given->dc0 ? given->dc0 : part[SECOND];
    ONT_TRY(begin_state(s, device, dr, NULL, given->stream));
    ONT_TRY(begin_state(s, device, dh, given->dh, given->stream));
    if (lstm) ONT_TRY(begin_state(s, device, dc, given->dc, given->stream));
    for (int64_t k = 0; k < s->steps; k++) {
        ont_cell_step cell = s->cell;
        cell.t = s->reverse ? k : s->steps - 1 - k;
        void *dq_row = row(s, dq, cell.t, rows);
        const ont_cell_grad_operands o = {
            .saved = row(s, given->saved, cell.t, state * s->cell.runs), .lengths = given->lengths,
            .dy = row(s, given->dy, cell.t, state), .dr = dr, .dh = dh, .dc = dc, .dq = dq_row,
            .dx = s->separate ? row(s, given->dx, cell.t, rows) : NULL};
        ONT_TRY(ont_launched(ont_launch_cell_grad(&cell, &o, given->stream)));
        const ont_blas_operands product = {.a = dq_row, .b = given->r, .c = dr, .work = given->work};
        ONT_TRY(s->blas->run(s->step, &product, given->stream));
    }
    ONT_TRY(weight_grads(s, given, dq));
    if (!given->dh0) return ONT_OK;
    return ont_launched(ont_launch_index_add(s->cell.dtype, state, dh, dr, given->dh0, given->stream));
}

/* ---- nodes ---- */

static ont_steps steps_of_node(const ont_node *node)
{
    bool gradient = !strcmp(node->op->name, "RecurrentStepsGrad");
    const ont_value *r = ont_node_in(node, gradient ? WEIGHT : R), *x = ont_node_in(node, X);
    ont_steps s = ont_steps_of((ont_cell)ont_attr_int(node, "cell", 0), r->dtype,
                               gradient ? ont_attr_int(node, "steps", 0) : x->shape.dims[0],
                               gradient ? ont_attr_int(node, "batch", 0) : x->shape.dims[1], r->shape.dims[1],
                               ont_attr_int(node, "reverse", 0) != 0, gradient);
    s.separate |= gradient && !ont_node_out(node, 0);
    return s;
}

static const char *steps_accept(const ont_node *node)
{
    ont_steps s = steps_of_node(node);
    return ont_steps_refusal(&s);
}

static ont_status steps_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_steps *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = steps_of_node(node);
    out->state = s;
    return ont_steps_prepare(s, s->gradient && ont_node_out(node, 1), &out->work_bytes);
}

static ont_status steps_run(const ont_call *call)
{
    const ont_steps *s = call->state;
    const ont_steps_operands o = {
        .x = call->in[X], .r = call->in[R], .h0 = ont_operand(call, H0), .c0 = ont_operand(call, C0),
        .lengths = ont_operand(call, LENS), .bias = ont_operand(call, BIAS), .y = call->out[0],
        .h = ont_result(call, 1), .c = ont_result(call, 3), .saved = ont_result(call, 2), .work = call->work,
        .stream = call->stream};
    return ont_steps_run(s, call->device, &o);
}

static ont_status steps_grad_run(const ont_call *call)
{
    const ont_steps *s = call->state;
    const bool gru = s->cell.cell == ONT_CELL_GRU;
    const ont_steps_grad_operands o = {
        .saved = call->in[SAVED], .r = call->in[WEIGHT], .lengths = ont_operand(call, LENGTHS),
        .dy = ont_operand(call, DY), .dh = ont_operand(call, DH), .dc = ont_operand(call, DC), .dx = call->out[0],
        .dr = ont_result(call, 1), .dh0 = ont_result(call, 2), .dc0 = gru ? NULL : ont_result(call, 3),
        .dbias = gru ? ont_result(call, 3) : NULL, .work = call->work, .stream = call->stream};
    return ont_steps_grad_run(s, call->device, &o);
}

const ont_kernel ont_cuda_recurrent_kernels[2] = {
    {.name = "cuda_recurrent_steps", .accept = steps_accept, .prepare = steps_prepare, .run = steps_run,
     .release = ont_steps_release},
    {.name = "cuda_recurrent_steps_grad", .accept = steps_accept, .prepare = steps_prepare, .run = steps_grad_run,
     .release = ont_steps_release},
};
