/*
 * ArgMax, ArgMin and TopK: positions of extrema along an axis. NaN counts as the largest and, for ArgMin, as the
 * smallest element; among equals the lower position comes first, or the higher with `last`. A block for each line;
 * TopK repeats the search behind the element found before, so it passes over the line k times.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

/* Whether a at position i comes before b at position j; position -1 is no element, and comes last. */
template <class T> ONT_DEVICE bool precedes(const ont_select &s, T a, int64_t i, T b, int64_t j)
{
    const bool nan_a = a != a, nan_b = b != b;
    if (i < 0 || j < 0) return j < 0 && i >= 0;
    if (nan_a != nan_b) return s.kind == ONT_SELECT_ASCENDING ? nan_b : nan_a;
    if (a != b && !nan_a) return s.kind == ONT_SELECT_LARGEST ? a > b : a < b;
    return s.last ? i > j : i < j;
}

/* The first element of a line behind the element `after` (-1: of all). All threads get its position. */
template <class T>
ONT_DEVICE int64_t first_behind(const ont_select &s, const T *x, int64_t after, T *values, int64_t *positions)
{
    const int self = (int)threadIdx.x;
    T best = T();
    int64_t at = -1;
    for (int64_t i = self; i < s.n; i += blockDim.x) {
        const T v = x[i * s.inner];
        if (after >= 0 && !precedes(s, x[after * s.inner], after, v, i)) continue;
        if (precedes(s, v, i, best, at)) {
            best = v;
            at = i;
        }
    }
    values[self] = best;
    positions[self] = at;
    __syncthreads();
    for (int half = (int)blockDim.x / 2; half; half /= 2) {
        if (self < half && precedes(s, values[self + half], positions[self + half], values[self], positions[self])) {
            values[self] = values[self + half];
            positions[self] = positions[self + half];
        }
        __syncthreads();
    }
    const int64_t found = positions[0];
    __syncthreads();
    return found;
}

/* values (outer, k, inner) or NULL, positions alike; `wide` rows of k along the axis */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    select_kernel(const ont_select s, const T *x, T *values, int64_t *positions)
{
    __shared__ T best[ONT_THREADS];
    __shared__ int64_t at[ONT_THREADS];
    for (int64_t line = blockIdx.x; line < s.outer * s.inner; line += gridDim.x) {
        const int64_t outer = line / s.inner, column = line - outer * s.inner;
        const T *from = x + outer * s.n * s.inner + column;
        int64_t found = -1;
        for (int64_t i = 0; i < s.k; i++) {
            found = first_behind(s, from, found, best, at);
            const int64_t to = (outer * s.k + i) * s.inner + column;
            if (threadIdx.x) continue;
            if (values) values[to] = from[found * s.inner];
            if (positions) positions[to] = found;
        }
    }
}

/* ArgMax and ArgMin where there are many neighbouring lines: a thread for each. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS) select_columns_kernel(const ont_select s, const T *x, int64_t *positions)
{
    ONT_FOR(line, s.outer * s.inner)
    {
        const int64_t outer = line / s.inner, column = line - outer * s.inner;
        const T *from = x + outer * s.n * s.inner + column;
        T best = from[0];
        int64_t at = 0;
        for (int64_t i = 1; i < s.n; i++) {
            const T v = from[i * s.inner];
            if (!precedes(s, v, i, best, at)) continue;
            best = v;
            at = i;
        }
        positions[line] = at;
    }
}

template <class T> static int launch(const ont_select *s, const void *x, void *values, void *positions, void *stream)
{
    const int64_t lines = s->outer * s->inner;
    if (!lines || !s->k || !s->n) return 0;
    if (s->k == 1 && !values && s->inner >= 32)
        return ONT_LAUNCH(select_columns_kernel<T>, ont_blocks(lines, ONT_THREADS), ONT_THREADS, 0, stream, *s,
                          (const T *)x, (int64_t *)positions);
    return ONT_LAUNCH(select_kernel<T>, ont_blocks(lines, 1), ont_row_threads(s->n), 0, stream, *s, (const T *)x,
                      (T *)values, (int64_t *)positions);
}

extern "C" int ont_launch_select(const ont_select *s, const void *x, void *values, void *positions, void *stream)
{
    switch (s->dtype) {
    case ONT_FLOAT32: return launch<float>(s, x, values, positions, stream);
    case ONT_FLOAT64: return launch<double>(s, x, values, positions, stream);
    case ONT_INT32: return launch<int32_t>(s, x, values, positions, stream);
    case ONT_INT64: return launch<int64_t>(s, x, values, positions, stream);
    default: return launch<uint64_t>(s, x, values, positions, stream);
    }
}
