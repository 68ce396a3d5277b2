/*
 * Unused rows are not computed: see pack_rows.c. What is wanted and the statistics are in the graph
 * (ir/graph.h), since passes take nothing else.
 */
#ifndef ONT_PASSES_PACK_ROWS_H
#define ONT_PASSES_PACK_ROWS_H

#include "passes/pass.h"

enum {
    ONT_PACK_SELECTED = 1 << 0, /* rows that a Gather, GatherND or Slice selects */
    ONT_PACK_LABELS = 1 << 1,   /* rows whose label is not ignored; needs a probe at each call */
    ONT_PACK_KEYS = 1 << 2,     /* rows that attention's mask lets through; needs a probe at each call */
};

/*
 * Before differentiation. If the number of rows depends on data and `known` lacks it, the graph is left as it is, but
 * for nodes that compute it, and known->n_required is above 0, as in ont_pass_infer_with_values().
 */
ont_status ont_pass_pack_rows(ont_graph *g, ont_known_values *known) ONT_MUST_USE;

#endif
