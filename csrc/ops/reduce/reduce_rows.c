/*
 * float32 reductions over any axes, by rows. If the last dim is reduced, an output is computed from contiguous runs;
 * if it is kept, rows are combined elementwise into the output's row. reduce.c has the state, the gradients and the
 * reference.
 */
#include "ops/support/sums.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"

enum {
    LANES = 16,   /* partial results, for vectorisation */
    PIECE = 4096, /* elements of a log-sum-exp computed at a time; other reductions use the blocks of sums.h */
    BLOCK = 256,  /* columns of a unit of work */
    SHORT = 16,   /* contiguous rows of up to so many elements are transposed and reduced as columns */
};

/* ---- rows ---- */

static float row_abs_sum(const float *x, int64_t n)
{
    float part[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] += fabsf(x[i + lane]);
    for (; i < n; i++) part[0] += fabsf(x[i]);
    for (int lane = 0; lane < LANES; lane++) sum += part[lane];
    return sum;
}

static double row_product(const float *x, int64_t n)
{
    double part[LANES], product = 1;
    for (int lane = 0; lane < LANES; lane++) part[lane] = 1;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) part[lane] *= (double)x[i + lane];
    for (; i < n; i++) product *= (double)x[i];
    for (int lane = 0; n >= LANES && lane < LANES; lane++) product *= part[lane];
    return product;
}

/* NaN if any element is. Compares the bits as integers, which the compiler vectorises. */
static float row_min(const float *x, int64_t n)
{
    int32_t best = INT32_MAX, nan = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        int32_t magnitude = bits & 0x7fffffff, key = bits < 0 ? -magnitude : magnitude;
        nan |= magnitude > 0x7f800000;
        best = key < best ? key : best;
    }
    float least;
    int32_t bits = best < 0 ? -best : best;
    memcpy(&least, &bits, sizeof least);
    return nan ? NAN : best < 0 ? -least : least;
}

/* The result so far: a sum or extremum; for LOG_SUM_EXP the maximum, and the sum of exp(x - max). */
typedef struct partial {
    double value, max;
    bool started;
} partial;

static void add_log_sum_exp(const ont_simd_table *simd, partial *p, const float *x, int64_t n)
{
    float max, log_sum;
    simd->log_sum_exp(x, n, &max, &log_sum);
    double more = exp((double)log_sum);
    if (isinf(max)) more = max > 0; /* +inf gives inf; a row of only -inf adds nothing */
    if (isinf(max) && max < 0) max = -FLT_MAX;
    if (!p->started) {
        *p = (partial){more, (double)max, true};
    } else if ((double)max > p->max || max != max) {
        p->value = p->value * exp(p->max - (double)max) + more;
        p->max = (double)max;
    } else {
        p->value += (double)max == p->max ? more : more * exp((double)max - p->max);
    }
}

static void add_row(const ont_reduce *s, partial *p, const float *x, int64_t n)
{
    double v;
    switch (s->kind) {
    case ONT_REDUCE_MAX:
    case ONT_REDUCE_MIN:
        v = (double)(s->kind == ONT_REDUCE_MAX ? s->simd->max(x, n) : row_min(x, n));
        if (!p->started || v != v || (s->kind == ONT_REDUCE_MAX ? v > p->value : v < p->value)) p->value = v;
        p->started = true;
        return;
    case ONT_REDUCE_LOG_SUM_EXP: add_log_sum_exp(s->simd, p, x, n); return;
    case ONT_REDUCE_PROD:
        *p = (partial){.value = (p->started ? p->value : 1) * row_product(x, n), .started = true};
        return;
    case ONT_REDUCE_L1: v = (double)row_abs_sum(x, n); break;
    case ONT_REDUCE_L2:
    case ONT_REDUCE_SUM_SQUARE: v = (double)s->simd->dot(x, x, n); break;
    default: v = (double)s->simd->sum(x, n); break;
    }
    p->value += v;
}

static float finish(const ont_reduce *s, const partial *p)
{
    switch (s->kind) {
    case ONT_REDUCE_MEAN: return (float)(p->value / (double)s->each);
    case ONT_REDUCE_L2: return (float)sqrt(p->value);
    case ONT_REDUCE_LOG_SUM: return (float)log(p->value);
    case ONT_REDUCE_LOG_SUM_EXP: return p->value == 0 ? -INFINITY : (float)(log(p->value) + p->max);
    default: return (float)p->value;
    }
}

/* The offset of flat index i in these dims. */
static int64_t offset_of(const int64_t *dims, const int64_t *strides, int n, int64_t i)
{
    int64_t offset = 0;
    for (int d = n - 1; d >= 0; d--) {
        offset += i % dims[d] * strides[d];
        i /= dims[d];
    }
    return offset;
}

static void reduce_outputs(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    int64_t run = s->reduced[s->n_reduced - 1], runs = s->each / run;
    bool extremum = s->kind == ONT_REDUCE_MAX || s->kind == ONT_REDUCE_MIN;
    int64_t piece = extremum ? run : s->kind == ONT_REDUCE_LOG_SUM_EXP ? PIECE : ONT_SUM_BLOCK;
    for (int64_t o = first; o < last; o++) {
        const float *x = (const float *)call->in[0] + offset_of(s->kept, s->kept_stride, s->n_kept, o);
        partial p = {0};
        for (int64_t r = 0; r < runs; r++) {
            const float *row = x + offset_of(s->reduced, s->reduced_stride, s->n_reduced - 1, r);
            for (int64_t at = 0, n; at < run; at += n) {
                n = run - at < piece ? run - at : piece;
                add_row(s, &p, row + at, n);
            }
        }
        ((float *)call->out[0])[o] = finish(s, &p);
    }
}

/* ---- columns ---- */

static void add_to_columns(const ont_reduce *s, float *y, const float *x, int64_t n)
{
    switch (s->kind) {
    case ONT_REDUCE_MAX: s->simd->binary[ONT_LOOP_Max][ONT_FLOAT32](y, 1, x, 1, y, n, NULL); return;
    case ONT_REDUCE_MIN: s->simd->binary[ONT_LOOP_Min][ONT_FLOAT32](y, 1, x, 1, y, n, NULL); return;
    case ONT_REDUCE_L1:
        for (int64_t i = 0; i < n; i++) y[i] += fabsf(x[i]);
        return;
    case ONT_REDUCE_L2:
    case ONT_REDUCE_SUM_SQUARE:
        for (int64_t i = 0; i < n; i++) y[i] += x[i] * x[i];
        return;
    default: s->simd->add_to(y, x, n); return;
    }
}

static void finish_columns(const ont_reduce *s, float *y, int64_t n)
{
    float scale = 1 / (float)s->each;
    for (int64_t i = 0; i < n; i++) {
        if (s->kind == ONT_REDUCE_MEAN) y[i] *= scale;
        if (s->kind == ONT_REDUCE_L2) y[i] = sqrtf(y[i]);
        if (s->kind == ONT_REDUCE_LOG_SUM) y[i] = logf(y[i]);
    }
}

/* y = log(sum(exp(x))) of n columns, over the rows of the reduced dims. */
static void log_sum_exp_columns(const ont_reduce *s, float *y, const float *x, int64_t n)
{
    float max[BLOCK], e[BLOCK];
    memcpy(max, x, (size_t)n * sizeof *max);
    memset(y, 0, (size_t)n * sizeof *y);
    for (int64_t r = 1; r < s->each; r++)
        s->simd->binary[ONT_LOOP_Max][ONT_FLOAT32](
            max, 1, x + offset_of(s->reduced, s->reduced_stride, s->n_reduced, r), 1, max, n, NULL);
    for (int64_t i = 0; i < n; i++)
        if (isinf(max[i])) max[i] = 0; /* the sum is then infinite, or 0, without a shift */
    for (int64_t r = 0; r < s->each; r++) {
        s->simd->binary[ONT_LOOP_Sub][ONT_FLOAT32](x + offset_of(s->reduced, s->reduced_stride, s->n_reduced, r), 1,
                                                   max, 1, e, n, NULL);
        s->simd->unary[ONT_LOOP_Exp][ONT_FLOAT32](e, e, n, NULL);
        s->simd->add_to(y, e, n);
    }
    s->simd->unary[ONT_LOOP_Log][ONT_FLOAT32](y, y, n, NULL);
    s->simd->add_to(y, max, n);
}

static void multiply_columns(const ont_reduce *s, float *y, const float *x, int64_t n)
{
    double product[BLOCK];
    for (int64_t i = 0; i < n; i++) product[i] = 1;
    for (int64_t r = 0; r < s->each; r++) {
        const float *row = x + offset_of(s->reduced, s->reduced_stride, s->n_reduced, r);
        for (int64_t i = 0; i < n; i++) product[i] *= (double)row[i];
    }
    for (int64_t i = 0; i < n; i++) y[i] = (float)product[i];
}

/* Reduces n <= BLOCK columns to y. */
static void reduce_columns(const ont_reduce *s, float *y, const float *x, int64_t n)
{
    bool extremum = s->kind == ONT_REDUCE_MAX || s->kind == ONT_REDUCE_MIN;
    if (s->kind == ONT_REDUCE_LOG_SUM_EXP) {
        log_sum_exp_columns(s, y, x, n);
        return;
    }
    if (s->kind == ONT_REDUCE_PROD) {
        multiply_columns(s, y, x, n);
        return;
    }
    if (extremum)
        memcpy(y, x, (size_t)n * sizeof *y);
    else
        memset(y, 0, (size_t)n * sizeof *y);
    for (int64_t r = extremum; r < s->each; r++)
        add_to_columns(s, y, x + offset_of(s->reduced, s->reduced_stride, s->n_reduced, r), n);
    finish_columns(s, y, n);
}

/* A unit is a block of columns of one output row. */
static void reduce_units(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    int64_t width = s->kept[s->n_kept - 1], blocks = (width + BLOCK - 1) / BLOCK;
    for (int64_t unit = first; unit < last; unit++) {
        int64_t row = unit / blocks, start = unit % blocks * BLOCK, n = width - start < BLOCK ? width - start : BLOCK;
        const float *x = (const float *)call->in[0] + offset_of(s->kept, s->kept_stride, s->n_kept - 1, row) + start;
        float *y = (float *)call->out[0] + row * width + start;
        reduce_columns(s, y, x, n);
    }
}

static bool short_rows(const ont_reduce *s)
{
    return s->n_reduced == 1 && s->each <= SHORT && s->n_kept == 1 && s->kept_stride[0] == s->each;
}

/* Outputs [first, last) of short rows: transposes blocks of rows and reduces their columns. */
static void reduce_transposed(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    ont_reduce columns = *s;
    float transposed[SHORT * BLOCK];
    columns.reduced_stride[0] = BLOCK;
    for (int64_t n; first < last; first += n) {
        const float *x = (const float *)call->in[0] + first * s->each;
        n = last - first < BLOCK ? last - first : BLOCK;
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < s->each; k++) transposed[k * BLOCK + i] = x[i * s->each + k];
        reduce_columns(&columns, (float *)call->out[0] + first, transposed, n);
    }
}

/* ---- kernel ---- */

const char *ont_reduce_rows_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    ont_reduce s;
    if (x->dtype != ONT_FLOAT32) return "dtype";
    if (ont_reduce_read(node, &s) != ONT_OK) return "axes";
    if (!s.outputs || !s.each || !s.n_reduced) return "nothing to reduce";
    if (s.reduced_stride[s.n_reduced - 1] == 1) return NULL;
    return s.kept[s.n_kept - 1] < 8 ? "rows are too short" : NULL;
}

ont_status ont_reduce_rows_run(const ont_call *call)
{
    const ont_reduce *s = call->state;
    if (short_rows(s)) {
        ont_parallel(s->outputs, 16384 / s->each + 1, reduce_transposed, (void *)call);
    } else if (s->reduced_stride[s->n_reduced - 1] == 1) {
        ont_parallel(s->outputs, 16384 / s->each + 1, reduce_outputs, (void *)call);
    } else {
        int64_t width = s->kept[s->n_kept - 1], blocks = (width + BLOCK - 1) / BLOCK;
        ont_parallel(s->outputs / width * blocks, 16384 / (BLOCK * s->each) + 1, reduce_units, (void *)call);
    }
    return ONT_OK;
}
