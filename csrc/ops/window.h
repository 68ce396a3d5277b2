/*
 * Sliding windows: the attributes that convolutions and pools share, and where windows reach. Used by conv.c and pool.c.
 */
#ifndef ONT_OPS_WINDOW_H
#define ONT_OPS_WINDOW_H

#include "ops/op.h"

enum { ONT_WINDOW_DIMS = 3 };

/* Entry i belongs to spatial dim i: nothing is right-aligned here. */
typedef struct ont_window {
    int spatial;
    int64_t in[ONT_WINDOW_DIMS], out[ONT_WINDOW_DIMS], kernel[ONT_WINDOW_DIMS];
    int64_t stride[ONT_WINDOW_DIMS], dilation[ONT_WINDOW_DIMS];
    int64_t pad[ONT_WINDOW_DIMS], pad_end[ONT_WINDOW_DIMS];
} ont_window;

/*
 * Reads strides, dilations, pads and auto_pad of a node into a window whose spatial, in and kernel are set, and computes
 * `out`. EINVAL names the attribute that does not fit; `ceil_mode` rounds sizes up where the last window still begins
 * inside the input or the padding before it.
 */
ont_status ont_window_read(const ont_node *node, ont_window *w, bool ceil_mode) ONT_MUST_USE;
/* Attribute `name` as sizes of at least `least`, one per spatial dim; `otherwise` where absent. */
ont_status ont_window_attr(const ont_node *node, const char *name, int spatial, int64_t least, int64_t otherwise,
                           int64_t *values) ONT_MUST_USE;

#endif
