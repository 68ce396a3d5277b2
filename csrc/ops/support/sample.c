/*
 * Interpolation taps. See sample.h.
 */
#include "ops/support/sample_axis.h"

/* Whether all taps lie inside a plane, as for most points: padding does not matter then. */
static bool is_inside(const ont_sampler *s, const double *x)
{
    return s->rank == 2 && s->mode != ONT_SAMPLE_CUBIC && x[0] > 0 && x[0] < (double)(s->dims[0] - 1) && x[1] > 0 &&
           x[1] < (double)(s->dims[1] - 1);
}

static int taps_inside(const ont_sampler *s, const double *x, int64_t *index, double *weight, double *slope,
                       int64_t apart)
{
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to a whole number */
    if (s->mode == ONT_SAMPLE_NEAREST) {
        index[0] = (int64_t)(x[0] + magic - magic) * s->dims[1] + (int64_t)(x[1] + magic - magic);
        weight[0] = 1;
        if (slope) slope[0] = slope[apart] = 0;
        return 1;
    }
    int64_t row = (int64_t)x[0], column = (int64_t)x[1], at = row * s->dims[1] + column;
    double below = x[0] - (double)row, right = x[1] - (double)column;
    double v[] = {1 - below, below}, w[] = {1 - right, right};
    for (int t = 0; t < 4; t++) {
        index[t] = at + (t >> 1) * s->dims[1] + (t & 1);
        weight[t] = v[t >> 1] * w[t & 1];
        if (slope) slope[t] = t >> 1 ? w[t & 1] : -w[t & 1];
        if (slope) slope[apart + t] = t & 1 ? v[t >> 1] : -v[t >> 1];
    }
    return 4;
}

int ont_sample_taps(const ont_sampler *s, const double *x, int64_t *index, double *weight, double *slope, int64_t apart)
{
    if (is_inside(s, x)) return taps_inside(s, x, index, weight, slope, apart);
    ont_axis_taps axes[ONT_SAMPLE_RANK]; /* the last dims; the ones in front have one cell */
    int n = 0, lead = ONT_SAMPLE_RANK - s->rank;
    int64_t dims[ONT_SAMPLE_RANK] = {1, 1, 1};
    for (int d = 0; d < lead; d++) axes[d].n = 1, axes[d].cell[0] = 0, axes[d].weight[0] = 1, axes[d].slope[0] = 0;
    for (int d = lead; d < ONT_SAMPLE_RANK; d++) {
        dims[d] = s->dims[d - lead];
        ont_sample_axis(s, d - lead, x[d - lead], &axes[d]);
    }
    for (int i = 0; i < axes[0].n; i++)
        for (int j = 0; j < axes[1].n; j++)
            for (int k = 0; k < axes[2].n; k++) {
                int64_t a = axes[0].cell[i], b = axes[1].cell[j], c = axes[2].cell[k];
                if ((a | b | c) < 0) continue;
                double u = axes[0].weight[i], v = axes[1].weight[j], w = axes[2].weight[k];
                double slopes[] = {axes[0].slope[i] * v * w, axes[1].slope[j] * u * w, axes[2].slope[k] * u * v};
                for (int d = 0; slope && d < s->rank; d++) slope[d * apart + n] = slopes[lead + d];
                index[n] = (a * dims[1] + b) * dims[2] + c;
                weight[n++] = u * v * w;
            }
    return n;
}
