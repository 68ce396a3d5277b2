/*
 * The loops of batch normalisation, compiled once per instruction set with ONT_ISA naming it. See batchnorm.h. A sum runs in
 * 16 partial sums over at most 1,024 entries, which fixes the order of addition; those sums meet in double.
 */
#include "simd/batchnorm.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

enum { LANES = 16, BLOCK = 1024 };

/* Adds the sums of two terms in i over [from, to) to a and b. */
#define SUM_BLOCK(type, from, to, first, second, a, b) \
    do { \
        type first_[LANES] = {0}, second_[LANES] = {0}; \
        int64_t i_ = (from); \
        for (; i_ + LANES <= (to); i_ += LANES) \
            for (int lane_ = 0; lane_ < LANES; lane_++) { \
                int64_t i = i_ + lane_; \
                first_[lane_] += (first); \
                second_[lane_] += (second); \
            } \
        for (int lane_ = 0; i_ < (to); i_++, lane_++) { \
            int64_t i = i_; \
            first_[lane_] += (first); \
            second_[lane_] += (second); \
        } \
        for (int half_ = LANES / 2; half_; half_ /= 2) \
            for (int lane_ = 0; lane_ < half_; lane_++) { \
                first_[lane_] += first_[lane_ + half_]; \
                second_[lane_] += second_[lane_ + half_]; \
            } \
        (a) += (double)first_[0]; \
        (b) += (double)second_[0]; \
    } while (0)

#define FOR_BLOCKS(length, from, to) \
    for (int64_t from = 0, to; to = from + BLOCK < (length) ? from + BLOCK : (length), from < (length); from = to)

#define LOOPS(suffix, type) \
    static void statistics_##suffix(const ont_channel *s, const void *data, double *mean, double *variance) \
    { \
        double sum = 0, square = 0, rest = 0, count = (double)(s->pieces * s->length); \
        const type *x = data; \
        for (int64_t n = 0; n < s->pieces; n++, x += s->stride) \
            FOR_BLOCKS(s->length, from, to) SUM_BLOCK(type, from, to, x[i], 0, sum, rest); \
        const type m = (type)(sum / count); \
        x = data; \
        for (int64_t n = 0; n < s->pieces; n++, x += s->stride) \
            FOR_BLOCKS(s->length, from, to) SUM_BLOCK(type, from, to, (x[i] - m) * (x[i] - m), x[i] - m, square, rest); \
        *mean = sum / count; \
        /* around m, which is rounded, and not the mean */ \
        *variance = (square - rest * rest / count) / count; \
        if (*variance < 0) *variance = 0; \
    } \
    static void apply_##suffix(const ont_channel *s, const void *data, const void *added, double centre, double slope, \
                               double shift, bool relu, void *result) \
    { \
        const type *x = data, *r = added, m = (type)centre, a = (type)slope, b = (type)shift; \
        type *y = result; \
        for (int64_t n = 0; n < s->pieces; n++, x += s->stride, y += s->stride) { \
            if (r && relu) \
                for (int64_t i = 0; i < s->length; i++) { \
                    type v = (x[i] - m) * a + b + r[i]; \
                    y[i] = v < 0 ? 0 : v; \
                } \
            else if (r) \
                for (int64_t i = 0; i < s->length; i++) y[i] = (x[i] - m) * a + b + r[i]; \
            else if (relu) \
                for (int64_t i = 0; i < s->length; i++) { \
                    type v = (x[i] - m) * a + b; \
                    y[i] = v < 0 ? 0 : v; \
                } \
            else \
                for (int64_t i = 0; i < s->length; i++) y[i] = (x[i] - m) * a + b; \
            if (r) r += s->stride; \
        } \
    } \
    static void sums_##suffix(const ont_channel *s, const void *data, const void *result, const void *out_grad, double mean, \
                              double *sum, double *dot) \
    { \
        const type *x = data, *y = result, *dy = out_grad, m = (type)mean; \
        double total = 0, product = 0; \
        for (int64_t n = 0; n < s->pieces; n++, x += s->stride, dy += s->stride) { \
            FOR_BLOCKS(s->length, from, to) { \
                if (y) \
                    SUM_BLOCK(type, from, to, y[i] > 0 ? dy[i] : 0, (y[i] > 0 ? dy[i] : 0) * (x[i] - m), total, product); \
                else \
                    SUM_BLOCK(type, from, to, dy[i], dy[i] * (x[i] - m), total, product); \
            } \
            if (y) y += s->stride; \
        } \
        *sum = total; \
        *dot = product; \
    } \
    static void grad_##suffix(const ont_channel *s, const void *data, const void *result, const void *out_grad, double mean, \
                              double factor, double shift, double slope, void *in_grad) \
    { \
        const type *x = data, *y = result, *dy = out_grad; \
        const type m = (type)mean, f = (type)factor, b = (type)shift, a = (type)slope; \
        type *dx = in_grad; \
        for (int64_t n = 0; n < s->pieces; n++, x += s->stride, dy += s->stride, dx += s->stride) { \
            if (y) \
                for (int64_t i = 0; i < s->length; i++) dx[i] = f * ((y[i] > 0 ? dy[i] : 0) - b - (x[i] - m) * a); \
            else \
                for (int64_t i = 0; i < s->length; i++) dx[i] = f * (dy[i] - b - (x[i] - m) * a); \
            if (y) y += s->stride; \
        } \
    }
LOOPS(f32, float)
LOOPS(f64, double)

const ont_batchnorm_loops PASTE(ont_batchnorm_loops_, ONT_ISA)[] = {
    {statistics_f32, apply_f32, sums_f32, grad_f32},
    {statistics_f64, apply_f64, sums_f64, grad_f64},
};
