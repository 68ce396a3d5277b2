/*
 * Reductions over one run of dims, (leads, n, stride) -> (leads, stride), compiled once per instruction set: short
 * rows, narrow columns, and every dtype. ops/reduce_run.c and the sums call them; they know memory, no nodes.
 */
#ifndef ONT_SIMD_REDUCE_H
#define ONT_SIMD_REDUCE_H

#include "base/dtype.h"

typedef enum ont_reduce_step {
    ONT_STEP_SUM, /* not of bool and float64; of float32 for stride 1 and n < ONT_SHORT_ROW only, in order */
    ONT_STEP_MAX, /* NaN where there is one */
    ONT_STEP_MIN,
    ONT_STEP_PROD, /* not of bool; of float32 in double */
    ONT_STEP_COUNT
} ont_reduce_step;

enum {
    ONT_SHORT_ROW = 16,      /* elements; of fewer simd.h's sum adds up in order too */
    ONT_NARROW = 8,          /* columns; of fewer all are done at once */
    ONT_REDUCE_COLUMNS = 512 /* the most at a time */
};

/* y[i * width + j] = the n elements x[(i * n + k) * stride + j], n >= 1. More than one lead: width is the stride. */
typedef void (*ont_reduce_loop)(const void *x, void *y, int64_t leads, int64_t n, int64_t stride, int64_t width);
/* sums[j] += the rows' column j, in order, n < ONT_NARROW columns beside each other */
typedef void (*ont_narrow_sums)(float *sums, const float *x, int64_t rows, int64_t n);

typedef struct ont_reduce_loops {
    ont_reduce_loop run[ONT_STEP_COUNT][ONT_DTYPE_COUNT]; /* NULL: not for that dtype */
    ont_narrow_sums narrow_sums;
} ont_reduce_loops;

const ont_reduce_loops *ont_simd_reduce(void);

#endif
