/*
 * Dtypes and shapes of a loaded graph's values in terms of its symbolic dims, before any program exists.
 *
 * Shape inference handles static shapes only (ops/op.h). It is run a few times with different sizes, and each dim is
 * fitted to the results: a number, a symbol, or a short expression of symbols. Operators need no support for this.
 */
#ifndef ONT_RUN_SYMBOLIC_H
#define ONT_RUN_SYMBOLIC_H

#include "ir/graph.h"

typedef struct ont_symbolic_dim {
    int64_t size;     /* a number, or ONT_DIM_UNKNOWN: see text */
    const char *text; /* "n", "2*n + 1", "n*m"; NULL: unknown */
} ont_symbolic_dim;

typedef struct ont_symbolic {
    const char *name;
    ont_dtype dtype;
    bool has_shape; /* false: not a tensor, of varying rank, or data-dependent */
    int rank;
    ont_symbolic_dim dims[ONT_MAX_RANK];
} ont_symbolic;

/* One entry per input, named node output and graph output whose type was determined; memory comes from the arena. */
ont_status ont_infer_symbolic(const ont_graph *loaded, ont_arena *arena, ont_symbolic **values,
                              uint32_t *n) ONT_MUST_USE;

#endif
