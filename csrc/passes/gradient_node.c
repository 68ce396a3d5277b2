/*
 * Replaces ai.onnx.preview.training.Gradient, the derivative of a value of the graph with respect to others, during
 * shape inference, when every node before it is inferred. The inputs must be the values that xs and zs name: evaluating
 * the named subgraph at other points is refused.
 */
#include <string.h>

#include "passes/pass.h"

static ont_value *find_output(const ont_node *node, const char *name)
{
    for (const ont_node *n = node->prev; n; n = n->prev)
        for (uint32_t i = 0; i < n->n_outputs; i++)
            if (n->outputs[i] && !strcmp(n->outputs[i]->name, name)) return n->outputs[i];
    return NULL;
}

static ont_status check_inputs(const ont_node *node, const ont_attr *xs, const ont_attr *zs)
{
    size_t n_xs = xs ? xs->count : 0, n_zs = zs ? zs->count : 0;
    if (!n_xs || n_xs + n_zs != node->n_inputs || node->n_outputs > n_xs)
        return ont_fail(ONT_EINVAL, "%zu xs and %zu zs, %u inputs and %u outputs", n_xs, n_zs, node->n_inputs,
                        node->n_outputs);
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const char *name = i < n_xs ? xs->strings[i] : zs->strings[i - n_xs];
        const ont_value *v = ont_node_in(node, i);
        if (!v || strcmp(v->name, name))
            return ont_fail(ONT_EUNSUPPORTED, "input %u is '%s' where the attribute names '%s'", i, v ? v->name : "",
                            name);
    }
    return ONT_OK;
}

ont_status ont_pass_gradient_node(ont_graph *g, ont_node *node, ont_node **next)
{
    const ont_attr *xs = ont_attr_find(node, "xs", ONT_ATTR_STRINGS), *zs = ont_attr_find(node, "zs", ONT_ATTR_STRINGS);
    const char *name = ont_attr_string(node, "y", "");
    ONT_TRY(check_inputs(node, xs, zs));
    uint32_t n = (uint32_t)xs->count;
    ont_value *y = find_output(node, name);
    ont_value **grads = ont_arena_array(&g->arena, n, sizeof *grads),
               **wrt = ont_arena_array(&g->arena, n, sizeof *wrt);
    if (!grads || !wrt) return ONT_ENOMEM;
    if (!y) return ont_fail(ONT_EUNSUPPORTED, "y '%s' is not the result of a node before this one", name);
    for (uint32_t i = 0; i < n; i++) wrt[i] = ont_node_in(node, i);
    ont_node *before = node->prev;
    ONT_TRY(ont_pass_grad_within(g, y, wrt, n, node, grads));
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) ont_value_replace_uses(g, node->outputs[i], grads[i]);
    *next = before ? before->next : g->first;
    if (*next == node) *next = node->next;
    ont_graph_remove_node(g, node);
    return ONT_OK;
}
