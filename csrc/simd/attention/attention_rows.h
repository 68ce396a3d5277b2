/*
 * Bodies of the loops of attention for one dtype, included by attention.inc.c once per dtype. The includer defines NUM
 * (the C type), F(name) (adds the suffix) and VEXP (the exponential). With VECTORS, max_of(), exp_and_sum(),
 * score_grads() and dot_of() come from attention_vectors.h instead. Sums run in 16 partial sums, as in rows.h.
 */
#define LANES 16

static void F(apply_masks)(NUM *s, const ont_attention_row *row)
{
    int64_t n = row->n_visible;
    if (row->bias && row->bias_stride) {
        const NUM *bias = row->bias;
        for (int64_t i = 0; i < n; i++) s[i] += bias[i];
    } else if (row->bias) {
        NUM bias = *(const NUM *)row->bias;
        for (int64_t i = 0; i < n; i++) s[i] += bias;
    }
    if (!row->mask) return;
    NUM mask_value = (NUM)row->mask_value;
    uint8_t polarity = row->mask_polarity;
    if (row->mask_stride)
        for (int64_t i = 0; i < n; i++) s[i] = (row->mask[i] != 0) == polarity ? s[i] : mask_value;
    else if ((*row->mask != 0) != polarity)
        for (int64_t i = 0; i < n; i++) s[i] = mask_value;
}

#ifndef VECTORS

/* The largest of s and `initial`. NaN is passed over here, and reaches the result through row_sum. */
static NUM F(max_of)(const NUM *s, int64_t n, NUM initial)
{
    for (int64_t i = 0; i < n; i++) initial = s[i] > initial ? s[i] : initial;
    return initial;
}

/* s becomes exp(s - base). Returns the sum of the results. */
static NUM F(exp_and_sum)(NUM *s, int64_t n, NUM base)
{
    NUM part[LANES] = {0};
    int64_t i = 0;
    for (int64_t k = 0; k < n; k++) s[k] = VEXP(s[k] - base);
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] += s[i + lane];
    for (; i < n; i++) part[0] += s[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

/* s becomes the probabilities, dp the gradients of the scores. */
static void F(score_grads)(NUM *restrict s, NUM *restrict dp, int64_t n, NUM base, NUM inverse, NUM delta)
{
    for (int64_t i = 0; i < n; i++) {
        NUM p = VEXP(s[i] - base) * inverse;
        dp[i] = p * (dp[i] - delta);
        s[i] = p;
    }
}

static NUM F(dot_of)(const NUM *x, const NUM *y, int64_t n)
{
    NUM part[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] += x[i + lane] * y[i + lane];
    for (; i < n; i++) part[0] += x[i] * y[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

#endif

static void F(apply_dropout)(NUM *restrict x, const uint8_t *dropout_mask, int64_t n, NUM scale)
{
    for (int64_t i = 0; i < n; i++) x[i] = dropout_mask[i] ? x[i] * scale : 0;
}

static void F(softmax)(void *scores, const ont_attention_row *row, double *row_max, double *row_sum, double *rescale)
{
    NUM *s = scores;
    int64_t n = row->n_visible;
    F(apply_masks)(s, row);
    NUM old_max = (NUM)*row_max, new_max = F(max_of)(s, n, old_max);
    NUM base = new_max == -(NUM)INFINITY ? 0 : new_max;
    *rescale = old_max == new_max ? 1 : (double)VEXP(old_max - base);
    *row_sum = *row_sum * *rescale + (double)F(exp_and_sum)(s, n, base);
    *row_max = (double)new_max;
    for (int64_t i = n; i < row->n; i++) s[i] = 0;
    if (row->dropout_mask) F(apply_dropout)(s, row->dropout_mask, n, (NUM)row->dropout_scale);
}

/* delta for a row in which one key has probability 1 (row_sum is 1): exactly the dp of that key, so that its score's
 * gradient is exactly 0. The sum over y * dy would differ from it by rounding. */
static NUM F(delta_of_one_hot)(const NUM *s, const NUM *dp, int64_t n, NUM base, NUM delta)
{
    for (int64_t i = 0; i < n; i++)
        if (s[i] == base) return dp[i];
    return delta;
}

static void F(grad)(void *scores, void *gradient, const ont_attention_row *row, double row_max, double row_sum,
                    double delta_)
{
    NUM *restrict s = scores, *restrict dp = gradient;
    int64_t n = row->n_visible;
    NUM base = row_max == -INFINITY ? 0 : (NUM)row_max, inverse = (NUM)(1 / row_sum), delta = (NUM)delta_;
    F(apply_masks)(s, row);
    if (row->dropout_mask) F(apply_dropout)(dp, row->dropout_mask, n, (NUM)row->dropout_scale);
    if (row_sum == 1) delta = F(delta_of_one_hot)(s, dp, n, base, delta);
    F(score_grads)(s, dp, n, base, inverse, delta);
    if (row->dropout_mask) F(apply_dropout)(s, row->dropout_mask, n, (NUM)row->dropout_scale);
    for (int64_t i = n; i < row->n; i++) s[i] = dp[i] = 0;
    if (!row->mask) return;
    uint8_t polarity = row->mask_polarity; /* a score that the mask replaced has no gradient */
    if (row->mask_stride)
        for (int64_t i = 0; i < n; i++) dp[i] = (row->mask[i] != 0) == polarity ? dp[i] : 0;
    else if ((*row->mask != 0) != polarity)
        for (int64_t i = 0; i < n; i++) dp[i] = 0;
}

static double F(dot)(const void *a, const void *b, int64_t n)
{
    return (double)F(dot_of)(a, b, n);
}

#undef LANES
#undef NUM
#undef F
#undef VEXP
