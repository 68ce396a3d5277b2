/*
 * Dtypes and shapes of a loaded graph's values in terms of its symbols, for whoever asks before a program exists.
 *
 * Inference proper sees static shapes only (ops/op.h). Here it runs a few times with sizes that are unlike one another,
 * and each dim is what fits all of the results: a size, a symbol, or a short expression of symbols. No operator need
 * know.
 */
#ifndef ONT_RUN_SYMBOLIC_H
#define ONT_RUN_SYMBOLIC_H

#include "ir/graph.h"

typedef struct ont_symbolic_dim {
    int64_t size;     /* ONT_DIM_UNKNOWN: see text */
    const char *text; /* "n", "2*n + 1", "n*m"; NULL: unknown */
} ont_symbolic_dim;

typedef struct ont_symbolic {
    const char *name;
    ont_dtype dtype;
    bool has_shape; /* false: not a tensor, its rank varies, or it depends on contents */
    int rank;
    ont_symbolic_dim dims[ONT_MAX_RANK];
} ont_symbolic;

/* One entry per input, named node output and graph output of which a type was found; all memory is the arena's. */
ont_status ont_infer_symbolic(const ont_graph *loaded, ont_arena *arena, ont_symbolic **values,
                              uint32_t *n) ONT_MUST_USE;

#endif
