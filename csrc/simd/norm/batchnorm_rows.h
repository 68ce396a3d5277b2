/*
 * Bodies of batchnorm.inc.c over several rows, with coefficients and sums for each column; part of batchnorm_loops.h,
 * included by nothing else. Four rows are added up before the column sums are read and written once.
 */

/* GET(p) reads a vector at p, PUT(p, v) writes one. Whole vectors first, then the rest of the row. */
#define FOR_COLUMNS(n, STEP) \
    do { \
        int64_t j = 0; \
        for (; j + LANES <= (n); j += LANES) STEP(F(load), F(store)); \
        if (j < (n)) { \
            const int64_t some = (n) - j; \
            STEP(GET_SOME, PUT_SOME); \
        } \
    } while (0)
#define GET_SOME(p) F(load_some)((p), some)
#define PUT_SOME(p, v) F(store_some)((p), (v), some)

/* a, b = sums over the rows of x - x[0] and of its square */
static void F(rows_squares)(const void *data, const ont_batchnorm_rows *shape, void *sums, void *squares)
{
    const int64_t stride = shape->stride, rows = shape->rows, n = shape->columns;
    const NUM *x = data;
    NUM *a = sums, *b = squares;
    memset(a, 0, (size_t)n * sizeof *a);
    memset(b, 0, (size_t)n * sizeof *b);
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        const NUM *p = x + i * stride, *q = p + stride, *r = q + stride, *t = r + stride;
#define STEP(GET, PUT) \
    do { \
        VEC c_ = GET(x + j), p_ = GET(p + j) - c_, q_ = GET(q + j) - c_, r_ = GET(r + j) - c_, t_ = GET(t + j) - c_; \
        PUT(a + j, GET(a + j) + ((p_ + q_) + (r_ + t_))); \
        PUT(b + j, GET(b + j) + ((p_ * p_ + q_ * q_) + (r_ * r_ + t_ * t_))); \
    } while (0)
        FOR_COLUMNS(n, STEP);
#undef STEP
    }
    for (; i < rows; i++) {
        const NUM *p = x + i * stride;
#define STEP(GET, PUT) \
    do { \
        VEC p_ = GET(p + j) - GET(x + j); \
        PUT(a + j, GET(a + j) + p_); \
        PUT(b + j, GET(b + j) + p_ * p_); \
    } while (0)
        FOR_COLUMNS(n, STEP);
#undef STEP
    }
}

/* Converts sums of differences from x to sums of differences from `base`, and adds them. */
static void F(join)(const void *first, const void *base_row, const ont_batchnorm_rows *shape, const void *sums,
                    const void *squares, double *sum, double *dot)
{
    const NUM *x = first, *base = base_row, *a = sums, *b = squares;
    const double m = (double)shape->rows;
    const int64_t n = shape->columns;
    for (int64_t j = 0; !x && j < n; j++) {
        sum[j] += (double)a[j];
        dot[j] += (double)b[j];
    }
    for (int64_t j = 0; x && j < n; j++) {
        double off = (double)x[j] - (double)base[j], a_ = (double)a[j];
        sum[j] += a_ + m * off;
        dot[j] += (double)b[j] + off * (2 * a_ + m * off);
    }
}

INLINE void F(rows_apply_form)(const ont_channels *c, const NUM *x, const NUM *res, bool relu, NUM *y,
                               const ont_batchnorm_rows *shape)
{
    const int64_t stride = shape->stride, rows = shape->rows, n = shape->columns;
    const NUM *centre = c->centre, *slopes = c->slope, *shifts = c->shift;
    for (int64_t i = 0; i < rows; i++, x += stride, y += stride) {
#define STEP(GET, PUT) \
    do { \
        VEC m = GET(centre + j), slope = GET(slopes + j), shift = GET(shifts + j), v = VALUE(GET(x + j)); \
        if (res) v += GET(res + j); \
        PUT(y + j, relu ? F(rectified)(v) : v); \
    } while (0)
        FOR_COLUMNS(n, STEP);
#undef STEP
        if (res) res += stride;
    }
}

static void F(rows_apply)(const ont_channels *c, const void *x, const void *residual, bool relu, void *y,
                          const ont_batchnorm_rows *shape)
{
    if (residual && relu)
        F(rows_apply_form)(c, x, residual, true, y, shape);
    else if (residual)
        F(rows_apply_form)(c, x, residual, false, y, shape);
    else if (relu)
        F(rows_apply_form)(c, x, NULL, true, y, shape);
    else
        F(rows_apply_form)(c, x, NULL, false, y, shape);
}

/* At column k: dy under the mask as g_, and x - centre as d_. */
#define TAKE(GET, k) \
    VEC x_ = GET(x + (k)), d_ = x_ - m, g_ = MASKED(GET(dy + (k)), x_, GET(y + (k)))

/* `mask`: g->mask, known when this is inlined */
INLINE void F(rows_grad_sums_form)(const ont_channels *c, ont_relu_mask mask, const ont_batchnorm_gradient *g,
                                   const ont_batchnorm_rows *shape, NUM *a, NUM *b)
{
    const NUM *x = g->x, *y = g->y, *dy = g->dy;
    const int64_t stride = shape->stride, rows = shape->rows, n = shape->columns;
    const NUM *centre = c->centre, *slopes = c->slope, *shifts = c->shift;
    memset(a, 0, (size_t)n * sizeof *a);
    memset(b, 0, (size_t)n * sizeof *b);
    int64_t i = 0;
    for (; i < rows; i += 4) {
        const int64_t some_rows = rows - i < 4 ? rows - i : 4, start = i * stride;
#define STEP(GET, PUT) \
    do { \
        VEC m = GET(centre + j), slope = mask == ONT_MASK_V ? GET(slopes + j) : (VEC){0}; \
        VEC shift = mask == ONT_MASK_V ? GET(shifts + j) : (VEC){0}, s_ = {0}, e_ = {0}; \
        (void)slope, (void)shift; \
        for (int64_t k = start + j, left = some_rows; left; left--, k += stride) { \
            TAKE(GET, k); \
            s_ += g_; \
            e_ += g_ * d_; \
        } \
        PUT(a + j, GET(a + j) + s_); \
        PUT(b + j, GET(b + j) + e_); \
    } while (0)
        FOR_COLUMNS(n, STEP);
#undef STEP
    }
}

static void F(rows_grad_sums)(const ont_channels *c, const ont_batchnorm_gradient *g, const ont_batchnorm_rows *shape,
                              void *a, void *b)
{
    if (g->mask == ONT_MASK_NONE)
        F(rows_grad_sums_form)(c, ONT_MASK_NONE, g, shape, a, b);
    else if (g->mask == ONT_MASK_Y)
        F(rows_grad_sums_form)(c, ONT_MASK_Y, g, shape, a, b);
    else
        F(rows_grad_sums_form)(c, ONT_MASK_V, g, shape, a, b);
}

INLINE void F(rows_grad_form)(const ont_channels *c, ont_relu_mask mask, const ont_batchnorm_gradient *g,
                              const NUM *mean_dy, const NUM *mean_dot, NUM *dx, const ont_batchnorm_rows *shape)
{
    const NUM *x = g->x, *y = g->y, *dy = g->dy;
    const int64_t stride = shape->stride, rows = shape->rows, n = shape->columns;
    const NUM *centre = c->centre, *slopes = c->slope, *shifts = c->shift;
    for (int64_t i = 0; i < rows; i++, x += stride, dy += stride, dx += stride) {
#define STEP(GET, PUT) \
    do { \
        VEC m = GET(centre + j), slope = GET(slopes + j), shift = mask == ONT_MASK_V ? GET(shifts + j) : (VEC){0}; \
        (void)shift; \
        TAKE(GET, j); \
        VEC e_ = GET(mean_dot + j); \
        PUT(dx + j, slope * (g_ - GET(mean_dy + j) - SHARE(d_, e_))); \
    } while (0)
        FOR_COLUMNS(n, STEP);
#undef STEP
        if (mask == ONT_MASK_Y) y += stride;
    }
}

static void F(rows_grad)(const ont_channels *c, const ont_batchnorm_gradient *g, const void *mean_dy,
                         const void *mean_dot, void *dx, const ont_batchnorm_rows *shape)
{
    if (g->mask == ONT_MASK_NONE)
        F(rows_grad_form)(c, ONT_MASK_NONE, g, mean_dy, mean_dot, dx, shape);
    else if (g->mask == ONT_MASK_Y)
        F(rows_grad_form)(c, ONT_MASK_Y, g, mean_dy, mean_dot, dx, shape);
    else
        F(rows_grad_form)(c, ONT_MASK_V, g, mean_dy, mean_dot, dx, shape);
}

#undef TAKE
#undef GET_SOME
#undef PUT_SOME
#undef FOR_COLUMNS
