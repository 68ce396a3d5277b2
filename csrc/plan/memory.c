/*
 * Live ranges, storage shared by views and in-place kernels, and the locations that follow. See plan.h.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "ops/op.h"
#include "plan/plan.h"

enum { NONE = UINT32_MAX };

/* Storage shared by one or more values (views, in-place chains). */
typedef struct storage {
    uint32_t parent;      /* union-find parent; itself if a root */
    uint32_t first, last; /* live range in steps, inclusive; first NONE: never written */
    uint32_t output;      /* graph output whose block this is, or NONE */
    uint32_t block;       /* index in the assignment, or NONE */
    /* read after its last step, by a copy or the gradient callback: its last user must not write in place */
    bool copied;
    size_t bytes;
    ont_location_kind kind;
} storage;

typedef struct planner {
    const ont_plan_input *in;
    storage *s; /* per value id */
    ont_plan *plan;
} planner;

static uint32_t root_of(const planner *p, uint32_t id)
{
    ONT_ASSERT(id < p->in->g->n_values);
    while (p->s[id].parent != id) id = p->s[id].parent;
    return id;
}

static void extend_live_range(storage *s, uint32_t step)
{
    ONT_ASSERT(step != UINT32_MAX);
    if (s->first == NONE || step < s->first) s->first = step;
    if (step > s->last) s->last = step;
}

static ont_status init_storage(planner *p)
{
    for (uint32_t i = 0; i < p->in->g->n_values; i++) {
        const ont_value *v = p->in->g->values[i];
        storage *s = &p->s[i];
        *s = (storage){.parent = i, .first = NONE, .output = NONE, .block = NONE};
        if (!v->has_shape) continue; /* belongs to a removed node */
        ONT_TRY(ont_context(ont_shape_bytes(&v->shape, v->dtype, &s->bytes), "value '%s'", v->name));
        s->kind = v->kind == ONT_VALUE_INPUT      ? ONT_LOCATION_INPUT
                  : v->kind == ONT_VALUE_CONSTANT ? ONT_LOCATION_CONSTANT
                                                  : ONT_LOCATION_SLAB;
    }
    for (const ont_node *node = p->in->g->first; node; node = node->next)
        if (p->in->is_view(node)) p->s[node->outputs[0]->id].parent = node->inputs[0].value->id;
    return ONT_OK;
}

static void compute_live_ranges(planner *p)
{
    for (uint32_t t = 0; t < p->in->n_steps; t++) {
        const ont_node *node = p->in->steps[t].node;
        for (uint32_t i = 0; i < node->n_inputs; i++)
            if (node->inputs[i].value) extend_live_range(&p->s[root_of(p, node->inputs[i].value->id)], t);
        for (uint32_t i = 0; i < node->n_outputs; i++)
            if (node->outputs[i]) extend_live_range(&p->s[root_of(p, node->outputs[i]->id)], t);
    }
}

/* Whether the output goes to the gradient callback between two steps, so that it needs no block. */
static bool is_delivered(const planner *p, uint32_t output)
{
    return p->in->delivered && p->in->delivered[output] &&
           p->s[root_of(p, p->in->g->outputs[output]->id)].kind != ONT_LOCATION_INPUT;
}

/*
 * Makes the storage of each graph output the output's block; otherwise marks the output to be copied and extends the
 * live range of its source to the end of the phase.
 */
static void assign_output_blocks(planner *p)
{
    for (uint32_t i = 0; i < p->in->g->n_outputs; i++) {
        storage *s = &p->s[root_of(p, p->in->g->outputs[i]->id)];
        p->plan->deliver_before[i] = ONT_PLAN_BLOCK;
        if (is_delivered(p, i)) continue;
        bool forward = i < p->in->n_forward_outputs;
        uint32_t end = forward ? p->in->split : p->in->n_steps;
        /* A value computed in forward cannot be in a block that backward allocates. */
        bool same_phase = s->first != NONE && (forward || s->first >= p->in->split);
        if (s->kind == ONT_LOCATION_SLAB && s->output == NONE && same_phase) {
            s->output = i;
            s->kind = ONT_LOCATION_OUTPUT;
        } else {
            p->plan->copied_outputs[i] = true;
            if (end) extend_live_range(s, end - 1); /* of an input: it must not be overwritten before */
            s->copied = true;
        }
    }
}

/* Finds the first step before which each delivered output may be delivered, and extends its live range to there. */
static void place_delivered(planner *p)
{
    for (uint32_t i = 0; i < p->in->g->n_outputs; i++) {
        if (!is_delivered(p, i)) continue;
        storage *s = &p->s[root_of(p, p->in->g->outputs[i]->id)];
        const storage *target = &p->s[root_of(p, p->in->delivered[i]->id)];
        uint32_t at = p->in->split;
        if (s->kind != ONT_LOCATION_CONSTANT && s->first != NONE && s->first >= at) at = s->first + 1;
        if (target->first != NONE && target->last >= at) at = target->last + 1;
        if (at) extend_live_range(s, at - 1);
        s->copied = true;
        p->plan->deliver_before[i] = at;
    }
}

/*
 * Whether input `index` is the only input of step t in its storage. The same value may be another input if the kernel
 * may overwrite that one too: such a kernel reads each element before it writes it. A kernel that accumulates in place
 * may read its other inputs at any time.
 */
static bool is_sole_input(const planner *p, uint32_t t, uint32_t index)
{
    const ont_node *node = p->in->steps[t].node;
    const ont_value *v = node->inputs[index].value;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *other = node->inputs[i].value;
        bool in_step = other == v && i < 32 && p->in->steps[t].inplace >> i & 1;
        if (other && i != index && !in_step && root_of(p, other->id) == root_of(p, v->id)) return false;
    }
    return true;
}

/*
 * Whether storage `from` of the value, whose live range ends at step t, may become part of output block `to`. The block
 * of an early gradient exists from forward on, as it would be in the slab; but not on devices, where each phase is a
 * captured graph with static buffers of its own for its results (run/replay.h).
 */
static bool may_join_output(const planner *p, const ont_value *v, const storage *from, const storage *to)
{
    bool forward = to->output < p->in->n_forward_outputs, early = !p->in->g->device && ont_is_early_gradient(v);
    return forward ? from->last < p->in->split : from->first >= p->in->split || early;
}

/*
 * Whether step t may write its result over its input i, in storage `from`, if no later step reads that. Byte sizes and
 * element counts must agree: a row of floats has as many bytes as the bool matrix that it broadcasts to.
 */
static bool may_share_in_place(const planner *p, uint32_t t, uint32_t i, uint32_t from)
{
    const ont_node *node = p->in->steps[t].node;
    const ont_value *in = node->inputs[i].value, *out = ont_node_out(node, 0);
    return i < 32 && p->in->steps[t].inplace >> i & 1 && p->s[from].bytes == p->s[root_of(p, out->id)].bytes &&
           ont_shape_count(&in->shape) == ont_shape_count(&out->shape) && is_sole_input(p, t, i);
}

static void share_inplace(planner *p)
{
    for (uint32_t t = 0; t < p->in->n_steps; t++) {
        const ont_node *node = p->in->steps[t].node;
        const ont_value *out = ont_node_out(node, 0);
        if (!p->in->steps[t].inplace || !out) continue;
        for (uint32_t i = 0; i < node->n_inputs && i < 32; i++) {
            const ont_value *in = node->inputs[i].value;
            if (!in) continue;
            uint32_t from = root_of(p, in->id), to = root_of(p, out->id);
            storage *src = &p->s[from], *dst = &p->s[to];
            if (from == to || src->kind != ONT_LOCATION_SLAB || src->copied || src->last != t || dst->first != t)
                continue;
            if (!may_share_in_place(p, t, i, from)) continue;
            if (dst->kind == ONT_LOCATION_OUTPUT && !may_join_output(p, in, src, dst)) continue;
            if (src->first < dst->first) dst->first = src->first;
            src->parent = to;
            p->plan->inplace_count++;
            break;
        }
    }
}

/* Finds the gradients that forward begins, after storage has been shared and live ranges are final. */
static void find_early_outputs(planner *p)
{
    for (uint32_t i = p->in->n_forward_outputs; i < p->in->g->n_outputs; i++) {
        const storage *s = &p->s[root_of(p, p->in->g->outputs[i]->id)];
        p->plan->early_outputs[i] = s->output == i && s->first < p->in->split;
    }
}

static ont_status assign(planner *p, ont_arena *arena)
{
    uint32_t n = 0, capacity = p->in->g->n_values + p->in->n_steps;
    ont_plan_block *blocks = ont_calloc(capacity + 1, sizeof *blocks);
    size_t *per_step = ont_calloc(p->in->n_steps + 1, sizeof *per_step);
    ont_status status = blocks && per_step ? ONT_OK : ONT_ENOMEM;
    uint32_t *work = ont_arena_array(arena, p->in->n_steps + 1, sizeof *work);
    p->plan->lifetimes = ont_arena_array(arena, p->in->g->n_values + 1, sizeof *p->plan->lifetimes);
    if (status != ONT_OK || !work || !p->plan->lifetimes) goto done;
    for (uint32_t i = 0; i < p->in->g->n_values; i++) {
        storage *s = &p->s[i];
        if (s->parent != i || s->kind != ONT_LOCATION_SLAB || s->first == NONE) continue;
        s->block = n;
        p->plan->lifetimes[n] = (ont_plan_lifetime){i, s->first, s->last, s->bytes};
        blocks[n++] = (ont_plan_block){.bytes = s->bytes + p->in->redzone, .first = s->first, .last = s->last};
    }
    p->plan->n_lifetimes = n;
    for (uint32_t t = 0; t < p->in->n_steps; t++) {
        work[t] = n;
        if (p->in->steps[t].work_bytes)
            blocks[n++] = (ont_plan_block){
                .bytes = p->in->steps[t].work_bytes + p->in->redzone, .first = t, .last = t};
    }
    ONT_TRYGOTO(status, done, ont_plan_assign(blocks, n, &p->plan->slab_bytes));
    p->plan->lower_bound = ont_plan_lower_bound(blocks, n, p->in->n_steps, per_step);
    for (uint32_t t = 0; t < p->in->n_steps; t++)
        p->plan->work_offsets[t] = p->in->steps[t].work_bytes ? blocks[work[t]].offset : 0;
    for (uint32_t i = 0; i < p->in->g->n_values; i++) {
        const storage *s = &p->s[root_of(p, i)];
        ont_location *location = &p->plan->locations[i];
        if (s->kind == ONT_LOCATION_SLAB && s->block == NONE) continue;
        *location = (ont_location){.kind = s->kind};
        if (s->kind == ONT_LOCATION_SLAB) location->offset = blocks[s->block].offset;
        if (s->kind == ONT_LOCATION_OUTPUT) location->index = s->output;
        if (s->kind == ONT_LOCATION_INPUT) location->index = p->in->g->values[root_of(p, i)]->input;
        if (s->kind == ONT_LOCATION_CONSTANT) location->index = root_of(p, i);
    }
done:
    ont_free(blocks);
    ont_free(per_step);
    return status == ONT_OK && (!work || !p->plan->lifetimes) ? ONT_ENOMEM : status;
}

ont_status ont_plan_memory(const ont_plan_input *in, ont_arena *arena, ont_plan *plan)
{
    const ont_graph *g = in->g;
    ont_plan result = {0};
    result.locations = ont_arena_array(arena, g->n_values + 1, sizeof *result.locations);
    result.work_offsets = ont_arena_array(arena, in->n_steps + 1, sizeof *result.work_offsets);
    result.copied_outputs = ont_arena_array(arena, g->n_outputs + 1, sizeof *result.copied_outputs);
    result.deliver_before = ont_arena_array(arena, g->n_outputs + 1, sizeof *result.deliver_before);
    result.early_outputs = ont_arena_array(arena, g->n_outputs + 1, sizeof *result.early_outputs);
    if (!result.locations || !result.work_offsets || !result.copied_outputs || !result.deliver_before ||
        !result.early_outputs)
        return ONT_ENOMEM;
    planner p = {in, NULL, &result};
    p.s = ont_calloc(g->n_values + 1, sizeof *p.s);
    if (!p.s) return ONT_ENOMEM;
    ont_status status;
    ONT_TRYGOTO(status, done, init_storage(&p));
    compute_live_ranges(&p);
    assign_output_blocks(&p);
    place_delivered(&p);
    share_inplace(&p);
    find_early_outputs(&p);
    ONT_TRYGOTO(status, done, assign(&p, arena));
#ifndef NDEBUG
    ONT_TRYGOTO(status, done, ont_context(ont_plan_verify(in, &result), "memory plan"));
#endif
    *plan = result;
done:
    ont_free(p.s);
    return status;
}
