/*
 * List scheduling of one phase's steps to shorten live ranges. See plan.h.
 *
 * Steps are chosen one by one, from the last to the first or from the first to the last: of the ready steps, the one
 * after which the fewest bytes are live. From the end, a value is produced just before its first use; from the start, a
 * step that ends the live ranges of other values runs as soon as it can. Either way one branch is finished before the
 * next one begins, also where a model lists all first layers of its branches before all second ones, and likewise in
 * backward. Ties keep the given order, so that an order without benefit changes little.
 *
 * The greedy choice is not optimal; the optimum is NP-hard (Sethi, "Complete Register Allocation Problems", 1975). The
 * caller compares memory plans.
 */
#include "base/alloc.h"
#include "plan/plan.h"

enum { NONE = UINT32_MAX };

typedef struct order_builder {
    const ont_graph *g;
    const ont_plan_step *steps;
    uint32_t first, last; /* steps of the phase; `last` exclusive */
    bool from_end;
    bool (*is_view)(const ont_node *);
    uint32_t *step_of; /* per node id: its step in this phase, or NONE */
    size_t *bytes;     /* per value id: size of its storage; 0 if it is not in the slab */
    /* per value id: node inputs, in this phase and later ones, that read its storage and are not scheduled yet */
    uint32_t *unscheduled_uses;
    bool *live;           /* per value id, from_end only: whether a scheduled or later step reads it */
    uint64_t *last_query; /* per value id: the last cost query that counted it */
    uint64_t query;
    /* per step of the phase: unscheduled users of its results (from_end), or unscheduled producers of its inputs */
    uint32_t *n_pending;
    uint32_t *ready;      /* steps without pending dependencies */
    uint32_t n_ready;
} order_builder;

static const ont_value *storage_of(const order_builder *o, const ont_value *v)
{
    while (v->def && o->is_view(v->def)) v = v->def->inputs[0].value;
    return v;
}

/* The id of the storage that input i reads, or NONE. */
static uint32_t storage_read(const order_builder *o, const ont_node *node, uint32_t i)
{
    return node->inputs[i].value ? storage_of(o, node->inputs[i].value)->id : NONE;
}

/* The step of this phase that produces the storage, or NONE. */
static uint32_t producer_step(const order_builder *o, uint32_t id)
{
    const ont_node *def = o->g->values[id]->def;
    return def ? o->step_of[def->id] : NONE;
}

static ont_status init(order_builder *o)
{
    uint32_t n_values = o->g->n_values + 1, n_steps = o->last - o->first + 1;
    o->step_of = ont_calloc(o->g->n_nodes + 1, sizeof *o->step_of);
    o->bytes = ont_calloc(n_values, sizeof *o->bytes);
    o->unscheduled_uses = ont_calloc(n_values, sizeof *o->unscheduled_uses);
    o->live = ont_calloc(n_values, sizeof *o->live);
    o->last_query = ont_calloc(n_values, sizeof *o->last_query);
    o->n_pending = ont_calloc(n_steps, sizeof *o->n_pending);
    o->ready = ont_calloc(n_steps, sizeof *o->ready);
    if (!o->step_of || !o->bytes || !o->unscheduled_uses || !o->live || !o->last_query || !o->n_pending || !o->ready)
        return ONT_ENOMEM;
    for (uint32_t i = 0; i < o->g->n_nodes; i++) o->step_of[i] = NONE;
    for (uint32_t i = 0; i < o->g->n_values; i++) {
        const ont_value *v = o->g->values[i];
        if (v->kind == ONT_VALUE_NODE && v->has_shape && !o->is_view(v->def))
            ONT_TRY(ont_context(ont_shape_bytes(&v->shape, v->dtype, &o->bytes[i]), "value '%s'", v->name));
    }
    for (uint32_t i = 0; i < o->g->n_outputs; i++) o->bytes[storage_of(o, o->g->outputs[i])->id] = 0;
    return ONT_OK;
}

/* Counts the dependencies of each step and the uses of each storage, and finds the steps that are ready. */
static void count_dependencies(order_builder *o, uint32_t n_steps)
{
    for (uint32_t t = o->first; t < o->last; t++) o->step_of[o->steps[t].node->id] = t;
    for (uint32_t t = o->first; t < n_steps; t++) {
        const ont_node *node = o->steps[t].node;
        for (uint32_t i = 0; i < node->n_inputs; i++) {
            uint32_t id = storage_read(o, node, i), producer = id == NONE ? NONE : producer_step(o, id);
            if (id == NONE) continue;
            if (t >= o->last) o->live[id] = true;
            o->unscheduled_uses[id]++;
            if (t < o->last && producer != NONE) o->n_pending[(o->from_end ? producer : t) - o->first]++;
        }
    }
    for (uint32_t t = o->first; t < o->last; t++)
        if (!o->n_pending[t - o->first]) o->ready[o->n_ready++] = t;
}

/* Live bytes before step t minus live bytes after it. */
static int64_t byte_delta_from_end(order_builder *o, uint32_t t)
{
    const ont_node *node = o->steps[t].node;
    int64_t cost = 0;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        uint32_t id = storage_read(o, node, i);
        if (id == NONE || o->live[id] || o->last_query[id] == o->query) continue;
        o->last_query[id] = o->query;
        cost += (int64_t)o->bytes[id];
    }
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i] && o->live[node->outputs[i]->id]) cost -= (int64_t)o->bytes[node->outputs[i]->id];
    return cost;
}

/* Live bytes after step t minus live bytes before it. */
static int64_t byte_delta_from_start(order_builder *o, uint32_t t)
{
    const ont_node *node = o->steps[t].node;
    int64_t cost = 0;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        uint32_t id = storage_read(o, node, i);
        if (id != NONE && !--o->unscheduled_uses[id]) cost -= (int64_t)o->bytes[id];
    }
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (storage_read(o, node, i) != NONE) o->unscheduled_uses[storage_read(o, node, i)]++;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i] && o->unscheduled_uses[node->outputs[i]->id])
            cost += (int64_t)o->bytes[node->outputs[i]->id];
    return cost;
}

/* Removes and returns the best of the ready steps. */
static uint32_t pop_best_ready(order_builder *o)
{
    uint32_t best = 0;
    int64_t best_cost = INT64_MAX;
    for (uint32_t i = 0; i < o->n_ready; i++) {
        uint32_t t = o->ready[i];
        o->query++;
        int64_t cost = o->from_end ? byte_delta_from_end(o, t) : byte_delta_from_start(o, t);
        if (cost > best_cost || (cost == best_cost && (t < o->ready[best]) == o->from_end)) continue;
        best_cost = cost;
        best = i;
    }
    uint32_t t = o->ready[best];
    o->ready[best] = o->ready[--o->n_ready];
    return t;
}

static void release_dependency(order_builder *o, uint32_t t)
{
    if (t != NONE && !--o->n_pending[t - o->first]) o->ready[o->n_ready++] = t;
}

/* Schedules step t before all steps scheduled so far. */
static void schedule_from_end(order_builder *o, uint32_t t)
{
    const ont_node *node = o->steps[t].node;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) o->live[node->outputs[i]->id] = false;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        uint32_t id = storage_read(o, node, i);
        if (id == NONE) continue;
        o->live[id] = true;
        release_dependency(o, producer_step(o, id));
    }
}

/* Releases the users of the value, directly or through views, from their dependency on it. */
static void release_users(order_builder *o, const ont_value *v)
{
    for (const ont_use *use = v->uses; use; use = use->next) {
        if (o->is_view(use->user)) {
            if (use == &use->user->inputs[0]) release_users(o, use->user->outputs[0]);
            continue;
        }
        release_dependency(o, o->step_of[use->user->id]);
    }
}

/* Schedules step t after all steps scheduled so far. */
static void schedule_from_start(order_builder *o, uint32_t t)
{
    const ont_node *node = o->steps[t].node;
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (storage_read(o, node, i) != NONE) o->unscheduled_uses[storage_read(o, node, i)]--;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) release_users(o, node->outputs[i]);
}

ont_status ont_plan_order(const ont_plan_input *in, uint32_t first, uint32_t last, bool from_end, uint32_t *order)
{
    order_builder o = {.g = in->g, .steps = in->steps, .first = first, .last = last, .from_end = from_end,
                       .is_view = in->is_view};
    ont_status status;
    ONT_TRYGOTO(status, done, init(&o));
    count_dependencies(&o, in->n_steps);
    for (uint32_t n_done = first; n_done < last; n_done++) {
        uint32_t t = pop_best_ready(&o);
        order[from_end ? last - 1 - (n_done - first) : n_done] = t;
        if (from_end) schedule_from_end(&o, t);
        else schedule_from_start(&o, t);
    }
done:
    ont_free(o.step_of);
    ont_free(o.bytes);
    ont_free(o.unscheduled_uses);
    ont_free(o.live);
    ont_free(o.last_query);
    ont_free(o.n_pending);
    ont_free(o.ready);
    return status;
}
