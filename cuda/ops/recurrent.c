/*
 * RecurrentSteps and its gradient on a device: for each step a product by blas.h and a kernel for the cells. What is
 * saved for the gradient has the rows of all sequences at each step, (T, B, runs * H), in contrast to the CPU, which
 * leaves out sequences that have ended.
 */
#include <string.h>

#include "libs/blas.h"
#include "ops_common.h"

enum { X, R, H0, C0, LENS, BIAS };           /* inputs of RecurrentSteps */
enum { SAVED, WEIGHT, LENGTHS, DY, DH, DC }; /* inputs of its gradient */
enum { FIRST, SECOND, THIRD, ROWS, PARTS };  /* parts of the scratch memory; ROWS: of one step or of all */

typedef struct steps_state {
    ont_cell_step cell;
    int64_t steps, wide;     /* wide: gates * H */
    bool reverse, separate;  /* separate: the gradient of the products is no output */
    const ont_blas *blas;
    void *step, *weight;     /* plans; weight: of the gradient of R, or NULL */
    size_t element, part[PARTS], plan_bytes;
} steps_state;

static bool is_grad(const ont_node *node) { return !strcmp(node->op->name, "RecurrentStepsGrad"); }

static void read_steps(const ont_node *node, steps_state *s)
{
    const ont_value *r = ont_node_in(node, is_grad(node) ? WEIGHT : R), *x = ont_node_in(node, X);
    ont_cell cell = (ont_cell)ont_attr_int(node, "cell", 0);
    *s = (steps_state){.steps = is_grad(node) ? ont_attr_int(node, "steps", 0) : x->shape.dims[0],
                       .wide = r->shape.dims[0], .reverse = ont_attr_int(node, "reverse", 0) != 0,
                       .blas = ont_blas_get(), .element = ont_dtype_size(r->dtype)};
    s->cell = (ont_cell_step){.batch = is_grad(node) ? ont_attr_int(node, "batch", 0) : x->shape.dims[1],
                              .hidden = r->shape.dims[1], .cell = (int32_t)cell, .gates = ont_cell_gates(cell),
                              .runs = ont_cell_saved(cell), .dtype = r->dtype};
    s->separate = is_grad(node) && (cell == ONT_CELL_GRU || !ont_node_out(node, 0));
}

/* Of one step: q = h R^T, or the gradient of h through q, dq R. */
static ont_blas_gemm step_product(const steps_state *s, bool gradient)
{
    int64_t hidden = s->cell.hidden;
    return (ont_blas_gemm){.dtype = s->cell.dtype, .result = s->cell.dtype, .trans_b = !gradient,
                           .m = s->cell.batch, .n = gradient ? hidden : s->wide, .k = gradient ? s->wide : hidden,
                           .lda = gradient ? s->wide : hidden, .ldb = hidden, .ldc = gradient ? hidden : s->wide,
                           .batch = 1, .alpha = 1};
}

/* The gradient of R: over all steps, dq^T times the states before them. */
static ont_blas_gemm weight_product(const steps_state *s)
{
    return (ont_blas_gemm){.dtype = s->cell.dtype, .result = s->cell.dtype, .trans_a = true, .m = s->wide,
                           .n = s->cell.hidden, .k = s->steps * s->cell.batch, .lda = s->wide,
                           .ldb = s->cell.runs * s->cell.hidden, .ldc = s->cell.hidden, .batch = 1, .alpha = 1};
}

static const char *steps_accept(const ont_node *node)
{
    steps_state s;
    read_steps(node, &s);
    if (!ont_is_float32_or_64(s.cell.dtype)) return "dtype";
    if (!s.blas) return "cuBLASLt is not found";
    if (!s.steps || !s.cell.batch || !s.cell.hidden) return "nothing to compute";
    ont_blas_gemm step = step_product(&s, is_grad(node)), weight = weight_product(&s);
    const char *reason = s.blas->accept(&step);
    return reason || !is_grad(node) ? reason : s.blas->accept(&weight);
}

static ont_status steps_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    bool gradient = is_grad(node);
    steps_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    read_steps(node, s);
    out->state = s;
    ont_blas_gemm step = step_product(s, gradient), weight = weight_product(s);
    ONT_TRY(s->blas->create(&step, &s->step));
    s->plan_bytes = s->blas->work_bytes(s->step);
    if (gradient && ont_node_out(node, 1)) {
        ONT_TRY(s->blas->create(&weight, &s->weight));
        size_t bytes = s->blas->work_bytes(s->weight);
        if (bytes > s->plan_bytes) s->plan_bytes = bytes;
    }
    int64_t state = s->cell.batch * s->cell.hidden, rows = s->cell.batch * s->wide;
    int64_t spare = gradient ? (s->separate ? s->steps * rows : 0) : s->cell.batch * s->cell.runs * s->cell.hidden;
    int64_t numbers[PARTS] = {state, state, gradient ? state : rows, spare};
    out->work_bytes = s->plan_bytes = (s->plan_bytes + 255) / 256 * 256;
    for (int i = 0; i < PARTS; i++) {
        s->part[i] = ((size_t)numbers[i] * s->element + 255) / 256 * 256;
        out->work_bytes += s->part[i];
    }
    return ONT_OK;
}

static void steps_release(void *opaque)
{
    const steps_state *s = opaque;
    if (s->step) s->blas->destroy(s->step);
    if (s->weight) s->blas->destroy(s->weight);
}

/* The plans' memory is first in the scratch memory, then the parts. */
static void parts_of(const ont_call *call, char *part[PARTS])
{
    const steps_state *s = call->state;
    char *at = (char *)call->work + s->plan_bytes;
    for (int i = 0; i < PARTS; i++) {
        part[i] = at;
        at += s->part[i];
    }
}

/* Row t of what has `numbers` elements for each step; NULL stays NULL. */
static void *row(const steps_state *s, const void *base, int64_t t, int64_t numbers)
{
    return base ? (char *)(uintptr_t)base + (size_t)(t * numbers) * s->element : NULL;
}

/* A state (B, H) as given, or zeros. */
static ont_status begin_state(const ont_call *call, void *to, const void *given)
{
    const steps_state *s = call->state;
    size_t bytes = (size_t)(s->cell.batch * s->cell.hidden) * s->element;
    return given ? call->device->ops->copy(call->device, to, given, bytes, call->stream)
                 : call->device->ops->clear(call->device, to, bytes, call->stream);
}

static ont_status steps_run(const ont_call *call)
{
    const steps_state *s = call->state;
    const bool lstm = s->cell.cell == ONT_CELL_LSTM;
    const int64_t rows = s->cell.batch * s->wide, saved = s->cell.batch * s->cell.runs * s->cell.hidden;
    char *part[PARTS];
    parts_of(call, part);
    void *h = ont_result(call, 1) ? ont_result(call, 1) : part[FIRST];
    void *c = !lstm ? NULL : ont_result(call, 3) ? ont_result(call, 3) : part[SECOND];
    ONT_TRY(begin_state(call, h, ont_operand(call, H0)));
    if (lstm) ONT_TRY(begin_state(call, c, ont_operand(call, C0)));
    const ont_blas_operands product = {.a = h, .b = call->in[R], .c = part[THIRD], .work = call->work};
    for (int64_t k = 0; k < s->steps; k++) {
        ont_cell_step cell = s->cell;
        cell.t = s->reverse ? s->steps - 1 - k : k;
        const ont_cell_operands o = {
            .x = row(s, call->in[X], cell.t, rows), .q = part[THIRD], .bias = ont_operand(call, BIAS),
            .lengths = ont_operand(call, LENS), .h = h, .c = c,
            .saved = ont_result(call, 2) ? row(s, ont_result(call, 2), cell.t, saved) : part[ROWS],
            .y = row(s, call->out[0], cell.t, s->cell.batch * s->cell.hidden)};
        ONT_TRY(s->blas->run(s->step, &product, call->stream));
        ONT_TRY(ont_launched(ont_launch_cell(&cell, &o, call->stream)));
    }
    return ONT_OK;
}

/* The gradients of R, and of the bias of a GRU's candidate. */
static ont_status weight_grads(const ont_call *call, void *dq)
{
    const steps_state *s = call->state;
    const int64_t hidden = s->cell.hidden;
    const ont_blas_operands product = {.a = dq, .b = row(s, call->in[SAVED], s->cell.runs - 1, hidden),
                                       .c = ont_result(call, 1), .work = call->work};
    if (s->weight) ONT_TRY(s->blas->run(s->weight, &product, call->stream));
    if (s->cell.cell != ONT_CELL_GRU || !ont_result(call, 3)) return ONT_OK;
    return ont_launched(ont_launch_column_sums(s->cell.dtype, s->steps * s->cell.batch, hidden, s->wide,
                                               row(s, dq, 2, hidden), ont_result(call, 3), call->stream));
}

static ont_status steps_grad_run(const ont_call *call)
{
    const steps_state *s = call->state;
    const bool lstm = s->cell.cell == ONT_CELL_LSTM;
    const int64_t rows = s->cell.batch * s->wide, state = s->cell.batch * s->cell.hidden;
    char *part[PARTS];
    parts_of(call, part);
    void *dh = part[FIRST], *dr = part[THIRD], *dq = s->separate ? part[ROWS] : call->out[0];
    void *dc = !lstm ? NULL : ont_result(call, 3) ? ont_result(call, 3) : part[SECOND];
    ONT_TRY(begin_state(call, dr, NULL));
    ONT_TRY(begin_state(call, dh, ont_operand(call, DH)));
    if (lstm) ONT_TRY(begin_state(call, dc, ont_operand(call, DC)));
    for (int64_t k = 0; k < s->steps; k++) {
        ont_cell_step cell = s->cell;
        cell.t = s->reverse ? k : s->steps - 1 - k;
        void *dq_row = row(s, dq, cell.t, rows);
        const ont_cell_grad_operands o = {
            .saved = row(s, call->in[SAVED], cell.t, state * s->cell.runs), .lengths = ont_operand(call, LENGTHS),
            .dy = row(s, ont_operand(call, DY), cell.t, state), .dr = dr, .dh = dh, .dc = dc, .dq = dq_row,
            .dx = s->separate ? row(s, call->out[0], cell.t, rows) : NULL};
        ONT_TRY(ont_launched(ont_launch_cell_grad(&cell, &o, call->stream)));
        const ont_blas_operands product = {.a = dq_row, .b = call->in[WEIGHT], .c = dr, .work = call->work};
        ONT_TRY(s->blas->run(s->step, &product, call->stream));
    }
    ONT_TRY(weight_grads(call, dq));
    if (!ont_result(call, 2)) return ONT_OK;
    return ont_launched(ont_launch_index_add(s->cell.dtype, state, dh, dr, ont_result(call, 2), call->stream));
}

const ont_kernel ont_cuda_recurrent_kernels[2] = {
    {.name = "cuda_recurrent_steps", .accept = steps_accept, .prepare = steps_prepare, .run = steps_run,
     .release = steps_release},
    {.name = "cuda_recurrent_steps_grad", .accept = steps_accept, .prepare = steps_prepare, .run = steps_grad_run,
     .release = steps_release},
};
