/*
 * Sets of rows (csrc/ops/index/rows.h): rows are marked by their numbers, packed, unpacked, and dropped from as before
 * packing. nonzero.cu counts and selects marked rows.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/math.cuh"
#include "kernels/units.cuh"

#include <string.h>

/* ---- marks ---- */

/* Several numbers may be equal. */
__global__ void __launch_bounds__(ONT_THREADS)
    mark_numbers_kernel(int64_t m, const int64_t *numbers, const uint8_t *among, int64_t n, int32_t *found)
{
    ONT_FOR(i, m) {
        const int64_t row = numbers[i];
        if ((!among || among[i]) && row >= 0 && row < n) atomicExch(&found[row], 1);
    }
}

__global__ void __launch_bounds__(ONT_THREADS) narrow_marks_kernel(int64_t n, const int32_t *found, uint8_t *marks)
{
    ONT_FOR(i, n) marks[i] = found[i] != 0;
}

extern "C" int ont_launch_mark_rows(int64_t m, const int64_t *numbers, const uint8_t *among, int64_t n, void *work,
                                    uint8_t *marks, void *stream)
{
    int32_t *found = (int32_t *)work;
    const int error = ONT_LAUNCH(mark_numbers_kernel, ont_blocks(m, ONT_THREADS), ONT_THREADS, 0, stream, m, numbers,
                                 among, n, found);
    if (error) return error;
    return ONT_LAUNCH(narrow_marks_kernel, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, n, found, marks);
}

struct row_set {
    const int64_t *rows, *inverse;
};

__global__ void __launch_bounds__(ONT_THREADS)
    rows_within_kernel(int64_t n, int64_t m, const row_set set, const row_set subset, int64_t *rows, int64_t *inverse)
{
    ONT_FOR(i, n + m) {
        if (i < m) {
            const int64_t at = set.inverse[subset.rows[i]];
            rows[i] = at < 0 ? 0 : at;
        } else if (inverse) {
            const int64_t row = set.rows[i - m];
            inverse[i - m] = set.inverse[row] == i - m ? subset.inverse[row] : -1;
        }
    }
}

extern "C" int ont_launch_rows_within(int64_t n, int64_t m, const int64_t *const *in, int64_t *rows, int64_t *inverse,
                                      void *stream)
{
    const row_set set = {in[0], in[1]}, subset = {in[2], in[3]};
    return ONT_LAUNCH(rows_within_kernel, ont_blocks(n + m, ONT_THREADS), ONT_THREADS, 0, stream, n, m, set, subset,
                      rows, inverse);
}

/* ---- copies ---- */

/* Elements are in units of T. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    copy_rows_kernel(const ont_row_copy s, const wide_divisor width, T fill, const T *x, const int64_t *rows,
                     const int64_t *inverse, T *y)
{
    ONT_FOR(i, s.rows * s.width) {
        uint64_t row = (uint64_t)i;
        const int64_t column = split(&row, width), found = s.unpacks ? inverse[row] : rows[row];
        const bool fills = s.fills && (s.unpacks ? found < 0 : inverse[found] != (int64_t)row);
        y[i] = fills ? fill : x[(found < 0 ? 0 : found) * s.width + column];
    }
}

template <class T>
static int copy_rows(const ont_row_copy *s, int size, const void *x, const int64_t *rows, const int64_t *inverse,
                     void *y, void *stream)
{
    T fill;
    for (int at = 0; at < s->size; at += size) memcpy((char *)&fill + at, &s->fill, (size_t)size);
    return ONT_LAUNCH(copy_rows_kernel<T>, ont_blocks(s->rows * s->width, ONT_THREADS), ONT_THREADS, 0, stream, *s,
                      wide_divisor_of((uint64_t)s->width), fill, (const T *)x, rows, inverse, (T *)y);
}

extern "C" int ont_launch_copy_rows(const ont_row_copy *given, const void *x, const int64_t *rows,
                                    const int64_t *inverse, void *y, void *stream)
{
    ont_row_copy s = *given;
    if (!s.rows || !s.width) return 0;
    widen_units(&s.size, &s.width, x, y);
    switch (s.size) {
    case 1: return copy_rows<uint8_t>(&s, given->size, x, rows, inverse, y, stream);
    case 2: return copy_rows<uint16_t>(&s, given->size, x, rows, inverse, y, stream);
    case 4: return copy_rows<uint32_t>(&s, given->size, x, rows, inverse, y, stream);
    case 8: return copy_rows<uint64_t>(&s, given->size, x, rows, inverse, y, stream);
    default: return copy_rows<unit<pair16>::type>(&s, given->size, x, rows, inverse, y, stream);
    }
}

/* ---- dropout ---- */

template <class T, int COUNT> struct alignas(sizeof(T) * COUNT) several {
    typedef typename ont_compute<T>::type C;
    enum { N = COUNT };
    T of[N];
};

/* N elements of a row a thread. Four that begin at a multiple of four may have their words in one block. */
template <class V>
__global__ void __launch_bounds__(ONT_THREADS)
    row_dropout_kernel(const ont_row_dropout s, const wide_divisor width, const uint64_t *random, const V *x,
                       const int64_t *numbers, V *y)
{
    typedef typename V::C C;
    enum { N = V::N };
    const bool one_block = N == 4 && (!(s.stream >> 63) || (s.stream >> 60 & 3) >= 2);
    ONT_FOR(i, s.rows * s.width / N) {
        uint64_t row = (uint64_t)i;
        const int64_t column = split(&row, width), first = numbers[row] * s.width + column * N;
        V v = x[i];
        uint32_t words[4];
        int at = ont_dropout_block(random, s.stream, first, words);
        ONT_UNROLL
        for (int k = 0; k < N; k++) {
            if (k && one_block) at = k;
            else if (k) at = ont_dropout_block(random, s.stream, first + k, words);
            const uint32_t word = at == 0 ? words[0] : at == 1 ? words[1] : at == 2 ? words[2] : words[3];
            ont_store(&v.of[k], word >= s.threshold ? ont_load(&v.of[k]) * (C)s.scale : (C)0);
        }
        y[i] = v;
    }
}

template <class T, int N>
static int launch_several(const ont_row_dropout *s, const uint64_t *random, const void *x, const int64_t *numbers,
                          void *y, void *stream)
{
    typedef several<T, N> V;
    return ONT_LAUNCH(row_dropout_kernel<V>, ont_blocks(s->rows * s->width / N, ONT_THREADS), ONT_THREADS, 0, stream,
                      *s, wide_divisor_of((uint64_t)(s->width / N)), random, (const V *)x, numbers, (V *)y);
}

template <class T>
static int row_dropout(const ont_row_dropout *s, const uint64_t *random, const void *x, const int64_t *numbers, void *y,
                       void *stream)
{
    const bool four = s->width % 4 == 0 && ((uint64_t)x | (uint64_t)y) % (4 * sizeof(T)) == 0;
    return four ? launch_several<T, 4>(s, random, x, numbers, y, stream)
                : launch_several<T, 1>(s, random, x, numbers, y, stream);
}

extern "C" int ont_launch_row_dropout(const ont_row_dropout *s, const uint64_t *random, const void *x,
                                      const int64_t *numbers, void *y, void *stream)
{
    if (!s->rows || !s->width) return 0;
    switch (s->dtype) {
    case ONT_FLOAT32: return row_dropout<float>(s, random, x, numbers, y, stream);
    case ONT_FLOAT64: return row_dropout<double>(s, random, x, numbers, y, stream);
    case ONT_FLOAT16: return row_dropout<ont_f16>(s, random, x, numbers, y, stream);
    default: return row_dropout<ont_bf16>(s, random, x, numbers, y, stream);
    }
}
