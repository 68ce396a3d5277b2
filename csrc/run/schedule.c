/*
 * Chooses the order of a program's steps. The exporter's order is that of the module, and backward is its reverse. It
 * is near the optimum for a chain of layers, and it keeps what a step has just written in the cache for the next one.
 * Another order is taken only if the slab shrinks by at least 1/32 and 1 MiB.
 */
#include "run/schedule.h"

#include <string.h>

#include "base/log.h"
#include "passes/options.h"

/* Upper limits of the search: scheduling a step examines all ready steps, and the traversals follow chains of views. */
enum { MIN_SAVED_BYTES = 1 << 20, MIN_SAVED_DIVISOR = 32, MAX_STEPS = 1 << 13, MAX_NODES = 1 << 15 };

typedef struct scheduler {
    ont_program *p;
    const ont_value *const *delivered;
    ont_arena arena;      /* for the orders that are tried */
    const ont_plan_step *original;
    ont_plan_step *plan_steps; /* in the best order so far */
    uint32_t *order;           /* per step: its index in the original order */
    size_t bytes;              /* slab bytes of the best order so far */
    bool changed;              /* the best order is not the original one */
} scheduler;

static ont_plan_input plan_input(const scheduler *s, const ont_plan_step *plan_steps)
{
    const ont_program *p = s->p;
    return (ont_plan_input){.g = p->graph, .steps = plan_steps, .n_steps = p->n_steps, .split = p->split,
                            .n_forward_outputs = p->grads.n_forward_outputs, .is_view = ont_node_is_view,
                            .delivered = s->delivered,
                            .redzone = p->device && p->device->ops->guard ? ONT_PLAN_ALIGN : 0};
}

static ont_status make_plan(const scheduler *s, const ont_plan_step *plan_steps, ont_arena *arena, ont_plan *plan)
{
    ont_plan_input in = plan_input(s, plan_steps);
    return ont_plan_memory(&in, arena, plan);
}

/* Tries the order built from one end of phase [first, last); keeps it if the slab shrinks, or if `forced`. */
static ont_status try_phase_order(scheduler *s, uint32_t first, uint32_t last, bool from_end, bool forced)
{
    uint32_t n = s->p->n_steps;
    ont_plan plan;
    ont_plan_step *plan_steps = ont_arena_array(&s->arena, n + 1, sizeof *plan_steps);
    uint32_t *order = ont_arena_array(&s->arena, n + 1, sizeof *order);
    if (!plan_steps || !order) return ONT_ENOMEM;
    memcpy(plan_steps, s->plan_steps, n * sizeof *plan_steps);
    memcpy(order, s->order, n * sizeof *order);
    ont_plan_input original = plan_input(s, s->original);
    ONT_TRY(ont_plan_order(&original, first, last, from_end, order));
    for (uint32_t t = first; t < last; t++) plan_steps[t] = s->original[order[t]];
    ONT_TRY(make_plan(s, plan_steps, &s->arena, &plan));
    if (plan.slab_bytes >= s->bytes && !forced) return ONT_OK;
    s->plan_steps = plan_steps;
    s->order = order;
    s->bytes = plan.slab_bytes;
    s->changed = true;
    return ONT_OK;
}

/* Moves a node to the end of the list, after the views that it reads. */
static void move_to_end(ont_graph *g, ont_node *node, bool *moved)
{
    if (moved[node->id]) return;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        if (v && v->def && ont_node_is_view(v->def)) move_to_end(g, v->def, moved);
    }
    moved[node->id] = true;
    ont_graph_move_before(g, node, NULL);
}

/* Orders the node list like the steps; views of a phase that only graph outputs use go to the end of that phase. */
static ont_status order_nodes(scheduler *s)
{
    ont_program *p = s->p;
    ont_graph *g = p->graph;
    bool *moved = ont_arena_array(&s->arena, g->n_nodes + 1, sizeof *moved);
    ont_node **nodes = ont_arena_array(&s->arena, g->n_nodes + 1, sizeof *nodes);
    ont_node **by_id = ont_arena_array(&s->arena, g->n_nodes + 1, sizeof *by_id);
    if (!moved || !nodes || !by_id) return ONT_ENOMEM;
    uint32_t n = 0, t = 0;
    for (ont_node *node = g->first; node; node = node->next) nodes[n++] = by_id[node->id] = node;
    for (int backward = 0; backward < 2; backward++) {
        for (; t < (backward ? p->n_steps : p->split); t++) move_to_end(g, by_id[p->steps[t].node->id], moved);
        for (uint32_t i = 0; i < n; i++)
            if (nodes[i]->backward == (backward == 1)) move_to_end(g, nodes[i], moved);
    }
    return ONT_OK;
}

/* Makes the best order that of the steps and of plan_steps. */
static ont_status adopt_best_order(const scheduler *s, ont_plan_step *plan_steps)
{
    ont_program *p = s->p;
    ont_step *steps = ont_arena_array(&p->arena, p->n_steps + 1, sizeof *steps);
    if (!steps) return ONT_ENOMEM;
    for (uint32_t t = 0; t < p->n_steps; t++) steps[t] = p->steps[s->order[t]];
    p->steps = steps;
    memcpy(plan_steps, s->plan_steps, p->n_steps * sizeof *plan_steps);
    return make_plan(s, plan_steps, &p->arena, &p->plan);
}

/*
 * The slab is the maximum over both phases, so a phase may gain only after the other one has been reordered: backward
 * is tried twice.
 */
static ont_status try_orders(scheduler *s, ont_plan_step *plan_steps, bool forced)
{
    ont_program *p = s->p;
    size_t before = p->plan.slab_bytes;
    ont_plan_step *original = ont_arena_array(&s->arena, p->n_steps + 1, sizeof *original);
    s->order = ont_arena_array(&s->arena, p->n_steps + 1, sizeof *s->order);
    if (!s->order || !original) return ONT_ENOMEM;
    for (uint32_t t = 0; t < p->n_steps; t++) s->order[t] = t;
    memcpy(original, plan_steps, p->n_steps * sizeof *original);
    s->original = s->plan_steps = original;
    s->bytes = before;
    for (int i = 0; i < 6; i++) {
        bool backward = i % 4 < 2, from_end = i % 2 == 0; /* backward, forward, backward again */
        uint32_t first = backward ? p->split : 0, last = backward ? p->n_steps : p->split;
        ONT_TRY(try_phase_order(s, first, last, from_end, forced && from_end));
    }
    bool saves_enough = s->bytes + MIN_SAVED_BYTES <= before && s->bytes <= before - before / MIN_SAVED_DIVISOR;
    if (!s->changed || !(saves_enough || forced)) return ONT_OK;
    ONT_TRY(adopt_best_order(s, plan_steps));
    ONT_TRY(order_nodes(s));
#ifndef NDEBUG
    ONT_TRY(ont_context(ont_graph_verify(p->graph), "after schedule"));
#endif
    ont_log(ONT_LOG_INFO, "kernels run in another order: activations need %.1f MiB instead of %.1f",
            (double)s->bytes / 0x1p20, (double)before / 0x1p20);
    return ONT_OK;
}

ont_status ont_program_schedule(ont_program *p, ont_plan_step *plan_steps, const ont_value *const *delivered)
{
    scheduler s = {.p = p, .delivered = delivered};
    ONT_TRY(make_plan(&s, plan_steps, &p->arena, &p->plan));
    bool forced = ont_pass_is_forced("schedule");
    if (ont_pass_is_disabled("schedule") || p->n_steps > MAX_STEPS || p->graph->n_nodes > MAX_NODES) return ONT_OK;
    if (!forced && p->plan.slab_bytes < MIN_SAVED_BYTES) return ONT_OK;
    ont_arena_init(&s.arena);
    ont_status status = try_orders(&s, plan_steps, forced);
    ont_arena_deinit(&s.arena);
    return status;
}
