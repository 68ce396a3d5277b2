/*
 * Values as strided views of the tensors that they are made of: Reshape, Transpose, Expand, Split, Slice, Gather of one
 * index and the like move nothing, so a kernel that takes strides can read what stands before them. For passes; knows
 * no kernels.
 */
#ifndef ONT_PASSES_STRIDES_H
#define ONT_PASSES_STRIDES_H

#include "ops/op.h"

enum { ONT_STRIDED_VIEW_FACTORS = 24 };

/* A run of entries `stride` elements apart. The dims of a value, one after the other, are products of factors. */
typedef struct ont_factor {
    int64_t size, stride;
} ont_factor;

typedef struct ont_strided_view {
    ont_value *root;      /* row-major contents that the view shows */
    int64_t offset;
    double scale;         /* what its entries are multiplied by */
    int n_factors;        /* factors of size 1 are left out */
    ont_factor factors[ONT_STRIDED_VIEW_FACTORS]; /* outermost first */
} ont_strided_view;

typedef struct ont_strided_view_limits {
    bool parts;            /* look through what shows a part of its operand */
    bool scales;           /* and through products with one number */
    const ont_value *stop; /* not past this one */
} ont_strided_view_limits;

/* Identity, Reshape and the like: the same entries in the same order, and gradients pass. */
bool ont_node_keeps_order(const ont_node *node);

/* The view that `v` is, as far as it can be followed; in the end of v itself. */
void ont_strided_view_of(ont_value *v, const ont_strided_view_limits *limits, ont_strided_view *view);

/*
 * Splits and merges the factors into groups whose sizes are `sizes`, outermost first; counts[i] factors belong to group
 * i. False where they do not divide.
 */
bool ont_strided_view_regroup(ont_strided_view *view, const int64_t *sizes, int n, int *counts);

/* A view of shape `x` broadcast to shape `y`. */
bool ont_strided_view_expand(ont_strided_view *view, const ont_shape *x, const ont_shape *y);

/*
 * The same factors in all n lists, each as fine as the finest of them needs; then merged where all of them can be.
 * `split` is an index from the innermost entry that no factor may reach across. False where sizes do not divide or
 * there are too many.
 */
bool ont_strided_view_refine(ont_strided_view **views, int n, int64_t split);

#endif
