/*
 * Adds the rows of a Gather's gradient to the gradient that another user of the table computes (tied embeddings, parts
 * of one QKV matmul), so that a gradient as large as the table is written once. After differentiation, before dtype
 * promotion, which would put Casts between the nodes. Values with other users are left alone.
 */
#include <string.h>

#include "passes/pass.h"

/* ---- GatherGrad, Add ---- */

static ont_status add_rows_to(ont_graph *g, ont_node *node)
{
    ont_value *y = node->outputs[0];
    ont_node *add = ont_single_user_in_phase(g, y);
    if (node->n_inputs > 2 || !add || !ONT_IS(add, Add)) return ONT_OK;
    ont_value *other = ont_node_in(add, ont_node_in(add, 0) == y);
    if (other == y || !other->def || other->def->backward != node->backward || ont_value_is_output(g, other))
        return ONT_OK;
    if (!ont_shape_equal(&other->shape, &y->shape) || other->dtype != y->dtype) return ONT_OK;
    ont_value *inputs[] = {ont_node_in(node, 0), ont_node_in(node, 1), other};
    ont_builder b = {.graph = g, .before = add, .backward = node->backward, .origin = ont_node_origin(node)};
    ont_node *joined = ont_build_node(&b, ONT_DOMAIN, "GatherGrad", inputs, 3, 1);
    if (!joined) return b.status;
    joined->name = node->name;
    ONT_TRY(ont_attr_copy_all(g, joined, node));
    ont_build_done(&b, joined);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, add->outputs[0], joined->outputs[0]);
    ont_graph_remove_node(g, add);
    ont_graph_remove_node(g, node);
    return ONT_OK;
}

ont_status ont_pass_fuse_gradients(ont_graph *g)
{
    if (g->device) return ONT_OK; /* only CPU kernels support these forms */
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        if (!ONT_IS(node, GatherGrad)) continue;
        ont_node *before = node->prev;
        ONT_TRY(add_rows_to(g, node));
        next = before ? before->next : g->first;
        if (next == node) next = node->next;
    }
    return ONT_OK;
}
