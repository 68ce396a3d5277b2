/*
 * Recomputing in backward what is cheap to compute and dear to keep. What a session asks for, and what was done, lie in the
 * graph (ir/graph.h): passes see nothing else.
 */
#ifndef ONT_PASSES_RECOMPUTE_H
#define ONT_PASSES_RECOMPUTE_H

#include "passes/pass.h"

enum {
    ONT_RECOMPUTE_CHEAP,   /* elementwise nodes, norms and moves of data; on the CPU alone, at most 3% of a step */
    ONT_RECOMPUTE_LAYERS,  /* products and attention as well, on every device: as much as another forward */
    ONT_RECOMPUTE_LEVELS,
};

/* For tests: whatever can be recomputed is, where it saves anything at all, however small the graph. */
void ont_recompute_everywhere(bool on);

#endif
