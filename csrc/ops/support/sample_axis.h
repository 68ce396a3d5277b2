/*
 * The taps of one coordinate along one axis, for sample.c and for a device (cuda/kernels/grid_sample.cu).
 * Edges as in torch.nn.functional.grid_sample, which the specification follows: a clipped coordinate has no slope, a
 * reflected one changes its sign, cubic taps are padded one by one. Cubic weights: R. G. Keys, Cubic convolution
 * interpolation, 1981, with a = -0.75.
 */
#ifndef ONT_OPS_SAMPLE_AXIS_H
#define ONT_OPS_SAMPLE_AXIS_H

#include <math.h>

#include "ops/support/sample.h"

#ifndef ONT_FUNCTION
#define ONT_FUNCTION static inline
#endif

typedef struct ont_axis_taps {
    int n;
    int64_t cell[4]; /* -1: outside, with value zero */
    double weight[4], slope[4];
} ont_axis_taps;

/* x clipped to [0, size - 1]; *sign is multiplied by the derivative. */
ONT_FUNCTION double ont_sample_clipped(double x, int64_t size, double *sign)
{
    double max = (double)(size - 1);
    if (x > 0 && x < max) return x;
    *sign = 0;
    return x >= max ? max : 0;
}

ONT_FUNCTION double ont_sample_reflected(double x, int64_t size, bool corners, double *sign)
{
    double low = corners ? 0 : -0.5, span = corners ? (double)(size - 1) : (double)size;
    if (span <= 0) {
        *sign = 0;
        return 0;
    }
    double from = x - low;
    if (from < 0) {
        from = -from;
        *sign = -*sign;
    }
    double extra = fmod(from, span);
    bool back = fmod(floor(from / span), 2.0) != 0;
    if (back) *sign = -*sign;
    return back ? span - extra + low : extra + low;
}

ONT_FUNCTION double ont_sample_padded(const ont_sampler *s, int axis, double x, double *sign)
{
    if (s->padding == ONT_SAMPLE_ZEROS) return x;
    if (s->padding == ONT_SAMPLE_REFLECTION) x = ont_sample_reflected(x, s->dims[axis], s->corners, sign);
    return ont_sample_clipped(x, s->dims[axis], sign);
}

ONT_FUNCTION int64_t ont_sample_cell(const ont_sampler *s, int axis, double x)
{
    return x >= 0 && x < (double)s->dims[axis] ? (int64_t)x : -1;
}

ONT_FUNCTION void ont_cubic_taps(const ont_sampler *s, int axis, double x, ont_axis_taps *t)
{
    const double a = -0.75;
    double left = floor(x), f = x - left, unused = 1;
    t->n = 4;
    for (int i = 0; i < 4; i++) {
        double u = fabs(f + 1 - i), side = f + 1 - i < 0 ? -1 : 1; /* distance of the tap from the point */
        bool inner = i == 1 || i == 2;
        t->weight[i] = inner ? ((a + 2) * u - (a + 3)) * u * u + 1 : ((a * u - 5 * a) * u + 8 * a) * u - 4 * a;
        t->slope[i] = side * (inner ? (3 * (a + 2) * u - 2 * (a + 3)) * u : (3 * a * u - 10 * a) * u + 8 * a);
        t->cell[i] = ont_sample_cell(s, axis, ont_sample_padded(s, axis, left - 1 + i, &unused));
    }
}

ONT_FUNCTION void ont_sample_axis(const ont_sampler *s, int axis, double x, ont_axis_taps *t)
{
    if (!isfinite(x) && s->mode != ONT_SAMPLE_NEAREST &&
        (s->padding == ONT_SAMPLE_ZEROS || s->mode == ONT_SAMPLE_CUBIC)) { /* NaN, as in torch, not zero */
        t->n = 1;
        t->cell[0] = 0;
        t->weight[0] = t->slope[0] = NAN;
        return;
    }
    if (!(x > -1e15 && x < 1e15)) x = -100; /* far outside */
    if (s->mode == ONT_SAMPLE_CUBIC) {
        ont_cubic_taps(s, axis, x, t);
        return;
    }
    double sign = 1;
    x = ont_sample_padded(s, axis, x, &sign);
    if (s->mode == ONT_SAMPLE_NEAREST) {
        t->n = 1;
        t->weight[0] = 1;
        t->slope[0] = 0;
        t->cell[0] = ont_sample_cell(s, axis, rint(x));
        return;
    }
    double left = floor(x), f = x - left;
    t->n = 2;
    t->weight[0] = 1 - f;
    t->weight[1] = f;
    t->slope[0] = -sign;
    t->slope[1] = sign;
    t->cell[0] = ont_sample_cell(s, axis, left);
    t->cell[1] = ont_sample_cell(s, axis, left + 1);
}

/* Cells in a unit of a grid's coordinates, which are in [-1, 1]. */
ONT_FUNCTION double ont_sample_unit(const ont_sampler *s, int axis)
{
    return (double)(s->corners ? s->dims[axis] - 1 : s->dims[axis]) / 2;
}

#endif
