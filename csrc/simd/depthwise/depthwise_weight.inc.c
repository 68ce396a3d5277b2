/*
 * The loops of a depthwise convolution's weight gradient, compiled once per instruction set; ONT_ISA names it. See
 * depthwise_weight.h.
 */
#include "simd/depthwise/depthwise_weight.h"

#include "simd/lanes.h"

enum { DOTS = 12 /* taps at a time: as many sums as registers hold */ };

/* Copies n elements by vectors, of which the last overlaps the one before. */
INLINE void copy(float *to, const float *from, int64_t n)
{
    if (n >= LANES) {
        for (int64_t i = 0; i + LANES < n; i += LANES) store(to + i, load(from + i));
        store(to + n - LANES, load(from + n - LANES));
    } else if (n >= 4) {
        for (int64_t i = 0; i + 4 < n; i += 4) *(quad_any *)(to + i) = *(const quad_any *)(from + i);
        *(quad_any *)(to + n - 4) = *(const quad_any *)(from + n - 4);
    } else {
        for (int64_t i = 0; i < n; i++) to[i] = from[i];
    }
}

static void pack(float *restrict to, int64_t to_pitch, const float *restrict from, int64_t from_pitch, int64_t step,
                 int64_t rows, int64_t n)
{
    for (; rows; rows--, to += to_pitch, from += from_pitch) {
        if (step == 1)
            copy(to, from, n);
        else if (step == 2)
            for (int64_t i = 0; i < n; i++) to[i] = from[2 * i];
        else
            for (int64_t i = 0; i < n; i++) to[i] = from[i * step];
    }
}

INLINE void dot(float *sums, const float *y, const float *x, const int64_t *at, const int taps, int64_t n)
{
    vec lanes[DOTS];
#pragma GCC unroll 12
    for (int k = 0; k < taps; k++) lanes[k] = (vec){0};
    for (int64_t i = 0; i < n; i += LANES) {
        vec v = load(y + i);
#pragma GCC unroll 12
        for (int k = 0; k < taps; k++) lanes[k] += v * load(x + i + at[k]);
    }
    for (int k = 0; k < taps; k++) {
        sums[k] = 0;
        for (int lane = 0; lane < LANES; lane++) sums[k] += lanes[k][lane];
    }
}

/* Taps in parts of nearly equal numbers: a part of one would wait for each of its additions. */
static void dot_taps(float *sums, const float *y, const float *x, const int64_t *at, int64_t taps, int64_t n)
{
    for (int64_t parts = (taps + DOTS - 1) / DOTS, count; parts; parts--, taps -= count, sums += count, at += count) {
        count = (taps + parts - 1) / parts;
        switch (count) {
        case 1: dot(sums, y, x, at, 1, n); break;
        case 2: dot(sums, y, x, at, 2, n); break;
        case 3: dot(sums, y, x, at, 3, n); break;
        case 4: dot(sums, y, x, at, 4, n); break;
        case 5: dot(sums, y, x, at, 5, n); break;
        case 6: dot(sums, y, x, at, 6, n); break;
        case 7: dot(sums, y, x, at, 7, n); break;
        case 8: dot(sums, y, x, at, 8, n); break;
        case 9: dot(sums, y, x, at, 9, n); break;
        case 10: dot(sums, y, x, at, 10, n); break;
        case 11: dot(sums, y, x, at, 11, n); break;
        default: dot(sums, y, x, at, DOTS, n); break;
        }
    }
}

const ont_depthwise_loops PASTE(ont_depthwise_loops_, ONT_ISA) = {pack, dot_taps};
