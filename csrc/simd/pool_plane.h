/*
 * Pooling of one plane for one dtype. Part of pool.inc.c, which defines NUM, CELL (an integer as wide, for offsets of
 * winners), LOWEST, FLOATS and F(); no include guard on purpose. Rows of a window are joined first, over the whole
 * width; then the columns, each kernel position in one strided pass over the output row.
 */

/* Output columns [*lo, *hi) whose kernel position k is inside the input, and the input column of *lo. */
static int64_t F(columns)(const ont_pool *p, int64_t k, int64_t *lo, int64_t *hi)
{
    int64_t shift = k * p->dilation[2] - p->begin[2], s = p->stride[2];
    *lo = shift < 0 ? (-shift + s - 1) / s : 0;
    *hi = shift < p->in[2] ? (p->in[2] - 1 - shift) / s + 1 : 0;
    if (*hi > p->out[2]) *hi = p->out[2];
    return *lo * s + shift;
}

/* Steps of 1 and 2 are written out, so that they vectorise. */
#define STRIDED(step, body) \
    do { \
        if ((step) == 1) { \
            for (int64_t i = 0, j = 0; i < n; i++, j++) body; \
        } else if ((step) == 2) { \
            for (int64_t i = 0, j = 0; i < n; i++, j += 2) body; \
        } else { \
            for (int64_t i = 0, j = 0; i < n; i++, j += (step)) body; \
        } \
    } while (0)

#define LARGER(v, most) ((v) > (most) || (v) != (v))

static void F(max_into)(NUM *restrict acc, const NUM *restrict x, int64_t step, int64_t n)
{
    STRIDED(step, acc[i] = LARGER(x[j], acc[i]) ? x[j] : acc[i]);
}

static NUM F(max_of)(const NUM *x, int64_t n)
{
    enum { LANES = 16 };
    NUM part[LANES];
    for (int lane = 0; lane < LANES; lane++) part[lane] = LOWEST;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] = LARGER(x[i + lane], part[lane]) ? x[i + lane] : part[lane];
    for (; i < n; i++) part[0] = LARGER(x[i], part[0]) ? x[i] : part[0];
    for (int lane = 1; lane < LANES; lane++) part[0] = LARGER(part[lane], part[0]) ? part[lane] : part[0];
    return part[0];
}

/* most, cell: the largest value so far of each window and where it is; cell < 0 where there is none yet. */
static void F(win_into)(NUM *restrict most, CELL *restrict cell, const NUM *restrict x, int64_t step, int64_t n, CELL at)
{
    STRIDED(step, {
        bool wins = (x[j] > most[i]) | (x[j] != x[j]) | (cell[i] < 0);
        most[i] = wins ? x[j] : most[i];
        cell[i] = wins ? at : cell[i];
    });
}

/* The winners of one output row; offsets are from the window's (possibly padded) first cell. */
static void F(winners)(const ont_pool *p, const NUM *x, int64_t od, int64_t oh, NUM *most, CELL *cell)
{
    int64_t d0, d1, h0, h1, lo, hi, padded;
    ont_pool_span(p, 0, od, &d0, &d1, &padded);
    ont_pool_span(p, 1, oh, &h0, &h1, &padded);
    for (int64_t i = 0; i < p->out[2]; i++) most[i] = LOWEST, cell[i] = -1;
    for (int64_t kd = d0; kd < d1; kd++)
        for (int64_t kh = h0; kh < h1; kh++) {
            int64_t depth = od * p->stride[0] - p->begin[0] + kd * p->dilation[0];
            int64_t row = oh * p->stride[1] - p->begin[1] + kh * p->dilation[1];
            int64_t offset = (kd * p->dilation[0] * p->in[1] + kh * p->dilation[1]) * p->in[2];
            const NUM *line = x + (depth * p->in[1] + row) * p->in[2];
            for (int64_t k = 0; k < p->kernel[2]; k++) {
                int64_t column = F(columns)(p, k, &lo, &hi);
                if (lo < hi)
                    F(win_into)(most + lo, cell + lo, line + column, p->stride[2], hi - lo,
                                (CELL)(offset + k * p->dilation[2]));
            }
        }
}

/* First cell of the window of output (od, oh, 0); may lie before the plane. */
static int64_t F(origin)(const ont_pool *p, int64_t od, int64_t oh)
{
    return ((od * p->stride[0] - p->begin[0]) * p->in[1] + oh * p->stride[1] - p->begin[1]) * p->in[2] - p->begin[2];
}

static int64_t F(stored)(const ont_pool *p, int64_t at)
{
    if (!p->column_major) return at;
    int64_t w = at % p->in[2], h = at / p->in[2] % p->in[1], d = at / p->in[2] / p->in[1];
    /* The first spatial dim runs fastest; with fewer than three, the leading dims of 1 do not count. */
    return d + p->in[0] * (h + p->in[1] * w);
}

/* Joins the rows of a window into one: returns a row of the input itself where there is one only, NULL for none. */
static const NUM *F(join_max)(const ont_pool *p, const NUM *x, int64_t od, int64_t oh, NUM *joined)
{
    int64_t d0, d1, h0, h1, padded, rows = 0;
    const NUM *first = NULL;
    ont_pool_span(p, 0, od, &d0, &d1, &padded);
    ont_pool_span(p, 1, oh, &h0, &h1, &padded);
    for (int64_t kd = d0; kd < d1; kd++)
        for (int64_t kh = h0; kh < h1; kh++, rows++) {
            int64_t depth = od * p->stride[0] - p->begin[0] + kd * p->dilation[0];
            int64_t row = oh * p->stride[1] - p->begin[1] + kh * p->dilation[1];
            const NUM *line = x + (depth * p->in[1] + row) * p->in[2];
            if (rows == 0) first = line;
            if (rows == 1)
                for (int64_t i = 0; i < p->in[2]; i++) joined[i] = LARGER(line[i], first[i]) ? line[i] : first[i];
            if (rows > 1) F(max_into)(joined, line, 1, p->in[2]);
        }
    return rows > 1 ? joined : first;
}

static void F(max)(const ont_pool *p, const void *in, void *out, int64_t *indices, int64_t index, void *scratch)
{
    const NUM *x = in;
    NUM *y = out, *joined = scratch;
    CELL *cell = scratch;
    int64_t width = p->out[2], lo, hi;
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, y += width) {
        int64_t od = r / p->out[1], oh = r % p->out[1];
        if (indices) {
            F(winners)(p, x, od, oh, y, cell);
            int64_t origin = F(origin)(p, od, oh);
            for (int64_t i = 0; i < width; i++)
                *indices++ = cell[i] < 0 ? -1 : index + F(stored)(p, origin + i * p->stride[2] + cell[i]);
            continue;
        }
        const NUM *line = F(join_max)(p, x, od, oh, joined);
        for (int64_t i = 0; i < width; i++) y[i] = LOWEST;
        if (!line) continue;
        if (width == 1 && p->dilation[2] == 1) {
            int64_t first, end, padded;
            ont_pool_span(p, 2, 0, &first, &end, &padded);
            y[0] = F(max_of)(line + first - p->begin[2], end - first);
            continue;
        }
        for (int64_t k = 0; k < p->kernel[2]; k++) {
            int64_t column = F(columns)(p, k, &lo, &hi);
            if (lo < hi) F(max_into)(y + lo, line + column, p->stride[2], hi - lo);
        }
    }
}

#if FLOATS

static void F(max_grad)(const ont_pool *p, const void *in, const void *out_grad, void *in_grad, void *scratch)
{
    const NUM *x = in, *dy = out_grad;
    NUM *dx = in_grad, *most = scratch;
    CELL *cell = (CELL *)(most + p->out[2]);
    memset(dx, 0, (size_t)p->in_count * sizeof *dx);
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, dy += p->out[2]) {
        int64_t od = r / p->out[1], oh = r % p->out[1];
        int64_t at = F(origin)(p, od, oh);
        F(winners)(p, x, od, oh, most, cell);
        for (int64_t i = 0; i < p->out[2]; i++, at += p->stride[2])
            if (cell[i] >= 0) dx[at + cell[i]] += dy[i];
    }
}

static NUM F(power)(NUM v, NUM e)
{
    v = FABS(v);
    return e == 1 ? v : e == 2 ? v * v : e == 0 ? 1 : POW(v, e);
}

/* acc += x, or |x|^p */
static void F(add_row)(const ont_pool *p, NUM *restrict acc, const NUM *restrict x, int64_t n)
{
    if (p->kind == ONT_POOL_LP)
        for (int64_t i = 0; i < n; i++) acc[i] += F(power)(x[i], (NUM)p->p);
    else
        for (int64_t i = 0; i < n; i++) acc[i] += x[i];
}

static void F(add_into)(NUM *restrict acc, const NUM *restrict x, int64_t step, int64_t n)
{
    STRIDED(step, acc[i] += x[j]);
}

static NUM F(sum_of)(const NUM *x, int64_t n)
{
    enum { LANES = 16 };
    NUM part[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] += x[i + lane];
    for (; i < n; i++) part[0] += x[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

/* Cells of the windows along dim d that a mean counts. */
static int64_t F(counted)(const ont_pool *p, int d, int64_t o)
{
    int64_t first, end, padded;
    ont_pool_span(p, d, o, &first, &end, &padded);
    return p->include_pad ? padded : end - first;
}

static void F(count_columns)(const ont_pool *p, NUM *counts)
{
    for (int64_t i = 0; i < p->out[2]; i++) counts[i] = (NUM)F(counted)(p, 2, i);
}

/* Sums of a row of windows to means or norms. */
static void F(finish_row)(const ont_pool *p, NUM *restrict y, NUM rows, const NUM *restrict counts)
{
    NUM e = (NUM)(1 / p->p);
    if (p->kind == ONT_POOL_MEAN)
        for (int64_t i = 0; i < p->out[2]; i++) y[i] /= rows * counts[i];
    else if (p->p == 2)
        for (int64_t i = 0; i < p->out[2]; i++) y[i] = SQRT(y[i]);
    else if (p->p != 1)
        for (int64_t i = 0; i < p->out[2]; i++) y[i] = POW(y[i], e);
}

/* The sum of a window's rows; the input itself where it is one row to be taken as it is. */
static const NUM *F(join_sum)(const ont_pool *p, const NUM *x, int64_t od, int64_t oh, NUM *joined)
{
    int64_t d0, d1, h0, h1, padded;
    ont_pool_span(p, 0, od, &d0, &d1, &padded);
    ont_pool_span(p, 1, oh, &h0, &h1, &padded);
    if (p->in[0] == 1 && p->in[1] == 1 && p->kind == ONT_POOL_MEAN && d1 > d0 && h1 > h0) return x;
    memset(joined, 0, (size_t)p->in[2] * sizeof *joined);
    for (int64_t kd = d0; kd < d1; kd++)
        for (int64_t kh = h0; kh < h1; kh++) {
            int64_t depth = od * p->stride[0] - p->begin[0] + kd * p->dilation[0];
            int64_t row = oh * p->stride[1] - p->begin[1] + kh * p->dilation[1];
            F(add_row)(p, joined, x + (depth * p->in[1] + row) * p->in[2], p->in[2]);
        }
    return joined;
}

static void F(sum)(const ont_pool *p, const void *in, void *out, void *scratch)
{
    const NUM *x = in;
    NUM *y = out, *joined = scratch, *counts = joined + p->in[2];
    int64_t width = p->out[2], lo, hi, first, end, padded;
    F(count_columns)(p, counts);
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, y += width) {
        int64_t od = r / p->out[1], oh = r % p->out[1];
        const NUM *line = F(join_sum)(p, x, od, oh, joined);
        if (width == 1 && p->dilation[2] == 1) {
            ont_pool_span(p, 2, 0, &first, &end, &padded);
            y[0] = F(sum_of)(line + first - p->begin[2], end - first);
        } else {
            memset(y, 0, (size_t)width * sizeof *y);
            for (int64_t k = 0; k < p->kernel[2]; k++) {
                int64_t column = F(columns)(p, k, &lo, &hi);
                if (lo < hi) F(add_into)(y + lo, line + column, p->stride[2], hi - lo);
            }
        }
        F(finish_row)(p, y, (NUM)(F(counted)(p, 0, od) * F(counted)(p, 1, oh)), counts);
    }
}

/* The gradient of a row of sums: dy / count, or dy y^(1-p), where a norm of 0 has the subgradient 0. */
static void F(start_row)(const ont_pool *p, const NUM *y, const NUM *dy, NUM *g, NUM rows, const NUM *counts)
{
    NUM e = (NUM)(1 - p->p);
    if (p->kind == ONT_POOL_MEAN)
        for (int64_t i = 0; i < p->out[2]; i++) g[i] = dy[i] / (rows * counts[i]);
    else if (e == 0)
        for (int64_t i = 0; i < p->out[2]; i++) g[i] = dy[i];
    else
        for (int64_t i = 0; i < p->out[2]; i++) g[i] = y[i] == 0 ? 0 : dy[i] * (e == -1 ? 1 / y[i] : POW(y[i], e));
}

static void F(sum_grad)(const ont_pool *p, const void *in, const void *out, const void *out_grad, void *in_grad,
                        void *scratch)
{
    const NUM *x = in, *y = out, *dy = out_grad;
    NUM *dx = in_grad, *spread = scratch, *g = spread + p->in[2], *counts = g + p->out[2];
    int64_t width = p->out[2], lo, hi, d0, d1, h0, h1, padded;
    F(count_columns)(p, counts);
    memset(dx, 0, (size_t)p->in_count * sizeof *dx);
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, dy += width) {
        int64_t od = r / p->out[1], oh = r % p->out[1];
        ont_pool_span(p, 0, od, &d0, &d1, &padded);
        ont_pool_span(p, 1, oh, &h0, &h1, &padded);
        F(start_row)(p, y ? y + r * width : NULL, dy, g, (NUM)(F(counted)(p, 0, od) * F(counted)(p, 1, oh)), counts);
        memset(spread, 0, (size_t)p->in[2] * sizeof *spread);
        for (int64_t k = 0; k < p->kernel[2]; k++) {
            NUM *to = spread + F(columns)(p, k, &lo, &hi);
            for (int64_t i = lo; i < hi; i++, to += p->stride[2]) *to += g[i];
        }
        for (int64_t kd = d0; kd < d1; kd++)
            for (int64_t kh = h0; kh < h1; kh++) {
                int64_t depth = od * p->stride[0] - p->begin[0] + kd * p->dilation[0];
                int64_t row = oh * p->stride[1] - p->begin[1] + kh * p->dilation[1];
                F(add_into)(dx + (depth * p->in[1] + row) * p->in[2], spread, 1, p->in[2]);
            }
    }
    if (p->kind == ONT_POOL_LP)
        for (int64_t i = 0; i < p->in_count; i++) dx[i] *= (NUM)((x[i] > 0) - (x[i] < 0)) * F(power)(x[i], (NUM)(p->p - 1));
}

#endif

#undef NUM
#undef CELL
#undef LOWEST
#undef FLOATS
#undef F
#undef POW
#undef FABS
#undef SQRT
#undef STRIDED
#undef LARGER
