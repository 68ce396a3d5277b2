/*
 * Rematerialization: which nodes of forward may run again in backward, and their copies. evict.c chooses them for each
 * level and budget; recompute_regions.c takes those that a model marks.
 *
 * Copies are the same operators with the same attributes and random streams, so results are bitwise equal, also if
 * fusion puts them into another group: reductions add up in the fixed order of ops/support/sums.h.
 */
#include "passes/recompute.h"

#include "passes/options.h"

static bool is_memory_bound(const ont_node *node)
{
    return node->op->tile || node->op->flags & ONT_OP_MEMORY_BOUND;
}

bool ont_recompute_can_run_again(const ont_node *node)
{
    if (node->backward || !node->outputs[0]) return false;
    return ont_node_is_view(node) || is_memory_bound(node) || ont_node_is_product(node) || ont_node_is_attention(node);
}

bool ont_recompute_is_recomputable(const ont_graph *g, const ont_node *node)
{
    bool light = g->recompute.level < ONT_RECOMPUTE_LAYERS && !g->recompute.limit && !ont_recompute_is_everywhere();
    return ont_recompute_can_run_again(node) &&
           !(light && ont_node_is_product(node) && !ont_node_is_view(node) && !is_memory_bound(node));
}

bool ont_recompute_is_fusable(const ont_node *node)
{
    return node->op->tile && !(node->op->flags & ONT_OP_RANDOM);
}

ont_status ont_recompute_copy(ont_graph *g, const ont_node *node, ont_node *before, ont_value *const *inputs,
                              uint32_t outputs, ont_node **copy)
{
    const ont_node_spec spec = {.domain = node->domain, .op_type = node->op_type, .inputs = inputs,
                                .n_inputs = node->n_inputs, .n_outputs = node->n_outputs};
    ont_node *copied;
    ONT_TRY(ont_graph_add_node(g, before, &spec, &copied));
    ONT_TRY(ont_attr_copy_all(g, copied, node));
    copied->name = ont_arena_format(&g->arena, "%s_recompute", node->name);
    if (!copied->name) return ONT_ENOMEM;
    copied->op = node->op;
    copied->version = node->version;
    copied->backward = true;
    copied->origin = node;
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        if (!node->outputs[i] || (i < 32 && !(outputs >> i & 1))) {
            copied->outputs[i] = NULL;
            continue;
        }
        copied->outputs[i]->dtype = node->outputs[i]->dtype;
        copied->outputs[i]->has_shape = true;
        copied->outputs[i]->shape = node->outputs[i]->shape;
    }
    *copy = copied;
    return ONT_OK;
}
