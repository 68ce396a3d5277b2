/*
 * Programs for tests of csrc/plan, and a machine that executes their plans with tags as data, so that it detects
 * anything overwritten while it is still read.
 */
#ifndef ONT_TESTS_MACHINE_H
#define ONT_TESTS_MACHINE_H

#include "check.h"
#include "plan/plan.h"

static inline bool is_view(const ont_node *node)
{
    return !strcmp(node->op_type, "View");
}

enum { MOST_STEPS = 64, MOST_OUTPUTS = 8 };

typedef struct model {
    ont_graph *g;
    const ont_value *delivered[MOST_OUTPUTS];
    ont_plan_step steps[MOST_STEPS];
    uint32_t n_steps, split, n_forward_outputs;
    ont_arena arena;
    ont_plan plan;
} model;

static inline void begin(model *m)
{
    *m = (model){0};
    CHECK_OK(ont_graph_create("plan", &m->g));
    ont_arena_init(&m->arena);
}

static inline void end(model *m)
{
    ont_graph_destroy(m->g);
    ont_arena_deinit(&m->arena);
}

static inline void typed(ont_value *v, int64_t count)
{
    v->dtype = ONT_FLOAT32;
    v->has_shape = true;
    v->shape = ont_shape_of(1, &count);
}

static inline ont_value *input(model *m, int64_t count)
{
    ont_value *v;
    CHECK_OK(ont_graph_add_input(m->g, NULL, ONT_FLOAT32, NULL, &v));
    typed(v, count);
    return v;
}

/* A node of one output; a step of the program unless it is a view. */
static inline ont_value *op(model *m, const char *type, ont_value *a, ont_value *b, int64_t count, uint32_t inplace,
                            size_t work)
{
    const ont_node_spec spec = {.domain = "", .op_type = type, .inputs = (ont_value *[]){a, b}, .n_inputs = b ? 2 : 1,
                                .n_outputs = 1};
    ont_node *node;
    CHECK_OK(ont_graph_add_node(m->g, NULL, &spec, &node));
    typed(node->outputs[0], count);
    if (!is_view(node)) {
        CHECK(m->n_steps < MOST_STEPS);
        m->steps[m->n_steps++] = (ont_plan_step){node, inplace, work};
    }
    return node->outputs[0];
}

static inline ont_plan_input input_of(const model *m, const ont_plan_step *steps)
{
    return (ont_plan_input){.g = m->g, .steps = steps, .n_steps = m->n_steps, .split = m->split,
                            .n_forward_outputs = m->n_forward_outputs, .is_view = is_view,
                            .delivered = m->delivered};
}

static inline void plan(model *m, ont_value *const *outputs, uint32_t n, uint32_t n_forward, uint32_t split)
{
    CHECK_OK(ont_graph_set_outputs(m->g, outputs, n));
    CHECK_OK(ont_graph_verify(m->g));
    m->n_forward_outputs = n_forward;
    m->split = split;
    ont_plan_input in = input_of(m, m->steps);
    CHECK_OK(ont_plan_memory(&in, &m->arena, &m->plan));
    CHECK(m->plan.lower_bound <= m->plan.slab_bytes);
}

static inline ont_location location_of(const model *m, const ont_value *v)
{
    return m->plan.locations[v->id];
}

static inline bool same_location(const model *m, const ont_value *a, const ont_value *b)
{
    ont_location p = location_of(m, a), q = location_of(m, b);
    return p.kind == q.kind && p.index == q.index && p.offset == q.offset;
}

/* ---- a machine that executes plans ---- */

enum { UNITS = 1 << 16, MOST_INPUTS = 3 };

/* Each unit of 4 bytes holds the tag of the value that was written there last. */
typedef struct machine {
    uint32_t slab[UNITS], outputs[MOST_OUTPUTS][UNITS / 64], inputs[MOST_INPUTS][UNITS / 64];
    uint32_t tag[4096]; /* per value id: what reading it must find */
    bool delivered[4096]; /* per input: it was overwritten */
} machine;

static machine machine_state;

static inline uint32_t *memory(const model *m, const ont_value *v)
{
    ont_location p = location_of(m, v);
    if (p.kind == ONT_LOCATION_INPUT) return machine_state.inputs[p.index];
    if (p.kind == ONT_LOCATION_OUTPUT) return machine_state.outputs[p.index];
    CHECK(p.kind == ONT_LOCATION_SLAB && p.offset + (size_t)v->shape.dims[0] * 4 <= m->plan.slab_bytes);
    return machine_state.slab + p.offset / 4;
}

static inline void check_intact(const model *m, const ont_value *v)
{
    ont_location p = location_of(m, v);
    if (p.kind == ONT_LOCATION_INPUT) CHECK(!machine_state.delivered[machine_state.tag[v->id] - 1]);
    const uint32_t *at = memory(m, v);
    for (int64_t i = 0; i < v->shape.dims[0]; i++)
        if (at[i] != machine_state.tag[v->id])
            check_failed(__FILE__, __LINE__, "value %s was overwritten by value %%%u", v->name, at[i] - 1);
}

static inline bool in_slab(const model *m, const ont_value *v, size_t offset, size_t bytes)
{
    ont_location p = location_of(m, v);
    return p.kind == ONT_LOCATION_SLAB && p.offset < offset + bytes && offset < p.offset + (size_t)v->shape.dims[0] * 4;
}

/* An output may lie on an input only where the kernel says so, and then exactly. */
static inline void check_overlap(const model *m, const ont_plan_step *s)
{
    const ont_value *out = s->node->outputs[0];
    for (uint32_t i = 0; i < s->node->n_inputs; i++) {
        const ont_value *in = s->node->inputs[i].value;
        bool exact = memory(m, in) == memory(m, out), overlap = exact;
        if (location_of(m, out).kind == ONT_LOCATION_SLAB)
            overlap = in_slab(m, in, location_of(m, out).offset, (size_t)out->shape.dims[0] * 4);
        if (!overlap) continue;
        bool through_other = false; /* F(v, v): the kernel reads the same element of both */
        for (uint32_t k = 0; k < s->node->n_inputs; k++)
            through_other |= s->inplace >> k & 1 && s->node->inputs[k].value == in;
        CHECK(exact && through_other && in->shape.dims[0] == out->shape.dims[0]);
    }
}

static inline void execute_step(const model *m, uint32_t t)
{
    const ont_plan_step *s = &m->steps[t];
    const ont_value *out = s->node->outputs[0];
    for (uint32_t i = 0; i < s->node->n_inputs; i++) check_intact(m, s->node->inputs[i].value);
    check_overlap(m, s);
    if (s->work_bytes) {
        size_t at = m->plan.work_offsets[t];
        CHECK(at % ONT_PLAN_ALIGN == 0 && at + s->work_bytes <= m->plan.slab_bytes);
        CHECK(!in_slab(m, out, at, s->work_bytes));
        for (size_t i = 0; i < s->work_bytes / 4; i++) machine_state.slab[at / 4 + i] = 0;
        for (uint32_t i = 0; i < s->node->n_inputs; i++) check_intact(m, s->node->inputs[i].value);
    }
    /* Blocks of backward's outputs do not exist before, those of forward's are the caller's after. */
    if (location_of(m, out).kind == ONT_LOCATION_OUTPUT)
        CHECK((location_of(m, out).index < m->n_forward_outputs) == (t < m->split));
    uint32_t *to = memory(m, out);
    for (int64_t i = 0; i < out->shape.dims[0]; i++) to[i] = out->id + 1;
}

/* Outputs that are read before step t, or behind the last one. */
static inline void deliver_gradients(const model *m, uint32_t t)
{
    for (uint32_t i = m->n_forward_outputs; i < m->g->n_outputs; i++) {
        if (m->plan.deliver_before[i] != t) continue;
        CHECK(m->delivered[i] && t >= m->split && !m->plan.copied_outputs[i]);
        check_intact(m, m->g->outputs[i]);
        machine_state.delivered[m->delivered[i]->id] = true;
    }
}

/* Whether the output became a block although it was to be delivered: it is an input itself. */
static inline bool is_block(const model *m, uint32_t output)
{
    bool block = m->plan.deliver_before[output] == ONT_PLAN_BLOCK;
    CHECK(block == (!m->delivered[output] || location_of(m, m->g->outputs[output]).kind == ONT_LOCATION_INPUT));
    return block;
}

static inline void execute_plan(const model *m)
{
    memset(&machine_state, 0, sizeof machine_state);
    for (uint32_t i = 0; i < m->g->n_inputs; i++)
        for (int64_t k = 0; k < m->g->inputs[i]->shape.dims[0]; k++)
            machine_state.inputs[i][k] = m->g->inputs[i]->id + 1;
    for (uint32_t i = 0; i < m->g->n_values; i++) {
        const ont_value *v = m->g->values[i];
        while (v->kind == ONT_VALUE_NODE && is_view(v->def)) v = v->def->inputs[0].value;
        machine_state.tag[i] = v->id + 1;
    }
    for (uint32_t t = 0; t <= m->n_steps; t++) {
        for (uint32_t i = 0; i < m->g->n_outputs; i++) {
            bool forward = i < m->n_forward_outputs, due = t == (forward ? m->split : m->n_steps);
            const ont_value *v = m->g->outputs[i];
            ont_location p = location_of(m, v);
            if (!due || !is_block(m, i)) continue;
            check_intact(m, v);
            CHECK(m->plan.copied_outputs[i] || (p.kind == ONT_LOCATION_OUTPUT && p.index == i));
        }
        if (t >= m->split) deliver_gradients(m, t);
        if (t < m->n_steps) execute_step(m, t);
    }
}

static const int64_t counts[] = {1, 16, 16, 16, 40, 64};

static inline void random_model(model *m)
{
    ont_value *values[MOST_STEPS * 2], *outputs[MOST_OUTPUTS];
    int n = 0, n_inputs = (int)check_between(1, MOST_INPUTS), n_nodes = (int)check_between(1, 40);
    for (; n < n_inputs; n++) values[n] = input(m, counts[check_between(0, 5)]);
    uint32_t split_node = (uint32_t)check_between(0, n_nodes), split = 0;
    int forward_values = n;
    for (int k = 0; k < n_nodes; k++) {
        int64_t low = check_between(0, 2) && n > 4 ? n - 4 : 0; /* mostly recent values, so that many die early */
        ont_value *a = values[check_between(low, n - 1)],
                  *b = check_between(0, 1) ? values[check_between(low, n - 1)] : NULL;
        bool view = !check_between(0, 4);
        int64_t count = view || check_between(0, 3) ? a->shape.dims[0] : counts[check_between(0, 5)];
        uint32_t inplace = (uint32_t)check_between(0, 3);
        values[n++] = op(m, view ? "View" : "F", a, view ? NULL : b, count, inplace,
                         check_between(0, 5) ? 0 : (size_t)check_between(1, 300) * 4);
        if (k + 1 == (int)split_node) {
            split = m->n_steps;
            forward_values = n;
        }
    }
    uint32_t n_forward = (uint32_t)check_between(1, MOST_OUTPUTS / 2),
             n_back = (uint32_t)check_between(0, MOST_OUTPUTS / 2);
    for (uint32_t i = 0; i < n_forward; i++) outputs[i] = values[check_between(0, forward_values - 1)];
    for (uint32_t i = 0; i < n_back; i++) outputs[n_forward + i] = values[check_between(0, n - 1)];
    bool some = check_between(0, 1); /* as gradients of the inputs, an input's own at most once */
    for (uint32_t i = 0; some && i < n_back && i < (uint32_t)n_inputs; i++) m->delivered[n_forward + i] = values[i];
    plan(m, outputs, n_forward + n_back, n_forward, split);
}

#endif
