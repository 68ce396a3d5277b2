/*
 * Replaces graph outputs that are sequences or optionals by their elements; see pass.h. The nodes that produce them
 * have the elements as inputs (ops/control/sequence.c), so this is independent of the operators.
 */
#include "passes/pass.h"

/* The element of an optional, or NULL. */
static ont_value *element_of(ont_value *v)
{
    return v->container == ONT_OPTIONAL ? ont_node_in(v->def, 0) : v;
}

ont_status ont_pass_flatten(ont_graph *g, int32_t *counts)
{
    uint32_t total = 0, at = 0;
    for (uint32_t i = 0; i < g->n_outputs; i++) {
        const ont_value *v = element_of(g->outputs[i]);
        counts[i] = !v ? ONT_RESULT_NONE : v->container == ONT_SEQUENCE ? (int32_t)v->def->n_inputs : ONT_RESULT_TENSOR;
        total += counts[i] >= 0 ? (uint32_t)counts[i] : 1;
    }
    ont_value **outputs = ont_arena_array(&g->arena, (size_t)total + 1, sizeof *outputs);
    if (!outputs) return ONT_ENOMEM;
    for (uint32_t i = 0; i < g->n_outputs; i++) {
        ont_value *v = element_of(g->outputs[i]);
        if (counts[i] == ONT_RESULT_TENSOR) outputs[at++] = v;
        for (int32_t k = 0; k < counts[i]; k++) outputs[at++] = v->def->inputs[k].value;
    }
    ONT_TRY(ont_graph_set_outputs(g, outputs, at));
    return ont_pass_dce(g);
}
