/*
 * Reductions of scatter.c and scatter_nd.c: names, one combining loop for every dtype, and one gradient rule.
 */
#ifndef ONT_OPS_SCATTER_H
#define ONT_OPS_SCATTER_H

#include "ops/op.h"

typedef enum ont_scatter { ONT_SCATTER_NONE, ONT_SCATTER_ADD, ONT_SCATTER_MUL, ONT_SCATTER_MAX,
                          ONT_SCATTER_MIN } ont_scatter;

/* scatter_desc.c */
ont_status ont_scatter_reduction(const ont_node *node, ont_scatter *reduction) ONT_MUST_USE;
/* accept() of the kernels: every dtype without a reduction; with one, the dtypes of the combining loop. */
const char *ont_scatter_accept(const ont_node *node);
/* to[i] = to[i] op from[i] over n elements; not for NONE. */
void ont_scatter_combine(ont_dtype dtype, ont_scatter reduction, void *to, const void *from, int64_t n);
/* scatter.c: for ScatterElements, Scatter and ScatterND. */
void ont_scatter_grad(ont_grad *g);

#endif
