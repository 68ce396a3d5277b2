/*
 * Loops over a row of attention scores, compiled once per instruction set: bias, masks, online softmax, and their
 * gradient, in float32. flash_native.c calls them between GEMMs. They take one row of one block and know no shapes and
 * no nodes. Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
 */
#ifndef ONT_SIMD_ATTENTION_H
#define ONT_SIMD_ATTENTION_H

#include <stdbool.h>
#include <stdint.h>

/*
 * The scores of one query and `n` keys. Before the exponential: bias is added, then mask is applied; then keys from
 * n_visible on (causal) count as -inf. After it: dropout. A NULL pointer leaves its step out.
 */
typedef struct ont_attention_row {
    int64_t n, n_visible;
    const void *bias;      /* (n), float32 */
    int64_t bias_stride;   /* 1, or 0: one bias for the row */
    const uint8_t *mask;   /* (n), bool: where it differs from mask_polarity, the score becomes mask_value */
    int64_t mask_stride;   /* 1, or 0: one flag for the row */
    bool mask_polarity;
    double mask_value;
    const uint8_t *dropout_mask; /* (n): 1 where the probability is kept, and multiplied by dropout_scale */
    double dropout_scale;
} ont_attention_row;

typedef struct ont_attention_loops {
    /*
     * s (n): scores, becomes exp(s - row_max), with dropout. *row_max and *row_sum cover the blocks before this one
     * (-inf and 0 at first) and then include it. *rescale: factor for the results of earlier blocks. Where all scores
     * are -inf, row_max stays -inf and row_sum 0.
     */
    void (*softmax)(float *s, const ont_attention_row *row, double *row_max, double *row_sum, double *rescale);
    /*
     * s (n): scores, becomes the probabilities with dropout. dp (n): gradient of these, becomes the gradient of the
     * scores. delta: sum of probability * gradient over the whole row.
     */
    void (*grad)(float *s, float *dp, const ont_attention_row *row, double row_max, double row_sum, float delta);
    float (*dot)(const float *x, const float *y, int64_t n);
} ont_attention_loops;

/* Loops of the instruction set in use. */
const ont_attention_loops *ont_simd_attention(void);

#endif
