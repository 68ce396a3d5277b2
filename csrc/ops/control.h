/*
 * Bodies of control flow in place of the node that owns them. For control.c and sequence.c.
 */
#ifndef ONT_OPS_CONTROL_H
#define ONT_OPS_CONTROL_H

#include "ops/op.h"

/* The subgraph attribute of that name; EINVAL where it is missing or has fewer outputs than `n_outputs`. */
const ont_graph *ont_body_of(ont_builder *b, const ont_node *node, const char *name, uint32_t n_outputs);
/*
 * Copies the nodes of `body` in front of `node`, not inferred. `given` are its inputs before those captured, NULL:
 * absent; those are the node's inputs from first_capture on. results: one per output of the body. A random node draws
 * other numbers in each iteration; iteration -1: it runs once.
 */
void ont_build_body(ont_builder *b, const ont_node *node, const ont_graph *body, uint32_t first_capture,
                    ont_value *const *given, uint32_t n_given, int64_t iteration, ont_value **results);

#endif
