/*
 * Geometry of a sliding window over one to three spatial dims, for convolution and pooling.
 */
#ifndef ONT_OPS_WINDOW_H
#define ONT_OPS_WINDOW_H

#include "ops/op.h"

enum { ONT_WINDOW_RANK = 3 };

typedef struct ont_window {
    int rank;
    int64_t in[ONT_WINDOW_RANK], out[ONT_WINDOW_RANK], kernel[ONT_WINDOW_RANK];
    int64_t stride[ONT_WINDOW_RANK], dilation[ONT_WINDOW_RANK];
    int64_t begin[ONT_WINDOW_RANK], end[ONT_WINDOW_RANK]; /* padding */
    int64_t in_count, out_count, kernel_count;
} ont_window;

/* The products of in, out and kernel. ONT_EINVAL where one overflows. */
ont_status ont_window_count(ont_window *w) ONT_MUST_USE;

/*
 * Reads kernel_shape (or takes `kernel`, the weight's), strides, dilations, pads, auto_pad and ceil_mode. x is (N, C,
 * spatial dims...). ONT_EINVAL for windows that do not fit, ONT_EUNSUPPORTED for more than three spatial dims.
 */
ont_status ont_window_init(const ont_node *node, const ont_shape *x, const int64_t *kernel, ont_window *w) ONT_MUST_USE;

#endif
