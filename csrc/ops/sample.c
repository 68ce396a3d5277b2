/*
 * Points between cells. See sample.h. Edges as in torch.nn.functional.grid_sample, which the specification follows: a
 * clipped coordinate has no slope, a reflected one changes its sign, cubic taps are padded one by one.
 * Cubic weights: R. G. Keys, Cubic convolution interpolation, 1981, with a = -0.75.
 */
#include "ops/sample.h"

#include <math.h>

typedef struct axis_taps {
    int n;
    int64_t cell[4]; /* -1: outside, of value zero */
    double weight[4], slope[4];
} axis_taps;

/* Into [0, size - 1]; *sign is multiplied with the derivative. */
static double clipped(double x, int64_t size, double *sign)
{
    double most = (double)(size - 1);
    if (x > 0 && x < most) return x;
    *sign = 0;
    return x >= most ? most : 0;
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
        (s->padding == ONT_SAMPLE_ZEROS || s->mode == ONT_SAMPLE_CUBIC)) { /* as in torch: no silent zero */
        *t = (axis_taps){.n = 1, .weight = {NAN}, .slope = {NAN}};
        return;
    }
    if (!(x > -1e15 && x < 1e15)) x = -100; /* nowhere near: outside */
    if (s->mode == ONT_SAMPLE_CUBIC) {
        cubic_taps(s, axis, x, t);
        return;
    }
    double sign = 1;
    x = padded(s, axis, x, &sign);
    if (s->mode == ONT_SAMPLE_NEAREST) {
        *t = (axis_taps){.n = 1, .weight = {1}, .cell = {cell_at(s, axis, rint(x))}};
        return;
    }
    double left = floor(x), f = x - left;
    *t = (axis_taps){.n = 2, .weight = {1 - f, f}, .slope = {-sign, sign},
                     .cell = {cell_at(s, axis, left), cell_at(s, axis, left + 1)}};
}

int ont_sample_taps(const ont_sampler *s, const double *x, int64_t *index, double *weight, double *slope)
{
    axis_taps axes[ONT_SAMPLE_RANK];
    int total = 1, n = 0;
    for (int d = 0; d < s->rank; d++) {
        axis_at(s, d, x[d], &axes[d]);
        total *= axes[d].n;
    }
    for (int k = 0; k < total; k++) {
        int64_t at = 0;
        int which[ONT_SAMPLE_RANK] = {0};
        bool inside = true;
        for (int d = s->rank - 1, rest = k; d >= 0; rest /= axes[d--].n) which[d] = rest % axes[d].n;
        double product = 1;
        for (int d = 0; d < s->rank; d++) {
            inside &= axes[d].cell[which[d]] >= 0;
            at = at * s->dims[d] + axes[d].cell[which[d]];
            product *= axes[d].weight[which[d]];
        }
        if (!inside) continue;
        for (int d = 0; slope && d < s->rank; d++) {
            double changed = axes[d].slope[which[d]];
            for (int e = 0; e < s->rank; e++)
                if (e != d) changed *= axes[e].weight[which[e]];
            slope[d * ONT_SAMPLE_TAPS + n] = changed;
        }
        index[n] = at;
        weight[n++] = product;
    }
    return n;
}
