/*
 * Loops over one channel of (N, C, D), compiled once per instruction set: statistics, normalisation with what is added and
 * rectified behind it, and both halves of the gradient. ops/batchnorm.c calls them; they know memory, no nodes.
 */
#ifndef ONT_SIMD_BATCHNORM_H
#define ONT_SIMD_BATCHNORM_H

#include "base/dtype.h"

/* Pieces of `length` entries, `stride` entries from one to the next. Pointers below are those of the first piece. */
typedef struct ont_channel {
    int64_t pieces, length, stride;
} ont_channel;

/* Sums are kept in double beyond 1,024 entries: a channel can hold millions. Results may take the place of operands. */
typedef struct ont_batchnorm_loops {
    /* mean and biased variance */
    void (*statistics)(const ont_channel *s, const void *x, double *mean, double *variance);
    /* y = (x - centre) * slope + shift, + residual where that is not NULL, and 0 where that is negative if `relu` */
    void (*apply)(const ont_channel *s, const void *x, const void *residual, double centre, double slope, double shift,
                  bool relu, void *y);
    /* Sums of dy and dy * (x - mean); dy counts as 0 where y, if not NULL, is not positive. */
    void (*sums)(const ont_channel *s, const void *x, const void *y, const void *dy, double mean, double *sum, double *dot);
    /* dx = factor * (dy - shift - (x - mean) * slope), dy as above */
    void (*grad)(const ont_channel *s, const void *x, const void *y, const void *dy, double mean, double factor,
                 double shift, double slope, void *dx);
} ont_batchnorm_loops;

/* Loops of the running instruction set for float32 or float64, and those that use no extension. */
const ont_batchnorm_loops *ont_simd_batchnorm(ont_dtype dtype);
const ont_batchnorm_loops *ont_simd_batchnorm_plain(ont_dtype dtype);

#endif
