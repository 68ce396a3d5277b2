/*
 * Computes the bias gradient of a linear layer in the matmul of its weight gradient: both read the gradient of the
 * layer's output, whose columns the bias gradient sums, and reading it again is expensive if it does not fit a cache.
 * After fuse_reductions, which fuses sums of values that an elementwise group computes.
 */
#include "base/alloc.h"
#include "ops/matmul/matmul.h"
#include "passes/match.h"
#include "passes/pass.h"

/* A matmul that contracts `v` (..., columns), or a view of it, along its first dim. */
static ont_node *product_of(const ont_value *v, int64_t columns)
{
    for (const ont_use *use = v->uses; use; use = use->next) {
        ont_node *user = use->user;
        ont_matmul_desc p;
        if (ont_node_in(user, 0) != v) continue;
        ont_node *through_view = ont_node_is_view(user) ? product_of(user->outputs[0], columns) : NULL;
        if (through_view) return through_view;
        if (ONT_IS(user, FusedMatMul) && user->n_outputs == 1 && v->dtype == ONT_FLOAT32 &&
            ont_matmul_desc_read(user, &p) == ONT_OK && p.trans_a && p.a.rank == 2 && p.m == columns)
            return user;
    }
    return NULL;
}

/* Whether all users of `v` come after `node`. */
static bool is_used_after(const ont_value *v, const ont_node *node, const uint32_t *order)
{
    for (const ont_use *use = v->uses; use; use = use->next)
        if (order[use->user->id] <= order[node->id]) return false;
    return true;
}

static ont_status fuse(ont_graph *g, ont_node *sum, const uint32_t *order)
{
    const ont_value *x = ont_node_in(sum, 0);
    ont_value *y = sum->outputs[0], *sums;
    if (x->dtype != ONT_FLOAT32 || y->shape.rank != 1 || x->shape.rank < 2) return ONT_OK;
    int64_t columns = y->shape.dims[0];
    if (columns != x->shape.dims[x->shape.rank - 1]) return ONT_OK;
    ont_node *product = product_of(ont_value_root(x), columns);
    if (!product || product->backward != sum->backward || !is_used_after(y, product, order)) return ONT_OK;
    ONT_TRY(ont_node_ensure_output(g, product, 1, &sums));
    ONT_TRY(product->op->infer(g, product));
    ont_value_replace_uses(g, y, sums);
    ont_graph_remove_node(g, sum);
    return ONT_OK;
}

ont_status ont_pass_fuse_sums(ont_graph *g)
{
    if (g->device) return ONT_OK; /* only CPU kernels support column sums */
    uint32_t *order;
    ONT_TRY(ont_node_positions(g, g->n_nodes, &order));
    ont_status status = ONT_OK;
    for (ont_node *node = g->first, *next; node && status == ONT_OK; node = next) {
        next = node->next;
        if (ONT_IS(node, SumTo)) status = fuse(g, node, order);
    }
    ont_free(order);
    return status;
}
