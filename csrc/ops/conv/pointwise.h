/*
 * The kernel of Conv and its two gradients for filters of one cell in bfloat16; conv.c lists it before oneDNN's.
 */
#ifndef ONT_OPS_POINTWISE_H
#define ONT_OPS_POINTWISE_H

#include "ops/op.h"

const char *ont_pointwise_accept(const ont_node *node);
ont_status ont_pointwise_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_pointwise_run(const ont_call *call);

#define ONT_CONV_POINTWISE(kernel_name) \
    {.name = kernel_name, .accept = ont_pointwise_accept, .prepare = ont_pointwise_prepare, .run = ont_pointwise_run}

#endif
