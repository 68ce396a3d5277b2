/*
 * Rows of attention scores, compiled once per instruction set: masks, running softmax, and the gradient of both.
 * ops/flash.c calls them between its products; they know one row of one block, no shapes and no nodes. Softmax with a
 * running maximum: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
 */
#ifndef ONT_SIMD_ATTENTION_H
#define ONT_SIMD_ATTENTION_H

#include "base/dtype.h"

/*
 * What is done to the scores of one row before the exponential, in this order, and to its result. Any pointer may be
 * NULL.
 */
typedef struct ont_attention_row {
    int64_t n, visible;    /* columns of the block; those from `visible` on count as -inf */
    const void *bias;      /* of the scores' dtype, added */
    int64_t bias_step;     /* 1, or 0: one for the row */
    const uint8_t *keep;   /* bool: where it differs from `keep_if`, the score is `fill` */
    int64_t keep_step;
    bool keep_if;
    double fill;
    const uint8_t *kept;   /* dropout's choice; what it kept is multiplied by keep_scale */
    double keep_scale;
} ont_attention_row;

typedef struct ont_attention_loops {
    /*
     * s: scores, becomes exp(s - most) after dropout. most, sum: of the columns before this block (-inf and 0 at
     * first), and after it; *shrink: what results of earlier blocks are to be multiplied by. A row of -inf alone leaves
     * most -inf, sum 0.
     */
    void (*softmax)(void *s, const ont_attention_row *row, double *most, double *sum, double *shrink);
    /*
     * s: scores, becomes the probabilities after dropout. dp: their gradient, becomes that of the scores; delta is the
     * sum over the whole row of probability times gradient.
     */
    void (*grad)(void *s, void *dp, const ont_attention_row *row, double most, double sum, double delta);
    double (*dot)(const void *x, const void *y, int64_t n);
} ont_attention_loops;

/* Loops of the running instruction set; NULL for dtypes other than float32 and float64. */
const ont_attention_loops *ont_simd_attention(ont_dtype dtype);

#endif
