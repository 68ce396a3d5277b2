/*
 * What nodes cost, and what share of a step's cost backward may add by computing values again.
 */
#ifndef ONT_PASSES_COST_H
#define ONT_PASSES_COST_H

#include "ops/op.h"

/* The levels of rematerialization. */
enum {
    /* elementwise nodes, norms, layout operators and attention, at most 2% of the cost of a step; on a device,
     * elementwise nodes that are fused with their users */
    ONT_RECOMPUTE_MEMORY_BOUND,
    ONT_RECOMPUTE_LAYERS,  /* also matmuls, on every device: up to 20% of the cost of a step */
    ONT_RECOMPUTE_SEGMENTS, /* the same, several times where need be: up to 45% */
    ONT_RECOMPUTE_LEVELS,
};

/* In operations of a matmul. */
double ont_node_cost(const ont_node *node);
double ont_graph_cost(const ont_graph *g);

bool ont_node_is_product(const ont_node *node); /* a matmul or a convolution of two operands */
bool ont_node_is_attention(const ont_node *node);
/* Whether the node rounds a parameter to 16 bits, as autocast does with weights. */
bool ont_node_rounds_parameter(const ont_node *node);
/* Whether the node casts a rounded parameter back to float32; it is fused with the rounding. */
bool ont_node_promotes_parameter(const ont_node *node);

/* The fraction of a step's cost that a level may add. */
double ont_recompute_budget_fraction(int level);
/* The cost of all that backward runs again, as a fraction of the step's without it. */
double ont_recompute_cost_fraction(const ont_graph *g);

#endif
