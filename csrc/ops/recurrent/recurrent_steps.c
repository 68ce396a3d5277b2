/*
 * RecurrentSteps: the steps of one direction of an RNN, GRU (linear_before_reset) or LSTM with torch's activations,
 * which recurrent.c builds. A step is one product for the sequences that have not ended, and a loop over their cells.
 *
 * Inputs: x (T, B, gates * H), the input's part of the gates with biases; R (gates * H, H); h (B, H); c (B, H), LSTM
 * alone; lengths int64 (B, 1), or absent; the bias of the GRU's candidate (H), or absent. Outputs: y (T, B, H), zero
 * behind a sequence's end; the last h; what backward needs, (T * B, runs * H); the last c.
 *
 * The sequences are taken in descending order of length, so that those of a step come first in the states, whichever
 * the direction is. What is saved has the rows of all steps one after the other, without gaps.
 */
#include <string.h>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "device/gemm_native.h"
#include "ops/op.h"
#include "simd/recurrent/recurrent.h"

enum { X, R, H0, C0, LENS, BIAS };             /* inputs of RecurrentSteps */
enum { SAVED, WEIGHT, LENGTHS, DY, DH, DC };   /* inputs of its gradient */
enum { CELLS = 4096, LINE = 64 };              /* numbers that are worth a thread; bytes of a cache line */

/* A product of a step, with any number of rows up to gemm.m. */
typedef struct product {
    ont_gemm gemm;
    const ont_gemm_backend *backend;
    const ont_gemm_kernel *native; /* NULL: the backend runs */
    int threads; /* for which there is work memory; the number when it runs may be another */
} product;

typedef struct steps_state {
    ont_cell cell;
    ont_dtype dtype;
    bool reverse;
    int64_t steps, batch, hidden, wide, runs; /* wide: gates * H; runs: H times what a cell saves */
    const ont_cell_loops *loops;
    product step, weight; /* weight: the gradient of R, over all rows */
    size_t gemm_bytes;
    size_t part[6]; /* bytes of the parts of the scratch memory */
} steps_state;

static int64_t attribute(const ont_node *node, const char *name)
{
    return ont_attr_int(node, name, 0);
}

/* ---- shapes ---- */

static ont_status steps_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *r;
    ONT_TRY(ont_need_input(node, X, &x));
    ONT_TRY(ont_need_input(node, R, &r));
    ont_cell cell = (ont_cell)attribute(node, "cell");
    int64_t steps = x->shape.dims[0], batch = x->shape.dims[1], hidden = r->shape.dims[1];
    if (x->shape.dims[2] != ont_cell_gates(cell) * hidden) return ont_fail(ONT_EINVAL, "x does not fit R");
    ont_shape y = ont_shape_of(3, (int64_t[]){steps, batch, hidden});
    ont_shape last = ont_shape_of(2, (int64_t[]){batch, hidden});
    ont_shape saved = ont_shape_of(2, (int64_t[]){steps * batch, ont_cell_saved(cell) * hidden});
    ONT_TRY(ont_infer_out(node, 0, x->dtype, &y));
    ONT_TRY(ont_infer_out(node, 1, x->dtype, &last));
    ONT_TRY(ont_infer_out(node, 2, x->dtype, &saved));
    return ont_infer_out(node, 3, x->dtype, &last);
}

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *r = ont_node_in(node, WEIGHT);
    ont_cell cell = (ont_cell)attribute(node, "cell");
    int64_t batch = attribute(node, "batch"), hidden = r->shape.dims[1];
    ont_shape dx = ont_shape_of(3, (int64_t[]){attribute(node, "steps"), batch, r->shape.dims[0]});
    ont_shape state = ont_shape_of(2, (int64_t[]){batch, hidden}), bias = ont_shape_of(1, &hidden);
    ONT_TRY(ont_infer_out(node, 0, r->dtype, &dx));
    ONT_TRY(ont_infer_out(node, 1, r->dtype, &r->shape));
    ONT_TRY(ont_infer_out(node, 2, r->dtype, &state));
    return ont_infer_out(node, 3, r->dtype, cell == ONT_CELL_GRU ? &bias : &state);
}

static void steps_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_cell cell = (ont_cell)attribute(g->node, "cell");
    ont_value *saved;
    b->status = ont_node_ensure_output(b->graph, g->node, 2, &saved);
    if (b->status == ONT_OK) b->status = steps_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {saved, I(R), I(LENS), g->out_grads[0], g->out_grads[1],
                             cell == ONT_CELL_LSTM && O(3) ? g->out_grads[3] : NULL};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "RecurrentStepsGrad", operands, 6, cell < ONT_CELL_GRU ? 3 : 4);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "steps", I(X)->shape.dims[0]);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "batch", I(X)->shape.dims[1]);
    GI(X, ont_build_done(b, node));
    if (b->status != ONT_OK) return;
    GI(R, ont_node_out(node, 1));
    GI(H0, ont_node_out(node, 2));
    if (cell == ONT_CELL_LSTM) GI(C0, ont_node_out(node, 3));
    if (cell == ONT_CELL_GRU && I(BIAS)) GI(BIAS, ont_node_out(node, 3));
}

/* ---- preparation ---- */

static void choose(steps_state *s, bool plain, product *p, ont_gemm gemm)
{
    gemm.dtype = s->dtype;
    gemm.alpha = 1;
    *p = (product){.gemm = gemm, .backend = ont_gemm_reference()};
    if (plain || !gemm.m || !gemm.n || !gemm.k) return;
    p->backend = ont_gemm_choose(&gemm);
    if (!ont_gemm_refuses("native", &gemm)) p->native = ont_gemm_native_kernel(s->dtype);
    if (!p->native) return;
    p->threads = ont_parallel_threads();
    for (int threads = p->threads; threads; threads = threads > 1) { /* that many, then one */
        ont_gemm_native native;
        ont_gemm_native_init(&native, p->native, &gemm, s->dtype, threads);
        size_t bytes = ont_gemm_native_work_bytes(&native);
        if (bytes > s->gemm_bytes) s->gemm_bytes = bytes;
    }
}

/* Scratch memory: the order and the sizes of steps, and four parts of numbers. */
static void lay_out(steps_state *s, const int64_t numbers[4], ont_prepared *out)
{
    size_t each = ont_dtype_size(s->dtype);
    s->part[0] = (size_t)s->batch * sizeof(int64_t);
    s->part[1] = (size_t)s->steps * sizeof(int64_t);
    for (int i = 0; i < 4; i++) s->part[2 + i] = (size_t)numbers[i] * each;
    out->state = s;
    out->work_bytes = s->gemm_bytes;
    for (int i = 0; i < 6; i++) {
        s->part[i] = (size_t)ont_round_up((int64_t)s->part[i], LINE);
        out->work_bytes += s->part[i];
    }
}

static steps_state *new_state(const ont_node *node, ont_arena *arena, bool plain, const ont_value *r)
{
    steps_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return NULL;
    ont_cell cell = (ont_cell)attribute(node, "cell");
    *s = (steps_state){.cell = cell, .dtype = r->dtype, .reverse = attribute(node, "reverse") != 0,
                       .hidden = r->shape.dims[1], .wide = r->shape.dims[0],
                       .runs = ont_cell_saved(cell) * r->shape.dims[1], .loops = ont_simd_cell(cell, r->dtype, plain)};
    return s;
}

static ont_status prepare_forward(const ont_node *node, ont_arena *arena, ont_prepared *out, bool plain)
{
    const ont_value *x = ont_node_in(node, X);
    steps_state *s = new_state(node, arena, plain, ont_node_in(node, R));
    if (!s) return ONT_ENOMEM;
    s->steps = x->shape.dims[0];
    s->batch = x->shape.dims[1];
    choose(s, plain, &s->step, (ont_gemm){.trans_b = true, .m = s->batch, .n = s->wide, .k = s->hidden,
                                          .lda = s->hidden, .ldb = s->hidden, .ldc = s->wide});
    int64_t state = s->batch * s->hidden;
    lay_out(s, (int64_t[]){s->batch * s->wide, state, s->cell == ONT_CELL_LSTM ? state : 0, s->batch * s->runs}, out);
    return ONT_OK;
}

/* Whether the gradient of q has memory of its own: else it is that of x. */
static bool separate(const steps_state *s, const ont_node *node)
{
    return s->cell == ONT_CELL_GRU || ont_node_in(node, LENGTHS) || !ont_node_out(node, 0);
}

static ont_status prepare_backward(const ont_node *node, ont_arena *arena, ont_prepared *out, bool plain)
{
    steps_state *s = new_state(node, arena, plain, ont_node_in(node, WEIGHT));
    if (!s) return ONT_ENOMEM;
    s->steps = attribute(node, "steps");
    s->batch = attribute(node, "batch");
    choose(s, plain, &s->step, (ont_gemm){.m = s->batch, .n = s->hidden, .k = s->wide, .lda = s->wide,
                                          .ldb = s->hidden, .ldc = s->hidden});
    choose(s, plain, &s->weight, (ont_gemm){.trans_a = true, .m = s->wide, .n = s->hidden, .k = s->steps * s->batch,
                                            .lda = s->wide, .ldb = s->runs, .ldc = s->hidden});
    int64_t state = s->batch * s->hidden, last = s->cell == ONT_CELL_LSTM ? state : 0;
    if (s->cell == ONT_CELL_GRU && !ont_node_out(node, 0)) last = s->batch * s->wide;
    lay_out(s, (int64_t[]){separate(s, node) ? s->steps * s->batch * s->wide : 0, state, state, last}, out);
    return ONT_OK;
}

#define PREPARE(way) \
    static ont_status prepare_##way##_fast(const ont_node *node, ont_arena *arena, ont_prepared *out) \
    { \
        return prepare_##way(node, arena, out, false); \
    } \
    static ont_status prepare_##way##_ref(const ont_node *node, ont_arena *arena, ont_prepared *out) \
    { \
        return prepare_##way(node, arena, out, true); \
    }
PREPARE(forward)
PREPARE(backward)

/* ---- what both directions of the computation share ---- */

typedef struct steps_run {
    const ont_call *call;
    const steps_state *s;
    int64_t *order;  /* (B) the sequences, the longest first */
    int64_t *sizes;  /* (T) how many of them have each step */
    char *part[4], *gemm_work;
    int64_t t, row;  /* the step, and its first row among those of all steps */
} steps_run;

/* NULL: absent. */
static const void *input(const ont_call *call, uint32_t index)
{
    return index < call->node->n_inputs ? call->in[index] : NULL;
}

static void *output(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

/* Element i of an array of the state's dtype. */
static void *element(const steps_state *s, const void *array, int64_t i)
{
    return (char *)(uintptr_t)array + i * (int64_t)ont_dtype_size(s->dtype);
}

/*
 * Computes C = op(A) op(B). The native GEMM rounds alike for any number of threads; where fewer rows make tiles that
 * need more work memory, one tile needs the least.
 */
static void multiply(const steps_run *r, const product *p, ont_gemm gemm, const void *a, const void *b, void *c)
{
    ont_gemm_native native;
    for (int threads = p->native ? p->threads : 0; threads; threads = threads > 1) {
        ont_gemm_native_init(&native, p->native, &gemm, gemm.dtype, threads);
        if (ont_gemm_native_work_bytes(&native) > r->s->gemm_bytes) continue;
        ont_gemm_native_run(&native, a, b, NULL, c, NULL, r->gemm_work);
        return;
    }
    p->backend->run(&gemm, a, b, c);
}

static void multiply_rows(const steps_run *r, int64_t rows, const void *a, const void *b, void *c)
{
    ont_gemm gemm = r->s->step.gemm;
    gemm.m = rows;
    multiply(r, &r->s->step, gemm, a, b, c);
}

/* Sorts the sequences by length, equal ones in their order, by counting. */
static void sort(steps_run *r, const int64_t *lens)
{
    const steps_state *s = r->s;
    int64_t at = 0;
    for (int64_t t = 0; t < s->steps; t++) r->sizes[t] = lens ? 0 : s->batch;
    for (int64_t i = 0; lens && i < s->batch; i++)
        if (lens[i] > 0) r->sizes[ont_min(lens[i], s->steps) - 1]++;
    for (int64_t length = s->steps; lens && length >= 0; length--)
        for (int64_t i = 0; i < s->batch && (!length || r->sizes[length - 1]); i++)
            if (ont_max(ont_min(lens[i], s->steps), 0) == length) r->order[at++] = i;
    for (int64_t i = 0; !lens && i < s->batch; i++) r->order[i] = i;
    for (int64_t t = s->steps - 2; lens && t >= 0; t--) r->sizes[t] += r->sizes[t + 1];
    ONT_ASSERT(!lens || at == s->batch);
}

static steps_run begin(const ont_call *call, uint32_t lens)
{
    const steps_state *s = call->state;
    steps_run r = {.call = call, .s = s};
    char *at = call->work;
    r.order = (int64_t *)(void *)at;
    at += s->part[0];
    r.sizes = (int64_t *)(void *)at;
    at += s->part[1];
    for (int i = 0; i < 4; i++) {
        r.part[i] = at;
        at += s->part[2 + i];
    }
    r.gemm_work = at;
    sort(&r, input(call, lens));
    return r;
}

/* Rows (B, H) in the order of lengths, of rows as the graph has them, or the other way round. NULL: zeros. */
static void permute(const steps_run *r, void *to, const void *from, bool back)
{
    size_t bytes = (size_t)r->s->hidden * ont_dtype_size(r->s->dtype);
    for (int64_t i = 0; i < r->s->batch; i++) {
        int64_t sorted = r->order[i], source = back ? i : sorted, target = back ? sorted : i;
        if (from) memcpy((char *)to + (size_t)target * bytes, (const char *)from + (size_t)source * bytes, bytes);
        else memset((char *)to + (size_t)target * bytes, 0, bytes);
    }
}

/* Zeros behind the ends of sequences in rows (T, B, width). */
static void clear_ends(const steps_run *r, void *rows, int64_t width)
{
    size_t bytes = (size_t)width * ont_dtype_size(r->s->dtype);
    for (int64_t t = 0; t < r->s->steps; t++)
        for (int64_t i = r->sizes[t]; i < r->s->batch; i++)
            memset((char *)rows + (size_t)(t * r->s->batch + r->order[i]) * bytes, 0, bytes);
}

static int64_t first_row(const steps_run *r, bool last)
{
    int64_t rows = 0;
    for (int64_t t = 0; last && t < r->s->steps; t++) rows += r->sizes[t];
    return rows;
}

/* Calls body for each step, upwards in time or downwards. */
static void for_each_step(steps_run *r, bool down, void (*body)(steps_run *r, int64_t rows))
{
    int64_t row = first_row(r, down);
    for (int64_t k = 0; k < r->s->steps; k++) {
        r->t = down ? r->s->steps - 1 - k : k;
        int64_t rows = r->sizes[r->t];
        ONT_ASSERT(rows >= 0 && rows <= r->s->batch);
        if (down) row -= rows;
        r->row = row;
        if (rows) body(r, rows);
        if (!down) row += rows;
    }
}

/* ---- forward ---- */

enum { Q, H, C, SPARE };

static void forward_cells(void *context, int64_t first, int64_t last)
{
    const steps_run *r = context;
    const steps_state *s = r->s;
    const ont_call *call = r->call;
    for (int64_t i = first; i < last; i++) {
        int64_t at = r->t * s->batch + r->order[i];
        void *saved = output(call, 2) ? element(s, output(call, 2), (r->row + i) * s->runs)
                                   : element(s, r->part[SPARE], i * s->runs);
        const ont_cell_row row = {.hidden = s->hidden, .x = element(s, input(call, X), at * s->wide),
                                  .q = element(s, r->part[Q], i * s->wide), .bias = input(call, BIAS),
                                  .h = element(s, r->part[H], i * s->hidden),
                                  .c = element(s, r->part[C], i * s->hidden), .saved = saved};
        s->loops->step(&row);
        if (output(call, 0))
            memcpy(element(s, output(call, 0), at * s->hidden), row.h, (size_t)s->hidden * ont_dtype_size(s->dtype));
    }
}

static void forward_step(steps_run *r, int64_t rows)
{
    multiply_rows(r, rows, r->part[H], input(r->call, R), r->part[Q]);
    ont_parallel(rows, ont_max(CELLS / ont_max(r->s->hidden, 1), 1), forward_cells, r);
}

static ont_status forward_run(const ont_call *call)
{
    steps_run r = begin(call, LENS);
    bool lstm = r.s->cell == ONT_CELL_LSTM;
    permute(&r, r.part[H], input(call, H0), false);
    if (lstm) permute(&r, r.part[C], input(call, C0), false);
    for_each_step(&r, r.s->reverse, forward_step);
    if (output(call, 0)) clear_ends(&r, output(call, 0), r.s->hidden);
    if (output(call, 1)) permute(&r, output(call, 1), r.part[H], true);
    if (lstm && output(call, 3)) permute(&r, output(call, 3), r.part[C], true);
    return ONT_OK;
}

/* ---- backward ---- */

enum { DQ_PART, DR_PART, DH_PART, DC_PART }; /* the last: of a GRU the gradient of x, where nothing else keeps it */

static char *dq_rows(const steps_run *r)
{
    return separate(r->s, r->call->node) ? r->part[DQ_PART] : output(r->call, 0);
}

static void backward_cells(void *context, int64_t first, int64_t last)
{
    const steps_run *r = context;
    const steps_state *s = r->s;
    const ont_call *call = r->call;
    for (int64_t i = first; i < last; i++) {
        int64_t at = r->t * s->batch + r->order[i];
        void *dx = s->cell == ONT_CELL_GRU ? element(s, r->part[DC_PART], i * s->wide) : NULL;
        if (output(call, 0) && separate(s, call->node)) dx = element(s, output(call, 0), at * s->wide);
        const ont_cell_grad_row row = {
            .hidden = s->hidden, .saved = element(s, input(call, SAVED), (r->row + i) * s->runs),
            .dy = input(call, DY) ? element(s, input(call, DY), at * s->hidden) : NULL,
            .dr = element(s, r->part[DR_PART], i * s->hidden), .dh = element(s, r->part[DH_PART], i * s->hidden),
            .dc = element(s, r->part[DC_PART], i * s->hidden),
            .dx = dx,
            .dq = element(s, dq_rows(r), (r->row + i) * s->wide)};
        s->loops->grad(&row);
    }
}

static void backward_step(steps_run *r, int64_t rows)
{
    ont_parallel(rows, ont_max(CELLS / ont_max(r->s->hidden, 1), 1), backward_cells, r);
    multiply_rows(r, rows, element(r->s, dq_rows(r), r->row * r->s->wide), input(r->call, WEIGHT), r->part[DR_PART]);
}

/* The gradient of the candidate's bias: sums of the last H columns of dq. */
static void sum_bias(const steps_run *r, int64_t rows)
{
    const steps_state *s = r->s;
    const void *from = element(s, r->part[DQ_PART], 2 * s->hidden);
    if (s->dtype == ONT_FLOAT32) {
        ont_gemm gemm = {.m = s->hidden, .k = rows, .lda = s->wide};
        ont_gemm_sum_a(&gemm, from, output(r->call, 3));
        return;
    }
    double *sums = output(r->call, 3);
    for (int64_t k = 0; k < s->hidden; k++) sums[k] = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < s->hidden; k++) sums[k] += ((const double *)from)[i * s->wide + k];
}

/* The gradients of the first states: adds the part that came through the recurrent product to the rest. */
static void give_states(const steps_run *r)
{
    int64_t n = r->s->batch * r->s->hidden;
    void *dh = r->part[DH_PART], *dr = r->part[DR_PART];
    if (r->s->dtype == ONT_FLOAT32)
        for (int64_t i = 0; i < n; i++) ((float *)dh)[i] += ((const float *)dr)[i];
    else
        for (int64_t i = 0; i < n; i++) ((double *)dh)[i] += ((const double *)dr)[i];
    if (output(r->call, 2)) permute(r, output(r->call, 2), r->part[DH_PART], true);
    if (r->s->cell == ONT_CELL_LSTM && output(r->call, 3)) permute(r, output(r->call, 3), r->part[DC_PART], true);
}

static ont_status backward_run(const ont_call *call)
{
    steps_run r = begin(call, LENGTHS);
    const steps_state *s = r.s;
    permute(&r, r.part[DR_PART], NULL, false);
    permute(&r, r.part[DH_PART], input(call, DH), false);
    if (s->cell == ONT_CELL_LSTM) permute(&r, r.part[DC_PART], input(call, DC), false);
    for_each_step(&r, !s->reverse, backward_step);
    if (output(call, 0)) clear_ends(&r, output(call, 0), s->wide);
    int64_t rows = first_row(&r, true);
    if (output(call, 1)) {
        ont_gemm gemm = s->weight.gemm;
        gemm.k = rows;
        if (rows) multiply(&r, &s->weight, gemm, dq_rows(&r), element(s, input(call, SAVED), s->runs - s->hidden),
                           output(call, 1));
        else memset(output(call, 1), 0, (size_t)(s->wide * s->hidden) * ont_dtype_size(s->dtype));
    }
    if (s->cell == ONT_CELL_GRU && output(call, 3)) sum_bias(&r, rows);
    give_states(&r);
    return ONT_OK;
}

static const ont_kernel steps_kernels[] = {
    {.name = "recurrent_steps", .accept = ont_accept_float, .prepare = prepare_forward_fast, .run = forward_run},
    {.name = "recurrent_steps_ref", .accept = ont_accept_float, .prepare = prepare_forward_ref, .run = forward_run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "recurrent_steps", .accept = ont_accept_float, .prepare = prepare_backward_fast, .run = backward_run},
    {.name = "recurrent_steps_ref", .accept = ont_accept_float, .prepare = prepare_backward_ref, .run = backward_run},
};
const ont_op ont_op_RecurrentSteps = {.domain = ONT_DOMAIN, .name = "RecurrentSteps", .since = 1, .min_inputs = 3,
                                      .max_inputs = 6, .nondiff_inputs = 1 << LENS, .nondiff_outputs = 1 << 2,
                                      .attributes = "cell:i reverse:i", .infer = steps_infer, .grad = steps_grad,
                                      ONT_KERNELS(steps_kernels)};
const ont_op ont_op_RecurrentStepsGrad = {.domain = ONT_DOMAIN, .name = "RecurrentStepsGrad", .since = 1,
                                          .min_inputs = 2, .max_inputs = 6,
                                          .attributes = "batch:i cell:i reverse:i steps:i", .infer = grad_infer,
                                          ONT_KERNELS(grad_kernels)};
