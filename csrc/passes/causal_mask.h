/*
 * Recognises causal masks: see causal_mask.c.
 */
#ifndef ONT_PASSES_CAUSAL_MASK_H
#define ONT_PASSES_CAUSAL_MASK_H

#include "ir/graph.h"

/* A mask that is `lower` where column - row <= diagonal and `upper` elsewhere; constant if both are equal. */
typedef struct ont_causal_mask {
    double lower, upper;
    int64_t diagonal; /* in [-rows, columns] */
} ont_causal_mask;

/* Whether v, broadcast over [..., rows, columns], is known to be such a mask; v may be float, integer or bool. */
bool ont_causal_mask_of(const ont_value *v, int64_t rows, int64_t columns, ont_causal_mask *mask);

#endif
