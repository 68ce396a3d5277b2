/*
 * Loops over one piece, contiguous, of a channel of (N, C, D), compiled once per instruction set: sums, normalisation
 * with what is added and rectified behind it, and both halves of the gradient. ops/batchnorm.c calls them; they know
 * memory, no nodes. A sum runs in vectors over at most 1,024 entries; those sums meet in double, in `a` and `b`.
 */
#ifndef ONT_SIMD_BATCHNORM_H
#define ONT_SIMD_BATCHNORM_H

#include "base/dtype.h"

/* One channel: v = (x - centre) * slope + shift. */
typedef struct ont_channel {
    double centre, slope, shift;
} ont_channel;

/* What counts of dy: all, where y is positive, or where the channel's v is. */
typedef enum ont_relu_mask { ONT_MASK_NONE, ONT_MASK_Y, ONT_MASK_V } ont_relu_mask;

/* Channels of consecutive columns, as the numbers are. */
typedef struct ont_channels {
    const void *centre, *slope, *shift;
} ont_channels;

/* Results may take the place of operands. */
typedef struct ont_batchnorm_loops {
    void (*sum)(const void *x, int64_t n, double *a);
    /* a += x - centre, b += (x - centre)^2 */
    void (*squares)(const void *x, double centre, int64_t n, double *a, double *b);
    /* y = v + residual, which may be NULL, and 0 where that is negative if `relu` */
    void (*apply)(const ont_channel *c, const void *x, const void *residual, bool relu, void *y, int64_t n);
    /* a += dy, b += dy * (x - centre) */
    void (*grad_sums)(const ont_channel *c, ont_relu_mask mask, const void *x, const void *y, const void *dy, int64_t n,
                      double *a, double *b);
    /* dx = factor * (dy - mean_dy - (x - centre) * mean_dot) */
    void (*grad)(const ont_channel *c, ont_relu_mask mask, const void *x, const void *y, const void *dy, double factor,
                 double mean_dy, double mean_dot, void *dx, int64_t n);
    /* The same of the first n columns of rows, `stride` apart; sums are per column, in the dtype. */
    void (*rows_squares)(const void *x, int64_t stride, int64_t rows, int64_t n, void *a, void *b); /* from x's row 0 */
    void (*rows_apply)(const ont_channels *c, const void *x, const void *residual, bool relu, void *y, int64_t stride,
                       int64_t rows, int64_t n);
    void (*rows_grad_sums)(const ont_channels *c, ont_relu_mask mask, const void *x, const void *y, const void *dy,
                           int64_t stride, int64_t rows, int64_t n, void *a, void *b);
    void (*rows_grad)(const ont_channels *c, ont_relu_mask mask, const void *x, const void *y, const void *dy,
                      const void *mean_dy, const void *mean_dot, void *dx, int64_t stride, int64_t rows, int64_t n);
    /*
     * sum += a, dot += b. With x, they are `rows` rows' sums of differences and squares from it, which become those
     * from `base`.
     */
    void (*join)(const void *x, const void *base, int64_t rows, const void *a, const void *b, int64_t n, double *sum,
                 double *dot);
} ont_batchnorm_loops;

/* Loops of the running instruction set for float32 or float64. */
const ont_batchnorm_loops *ont_simd_batchnorm(ont_dtype dtype);

#endif
