/*
 * Rematerialization: which nodes of forward may run again in backward, and their copies. evict.c chooses them for each
 * level and budget; recompute_regions.c takes those that a model marks.
 *
 * Copies are the same operators with the same attributes and random streams, so results are bitwise equal, also if
 * fusion puts them into another group: reductions add up in the fixed order of ops/support/sums.h.
 */
#include "passes/recompute.h"

#include "passes/match.h"
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

/* ---- narrow values ---- */

/* Whether the node makes float32 of a value of 16 bits that a node has computed. */
static bool is_widening(const ont_node *node)
{
    const ont_value *narrow = ONT_IS(node, Cast) ? ont_node_in(node, 0) : NULL;
    return narrow && narrow->kind == ONT_VALUE_NODE && ont_dtype_is_half(narrow->dtype) &&
           node->outputs[0]->dtype == ONT_FLOAT32;
}

static bool reads(const ont_node *node, const ont_value *v)
{
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (node->inputs[i].value == v) return true;
    return false;
}

/* Whether backward reads the value, and by elementwise nodes alone. */
static bool is_read_by_elementwise(const ont_graph *g, const ont_value *wide)
{
    bool found = false;
    for (const ont_use *use = wide->uses; use; use = use->next) {
        if (!use->user->backward) continue;
        if (!use->user->op->tile) return false;
        found = true;
    }
    return found && !ont_value_is_output(g, wide);
}

ont_status ont_pass_keep_narrow(ont_graph *g)
{
    for (ont_node *node = g->first; node && !node->backward; node = node->next) {
        if (!is_widening(node) || !is_read_by_elementwise(g, node->outputs[0])) continue;
        ont_value *wide = node->outputs[0], *narrow = ont_node_in(node, 0);
        ont_node *copy = NULL;
        for (ont_node *reader = node->next; reader; reader = reader->next) {
            if (!reader->backward || !reads(reader, wide)) continue;
            if (!copy) ONT_TRY(ont_recompute_copy(g, node, reader, &narrow, 1, &copy));
            for (uint32_t i = 0; i < reader->n_inputs; i++)
                if (reader->inputs[i].value == wide) ont_node_set_input(reader, i, copy->outputs[0]);
        }
    }
    return ONT_OK;
}
