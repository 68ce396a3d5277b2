/*
 * What a Pad or PadGrad node asks for, for kernels of the CPU and of devices.
 */
#ifndef ONT_OPS_PAD_H
#define ONT_OPS_PAD_H

#include "ops/op.h"

typedef struct ont_pad {
    int mode;          /* 0 constant, 1 reflect, 2 edge, 3 wrap */
    int rank;          /* a dim without pads is merged into the one before, where the mode permits it */
    int64_t low[ONT_MAX_RANK], high[ONT_MAX_RANK]; /* negative: entries are cut off */
    int64_t narrow[ONT_MAX_RANK], wide[ONT_MAX_RANK]; /* dims of the unpadded and of the padded tensor */
} ont_pad;

/* `wide` is the shape of the padded tensor, `x` that of the unpadded one. */
ont_status ont_pad_read(const ont_node *node, const ont_shape *x, const ont_shape *wide, ont_pad *pad) ONT_MUST_USE;

#endif
