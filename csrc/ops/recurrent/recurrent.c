/*
 * LSTM, GRU and RNN. A device may have a kernel for the whole node, with the gradient of recurrent_whole.c. Elsewhere
 * they are expanded: one GEMM computes the input's part of all gates for all steps. With torch's
 * activations, RecurrentSteps (recurrent_steps.c) does the steps. Any other cell is unrolled over time: each step adds
 * the state's part, and the gradient is that of the expansion (back-propagation through time). Past its end, a shorter
 * sequence keeps its state and gives zeros; backwards in time it starts at its own end.
 */
#include <inttypes.h>

#include "ops/recurrent/recurrent_desc.h"
#include "ops/recurrent/recurrent_whole.h"
#include "ops/support/compose.h"

enum { MAX_STEPS = 4096 };

static ont_status infer_recurrent(ont_node *node, ont_recurrent_kind kind)
{
    ont_recurrent r = {0};
    ONT_TRY(ont_recurrent_parse(node, kind, &r));
    int64_t t = r.steps, d = r.directions, n = r.batch, h = r.hidden;
    ont_shape y = ont_shape_of(4, (int64_t[]){t, d, n, h}), last = ont_shape_of(3, (int64_t[]){d, n, h});
    if (r.batch_first) {
        y = ont_shape_of(4, (int64_t[]){n, t, d, h});
        last = ont_shape_of(3, (int64_t[]){n, d, h});
    }
    ONT_TRY(ont_infer_out(node, 0, r.dtype, &y));
    ONT_TRY(ont_infer_out(node, 1, r.dtype, &last));
    if (kind == ONT_RECURRENT_LSTM) ONT_TRY(ont_infer_out(node, 2, r.dtype, &last));
    int64_t bytes = ont_attr_int(node, "saved_bytes", 0);
    if (bytes < 0) return ont_fail(ONT_EINVAL, "saved_bytes is %" PRId64, bytes);
    ont_shape saved = ont_shape_of(1, (int64_t[]){bytes});
    return ont_infer_out(node, ONT_RECURRENT_SAVED, ONT_UINT8, &saved);
}

/* ---- one direction ---- */

typedef struct weights {
    ont_value *input;        /* (T, B, gates * H): input's part of the gates, biases included */
    ont_value *rec;          /* R (gates * H, H) */
    ont_value *rec_gates, *rec_new; /* GRU: R of z and r (2 * H, H), and of the candidate (H, H) */
    ont_value *bias_new;     /* GRU with linear_before_reset: recurrent bias of the candidate (H) */
    ont_value *peep[3];      /* LSTM: peephole weights of i, o, f (H), or NULL */
} weights;

typedef struct state {
    ont_value *h, *c;        /* (B, H) */
} state;

/* Entry d of an argument (D, ...). */
static ont_value *of_direction(const ont_recurrent *r, ont_value *v, int d)
{
    if (!v) return NULL;
    return ont_build_squeeze(r->b, ont_build_slice(r->b, v, 0, d, d + 1, 1), 0);
}

/* Adds the biases of input and state to the input's part, except the candidate's recurrent bias with
 * linear_before_reset. */
static ont_value *input_bias(const ont_recurrent *r, ont_value *bias, weights *w)
{
    ont_value *half[2], *part[2];
    if (!bias) return NULL;
    ont_build_split_even(r->b, bias, 0, 2, half);
    if (r->cell != ONT_RECURRENT_GRU || !r->linear_before_reset) return ont_build2(r->b, "Add", half[0], half[1]);
    ont_build_split(r->b, half[1], 0, (int64_t[]){2 * r->hidden, r->hidden}, 2, part);
    w->bias_new = part[1];
    ont_value *zero = ont_build_full(r->b, r->dtype, &(ont_shape){.rank = 1, .dims = {r->hidden}}, 0);
    return ont_build2(r->b, "Add", half[0], ont_build_concat(r->b, (ont_value *[]){part[0], zero}, 2, 0));
}

static void prepare_weights(const ont_recurrent *r, ont_node *node, ont_value *x, int d, weights *w)
{
    ont_builder *b = r->b;
    int64_t wide = r->gates * r->hidden;
    ont_value *bias = input_bias(r, of_direction(r, ont_node_in(node, 3), d), w);
    ont_value *flat = ont_build_reshape(b, x, &(ont_shape){.rank = 2, .dims = {r->steps * r->batch, r->in}});
    ont_value *all = ont_build_linear(b, flat, of_direction(r, ont_node_in(node, 1), d), bias);
    w->input = ont_build_reshape(b, all, &(ont_shape){.rank = 3, .dims = {r->steps, r->batch, wide}});
    w->rec = of_direction(r, ont_node_in(node, 2), d);
    if (r->cell == ONT_RECURRENT_GRU) {
        ont_value *parts[2];
        ont_build_split(b, w->rec, 0, (int64_t[]){2 * r->hidden, r->hidden}, 2, parts);
        w->rec_gates = parts[0];
        w->rec_new = parts[1];
    }
    ont_value *peep = of_direction(r, ont_node_in(node, 7), d);
    if (peep) ont_build_split_even(b, peep, 0, 3, w->peep);
}

static ont_value *one_minus(const ont_recurrent *r, ont_value *x)
{
    return x ? ont_build2(r->b, "Sub", ont_build_scalar(r->b, r->dtype, 1), x) : NULL;
}

/* RNN: h' = f(x W^T + h R^T + b) */
static state step_rnn(const ont_recurrent *r, const weights *w, int d, ont_value *x, state s)
{
    return (state){.h = ont_recurrent_activate(r, d, 0, ont_build_linear(r->b, s.h, w->rec, x))};
}

/* GRU: z, r = f(...), n = g(x + (r h) R^T + b) or g(x + r (h R^T + b)), h' = (1 - z) n + z h */
static state step_gru(const ont_recurrent *r, const weights *w, int d, ont_value *x, state s)
{
    ont_builder *b = r->b;
    ont_value *part[2], *gate[2], *fresh;
    ont_build_split(b, x, 1, (int64_t[]){2 * r->hidden, r->hidden}, 2, part);
    ont_value *gates = ont_recurrent_activate(r, d, 0, ont_build_linear(b, s.h, w->rec_gates, part[0]));
    ont_build_split_even(b, gates, 1, 2, gate);
    if (r->linear_before_reset)
        fresh = ont_build2(b, "Add", part[1],
                           ont_build2(b, "Mul", gate[1], ont_build_linear(b, s.h, w->rec_new, w->bias_new)));
    else
        fresh = ont_build_linear(b, ont_build2(b, "Mul", gate[1], s.h), w->rec_new, part[1]);
    fresh = ont_recurrent_activate(r, d, 1, fresh);
    ont_value *kept = ont_build2(b, "Mul", gate[0], s.h);
    return (state){.h = ont_build2(b, "Add", ont_build2(b, "Mul", one_minus(r, gate[0]), fresh), kept)};
}

static ont_value *with_peephole(const ont_recurrent *r, ont_value *gate, ont_value *peep, ont_value *c)
{
    return peep ? ont_build2(r->b, "Add", gate, ont_build2(r->b, "Mul", peep, c)) : gate;
}

/* LSTM: i, f = f(... + P c), c' = f c + i g(...), o = f(... + P c'), h' = o h(c') */
static state step_lstm(const ont_recurrent *r, const weights *w, int d, ont_value *x, state s)
{
    ont_builder *b = r->b;
    ont_value *gate[4]; /* i, o, f, c */
    ont_build_split_even(b, ont_build_linear(b, s.h, w->rec, x), 1, 4, gate);
    ont_value *i = ont_recurrent_activate(r, d, 0, with_peephole(r, gate[0], w->peep[0], s.c));
    ont_value *f = r->input_forget ? one_minus(r, i)
                                   : ont_recurrent_activate(r, d, 0, with_peephole(r, gate[2], w->peep[2], s.c));
    ont_value *fresh = ont_recurrent_activate(r, d, 1, gate[3]);
    ont_value *c = ont_build2(b, "Add", ont_build2(b, "Mul", f, s.c), ont_build2(b, "Mul", i, fresh));
    ont_value *o = ont_recurrent_activate(r, d, 0, with_peephole(r, gate[1], w->peep[1], c));
    return (state){.h = ont_build2(b, "Mul", o, ont_recurrent_activate(r, d, 2, c)), .c = c};
}

/* Past the end of a sequence: keeps its state, and gives zeros. */
static ont_value *mask_step(const ont_recurrent *r, int64_t t, state old, state *fresh)
{
    if (!r->lens) return fresh->h;
    ont_builder *b = r->b;
    ont_value *live = ont_build2(b, "Greater", r->lens, ont_build_scalar(b, ONT_INT64, (double)t));
    ont_value *y = ont_build3(b, "Where", live, fresh->h, ont_build_scalar(b, r->dtype, 0));
    fresh->h = ont_build3(b, "Where", live, fresh->h, old.h);
    if (r->cell == ONT_RECURRENT_LSTM) fresh->c = ont_build3(b, "Where", live, fresh->c, old.c);
    return y;
}

/* Runs all steps of direction d; sets ys[t] (B, H). */
static state run_direction(const ont_recurrent *r, const weights *w, int d, state s, ont_value **ys)
{
    static state (*const steps[])(const ont_recurrent *, const weights *, int, ont_value *, state) = {
        step_rnn, step_gru, step_lstm};
    ont_value **inputs = ont_arena_array(&r->b->graph->arena, (size_t)r->steps + 1, sizeof *inputs);
    if (!inputs) ont_build_fail(r->b, ONT_ENOMEM, "out of memory");
    if (r->steps > MAX_STEPS)
        ont_build_fail(r->b, ONT_EUNSUPPORTED, "%" PRId64 " time steps, at most %d are unrolled", r->steps, MAX_STEPS);
    if (inputs && r->steps) ont_build_split_even(r->b, w->input, 0, (uint32_t)r->steps, inputs);
    for (int64_t k = 0; k < r->steps && r->b->status == ONT_OK; k++) {
        int64_t t = r->reversed[d] ? r->steps - 1 - k : k;
        state fresh = steps[r->cell](r, w, d, ont_build_squeeze(r->b, inputs[t], 0), s);
        if (r->b->status != ONT_OK) break;
        ys[t] = mask_step(r, t, s, &fresh);
        s = fresh;
    }
    return s;
}

/* The cell of direction d if RecurrentSteps has it, else ONT_CELLS. */
static ont_cell known_cell(const ont_recurrent *r, const ont_node *node, int d)
{
    uint32_t n_kernels;
    ont_op_kernels(&ont_op_RecurrentSteps, r->b->graph->device, &n_kernels);
    bool whole = r->dtype == ONT_FLOAT32 || r->dtype == ONT_FLOAT64;
    return n_kernels && whole ? ont_recurrent_torch_cell(r, node, d) : ONT_CELLS;
}

/* The same as run_direction(), as one node; *y is (T, B, H). */
static state run_steps(const ont_recurrent *r, const weights *w, int d, ont_cell cell, state s, ont_value **y)
{
    ont_builder *b = r->b;
    ont_value *inputs[] = {w->input, w->rec, s.h, s.c, r->lens, w->bias_new};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "RecurrentSteps", inputs, 6, cell == ONT_CELL_LSTM ? 4 : 3);
    if (node) b->status = ont_attr_set_int(b->graph, node, "cell", cell);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "reverse", r->reversed[d]);
    *y = ont_build_done(b, node);
    if (b->status != ONT_OK) return s;
    return (state){.h = ont_node_out(node, 1), .c = ont_node_out(node, 3)};
}

static ont_value *initial_state(const ont_recurrent *r, ont_node *node, uint32_t index, int d)
{
    ont_value *given = ont_node_in(node, index);
    ont_shape flat = ont_shape_of(2, (int64_t[]){r->batch, r->hidden});
    if (!given) return ont_build_full(r->b, r->dtype, &flat, 0);
    ont_value *one = ont_build_slice(r->b, given, r->batch_first, d, d + 1, 1);
    return one ? ont_build_reshape(r->b, one, &flat) : NULL;
}

/* Sequence lengths as int64 (B, 1); NULL where all are known to be full. */
static ont_value *read_lens(const ont_recurrent *r, ont_value *lens)
{
    if (!lens) return NULL;
    if (ont_recurrent_is_full(r, lens)) return NULL;
    ont_value *wide = ont_build_cast(r->b, lens, ONT_INT64);
    return wide ? ont_build_reshape(r->b, wide, &(ont_shape){.rank = 2, .dims = {r->batch, 1}}) : NULL;
}

/* ---- the expansion ---- */

/* Joins the steps of all directions, or whole directions, to Y: (T, D, B, H), or with layout 1 (B, T, D, H). */
static ont_value *join_steps(const ont_recurrent *r, ont_value **ys, ont_value *const *whole)
{
    ont_shape shape = ont_shape_of(4, (int64_t[]){r->steps, r->directions, r->batch, r->hidden});
    ont_value *y;
    if (!r->steps) {
        y = ont_build_full(r->b, r->dtype, &shape, 0);
    } else if (whole[0]) {
        y = r->directions > 1 ? ont_build_concat(r->b, whole, 2, 1) : whole[0];
        y = ont_build_reshape(r->b, y, &shape);
    } else {
        uint32_t n = (uint32_t)(r->steps * r->directions);
        ont_value **order = ont_arena_array(&r->b->graph->arena, n, sizeof *order);
        if (!order) ont_build_fail(r->b, ONT_ENOMEM, "out of memory");
        for (uint32_t i = 0; order && i < n; i++)
            order[i] = ys[i % (uint32_t)r->directions * (uint32_t)r->steps + i / (uint32_t)r->directions];
        y = ont_build_reshape(r->b, order ? ont_build_concat(r->b, order, n, 0) : NULL, &shape);
    }
    return r->batch_first ? ont_build_transpose(r->b, y, (int64_t[]){2, 0, 1, 3}) : y;
}

static ont_value *join_states(const ont_recurrent *r, ont_value *const *states)
{
    ont_shape shape = ont_shape_of(3, (int64_t[]){r->directions, r->batch, r->hidden});
    ont_value *s = ont_build_reshape(r->b, ont_build_concat(r->b, states, (uint32_t)r->directions, 0), &shape);
    return r->batch_first ? ont_build_transpose(r->b, s, (int64_t[]){1, 0, 2}) : s;
}

static void expand_recurrent(ont_builder *b, ont_node *node, ont_value **outputs, ont_recurrent_kind kind)
{
    ont_recurrent r = {.b = b};
    b->status = ont_recurrent_parse(node, kind, &r);
    if (b->status != ONT_OK) return;
    ont_value *x = ont_node_in(node, 0), *last_h[2] = {0}, *last_c[2] = {0}, *whole[2] = {0};
    ont_value **ys = ont_arena_array(&b->graph->arena, (size_t)(r.steps * r.directions) + 1, sizeof *ys);
    if (!ys) ont_build_fail(b, ONT_ENOMEM, "out of memory");
    r.lens = read_lens(&r, ont_node_in(node, 4));
    if (r.batch_first) x = ont_build_transpose(b, x, (int64_t[]){1, 0, 2});
    bool one_node = true;
    for (int d = 0; d < r.directions; d++) one_node &= known_cell(&r, node, d) != ONT_CELLS;
    for (int d = 0; d < r.directions && b->status == ONT_OK; d++) {
        weights w = {0};
        prepare_weights(&r, node, x, d, &w);
        state s = {.h = initial_state(&r, node, 5, d)};
        if (kind == ONT_RECURRENT_LSTM) s.c = initial_state(&r, node, 6, d);
        s = one_node ? run_steps(&r, &w, d, known_cell(&r, node, d), s, &whole[d])
                     : run_direction(&r, &w, d, s, ys + d * r.steps);
        last_h[d] = s.h;
        last_c[d] = s.c;
    }
    if (b->status != ONT_OK) return;
    if (ont_node_out(node, 0)) outputs[0] = join_steps(&r, ys, whole);
    if (ont_node_out(node, 1)) outputs[1] = join_states(&r, last_h);
    if (ont_node_out(node, 2)) outputs[2] = join_states(&r, last_c);
}

#define RECURRENT(name_, kind, max, attributes_) \
    static ont_status infer_##name_(ont_graph *g, ont_node *node) \
    { \
        (void)g; \
        return infer_recurrent(node, kind); \
    } \
    static void expand_##name_(ont_builder *b, ont_node *node, ont_value **outputs) \
    { \
        expand_recurrent(b, node, outputs, kind); \
    } \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 7, .min_inputs = 3, .max_inputs = max, \
                                   .attributes = attributes_, .nondiff_inputs = 1 << 4, \
                                   .nondiff_outputs = 1 << ONT_RECURRENT_SAVED, .infer = infer_##name_, \
                                   .grad = ont_recurrent_grad, .expand = expand_##name_}
#define RECURRENT_ATTRIBUTES \
    "activation_alpha:F activation_beta:F activations:S clip:f direction:s hidden_size:i layout:i saved_bytes:i"
RECURRENT(RNN, ONT_RECURRENT_RNN, 6, RECURRENT_ATTRIBUTES);
RECURRENT(GRU, ONT_RECURRENT_GRU, 6, RECURRENT_ATTRIBUTES " linear_before_reset:i");
RECURRENT(LSTM, ONT_RECURRENT_LSTM, 8, RECURRENT_ATTRIBUTES " input_forget:i");
