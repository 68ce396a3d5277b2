/*
 * Sampling a grid of cells at a point between cells: which cells, their weights, and the derivative of the weights by
 * the point. GridSample and DeformConv use it; it knows no tensors.
 */
#ifndef ONT_OPS_SAMPLE_H
#define ONT_OPS_SAMPLE_H

#include "base/status.h"

typedef enum ont_sample_mode { ONT_SAMPLE_NEAREST, ONT_SAMPLE_LINEAR, ONT_SAMPLE_CUBIC } ont_sample_mode;
typedef enum ont_sample_padding { ONT_SAMPLE_ZEROS, ONT_SAMPLE_BORDER, ONT_SAMPLE_REFLECTION } ont_sample_padding;

enum { ONT_SAMPLE_RANK = 3, ONT_SAMPLE_TAPS = 64 };

typedef struct ont_sampler {
    int rank;
    int64_t dims[ONT_SAMPLE_RANK];
    ont_sample_mode mode;
    ont_sample_padding padding;
    bool corners; /* align_corners: reflects at the centres of the outer cells, not at their outer edges */
} ont_sampler;

/*
 * Cells around point x, which has one coordinate for each dim, in cells. Sets index[t] in the flat grid and weight[t],
 * and returns their number; cells of value zero are left out. slope, where not NULL, gets d weight[t] / d x[d] at
 * slope[d * apart + t].
 */
int ont_sample_taps(const ont_sampler *s, const double *x, int64_t *index, double *weight, double *slope,
                    int64_t apart);

#endif
