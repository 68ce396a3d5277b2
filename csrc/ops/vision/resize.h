/*
 * Geometry of Resize: from a node to a list of (cell, weight) for each output of each axis. resize.c applies the lists.
 */
#ifndef ONT_OPS_RESIZE_H
#define ONT_OPS_RESIZE_H

#include "ops/op.h"

typedef enum resize_mode { RESIZE_NEAREST, RESIZE_LINEAR, RESIZE_CUBIC } resize_mode;

typedef struct ont_resize {
    resize_mode mode;
    const char *coordinates, *nearest; /* the attributes coordinate_transformation_mode and nearest_mode */
    bool simple_nearest;               /* opset 10: rounds up where the axis shrinks, down where it grows */
    bool antialias, exclude_outside;
    double cubic_a, extrapolation;
    ont_shape in, out;
    bool exact[ONT_MAX_RANK];          /* sizes are given: the scale is exactly out / in */
    double scale[ONT_MAX_RANK], start[ONT_MAX_RANK], end[ONT_MAX_RANK]; /* start, end: the region of
                                                                         * tf_crop_and_resize */
} ont_resize;

/*
 * Taps of one axis: output o is the sum of weight[i] * x[index[i]] for i in [first[o], first[o + 1]). An output that
 * becomes the extrapolation value has no taps, and `outside` set.
 */
typedef struct ont_taps {
    int64_t in, out, *first, *index;
    double *weight;
    bool *outside; /* NULL: no output is outside */
} ont_taps;

/* Reads a Resize or Upsample node, or its gradient (attributes "version" and "upsample"), for an input of shape x. */
ont_status ont_resize_read(const ont_node *node, const ont_shape *x, ont_resize *r) ONT_MUST_USE;
ont_status ont_resize_taps(const ont_resize *r, int axis, ont_arena *arena, ont_taps *taps) ONT_MUST_USE;
/* The transposed lists: by input cell, for a gradient. */
ont_status ont_taps_transpose(const ont_taps *taps, ont_arena *arena, ont_taps *out) ONT_MUST_USE;
bool ont_taps_identity(const ont_taps *taps);

#endif
