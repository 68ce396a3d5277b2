/*
 * Loops of the weight gradient of a depthwise convolution over flat arrays, compiled once per instruction set: images
 * lie one after another with zeros between their rows, so that a tap of the filter is one distance for all elements.
 * ops/conv/depthwise_weight.c calls them.
 */
#ifndef ONT_SIMD_DEPTHWISE_WEIGHT_H
#define ONT_SIMD_DEPTHWISE_WEIGHT_H

#include <stdint.h>

enum { ONT_DEPTHWISE_LANES = 16 }; /* the length `n` of dot_taps() is a multiple */

typedef struct ont_depthwise_loops {
    /* to[r * to_pitch + i] = from[r * from_pitch + i * step], for `rows` rows of n */
    void (*pack)(float *to, int64_t to_pitch, const float *from, int64_t from_pitch, int64_t step, int64_t rows,
                 int64_t n);
    /* sums[k] = sum over i of y[i] * x[i + at[k]] */
    void (*dot_taps)(float *sums, const float *y, const float *x, const int64_t *at, int64_t taps, int64_t n);
} ont_depthwise_loops;

const ont_depthwise_loops *ont_simd_depthwise(void);

#endif
