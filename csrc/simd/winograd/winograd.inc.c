/*
 * The loops of Winograd convolution, compiled once per instruction set; ONT_ISA names it. See winograd.h.
 */
#include <string.h>

#include "simd/winograd/winograd.h"

#include "simd/lanes.h"

/* Rows of a product that are accumulated in registers, two vectors each. */
enum { ROWS = LANES == 16 ? 8 : 4 };

/* Interpolation points: 0, A, -A, B, -B and infinity. Their squares and products are exact in float. */
#define A 0.625f
#define B 1.5f
#define A2 (A * A)
#define B2 (B * B)
#define SUM (A2 + B2)
#define PRODUCT (A2 * B2)
/* 1 / product of the differences to the other points; applied to the weights. */
#define F0 (1 / PRODUCT)
#define FA (1 / (2 * A2 * (A2 - B2)))
#define FB (1 / (2 * B2 * (B2 - A2)))

/* ---- channels to lanes, and back ---- */

static void gather(const float *x, int64_t stride, int64_t lanes, int64_t width, float *out)
{
    int64_t whole = lanes / 4 * 4, quads = width / 4 * 4;
    for (int64_t lane = 0; lane < whole; lane += 4) {
        const float *from = x + lane * stride;
        for (int64_t i = 0; i < quads; i += 4) {
            quad r[4];
            for (int k = 0; k < 4; k++) r[k] = *(const quad_any *)(from + k * stride + i);
            transpose_4x4(r);
            for (int k = 0; k < 4; k++) *(quad_any *)(out + (i + k) * ONT_WINO_LANES + lane) = r[k];
        }
        for (int64_t i = quads; i < width; i++)
            for (int k = 0; k < 4; k++) out[i * ONT_WINO_LANES + lane + k] = from[k * stride + i];
    }
    for (int64_t i = 0; i < width && whole < ONT_WINO_LANES; i++)
        for (int64_t lane = whole; lane < ONT_WINO_LANES; lane++)
            out[i * ONT_WINO_LANES + lane] = lane < lanes ? x[lane * stride + i] : 0;
}

static void scatter(const float *in, int64_t stride, int64_t lanes, int64_t width, float *y)
{
    int64_t whole = lanes / 4 * 4, quads = width / 4 * 4;
    for (int64_t lane = 0; lane < whole; lane += 4) {
        float *to = y + lane * stride;
        for (int64_t i = 0; i < quads; i += 4) {
            quad r[4];
            for (int k = 0; k < 4; k++) r[k] = *(const quad_any *)(in + (i + k) * ONT_WINO_LANES + lane);
            transpose_4x4(r);
            for (int k = 0; k < 4; k++) *(quad_any *)(to + k * stride + i) = r[k];
        }
        for (int64_t i = quads; i < width; i++)
            for (int k = 0; k < 4; k++) to[k * stride + i] = in[i * ONT_WINO_LANES + lane + k];
    }
    for (int64_t lane = whole; lane < lanes; lane++)
        for (int64_t i = 0; i < width; i++) y[lane * stride + i] = in[i * ONT_WINO_LANES + lane];
}

/* ---- transforms: one dimension each, applied to columns and then to rows ---- */

/* Coefficients of the product of (x - point) over all points but one; the last: over all. */
INLINE void input_1d(const vec d[6], vec t[6])
{
    vec even = d[4] - B2 * d[2], odd = d[3] - B2 * d[1], even2 = d[4] - A2 * d[2], odd2 = d[3] - A2 * d[1];
    t[0] = PRODUCT * d[0] + (d[4] - SUM * d[2]);
    t[1] = even + A * odd;
    t[2] = even - A * odd;
    t[3] = even2 + B * odd2;
    t[4] = even2 - B * odd2;
    t[5] = PRODUCT * d[1] + (d[5] - SUM * d[3]);
}

/* Values at the points of a polynomial with three (filter) or four (gradient) coefficients. */
INLINE void filter_1d(const vec g[3], vec t[6])
{
    vec a = FA * g[0] + (FA * A2) * g[2], b = FB * g[0] + (FB * B2) * g[2];
    t[0] = F0 * g[0];
    t[1] = a + (FA * A) * g[1];
    t[2] = a - (FA * A) * g[1];
    t[3] = b + (FB * B) * g[1];
    t[4] = b - (FB * B) * g[1];
    t[5] = g[2];
}

INLINE void gradient_1d(const vec g[4], vec t[6])
{
    vec a = FA * g[0] + (FA * A2) * g[2], a1 = (FA * A) * g[1] + (FA * A2 * A) * g[3];
    vec b = FB * g[0] + (FB * B2) * g[2], b1 = (FB * B) * g[1] + (FB * B2 * B) * g[3];
    t[0] = F0 * g[0];
    t[1] = a + a1;
    t[2] = a - a1;
    t[3] = b + b1;
    t[4] = b - b1;
    t[5] = g[3];
}

/* The inverse: n coefficients from values at the points. */
INLINE void inverse_1d(const vec m[6], vec *y, int n)
{
    vec plus_a = m[1] + m[2], minus_a = m[1] - m[2], plus_b = m[3] + m[4], minus_b = m[3] - m[4];
    y[0] = m[0] + plus_a + plus_b;
    y[1] = A * minus_a + B * minus_b;
    y[2] = A2 * plus_a + B2 * plus_b;
    if (n == 4) y[3] = (A2 * A) * minus_a + (B2 * B * minus_b + m[5]);
    else y[2] += m[5];
}

/* Transforms `from` x `from` numbers at `x` to 36, `plane` apart. */
#define FORWARD(name, from, one) \
    INLINE void name##_lanes(const float *x, int64_t row, int64_t column, float *out, int64_t plane) \
    { \
        vec half[6][from]; \
        for (int c = 0; c < from; c++) { \
            vec d[from], t[6]; \
            for (int r = 0; r < from; r++) d[r] = load(x + r * row + c * column); \
            one(d, t); \
            for (int r = 0; r < 6; r++) half[r][c] = t[r]; \
        } \
        for (int r = 0; r < 6; r++) { \
            vec t[6]; \
            one(half[r], t); \
            for (int c = 0; c < 6; c++) store(out + (r * 6 + c) * plane, t[c]); \
        } \
    }
FORWARD(input, 6, input_1d)
FORWARD(gradient, 4, gradient_1d)
FORWARD(filter, 3, filter_1d)

/* Transforms 36 numbers back to n x n. */
INLINE void inverse_lanes(const float *m, int64_t plane, vec bias, float *y, int64_t row, int n)
{
    vec half[4][6];
    for (int c = 0; c < 6; c++) {
        vec d[6], t[4];
        for (int r = 0; r < 6; r++) d[r] = load(m + (r * 6 + c) * plane);
        inverse_1d(d, t, n);
        for (int r = 0; r < n; r++) half[r][c] = t[r];
    }
    for (int r = 0; r < n; r++) {
        vec t[4];
        inverse_1d(half[r], t, n);
        for (int c = 0; c < n; c++) store(y + r * row + c * ONT_WINO_LANES, t[c] + bias);
    }
}

static void input(const float *tile, int64_t row, float *v, int64_t plane)
{
    for (int l = 0; l < ONT_WINO_LANES; l += LANES) input_lanes(tile + l, row, ONT_WINO_LANES, v + l, plane);
}

static void gradient(const float *tile, int64_t row, float *w, int64_t plane)
{
    for (int l = 0; l < ONT_WINO_LANES; l += LANES) gradient_lanes(tile + l, row, ONT_WINO_LANES, w + l, plane);
}

static void filter(const float *taps, int64_t step, float *u, int64_t plane)
{
    for (int l = 0; l < ONT_WINO_LANES; l += LANES) filter_lanes(taps + l, 3 * step, step, u + l, plane);
}

static void output(const float *m, int64_t plane, const float *bias, float *y, int64_t row)
{
    for (int l = 0; l < ONT_WINO_LANES; l += LANES) inverse_lanes(m + l, plane, load(bias + l), y + l, row, 4);
}

static void filter_grad(const float *m, int64_t plane, float *taps)
{
    for (int l = 0; l < ONT_WINO_LANES; l += LANES)
        inverse_lanes(m + l, plane, (vec){0}, taps + l, 3 * ONT_WINO_LANES, 3);
}

/* ---- products ---- */

/* Strides in a product's operands: from row to row of lhs, and from one term of the sums to the next. */
typedef struct strides {
    int64_t lhs_row, lhs_term, rhs_term;
} strides;

/* acc[row][0..1] += lhs[row * lhs_row + i * lhs_term] * (rhs0, rhs1)[i * rhs_term], i < n */
INLINE void multiply(vec acc[ROWS][2], const float *lhs, const float *rhs0, const float *rhs1, const strides s,
                     int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        vec left = load(rhs0 + i * s.rhs_term), right = load(rhs1 + i * s.rhs_term);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            vec x = lhs[r * s.lhs_row + i * s.lhs_term] - (vec){0};
            acc[r][0] += x * left;
            acc[r][1] += x * right;
        }
    }
}

INLINE void put(vec acc[ROWS][2], float *m, bool add)
{
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < 2; k++) {
            float *to = m + r * ONT_WINO_WIDTH + k * LANES;
            store(to, add ? load(to) + acc[r][k] : acc[r][k]);
        }
}

static void product(const float *v, int64_t v_block, const float *u, float *m, int64_t blocks, int64_t channel_blocks,
                    bool add)
{
    enum { CELLS = ONT_WINO_TILES * ONT_WINO_LANES, CHUNK = 2 };
    const strides s = {.lhs_row = ONT_WINO_LANES, .lhs_term = 1, .rhs_term = ONT_WINO_WIDTH};
    for (int64_t block = 0; block < blocks; block++, v += v_block, m += ONT_WINO_TILES * ONT_WINO_WIDTH)
        for (int64_t c = 0; c < channel_blocks; c += CHUNK)
            for (int r = 0; r < ONT_WINO_TILES; r += ROWS)
                for (int k = 0; k < ONT_WINO_WIDTH; k += 2 * LANES) {
                    vec acc[ROWS][2] = {0};
                    for (int64_t b = c; b < c + CHUNK && b < channel_blocks; b++) {
                        const float *right = u + b * ONT_WINO_LANES * ONT_WINO_WIDTH + k;
                        multiply(acc, v + b * CELLS + r * ONT_WINO_LANES, right, right + LANES, s, ONT_WINO_LANES);
                    }
                    put(acc, m + r * ONT_WINO_WIDTH + k, add || c);
                }
}

static void product_grad(const float *w, const float *v, int64_t half, float *m, int64_t tiles, bool add)
{
    const strides s = {.lhs_row = 1, .lhs_term = ONT_WINO_LANES, .rhs_term = ONT_WINO_LANES};
    for (int k = 0; k < ONT_WINO_WIDTH; k += 2 * LANES)
        for (int r = 0; r < ONT_WINO_LANES; r += ROWS) {
            vec acc[ROWS][2] = {0};
            int next = k + LANES;
            multiply(acc, w + r, v + k / ONT_WINO_LANES * half + k % ONT_WINO_LANES,
                     v + next / ONT_WINO_LANES * half + next % ONT_WINO_LANES, s, tiles);
            put(acc, m + r * ONT_WINO_WIDTH + k, add);
        }
}

const ont_winograd_loops PASTE(ont_winograd_loops_, ONT_ISA) = {
    .gather = gather, .scatter = scatter, .input = input, .gradient = gradient, .filter = filter, .output = output,
    .filter_grad = filter_grad, .product = product, .product_grad = product_grad,
};
