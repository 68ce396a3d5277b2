/*
 * The loops of reductions, compiled once per instruction set; ONT_ISA names it. See reduce.h. For vectorisation, rows
 * of constant length are processed as columns, and long narrow columns GROUP rows at a time, as GROUP times as many
 * columns, which are combined at the end.
 */
#include "simd/reduce/reduce.h"

#include "simd/macros.h"

enum { GROUP = 32 }; /* rows */

#define FIRST(x) (x)
#define ZERO(x) 0
#define ONE(x) 1
#define SUM(a, v) ((a) + (v))
#define MAX(a, v) (((v) > (a)) | ((v) != (v)) ? (v) : (a)) /* without a branch */
#define MIN(a, v) (((v) < (a)) | ((v) != (v)) ? (v) : (a))
#define PROD(a, v) ((a) * (v))

#define LOOP(name, type, total, start, step) \
    INLINE void name##_rows(const type *x, type *y, int64_t leads, const int64_t n) \
    { \
        for (int64_t i = 0; i < leads; i++, x += n) { \
            total a = start((total)x[0]); \
            for (int64_t k = 0; k < n; k++) a = step(a, (total)x[k]); \
            y[i] = (type)a; \
        } \
    } \
    INLINE void name##_columns(const type *x, type *y, int64_t n, int64_t stride, const int64_t width) \
    { \
        total a[ONT_REDUCE_COLUMNS]; \
        for (int64_t j = 0; j < width; j++) a[j] = start((total)x[j]); \
        for (int64_t k = 0; k < n; k++, x += stride) \
            for (int64_t j = 0; j < width; j++) a[j] = step(a[j], (total)x[j]); \
        for (int64_t j = 0; j < width; j++) y[j] = (type)a[j]; \
    } \
    INLINE void name##_long(const type *x, type *y, int64_t n, const int64_t width) \
    { \
        total a[GROUP * ONT_NARROW]; \
        int64_t wide = GROUP * width, k = 0; \
        for (int64_t j = 0; j < wide; j++) a[j] = start((total)x[j]); \
        for (; k + GROUP <= n; k += GROUP, x += wide) \
            for (int64_t j = 0; j < wide; j++) a[j] = step(a[j], (total)x[j]); \
        for (int64_t j = 0; j < (n - k) * width; j++) a[j] = step(a[j], (total)x[j]); \
        _Pragma("GCC unroll 8") for (int half = GROUP / 2; half; half /= 2) \
            for (int64_t j = 0; j < half * width; j++) a[j] = step(a[j], a[j + half * width]); \
        for (int64_t j = 0; j < width; j++) y[j] = (type)a[j]; \
    } \
    static void name(const void *from, void *to, int64_t leads, int64_t n, int64_t stride, int64_t width) \
    { \
        const type *x = from; \
        type *y = to; \
        if (stride == 1 && n < 2 * GROUP) { \
            switch (n) { \
            case 2: name##_rows(x, y, leads, 2); return; \
            case 3: name##_rows(x, y, leads, 3); return; \
            case 4: name##_rows(x, y, leads, 4); return; \
            case 5: name##_rows(x, y, leads, 5); return; \
            case 6: name##_rows(x, y, leads, 6); return; \
            case 7: name##_rows(x, y, leads, 7); return; \
            case 8: name##_rows(x, y, leads, 8); return; \
            default: name##_rows(x, y, leads, n); return; \
            } \
        } \
        for (int64_t i = 0; i < leads; i++, x += n * stride, y += width) { \
            if (width == stride && width == 1) \
                name##_long(x, y, n, 1); \
            else if (width == stride && width < ONT_NARROW && n >= GROUP) \
                name##_long(x, y, n, width); \
            else if (width == 2) \
                name##_columns(x, y, n, stride, 2); \
            else if (width == 3) \
                name##_columns(x, y, n, stride, 3); \
            else if (width == 4) \
                name##_columns(x, y, n, stride, 4); \
            else \
                name##_columns(x, y, n, stride, width); \
        } \
    }

#define EXTREMA(suffix, type) \
    LOOP(max_##suffix, type, type, FIRST, MAX) \
    LOOP(min_##suffix, type, type, FIRST, MIN)
#define WHOLE(suffix, type, wraps) \
    EXTREMA(suffix, type) \
    LOOP(sum_##suffix, type, wraps, ZERO, SUM) \
    LOOP(prod_##suffix, type, wraps, ONE, PROD)

LOOP(sum_f32, float, float, ZERO, SUM)
LOOP(prod_f32, float, double, ONE, PROD)
LOOP(prod_f64, double, double, ONE, PROD)
EXTREMA(f32, float)
EXTREMA(f64, double)
EXTREMA(bool, uint8_t)
WHOLE(i32, int32_t, uint32_t)
WHOLE(i64, int64_t, uint64_t)
WHOLE(u64, uint64_t, uint64_t)

INLINE void narrow(float *sums, const float *x, int64_t rows, const int64_t n)
{
    float a[ONT_NARROW];
    for (int64_t j = 0; j < n; j++) a[j] = sums[j];
    for (; rows; rows--, x += n)
        for (int64_t j = 0; j < n; j++) a[j] += x[j];
    for (int64_t j = 0; j < n; j++) sums[j] = a[j];
}

static void narrow_sums(float *sums, const float *x, int64_t rows, int64_t n)
{
    switch (n) {
    case 1: narrow(sums, x, rows, 1); return;
    case 2: narrow(sums, x, rows, 2); return;
    case 3: narrow(sums, x, rows, 3); return;
    case 4: narrow(sums, x, rows, 4); return;
    case 5: narrow(sums, x, rows, 5); return;
    case 6: narrow(sums, x, rows, 6); return;
    default: narrow(sums, x, rows, 7); return;
    }
}

#define NUMBERS(name) \
    [ONT_FLOAT32] = name##_f32, [ONT_INT32] = name##_i32, [ONT_INT64] = name##_i64, [ONT_UINT64] = name##_u64
const ont_reduce_loops PASTE(ont_reduce_loops_, ONT_ISA) = {
    .run = {[ONT_STEP_SUM] = {NUMBERS(sum)},
            [ONT_STEP_MAX] = {NUMBERS(max), [ONT_FLOAT64] = max_f64, [ONT_BOOL] = max_bool},
            [ONT_STEP_MIN] = {NUMBERS(min), [ONT_FLOAT64] = min_f64, [ONT_BOOL] = min_bool},
            [ONT_STEP_PROD] = {NUMBERS(prod), [ONT_FLOAT64] = prod_f64}},
    .narrow_sums = narrow_sums,
};
