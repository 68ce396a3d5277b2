/*
 * Rematerialization of activations. The request and the statistics are in the graph (ir/graph.h), since passes take
 * nothing else.
 */
#ifndef ONT_PASSES_RECOMPUTE_H
#define ONT_PASSES_RECOMPUTE_H

#include "passes/cost.h"
#include "passes/pass.h"

/*
 * A subgraph: operators by name, in the order of their nodes, each followed by '+'. Running it again in backward gives
 * a value that is kept otherwise, from values that are kept anyway. With `compromise` a narrower operand of a Cast is
 * kept instead of the value.
 */
typedef struct ont_recompute_plan {
    const char *subgraph;
    bool compromise;
    int64_t count; /* the first ones of the graph; -1: all */
} ont_recompute_plan;

/* The occurrences of a subgraph in a program. */
typedef struct ont_recompute_cluster {
    const char *subgraph;
    bool compromise;
    uint32_t frequency, applied;
    size_t bytes; /* that all of them together keep */
} ont_recompute_cluster;

/*
 * Lists the subgraphs that could run again, and sets the levels of those that graph->subgraphs.plans wants. `levels`:
 * per value, as recompute_regions.c has them.
 */
ont_status ont_recompute_select(ont_graph *g, uint32_t *levels) ONT_MUST_USE;

/* Whether an operator may run again where the level and the budget allow products too. */
bool ont_recompute_can_run_again(const ont_node *node);
/* Whether the level, or a budget, lets backward run the forward node again. */
bool ont_recompute_is_recomputable(const ont_graph *g, const ont_node *node);
/* Whether fuse_elementwise.c may join copies of the node with their users. */
bool ont_recompute_is_fusable(const ont_node *node);
/*
 * Copies a forward node into backward, in front of `before`, with those of its outputs whose bit is set (bits above 31
 * count as set); `inputs` are what the copy reads.
 */
ont_status ont_recompute_copy(ont_graph *g, const ont_node *node, ont_node *before, ont_value *const *inputs,
                              uint32_t outputs, ont_node **copy) ONT_MUST_USE;

#endif
