/*
 * The order of a program's steps. The exporter's order is the module's own, and backward is its reverse: near the best
 * for a chain of layers, and kept there, since what a step has just written is in the cache for the next one. Another
 * one is taken where the slab becomes smaller by a 32nd and a MiB.
 */
#include "run/schedule.h"

#include <string.h>

#include "base/log.h"
#include "passes/pipeline.h"

/* The most: an order looks at every step that is ready, for each step, and the walks follow views of views. */
enum { LEAST_GAIN = 1 << 20, LEAST_SHARE = 32, MOST_STEPS = 1 << 13, MOST_NODES = 1 << 15 };

typedef struct scheduler {
    ont_program *p;
    const ont_value *const *delivered;
    const int32_t *gradient_of;
    ont_arena arena;      /* of what is tried */
    const ont_plan_step *given;
    ont_plan_step *needs; /* in the best order so far */
    uint32_t *order;      /* of needs, by the given one */
    size_t bytes;         /* of its slab */
    bool changed;         /* it is another one than the given */
} scheduler;

static ont_status plan_of(const scheduler *s, const ont_plan_step *needs, ont_arena *arena, ont_plan *plan)
{
    const ont_program *p = s->p;
    return ont_plan_memory(p->graph, needs, p->n_steps, p->split, p->grads.n_forward_outputs, ont_node_is_view,
                           s->delivered, s->gradient_of, arena, plan);
}

/* Takes the order that is built from one side of phase [first, last) if the slab is smaller by it, or in any case. */
static ont_status try_order(scheduler *s, uint32_t first, uint32_t last, bool from_end, bool always)
{
    uint32_t n = s->p->n_steps;
    ont_plan plan;
    ont_plan_step *needs = ont_arena_array(&s->arena, n + 1, sizeof *needs);
    uint32_t *order = ont_arena_array(&s->arena, n + 1, sizeof *order);
    if (!needs || !order) return ONT_ENOMEM;
    memcpy(needs, s->needs, n * sizeof *needs);
    memcpy(order, s->order, n * sizeof *order);
    ONT_TRY(ont_plan_order(s->p->graph, s->given, n, first, last, from_end, ont_node_is_view, order));
    for (uint32_t t = first; t < last; t++) needs[t] = s->given[order[t]];
    ONT_TRY(plan_of(s, needs, &s->arena, &plan));
    if (plan.slab_bytes >= s->bytes && !always) return ONT_OK;
    s->needs = needs;
    s->order = order;
    s->bytes = plan.slab_bytes;
    s->changed = true;
    return ONT_OK;
}

/* Moves a node to the end of the list, behind the views that it reads. */
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

/* The list in the order of steps, each phase's other views, which only the graph's outputs read, at its end. */
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

/* Steps, their needs and the graph take the best order. */
static ont_status adopt(const scheduler *s, ont_plan_step *needs)
{
    ont_program *p = s->p;
    ont_step *steps = ont_arena_array(&p->arena, p->n_steps + 1, sizeof *steps);
    if (!steps) return ONT_ENOMEM;
    for (uint32_t t = 0; t < p->n_steps; t++) steps[t] = p->steps[s->order[t]];
    p->steps = steps;
    memcpy(needs, s->needs, p->n_steps * sizeof *needs);
    return plan_of(s, needs, &p->arena, &p->plan);
}

/* A phase's order shows in the slab only where that phase is the higher one, which may be so after the other's. */
static ont_status try_orders(scheduler *s, ont_plan_step *needs, bool always)
{
    ont_program *p = s->p;
    size_t before = p->plan.slab_bytes;
    ont_plan_step *given = ont_arena_array(&s->arena, p->n_steps + 1, sizeof *given);
    s->order = ont_arena_array(&s->arena, p->n_steps + 1, sizeof *s->order);
    if (!s->order || !given) return ONT_ENOMEM;
    for (uint32_t t = 0; t < p->n_steps; t++) s->order[t] = t;
    memcpy(given, needs, p->n_steps * sizeof *given);
    s->given = s->needs = given;
    s->bytes = before;
    for (int i = 0; i < 6; i++) {
        bool backward = i % 4 < 2, from_end = i % 2 == 0; /* backward, forward, and backward once more */
        uint32_t first = backward ? p->split : 0, last = backward ? p->n_steps : p->split;
        ONT_TRY(try_order(s, first, last, from_end, always && from_end));
    }
    bool gains = s->bytes + LEAST_GAIN <= before && s->bytes <= before - before / LEAST_SHARE;
    if (!s->changed || !(gains || always)) return ONT_OK;
    ONT_TRY(adopt(s, needs));
    ONT_TRY(order_nodes(s));
#ifndef NDEBUG
    ONT_TRY(ont_context(ont_graph_verify(p->graph), "after schedule"));
#endif
    ont_log(ONT_LOG_INFO, "schedule: another order of steps, slab %.1f MiB in place of %.1f",
            (double)s->bytes / 0x1p20, (double)before / 0x1p20);
    return ONT_OK;
}

ont_status ont_program_schedule(ont_program *p, ont_plan_step *needs, const ont_value *const *delivered,
                                const int32_t *gradient_of)
{
    scheduler s = {.p = p, .delivered = delivered, .gradient_of = gradient_of};
    ONT_TRY(plan_of(&s, needs, &p->arena, &p->plan));
    bool always = ont_pass_is_forced("schedule");
    if (ont_pass_is_disabled("schedule") || p->n_steps > MOST_STEPS || p->graph->n_nodes > MOST_NODES) return ONT_OK;
    if (!always && p->plan.slab_bytes < LEAST_GAIN) return ONT_OK;
    ont_arena_init(&s.arena);
    ont_status status = try_orders(&s, needs, always);
    ont_arena_deinit(&s.arena);
    return status;
}
