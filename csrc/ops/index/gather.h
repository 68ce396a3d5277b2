/*
 * Shared by Gather and its gradient: sizes, and indices counted from the front.
 */
#ifndef ONT_OPS_GATHER_H
#define ONT_OPS_GATHER_H

#include "ops/index/indexed.h"

typedef struct ont_gather {
    int64_t outer, table, inner; /* data is (outer, table, inner) */
    int64_t count;               /* number of indices */
    size_t size;
    bool wide;                   /* int64 indices */
    bool from_end;               /* indices below 0 are allowed */
} ont_gather;

/* Index i as a row of the table, after ont_gather_check() has passed. */
static inline int64_t ont_gather_index(const ont_gather *s, const void *indices, int64_t i)
{
    int64_t v = ont_index_at(indices, s->wide, i);
    return v < 0 ? v + s->table : v;
}

/* ONT_EINDEX names the first index that is out of range, and its value. */
ont_status ont_gather_check(const ont_gather *s, const ont_value *value, const void *indices) ONT_MUST_USE;
/* Makes the state: `table` is the shape of the data, `index` the input with the indices. */
ont_status ont_gather_prepare(const ont_node *node, const ont_value *table, const ont_value *index, ont_arena *arena,
                              ont_prepared *out) ONT_MUST_USE;

#endif
