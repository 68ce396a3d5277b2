/*
 * What the kernels of GridSample, RoiAlign, MaxRoiPool and their gradients have as state; a device reads it as well.
 */
#ifndef ONT_OPS_VISION_H
#define ONT_OPS_VISION_H

#include "ops/op.h"
#include "ops/support/sample.h"

typedef struct ont_grid {
    ont_sampler sampler;
    int64_t n, c, cells, points; /* cells: of a plane of x; points: of a plane of y */
    int max_taps;                /* of a point */
} ont_grid;

enum { ONT_ROI_SAMPLES = 1 << 12 }; /* along one side of a bin, at most: more are a mistake in the region */

typedef struct ont_rois {
    int64_t rois, n, c, height, width, out_h, out_w, sampling;
    double scale;
    bool half_pixel, maximum, align; /* align: this is RoiAlign */
} ont_rois;

#endif
