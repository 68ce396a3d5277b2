/*
 * The pass that finds attention: see fuse_attention.c.
 */
#ifndef ONT_PASSES_FUSE_ATTENTION_H
#define ONT_PASSES_FUSE_ATTENTION_H

#include "ops/op.h"

/* Makes one node of products, masks, softmax and dropout that are attention. Before differentiation. */
ont_status ont_pass_fuse_attention(ont_graph *g) ONT_MUST_USE;

#endif
