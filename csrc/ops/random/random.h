/*
 * Random streams. Every run has a key drawn from PyTorch's generator. A random node has a stream number, into which its
 * attribute `seed` is mixed: a node with another seed draws other numbers, and all numbers differ from run to run.
 *
 * On a GPU a Dropout node may draw the words that PyTorch's own kernel would draw: attribute "torch_layout" describes
 * them (passes/torch_random.c sets it) and replaces the stream; cuda/kernels/math.cuh reads it.
 */
#ifndef ONT_OPS_RANDOM_H
#define ONT_OPS_RANDOM_H

#include <string.h>

#include "ops/random/dropout.h"

static inline uint64_t ont_random_stream(const ont_node *node)
{
    uint64_t stream = (uint64_t)ont_attr_int(node, "rng_stream", 0), bits = 0;
    double seed = ont_attr_float(node, "seed", (double)ont_attr_int(node, "seed", 0));
    memcpy(&bits, &seed, sizeof bits);
    return stream ^ bits * 0x9E3779B97F4A7C15u;
}

/* Of Dropout and its gradient: a stream of our own, or a layout with ONT_LAYOUT_TORCH set. */
static inline uint64_t ont_dropout_stream(const ont_node *node)
{
    int64_t layout = ont_attr_int(node, "torch_layout", -1);
    return layout >= 0 ? (uint64_t)layout | ONT_LAYOUT_TORCH : ont_random_stream(node) & ~ONT_LAYOUT_TORCH;
}

#endif
