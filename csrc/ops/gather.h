/*
 * What Gather and its gradient share: sizes, and indices from the front.
 */
#ifndef ONT_OPS_GATHER_H
#define ONT_OPS_GATHER_H

#include "ops/indexed.h"

typedef struct ont_gather {
    int64_t outer, table, inner; /* data is (outer, table, inner) */
    int64_t count;               /* indices */
    size_t size;
    bool wide;                   /* int64 indices */
    bool from_end;               /* indices below 0 are allowed */
} ont_gather;

/* Index i as a row of the table, once ont_gather_check() has passed. */
static inline int64_t ont_gather_index(const ont_gather *s, const void *indices, int64_t i)
{
    int64_t v = ont_index_at(indices, s->wide, i);
    return v < 0 ? v + s->table : v;
}

/* EINDEX names the first index that is out of range, and the value. */
ont_status ont_gather_check(const ont_gather *s, const ont_value *value, const void *indices) ONT_MUST_USE;
/* Makes the state: `table` is what was read, `index` holds the indices. */
ont_status ont_gather_prepare(const ont_node *node, const ont_value *table, const ont_value *index, ont_arena *arena,
                              ont_prepared *out) ONT_MUST_USE;

#endif
