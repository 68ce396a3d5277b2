/*
 * Checks the invariants of a graph. A failure is a defect of a pass or of the loader, hence EINTERNAL. Called by the
 * loader and, in debug builds, after every pass. Terminates on damaged graphs too.
 */
#include "base/alloc.h"
#include "base/map.h"
#include "ir/graph.h"

#define BROKEN(...) ont_fail(ONT_EINTERNAL, __VA_ARGS__)

/* Per value: what the pass over the nodes has found. */
typedef struct found {
    bool defined;
    uint32_t reads; /* number of node inputs that read it */
} found;

static bool owns(const ont_graph *g, const ont_value *v)
{
    return v->id < g->n_values && g->values[v->id] == v;
}

/* The list is linked consistently in both directions. */
static ont_status verify_list(const ont_graph *g)
{
    const ont_node *prev = NULL;
    uint32_t n = 0;
    for (const ont_node *node = g->first; node; prev = node, node = node->next) {
        if (node->prev != prev) return BROKEN("'%s': wrong predecessor in the list of nodes", node->name);
        if (++n > g->n_nodes) return BROKEN("'%s': the list of nodes is longer than nodes were made", node->name);
    }
    return g->last == prev ? ONT_OK : BROKEN("the last node is not the end of the list of nodes");
}

static ont_status verify_node(const ont_graph *g, const ont_node *node, found *found)
{
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_use *use = &node->inputs[i];
        if (use->user != node) return BROKEN("'%s': input %u does not know its node", node->name, i);
        if (!use->value) continue;
        if (!owns(g, use->value)) return BROKEN("'%s': input %u is a value of another graph", node->name, i);
        if (!found[use->value->id].defined)
            return BROKEN("'%s': input '%s' is used before it is computed", node->name, use->value->name);
        if (use->prev ? use->prev->next != use : use->value->uses != use)
            return BROKEN("'%s': input '%s' is not in its use list", node->name, use->value->name);
        found[use->value->id].reads++;
    }
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        const ont_value *out = node->outputs[i];
        if (!out) continue;
        if (!owns(g, out)) return BROKEN("'%s': output %u is a value of another graph", node->name, i);
        if (out->kind != ONT_VALUE_NODE || out->def != node || out->def_index != i)
            return BROKEN("'%s': output '%s' is not its own", node->name, out->name);
        if (found[out->id].defined) return BROKEN("'%s': output '%s' is computed twice", node->name, out->name);
        found[out->id].defined = true;
    }
    return ONT_OK;
}

/* Every node input is in the use list of its value, so equal counts mean that the list has no foreign entry. */
static ont_status verify_uses(const ont_value *v, uint32_t reads)
{
    for (const ont_use *use = v->uses; use; use = use->next)
        if (use->value != v || !reads--)
            return BROKEN("value '%s': an entry of its use list is no input of a node", v->name);
    return ONT_OK;
}

/* A graph may list one value as several outputs, and an input as an output. */
static ont_status verify_name(ont_map *names, ont_value *v)
{
    if (!*v->name) return BROKEN("value %u has no name", v->id);
    const ont_value *other = v->anonymous ? NULL : ont_map_get(names, v->name);
    if (other && other != v) return BROKEN("two inputs or outputs are named '%s'", v->name);
    return v->anonymous || other ? ONT_OK : ont_map_put(names, v->name, v);
}

static ont_status verify_interface(const ont_graph *g, const found *found, ont_map *names)
{
    for (uint32_t i = 0; i < g->n_inputs; i++) {
        ont_value *v = g->inputs[i];
        if (!owns(g, v) || v->kind != ONT_VALUE_INPUT || v->input != i)
            return BROKEN("graph input %u ('%s') is not input %u", i, v->name, i);
        ONT_TRY(verify_name(names, v));
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) {
        ont_value *v = g->outputs[i];
        if (!owns(g, v)) return BROKEN("graph output %u is a value of another graph", i);
        if (!found[v->id].defined) return BROKEN("output '%s' is not computed", v->name);
        ONT_TRY(verify_name(names, v));
    }
    return ONT_OK;
}

ont_status ont_graph_verify(const ont_graph *g)
{
    ont_map names = {0};
    found *found = ont_calloc(g->n_values, sizeof *found);
    if (!found) return ONT_ENOMEM;
    ont_status status;
    ONT_TRYGOTO(status, done, verify_list(g));
    for (uint32_t i = 0; i < g->n_values; i++) {
        if (g->values[i]->id != i) ONT_TRYGOTO(status, done, BROKEN("value '%s': wrong id", g->values[i]->name));
        found[i].defined = g->values[i]->kind != ONT_VALUE_NODE;
    }
    for (const ont_node *node = g->first; node; node = node->next)
        ONT_TRYGOTO(status, done, verify_node(g, node, found));
    for (uint32_t i = 0; i < g->n_values; i++)
        ONT_TRYGOTO(status, done, verify_uses(g->values[i], found[i].reads));
    ONT_TRYGOTO(status, done, verify_interface(g, found, &names));
done:
    ont_map_deinit(&names);
    ont_free(found);
    return status;
}
