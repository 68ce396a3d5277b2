/*
 * Rows that are looked up, scaled by a number for each and added where other indices say, as graph networks pass
 * messages, become a product with a sparse matrix, and the gradient of those numbers becomes inner products of rows:
 * neither the rows nor their products, one for each edge, are stored.
 *
 *     GatherGrad(Mul(Gather(x, from), weight), to, base?) -> SparseMatMul(x, from, to, weight, base?)
 *     SumTo(Mul(Gather(a, from), Gather(b, to)))          -> SampledMatMul(a, from, b, to)
 *
 * The first without Mul, too. Where a row has several heads, the weights and sums are those of each. After
 * differentiation, since gradients of messages have the same forms. A lookup that something else reads stays as well.
 */
#include "ops/reduce/reduce.h"
#include "passes/pass.h"

enum {
    LEAST = 64,     /* bytes of a row: shorter ones are read faster than indices are sorted */
    LEAST_HEAD = 4, /* elements of a head */
};

static bool is_first_axis(const ont_node *node, int rank)
{
    int axis;
    return ont_shape_axis(ont_attr_int(node, "axis", 0), rank, &axis) == ONT_OK && axis == 0;
}

/* The lookup of rows by one dim of indices that makes `v`; NULL if none does. */
static ont_node *lookup(const ont_value *v)
{
    ont_node *node = v->def;
    if (!node || !(ONT_IS(node, Gather) || ONT_IS(node, TorchGather))) return NULL;
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    return x->rank >= 2 && ont_node_in(node, 1)->shape.rank == 1 && is_first_axis(node, x->rank) ? node : NULL;
}

/* Whether `weight` has one element for each row of `rows`, or for each head of it. */
static bool is_per_head(const ont_shape *weight, const ont_shape *rows)
{
    int d = 0;
    if (weight->rank != rows->rank || weight->dims[0] != rows->dims[0]) return false;
    while (d < rows->rank && weight->dims[d] == rows->dims[d]) d++;
    return ont_shape_count_range(rows, d, rows->rank) >= LEAST_HEAD &&
           ont_shape_count_range(weight, d, rows->rank) == 1;
}

static bool is_fusible(const ont_value *rows)
{
    const ont_shape *shape = &rows->shape;
    size_t bytes = (size_t)ont_shape_count_range(shape, 1, shape->rank) * ont_dtype_size(rows->dtype);
    return (rows->dtype == ONT_FLOAT32 || rows->dtype == ONT_FLOAT64) && shape->dims[0] && bytes >= LEAST;
}

/* Puts a node of our domain with the attributes `shape` and `from_end` in the place of `node`. */
static ont_status replace(ont_graph *g, ont_node *node, const char *name, ont_value *const *inputs, uint32_t n,
                          int64_t from_end)
{
    ont_builder b = {.graph = g, .before = node, .backward = node->backward, .origin = node};
    const ont_shape *shape = &node->outputs[0]->shape;
    ont_node *made = ont_build_node(&b, ONT_DOMAIN, name, inputs, n, 1);
    if (made) {
        made->name = node->name;
        b.status = ont_attr_set_int(g, made, "from_end", from_end);
    }
    if (made && b.status == ONT_OK)
        b.status = ont_attr_set_ints(g, made, "shape", shape->dims, (size_t)shape->rank);
    ont_value *result = ont_build_done(&b, made);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, node->outputs[0], result);
    return ONT_OK;
}

static ont_status fuse_messages(ont_graph *g, ont_node *sum)
{
    ont_value *rows = ont_node_in(sum, 0), *weight = NULL;
    if (!is_fusible(rows) || ont_node_in(sum, 1)->shape.rank != 1 || !is_first_axis(sum, sum->outputs[0]->shape.rank))
        return ONT_OK;
    ont_node *picked = lookup(rows), *product = rows->def;
    if (!picked && product && ONT_IS(product, Mul) && ont_single_user_in_phase(g, rows)) {
        for (uint32_t side = 0; side < 2 && !picked; side++) {
            weight = ont_node_in(product, 1 - side);
            if (is_per_head(&weight->shape, &rows->shape)) picked = lookup(ont_node_in(product, side));
        }
    }
    if (!picked) return ONT_OK;
    ont_value *inputs[] = {ont_node_in(picked, 0), ont_node_in(picked, 1), ont_node_in(sum, 1), weight,
                           ont_node_in(sum, 2)};
    return replace(g, sum, "SparseMatMul", inputs, inputs[4] ? 5 : weight ? 4 : 3, ONT_IS(picked, Gather));
}

static ont_status fuse_inner_products(ont_graph *g, ont_node *sum)
{
    ont_value *rows = ont_node_in(sum, 0);
    ont_node *product = rows->def;
    ont_reduce r;
    if (!product || !ONT_IS(product, Mul) || rows->shape.rank < 2 || !is_fusible(rows) ||
        !ont_single_user_in_phase(g, rows))
        return ONT_OK;
    ONT_TRY(ont_reduce_read(sum, &r));
    if (r.n < LEAST_HEAD || r.tail != 1 || r.outputs % rows->shape.dims[0]) return ONT_OK;
    const ont_node *a = lookup(ont_node_in(product, 0)), *b = lookup(ont_node_in(product, 1));
    if (!a || !b || !ont_shape_equal(&ont_node_in(product, 0)->shape, &ont_node_in(product, 1)->shape)) return ONT_OK;
    ont_value *inputs[] = {ont_node_in(a, 0), ont_node_in(a, 1), ont_node_in(b, 0), ont_node_in(b, 1)};
    return replace(g, sum, "SampledMatMul", inputs, 4, ONT_IS(a, Gather) | ONT_IS(b, Gather) << 1);
}

ont_status ont_pass_fuse_sparse_matmul(ont_graph *g)
{
    for (ont_node *node = g->first; node; node = node->next) {
        if (ONT_IS(node, GatherGrad)) ONT_TRY(fuse_messages(g, node));
        if (ONT_IS(node, SumTo) || ONT_IS(node, ReduceSum)) ONT_TRY(fuse_inner_products(g, node));
    }
    return ont_pass_dce(g);
}
