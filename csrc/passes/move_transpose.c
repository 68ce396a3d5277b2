/*
 * A linear layer (a matmul with a matrix, and a bias) works row by row, so a transpose that permutes whole rows
 * commutes with it. nn.MultiheadAttention has one in front of its first layer and one behind its last, from batch-first
 * to its own order and back. Moved between the layers they cost nothing, since FusedAttention reads and writes through
 * strides. Called by fuse_attention; a transpose is moved only if a batched matmul is on the other side.
 */
#include "passes/move_transpose.h"

#include <string.h>

#include "passes/match.h"
#include "passes/strides.h"

/* The permutation of a Transpose that keeps the last dim in place; NULL for other nodes. */
static const int64_t *row_permutation(const ont_node *node)
{
    size_t n;
    const int64_t *perm = ONT_IS(node, Transpose) ? ont_attr_ints(node, "perm", &n) : NULL;
    return perm && n > 2 && perm[n - 1] == (int64_t)n - 1 ? perm : NULL;
}

/* Rows times a matrix: the matmul of a linear layer. */
static bool is_linear(const ont_node *node)
{
    if (!ont_is_matmul_or_gemm(node)) return false;
    const ont_value *c = ont_node_in(node, 2), *y = node->outputs[0];
    if (c && ont_shape_count(&c->shape) != 1 && ont_shape_count(&c->shape) != y->shape.dims[y->shape.rank - 1])
        return false;
    if (c && c->shape.rank && c->shape.dims[c->shape.rank - 1] != ont_shape_count(&c->shape))
        return false; /* one element per row */
    return !ont_attr_int(node, "transA", 0) && ont_node_in(node, 0)->shape.rank >= 2 &&
           ont_node_in(node, 1)->shape.rank == 2;
}

static bool is_batched(const ont_node *node)
{
    return ont_is_matmul(node) && ont_node_in(node, 0)->shape.rank > 2 && ont_node_in(node, 1)->shape.rank > 2;
}

/* Which operand of an Add is a bias: a vector along the last dim of the other; -1: neither. */
static int bias_of(const ont_node *node)
{
    for (int i = 0; ONT_IS(node, Add) && i < 2; i++) {
        const ont_value *bias = ont_node_in(node, (uint32_t)i), *x = ont_node_in(node, (uint32_t)(1 - i));
        if (bias->shape.rank == 1 && x->shape.rank >= 2 && ont_shape_equal(&x->shape, &node->outputs[0]->shape))
            return i;
    }
    return -1;
}

static bool is_view(const ont_node *node)
{
    return ont_node_keeps_order(node) || ONT_IS(node, Transpose) || ONT_IS(node, Gather) ||
           ONT_IS(node, Split) || ONT_IS(node, Slice) || ONT_IS(node, Mul) ||
           ONT_IS(node, Div);
}

/* Whether every user of v is a view that ends in a batched matmul. */
static bool leads_to_attention(const ont_graph *g, const ont_value *v, int depth)
{
    if (!v->uses || ont_value_is_output(g, v) || depth > 10) return false;
    for (const ont_use *use = v->uses; use; use = use->next) {
        const ont_node *node = use->user;
        if (is_batched(node)) continue;
        if (!is_view(node) || ont_node_in(node, 0) != v) return false;
        bool any = false;
        for (uint32_t i = 0; i < node->n_outputs; i++) {
            if (!node->outputs[i] || !node->outputs[i]->uses) continue;
            if (!leads_to_attention(g, node->outputs[i], depth + 1)) return false;
            any = true;
        }
        if (!any) return false;
    }
    return true;
}

/* Whether v is the result of a batched matmul behind layout operators. */
static bool comes_from_attention(const ont_graph *g, const ont_value *v)
{
    for (int depth = 0; depth < 10; depth++) {
        const ont_node *node = ont_producer(v);
        if (!node || !ont_single_user(g, v)) return false;
        if (is_batched(node)) return true;
        if (ONT_IS(node, Where))
            v = ont_node_in(node, 2);
        else if (ONT_IS(node, Transpose) || ont_node_keeps_order(node))
            v = ont_node_in(node, 0);
        else
            return false;
    }
    return false;
}

/* The operator of `node`, with its attributes and one output, for another first input x. */
static ont_value *clone_for(ont_builder *b, const ont_node *node, ont_value *x)
{
    ont_value *inputs[] = {x, ont_node_in(node, 1), ont_node_in(node, 2)};
    uint32_t n = inputs[2] ? 3 : inputs[1] ? 2 : 1;
    ont_node *clone = x ? ont_build_node(b, node->domain, node->op_type, inputs, n, 1) : NULL;
    if (clone) b->status = ont_attr_copy_all(b->graph, clone, node);
    return ont_build_done(b, clone);
}

/* Clones the matmul `linear`, and its bias Add, for other rows. */
static ont_value *clone_linear(ont_builder *b, const ont_node *linear, ont_value *rows, const ont_node *add)
{
    ont_value *y = clone_for(b, linear, rows);
    if (!add || !y) return y;
    int i = bias_of(add);
    return i ? ont_build2(b, "Add", y, ont_node_in(add, 1)) : ont_build2(b, "Add", ont_node_in(add, 0), y);
}

/* linear(transpose(x)) becomes transpose(linear(x)); a Cast between the two, as autocast has it, stays in front. */
static ont_status sink_transpose(ont_graph *g, ont_node *linear, bool *changed)
{
    ont_node *transpose = ont_producer(ont_node_in(linear, 0)), *cast = NULL;
    if (transpose && ONT_IS(transpose, Cast) && ont_single_user(g, transpose->outputs[0])) {
        cast = transpose;
        transpose = ont_producer(ont_node_in(cast, 0));
    }
    const int64_t *perm = row_permutation(transpose);
    if (!perm || ONT_IS(linear, Gemm)) return ONT_OK;
    ont_value *y = linear->outputs[0];
    ont_node *add = ont_single_user(g, y);
    if (bias_of(add) < 0 || ont_node_in(add, (uint32_t)(1 - bias_of(add))) != y) add = NULL;
    ont_value *last = add ? add->outputs[0] : y;
    if (!leads_to_attention(g, last, 0)) return ONT_OK;
    ont_builder b = {.graph = g, .before = last->def, .origin = ont_node_origin(linear)};
    ont_value *rows = ont_node_in(transpose, 0);
    if (cast) rows = clone_for(&b, cast, rows);
    ont_value *moved = clone_linear(&b, linear, rows, add);
    ont_value *result = moved ? ont_build_transpose(&b, moved, perm) : NULL;
    ONT_TRY(b.status);
    ont_value_replace_uses(g, last, result);
    *changed = true;
    return ONT_OK;
}

/* The value in front of the layout operators, with single users, that produce `v`. */
static ont_value *before_views(const ont_graph *g, ont_value *v)
{
    while (ont_producer(v) && ont_node_keeps_order(v->def) && ont_single_user(g, v)) v = ont_node_in(v->def, 0);
    return v;
}

/* transpose(linear(x)) becomes linear(transpose(x)). */
static ont_status hoist_transpose(ont_graph *g, ont_node *transpose, bool *changed)
{
    const int64_t *perm = row_permutation(transpose);
    ont_value *w = perm ? ont_node_in(transpose, 0) : NULL, *y = w && ont_single_user(g, w) ? before_views(g, w) : NULL;
    ont_node *add = y ? ont_producer(y) : NULL;
    int i = bias_of(add);
    if (i < 0) add = NULL;
    else y = ont_node_in(add, (uint32_t)(1 - i));
    ont_node *linear = y && ont_single_user(g, y) ? ont_producer(y) : NULL;
    if (!is_linear(linear)) return ONT_OK;
    ont_value *x = ont_node_in(linear, 0);
    int rank = w->shape.rank;
    int64_t k = x->shape.dims[x->shape.rank - 1], n = y->shape.dims[y->shape.rank - 1];
    if (!k || w->shape.dims[rank - 1] != n || !ont_shape_count(&x->shape) || !comes_from_attention(g, x)) return ONT_OK;
    ont_builder b = {.graph = g, .before = transpose, .origin = ont_node_origin(linear)};
    ont_shape rows = w->shape, matrix = ont_shape_of(2, (int64_t[]){ont_shape_count(&x->shape) / k, k});
    rows.dims[rank - 1] = k;
    ont_value *split = ont_build_reshape(&b, x, &rows);
    ont_value *moved = split ? ont_build_transpose(&b, split, perm) : NULL;
    ont_value *flat = moved ? ont_build_reshape(&b, moved, &matrix) : NULL;
    ont_value *result = clone_linear(&b, linear, flat, add);
    if (result) result = ont_build_reshape(&b, result, &transpose->outputs[0]->shape);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, transpose->outputs[0], result);
    *changed = true;
    return ONT_OK;
}

ont_status ont_move_transposes(ont_graph *g, bool *changed)
{
    for (ont_node *node = g->first; node; node = node->next) {
        ont_dtype dtype = node->outputs[0] ? node->outputs[0]->dtype : ONT_UNDEFINED;
        if (!ont_dtype_is_float(dtype)) continue;
        if (!g->device && dtype != ONT_FLOAT32 && dtype != ONT_FLOAT64)
            continue; /* attention of 16-bit floats is mostly not fused on the CPU */
        if (is_linear(node)) ONT_TRY(sink_transpose(g, node, changed));
        if (row_permutation(node)) ONT_TRY(hoist_transpose(g, node, changed));
    }
    return ONT_OK;
}
