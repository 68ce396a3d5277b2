/*
 * The kernels of depthwise convolution (one filter per channel) and of its gradients; conv.c lists them first:
 * depthwise.c for rows and volumes of stride 1, depthwise_weight.c for the weight's gradient over images.
 */
#ifndef ONT_OPS_DEPTHWISE_H
#define ONT_OPS_DEPTHWISE_H

#include "ops/op.h"

const char *ont_depthwise_accept(const ont_node *node);
ont_status ont_depthwise_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_depthwise_run(const ont_call *call);         /* (x, w, bias) -> y, or (dy, w) -> dx */
ont_status ont_depthwise_run_filters(const ont_call *call); /* (dy, x) -> dw */

#define ONT_CONV_DEPTHWISE(kernel_name, run_) \
    {.name = kernel_name, .accept = ont_depthwise_accept, .prepare = ont_depthwise_prepare, .run = run_}

const char *ont_depthwise_weight_accept(const ont_node *node);
ont_status ont_depthwise_weight_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_depthwise_weight_run(const ont_call *call); /* (dy, x) -> dw */

#define ONT_CONV_DEPTHWISE_WEIGHT(kernel_name) \
    {.name = kernel_name, .accept = ont_depthwise_weight_accept, .prepare = ont_depthwise_weight_prepare, \
     .run = ont_depthwise_weight_run}

#endif
