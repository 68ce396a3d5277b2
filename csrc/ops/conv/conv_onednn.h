/*
 * The oneDNN kernels of Conv, its two gradients and ConvTranspose; conv.c lists them before its own kernels.
 */
#ifndef ONT_OPS_CONV_ONEDNN_H
#define ONT_OPS_CONV_ONEDNN_H

#include "device/conv.h"
#include "ops/op.h"

const char *ont_conv_onednn_accept(const ont_node *node);
/*
 * bfloat16 operands, sums in float32, one rounding of the result; where the processor multiplies such numbers.
 * Elsewhere passes/promote.c puts Casts around the node.
 */
const char *ont_conv_onednn_accept_bf16(const ont_node *node);
ont_status ont_conv_onednn_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_conv_onednn_run(const ont_call *call);
void ont_conv_onednn_release(void *state);

/* The convolution that a node computes or differentiates: Conv, its gradients or ConvTranspose; 1 to 3 spatial dims. */
ont_status ont_conv_read(const ont_node *node, ont_conv *conv, ont_conv_kind *kind) ONT_MUST_USE;

#define ONT_CONV_ONEDNN(kernel_name, accept_) \
    {.name = kernel_name, .accept = accept_, .prepare = ont_conv_onednn_prepare, \
     .run = ont_conv_onednn_run, \
     .release = ont_conv_onednn_release}

#endif
