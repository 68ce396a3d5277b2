/*
 * Orders of one phase's steps that shorten lifetimes. See plan.h.
 *
 * Steps are chosen one by one, from the last to the first or from the first to the last: of those that may come next,
 * the one that leaves least alive beyond it. From the end a value is made just before its first reader, and from the
 * start a step that ends the lives of others runs as soon as it can. Either way one branch comes after the other where
 * a model has all first layers before all second ones, and in backward the same. Of equals the one is taken that the
 * given order has there, so that an order with nothing to gain stays nearly as it is.
 *
 * The best choice at each step is no best order, which is NP-hard to find (Sethi, "Complete Register Allocation
 * Problems", 1975): whoever asks compares plans.
 */
#include "base/alloc.h"
#include "plan/plan.h"

enum { NOWHERE = UINT32_MAX };

typedef struct orderer {
    const ont_graph *g;
    const ont_plan_step *steps;
    uint32_t first, last; /* of the phase; `last` exclusive */
    bool from_end;
    bool (*is_view)(const ont_node *);
    uint32_t *step_of;    /* per node id: its step of this phase, or NOWHERE */
    size_t *bytes;        /* per value id: of its storage, 0 where the slab has none of it */
    uint32_t *left;       /* per value id: slots that read its storage and are not chosen, one more for later phases */
    bool *alive;          /* per value id, from the end: somebody behind reads it */
    uint64_t *seen;       /* per value id: the latest look at a step's cost that counted it */
    uint64_t looks;
    uint32_t *waits;      /* per step of the phase: for so many readers of its results, or slots of its own */
    uint32_t *ready;      /* steps that wait for nobody */
    uint32_t n_ready;
} orderer;

static const ont_value *storage_of(const orderer *o, const ont_value *v)
{
    while (v->def && o->is_view(v->def)) v = v->def->inputs[0].value;
    return v;
}

/* The id of what slot i reads, or NOWHERE. */
static uint32_t read_by(const orderer *o, const ont_node *node, uint32_t i)
{
    return node->inputs[i].value ? storage_of(o, node->inputs[i].value)->id : NOWHERE;
}

/* The step of this phase that makes the storage, or NOWHERE. */
static uint32_t maker_of(const orderer *o, uint32_t id)
{
    const ont_node *def = o->g->values[id]->def;
    return def ? o->step_of[def->id] : NOWHERE;
}

static ont_status init(orderer *o)
{
    uint32_t n_values = o->g->n_values + 1, n_steps = o->last - o->first + 1;
    o->step_of = ont_calloc(o->g->n_nodes + 1, sizeof *o->step_of);
    o->bytes = ont_calloc(n_values, sizeof *o->bytes);
    o->left = ont_calloc(n_values, sizeof *o->left);
    o->alive = ont_calloc(n_values, sizeof *o->alive);
    o->seen = ont_calloc(n_values, sizeof *o->seen);
    o->waits = ont_calloc(n_steps, sizeof *o->waits);
    o->ready = ont_calloc(n_steps, sizeof *o->ready);
    if (!o->step_of || !o->bytes || !o->left || !o->alive || !o->seen || !o->waits || !o->ready) return ONT_ENOMEM;
    for (uint32_t i = 0; i < o->g->n_nodes; i++) o->step_of[i] = NOWHERE;
    for (uint32_t i = 0; i < o->g->n_values; i++) {
        const ont_value *v = o->g->values[i];
        if (v->kind == ONT_VALUE_NODE && v->has_shape && !o->is_view(v->def))
            ONT_TRY(ont_context(ont_shape_bytes(&v->shape, v->dtype, &o->bytes[i]), "value '%s'", v->name));
    }
    for (uint32_t i = 0; i < o->g->n_outputs; i++) o->bytes[storage_of(o, o->g->outputs[i])->id] = 0;
    return ONT_OK;
}

/* Who waits for whom, and what steps behind the phase read. */
static void find_readers(orderer *o, uint32_t n_steps)
{
    for (uint32_t t = o->first; t < o->last; t++) o->step_of[o->steps[t].node->id] = t;
    for (uint32_t t = o->first; t < n_steps; t++) {
        const ont_node *node = o->steps[t].node;
        for (uint32_t i = 0; i < node->n_inputs; i++) {
            uint32_t id = read_by(o, node, i), maker = id == NOWHERE ? NOWHERE : maker_of(o, id);
            if (id == NOWHERE) continue;
            if (t >= o->last) o->alive[id] = true;
            o->left[id]++;
            if (t < o->last && maker != NOWHERE) o->waits[(o->from_end ? maker : t) - o->first]++;
        }
    }
    for (uint32_t t = o->first; t < o->last; t++)
        if (!o->waits[t - o->first]) o->ready[o->n_ready++] = t;
}

/* Bytes that are alive in front of step t beyond those behind it. */
static int64_t cost_at_end(orderer *o, uint32_t t)
{
    const ont_node *node = o->steps[t].node;
    int64_t cost = 0;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        uint32_t id = read_by(o, node, i);
        if (id == NOWHERE || o->alive[id] || o->seen[id] == o->looks) continue;
        o->seen[id] = o->looks;
        cost += (int64_t)o->bytes[id];
    }
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i] && o->alive[node->outputs[i]->id]) cost -= (int64_t)o->bytes[node->outputs[i]->id];
    return cost;
}

/* Bytes that are alive behind step t beyond those in front of it. */
static int64_t cost_at_start(orderer *o, uint32_t t)
{
    const ont_node *node = o->steps[t].node;
    int64_t cost = 0;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        uint32_t id = read_by(o, node, i);
        if (id != NOWHERE && !--o->left[id]) cost -= (int64_t)o->bytes[id];
    }
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (read_by(o, node, i) != NOWHERE) o->left[read_by(o, node, i)]++;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i] && o->left[node->outputs[i]->id]) cost += (int64_t)o->bytes[node->outputs[i]->id];
    return cost;
}

/* Takes the best step out of those that are ready. */
static uint32_t choose(orderer *o)
{
    uint32_t best = 0;
    int64_t least = INT64_MAX;
    for (uint32_t i = 0; i < o->n_ready; i++) {
        uint32_t t = o->ready[i];
        o->looks++;
        int64_t cost = o->from_end ? cost_at_end(o, t) : cost_at_start(o, t);
        if (cost > least || (cost == least && (t < o->ready[best]) == o->from_end)) continue;
        least = cost;
        best = i;
    }
    uint32_t t = o->ready[best];
    o->ready[best] = o->ready[--o->n_ready];
    return t;
}

static void meet(orderer *o, uint32_t t)
{
    if (t != NOWHERE && !--o->waits[t - o->first]) o->ready[o->n_ready++] = t;
}

/* Step t runs in front of all that was chosen before. */
static void put_at_end(orderer *o, uint32_t t)
{
    const ont_node *node = o->steps[t].node;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) o->alive[node->outputs[i]->id] = false;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        uint32_t id = read_by(o, node, i);
        if (id == NOWHERE) continue;
        o->alive[id] = true;
        meet(o, maker_of(o, id));
    }
}

/* What reads the value, through views or not, waits no longer for it. */
static void release(orderer *o, const ont_value *v)
{
    for (const ont_use *use = v->uses; use; use = use->next) {
        if (o->is_view(use->user)) {
            if (use == &use->user->inputs[0]) release(o, use->user->outputs[0]);
            continue;
        }
        meet(o, o->step_of[use->user->id]);
    }
}

/* Step t runs behind all that was chosen before. */
static void put_at_start(orderer *o, uint32_t t)
{
    const ont_node *node = o->steps[t].node;
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (read_by(o, node, i) != NOWHERE) o->left[read_by(o, node, i)]--;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) release(o, node->outputs[i]);
}

ont_status ont_plan_order(const ont_graph *g, const ont_plan_step *steps, uint32_t n_steps, uint32_t first,
                          uint32_t last, bool from_end, bool (*is_view)(const ont_node *), uint32_t *order)
{
    orderer o = {.g = g, .steps = steps, .first = first, .last = last, .from_end = from_end, .is_view = is_view};
    ont_status status;
    ONT_TRYGOTO(status, done, init(&o));
    find_readers(&o, n_steps);
    for (uint32_t at = first; at < last; at++) {
        uint32_t t = choose(&o);
        order[from_end ? last - 1 - (at - first) : at] = t;
        if (from_end) put_at_end(&o, t);
        else put_at_start(&o, t);
    }
done:
    ont_free(o.step_of);
    ont_free(o.bytes);
    ont_free(o.left);
    ont_free(o.alive);
    ont_free(o.seen);
    ont_free(o.waits);
    ont_free(o.ready);
    return status;
}
