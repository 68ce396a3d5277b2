/*
 * Bodies of the loops of attention for one dtype: NUM, F(name) and VEXP say which; with VECTORS, what runs over the
 * elements of a row is attention_vectors.h's. Part of attention.inc.c, included by nothing else. Sums run in 16 partial
 * sums, as in rows.h.
 */
#define LANES 16

static void F(mask)(NUM *s, const ont_attention_row *row)
{
    int64_t n = row->visible;
    if (row->bias && row->bias_step) {
        const NUM *bias = row->bias;
        for (int64_t i = 0; i < n; i++) s[i] += bias[i];
    } else if (row->bias) {
        NUM bias = *(const NUM *)row->bias;
        for (int64_t i = 0; i < n; i++) s[i] += bias;
    }
    if (!row->keep) return;
    NUM fill = (NUM)row->fill;
    uint8_t wanted = row->keep_if;
    if (row->keep_step)
        for (int64_t i = 0; i < n; i++) s[i] = (row->keep[i] != 0) == wanted ? s[i] : fill;
    else if ((*row->keep != 0) != wanted)
        for (int64_t i = 0; i < n; i++) s[i] = fill;
}

#ifndef VECTORS

/* The largest of s and `least`. NaN loses every comparison: it comes back through the sum. */
static NUM F(largest)(const NUM *s, int64_t n, NUM least)
{
    for (int64_t i = 0; i < n; i++) least = s[i] > least ? s[i] : least;
    return least;
}

/* s becomes exp(s - base); their sum. */
static NUM F(exponentials)(NUM *s, int64_t n, NUM base)
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
static void F(gradients)(NUM *restrict s, NUM *restrict dp, int64_t n, NUM base, NUM inverse, NUM delta)
{
    for (int64_t i = 0; i < n; i++) {
        NUM p = VEXP(s[i] - base) * inverse;
        dp[i] = p * (dp[i] - delta);
        s[i] = p;
    }
}

static NUM F(products)(const NUM *x, const NUM *y, int64_t n)
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

static void F(drop)(NUM *restrict x, const uint8_t *kept, int64_t n, NUM scale)
{
    for (int64_t i = 0; i < n; i++) x[i] = kept[i] ? x[i] * scale : 0;
}

static void F(softmax)(void *scores, const ont_attention_row *row, double *most, double *sum, double *shrink)
{
    NUM *s = scores;
    int64_t n = row->visible;
    F(mask)(s, row);
    NUM before = (NUM)*most, best = F(largest)(s, n, before);
    NUM base = best == -(NUM)INFINITY ? 0 : best;
    *shrink = before == best ? 1 : (double)VEXP(before - base);
    *sum = *sum * *shrink + (double)F(exponentials)(s, n, base);
    *most = (double)best;
    for (int64_t i = n; i < row->n; i++) s[i] = 0;
    if (row->kept) F(drop)(s, row->kept, n, (NUM)row->keep_scale);
}

/* Where one key has all of a row's probability: that key's own gradient, so that the score's is 0. Delta, the same sum
 * in another order, would miss that by its rounding. */
static NUM F(delta_of_one)(const NUM *s, const NUM *dp, int64_t n, NUM base, NUM delta)
{
    for (int64_t i = 0; i < n; i++)
        if (s[i] == base) return dp[i];
    return delta;
}

static void F(grad)(void *scores, void *gradient, const ont_attention_row *row, double most, double sum, double delta_)
{
    NUM *restrict s = scores, *restrict dp = gradient;
    int64_t n = row->visible;
    NUM base = most == -INFINITY ? 0 : (NUM)most, inverse = (NUM)(1 / sum), delta = (NUM)delta_;
    F(mask)(s, row);
    if (row->kept) F(drop)(dp, row->kept, n, (NUM)row->keep_scale);
    if (sum == 1) delta = F(delta_of_one)(s, dp, n, base, delta);
    F(gradients)(s, dp, n, base, inverse, delta);
    if (row->kept) F(drop)(s, row->kept, n, (NUM)row->keep_scale);
    for (int64_t i = n; i < row->n; i++) s[i] = dp[i] = 0;
    if (!row->keep) return;
    uint8_t wanted = row->keep_if; /* a score that was replaced has no gradient */
    if (row->keep_step)
        for (int64_t i = 0; i < n; i++) dp[i] = (row->keep[i] != 0) == wanted ? dp[i] : 0;
    else if ((*row->keep != 0) != wanted)
        for (int64_t i = 0; i < n; i++) dp[i] = 0;
}

static double F(dot)(const void *a, const void *b, int64_t n)
{
    return (double)F(products)(a, b, n);
}

#undef LANES
#undef NUM
#undef F
#undef VEXP
