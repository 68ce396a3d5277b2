/*
 * FusedReduce: elementwise steps (tile_program.h) whose results are reduced while they are in the cache. Only
 * passes/fuse_reductions.c creates it. The result of a step is stored only where another node uses it.
 *
 * The elements are divided into units of whole rows; their boundaries depend only on shapes and are those of the
 * columns (sums.h). A block of a whole-tensor reduction that a boundary divides is summed at the end. So each
 * reduction is bitwise the same as by its own operator.
 */
#ifndef ONT_OPS_FUSED_REDUCE_H
#define ONT_OPS_FUSED_REDUCE_H

#include "ops/reduce/reduce.h"
#include "ops/elementwise/tile_program.h"

typedef enum ont_sink_form {
    ONT_SINK_ROWS,    /* (count / n, n) -> (count / n): trailing axes */
    ONT_SINK_COLUMNS, /* (n, tail) -> (tail): leading axes */
    ONT_SINK_WHOLE,   /* all elements -> one */
} ont_sink_form;

typedef struct ont_sink {
    ont_reduce_kind kind;
    ont_sink_form form;
    int64_t n, tail;
    ont_dtype dtype; /* of the elements and of the result */
    ont_shape shape; /* of the result */
} ont_sink;

/* Describes a reduction as a sink; false where it cannot be one. */
bool ont_sink_of(const ont_node *reduction, ont_sink *sink);
/* The unit, in elements, that suits all sinks over `count` elements; 0 where there is none. */
int64_t ont_sink_unit(const ont_sink *sinks, int n, int64_t count);
ont_status ont_sinks_write(ont_graph *g, ont_node *node, const ont_sink *sinks, int n) ONT_MUST_USE;

#endif
