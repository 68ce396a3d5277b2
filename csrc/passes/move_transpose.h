/*
 * Part of fuse_attention: see move_transpose.c.
 */
#ifndef ONT_PASSES_MOVE_TRANSPOSE_H
#define ONT_PASSES_MOVE_TRANSPOSE_H

#include "ops/op.h"

/* Moves transposes of rows across linear layers, to where fuse_attention absorbs them. */
ont_status ont_move_transposes(ont_graph *g, bool *changed) ONT_MUST_USE;

#endif
