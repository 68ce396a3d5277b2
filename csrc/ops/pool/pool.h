/*
 * Shared by the pooling operators: geometry from a node, and the operators of means, maxima and norms.
 */
#ifndef ONT_OPS_POOL_H
#define ONT_OPS_POOL_H

#include "ops/op.h"
#include "simd/pool/pool.h"

/* Reads attributes and input shape; an error names what is not supported. */
ont_status ont_pool_read(const ont_node *node, const ont_shape *x, ont_pool *p) ONT_MUST_USE;
/* infer() of every pooling operator: output, and indices where they are an output. */
ont_status ont_pool_infer(ont_graph *g, ont_node *node) ONT_MUST_USE;
/* Kernel tables of pool.c, for operators in other files. */
extern const ont_kernel ont_pool_kernels[2], ont_pool_grad_kernels[2];
/* Builds <op_type>Grad(x, dy) or (x, dy, y) in our domain. */
void ont_pool_grad_as(ont_grad *g, const char *op_type, bool with_output);

/* The state of the kernels of MaxUnpool and its gradient; a device reads it as well. */
typedef struct ont_unpool {
    ont_shape from, to; /* the shape in which indices count cells, and the shape of the output */
    int64_t count;      /* number of values */
    size_t size;
} ont_unpool;

#endif
