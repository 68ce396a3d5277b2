/*
 * Replaces control-flow nodes by copies of their bodies. Used by control.c and sequence.c.
 */
#ifndef ONT_OPS_CONTROL_H
#define ONT_OPS_CONTROL_H

#include "ops/op.h"

/* The subgraph attribute `name`; EINVAL if it is missing or has fewer outputs than `n_outputs`. */
const ont_graph *ont_body_of(ont_builder *b, const ont_node *node, const char *name, uint32_t n_outputs);
/* What one copy of the body of `node` reads. Random nodes get another stream in each iteration. */
typedef struct ont_body_copy {
    const ont_node *node;
    const ont_graph *body;
    ont_value *const *given; /* inputs of `body` before the captured ones; NULL: absent */
    uint32_t n_given;
    uint32_t first_capture; /* the captured ones are the inputs of `node` from here on */
    int64_t iteration;      /* -1: the body runs once */
} ont_body_copy;

/* Copies the nodes of the body in front of its node without inferring them. results: one per output of the body. */
void ont_build_body(ont_builder *b, const ont_body_copy *copy, ont_value **results);

#endif
