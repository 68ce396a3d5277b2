/*
 * Blocks of rows and units of columns. See sums.h.
 */
#include "ops/support/sums.h"

#include <string.h>

#include "simd/reduce/reduce.h"

enum {
    MIN_UNIT = 16384, /* elements of a unit of columns, at least */
    MAX_UNITS = 64,   /* each keeps its own sums */
    /* Rows of a unit, at least, so that its sums are small beside it: */
    MIN_ROWS = 8,
    NARROW = 8192,      /* columns; */
    MIN_ROWS_WIDE = 32, /* with more of them */
};

static double sum_f64(const double *x, int64_t n)
{
    double part[8] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int lane = 0; lane < 8; lane++) part[lane] += x[i + lane];
    for (; i < n; i++) part[0] += x[i];
    for (int lane = 0; lane < 8; lane++) sum += part[lane];
    return sum;
}

double ont_sum_block(const ont_simd_table *simd, ont_reduce_kind kind, ont_dtype dtype, const void *x, int64_t n)
{
    if (dtype == ONT_FLOAT64) return sum_f64(x, n);
    if (kind == ONT_REDUCE_MAX) return (double)simd->max(x, n);
    if (kind == ONT_REDUCE_SUM_SQUARE) return (double)simd->dot(x, x, n);
    return (double)simd->sum(x, n);
}

double ont_sum_join(ont_reduce_kind kind, bool started, double sum, double more)
{
    if (kind != ONT_REDUCE_MAX) return sum + more;
    return !started || more > sum || more != more ? more : sum;
}

int64_t ont_sum_unit(int64_t n, int64_t tail)
{
    int64_t elements = n * tail / MAX_UNITS < MIN_UNIT ? MIN_UNIT : n * tail / MAX_UNITS;
    int64_t rows = (elements + tail - 1) / tail;
    int64_t min_rows = tail <= NARROW ? MIN_ROWS : MIN_ROWS_WIDE;
    return rows < min_rows ? min_rows : rows;
}

void ont_sum_rows(const ont_simd_table *simd, ont_dtype dtype, void *sums, const void *x, int64_t rows, int64_t stride,
                  int64_t n)
{
    if (dtype == ONT_BFLOAT16) {
        simd->add_bfloat_rows(sums, x, rows, stride, n);
        return;
    }
    if (dtype == ONT_FLOAT32 && n < ONT_NARROW && n == stride) {
        ont_simd_reduce()->narrow_sums(sums, x, rows, n);
        return;
    }
    for (const char *row = x; rows; rows--, row += (size_t)stride * ont_dtype_size(dtype)) {
        if (dtype == ONT_FLOAT32) {
            simd->add_to(sums, (const float *)row, n);
        } else if (dtype == ONT_FLOAT64) {
            for (int64_t i = 0; i < n; i++) ((double *)sums)[i] += ((const double *)row)[i];
        } else {
            float wide[ONT_SUM_BLOCK];
            for (int64_t at = 0, m; at < n; at += m) {
                m = n - at < ONT_SUM_BLOCK ? n - at : ONT_SUM_BLOCK;
                simd->half_to_float((const uint16_t *)row + at, wide, m);
                simd->add_to((float *)sums + at, wide, m);
            }
        }
    }
}

void ont_sum_put(const ont_simd_table *simd, ont_reduce_kind kind, ont_dtype dtype, void *sums, int64_t rows, void *out,
                 int64_t n)
{
    for (int64_t i = 0; kind == ONT_REDUCE_MEAN && i < n; i++) {
        if (dtype == ONT_FLOAT64)
            ((double *)sums)[i] /= (double)rows;
        else
            ((float *)sums)[i] /= (float)rows;
    }
    if (dtype == ONT_BFLOAT16)
        simd->float_to_bfloat(sums, out, n);
    else if (dtype == ONT_FLOAT16)
        simd->float_to_half(sums, out, n);
    else
        memcpy(out, sums, (size_t)n * ont_dtype_size(dtype));
}
