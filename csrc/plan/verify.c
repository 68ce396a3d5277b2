/*
 * Checks a memory plan by running it on paper. It uses neither the live ranges nor the shared storages of memory.c, but
 * only where each value is, and which step writes which bytes. A failure is a defect of the planner, hence EINTERNAL.
 * Called in debug builds, after every plan.
 */
#include "base/alloc.h"
#include "plan/plan.h"

#define BROKEN(...) ont_fail(ONT_EINTERNAL, __VA_ARGS__)

enum { NEVER = UINT32_MAX };

typedef struct range {
    size_t offset, bytes;
} range;

typedef struct verifier {
    const ont_plan_input *in;
    const ont_plan *plan;
    uint32_t *source;         /* per value: the one that it is a view of, or itself */
    uint32_t *written;        /* per value that is no view: the step that computes it */
    uint64_t *needed;         /* per value: 1 + twice the last step that reads it, or 2 + that of one after which it is
                                 copied or delivered; 0: nothing needs it */
    range *range;             /* per value: its bytes in the slab; none where it is elsewhere */
} verifier;

static bool overlap(range a, range b)
{
    return a.bytes && b.bytes && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

static void needed_at(verifier *r, const ont_value *v, uint64_t when)
{
    if (r->needed[v->id] < when) r->needed[v->id] = when;
}

static uint64_t during(uint32_t step)
{
    return 1 + 2 * (uint64_t)step;
}

static ont_status find_ranges(verifier *r)
{
    for (uint32_t i = 0; i < r->in->g->n_values; i++) {
        const ont_value *v = r->in->g->values[i];
        const ont_location *location = &r->plan->locations[i];
        if (!v->has_shape || location->kind != ONT_LOCATION_SLAB) continue;
        r->range[i].offset = location->offset;
        ONT_TRY(ont_shape_bytes(&v->shape, v->dtype, &r->range[i].bytes));
    }
    return ONT_OK;
}

/* Outputs are copied after the last step of their phase. */
static void find_needs(verifier *r)
{
    const ont_graph *g = r->in->g;
    for (uint32_t i = 0; i < g->n_values; i++) {
        r->source[i] = i;
        r->written[i] = NEVER;
    }
    for (uint32_t t = 0; t < r->in->n_steps; t++) {
        const ont_node *node = r->in->steps[t].node;
        for (uint32_t i = 0; i < node->n_outputs; i++)
            if (node->outputs[i]) r->written[node->outputs[i]->id] = t;
        for (uint32_t i = 0; i < node->n_inputs; i++)
            if (node->inputs[i].value) needed_at(r, node->inputs[i].value, during(t));
    }
    for (const ont_node *node = g->first; node; node = node->next)
        if (r->in->is_view(node)) r->source[node->outputs[0]->id] = r->source[node->inputs[0].value->id];
    for (uint32_t i = 0; i < g->n_outputs; i++) {
        uint32_t end = i < r->in->n_forward_outputs ? r->in->split : r->in->n_steps;
        if (r->plan->deliver_before[i] != ONT_PLAN_BLOCK) end = r->plan->deliver_before[i];
        if (end) needed_at(r, g->outputs[i], during(end - 1) + 1);
    }
}

/* Whether step t is the last to read v, and reads it in inputs alone that its kernel may overwrite. */
static bool may_overwrite(const verifier *r, uint32_t t, const ont_value *v)
{
    const ont_plan_step *step = &r->in->steps[t];
    bool reads = false;
    for (uint32_t i = 0; i < step->node->n_inputs; i++) {
        if (step->node->inputs[i].value != v) continue;
        if (i >= 32 || !(step->inplace >> i & 1)) return false;
        reads = true;
    }
    return reads && r->needed[v->id] == during(t);
}

/* Step t writes `bytes`, its result or (NULL) its scratch memory: it overwrites no value that is still needed. */
static ont_status verify_write(const verifier *r, uint32_t t, range bytes, const ont_value *result)
{
    const char *step = r->in->steps[t].node->name;
    if (bytes.offset % ONT_PLAN_ALIGN || bytes.offset + bytes.bytes > r->plan->slab_bytes)
        return BROKEN("'%s': offset %zu is not aligned, or %zu bytes there leave the slab", step, bytes.offset,
                      bytes.bytes);
    for (uint32_t i = 0; i < r->in->g->n_values; i++) {
        const ont_value *v = r->in->g->values[i];
        uint32_t written = r->written[r->source[i]];
        if (!r->needed[i] || written > t || !overlap(bytes, r->range[i])) continue;
        if (result && r->source[i] == result->id) continue;
        if (written == t) return BROKEN("'%s': two of its results, or one and scratch memory, overlap", step);
        if (r->needed[i] >= during(t) && !(result && may_overwrite(r, t, v)))
            return BROKEN("'%s' writes over '%s', which is still needed", step, v->name);
    }
    return ONT_OK;
}

static ont_status verify_step(const verifier *r, uint32_t t)
{
    const ont_plan_step *step = &r->in->steps[t];
    if (step->work_bytes)
        ONT_TRY(verify_write(r, t, (range){r->plan->work_offsets[t], step->work_bytes}, NULL));
    if (r->in->is_view(step->node)) return ONT_OK;
    for (uint32_t i = 0; i < step->node->n_outputs; i++) {
        const ont_value *out = step->node->outputs[i];
        if (out && r->range[out->id].bytes) ONT_TRY(verify_write(r, t, r->range[out->id], out));
    }
    return ONT_OK;
}

ont_status ont_plan_verify(const ont_plan_input *in, const ont_plan *plan)
{
    size_t n = (size_t)in->g->n_values + 1;
    verifier r = {.in = in, .plan = plan};
    r.written = ont_calloc(n, sizeof *r.written);
    r.source = ont_calloc(n, sizeof *r.source);
    r.needed = ont_calloc(n, sizeof *r.needed);
    r.range = ont_calloc(n, sizeof *r.range);
    ont_status status = r.source && r.written && r.needed && r.range ? find_ranges(&r) : ONT_ENOMEM;
    if (status == ONT_OK) find_needs(&r);
    for (uint32_t t = 0; status == ONT_OK && t < in->n_steps; t++) status = verify_step(&r, t);
    ont_free(r.source);
    ont_free(r.written);
    ont_free(r.needed);
    ont_free(r.range);
    return status;
}
