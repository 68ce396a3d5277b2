/*
 * Loops of batch normalisation over a contiguous piece of a channel of (N, C, D), compiled once per instruction set:
 * sums, normalisation with residual and ReLU, and both parts of the gradient. batchnorm.c calls them. A sum runs in
 * vectors over at most 1,024 elements; these partial sums are added in double, in `a` and `b`.
 */
#ifndef ONT_SIMD_BATCHNORM_H
#define ONT_SIMD_BATCHNORM_H

#include "base/dtype.h"

/* One channel: v = (x - centre) * slope + shift. */
typedef struct ont_channel {
    double centre, slope, shift;
} ont_channel;

/* Where dy counts: everywhere, where y is positive, or where the channel's v is. */
typedef enum ont_relu_mask { ONT_MASK_NONE, ONT_MASK_Y, ONT_MASK_V } ont_relu_mask;

/* The same coefficients for a run of columns, as arrays of the dtype. */
typedef struct ont_channels {
    const void *centre, *slope, *shift;
} ont_channels;

/* Operands of the gradient; y is read with ONT_MASK_Y alone. */
typedef struct ont_batchnorm_gradient {
    ont_relu_mask mask;
    const void *x, *y, *dy;
} ont_batchnorm_gradient;

/* The first `columns` columns of rows that are `stride` apart. */
typedef struct ont_batchnorm_rows {
    int64_t stride, rows, columns;
} ont_batchnorm_rows;

/* A result may overwrite an operand. */
typedef struct ont_batchnorm_loops {
    void (*sum)(const void *x, int64_t n, double *a);
    /* a += x - centre, b += (x - centre)^2 */
    void (*squares)(const void *x, double centre, int64_t n, double *a, double *b);
    /* y = v + residual, which may be NULL; with `relu`, negative results become 0 */
    void (*apply)(const ont_channel *c, const void *x, const void *residual, bool relu, void *y, int64_t n);
    /* a += dy, b += dy * (x - centre) */
    void (*grad_sums)(const ont_channel *c, const ont_batchnorm_gradient *g, int64_t n, double *a, double *b);
    /* dx = slope * (dy - mean_dy - (x - centre) * mean_dot) */
    void (*grad)(const ont_channel *c, const ont_batchnorm_gradient *g, double mean_dy, double mean_dot, void *dx,
                 int64_t n);
    /* The same over rows; sums are per column, in the dtype. */
    void (*rows_squares)(const void *x, const ont_batchnorm_rows *r, void *a, void *b); /* around row 0 */
    void (*rows_apply)(const ont_channels *c, const void *x, const void *residual, bool relu, void *y,
                       const ont_batchnorm_rows *r);
    void (*rows_grad_sums)(const ont_channels *c, const ont_batchnorm_gradient *g, const ont_batchnorm_rows *r, void *a,
                           void *b);
    void (*rows_grad)(const ont_channels *c, const ont_batchnorm_gradient *g, const void *mean_dy,
                      const void *mean_dot, void *dx, const ont_batchnorm_rows *r);
    /*
     * sum += a, dot += b, by column. With x, a and b are sums of differences from x and of their squares, over the
     * rows; they are first converted to differences from `base`.
     */
    void (*join)(const void *x, const void *base, const ont_batchnorm_rows *r, const void *a, const void *b,
                 double *sum, double *dot);
} ont_batchnorm_loops;

/*
 * Loops of the instruction set in use, for float32, float64 or bfloat16. Those for bfloat16 compute in float32 and have
 * none over rows.
 */
const ont_batchnorm_loops *ont_simd_batchnorm(ont_dtype dtype);

#endif
