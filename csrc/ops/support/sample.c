/*
 * Interpolation taps. See sample.h. Edges as in torch.nn.functional.grid_sample, which the specification follows: a
 * clipped coordinate has no slope, a reflected one changes its sign, cubic taps are padded one by one.
 * Cubic weights: R. G. Keys, Cubic convolution interpolation, 1981, with a = -0.75.
 */
#include "ops/support/sample.h"

#include <math.h>

typedef struct axis_taps {
    int n;
    int64_t cell[4]; /* -1: outside, with value zero */
    double weight[4], slope[4];
} axis_taps;

/* x clipped to [0, size - 1]; *sign is multiplied by the derivative. */
static double clipped(double x, int64_t size, double *sign)
{
    double max = (double)(size - 1);
    if (x > 0 && x < max) return x;
    *sign = 0;
    return x >= max ? max : 0;
}

static double reflected(double x, int64_t size, bool corners, double *sign)
{
    double low = corners ? 0 : -0.5, span = corners ? (double)(size - 1) : (double)size;
    if (span <= 0) {
        *sign = 0;
        return 0;
    }
    double from = x - low;
    if (from < 0) from = -from, *sign = -*sign;
    double extra = fmod(from, span);
    bool back = fmod(floor(from / span), 2) != 0;
    if (back) *sign = -*sign;
    return back ? span - extra + low : extra + low;
}

static double padded(const ont_sampler *s, int axis, double x, double *sign)
{
    if (s->padding == ONT_SAMPLE_ZEROS) return x;
    if (s->padding == ONT_SAMPLE_REFLECTION) x = reflected(x, s->dims[axis], s->corners, sign);
    return clipped(x, s->dims[axis], sign);
}

static int64_t cell_at(const ont_sampler *s, int axis, double x)
{
    return x >= 0 && x < (double)s->dims[axis] ? (int64_t)x : -1;
}

static void cubic_taps(const ont_sampler *s, int axis, double x, axis_taps *t)
{
    const double a = -0.75;
    double left = floor(x), f = x - left, unused = 1;
    t->n = 4;
    for (int i = 0; i < 4; i++) {
        double u = fabs(f + 1 - i), side = f + 1 - i < 0 ? -1 : 1; /* distance of the tap from the point */
        bool inner = i == 1 || i == 2;
        t->weight[i] = inner ? ((a + 2) * u - (a + 3)) * u * u + 1 : ((a * u - 5 * a) * u + 8 * a) * u - 4 * a;
        t->slope[i] = side * (inner ? (3 * (a + 2) * u - 2 * (a + 3)) * u : (3 * a * u - 10 * a) * u + 8 * a);
        t->cell[i] = cell_at(s, axis, padded(s, axis, left - 1 + i, &unused));
    }
}

static void axis_at(const ont_sampler *s, int axis, double x, axis_taps *t)
{
    if (!isfinite(x) && s->mode != ONT_SAMPLE_NEAREST &&
        (s->padding == ONT_SAMPLE_ZEROS || s->mode == ONT_SAMPLE_CUBIC)) { /* NaN, as in torch, not zero */
        *t = (axis_taps){.n = 1, .weight = {NAN}, .slope = {NAN}};
        return;
    }
    if (!(x > -1e15 && x < 1e15)) x = -100; /* far outside */
    if (s->mode == ONT_SAMPLE_CUBIC) {
        cubic_taps(s, axis, x, t);
        return;
    }
    double sign = 1;
    x = padded(s, axis, x, &sign);
    if (s->mode == ONT_SAMPLE_NEAREST) {
        t->n = 1;
        t->weight[0] = 1, t->slope[0] = 0;
        t->cell[0] = cell_at(s, axis, rint(x));
        return;
    }
    double left = floor(x), f = x - left;
    t->n = 2;
    t->weight[0] = 1 - f, t->weight[1] = f;
    t->slope[0] = -sign, t->slope[1] = sign;
    t->cell[0] = cell_at(s, axis, left), t->cell[1] = cell_at(s, axis, left + 1);
}

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
    axis_taps axes[ONT_SAMPLE_RANK]; /* the last dims; the ones in front have one cell */
    int n = 0, lead = ONT_SAMPLE_RANK - s->rank;
    int64_t dims[ONT_SAMPLE_RANK] = {1, 1, 1};
    for (int d = 0; d < lead; d++) axes[d].n = 1, axes[d].cell[0] = 0, axes[d].weight[0] = 1, axes[d].slope[0] = 0;
    for (int d = lead; d < ONT_SAMPLE_RANK; d++) {
        dims[d] = s->dims[d - lead];
        axis_at(s, d - lead, x[d - lead], &axes[d]);
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
