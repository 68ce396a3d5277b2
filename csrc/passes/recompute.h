/*
 * Recomputing in backward what is cheap to compute and dear to keep. What a session asks for, and what was done, lie in
 * the graph (ir/graph.h): passes see nothing else.
 */
#ifndef ONT_PASSES_RECOMPUTE_H
#define ONT_PASSES_RECOMPUTE_H

#include "passes/pass.h"

enum {
    ONT_RECOMPUTE_CHEAP,   /* elementwise nodes, norms and moves of data; on the CPU alone, at most 3% of a step */
    ONT_RECOMPUTE_LAYERS,  /* products and attention as well, on every device: as much as another forward */
    ONT_RECOMPUTE_LEVELS,
};

/* The part of a step's work that may be added to it at a level, and the work of a node and of a graph: operations. */
double ont_recompute_share(int level);
double ont_recompute_work(const ont_node *node);
double ont_recompute_work_of_graph(const ont_graph *g);

/* For tests: whatever can be recomputed is, where it saves anything at all, however small the graph. */
void ont_recompute_everywhere(bool on);
bool ont_recompute_is_everywhere(void);

#endif
