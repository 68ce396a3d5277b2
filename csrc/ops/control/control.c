/*
 * Control flow is resolved while a program is built: If becomes the branch that its condition selects, Loop and Scan
 * are unrolled. Conditions and trip counts that depend on data are requested with ont_need_data(), so a program is
 * specialised to one outcome, and its gradient is that of the nodes that ran.
 */
#include "ops/control/control.h"

#include <inttypes.h>
#include <string.h>

#include "ops/support/compose.h"

enum { MAX_ITERATIONS = 20000, MAX_NODES = 1000000 };

/* ---- bodies ---- */

const ont_graph *ont_body_of(ont_builder *b, const ont_node *node, const char *name, uint32_t n_outputs)
{
    const ont_attr *attr = ont_attr_find(node, name, ONT_ATTR_GRAPH);
    if (!attr) {
        ont_build_fail(b, ONT_EINVAL, "attribute %s is missing", name);
        return NULL;
    }
    if (attr->graph->n_outputs < n_outputs)
        ont_build_fail(b, ONT_EINVAL, "%s has %u outputs, at least %u are expected", name, attr->graph->n_outputs,
                       n_outputs);
    return b->status == ONT_OK ? attr->graph : NULL;
}

/* A different random stream for every iteration of every enclosing loop (splitmix64). */
static int64_t splitmix64(int64_t stream, int64_t iteration)
{
    uint64_t z = (uint64_t)stream * 0x9e3779b97f4a7c15u + (uint64_t)iteration + 1;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (int64_t)((z ^ (z >> 31)) >> 1);
}

/* Derives the random stream of a copied node, or the salt from which the streams of its own bodies derive. */
static ont_status derive_streams(ont_graph *g, ont_node *node, int64_t salt)
{
    const ont_attr *stream = ont_attr_find(node, "rng_stream", ONT_ATTR_INT);
    if (stream) ONT_TRY(ont_attr_set_int(g, node, "rng_stream", splitmix64(stream->i, salt)));
    for (const ont_attr *attr = node->attrs; attr; attr = attr->next)
        if (attr->kind == ONT_ATTR_GRAPH)
            return ont_attr_set_int(g, node, "rng_salt", splitmix64(ont_attr_int(node, "rng_salt", 0), salt));
    return ONT_OK;
}

void ont_build_body(ont_builder *b, const ont_body_copy *copy, ont_value **results)
{
    ont_graph *g = b->graph;
    const ont_node *node = copy->node;
    const ont_graph *body = copy->body;
    const uint32_t n_given = copy->n_given;
    const int64_t iteration = copy->iteration;
    if (b->status != ONT_OK) return;
    if (body->n_inputs != n_given + body->n_captures) {
        ont_build_fail(b, ONT_EINVAL, "%s has %u inputs, %u are given", body->name, body->n_inputs - body->n_captures,
                       n_given);
        return;
    }
    if (g->n_nodes > MAX_NODES) {
        ont_build_fail(b, ONT_EUNSUPPORTED, "the graph unrolls to more than %d nodes", MAX_NODES);
        return;
    }
    ont_value **inputs = ont_arena_array(&g->arena, (size_t)body->n_inputs + 1, sizeof *inputs);
    char *scope = iteration < 0 ? ont_arena_strdup(&g->arena, node->name)
                                : ont_arena_format(&g->arena, "%s[%" PRId64 "]", node->name, iteration);
    if (!inputs || !scope) {
        b->status = ONT_ENOMEM;
        return;
    }
    if (n_given) memcpy(inputs, copy->given, n_given * sizeof *inputs);
    for (uint32_t i = 0; i < body->n_captures; i++) inputs[n_given + i] = ont_node_in(node, copy->first_capture + i);
    ont_node *previous = b->before->prev;
    b->status = ont_graph_instantiate(g, b->before, body, scope, inputs, results);
    int64_t salt = ont_attr_int(node, "rng_salt", 0);
    if (iteration >= 0) salt = splitmix64(salt, iteration);
    for (ont_node *n = previous ? previous->next : g->first; b->status == ONT_OK && n != b->before; n = n->next) {
        n->backward = b->backward;
        n->origin = b->origin;
        if (salt) b->status = derive_streams(g, n, salt);
    }
}

/* ---- If ---- */

static ont_status condition_of(const ont_node *node, uint32_t index, bool *holds)
{
    const ont_tensor *data;
    ont_value *v;
    ONT_TRY(ont_need_input(node, index, &v));
    if (v->container != ONT_TENSOR || v->dtype != ONT_BOOL || ont_shape_count(&v->shape) != 1)
        return ont_fail(ONT_EINVAL, "the condition is %s of %" PRId64 " entries, one bool is expected",
                        ont_dtype_name(v->dtype), ont_shape_count(&v->shape));
    ONT_TRY(ont_need_data(node, index, &data));
    *holds = *(const uint8_t *)data->data;
    return ONT_OK;
}

static void if_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    bool holds;
    b->status = condition_of(node, 0, &holds);
    const ont_graph *body = b->status == ONT_OK
                                ? ont_body_of(b, node, holds ? "then_branch" : "else_branch", node->n_outputs)
                                : NULL;
    if (!body) return;
    ont_value **results = ont_arena_array(&b->graph->arena, (size_t)body->n_outputs + 1, sizeof *results);
    if (!results) {
        b->status = ONT_ENOMEM;
        return;
    }
    const ont_body_copy copy = {.node = node, .body = body, .first_capture = body->first_capture, .iteration = -1};
    ont_build_body(b, &copy, results);
    for (uint32_t i = 0; i < node->n_outputs && b->status == ONT_OK; i++) outputs[i] = results[i];
}

/* ---- results of iterations, joined ---- */

/* Results of the iterations so far, `width` per iteration. */
typedef struct scanned {
    ont_value **items;
    size_t n, capacity;
    uint32_t width;
} scanned;

static void scanned_add(ont_builder *b, scanned *s, ont_value *const *items)
{
    if (b->status != ONT_OK) return;
    if (s->n + s->width > s->capacity) {
        size_t capacity = 2 * s->capacity + 4 * s->width + 16;
        ont_value **more = ont_arena_array(&b->graph->arena, capacity, sizeof *more);
        if (!more) {
            b->status = ONT_ENOMEM;
            return;
        }
        if (s->n) memcpy(more, s->items, s->n * sizeof *more);
        s->items = more;
        s->capacity = capacity;
    }
    for (uint32_t i = 0; i < s->width; i++) s->items[s->n++] = items[i];
}

/* Stacks values of equal shape along a new axis. The builder is deferred because the values may not be inferred yet. */
static ont_value *stack(ont_builder *b, ont_value *const *items, uint32_t n, int64_t axis, bool reversed)
{
    ont_value **parts = ont_arena_array(&b->graph->arena, (size_t)n + 1, sizeof *parts);
    if (!parts) ont_build_fail(b, ONT_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < n && b->status == ONT_OK; i++)
        parts[reversed ? n - 1 - i : i] = ont_build2(b, "Unsqueeze", items[i], ont_build_const_ints(b, &axis, 1));
    if (b->status != ONT_OK) return NULL;
    ont_node *node = ont_build_node(b, "", "Concat", parts, n, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", axis);
    return ont_build_done(b, node);
}

/* ours:EmptyStack(x; axis): the result of stacking zero values shaped like x. */
static ont_value *empty_stack(ont_builder *b, ont_value *like, int64_t axis)
{
    if (b->status != ONT_OK) return NULL;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "EmptyStack", &like, 1, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", axis);
    return ont_build_done(b, node);
}

/* The result is set as constant data, so that x itself is never computed. */
static ont_status empty_stack_infer(ont_graph *g, ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    if (x->shape.rank == ONT_MAX_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "the result has rank %d, at most %d is supported", x->shape.rank + 1,
                        ONT_MAX_RANK);
    ont_shape shape = {.rank = x->shape.rank + 1};
    int axis;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), shape.rank, &axis));
    for (int i = 0, from = 0; i < shape.rank; i++) shape.dims[i] = i == axis ? 0 : x->shape.dims[from++];
    ont_tensor *data = ont_arena_alloc(&g->arena, sizeof *data);
    void *nothing = ont_arena_alloc(&g->arena, 1);
    if (!data || !nothing) return ONT_ENOMEM;
    *data = (ont_tensor){x->dtype, shape, 0, nothing};
    ONT_TRY(ont_infer_out(node, 0, x->dtype, &shape));
    node->outputs[0]->data = data;
    return ONT_OK;
}

/* ---- Loop ---- */

/*
 * ours:LoopTail is the remainder of a Loop after `iteration` iterations; its inputs behind the captured ones are the
 * scan outputs of those iterations. It is used if the loop condition is unknown until they are inferred or probed.
 */
typedef struct loop {
    ont_node *node;
    const ont_graph *body;
    uint32_t n_states, first_capture;
    int64_t limit, iteration;
    bool go_on;
    ont_value *count;  /* NULL: no limit */
    ont_value **given; /* of the body: iteration, condition, states */
    ont_value **results;
    scanned done;
} loop;

static void loop_begin(ont_builder *b, ont_node *node, loop *l)
{
    *l = (loop){.node = node, .limit = INT64_MAX, .go_on = true, .iteration = ont_attr_int(node, "iteration", 0)};
    const ont_graph *body = l->body = ont_body_of(b, node, "body", 1);
    if (!body) return;
    l->n_states = body->first_capture > 2 ? body->first_capture - 2 : 0;
    bool tail = *node->domain; /* a LoopTail has all its own inputs, while a Loop may omit trailing ones */
    l->first_capture = tail ? l->n_states + 2 : body->first_capture;
    if (body->n_outputs < 1 + l->n_states || node->n_outputs > body->n_outputs - 1) {
        ont_build_fail(b, ONT_EINVAL, "the body has %u outputs, for %u loop-carried values and %u outputs",
                       body->n_outputs, l->n_states, node->n_outputs);
        return;
    }
    if (body->n_inputs - body->n_captures != 2 + l->n_states)
        ont_build_fail(b, ONT_EINVAL, "the body has %u inputs, %u are given", body->n_inputs - body->n_captures,
                       2 + l->n_states);
    int count = 1;
    bool has_limit = l->first_capture > 0 && ont_node_in(node, 0),
         has_condition = l->first_capture > 1 && ont_node_in(node, 1);
    if (b->status == ONT_OK && has_limit) b->status = ont_const_ints(node, 0, NULL, &l->limit, 1, &count);
    if (b->status == ONT_OK && count != 1) b->status = ont_fail(ONT_EINVAL, "the trip count has %d entries", count);
    if (b->status == ONT_OK && has_condition) b->status = condition_of(node, 1, &l->go_on);
    if (b->status != ONT_OK) return;
    l->count = has_limit ? ont_node_in(node, 0) : NULL;
    l->given = ont_arena_array(&b->graph->arena, (size_t)l->n_states + 2, sizeof *l->given);
    l->results = ont_arena_array(&b->graph->arena, (size_t)body->n_outputs + 1, sizeof *l->results);
    if (!l->given || !l->results) {
        b->status = ONT_ENOMEM;
        return;
    }
    b->deferred = true;
    l->given[1] = has_condition ? ont_node_in(node, 1) : ont_build_scalar(b, ONT_BOOL, 1);
    for (uint32_t i = 0; i < l->n_states; i++) l->given[2 + i] = ont_node_in(node, 2 + i);
    l->done.width = body->n_outputs - 1 - l->n_states;
    for (uint32_t i = l->first_capture + body->n_captures; l->done.width && i < node->n_inputs; i += l->done.width) {
        for (uint32_t k = 0; k < l->done.width; k++) l->results[k] = ont_node_in(node, i + k);
        scanned_add(b, &l->done, l->results);
    }
}

/*
 * The body's condition output if it can be determined without running the body: a constant, or the condition input
 * passed through.
 */
static const ont_value *plain_condition(const loop *l)
{
    const ont_value *v = l->body->outputs[0];
    while (v->kind == ONT_VALUE_NODE && ONT_IS(v->def, Identity) &&
           v->def->n_inputs == 1)
        v = v->def->inputs[0].value;
    if (v->kind == ONT_VALUE_INPUT && v->input == 1) return l->given[1];
    return v->kind == ONT_VALUE_CONSTANT ? v : NULL;
}

static void loop_body(ont_builder *b, const loop *l)
{
    const ont_body_copy copy = {.node = l->node, .body = l->body, .given = l->given, .n_given = 2 + l->n_states,
                                .first_capture = l->first_capture, .iteration = l->iteration};
    ont_build_body(b, &copy, l->results);
}

static void loop_step(ont_builder *b, loop *l)
{
    if (l->iteration >= MAX_ITERATIONS) {
        ont_build_fail(b, ONT_EUNSUPPORTED, "more than %d iterations: a loop is unrolled when its program is built",
                       MAX_ITERATIONS);
        return;
    }
    const ont_value *condition = plain_condition(l);
    l->given[0] = ont_build_scalar(b, ONT_INT64, (double)l->iteration);
    loop_body(b, l);
    if (b->status != ONT_OK) return;
    l->given[1] = l->results[0];
    if (condition && condition->kind == ONT_VALUE_CONSTANT && condition->data->dtype == ONT_BOOL &&
        condition->data->bytes) {
        l->go_on = *(const uint8_t *)condition->data->data;
        l->given[1] = ont_build_scalar(b, ONT_BOOL, l->go_on);
    }
    for (uint32_t i = 0; i < l->n_states; i++) l->given[2 + i] = l->results[1 + i];
    scanned_add(b, &l->done, l->results + 1 + l->n_states);
    l->iteration++;
}

/* Builds the LoopTail for the remaining iterations. */
static void loop_tail(ont_builder *b, loop *l, ont_value **outputs)
{
    uint32_t own = l->n_states + 2, captured = l->body->n_captures;
    size_t n = (size_t)own + captured + l->done.n;
    ont_value **inputs = ont_arena_array(&b->graph->arena, n + 1, sizeof *inputs);
    if (!inputs) {
        b->status = ONT_ENOMEM;
        return;
    }
    inputs[0] = l->count;
    for (uint32_t i = 1; i < own; i++) inputs[i] = l->given[i];
    for (uint32_t i = 0; i < captured; i++) inputs[own + i] = ont_node_in(l->node, l->first_capture + i);
    if (l->done.n) memcpy(inputs + own + captured, l->done.items, l->done.n * sizeof *inputs);
    ont_node *tail = ont_build_node(b, ONT_DOMAIN, "LoopTail", inputs, (uint32_t)n, l->node->n_outputs);
    if (!tail) return;
    b->status = ont_attr_copy_all(b->graph, tail, l->node);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, tail, "iteration", l->iteration);
    tail->name = l->node->name;
    for (uint32_t i = 0; i < l->node->n_outputs; i++) outputs[i] = tail->outputs[i];
}

static void loop_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    loop l;
    loop_begin(b, node, &l);
    while (b->status == ONT_OK && l.go_on && l.iteration < l.limit) {
        loop_step(b, &l);
        if (b->status == ONT_OK && !l.given[1]->data && l.iteration < l.limit) {
            loop_tail(b, &l, outputs);
            return;
        }
    }
    if (b->status != ONT_OK) return;
    for (uint32_t i = 0; i < l.n_states && i < node->n_outputs; i++) outputs[i] = l.given[2 + i];
    if (node->n_outputs <= l.n_states) return;
    if (!l.iteration) { /* no iterations: instantiate the body only to infer the shapes of its scan outputs */
        l.given[0] = ont_build_scalar(b, ONT_INT64, 0);
        loop_body(b, &l);
        for (uint32_t i = l.n_states; i < node->n_outputs && b->status == ONT_OK; i++)
            outputs[i] = empty_stack(b, l.results[1 + i], 0);
        return;
    }
    ont_value **column = ont_arena_array(&b->graph->arena, (size_t)l.iteration, sizeof *column);
    if (!column) b->status = ONT_ENOMEM;
    for (uint32_t k = 0; k < node->n_outputs - l.n_states && b->status == ONT_OK; k++) {
        for (int64_t i = 0; i < l.iteration; i++) column[i] = l.done.items[(size_t)i * l.done.width + k];
        outputs[l.n_states + k] = stack(b, column, (uint32_t)l.iteration, 0, false);
    }
}

/* ---- Scan ---- */

typedef struct scan {
    ont_node *node;
    const ont_graph *body;
    uint32_t n_states, n_scanned, n_stacked; /* states, inputs cut along an axis, outputs that are stacked */
    int64_t length;
    ont_value **given, **results;
    ont_value ***slices; /* per scanned input, per iteration */
} scan;

/* An attribute that has one number per input or output. */
typedef struct numbers {
    const int64_t *items;
    size_t n;
} numbers;

static numbers numbers_of(const ont_node *node, const char *name)
{
    numbers list;
    list.items = ont_attr_ints(node, name, &list.n);
    return list;
}

/* 0 where the attribute has no number */
static int64_t number_at(numbers list, uint32_t i)
{
    return i < list.n ? list.items[i] : 0;
}

/* Splits `x`, scan input k, along the axis into slices without that axis. */
static void scan_cut(ont_builder *b, scan *s, uint32_t k, ont_value *x, int64_t given_axis, bool reversed)
{
    int axis;
    if (b->status != ONT_OK) return;
    if (!x) {
        ont_build_fail(b, ONT_EINVAL, "scan input %u is missing", k);
        return;
    }
    b->status = ont_shape_axis(given_axis, x->shape.rank, &axis);
    if (b->status != ONT_OK) return;
    if (k && x->shape.dims[axis] != s->length)
        ont_build_fail(b, ONT_EINVAL, "scan input %u has length %" PRId64 ", input 0 has %" PRId64, k,
                       x->shape.dims[axis], s->length);
    s->length = x->shape.dims[axis];
    if (s->length > MAX_ITERATIONS)
        ont_build_fail(b, ONT_EUNSUPPORTED,
                       "%" PRId64 " iterations, at most %d: a scan is unrolled when its program is built", s->length,
                       MAX_ITERATIONS);
    if (b->status != ONT_OK) return;
    int64_t n = s->length ? s->length : 1; /* length 0: one slice gives EmptyStack its shape */
    ont_value **slices = s->slices[k] = ont_arena_array(&b->graph->arena, (size_t)n, sizeof *slices);
    if (!slices && b->status == ONT_OK) b->status = ONT_ENOMEM;
    if (b->status != ONT_OK) return;
    b->deferred = false;
    if (!s->length) {
        ont_shape one = x->shape;
        for (int i = axis; i + 1 < one.rank; i++) one.dims[i] = one.dims[i + 1];
        one.rank--;
        slices[0] = ont_build_full(b, x->dtype, &one, 0);
        return;
    }
    ont_build_split_even(b, x, axis, (uint32_t)n, slices);
    for (int64_t i = 0; i < n; i++) slices[i] = ont_build_squeeze(b, slices[i], axis);
    for (int64_t i = 0, j = n - 1; reversed && i < j; i++, j--) {
        ont_value *swap = slices[i];
        slices[i] = slices[j];
        slices[j] = swap;
    }
}

/* Unrolls all iterations from the states in s->given; stacked: one value per scan output, along axes[k]. */
static void scan_steps(ont_builder *b, scan *s, int64_t first_iteration, numbers axes, numbers directions,
                       ont_value **stacked)
{
    scanned all = {.width = s->n_stacked};
    ont_body_copy copy = {.node = s->node, .body = s->body, .given = s->given, .n_given = s->n_states + s->n_scanned,
                          .first_capture = s->body->first_capture};
    b->deferred = true;
    for (int64_t t = 0; t < (s->length ? s->length : 1) && b->status == ONT_OK; t++) {
        for (uint32_t k = 0; k < s->n_scanned; k++) s->given[s->n_states + k] = s->slices[k][t];
        copy.iteration = first_iteration + t;
        ont_build_body(b, &copy, s->results);
        scanned_add(b, &all, s->results + s->n_states);
        for (uint32_t i = 0; i < s->n_states && s->length && b->status == ONT_OK; i++) s->given[i] = s->results[i];
    }
    ont_value **column = ont_arena_array(&b->graph->arena, (size_t)s->length + 1, sizeof *column);
    if (!column && b->status == ONT_OK) b->status = ONT_ENOMEM;
    for (uint32_t k = 0; k < s->n_stacked && b->status == ONT_OK; k++) {
        int64_t axis = number_at(axes, k);
        for (int64_t t = 0; t < s->length; t++) column[t] = all.items[(size_t)t * s->n_stacked + k];
        stacked[k] = s->length ? stack(b, column, (uint32_t)s->length, axis, number_at(directions, k))
                               : empty_stack(b, all.items[k], axis);
    }
}

static bool scan_begin(ont_builder *b, ont_node *node, uint32_t before, scan *s)
{
    *s = (scan){.node = node, .body = ont_body_of(b, node, "body", node->n_outputs)};
    if (!s->body) return false;
    int64_t n_scanned = ont_attr_int(node, "num_scan_inputs", 0);
    uint32_t own = s->body->first_capture > before ? s->body->first_capture - before : 0;
    if (n_scanned < 1 || n_scanned > own || s->body->n_outputs < own - (uint32_t)n_scanned)
        ont_build_fail(b, ONT_EINVAL, "num_scan_inputs is %" PRId64 ", with %u inputs and %u outputs of the body",
                       n_scanned, own, s->body->n_outputs);
    if (b->status != ONT_OK) return false;
    s->n_scanned = (uint32_t)n_scanned;
    s->n_states = own - s->n_scanned;
    s->n_stacked = s->body->n_outputs - s->n_states;
    s->given = ont_arena_array(&b->graph->arena, (size_t)own + 1, sizeof *s->given);
    s->results = ont_arena_array(&b->graph->arena, (size_t)s->body->n_outputs + 1, sizeof *s->results);
    s->slices = ont_arena_array(&b->graph->arena, (size_t)s->n_scanned + 1, sizeof *s->slices);
    if (!s->given || !s->results || !s->slices) b->status = ONT_ENOMEM;
    return b->status == ONT_OK;
}

static void scan_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    scan s;
    if (!scan_begin(b, node, 0, &s)) return;
    const numbers axes = numbers_of(node, "scan_input_axes"), directions = numbers_of(node, "scan_input_directions");
    for (uint32_t k = 0; k < s.n_scanned; k++)
        scan_cut(b, &s, k, ont_node_in(node, s.n_states + k), number_at(axes, k), number_at(directions, k));
    for (uint32_t i = 0; i < s.n_states; i++) s.given[i] = ont_node_in(node, i);
    ont_value **stacked = ont_arena_array(&b->graph->arena, (size_t)s.n_stacked + 1, sizeof *stacked);
    if (!stacked) ont_build_fail(b, ONT_ENOMEM, "out of memory");
    scan_steps(b, &s, 0, numbers_of(node, "scan_output_axes"), numbers_of(node, "scan_output_directions"), stacked);
    for (uint32_t i = 0; i < node->n_outputs && b->status == ONT_OK; i++)
        outputs[i] = i < s.n_states ? s.given[i] : stacked[i - s.n_states];
}

/* Scan of opset 8: first input is sequence_lens, and every tensor has a leading batch dim. */
static void scan_opset8_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    scan s;
    if (!scan_begin(b, node, 1, &s)) return;
    const numbers directions = numbers_of(node, "directions");
    const ont_value *first = ont_node_in(node, 1);
    if (ont_node_in(node, 0)) ont_build_fail(b, ONT_EUNSUPPORTED, "sequence_lens of opset 8");
    if (!first || !first->shape.rank || first->shape.dims[0] < 1 || first->shape.dims[0] > MAX_ITERATIONS)
        ont_build_fail(b, ONT_EUNSUPPORTED, "no batches, or more than %d", MAX_ITERATIONS);
    if (b->status != ONT_OK) return;
    uint32_t batches = (uint32_t)first->shape.dims[0], width = s.body->n_outputs;
    scanned all = {.width = width};
    ont_value **row = ont_arena_array(&b->graph->arena, (size_t)width + s.n_scanned + batches + 1, sizeof *row);
    if (!row) b->status = ONT_ENOMEM;
    for (uint32_t batch = 0; batch < batches && b->status == ONT_OK; batch++) {
        b->deferred = false;
        ont_value *parts[2] = {NULL};
        for (uint32_t i = 0; i < s.n_states + s.n_scanned && b->status == ONT_OK; i++) {
            ont_value *x = ont_node_in(node, 1 + i);
            if (!x || x->shape.rank < 1 || x->shape.dims[0] != batches) ont_build_fail(b, ONT_EINVAL, "batches differ");
            parts[0] = ont_build_squeeze(b, x ? ont_build_slice(b, x, 0, batch, (int64_t)batch + 1, 1) : NULL, 0);
            if (i < s.n_states)
                s.given[i] = parts[0];
            else
                scan_cut(b, &s, i - s.n_states, parts[0], 0, number_at(directions, i - s.n_states));
        }
        scan_steps(b, &s, (int64_t)batch * s.length, (numbers){0}, (numbers){0}, row + s.n_states);
        for (uint32_t i = 0; i < s.n_states; i++) row[i] = s.given[i];
        scanned_add(b, &all, row);
    }
    for (uint32_t i = 0; i < node->n_outputs && b->status == ONT_OK; i++) {
        for (uint32_t batch = 0; batch < batches; batch++) row[batch] = all.items[(size_t)batch * width + i];
        outputs[i] = stack(b, row, batches, 0, false);
    }
}

/* ---- descriptors ---- */

#define CONTROL(symbol, domain_, name_, since_, min_, attributes_, expand_) \
    const ont_op ont_op_##symbol = {.domain = domain_, .name = name_, .since = since_, .min_inputs = min_, \
                                    .max_inputs = UINT32_MAX, .flags = ONT_OP_CONTAINERS, .attributes = attributes_, \
                                    .expand = expand_}
CONTROL(If, "", "If", 1, 1, "then_branch:g else_branch:g rng_salt:i", if_expand);
CONTROL(Loop, "", "Loop", 1, 0, "body:g rng_salt:i", loop_expand);
CONTROL(LoopTail, ONT_DOMAIN, "LoopTail", 1, 0, "body:g iteration:i rng_salt:i", loop_expand);
CONTROL(Scan, "", "Scan", 9, 1, "body:g num_scan_inputs:i scan_input_axes:I scan_input_directions:I scan_output_axes:I "
                                "scan_output_directions:I rng_salt:i", scan_expand);
CONTROL(ScanOpset8, "", "Scan", 8, 0, "body:g num_scan_inputs:i directions:I rng_salt:i", scan_opset8_expand);
const ont_op ont_op_EmptyStack = {.domain = ONT_DOMAIN, .name = "EmptyStack", .since = 1, .min_inputs = 1,
                                  .max_inputs = 1, .flags = ONT_OP_NO_GRAD, .attributes = "axis:i",
                                  .infer = empty_stack_infer};
