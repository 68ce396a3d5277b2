/*
 * What the kernels of Col2Im, Im2Col, DeformCols and DeformColsGrad have as state; a device reads it as well.
 */
#ifndef ONT_OPS_COLUMNS_H
#define ONT_OPS_COLUMNS_H

#include "ops/support/sample.h"
#include "ops/support/window.h"

typedef struct ont_columns {
    ont_window w;
    int64_t planes; /* batch * channels */
} ont_columns;

typedef struct ont_deform {
    ont_window w;
    ont_sampler sampler;
    int64_t n, c, groups; /* groups: of channels that share offsets */
} ont_deform;

#endif
