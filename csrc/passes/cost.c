/*
 * The cost model of the passes: what a node costs, in operations of a matmul, and what backward may compute again.
 *
 * An element of an elementwise node, a norm or a layout operator costs 128 (0.5 ns against 250 GFLOP/s: GELU of
 * 4 x 64 x 3072 takes 0.4 ms on two cores). An element of a parameter that is rounded to 16 bits costs 24: it takes
 * 0.22 ns, but then both matmuls read it from the cache instead of from memory (GPT-2 of 4 x 64: 20 ms more for Casts,
 * 14 ms less for matmuls). Casting it back to float32, where no matmul takes 16 bits, is fused with the rounding and
 * costs 1.
 */
#include "passes/cost.h"

#include <math.h>

#include "ops/attention/fused_attention.h"

enum { COST_OF_ELEMENT = 128, COST_OF_ROUNDING = 24 };

static double elements(const ont_value *v)
{
    return v && v->has_shape ? (double)ont_shape_count(&v->shape) : 0;
}

static bool has_cost(const ont_node *node, ont_cost_class cost)
{
    return node->op->cost == cost && node->n_inputs > 1;
}

bool ont_node_is_product(const ont_node *node)
{
    return has_cost(node, ONT_COST_MATMUL) || has_cost(node, ONT_COST_CONV);
}

bool ont_node_is_attention(const ont_node *node)
{
    return has_cost(node, ONT_COST_ATTENTION);
}

bool ont_node_rounds_parameter(const ont_node *node)
{
    const ont_value *from = ont_node_in(node, 0), *to = ont_node_out(node, 0);
    return ONT_IS(node, Cast) && from && to && ont_value_root(from)->parameter &&
           ont_dtype_size(to->dtype) < ont_dtype_size(from->dtype);
}

bool ont_node_promotes_parameter(const ont_node *node)
{
    const ont_value *from = ont_node_in(node, 0);
    const ont_node *rounding = from ? ont_value_root(from)->def : NULL;
    return rounding && ONT_IS(node, Cast) && ont_node_rounds_parameter(rounding) &&
           ont_dtype_size(node->outputs[0]->dtype) > ont_dtype_size(from->dtype);
}

/* Cost of fused linear cross-entropy: one matmul for the logits and one per gradient that the node computes. */
static double cost_of_streamed(const ont_node *node, bool backward)
{
    uint32_t first = backward ? 0 : 2;
    const ont_value *h = ont_node_in(node, 0);
    int64_t width = h->shape.dims[h->shape.rank - 1];
    double product = width ? 2 * elements(h) * elements(ont_node_in(node, 1)) / (double)width : 0;
    return product * (1 + (ont_node_out(node, first) != NULL) + (ont_node_out(node, first + 1) != NULL));
}

/*
 * A matmul of |A| = m k, |B| = k n and |C| = m n elements takes 2 m n k = 2 sqrt(|A| |B| |C|) operations. MatMulBnb4
 * has two elements of B in a byte.
 */
double ont_node_cost(const ont_node *node)
{
    if (node->op->cost == ONT_COST_STREAMED_LOSS)
        return cost_of_streamed(node, ONT_IS(node, StreamedCrossEntropyGrad));
    double in0 = elements(ont_node_in(node, 0)), out = elements(ont_node_out(node, 0));
    if (ont_node_is_view(node)) return 0;
    if (ont_node_promotes_parameter(node)) return out;
    if (ont_node_is_product(node))
        return 2 * sqrt(in0 * elements(ont_node_in(node, 1)) * (ONT_IS(node, MatMulBnb4) ? 2 : 1) * out);
    if (ont_node_is_attention(node)) { /* two matmuls of seqlen_k columns an output element, and the softmax */
        ont_attention a;
        if (ont_attention_read(node, &a) != ONT_OK) return out;
        double keys = a.packed_k ? (double)a.packed_k / (double)a.batch_dims[0] : (double)a.seqlen_k;
        return 4 * out * keys + out * COST_OF_ELEMENT;
    }
    return (in0 > out ? in0 : out) * (ont_node_rounds_parameter(node) ? COST_OF_ROUNDING : COST_OF_ELEMENT);
}

double ont_graph_cost(const ont_graph *g)
{
    double cost = 0;
    for (const ont_node *node = g->first; node; node = node->next) cost += ont_node_cost(node);
    return cost;
}

double ont_recompute_cost_fraction(const ont_graph *g)
{
    return g->recompute.step > 0 ? (g->recompute.cost + g->recompute.marked) / g->recompute.step : 0;
}

double ont_recompute_budget_fraction(int level)
{
    static const double fractions[ONT_RECOMPUTE_LEVELS] = {0.02, 0.2, 0.45};
    return fractions[level];
}
