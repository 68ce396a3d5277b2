/*
 * FusedReduce: steps of tile.h whose results are reduced while they are in the cache, made by passes/fuse_reductions.c.
 * The result of a step is stored only where somebody else reads it.
 *
 * The elements are cut into units, whose borders follow from shapes alone: those of the columns (ops/sums.h), with
 * whole rows in each. A block of all elements that a border cuts is summed behind them. So a sum has the bits of the
 * same sum apart.
 */
#ifndef ONT_OPS_FUSED_REDUCE_H
#define ONT_OPS_FUSED_REDUCE_H

#include "ops/reduce.h"
#include "ops/tile.h"

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

/* What a reduction would be as a sink; false where it is none. */
bool ont_sink_of(const ont_node *reduction, ont_sink *sink);
/* Elements of a unit for all of them over `count` elements; 0 where they do not go together. */
int64_t ont_sink_unit(const ont_sink *sinks, int n, int64_t count);
ont_status ont_sinks_write(ont_graph *g, ont_node *node, const ont_sink *sinks, int n) ONT_MUST_USE;

#endif
