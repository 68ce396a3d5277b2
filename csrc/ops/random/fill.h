/*
 * What a RandomNormal, RandomUniform or Bernoulli node draws, for kernels of the CPU and of devices. random_fill.c says
 * which words an element takes.
 */
#ifndef ONT_OPS_FILL_H
#define ONT_OPS_FILL_H

#include "base/dtype.h"

struct ont_node;

typedef enum ont_fill_kind { ONT_FILL_UNIFORM, ONT_FILL_NORMAL, ONT_FILL_BERNOULLI } ont_fill_kind;

typedef struct ont_fill {
    ont_fill_kind kind;
    double first, second; /* low and high, or mean and scale */
    uint64_t stream;
    ont_dtype dtype, x; /* x: of the probabilities */
} ont_fill;

void ont_fill_read(const struct ont_node *node, ont_fill *s);

#endif
