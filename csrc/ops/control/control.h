/*
 * Replaces control-flow nodes by copies of their bodies. Used by control.c and sequence.c.
 */
#ifndef ONT_OPS_CONTROL_H
#define ONT_OPS_CONTROL_H

#include "ops/op.h"

/* The subgraph attribute `name`; EINVAL if it is missing or has fewer outputs than `n_outputs`. */
const ont_graph *ont_body_of(ont_builder *b, const ont_node *node, const char *name, uint32_t n_outputs);
/*
 * Copies the nodes of `body` in front of `node` without inferring them. `given` are the inputs of `body` before the
 * captured ones (NULL: absent); the captured ones are the inputs of `node` from first_capture on. results: one per
 * output of `body`. Random nodes get another stream in each iteration; iteration -1 means that the body runs once.
 */
void ont_build_body(ont_builder *b, const ont_node *node, const ont_graph *body, uint32_t first_capture,
                    ont_value *const *given, uint32_t n_given, int64_t iteration, ont_value **results);

#endif
