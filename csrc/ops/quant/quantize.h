/*
 * What a QuantizeLinear node asks for, for kernels of the CPU and of devices: which scale an element has, and types.
 */
#ifndef ONT_OPS_QUANTIZE_H
#define ONT_OPS_QUANTIZE_H

#include "base/dtype.h"

struct ont_node;

typedef struct ont_scales {
    bool one;              /* a single scale */
    int64_t inner, n;      /* x is (outer, n, inner) around the axis */
    int64_t block, blocks; /* entries along the axis that share a scale, and number of such blocks */
    bool blocked;          /* the scale has the outer and inner dims of x too */
} ont_scales;

typedef struct ont_quantize {
    ont_scales s;
    ont_dtype x, scale, y, precision;
    double low, high; /* of an integer y */
    bool integer, saturate;
} ont_quantize;

ont_status ont_quantize_read(const struct ont_node *node, ont_quantize *q) ONT_MUST_USE;

#endif
