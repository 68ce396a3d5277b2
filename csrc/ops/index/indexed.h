/*
 * Index helpers of Gather, Scatter and the like: reading int32 or int64 indices, and range checks, which run before
 * anything is written.
 */
#ifndef ONT_OPS_INDEXED_H
#define ONT_OPS_INDEXED_H

#include <inttypes.h>

#include "ops/op.h"

static inline int64_t ont_index_at(const void *indices, bool wide, int64_t i)
{
    return wide ? ((const int64_t *)indices)[i] : ((const int32_t *)indices)[i];
}

static inline ont_status ont_index_dtype(const ont_value *indices)
{
    if (indices->dtype == ONT_INT64 || indices->dtype == ONT_INT32) return ONT_OK;
    return ont_fail(ONT_ETYPE, "indices are %s, expected int32 or int64", ont_dtype_name(indices->dtype));
}

/* Converts a negative index to one from the front; false where it is out of range for `size` entries. */
static inline bool ont_index_wrap(int64_t *value, int64_t size)
{
    if (*value < 0) *value += size;
    return *value >= 0 && *value < size;
}

/* Whether negative indices are allowed. torch's embedding lookups, which are exported in our domain, reject them. */
static inline bool ont_index_from_end(const ont_node *node)
{
    return !*node->op->domain;
}

static inline ont_status ont_index_fail(const ont_value *indices, int64_t value, int64_t position, int64_t size)
{
    return ont_fail(ONT_EINDEX,
                    "index %" PRId64 " at position %" PRId64 " of '%s' is out of range for %" PRId64 " entries", value,
                    position, indices->name, size);
}

#endif
