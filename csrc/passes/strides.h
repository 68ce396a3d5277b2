/*
 * Describes a value as a strided view of another tensor: Reshape, Transpose, Expand, Split, Slice, Gather of one index
 * and the like move nothing, so a kernel that supports strides can read their operand directly. For passes; independent
 * of kernels.
 */
#ifndef ONT_PASSES_STRIDES_H
#define ONT_PASSES_STRIDES_H

#include "ops/op.h"

enum { ONT_STRIDED_VIEW_FACTORS = 24 };

/* `size` entries, `stride` elements apart. Each dim of the viewed value is the product of consecutive factors. */
typedef struct ont_factor {
    int64_t size, stride;
} ont_factor;

typedef struct ont_strided_view {
    ont_value *root; /* row-major tensor that the view reads */
    int64_t offset;
    double scale;  /* factor by which the elements are multiplied */
    int n_factors; /* factors of size 1 are omitted */
    ont_factor factors[ONT_STRIDED_VIEW_FACTORS]; /* outermost first */
} ont_strided_view;

typedef struct ont_strided_view_limits {
    bool parts;            /* look through Slice, Split and Gather */
    bool scales;           /* look through Mul and Div by a constant */
    const ont_value *stop; /* do not look through this value */
} ont_strided_view_limits;

/* Whether the node keeps all elements in order (Identity, Reshape and the like) and passes gradients through. */
bool ont_node_keeps_order(const ont_node *node);

/* The view that `v` is, traced back as far as possible; a view of v itself at worst. */
void ont_strided_view_of(ont_value *v, const ont_strided_view_limits *limits, ont_strided_view *view);

/*
 * Splits and merges the factors into groups of the given sizes, outermost first; counts[i] factors belong to group i.
 * False if the sizes do not divide.
 */
bool ont_strided_view_regroup(ont_strided_view *view, const int64_t *sizes, int n, int *counts);

/* Broadcasts a view of shape `x` to shape `y`. */
bool ont_strided_view_expand(ont_strided_view *view, const ont_shape *x, const ont_shape *y);

/*
 * Refines all n views to a common list of factor sizes, then merges factors where all views allow it. No factor may
 * span `split`, an index counted from the innermost entry. False if sizes do not divide or there are too many factors.
 */
bool ont_strided_view_refine(ont_strided_view **views, int n, int64_t split);

#endif
