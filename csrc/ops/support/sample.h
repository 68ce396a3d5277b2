/*
 * Interpolation in a grid of cells: the cells that contribute to a point, their weights, and the derivatives of the
 * weights by the point. For GridSample and DeformConv.
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
    bool corners; /* align_corners: reflection at the centres of the outer cells, not at their outer edges */
} ont_sampler;

/*
 * The taps of point x (rank), in units of cells: index[t] in the flat grid, and weight[t]. Returns their number; cells
 * in zero padding are left out. Where slope is not NULL: slope[d * apart + t] = d weight[t] / d x[d].
 */
int ont_sample_taps(const ont_sampler *s, const double *x, int64_t *index, double *weight, double *slope,
                    int64_t apart);

#endif
