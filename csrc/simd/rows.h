/*
 * Row loops (softmax, normalisation, dropout) for float32. Part of loops.inc.c, included by nothing else. A sum runs in
 * 16 partial sums: one AVX-512 register or two AVX2 registers, which also fixes the order of addition.
 */
#ifndef ONT_SIMD_ROWS_H
#define ONT_SIMD_ROWS_H

#include "base/prefetch.h"
#include "simd/philox_blocks.h"

enum { LANES = 16, PAGE = ONT_PREFETCH_DISTANCE / sizeof(float) }; /* elements */

/* With fewer than 16 terms, all are in the first partial sum. */
#define REDUCE_SUM(n, term, result) \
    do { \
        if ((n) < LANES) { \
            float sum_ = 0; \
            for (int64_t i = 0; i < (n); i++) sum_ += (term); \
            (result) = sum_; \
            break; \
        } \
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

/* The maximum through the order of the bits as integers, which is associative, so that the compiler vectorises it. */
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

static void row_add_taps(float *restrict y, const float *restrict x, const float *w, const int64_t *at, int64_t taps,
                         int64_t n)
{
    int64_t k = 0;
    for (; k + 4 <= taps; k += 4) {
        float a = w[k], b = w[k + 1], c = w[k + 2], d = w[k + 3];
        const float *restrict x0 = x + at[k], *restrict x1 = x + at[k + 1];
        const float *restrict x2 = x + at[k + 2], *restrict x3 = x + at[k + 3];
        for (int64_t i = 0; i < n; i++) y[i] += (a * x0[i] + b * x1[i]) + (c * x2[i] + d * x3[i]);
    }
    for (; k < taps; k++) {
        float a = w[k];
        const float *restrict x0 = x + at[k];
        for (int64_t i = 0; i < n; i++) y[i] += a * x0[i];
    }
}

static void row_add_to(float *acc, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) acc[i] += x[i];
}

/* Both halves are read before either is written, and no iteration reads what another writes. */
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
    float max_value = row_max(x, n);
    for (int64_t i = 0; i < n; i++) y[i] = f32_vexp_low(x[i] - max_value);
    float scale = 1 / row_sum(y, n);
    for (int64_t i = 0; i < n; i++) y[i] *= scale;
}

/*
 * part += exp(x - base) and top = max(top, x), lane by lane; NaN appears in the sums only. `prefetch`: whether to
 * prefetch one page ahead, a cache line at a time.
 */
INLINE void add_exponentials(const float *x, int64_t n, bool prefetch, float base, float part[LANES], float top[LANES])
{
    float sums[LANES], max_value[LANES];
    int64_t i = 0;
    memcpy(sums, part, sizeof sums);
    memcpy(max_value, top, sizeof max_value);
    for (; i + LANES <= n; i += LANES) {
        if (prefetch) ont_prefetch_read(x + i, sizeof sums);
        for (int lane = 0; lane < LANES; lane++) {
            sums[lane] += f32_vexp_low(x[i + lane] - base);
            max_value[lane] = x[i + lane] > max_value[lane] ? x[i + lane] : max_value[lane];
        }
    }
    for (; i < n; i++) {
        sums[0] += f32_vexp_low(x[i] - base);
        max_value[0] = x[i] > max_value[0] ? x[i] : max_value[0];
    }
    memcpy(part, sums, sizeof sums);
    memcpy(top, max_value, sizeof max_value);
}

/*
 * The row's largest element, and the logarithm of the sum of exp(x - largest): two numbers, since their sum would be
 * rounded. The row is read once: exponentials are of x minus the largest element of the first page. Where a later page
 * has an element so far above it that its exponential overflows float32, that page is read again with its own maximum.
 * As in PyTorch, a row of -inf gives NaN.
 */
static void row_log_sum_exp(const float *x, int64_t n, float *max_value, float *log_sum)
{
    const float far = 60;
    float part[LANES] = {0}, largest = -INFINITY, base = -INFINITY, sum;
    for (int64_t page = 0; page < n; page += PAGE) {
        int64_t count = n - page < PAGE ? n - page : PAGE;
        float top[LANES], sums[LANES];
        if (base == -INFINITY) base = row_max(x + page, count);
        if (base == -INFINITY) continue;
        for (int lane = 0; lane < LANES; lane++) top[lane] = -INFINITY, sums[lane] = part[lane];
        add_exponentials(x + page, count, n > PAGE, base, sums, top);
        for (int lane = 0; lane < LANES; lane++) largest = top[lane] > largest ? top[lane] : largest;
        if (largest - base > far) {
            float less = f32_vexp_low(base - largest);
            for (int lane = 0; lane < LANES; lane++) sums[lane] = part[lane] * less;
            base = largest;
            add_exponentials(x + page, count, false, base, sums, top);
        }
        memcpy(part, sums, sizeof part);
    }
    REDUCE_SUM(LANES, part[i], sum);
    if (sum != sum) largest = row_max(x, n); /* NaN or inf */
    *max_value = largest;
    *log_sum = !n ? -INFINITY : largest == -INFINITY ? NAN : logf(sum * f32_vexp_low(base - largest));
}

static void row_log_softmax(const float *x, float *y, int64_t n)
{
    float max_value, log_sum;
    row_log_sum_exp(x, n, &max_value, &log_sum);
    for (int64_t i = 0; i < n; i++) y[i] = (x[i] - max_value) - log_sum;
}

/* y may equal x. */
static void row_scaled_softmax(const float *x, float max_value, float log_sum, float scale, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        float out[LANES];
        if (n > PAGE) {
            ont_prefetch_write(y + i, sizeof out);
            if (y != x) ont_prefetch_read(x + i, sizeof out);
        }
        for (int lane = 0; lane < LANES; lane++) out[lane] = scale * f32_vexp_low((x[i + lane] - max_value) - log_sum);
        memcpy(y + i, out, sizeof out);
    }
    for (; i < n; i++) y[i] = scale * f32_vexp_low((x[i] - max_value) - log_sum);
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

static void row_layernorm(const ont_layernorm_params *norm, const float *x, float *y, float *mean, float *inv_std)
{
    const float *scale = norm->scale, *bias = norm->bias;
    const int64_t n = norm->n;
    float m = row_sum(x, n) / (float)n, v;
    REDUCE_SUM(n, (x[i] - m) * (x[i] - m), v);
    float s = 1 / sqrtf(v / (float)n + norm->eps);
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
static void row_layernorm_grad(const ont_layernorm_grad_params *norm, const float *x, float mean, float inv_std,
                               const float *dy, float *dx)
{
    const float *scale = norm->scale;
    float *dscale = norm->dscale, *dbias = norm->dbias, sum_g, sum_gx;
    const int64_t n = norm->n;
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
static void row_dropout(const ont_dropout_params *dropout, const float *x, float *y, uint8_t *mask, int64_t first,
                        int64_t n)
{
    const uint32_t threshold = dropout->threshold;
    const float scale = dropout->scale;
    int64_t end = first + n;
    for (int64_t block = first / 4; block * 4 < end; block += PHILOX_BLOCKS) {
        uint32_t bits[PHILOX_BLOCKS * 4];
        philox_blocks(dropout->key, dropout->stream, (uint64_t)block, bits);
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
