/*
 * Invariants of a graph. A failure here is a defect of a pass or of the loader, so it is EINTERNAL.
 */
#include <string.h>

#include "base/alloc.h"
#include "ir/graph.h"

#define BROKEN(...) ont_fail(ONT_EINTERNAL, __VA_ARGS__)

static ont_status verify_node(const ont_graph *g, const ont_node *node, bool *defined)
{
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_use *use = &node->inputs[i];
        if (!use->value) continue;
        if (use->user != node) return BROKEN("'%s': input %u does not know its node", node->name, i);
        if (use->value->id >= g->n_values || g->values[use->value->id] != use->value)
            return BROKEN("'%s': input %u is a value of another graph", node->name, i);
        if (!defined[use->value->id])
            return BROKEN("'%s': input '%s' is used before it is computed", node->name, use->value->name);
        if (use->prev ? use->prev->next != use : use->value->uses != use)
            return BROKEN("'%s': input '%s' is not in its use list", node->name, use->value->name);
    }
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        const ont_value *out = node->outputs[i];
        if (!out) continue;
        if (out->kind != ONT_VALUE_NODE || out->def != node || out->def_index != i)
            return BROKEN("'%s': output '%s' is not its own", node->name, out->name);
        if (defined[out->id]) return BROKEN("'%s': output '%s' is computed twice", node->name, out->name);
        defined[out->id] = true;
    }
    return ONT_OK;
}

ont_status ont_graph_verify(const ont_graph *g)
{
    bool *defined = ont_calloc(g->n_values ? g->n_values : 1, sizeof *defined);
    if (!defined) return ONT_ENOMEM;
    ont_status status = ONT_OK;
    for (uint32_t i = 0; i < g->n_values; i++) {
        if (g->values[i]->id != i) ONT_TRYGOTO(status, done, BROKEN("value '%s': wrong id", g->values[i]->name));
        defined[i] = g->values[i]->kind != ONT_VALUE_NODE;
    }
    for (const ont_node *node = g->first; node; node = node->next)
        ONT_TRYGOTO(status, done, verify_node(g, node, defined));
    for (uint32_t i = 0; i < g->n_outputs; i++)
        if (!defined[g->outputs[i]->id])
            ONT_TRYGOTO(status, done, BROKEN("output '%s' is not computed", g->outputs[i]->name));
done:
    ont_free(defined);
    return status;
}
