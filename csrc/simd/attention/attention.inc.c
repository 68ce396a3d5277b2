/*
 * The loops of attention, compiled once per instruction set with ONT_ISA naming it. See attention.h. With AVX2,
 * max_of(), exp_and_sum(), score_grads() and dot() come from attention_vectors.h.
 */
#include <math.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd/attention/attention.h"
#include "simd/macros.h"
#include "simd/math.h"

#if ONT_ISA_PLAIN
#define EXP expf
#else
#define EXP f32_exp
#endif
#if defined(__AVX2__)
#include "simd/attention/attention_vectors.h"
#endif

enum { PARTIAL_SUMS = 16 }; /* as in rows.h */

static void apply_masks(float *s, const ont_attention_row *row)
{
    int64_t n = row->n_visible;
    if (row->bias && row->bias_stride) {
        const float *bias = row->bias;
        for (int64_t i = 0; i < n; i++) s[i] += bias[i];
    } else if (row->bias) {
        float bias = *(const float *)row->bias;
        for (int64_t i = 0; i < n; i++) s[i] += bias;
    }
    if (!row->mask) return;
    float mask_value = (float)row->mask_value;
    uint8_t polarity = row->mask_polarity;
    if (row->mask_stride)
        for (int64_t i = 0; i < n; i++) s[i] = (row->mask[i] != 0) == polarity ? s[i] : mask_value;
    else if ((*row->mask != 0) != polarity)
        for (int64_t i = 0; i < n; i++) s[i] = mask_value;
}

#if !defined(__AVX2__)

/* The largest of s and `initial`. NaN is passed over here, and reaches the result through row_sum. */
static float max_of(const float *s, int64_t n, float initial)
{
    for (int64_t i = 0; i < n; i++) initial = s[i] > initial ? s[i] : initial;
    return initial;
}

/* s becomes exp(s - base). Returns the sum of the results. */
static float exp_and_sum(float *s, int64_t n, float base)
{
    float part[PARTIAL_SUMS] = {0};
    int64_t i = 0;
    for (int64_t k = 0; k < n; k++) s[k] = EXP(s[k] - base);
    for (; i + PARTIAL_SUMS <= n; i += PARTIAL_SUMS)
        for (int lane = 0; lane < PARTIAL_SUMS; lane++) part[lane] += s[i + lane];
    for (; i < n; i++) part[0] += s[i];
    for (int half = PARTIAL_SUMS / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

/* s becomes the probabilities, dp the gradients of the scores. */
static void score_grads(float *restrict s, float *restrict dp, int64_t n, float base, float inverse, float delta)
{
    for (int64_t i = 0; i < n; i++) {
        float p = EXP(s[i] - base) * inverse;
        dp[i] = p * (dp[i] - delta);
        s[i] = p;
    }
}

static float dot(const float *x, const float *y, int64_t n)
{
    float part[PARTIAL_SUMS] = {0};
    int64_t i = 0;
    for (; i + PARTIAL_SUMS <= n; i += PARTIAL_SUMS)
        for (int lane = 0; lane < PARTIAL_SUMS; lane++) part[lane] += x[i + lane] * y[i + lane];
    for (; i < n; i++) part[0] += x[i] * y[i];
    for (int half = PARTIAL_SUMS / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

#endif

static void apply_dropout(float *restrict x, const uint8_t *dropout_mask, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i++) x[i] = dropout_mask[i] ? x[i] * scale : 0;
}

static void softmax(float *s, const ont_attention_row *row, double *row_max, double *row_sum, double *rescale)
{
    int64_t n = row->n_visible;
    apply_masks(s, row);
    float old_max = (float)*row_max, new_max = max_of(s, n, old_max);
    float base = new_max == -INFINITY ? 0 : new_max;
    *rescale = old_max == new_max ? 1 : (double)EXP(old_max - base);
    *row_sum = *row_sum * *rescale + (double)exp_and_sum(s, n, base);
    *row_max = (double)new_max;
    for (int64_t i = n; i < row->n; i++) s[i] = 0;
    if (row->dropout_mask) apply_dropout(s, row->dropout_mask, n, (float)row->dropout_scale);
}

/* delta for a row in which one key has probability 1 (row_sum is 1): exactly the dp of that key, so that its score's
 * gradient is exactly 0. The sum over y * dy would differ from it by rounding. */
static float delta_of_one_hot(const float *s, const float *dp, int64_t n, float base, float delta)
{
    for (int64_t i = 0; i < n; i++)
        if (s[i] == base) return dp[i];
    return delta;
}

static void grad(float *restrict s, float *restrict dp, const ont_attention_row *row, double row_max, double row_sum,
                 float delta)
{
    int64_t n = row->n_visible;
    float base = row_max == -INFINITY ? 0 : (float)row_max, inverse = (float)(1 / row_sum);
    apply_masks(s, row);
    if (row->dropout_mask) apply_dropout(dp, row->dropout_mask, n, (float)row->dropout_scale);
    if (row_sum == 1) delta = delta_of_one_hot(s, dp, n, base, delta);
    score_grads(s, dp, n, base, inverse, delta);
    if (row->dropout_mask) apply_dropout(s, row->dropout_mask, n, (float)row->dropout_scale);
    for (int64_t i = n; i < row->n; i++) s[i] = dp[i] = 0;
    if (!row->mask) return;
    uint8_t polarity = row->mask_polarity; /* a score that the mask replaced has no gradient */
    if (row->mask_stride)
        for (int64_t i = 0; i < n; i++) dp[i] = (row->mask[i] != 0) == polarity ? dp[i] : 0;
    else if ((*row->mask != 0) != polarity)
        for (int64_t i = 0; i < n; i++) dp[i] = 0;
}

extern const ont_attention_loops PASTE(ont_attention_loops_, ONT_ISA);
const ont_attention_loops PASTE(ont_attention_loops_, ONT_ISA) = {softmax, grad, dot};
