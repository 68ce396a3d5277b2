/*
 * Reductions over one run of dims, (leads, n, stride) -> (leads, stride), compiled once per instruction set: short
 * rows, narrow columns, and every dtype. ops/reduce/reduce_run.c and ops/support/sums.c call them.
 */
#ifndef ONT_SIMD_REDUCE_H
#define ONT_SIMD_REDUCE_H

#include "base/dtype.h"

typedef enum ont_reduce_step {
    ONT_STEP_SUM, /* not bool, not float64; float32 only for stride 1 and n < ONT_SHORT_ROW, in order */
    ONT_STEP_MAX, /* NaN if any element is */
    ONT_STEP_MIN,
    ONT_STEP_PROD, /* not bool; float32 is accumulated in float64 */
    ONT_STEP_COUNT
} ont_reduce_step;

enum {
    ONT_SHORT_ROW = 16,      /* rows of fewer elements are summed in order, by sum() of simd.h, too */
    ONT_NARROW = 8,          /* fewer columns are reduced together */
    ONT_REDUCE_COLUMNS = 512 /* columns of one call, at most */
};

/* y[i * width + j] = reduction over k < n of x[(i * n + k) * stride + j], n >= 1. With leads > 1, width is stride. */
typedef void (*ont_reduce_loop)(const void *x, void *y, int64_t leads, int64_t n, int64_t stride, int64_t width);
/* sums[j] += column j of x (rows, n), in order; n < ONT_NARROW */
typedef void (*ont_narrow_sums)(float *sums, const float *x, int64_t rows, int64_t n);

typedef struct ont_reduce_loops {
    ont_reduce_loop run[ONT_STEP_COUNT][ONT_DTYPE_COUNT]; /* NULL: not supported for that dtype */
    ont_narrow_sums narrow_sums;
} ont_reduce_loops;

const ont_reduce_loops *ont_simd_reduce(void);

#endif
