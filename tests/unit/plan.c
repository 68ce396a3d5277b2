/*
 * Unit tests of csrc/plan: whole plans are executed by a machine that uses tags as data, so that it detects anything
 * overwritten while it is still read; orders of steps by the same machine, and against all orders.
 */
#include "check.h"
#include "plan/plan.h"

static bool is_view(const ont_node *node)
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

static void begin(model *m)
{
    *m = (model){0};
    CHECK_OK(ont_graph_create("plan", &m->g));
    ont_arena_init(&m->arena);
}

static void end(model *m)
{
    ont_graph_destroy(m->g);
    ont_arena_deinit(&m->arena);
}

static void typed(ont_value *v, int64_t count)
{
    v->dtype = ONT_FLOAT32;
    v->has_shape = true;
    v->shape = ont_shape_of(1, &count);
}

static ont_value *input(model *m, int64_t count)
{
    ont_value *v;
    CHECK_OK(ont_graph_add_input(m->g, NULL, ONT_FLOAT32, NULL, &v));
    typed(v, count);
    return v;
}

/* A node of one output; a step of the program unless it is a view. */
static ont_value *op(model *m, const char *type, ont_value *a, ont_value *b, int64_t count, uint32_t inplace,
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

static ont_plan_input input_of(const model *m, const ont_plan_step *steps)
{
    return (ont_plan_input){.g = m->g, .steps = steps, .n_steps = m->n_steps, .split = m->split,
                            .n_forward_outputs = m->n_forward_outputs, .is_view = is_view,
                            .delivered = m->delivered};
}

static void plan(model *m, ont_value *const *outputs, uint32_t n, uint32_t n_forward, uint32_t split)
{
    CHECK_OK(ont_graph_set_outputs(m->g, outputs, n));
    CHECK_OK(ont_graph_verify(m->g));
    m->n_forward_outputs = n_forward;
    m->split = split;
    ont_plan_input in = input_of(m, m->steps);
    CHECK_OK(ont_plan_memory(&in, &m->arena, &m->plan));
    CHECK(m->plan.lower_bound <= m->plan.slab_bytes);
}

static ont_location location_of(const model *m, const ont_value *v)
{
    return m->plan.locations[v->id];
}

static bool same_location(const model *m, const ont_value *a, const ont_value *b)
{
    ont_location p = location_of(m, a), q = location_of(m, b);
    return p.kind == q.kind && p.index == q.index && p.offset == q.offset;
}

TEST(plan_chain_in_place)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16), *v[6];
    v[0] = op(&m, "F", x, NULL, 16, 1, 0);
    for (int i = 1; i < 6; i++) v[i] = op(&m, "F", v[i - 1], NULL, 16, 1, 0);
    ont_value *sum = op(&m, "G", v[5], NULL, 1, 0, 0);
    plan(&m, &sum, 1, 1, m.n_steps);
    CHECK(location_of(&m, x).kind == ONT_LOCATION_INPUT && location_of(&m, x).index == 0);
    CHECK(location_of(&m, sum).kind == ONT_LOCATION_OUTPUT && location_of(&m, sum).index == 0 &&
          !m.plan.copied_outputs[0]);
    for (int i = 0; i < 6; i++) CHECK(same_location(&m, v[i], v[0]) && location_of(&m, v[i]).kind == ONT_LOCATION_SLAB);
    CHECK_INT(m.plan.inplace_count, 5); /* not over the input, which is the caller's */
    CHECK_INT(m.plan.slab_bytes, 64);
    end(&m);
}

TEST(plan_not_in_place)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16);
    ont_value *a = op(&m, "F", x, NULL, 16, 0, 0);
    ont_value *later = op(&m, "F", a, NULL, 16, 1, 0); /* a is read again */
    ont_value *wide = op(&m, "F", a, NULL, 32, 1, 0);  /* of another size */
    ont_value *no = op(&m, "F", wide, NULL, 32, 0, 0); /* the kernel cannot */
    ont_value *alias = op(&m, "View", no, NULL, 32, 0, 0);
    ont_value *both = op(&m, "F", no, alias, 32, 1, 0); /* the other operand is the same storage */
    ont_value *square = op(&m, "F", both, both, 32, 3, 0); /* the same value twice, over either: elementwise, so it may */
    ont_value *moved = op(&m, "F", square, square, 32, 1, 0); /* over one alone: the kernel reads the other anywhere */
    ont_value *end_ = op(&m, "G", moved, later, 1, 3, 0);
    plan(&m, &end_, 1, 1, m.n_steps);
    CHECK(!same_location(&m, a, later) && !same_location(&m, a, wide) && !same_location(&m, wide, no));
    CHECK(same_location(&m, no, alias) && !same_location(&m, no, both));
    CHECK(same_location(&m, both, square) && !same_location(&m, square, moved));
    CHECK_INT(m.plan.inplace_count, 1);
    end(&m);
}

TEST(plan_views_share_and_live_long)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16);
    ont_value *a = op(&m, "F", x, NULL, 16, 0, 0);
    ont_value *v = op(&m, "View", a, NULL, 16, 0, 0), *w = op(&m, "View", v, NULL, 16, 0, 0);
    ont_value *b = op(&m, "F", x, NULL, 16, 0, 0), *c = op(&m, "F", b, NULL, 16, 0, 0);
    ont_value *d = op(&m, "F", w, c, 16, 0, 0);
    ont_value *of_input = op(&m, "View", x, NULL, 16, 0, 0), *e = op(&m, "F", of_input, d, 16, 1, 0);
    plan(&m, &e, 1, 1, m.n_steps);
    CHECK(same_location(&m, a, v) && same_location(&m, a, w));
    CHECK(!same_location(&m, a, b) && !same_location(&m, a, c)); /* a is live through w */
    CHECK(same_location(&m, of_input, x) && location_of(&m, of_input).kind == ONT_LOCATION_INPUT);
    CHECK(location_of(&m, e).kind == ONT_LOCATION_OUTPUT);
    end(&m);
}

TEST(plan_outputs)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16);
    ont_value *a = op(&m, "F", x, NULL, 16, 0, 0), *alias = op(&m, "View", a, NULL, 16, 0, 0);
    ont_value *b = op(&m, "F", a, NULL, 16, 1, 0);
    ont_value *split_at = op(&m, "F", b, NULL, 16, 1, 0);
    uint32_t split = m.n_steps;
    ont_value *back = op(&m, "F", split_at, NULL, 16, 1, 0);
    /* a, the same through a view, an input, and b once as it is; backward: one of its own, and one of forward's. */
    ont_value *outputs[] = {a, alias, x, b, back, split_at};
    plan(&m, outputs, 6, 4, split);
    const bool *copied = m.plan.copied_outputs;
    CHECK(!copied[0] && copied[1] && copied[2] && !copied[3] && !copied[4] && copied[5]);
    CHECK(location_of(&m, a).kind == ONT_LOCATION_OUTPUT && location_of(&m, a).index == 0 &&
          same_location(&m, a, alias));
    CHECK(location_of(&m, b).kind == ONT_LOCATION_OUTPUT && location_of(&m, b).index == 3);
    CHECK(location_of(&m, back).kind == ONT_LOCATION_OUTPUT && location_of(&m, back).index == 4);
    CHECK(location_of(&m, split_at).kind == ONT_LOCATION_SLAB); /* computed by forward, given out by backward */
    CHECK_INT(m.plan.inplace_count, 0);
    end(&m);
}

TEST(plan_delivered_gradients)
{
    model m;
    begin(&m);
    ont_value *weight = input(&m, 16), *bias = input(&m, 16), *x = input(&m, 16);
    ont_value *y = op(&m, "F", x, weight, 16, 0, 0);
    ont_value *early = op(&m, "F", y, NULL, 16, 0, 0), *late = op(&m, "F", early, weight, 16, 3, 0);
    ont_value *last = op(&m, "F", late, NULL, 16, 1, 0);
    /* The gradient of weight is final before the step that reads weight, which must not be overwritten before. */
    ont_value *outputs[] = {y, early, last, x};
    m.delivered[1] = weight;
    m.delivered[2] = bias;
    m.delivered[3] = x;
    plan(&m, outputs, 4, 1, 1);
    CHECK_INT(m.plan.deliver_before[1], 3);
    CHECK_INT(m.plan.deliver_before[2], 4);
    CHECK(m.plan.deliver_before[0] == ONT_PLAN_BLOCK && m.plan.deliver_before[3] == ONT_PLAN_BLOCK);
    CHECK(location_of(&m, early).kind == ONT_LOCATION_SLAB && !same_location(&m, early, late));
    CHECK(location_of(&m, last).kind == ONT_LOCATION_SLAB && m.plan.copied_outputs[3] && !m.plan.copied_outputs[2]);
    CHECK_INT(m.plan.slab_bytes, 128);
    end(&m);
}

TEST(plan_unused_values_have_no_location)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16), *a = op(&m, "F", x, NULL, 16, 0, 0), *removed = op(&m, "View", x, NULL, 16, 0, 0);
    ont_graph_remove_node(m.g, removed->def);
    removed->has_shape = false;
    plan(&m, &a, 1, 1, 1);
    CHECK(location_of(&m, removed).kind == ONT_LOCATION_NONE);
    CHECK_INT(m.plan.slab_bytes, 0);
    end(&m);
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

static uint32_t *memory(const model *m, const ont_value *v)
{
    ont_location p = location_of(m, v);
    if (p.kind == ONT_LOCATION_INPUT) return machine_state.inputs[p.index];
    if (p.kind == ONT_LOCATION_OUTPUT) return machine_state.outputs[p.index];
    CHECK(p.kind == ONT_LOCATION_SLAB && p.offset + (size_t)v->shape.dims[0] * 4 <= m->plan.slab_bytes);
    return machine_state.slab + p.offset / 4;
}

static void check_intact(const model *m, const ont_value *v)
{
    ont_location p = location_of(m, v);
    if (p.kind == ONT_LOCATION_INPUT) CHECK(!machine_state.delivered[machine_state.tag[v->id] - 1]);
    const uint32_t *at = memory(m, v);
    for (int64_t i = 0; i < v->shape.dims[0]; i++)
        if (at[i] != machine_state.tag[v->id])
            check_failed(__FILE__, __LINE__, "value %s was overwritten by value %%%u", v->name, at[i] - 1);
}

static bool in_slab(const model *m, const ont_value *v, size_t offset, size_t bytes)
{
    ont_location p = location_of(m, v);
    return p.kind == ONT_LOCATION_SLAB && p.offset < offset + bytes && offset < p.offset + (size_t)v->shape.dims[0] * 4;
}

/* An output may lie on an input only where the kernel says so, and then exactly. */
static void check_overlap(const model *m, const ont_plan_step *s)
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

static void execute_step(const model *m, uint32_t t)
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
static void deliver_gradients(const model *m, uint32_t t)
{
    for (uint32_t i = m->n_forward_outputs; i < m->g->n_outputs; i++) {
        if (m->plan.deliver_before[i] != t) continue;
        CHECK(m->delivered[i] && t >= m->split && !m->plan.copied_outputs[i]);
        check_intact(m, m->g->outputs[i]);
        machine_state.delivered[m->delivered[i]->id] = true;
    }
}

/* Whether the output became a block although it was to be delivered: it is an input itself. */
static bool is_block(const model *m, uint32_t output)
{
    bool block = m->plan.deliver_before[output] == ONT_PLAN_BLOCK;
    CHECK(block == (!m->delivered[output] || location_of(m, m->g->outputs[output]).kind == ONT_LOCATION_INPUT));
    return block;
}

static void execute_plan(const model *m)
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

static void random_model(model *m)
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

TEST(plan_random_models_keep_what_is_read)
{
    double ratio = 0, shared = 0;
    int rounds = 3000, counted = 0;
    for (int round = 0; round < rounds; round++) {
        model m;
        begin(&m);
        random_model(&m);
        execute_plan(&m);
        shared += m.plan.inplace_count;
        if (m.plan.lower_bound) {
            ratio += (double)m.plan.slab_bytes / (double)m.plan.lower_bound;
            counted++;
        }
        end(&m);
    }
    printf("slab over lower bound, mean: %.4f; %.2f shared in place a model\n", ratio / counted, shared / rounds);
    CHECK(ratio / counted < 1.1 && shared / rounds > 1);
}

/* ---- order ---- */

/* Puts the steps of both phases into the order chosen for them, which is one of their own, and plans again. */
static void reorder(model *m, bool from_end)
{
    uint32_t order[MOST_STEPS + 1];
    bool taken[MOST_STEPS] = {false};
    ont_plan_step steps[MOST_STEPS];
    ont_plan_input in = input_of(m, m->steps);
    CHECK_OK(ont_plan_order(&in, 0, m->split, from_end, order));
    CHECK_OK(ont_plan_order(&in, m->split, m->n_steps, from_end, order));
    for (uint32_t t = 0; t < m->n_steps; t++) {
        CHECK(order[t] < m->n_steps && !taken[order[t]] && (order[t] < m->split) == (t < m->split));
        taken[order[t]] = true;
        steps[t] = m->steps[order[t]];
    }
    memcpy(m->steps, steps, m->n_steps * sizeof *steps);
    CHECK_OK(ont_plan_memory(&in, &m->arena, &m->plan));
}

/* No step before one whose result it reads, through views or not. */
static void check_order(const model *m)
{
    static bool produced[4096];
    memset(produced, 0, sizeof produced);
    for (uint32_t t = 0; t < m->n_steps; t++) {
        const ont_node *node = m->steps[t].node;
        for (uint32_t i = 0; i < node->n_inputs; i++) {
            const ont_value *v = node->inputs[i].value;
            while (v->kind == ONT_VALUE_NODE && is_view(v->def)) v = v->def->inputs[0].value;
            CHECK(v->kind != ONT_VALUE_NODE || produced[v->id]);
        }
        produced[node->outputs[0]->id] = true;
    }
}

TEST(order_one_branch_after_the_other)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16), *wide[4], *narrow[4];
    for (int i = 0; i < 4; i++) wide[i] = op(&m, "F", x, NULL, 64, 0, 0);
    for (int i = 0; i < 4; i++) {
        ont_value *from = i & 1 ? op(&m, "View", wide[i], NULL, 64, 0, 0) : wide[i];
        narrow[i] = op(&m, "F", from, NULL, 16, 0, 0);
    }
    ont_value *a = op(&m, "F", narrow[0], narrow[1], 16, 0, 0), *b = op(&m, "F", narrow[2], narrow[3], 16, 0, 0);
    ont_value *sum = op(&m, "F", a, b, 1, 0, 0);
    plan(&m, &sum, 1, 1, m.n_steps);
    CHECK_INT(m.plan.slab_bytes, 4 * 256 + 64);
    reorder(&m, true);
    check_order(&m);
    CHECK_INT(m.plan.slab_bytes, 256 + 4 * 64); /* one wide value; the sums wait for all results */
    reorder(&m, false);
    check_order(&m);
    CHECK_INT(m.plan.slab_bytes, 256 + 3 * 64); /* the last one, its result and the one before, and a sum */
    end(&m);
}

/* Peak of live bytes of the order that memory.c plans for these steps. */
static size_t bound_of(model *m, const ont_plan_step *steps)
{
    ont_arena arena;
    ont_plan plan;
    ont_arena_init(&arena);
    ont_plan_input in = input_of(m, steps);
    CHECK_OK(ont_plan_memory(&in, &arena, &plan));
    ont_arena_deinit(&arena);
    return plan.lower_bound;
}

/*
 * The smallest peak over all orders of a model whose steps are all forward: every order in which producers come first.
 */
static size_t best_order(model *m, ont_plan_step *chosen, uint32_t n, uint32_t taken, size_t best)
{
    if (n == m->n_steps) {
        size_t bound = bound_of(m, chosen);
        return bound < best ? bound : best;
    }
    for (uint32_t t = 0; t < m->n_steps; t++) {
        if (taken >> t & 1) continue;
        bool possible = true;
        for (uint32_t u = 0; u < m->n_steps && possible; u++) {
            const ont_node *node = m->steps[t].node;
            for (uint32_t i = 0; i < node->n_inputs; i++) {
                const ont_value *v = node->inputs[i].value;
                while (v->kind == ONT_VALUE_NODE && is_view(v->def)) v = v->def->inputs[0].value;
                possible &= v->def != m->steps[u].node || taken >> u & 1;
            }
        }
        if (!possible) continue;
        chosen[n] = m->steps[t];
        best = best_order(m, chosen, n + 1, taken | 1u << t, best);
    }
    return best;
}

TEST(order_against_all_orders)
{
    enum { ROUNDS = 150, STEPS = 7 };
    double ratio = 0, given = 0;
    int optimal = 0;
    for (int round = 0; round < ROUNDS; round++) {
        model m;
        begin(&m);
        ont_value *values[STEPS + 1] = {input(&m, 16)}, *last = NULL;
        for (int k = 1; k < STEPS; k++) {
            ont_value *a = values[check_between(0, k - 1)],
                      *b = check_between(0, 2) ? NULL : values[check_between(0, k - 1)];
            values[k] = op(&m, "F", a, b, counts[check_between(0, 5)], 0, 0);
        }
        for (int k = 1; k < STEPS; k++)
            if (!values[k]->uses) last = last ? op(&m, "F", last, values[k], 1, 0, 0) : values[k];
        plan(&m, &last, 1, 1, m.n_steps);
        if (m.n_steps > STEPS + 1) { /* too many orders */
            end(&m);
            continue;
        }
        ont_plan_step chosen[MOST_STEPS];
        size_t best = best_order(&m, chosen, 0, 0, SIZE_MAX), before = m.plan.lower_bound;
        size_t now = before;
        for (int from_end = 0; from_end < 2; from_end++) {
            reorder(&m, from_end);
            check_order(&m);
            CHECK(m.plan.lower_bound >= best);
            if (m.plan.lower_bound < now) now = m.plan.lower_bound; /* as run/schedule.c takes it */
        }
        optimal += now == best;
        ratio += best ? (double)now / (double)best : 1;
        given += best ? (double)before / (double)best : 1;
        end(&m);
    }
    printf("bytes alive over the best order's, mean of %d: %.3f, %.3f as given; %d are best\n", ROUNDS, ratio / ROUNDS,
           given / ROUNDS, optimal);
    CHECK(ratio < given);
}

TEST(order_random_models_keep_what_is_read)
{
    int better = 0, rounds = 2000;
    for (int round = 0; round < rounds; round++) {
        model m;
        begin(&m);
        random_model(&m);
        size_t before = m.plan.slab_bytes;
        reorder(&m, round & 1);
        check_order(&m);
        execute_plan(&m);
        better += m.plan.slab_bytes < before;
        end(&m);
    }
    printf("%d of %d models have a smaller slab in another order\n", better, rounds);
    CHECK(better > rounds / 10);
}

TEST(order_allocation_failures)
{
    model m;
    begin(&m);
    random_model(&m);
    uint32_t order[MOST_STEPS + 1];
    int64_t live = ont_alloc_live();
    for (int k = 0;; k++) {
        ont_alloc_fail_after(k);
        ont_plan_input in = input_of(&m, m.steps);
        ont_status status = ont_plan_order(&in, 0, m.split, true, order);
        bool fired = ont_alloc_fail_fired();
        ont_alloc_fail_after(-1);
        CHECK_INT(status, fired ? ONT_ENOMEM : ONT_OK);
        CHECK_INT(ont_alloc_live(), live);
        if (!fired) break;
        CHECK(k < 100);
    }
    end(&m);
}

TEST(plan_allocation_failures)
{
    model m;
    begin(&m);
    random_model(&m);
    int64_t live = ont_alloc_live();
    for (int k = 0;; k++) {
        ont_arena arena;
        ont_arena_init(&arena);
        ont_plan left = {.slab_bytes = 12345};
        ont_alloc_fail_after(k);
        ont_plan_input in = input_of(&m, m.steps);
        ont_status status = ont_plan_memory(&in, &arena, &left);
        bool fired = ont_alloc_fail_fired();
        ont_alloc_fail_after(-1);
        CHECK_INT(status, fired ? ONT_ENOMEM : ONT_OK);
        CHECK(left.slab_bytes == (fired ? 12345 : m.plan.slab_bytes));
        ont_arena_deinit(&arena);
        CHECK_INT(ont_alloc_live(), live);
        if (!fired) break;
        CHECK(k < 100);
    }
    end(&m);
}
