/*
 * Rows that are looked up, scaled by a number each and added where other indices say, as graph networks pass messages,
 * become a product with a sparse matrix: neither the rows nor their products, one for each edge, are stored.
 *
 *     GatherGrad(Mul(Gather(x, from), weight), to, base?) -> SparseMatMul(x, from, to, weight, base?)
 *
 * The same without Mul. After differentiation, where the gradient of a message has this form too. Where the weights'
 * gradient needs the rows of x, the rows are stored anyway, and nothing is fused.
 */
#include "passes/pass.h"

enum { LEAST = 64 }; /* bytes of a row: shorter ones are read faster than indices are sorted */

typedef struct messages {
    ont_node *gather;
    ont_value *weight; /* one for each row, NULL for none */
} messages;

static bool along_rows(const ont_node *node)
{
    int axis;
    ont_status status = ont_shape_axis(ont_attr_int(node, "axis", 0), node->outputs[0]->shape.rank, &axis);
    return status == ONT_OK && axis == 0;
}

/* The lookup of rows by one dim of indices whose result only the node that reads `v` uses; NULL if `v` is none. */
static ont_node *lookup(const ont_graph *g, const ont_value *v)
{
    ont_node *node = v->def;
    if (!node || !(ONT_IS(node, Gather) || ONT_IS(node, TorchGather)) || !ont_single_user_in_phase(g, v)) return NULL;
    int axis;
    const ont_value *x = ont_node_in(node, 0);
    if (ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis) != ONT_OK || axis) return NULL;
    return x->shape.rank >= 2 && ont_node_in(node, 1)->shape.rank == 1 ? node : NULL;
}

/* Whether `weight` has one element for each row of `rows`, or one for all. */
static bool is_per_row(const ont_shape *weight, const ont_shape *rows)
{
    return weight->rank == rows->rank && weight->dims[0] == rows->dims[0] && ont_shape_count(weight) == rows->dims[0];
}

static bool read_messages(const ont_graph *g, const ont_value *v, messages *m)
{
    *m = (messages){.gather = lookup(g, v)};
    if (m->gather) return true;
    ont_node *product = v->def;
    if (!product || !ONT_IS(product, Mul) || !ont_single_user_in_phase(g, v)) return false;
    for (uint32_t side = 0; side < 2 && !m->gather; side++) {
        m->gather = lookup(g, ont_node_in(product, side));
        m->weight = ont_node_in(product, 1 - side);
        if (m->gather && (m->weight == ont_node_in(product, side) || !is_per_row(&m->weight->shape, &v->shape)))
            m->gather = NULL;
    }
    return m->gather;
}

static ont_status fuse(ont_graph *g, ont_node *sum)
{
    const ont_value *v = ont_node_in(sum, 0);
    const ont_shape *shape = &sum->outputs[0]->shape;
    messages m;
    if ((v->dtype != ONT_FLOAT32 && v->dtype != ONT_FLOAT64) || !along_rows(sum)) return ONT_OK;
    if (ont_node_in(sum, 1)->shape.rank != 1 || !read_messages(g, v, &m)) return ONT_OK;
    if ((size_t)ont_shape_count_range(shape, 1, shape->rank) * ont_dtype_size(v->dtype) < LEAST) return ONT_OK;
    ont_builder b = {.graph = g, .before = sum, .backward = sum->backward, .origin = sum};
    ont_value *inputs[] = {ont_node_in(m.gather, 0), ont_node_in(m.gather, 1), ont_node_in(sum, 1), m.weight,
                           ont_node_in(sum, 2)};
    uint32_t n = inputs[4] ? 5 : inputs[3] ? 4 : 3;
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "SparseMatMul", inputs, n, 1);
    if (node) {
        node->name = sum->name;
        b.status = ont_attr_set_int(g, node, "from_end", ONT_IS(m.gather, Gather));
    }
    if (node && b.status == ONT_OK)
        b.status = ont_attr_set_ints(g, node, "shape", shape->dims, (size_t)shape->rank);
    ont_value *result = ont_build_done(&b, node);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, sum->outputs[0], result);
    return ONT_OK;
}

ont_status ont_pass_fuse_sparse_matmul(ont_graph *g)
{
    for (ont_node *node = g->first; node; node = node->next)
        if (ONT_IS(node, GatherGrad)) ONT_TRY(fuse(g, node));
    return ont_pass_dce(g);
}
