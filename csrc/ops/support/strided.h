/*
 * Copies between strided layouts, for Transpose, Slice, Split, Concat, Pad, Expand and their gradients.
 */
#ifndef ONT_OPS_STRIDED_H
#define ONT_OPS_STRIDED_H

#include "ops/op.h"

typedef struct ont_strided {
    int rank;                      /* merged dims; 0: one element */
    int64_t dims[ONT_MAX_RANK];
    int64_t from[ONT_MAX_RANK];    /* bytes; may be 0 (broadcast) or negative (reversed) */
    int64_t to[ONT_MAX_RANK];      /* bytes, not 0 */
    int64_t from_offset, to_offset; /* bytes */
    size_t size;                   /* of an element */
    int64_t count;
} ont_strided;

/* Strides and offsets in elements. */
void ont_strided_init(ont_strided *s, const ont_shape *dims, const int64_t *from, int64_t from_offset,
                      const int64_t *to, int64_t to_offset, size_t size);
void ont_strided_copy(const ont_strided *s, const void *from, void *to);

#endif
