/*
 * Concatenates the gradients of slices. A value whose slices are read one by one, such as the steps of a loop over a
 * sequence, has the sum of their gradients, and each of them, PutSlice, is as large as the value: n steps take time in
 * n^2. Where slices along one axis do not overlap, their gradients make up the sum's parts:
 *
 *   Add(Add(PutSlice(a), x), PutSlice(b))  ->  Add(Concat(a, zeros, b), x)
 *
 * After differentiation.
 */
#include <stdlib.h>

#include "passes/pass.h"

/* The gradient of the slice [start, start + size) along the axis. */
typedef struct part {
    ont_value *dy, *whole; /* whole: the result of PutSlice */
    int64_t start, size;
} part;

static int by_start(const void *a, const void *b)
{
    int64_t x = ((const part *)a)->start, y = ((const part *)b)->start;
    return (x > y) - (x < y);
}

static bool adds_equal_shapes(const ont_node *node)
{
    if (!ONT_IS(node, Add)) return false;
    const ont_shape *shape = &node->outputs[0]->shape;
    return ont_shape_equal(&ont_node_in(node, 0)->shape, shape) && ont_shape_equal(&ont_node_in(node, 1)->shape, shape);
}

/* The sum that is operand 0 of `node` and nothing else; NULL: none. */
static ont_node *previous_sum(const ont_graph *g, const ont_node *node)
{
    ont_node *previous = ont_node_in(node, 0)->def;
    return adds_equal_shapes(previous) && ont_single_user(g, previous->outputs[0]) == node ? previous : NULL;
}

/* Whether the operand `v` of a sum, which nothing else reads, is the gradient of a slice along one axis. */
static bool read_part(const ont_graph *g, ont_value *v, part *p, int *axis)
{
    size_t n;
    const ont_node *node = v->def;
    if (!ONT_IS(node, PutSlice) || !ont_single_user(g, v)) return false;
    ont_value *dy = ont_node_in(node, 0);
    const int64_t *start = ont_attr_ints(node, "start", &n), *step = ont_attr_ints(node, "step", &n);
    *axis = -1;
    for (int d = 0; d < v->shape.rank; d++) {
        bool whole = dy->shape.dims[d] == v->shape.dims[d];
        if (step[d] != 1 || (!whole && *axis >= 0)) return false;
        if (!whole) *axis = d;
    }
    if (*axis < 0 || !dy->shape.dims[*axis]) return false;
    *p = (part){.dy = dy, .whole = v, .start = start[*axis], .size = dy->shape.dims[*axis]};
    return true;
}

/* Removes parts that overlap the one before them, which join the rest of the sum's operands. */
static uint32_t keep_disjoint(part *parts, uint32_t n, ont_value **rest, uint32_t *n_rest)
{
    uint32_t kept = 0;
    qsort(parts, n, sizeof *parts, by_start);
    for (uint32_t i = 0; i < n; i++) {
        if (kept && parts[i].start < parts[kept - 1].start + parts[kept - 1].size)
            rest[(*n_rest)++] = parts[i].whole;
        else
            parts[kept++] = parts[i];
    }
    return kept;
}

/* Concatenates the parts, with zeros in the gaps. */
static ont_value *concatenate(ont_builder *b, const part *parts, uint32_t n, const ont_value *sum, int axis)
{
    ont_value **inputs = ont_arena_array(&b->graph->arena, 2 * (size_t)n + 1, sizeof *inputs);
    uint32_t n_inputs = 0;
    int64_t at = 0, end = sum->shape.dims[axis];
    if (!inputs) {
        b->status = ONT_ENOMEM;
        return NULL;
    }
    for (uint32_t i = 0; i <= n; i++) {
        ont_shape gap = sum->shape;
        gap.dims[axis] = (i < n ? parts[i].start : end) - at;
        if (gap.dims[axis]) inputs[n_inputs++] = ont_build_full(b, sum->dtype, &gap, 0);
        if (i == n) break;
        inputs[n_inputs++] = parts[i].dy;
        at = parts[i].start + parts[i].size;
    }
    ont_node *node = b->status == ONT_OK ? ont_build_node(b, "", "Concat", inputs, n_inputs, 1) : NULL;
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", axis);
    return ont_build_done(b, node);
}

/* The sum whose last node is `last`; sets *changed where two slices or more are joined. */
static ont_status join(ont_graph *g, ont_node *last, bool *changed)
{
    uint32_t n_operands = 1, n = 0, n_rest = 0;
    for (const ont_node *node = last; node; node = previous_sum(g, node)) n_operands++;
    part *parts = ont_arena_array(&g->arena, n_operands, sizeof *parts);
    ont_value **rest = ont_arena_array(&g->arena, n_operands, sizeof *rest);
    if (!parts || !rest) return ONT_ENOMEM;
    int axis = -1, own;
    for (const ont_node *node = last, *previous; node; node = previous) {
        previous = previous_sum(g, node);
        for (uint32_t i = previous ? 1 : 0; i < 2; i++) {
            ont_value *v = ont_node_in(node, i);
            if (read_part(g, v, &parts[n], &own) && (axis < 0 || own == axis)) {
                axis = own;
                n++;
            } else {
                rest[n_rest++] = v;
            }
        }
    }
    if (n < 2 || (n = keep_disjoint(parts, n, rest, &n_rest)) < 2) return ONT_OK;
    ont_builder b = {.graph = g, .before = last, .backward = last->backward, .origin = ont_node_origin(last)};
    ont_value *sum = concatenate(&b, parts, n, last->outputs[0], axis);
    while (n_rest) sum = ont_build2(&b, "Add", sum, rest[--n_rest]); /* they were found last to first */
    ONT_TRY(b.status);
    ont_value_replace_uses(g, last->outputs[0], sum);
    *changed = true;
    return ONT_OK;
}

ont_status ont_pass_join_slices(ont_graph *g)
{
    bool changed = false;
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        if (!adds_equal_shapes(node)) continue;
        const ont_node *user = ont_single_user(g, node->outputs[0]);
        bool goes_on = adds_equal_shapes(user) && previous_sum(g, user) == node;
        if (!goes_on) ONT_TRY(join(g, node, &changed));
    }
    return changed ? ont_pass_dce(g) : ONT_OK;
}
