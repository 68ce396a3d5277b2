/*
 * Batch normalisation where a channel has few contiguous elements, (N, C) above all: all channels of some rows at a
 * time, in memory order.
 *
 * Columns are summed over units of rows in the dtype, and the sums of the units in double and in order. Units depend on
 * the shape alone, so any number of threads gives the same bits. Short rows are folded: several are taken as one. The
 * squares of a unit are summed about its first row. A first row far from the mean enlarges the variance as well, so the
 * relative error stays below the number of rows of a unit times the rounding error, whatever the mean.
 * Units are joined as in Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
 * Variances, 1979.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/norm/batchnorm.h"

enum {
    SHORT = 64,   /* contiguous elements of a channel from which on batchnorm.c is as fast */
    UNIT = 32,    /* rows of a unit of work */
    CHUNK = 1024, /* columns of a unit of work, whose sums stay in the L1 cache */
    NARROW = 128, /* columns below which rows are folded */
    FOLDED = 512, /* columns of a folded row, about */
    LANES = 16,   /* a multiple of a vector */
};

typedef struct scratch {
    char *centre, *slope, *shift, *mean_dy, *mean_dot; /* (width) */
    char *a, *b;                                       /* (units, width) */
    double *sum, *dot;                                 /* (width) */
} scratch;

static int64_t blocks_of(const ont_batchnorm *s)
{
    return (s->rows + UNIT - 1) / UNIT;
}

static int64_t chunks_of(const ont_batchnorm *s)
{
    return (s->width + CHUNK - 1) / CHUNK;
}

static size_t size_of(const ont_batchnorm *s)
{
    return s->f32 ? sizeof(float) : sizeof(double);
}

static scratch scratch_of(const ont_call *call)
{
    const ont_batchnorm *s = call->state;
    size_t list = (size_t)s->width * size_of(s);
    double *sums = call->work;
    char *at = (char *)(sums + 2 * s->width);
    return (scratch){.sum = sums, .dot = sums + s->width, .centre = at, .slope = at + list, .shift = at + 2 * list,
                     .mean_dy = at + 3 * list, .mean_dot = at + 4 * list, .a = at + 5 * list,
                     .b = at + (size_t)(5 + blocks_of(s)) * list};
}

const char *ont_bn_rows_accept(const ont_node *node)
{
    const ont_shape *x = &ont_node_in(node, BN_X)->shape;
    if (!ont_shape_count(x)) return "no elements";
    int64_t d = ont_shape_count_range(x, 2, x->rank);
    return d > SHORT || (d > LANES && x->dims[0] < LANES) ? "long pieces of channels" : NULL;
}

void ont_bn_rows_prepare(ont_batchnorm *s, ont_prepared *out)
{
    int64_t row = s->c * s->d, step = LANES;
    while (step > 1 && row * step / 2 % LANES == 0) step /= 2;
    s->fold = row >= NARROW ? 1 : step * row >= FOLDED ? step : FOLDED / (step * row) * step;
    if (s->fold > s->n) s->fold = s->n;
    s->width = s->fold * row;
    s->rows = (s->n + s->fold - 1) / s->fold;
    s->last = (s->n - (s->rows - 1) * s->fold) * row;
    out->work_bytes = (size_t)s->width * (2 * sizeof(double) + (size_t)(5 + 2 * blocks_of(s)) * size_of(s));
}

/* ---- units ---- */

/* Columns [column, column + columns) of a unit that have `rows` rows: the last row may be shorter than the others. */
typedef struct piece {
    int64_t at, column, columns, rows; /* at: offset of the first element */
} piece;

static int cut(const ont_batchnorm *s, int64_t block, int64_t from, int64_t to, piece pieces[2])
{
    int64_t first = block * UNIT, rows = s->rows - first < UNIT ? s->rows - first : UNIT;
    bool ends = first + rows == s->rows;
    int64_t middle = !ends || s->last > to ? to : s->last < from ? from : s->last;
    int n = 0;
    if (middle > from) pieces[n++] = (piece){first * s->width + from, from, middle - from, rows};
    if (to > middle && rows > 1) pieces[n++] = (piece){first * s->width + middle, middle, to - middle, rows - 1};
    return n;
}

static const void *at(const ont_batchnorm *s, const void *data, int64_t index)
{
    return data ? (const char *)data + (size_t)index * size_of(s) : NULL;
}

static void *out_at(const ont_batchnorm *s, void *data, int64_t index)
{
    return (char *)data + (size_t)index * size_of(s);
}

typedef void (*piece_fn)(const ont_call *call, const scratch *w, int64_t block, const piece *p);

typedef struct task {
    const ont_call *call;
    scratch w;
    piece_fn body;
} task;

static void run_units(void *context, int64_t first, int64_t last)
{
    const task *t = context;
    const ont_batchnorm *s = t->call->state;
    for (int64_t unit = first; unit < last; unit++) {
        int64_t block = unit / chunks_of(s), from = unit % chunks_of(s) * CHUNK;
        piece pieces[2];
        int n = cut(s, block, from, s->width - from < CHUNK ? s->width : from + CHUNK, pieces);
        for (int i = 0; i < n; i++) t->body(t->call, &t->w, block, &pieces[i]);
    }
}

static void for_pieces(const ont_call *call, piece_fn body)
{
    const ont_batchnorm *s = call->state;
    int64_t elements = UNIT * (s->width < CHUNK ? s->width : CHUNK);
    task t = {call, scratch_of(call), body};
    ont_parallel(blocks_of(s) * chunks_of(s), 16384 / elements + 1, run_units, &t);
}

/* ---- sums of channels ---- */

/* Number of elements of a column. */
static int64_t count_of(const ont_batchnorm *s, int64_t column)
{
    return s->rows - (column >= s->last);
}

static ont_batchnorm_rows shape_of(const ont_batchnorm *s, const piece *p)
{
    return (ont_batchnorm_rows){s->width, p->rows, p->columns};
}

/*
 * Adds up the units' sums of columns [from, to). With x, they are sums of differences from the unit's first row, and
 * become sums of differences from the tensor's first row.
 */
static void join_units(const ont_call *call, const scratch *w, const void *x, int64_t from, int64_t to)
{
    const ont_batchnorm *s = call->state;
    memset(w->sum + from, 0, (size_t)(to - from) * sizeof *w->sum);
    memset(w->dot + from, 0, (size_t)(to - from) * sizeof *w->dot);
    for (int64_t block = 0; block < blocks_of(s); block++) {
        piece pieces[2];
        int n = cut(s, block, from, to, pieces);
        for (int i = 0; i < n; i++) {
            const piece *p = &pieces[i];
            int64_t k = block * s->width + p->column;
            ont_batchnorm_rows shape = shape_of(s, p);
            s->loops->join(at(s, x, p->at), at(s, x, p->column), &shape, at(s, w->a, k), at(s, w->b, k),
                           w->sum + p->column, w->dot + p->column);
        }
    }
}

/* Calls `body` for the first column of each run of d columns that belong to one channel. */
#define FOR_RUNS(state, channel, column) \
    for (int64_t column = (channel) * (state)->d; column < (state)->width; column += (state)->c * (state)->d)

static void channel_statistics(const ont_call *call, const scratch *w, int64_t c, double *mean, double *var)
{
    const ont_batchnorm *s = call->state;
    const void *x = call->in[BN_X];
    double base = ont_bn_read(x, c * s->d, s->f32), sum = 0, square = 0, count = (double)(s->n * s->d);
    FOR_RUNS(s, c, start)
        for (int64_t k = start; k < start + s->d; k++) {
            double off = ont_bn_read(x, k, s->f32) - base, n = (double)count_of(s, k);
            sum += w->sum[k] + n * off;
            square += w->dot[k] + off * (2 * w->sum[k] + n * off);
        }
    *mean = base + sum / count;
    *var = (square - sum * sum / count) / count;
    if (*var < 0) *var = 0;
}

static void spread(const ont_batchnorm *s, char *list, int64_t c, double value)
{
    FOR_RUNS(s, c, start)
        for (int64_t k = start; k < start + s->d; k++) ont_bn_write(list, k, s->f32, value);
}

static void spread_channel(const ont_batchnorm *s, const scratch *w, int64_t c, const ont_channel *channel)
{
    spread(s, w->centre, c, channel->centre);
    spread(s, w->slope, c, channel->slope);
    spread(s, w->shift, c, channel->shift);
}

static void settle_channels(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_batchnorm *s = call->state;
    const scratch w = scratch_of(call);
    if (s->training)
        FOR_RUNS(s, first, start) join_units(call, &w, call->in[BN_X], start, start + (last - first) * s->d);
    for (int64_t c = first; c < last; c++) {
        double mean = 0, var = 0;
        if (s->training) channel_statistics(call, &w, c, &mean, &var);
        ont_channel channel = ont_bn_settle(call, c, mean, var);
        spread_channel(s, &w, c, &channel);
    }
}

static bool needs_sums(const ont_call *call)
{
    return ((const ont_batchnorm *)call->state)->training || ont_bn_result(call, 1) || ont_bn_result(call, 2);
}

static void settle_grad_channels(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_batchnorm *s = call->state;
    const scratch w = scratch_of(call);
    bool summed = needs_sums(call);
    if (summed) FOR_RUNS(s, first, start) join_units(call, &w, NULL, start, start + (last - first) * s->d);
    for (int64_t c = first; c < last; c++) {
        double sum = 0, dot = 0;
        if (summed) FOR_RUNS(s, c, start)
            for (int64_t k = start; k < start + s->d; k++) sum += w.sum[k], dot += w.dot[k];
        ont_bn_grad_settle(call, c, &sum, &dot);
        spread(s, w.mean_dy, c, sum);
        spread(s, w.mean_dot, c, dot);
    }
}

static void spread_grad_channels(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const scratch w = scratch_of(call);
    for (int64_t c = first; c < last; c++) {
        ont_channel channel = ont_bn_grad_channel(call, c);
        spread_channel(call->state, &w, c, &channel);
    }
}

static void for_channels(const ont_call *call, ont_range_fn body)
{
    const ont_batchnorm *s = call->state;
    ont_parallel(s->c, 4096 / (s->width / s->c * (1 + 2 * blocks_of(s))) + LANES, body, (void *)call);
}

/* ---- kernels ---- */

static ont_channels channels_at(const ont_batchnorm *s, const scratch *w, int64_t column)
{
    return (ont_channels){at(s, w->centre, column), at(s, w->slope, column), at(s, w->shift, column)};
}

static ont_batchnorm_gradient gradient_at(const ont_call *call, const piece *p)
{
    const ont_batchnorm *s = call->state;
    return (ont_batchnorm_gradient){ont_bn_mask(call), at(s, call->in[BN_GRAD_X], p->at),
                                    at(s, ont_bn_operand(call, BN_GRAD_Y), p->at),
                                    at(s, call->in[BN_GRAD_DY], p->at)};
}

static void sum_squares(const ont_call *call, const scratch *w, int64_t block, const piece *p)
{
    const ont_batchnorm *s = call->state;
    int64_t k = block * s->width + p->column;
    ont_batchnorm_rows shape = shape_of(s, p);
    s->loops->rows_squares(at(s, call->in[BN_X], p->at), &shape, out_at(s, w->a, k), out_at(s, w->b, k));
}

static void apply(const ont_call *call, const scratch *w, int64_t block, const piece *p)
{
    const ont_batchnorm *s = call->state;
    ont_channels channels = channels_at(s, w, p->column);
    ont_batchnorm_rows shape = shape_of(s, p);
    (void)block;
    s->loops->rows_apply(&channels, at(s, call->in[BN_X], p->at), at(s, ont_bn_operand(call, BN_RESIDUAL), p->at),
                         s->relu, out_at(s, call->out[BN_Y], p->at), &shape);
}

static void sum_gradients(const ont_call *call, const scratch *w, int64_t block, const piece *p)
{
    const ont_batchnorm *s = call->state;
    ont_channels channels = channels_at(s, w, p->column);
    int64_t k = block * s->width + p->column;
    ont_batchnorm_gradient g = gradient_at(call, p);
    ont_batchnorm_rows shape = shape_of(s, p);
    s->loops->rows_grad_sums(&channels, &g, &shape, out_at(s, w->a, k), out_at(s, w->b, k));
}

static void gradient(const ont_call *call, const scratch *w, int64_t block, const piece *p)
{
    const ont_batchnorm *s = call->state;
    ont_channels channels = channels_at(s, w, p->column);
    ont_batchnorm_gradient g = gradient_at(call, p);
    ont_batchnorm_rows shape = shape_of(s, p);
    (void)block;
    s->loops->rows_grad(&channels, &g, at(s, w->mean_dy, p->column), at(s, w->mean_dot, p->column),
                        out_at(s, call->out[0], p->at), &shape);
}

ont_status ont_bn_rows_forward(const ont_call *call)
{
    const ont_batchnorm *s = call->state;
    if (s->training) for_pieces(call, sum_squares);
    for_channels(call, settle_channels);
    for_pieces(call, apply);
    return ONT_OK;
}

ont_status ont_bn_rows_backward(const ont_call *call)
{
    for_channels(call, spread_grad_channels);
    if (needs_sums(call)) for_pieces(call, sum_gradients);
    for_channels(call, settle_grad_channels);
    if (ont_bn_result(call, 0)) for_pieces(call, gradient);
    return ONT_OK;
}
