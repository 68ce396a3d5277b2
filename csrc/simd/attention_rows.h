/*
 * Bodies of the loops of attention for one dtype: NUM, F(name) and VEXP say which. Part of attention.inc.c, included by
 * nothing else. Sums run in 16 partial sums, as in rows.h.
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

/* NaN loses every comparison: it comes back through the sum. */
static NUM F(largest)(const NUM *s, int64_t n)
{
    NUM part[LANES], best = -(NUM)INFINITY;
    for (int lane = 0; lane < LANES; lane++) part[lane] = -(NUM)INFINITY;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] = s[i + lane] > part[lane] ? s[i + lane] : part[lane];
    for (; i < n; i++) best = s[i] > best ? s[i] : best;
    for (int lane = 0; lane < LANES; lane++) best = part[lane] > best ? part[lane] : best;
    return best;
}

static NUM F(total)(const NUM *s, int64_t n)
{
    NUM part[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] += s[i + lane];
    for (; i < n; i++) part[0] += s[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

static void F(softmax)(void *scores, const ont_attention_row *row, double *most, double *sum, double *shrink)
{
    NUM *s = scores;
    int64_t n = row->visible;
    F(mask)(s, row);
    NUM before = (NUM)*most, best = F(largest)(s, n);
    if (before > best) best = before;
    NUM base = best == -(NUM)INFINITY ? 0 : best;
    for (int64_t i = 0; i < n; i++) s[i] = VEXP(s[i] - base);
    *shrink = before == best ? 1 : (double)VEXP(before - base);
    *sum = *sum * *shrink + (double)F(total)(s, n);
    *most = (double)best;
    for (int64_t i = n; i < row->n; i++) s[i] = 0;
    if (!row->kept) return;
    NUM scale = (NUM)row->keep_scale;
    for (int64_t i = 0; i < n; i++) s[i] = row->kept[i] ? s[i] * scale : 0;
}

static void F(grad)(void *scores, void *gradient, const ont_attention_row *row, double most, double sum, double delta_)
{
    NUM *s = scores, *dp = gradient;
    int64_t n = row->visible;
    NUM base = most == -INFINITY ? 0 : (NUM)most, inverse = (NUM)(1 / sum), delta = (NUM)delta_;
    F(mask)(s, row);
    if (row->kept) {
        NUM scale = (NUM)row->keep_scale;
        for (int64_t i = 0; i < n; i++) {
            NUM p = VEXP(s[i] - base) * inverse, through = row->kept[i] ? p * scale : 0;
            dp[i] = (row->kept[i] ? dp[i] * scale : 0) * p - p * delta;
            s[i] = through;
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            NUM p = VEXP(s[i] - base) * inverse;
            dp[i] = p * (dp[i] - delta);
            s[i] = p;
        }
    }
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
    const NUM *x = a, *y = b;
    NUM part[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] += x[i + lane] * y[i + lane];
    for (; i < n; i++) part[0] += x[i] * y[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return (double)part[0];
}

#undef LANES
#undef NUM
#undef F
#undef VEXP
