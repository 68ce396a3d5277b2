/*
 * Loops of Winograd convolution F(4x4, 3x3) for float32, compiled once per instruction set: transforms of sixteen
 * channels at a time, and the products between them. ops/conv/winograd.c calls them.
 *
 * A 6 x 6 tile of the input and 3 x 3 weights (or a 4 x 4 tile of the result's gradient) are transformed to 36 numbers
 * each, the points. These are multiplied elementwise and summed over channels (or tiles); the 36 sums are transformed
 * back to a 4 x 4 tile of the result (or to 3 x 3 gradients of the weights): Lavin and Gray, Fast algorithms for
 * convolutional neural networks, 2015. Interpolation points are 0, 5/8, -5/8, 3/2, -3/2 and infinity: with the usual
 * 1, -1, 2, -2 rounding errors are five times as large. See Barabasz, Anderson, Soodhalter, Gregg, Error analysis and
 * improving the accuracy of Winograd convolution, 2018.
 */
#ifndef ONT_SIMD_WINOGRAD_H
#define ONT_SIMD_WINOGRAD_H

#include "base/status.h"

enum {
    ONT_WINO_LANES = 16,  /* channels of a block */
    ONT_WINO_TILES = 8,   /* tiles of a block */
    ONT_WINO_WIDTH = 32,  /* result channels of a product */
    ONT_WINO_POINTS = 36,
    ONT_WINO_OUT = 4,
    ONT_WINO_IN = 6,
};

/* Strides are in floats. "plane": between two adjacent points of 36. */
typedef struct ont_winograd_loops {
    /* out[i][lane] = x[lane * stride + i] for i < width; lanes from `lanes` on are zero. */
    void (*gather)(const float *x, int64_t stride, int64_t lanes, int64_t width, float *out);
    /* y[lane * stride + i] = in[i][lane], lanes < `lanes` */
    void (*scatter)(const float *in, int64_t stride, int64_t lanes, int64_t width, float *y);
    /* One tile of 16 lanes, rows `row` apart: 6 x 6 of the input, 4 x 4 of the result's gradient. */
    void (*input)(const float *tile, int64_t row, float *v, int64_t plane);
    void (*gradient)(const float *tile, int64_t row, float *w, int64_t plane);
    /* nine taps of 16 lanes, `step` apart (negative: rotated by 180 degrees) */
    void (*filter)(const float *taps, int64_t step, float *u, int64_t plane);
    /* inverse transforms: 4 x 4 of the result plus the bias of 16 lanes; nine gradients of taps */
    void (*output)(const float *m, int64_t plane, const float *bias, float *y, int64_t row);
    void (*filter_grad)(const float *m, int64_t plane, float *taps);
    /*
     * m[block][8][32] = v[block][channel block][8][16] * u[channel block][16][32], added to m where `add`. A sum over
     * channels is a sum of sums over 32.
     */
    void (*product)(const float *v, int64_t v_block, const float *u, float *m, int64_t blocks, int64_t channel_blocks,
                    bool add);
    /* m[16][32] = w[tiles][16]' * v[2][tiles][16], the two halves of v `half` apart; added to m where `add` */
    void (*product_grad)(const float *w, const float *v, int64_t half, float *m, int64_t tiles, bool add);
} ont_winograd_loops;

const ont_winograd_loops *ont_simd_winograd(void);

#endif
