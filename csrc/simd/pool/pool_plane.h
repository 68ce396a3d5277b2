/*
 * Pooling of one plane for one dtype; part of pool.inc.c, which includes it once for each. The includer defines NUM
 * (the element type), CELL (an integer of the same width, for offsets of winners), LOWEST, FLOATS, ISNAN() and F(name).
 * The rows of a window are joined first, over the whole width; then the columns, each kernel position in one strided
 * loop over the output row.
 */

/* Strides 1 and 2 are written out, so that they vectorise. */
#define STRIDED(stride, body) \
    do { \
        if ((stride) == 1) { \
            for (int64_t i = 0, j = 0; i < n; i++, j++) body; \
        } else if ((stride) == 2) { \
            for (int64_t i = 0, j = 0; i < n; i++, j += 2) body; \
        } else { \
            for (int64_t i = 0, j = 0; i < n; i++, j += (stride)) body; \
        } \
    } while (0)

#define LARGER(v, max) (((v) > (max)) | ISNAN(v))

/* Runs body for each input row that the windows of output row (od, oh) cover: `line` is the row, with its offset in a
 * window. */
#define EACH_LINE(p, x, od, oh, body) \
    do { \
        int64_t d0_, d1_, h0_, h1_, padded_; \
        ont_pool_span(p, 0, od, &d0_, &d1_, &padded_); \
        ont_pool_span(p, 1, oh, &h0_, &h1_, &padded_); \
        for (int64_t kd_ = d0_; kd_ < d1_; kd_++) \
            for (int64_t kh_ = h0_; kh_ < h1_; kh_++) { \
                int64_t depth_ = (od) * (p)->stride[0] - (p)->begin[0] + kd_ * (p)->dilation[0]; \
                int64_t row_ = (oh) * (p)->stride[1] - (p)->begin[1] + kh_ * (p)->dilation[1]; \
                int64_t offset = (kd_ * (p)->dilation[0] * (p)->in[1] + kh_ * (p)->dilation[1]) * (p)->in[2]; \
                (void)offset; \
                NUM *line = (NUM *)(uintptr_t)(x) + (depth_ * (p)->in[1] + row_) * (p)->in[2]; \
                body \
            } \
    } while (0)

/* The plane is one row, and the only window covers it. */
static bool F(whole)(const ont_pool *p)
{
    return p->out_count == 1 && p->in_count == p->in[2] && p->kernel[2] == p->in[2] && !p->begin[2] &&
           p->dilation[2] == 1 && p->kernel[0] * p->kernel[1] == 1;
}

static void F(max_into)(NUM *restrict acc, const NUM *restrict x, int64_t stride, int64_t n)
{
    STRIDED(stride, acc[i] = LARGER(x[j], acc[i]) ? x[j] : acc[i]);
}

static NUM F(max_of)(const NUM *x, int64_t n)
{
    enum { LANES = 16 };
    NUM part[LANES];
    for (int lane = 0; lane < LANES; lane++) part[lane] = LOWEST;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            part[lane] = LARGER(x[i + lane], part[lane]) ? x[i + lane] : part[lane];
    for (; i < n; i++) part[0] = LARGER(x[i], part[0]) ? x[i] : part[0];
    for (int lane = 1; lane < LANES; lane++) part[0] = LARGER(part[lane], part[0]) ? part[lane] : part[0];
    return part[0];
}

/* Where the largest value is: the first one, or the last NaN. */
static int64_t F(index_of_max)(const NUM *x, NUM max_value, int64_t n)
{
    int64_t i = 0;
    if (!ISNAN(max_value))
        while (i < n - 1 && x[i] != max_value) i++;
    else
        for (i = n - 1; i > 0 && !ISNAN(x[i]);) i--;
    return i;
}

/* Offsets from here on mean that a window has no cell: planes are smaller. */
static const CELL F(nowhere) = INT32_MAX / 2;

static void F(win_line)(NUM *restrict maxima, CELL *restrict cell, const NUM *restrict x, int64_t n, CELL at)
{
    for (int64_t i = 0; i < n; i++) {
        bool wins = (x[i] > maxima[i]) | ISNAN(x[i]) | (cell[i] >= F(nowhere));
        maxima[i] = wins ? x[i] : maxima[i];
        cell[i] = wins ? at : cell[i];
    }
}

/* Among equal values the lower offset wins, as in a search row by row; of two NaNs the higher one. */
static void F(win_column)(NUM *restrict maxima, CELL *restrict cell, const NUM *restrict x, const CELL *restrict from,
                          int64_t stride, int64_t n, CELL shift)
{
    STRIDED(stride, {
        NUM v = x[j];
        CELL at = from[j] + shift;
        bool wins = (v > maxima[i]) | ((v == maxima[i]) & (at < cell[i])) |
                    (ISNAN(v) & (!ISNAN(maxima[i]) | (at > cell[i])));
        maxima[i] = wins ? v : maxima[i];
        cell[i] = wins ? at : cell[i];
    });
}

/* Winners of one output row; offsets count from the window's first cell, which may be padding. */
static void F(winners)(const ont_pool *p, const NUM *x, int64_t od, int64_t oh, NUM *maxima, CELL *cell)
{
    int64_t row = ont_pool_row(p), n = ont_pool_outputs(p);
    for (int64_t i = 0; i < row + n; i++) maxima[i] = LOWEST;
    for (int64_t i = 0; i < row + n; i++) cell[i] = F(nowhere);
    EACH_LINE(p, x, od, oh, F(win_line)(maxima + p->begin[2], cell + p->begin[2], line, p->in[2], (CELL)offset););
    for (int64_t k = 0; k < p->kernel[2]; k++) {
        CELL shift = (CELL)(k * p->dilation[2]);
        F(win_column)(maxima + row, cell + row, maxima + shift, cell + shift, p->stride[2], n, shift);
    }
}

/* First cell of the window of output (od, oh, 0), which may be before the plane. */
static int64_t F(origin)(const ont_pool *p, int64_t od, int64_t oh)
{
    return ((od * p->stride[0] - p->begin[0]) * p->in[1] + oh * p->stride[1] - p->begin[1]) * p->in[2] - p->begin[2];
}

static int64_t F(stored)(const ont_pool *p, int64_t at)
{
    if (!p->column_major) return at;
    int64_t w = at % p->in[2], h = at / p->in[2] % p->in[1], d = at / p->in[2] / p->in[1];
    /* Index with the first spatial dim fastest; the leading dims of 1 of lower ranks do not count. */
    return d + p->in[0] * (h + p->in[1] * w);
}

static void F(max_indices)(const ont_pool *p, const NUM *x, NUM *y, int64_t *indices, int64_t index, void *scratch)
{
    NUM *maxima = scratch;
    int64_t row = ont_pool_row(p), width = p->out[2];
    CELL *cell = (CELL *)(maxima + row + ont_pool_outputs(p));
    if (F(whole)(p)) {
        *y = F(max_of)(x, p->in_count);
        *indices = index + F(stored)(p, F(index_of_max)(x, *y, p->in_count));
        return;
    }
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, y += width, indices += width) {
        int64_t od = r / p->out[1], oh = r % p->out[1], origin = F(origin)(p, od, oh);
        F(winners)(p, x, od, oh, maxima, cell);
        memcpy(y, maxima + row, (size_t)width * sizeof *y);
        for (int64_t i = 0; i < width; i++) {
            int64_t at = origin + i * p->stride[2] + cell[row + i];
            indices[i] = cell[row + i] >= F(nowhere) ? -1 : index + F(stored)(p, at);
        }
    }
}

static void F(max)(const ont_pool *p, const void *in, void *out, int64_t *indices, int64_t index, void *scratch)
{
    const NUM *x = in;
    NUM *y = out, *joined = scratch;
    int64_t row = ont_pool_row(p), n = ont_pool_outputs(p), width = p->out[2];
    if (indices) {
        F(max_indices)(p, x, y, indices, index, scratch);
        return;
    }
    if (F(whole)(p)) {
        *y = F(max_of)(x, p->in_count);
        return;
    }
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, y += width) {
        for (int64_t i = 0; i < row + n; i++) joined[i] = LOWEST;
        EACH_LINE(p, x, r / p->out[1], r % p->out[1], F(max_into)(joined + p->begin[2], line, 1, p->in[2]););
        for (int64_t k = 0; k < p->kernel[2]; k++)
            F(max_into)(joined + row, joined + k * p->dilation[2], p->stride[2], n);
        memcpy(y, joined + row, (size_t)width * sizeof *y);
    }
}

/* ---- small planes: as many at once as there are lanes ---- */

#define EACH_LANE(body) \
    for (int l = 0; l < ONT_POOL_LANES; l++) body
/* Runs body for every output `o` of a plane in order; in body, EACH_CELL runs over the cells of its window, at offset
 * `at`. */
#define EACH_WINDOW(p, body) \
    do { \
        int64_t o = 0, d0_, d1_, h0_, h1_, w0_, w1_, padded_; \
        for (int64_t od_ = 0; od_ < (p)->out[0]; od_++) { \
            ont_pool_span(p, 0, od_, &d0_, &d1_, &padded_); \
            for (int64_t oh_ = 0; oh_ < (p)->out[1]; oh_++) { \
                ont_pool_span(p, 1, oh_, &h0_, &h1_, &padded_); \
                for (int64_t ow_ = 0; ow_ < (p)->out[2]; ow_++, o++) { \
                    ont_pool_span(p, 2, ow_, &w0_, &w1_, &padded_); \
                    int64_t first_ = F(origin)(p, od_, oh_) + ow_ * (p)->stride[2]; \
                    body \
                } \
            } \
        } \
    } while (0)
#define EACH_CELL(p, body) \
    for (int64_t kd_ = d0_; kd_ < d1_; kd_++) \
        for (int64_t kh_ = h0_; kh_ < h1_; kh_++) { \
            int64_t line_ = first_ + (kd_ * (p)->dilation[0] * (p)->in[1] + kh_ * (p)->dilation[1]) * (p)->in[2]; \
            for (int64_t kw_ = w0_; kw_ < w1_; kw_++) { \
                int64_t at = line_ + kw_ * (p)->dilation[2]; \
                body \
            } \
        }

/* Interleaves the cells of up to as many planes as there are lanes. */
static void F(to_lanes)(NUM *restrict lanes, const NUM *restrict x, int64_t count, int64_t planes)
{
    for (int64_t l = 0; l < planes; l++)
        for (int64_t i = 0; i < count; i++) lanes[i * ONT_POOL_LANES + l] = x[l * count + i];
}

static void F(from_lanes)(NUM *restrict x, const NUM *restrict lanes, int64_t count, int64_t planes)
{
    for (int64_t l = 0; l < planes; l++)
        for (int64_t i = 0; i < count; i++) x[l * count + i] = lanes[i * ONT_POOL_LANES + l];
}

/* Pools one block of planes; x and y are interleaved by lane. */
static void F(max_block)(const ont_pool *p, const NUM *x, NUM *y)
{
    EACH_WINDOW(p, {
        NUM maxima[ONT_POOL_LANES];
        EACH_LANE(maxima[l] = LOWEST;)
        EACH_CELL(p, {
            const NUM *v = x + at * ONT_POOL_LANES;
            EACH_LANE(maxima[l] = LARGER(v[l], maxima[l]) ? v[l] : maxima[l];)
        })
        memcpy(y + o * ONT_POOL_LANES, maxima, sizeof maxima);
    });
}

#if FLOATS

/* Number of cells along dim d that a mean divides by. */
static int64_t F(counted)(const ont_pool *p, int d, int64_t o)
{
    int64_t first, end, padded;
    ont_pool_span(p, d, o, &first, &end, &padded);
    return p->include_pad ? padded : end - first;
}

static NUM F(rows_counted)(const ont_pool *p, int64_t r)
{
    return (NUM)(F(counted)(p, 0, r / p->out[1]) * F(counted)(p, 1, r % p->out[1]));
}

static NUM F(cells_counted)(const ont_pool *p, int64_t o)
{
    return F(rows_counted)(p, o / p->out[2]) * (NUM)F(counted)(p, 2, o % p->out[2]);
}

static void F(mean_block)(const ont_pool *p, const NUM *x, NUM *y)
{
    EACH_WINDOW(p, {
        NUM sum[ONT_POOL_LANES] = {0};
        NUM *to = y + o * ONT_POOL_LANES;
        NUM count = F(cells_counted)(p, o);
        EACH_CELL(p, {
            const NUM *v = x + at * ONT_POOL_LANES;
            EACH_LANE(sum[l] += v[l];)
        })
        EACH_LANE(to[l] = sum[l] / count;)
    });
}

/* dx must be zeroed. */
static void F(max_grad_block)(const ont_pool *p, const NUM *x, const NUM *dy, NUM *dx)
{
    EACH_WINDOW(p, {
        const NUM *g = dy + o * ONT_POOL_LANES;
        NUM maxima[ONT_POOL_LANES];
        CELL winner[ONT_POOL_LANES];
        EACH_LANE(maxima[l] = LOWEST;)
        EACH_LANE(winner[l] = -1;)
        EACH_CELL(p, {
            const NUM *v = x + at * ONT_POOL_LANES;
            CELL here = (CELL)at;
            EACH_LANE({
                bool wins = (v[l] > maxima[l]) | ISNAN(v[l]) | (winner[l] < 0);
                maxima[l] = wins ? v[l] : maxima[l];
                winner[l] = wins ? here : winner[l];
            })
        })
        EACH_CELL(p, {
            NUM *to = dx + at * ONT_POOL_LANES;
            CELL here = (CELL)at;
            EACH_LANE(to[l] += winner[l] == here ? g[l] : 0;)
        })
    });
}

static void F(mean_grad_block)(const ont_pool *p, const NUM *dy, NUM *dx)
{
    EACH_WINDOW(p, {
        const NUM *g = dy + o * ONT_POOL_LANES;
        NUM share[ONT_POOL_LANES];
        NUM count = F(cells_counted)(p, o);
        EACH_LANE(share[l] = g[l] / count;)
        EACH_CELL(p, {
            NUM *to = dx + at * ONT_POOL_LANES;
            EACH_LANE(to[l] += share[l];)
        })
    });
}

static void F(small_grad)(const ont_pool *p, const void *in, const void *out_grad, void *in_grad, int64_t planes,
                          void *scratch)
{
    const NUM *x = in, *dy = out_grad;
    NUM *dx = in_grad, *sums = scratch, *back = sums + p->in_count * ONT_POOL_LANES;
    NUM *wide = back + p->out_count * ONT_POOL_LANES;
    for (int64_t n; planes > 0; planes -= n, x += n * p->in_count, dx += n * p->in_count, dy += n * p->out_count) {
        n = planes < ONT_POOL_LANES ? planes : ONT_POOL_LANES;
        if (n < ONT_POOL_LANES) memset(scratch, 0, ont_pool_small_scratch(p));
        memset(sums, 0, (size_t)p->in_count * ONT_POOL_LANES * sizeof *sums);
        F(to_lanes)(back, dy, p->out_count, n);
        if (p->kind == ONT_POOL_MAX) {
            F(to_lanes)(wide, x, p->in_count, n);
            F(max_grad_block)(p, wide, back, sums);
        } else {
            F(mean_grad_block)(p, back, sums);
        }
        F(from_lanes)(dx, sums, p->in_count, n);
    }
}

#endif

static void F(small)(const ont_pool *p, const void *in, void *out, int64_t planes, void *scratch)
{
    const NUM *x = in;
    NUM *y = out, *wide = scratch, *results = wide + p->in_count * ONT_POOL_LANES;
    for (int64_t n; planes > 0; planes -= n, x += n * p->in_count, y += n * p->out_count) {
        n = planes < ONT_POOL_LANES ? planes : ONT_POOL_LANES;
        if (n < ONT_POOL_LANES) memset(scratch, 0, ont_pool_small_scratch(p));
        F(to_lanes)(wide, x, p->in_count, n);
#if FLOATS
        if (p->kind == ONT_POOL_MEAN)
            F(mean_block)(p, wide, results);
        else
#endif
            F(max_block)(p, wide, results);
        F(from_lanes)(y, results, p->out_count, n);
    }
}

#if FLOATS

static void F(max_grad)(const ont_pool *p, const void *in, const void *out_grad, void *in_grad, void *scratch)
{
    const NUM *x = in, *dy = out_grad;
    NUM *dx = in_grad, *maxima = scratch;
    int64_t row = ont_pool_row(p);
    CELL *cell = (CELL *)(maxima + row + ont_pool_outputs(p));
    memset(dx, 0, (size_t)p->in_count * sizeof *dx);
    if (F(whole)(p)) {
        dx[F(index_of_max)(x, F(max_of)(x, p->in_count), p->in_count)] = *dy;
        return;
    }
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, dy += p->out[2]) {
        int64_t od = r / p->out[1], oh = r % p->out[1], at = F(origin)(p, od, oh);
        F(winners)(p, x, od, oh, maxima, cell);
        for (int64_t i = 0; i < p->out[2]; i++, at += p->stride[2])
            if (cell[row + i] < F(nowhere)) dx[at + cell[row + i]] += dy[i];
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

static void F(add_into)(NUM *restrict acc, const NUM *restrict x, int64_t stride, int64_t n)
{
    STRIDED(stride, acc[i] += x[j]);
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

/* The divisor of a mean over these windows, by column; 1 beyond the last output. */
static void F(count_columns)(const ont_pool *p, NUM *counts)
{
    for (int64_t i = 0; i < ont_pool_outputs(p); i++) counts[i] = i < p->out[2] ? (NUM)F(counted)(p, 2, i) : 1;
}

/* Sums of columns, one window after the other: windows of an adaptive mean have different lengths. */
static void F(add_columns)(const ont_pool *p, NUM *y, const NUM *joined)
{
    for (int64_t o = 0; o < p->out[2]; o++) {
        int64_t first = o * p->stride[2], end = first + p->kernel[2], padded;
        if (p->adaptive) ont_pool_span(p, 2, o, &first, &end, &padded);
        NUM sum = 0;
        if (end - first < 16)
            for (int64_t i = first; i < end; i++) sum += joined[i];
        else
            sum = F(sum_of)(joined + first, end - first);
        y[o] = sum;
    }
}

static void F(spread_columns)(const ont_pool *p, NUM *wide, const NUM *g)
{
    for (int64_t o = 0; o < p->out[2]; o++) {
        int64_t first, end, padded;
        ont_pool_span(p, 2, o, &first, &end, &padded);
        for (int64_t i = first; i < end; i++) wide[i] += g[o];
    }
}

/* Turns n sums into means or norms. */
static void F(finish_row)(const ont_pool *p, NUM *restrict y, NUM rows, const NUM *restrict counts, int64_t n)
{
    NUM e = (NUM)(1 / p->p);
    if (p->kind == ONT_POOL_MEAN)
        for (int64_t i = 0; i < n; i++) y[i] /= rows * counts[i];
    else if (p->p == 2)
        for (int64_t i = 0; i < n; i++) y[i] = SQRT(y[i]);
    else if (p->p != 1)
        for (int64_t i = 0; i < n; i++) y[i] = POW(y[i], e);
}

static void F(sum)(const ont_pool *p, const void *in, void *out, void *scratch)
{
    const NUM *x = in;
    int64_t row = ont_pool_row(p), n = ont_pool_outputs(p), width = p->out[2];
    NUM *y = out, *joined = scratch, *counts = joined + row + n;
    if (F(whole)(p) && p->kind == ONT_POOL_MEAN) {
        *y = F(sum_of)(x, p->in_count) / (NUM)p->in_count;
        return;
    }
    F(count_columns)(p, counts);
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, y += width) {
        memset(joined, 0, (size_t)(row + n) * sizeof *joined);
        EACH_LINE(p, x, r / p->out[1], r % p->out[1], F(add_row)(p, joined + p->begin[2], line, p->in[2]););
        if (p->adaptive || (p->dilation[2] == 1 && (width == 1 || (p->kernel[2] >= 16 && p->stride[2] > 2))))
            F(add_columns)(p, joined + row, joined);
        else
            for (int64_t k = 0; k < p->kernel[2]; k++)
                F(add_into)(joined + row, joined + k * p->dilation[2], p->stride[2], n);
        F(finish_row)(p, joined + row, F(rows_counted)(p, r), counts, width);
        memcpy(y, joined + row, (size_t)width * sizeof *y);
    }
}

/* The gradient of a row of sums: dy / count, or dy y^(1-p); where a norm is 0, its subgradient 0. */
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

/* to[i * stride] += g[i]. Calls with different offsets write disjoint elements, so with stride 1 it is a plain sum. */
static void F(spread)(NUM *restrict to, const NUM *restrict g, int64_t stride, int64_t n)
{
    if (stride == 1)
        for (int64_t i = 0; i < n; i++) to[i] += g[i];
    else
        for (int64_t i = 0; i < n; i++) to[i * stride] += g[i];
}

static void F(sum_grad)(const ont_pool *p, const void *in, const void *out, const void *out_grad, void *in_grad,
                        void *scratch)
{
    const NUM *x = in, *y = out, *dy = out_grad;
    int64_t row = ont_pool_row(p), width = p->out[2];
    NUM *dx = in_grad, *wide = scratch, *g = wide + row, *counts = g + ont_pool_outputs(p);
    if (F(whole)(p) && p->kind == ONT_POOL_MEAN) {
        NUM share = *dy / (NUM)p->in_count;
        for (int64_t i = 0; i < p->in_count; i++) dx[i] = share;
        return;
    }
    F(count_columns)(p, counts);
    memset(dx, 0, (size_t)p->in_count * sizeof *dx);
    for (int64_t r = 0; r < p->out[0] * p->out[1]; r++, dy += width) {
        F(start_row)(p, y ? y + r * width : NULL, dy, g, F(rows_counted)(p, r), counts);
        memset(wide, 0, (size_t)row * sizeof *wide);
        if (p->adaptive)
            F(spread_columns)(p, wide, g);
        else
            for (int64_t k = 0; k < p->kernel[2]; k++) F(spread)(wide + k * p->dilation[2], g, p->stride[2], width);
        EACH_LINE(p, dx, r / p->out[1], r % p->out[1], F(add_into)(line, wide + p->begin[2], 1, p->in[2]););
    }
    if (p->kind == ONT_POOL_LP)
        for (int64_t i = 0; i < p->in_count; i++)
            dx[i] *= (NUM)((x[i] > 0) - (x[i] < 0)) * F(power)(x[i], (NUM)(p->p - 1));
}

#endif

#undef NUM
#undef CELL
#undef LOWEST
#undef FLOATS
#undef F
#undef ISNAN
#undef POW
#undef FABS
#undef SQRT
#undef STRIDED
#undef LARGER
#undef EACH_LINE
#undef EACH_WINDOW
#undef EACH_CELL
#undef EACH_LANE
