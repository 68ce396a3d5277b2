/*
 * The stream that a random node draws from. Every run has a key, drawn from torch's generator; a node's stream is its
 * number, into which an attribute `seed` is mixed: with it other numbers are drawn, again other ones at every run.
 */
#ifndef ONT_OPS_RANDOM_H
#define ONT_OPS_RANDOM_H

#include <string.h>

#include "ops/op.h"

static inline uint64_t ont_random_stream(const ont_node *node)
{
    uint64_t stream = (uint64_t)ont_attr_int(node, "rng_stream", 0), bits = 0;
    double seed = ont_attr_float(node, "seed", (double)ont_attr_int(node, "seed", 0));
    memcpy(&bits, &seed, sizeof bits);
    return stream ^ bits * 0x9E3779B97F4A7C15u;
}

#endif
