/*
 * Row loops (softmax, normalisation, dropout) for float32. Part of loops.inc.c, included by nothing else.
 * Sums run in 16 partial sums: that is one AVX-512 or two AVX2 registers, and it fixes the order of addition.
 */
#ifndef ONT_SIMD_ROWS_H
#define ONT_SIMD_ROWS_H

#include "base/fetch.h"
#include "simd/philox_blocks.h"

enum { LANES = 16, FETCHED = 256, PAGE = ONT_FETCH_PAGE / sizeof(float) }; /* elements: asked for at a time */

#define REDUCE_SUM(n, term, result) \
    do { \
        float part_[LANES] = {0}; \
        int64_t i_ = 0; \
        for (; i_ + LANES <= (n); i_ += LANES) \
            for (int lane_ = 0; lane_ < LANES; lane_++) { \
                int64_t i = i_ + lane_; \
                part_[lane_] += (term); \
            } \
        for (; i_ < (n); i_++) { \
            int64_t i = i_; \
            part_[0] += (term); \
        } \
        for (int half_ = LANES / 2; half_; half_ /= 2) \
            for (int lane_ = 0; lane_ < half_; lane_++) part_[lane_] += part_[lane_ + half_]; \
        (result) = part_[0]; \
    } while (0)

static float row_sum(const float *x, int64_t n)
{
    float sum;
    REDUCE_SUM(n, x[i], sum);
    return sum;
}

static float row_dot(const float *x, const float *y, int64_t n)
{
    float sum;
    REDUCE_SUM(n, x[i] * y[i], sum);
    return sum;
}

/* By the order of the bits as integers, of which the largest is found in any order: the compiler may use vectors. */
static float row_max(const float *x, int64_t n)
{
    int32_t best = INT32_MIN, nan = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        int32_t magnitude = bits & 0x7fffffff, key = bits < 0 ? -magnitude : magnitude;
        nan |= magnitude > 0x7f800000;
        best = key > best ? key : best;
    }
    return nan ? NAN : best < 0 ? -f32_from_bits((uint32_t)-best) : f32_from_bits((uint32_t)best);
}

static void row_add_to(float *acc, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) acc[i] += x[i];
}

/* Both halves are read before either is written, and no step reads what another writes. */
#define ROTATE(name, type) \
    static void name(const type *x, const type *c, const type *s, type *y, int64_t half, bool back) \
    { \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < half; i++) \
        { \
            type a = x[i], b = x[half + i], p = back ? -s[half + i] : s[i], q = back ? -s[i] : s[half + i]; \
            y[i] = a * c[i] - b * p; \
            y[half + i] = b * c[half + i] + a * q; \
        } \
    }
ROTATE(row_rotate, float)
ROTATE(row_rotate_wide, double)

static void row_softmax(const float *x, float *y, int64_t n)
{
    float most = row_max(x, n);
    for (int64_t i = 0; i < n; i++) y[i] = f32_vexp_low(x[i] - most);
    float scale = 1 / row_sum(y, n);
    for (int64_t i = 0; i < n; i++) y[i] *= scale;
}

/* part += exp(x - most), lane by lane. */
INLINE void add_exponentials(const float *x, int64_t n, float most, float part[LANES])
{
    float sums[LANES];
    int64_t i = 0;
    memcpy(sums, part, sizeof sums);
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += f32_vexp_low(x[i + lane] - most);
    for (; i < n; i++) sums[0] += f32_vexp_low(x[i] - most);
    memcpy(part, sums, sizeof sums);
}

/*
 * The row's largest element and the logarithm of the sum of exp(x - largest): two numbers, for their sum would round.
 * Read once, a page at a time: where a page has a larger element, what was summed before it becomes smaller. A row of
 * nothing but -inf has NaN, as in torch.
 */
static void row_log_sum_exp(const float *x, int64_t n, float *most, float *log_sum)
{
    float part[LANES] = {0}, largest = -INFINITY, sum;
    for (int64_t page = 0; page < n; page += PAGE) {
        int64_t end = page + PAGE < n ? page + PAGE : n;
        float here = row_max(x + page, end - page);
        if (!(here <= largest)) {
            float less = f32_vexp_low(largest - here);
            for (int lane = 0; lane < LANES; lane++) part[lane] *= less;
            largest = here;
        }
        for (int64_t at = page; at < end; at += FETCHED) {
            if (n > PAGE) ont_fetch_ahead(x + at, FETCHED * sizeof *x);
            if (largest > -INFINITY) add_exponentials(x + at, end - at < FETCHED ? end - at : FETCHED, largest, part);
        }
    }
    REDUCE_SUM(LANES, part[i], sum);
    *most = largest;
    *log_sum = n && largest == -INFINITY ? NAN : logf(sum);
}

static void row_log_softmax(const float *x, float *y, int64_t n)
{
    float most, log_sum;
    row_log_sum_exp(x, n, &most, &log_sum);
    for (int64_t i = 0; i < n; i++) y[i] = (x[i] - most) - log_sum;
}

static void row_scaled_softmax(const float *x, float most, float log_sum, float scale, float *y, int64_t n)
{
    for (int64_t at = 0; at < n; at += FETCHED) {
        if (n > PAGE) {
            ont_fetch_to_write(y + at, FETCHED * sizeof *y);
            if (y != x) ont_fetch_ahead(x + at, FETCHED * sizeof *x);
        }
        for (int64_t i = at, end = at + FETCHED < n ? at + FETCHED : n; i < end; i++)
            y[i] = scale * f32_vexp_low((x[i] - most) - log_sum);
    }
}

static void row_softmax_grad(const float *y, const float *dy, float *dx, int64_t n)
{
    float dot = row_dot(y, dy, n);
    for (int64_t i = 0; i < n; i++) dx[i] = y[i] * (dy[i] - dot);
}

static void row_log_softmax_grad(const float *y, const float *dy, float *dx, int64_t n)
{
    float sum = row_sum(dy, n);
    for (int64_t i = 0; i < n; i++) dx[i] = dy[i] - f32_vexp_low(y[i]) * sum;
}

static void row_layernorm(const float *x, const float *scale, const float *bias, float eps, float *y, float *mean,
                          float *inv_std, int64_t n)
{
    float m = row_sum(x, n) / (float)n, v;
    REDUCE_SUM(n, (x[i] - m) * (x[i] - m), v);
    float s = 1 / sqrtf(v / (float)n + eps);
    if (scale && bias)
        for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) * s * scale[i] + bias[i];
    else if (scale)
        for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) * s * scale[i];
    else
        for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) * s + (bias ? bias[i] : 0);
    if (mean) *mean = m;
    if (inv_std) *inv_std = s;
}

/* dx = inv_std * (g - mean(g) - xhat * mean(g * xhat)), g = dy * scale, xhat = (x - mean) * inv_std */
static void row_layernorm_grad(const float *x, const float *scale, float mean, float inv_std, const float *dy,
                               float *dx, float *dscale, float *dbias, int64_t n)
{
    float sum_g, sum_gx;
    if (scale) {
        REDUCE_SUM(n, dy[i] * scale[i], sum_g);
        REDUCE_SUM(n, dy[i] * scale[i] * (x[i] - mean), sum_gx);
    } else {
        REDUCE_SUM(n, dy[i], sum_g);
        REDUCE_SUM(n, dy[i] * (x[i] - mean), sum_gx);
    }
    sum_g /= (float)n;
    sum_gx *= inv_std * inv_std / (float)n;
    if (dscale)
        for (int64_t i = 0; i < n; i++) dscale[i] += dy[i] * (x[i] - mean) * inv_std;
    if (dbias)
        for (int64_t i = 0; i < n; i++) dbias[i] += dy[i];
    if (!dx) return;
    if (scale)
        for (int64_t i = 0; i < n; i++) dx[i] = inv_std * (dy[i] * scale[i] - sum_g - (x[i] - mean) * sum_gx);
    else
        for (int64_t i = 0; i < n; i++) dx[i] = inv_std * (dy[i] - sum_g - (x[i] - mean) * sum_gx);
}

/* Element e takes word e % 4 of Philox block e / 4; many blocks are computed at a time. */
static void row_dropout(const float *x, float *y, uint8_t *mask, int64_t first, int64_t n, uint64_t key,
                        uint64_t stream, uint32_t threshold, float scale)
{
    int64_t end = first + n;
    for (int64_t block = first / 4; block * 4 < end; block += PHILOX_BLOCKS) {
        uint32_t bits[PHILOX_BLOCKS * 4];
        philox_blocks(key, stream, (uint64_t)block, bits);
        int64_t from = block * 4 < first ? first : block * 4;
        int64_t to = (block + PHILOX_BLOCKS) * 4 < end ? (block + PHILOX_BLOCKS) * 4 : end;
        int64_t base = block * 4;
        if (y)
            for (int64_t e = from; e < to; e++) y[e - first] = bits[e - base] >= threshold ? x[e - first] * scale : 0;
        if (mask)
            for (int64_t e = from; e < to; e++) mask[e - first] = bits[e - base] >= threshold;
    }
}

#endif
