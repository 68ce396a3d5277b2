/*
 * Fuses attention: see fuse_attention.c.
 */
#ifndef ONT_PASSES_FUSE_ATTENTION_H
#define ONT_PASSES_FUSE_ATTENTION_H

#include "ops/op.h"

/* Fuses the matmuls, masks, softmax and dropout of attention into one node. Before differentiation. */
ont_status ont_pass_fuse_attention(ont_graph *g) ONT_MUST_USE;

#endif
