/*
 * Rematerialization of activations. The request and the statistics are in the graph (ir/graph.h), since passes take
 * nothing else.
 */
#ifndef ONT_PASSES_RECOMPUTE_H
#define ONT_PASSES_RECOMPUTE_H

#include "passes/pass.h"

enum {
    /* elementwise nodes, norms and layout operators; CPU only, at most 3% of the cost of a step */
    ONT_RECOMPUTE_MEMORY_BOUND,
    ONT_RECOMPUTE_LAYERS,  /* also matmuls and attention, on every device: up to 40% of the cost of a step */
    ONT_RECOMPUTE_LEVELS,
};

/* The fraction of a step's cost that a level may add, and the cost of a node and of a graph, in operations. */
double ont_recompute_budget_fraction(int level);
double ont_recompute_node_cost(const ont_node *node);
double ont_recompute_graph_cost(const ont_graph *g);

/* For tests: recompute every value that can be recomputed and saves bytes, however small the graph. */
void ont_recompute_everywhere(bool on);
bool ont_recompute_is_everywhere(void);

#endif
