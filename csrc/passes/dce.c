/*
 * Dead-code elimination and common subexpression elimination (CSE).
 */
#include <string.h>

#include "base/alloc.h"
#include "passes/match.h"
#include "passes/pass.h"

static bool is_output(const uint8_t *outputs, const ont_value *v)
{
    return outputs[v->id];
}

ont_status ont_pass_dce(ont_graph *g)
{
    uint8_t *outputs = ont_calloc(g->n_values, sizeof *outputs);
    if (!outputs) return ONT_ENOMEM;
    for (uint32_t i = 0; i < g->n_outputs; i++) outputs[g->outputs[i]->id] = 1;
    for (ont_node *node = g->last, *prev; node; node = prev) {
        prev = node->prev;
        bool live = false;
        for (uint32_t i = 0; i < node->n_outputs; i++) {
            const ont_value *v = node->outputs[i];
            bool read = v && (v->uses || is_output(outputs, v));
            if (i && !read) node->outputs[i] = NULL;
            live |= read;
        }
        if (!live) ont_graph_remove_node(g, node);
    }
    ont_free(outputs);
    return ONT_OK;
}

static bool attr_equal(const ont_attr *a, const ont_attr *b)
{
    if (a->kind != b->kind) return false;
    switch (a->kind) {
    case ONT_ATTR_INT: return a->i == b->i;
    case ONT_ATTR_FLOAT: return a->f == b->f;
    case ONT_ATTR_STRING: return a->count == b->count && !memcmp(a->s, b->s, a->count);
    case ONT_ATTR_INTS:
        return a->count == b->count && (!a->count || !memcmp(a->ints, b->ints, a->count * sizeof *a->ints));
    case ONT_ATTR_FLOATS:
        return a->count == b->count && (!a->count || !memcmp(a->floats, b->floats, a->count * sizeof *a->floats));
    default: return false; /* tensors and graphs are not compared */
    }
}

static bool attrs_equal(const ont_node *a, const ont_node *b)
{
    uint32_t na = 0, nb = 0;
    for (const ont_attr *x = b->attrs; x; x = x->next) nb++;
    for (const ont_attr *x = a->attrs; x; x = x->next, na++) {
        const ont_attr *y = b->attrs;
        while (y && strcmp(x->name, y->name)) y = y->next;
        if (!y || !attr_equal(x, y)) return false;
    }
    return na == nb;
}

/* Constants are compared by value, so that zeros and axes that different gradient rules build are merged. */
static bool same_value(const ont_value *a, const ont_value *b)
{
    if (a == b) return true;
    return a && b && a->kind == ONT_VALUE_CONSTANT && b->kind == ONT_VALUE_CONSTANT && a->dtype == b->dtype &&
           ont_shape_equal(&a->shape, &b->shape) && a->data->bytes == b->data->bytes &&
           !memcmp(a->data->data, b->data->data, a->data->bytes);
}

static bool node_equal(const ont_node *a, const ont_node *b)
{
    if (a->op != b->op || a->n_inputs != b->n_inputs || a->n_outputs != b->n_outputs || a->version != b->version)
        return false;
    for (uint32_t i = 0; i < a->n_inputs; i++)
        if (!same_value(a->inputs[i].value, b->inputs[i].value)) return false;
    return attrs_equal(a, b);
}

/* An earlier node equal to `node`, searched among the users of its first non-constant input. */
static ont_node *find_equal_before(ont_node *node, const uint32_t *order)
{
    if (node->op->flags & ONT_OP_RANDOM) return NULL;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        if (!v || v->kind == ONT_VALUE_CONSTANT) continue;
        for (const ont_use *use = v->uses; use; use = use->next)
            if (use->user != node && order[use->user->id] < order[node->id] && node_equal(use->user, node))
                return use->user;
        return NULL;
    }
    return NULL;
}

ont_status ont_pass_cse(ont_graph *g)
{
    uint32_t *order;
    ONT_TRY(ont_node_positions(g, g->n_nodes, &order));
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        ont_node *earlier = find_equal_before(node, order);
        if (!earlier) continue;
        for (uint32_t i = 0; i < node->n_outputs; i++) {
            if (!node->outputs[i]) continue;
            if (!earlier->outputs[i]) { /* the earlier node lacks this output: it takes over the value */
                earlier->outputs[i] = node->outputs[i];
                earlier->outputs[i]->def = earlier;
                node->outputs[i] = NULL;
            } else {
                ont_value_replace_uses(g, node->outputs[i], earlier->outputs[i]);
            }
        }
        ont_graph_remove_node(g, node); /* removed at once: a later equal node must not find and revive it */
    }
    ont_free(order);
    return ont_pass_dce(g);
}
