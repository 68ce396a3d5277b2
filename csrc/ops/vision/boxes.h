/*
 * How much two boxes overlap, for nms.c and for a device (cuda/kernels/sort.cu).
 */
#ifndef ONT_OPS_BOXES_H
#define ONT_OPS_BOXES_H

#include <stdbool.h>

#ifndef ONT_FUNCTION
#define ONT_FUNCTION static inline
#endif

/* Corners in order, from [y1, x1, y2, x2] with corners in any order, or from [x, y, width, height] around the
 * centre. */
ONT_FUNCTION void ont_box_corners(const float *box, bool centre, double *low, double *high)
{
    for (int d = 0; d < 2; d++) {
        double a = centre ? (double)box[d] - (double)box[2 + d] / 2 : (double)box[d];
        double b = centre ? (double)box[d] + (double)box[2 + d] / 2 : (double)box[2 + d];
        low[d] = a < b ? a : b;
        high[d] = a < b ? b : a;
    }
}

/* The common area of two boxes over the area of both. */
ONT_FUNCTION double ont_box_overlap(const float *first, const float *second, bool centre)
{
    double low[2][2], high[2][2], common = 1, areas[2] = {1, 1};
    ont_box_corners(first, centre, low[0], high[0]);
    ont_box_corners(second, centre, low[1], high[1]);
    for (int d = 0; d < 2; d++) {
        double from = low[0][d] > low[1][d] ? low[0][d] : low[1][d];
        double to = high[0][d] < high[1][d] ? high[0][d] : high[1][d];
        common *= to > from ? to - from : 0;
        for (int k = 0; k < 2; k++) areas[k] *= high[k][d] - low[k][d];
    }
    double all = areas[0] + areas[1] - common;
    return common > 0 && all > 0 ? common / all : 0;
}

#endif
