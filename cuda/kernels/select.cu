/*
 * ArgMax, ArgMin and TopK: positions of extrema along an axis. NaN counts as the largest and, for ArgMin, as the
 * smallest element; among equals the lower position comes first, or the higher with `last`. A block for each line.
 *
 * TopK of few elements repeats the search behind the element found before, so it passes over the line k times. For more
 * a radix select finds the k-th element, digit by digit of a key that orders elements as integers; the elements in
 * front of it are gathered in the order of their positions, and sorted. Counts are of integers, so nothing depends on
 * the order of threads. Sources: PyTorch's radix select (aten/src/ATen/native/cuda/SortingRadixSelect.cuh and
 * TensorTopK.cu), here with digits of 8 bits; Batcher, Sorting Networks and Their Applications, 1968, for the sort, in
 * the form whose comparators all point in one direction, so that any number of elements can be sorted.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/order.cuh"

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

/* ---- radix select ---- */

template <class T> struct key_of {
    typedef uint32_t type;
};
template <> struct key_of<double> {
    typedef uint64_t type;
};
template <> struct key_of<int64_t> {
    typedef uint64_t type;
};
template <> struct key_of<uint64_t> {
    typedef uint64_t type;
};

/* The element with the smaller key comes first; NaN is the largest. */
template <class T> ONT_DEVICE typename key_of<T>::type key(const ont_select &s, T v)
{
    return s.kind == ONT_SELECT_LARGEST ? ~ascending(v) : ascending(v);
}

enum { DIGIT = 8, BINS = 1 << DIGIT };

/* The bin that contains element number `rest`, from 1 on; *rest becomes its number in the bin. By one warp. */
ONT_DEVICE int bin_of(const uint32_t *bins, uint32_t *rest)
{
    enum { EACH = BINS / 32 };
    const int lane = (int)threadIdx.x & 31;
    uint32_t sum = 0, before;
    for (int i = 0; i < EACH; i++) sum += bins[lane * EACH + i];
    uint32_t all = sum;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const uint32_t lower = __shfl_up_sync(0xffffffffu, all, lanes);
        if (lane >= lanes) all += lower;
    }
    before = all - sum;
    const unsigned here = __ballot_sync(0xffffffffu, before < *rest && *rest <= all);
    int bin = lane * EACH;
    uint32_t number = *rest - before;
    if (here >> lane & 1)
        while (number > bins[bin]) number -= bins[bin++];
    int holder = 0;
    while (!(here >> holder & 1)) holder++;
    *rest = __shfl_sync(0xffffffffu, number, holder);
    return __shfl_sync(0xffffffffu, bin, holder);
}

/* The key of the k-th element of a line, and how many elements with that key are among the first k. */
template <class T>
ONT_DEVICE typename key_of<T>::type kth_key(const ont_select &s, const T *x, uint32_t *bins, uint32_t *found,
                                            uint32_t *equal)
{
    typedef typename key_of<T>::type K;
    K known = 0, mask = 0;
    uint32_t rest = (uint32_t)s.k;
    for (int shift = (int)sizeof(K) * 8 - DIGIT; shift >= 0; shift -= DIGIT) {
        for (int b = (int)threadIdx.x; b < BINS; b += (int)blockDim.x) bins[b] = 0;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < s.n; i += blockDim.x) {
            const K v = key(s, x[i * s.inner]);
            if ((v & mask) == known) atomicAdd(&bins[v >> shift & (BINS - 1)], 1u);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            const int bin = bin_of(bins, &rest);
            if (!threadIdx.x) {
                found[0] = (uint32_t)bin;
                found[1] = rest;
            }
        }
        __syncthreads();
        known |= (K)found[0] << shift;
        mask |= (K)(BINS - 1) << shift;
        rest = found[1];
        __syncthreads();
    }
    *equal = rest;
    return known;
}

/* The sum of v over the threads in front of this one; *all: over the block. scratch has an entry for each warp. */
ONT_DEVICE uint32_t sum_before(uint32_t v, uint32_t *scratch, uint32_t *all)
{
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    uint32_t sum = v, before = 0;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const uint32_t lower = __shfl_up_sync(0xffffffffu, sum, lanes);
        if (lane >= lanes) sum += lower;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    *all = 0;
    for (int w = 0; w < warps; w++) {
        if (w < warp) before += scratch[w];
        *all += scratch[w];
    }
    return before + sum - v;
}

/* Positions of the first k, in their order: those in front of the k-th key, behind them those that have it. */
template <class T, class K>
ONT_DEVICE void gather_first(const ont_select &s, const T *x, K last, uint32_t equal, uint32_t *scratch,
                             int64_t *positions)
{
    const uint32_t less = (uint32_t)s.k - equal;
    uint32_t less_before = 0, equal_before = 0;
    for (int64_t first = 0; first < s.n; first += blockDim.x) {
        const int64_t i = first + threadIdx.x;
        const K v = i < s.n ? key(s, x[i * s.inner]) : ~(K)0;
        const bool is_less = i < s.n && v < last, is_equal = i < s.n && v == last;
        uint32_t all; /* counts of a block have 9 bits: both in one number */
        const uint32_t before = sum_before((is_less ? 1u : 0u) | (is_equal ? 1u << 16 : 0u), scratch, &all);
        const uint32_t place = is_less ? less_before + (before & 0xffff) : less + equal_before + (before >> 16);
        if (is_less || (is_equal && place < s.k)) positions[place * s.inner] = i;
        less_before += all & 0xffff;
        equal_before += all >> 16;
    }
    __syncthreads();
}

template <class T>
ONT_DEVICE void exchange(const ont_select &s, const T *x, int64_t *positions, int64_t i, int64_t j, int64_t count)
{
    if (j >= count) return;
    const int64_t a = positions[i * s.inner], b = positions[j * s.inner];
    if (!precedes(s, x[b * s.inner], b, x[a * s.inner], a)) return;
    positions[i * s.inner] = b;
    positions[j * s.inner] = a;
}

/* Sorts the first `count` positions by their elements. */
template <class T> ONT_DEVICE void sort_first(const ont_select &s, const T *x, int64_t count, int64_t *positions)
{
    int64_t half = 1; /* of the power of two from `count` on */
    while (2 * half < count) half *= 2;
    for (int log = 0; count > 1 && (int64_t)1 << log <= half; log++) {
        const int64_t part = (int64_t)1 << log; /* two runs of so many sorted elements become one */
        for (int64_t t = threadIdx.x; t < half; t += blockDim.x) {
            const int64_t first = t >> log << (log + 1), at = t & (part - 1);
            exchange(s, x, positions, first + at, first + 2 * part - 1 - at, count);
        }
        __syncthreads();
        for (int step = log - 1; step >= 0; step--) {
            const int64_t apart = (int64_t)1 << step;
            for (int64_t t = threadIdx.x; t < half; t += blockDim.x) {
                const int64_t at = (t >> step << (step + 1)) + (t & (apart - 1));
                exchange(s, x, positions, at, at + apart, count);
            }
            __syncthreads();
        }
    }
}

/* values may be NULL. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    radix_select_kernel(const ont_select s, const T *x, T *values, int64_t *positions)
{
    __shared__ uint32_t bins[BINS], found[2], scratch[32];
    for (int64_t line = blockIdx.x; line < s.outer * s.inner; line += gridDim.x) {
        const int64_t outer = line / s.inner, column = line - outer * s.inner, to = outer * s.k * s.inner + column;
        const T *from = x + outer * s.n * s.inner + column;
        uint32_t equal;
        const typename key_of<T>::type last = kth_key(s, from, bins, found, &equal);
        gather_first(s, from, last, equal, scratch, positions + to);
        sort_first(s, from, s.k - equal, positions + to);
        for (int64_t i = threadIdx.x; values && i < s.k; i += blockDim.x)
            values[to + i * s.inner] = from[positions[to + i * s.inner] * s.inner];
        __syncthreads();
    }
}

/* A search of k passes is shorter than a select by digits and a sort. */
extern "C" int ont_select_needs_positions(const ont_select *s)
{
    const int64_t digits = s->dtype == ONT_FLOAT32 || s->dtype == ONT_INT32 ? 4 : 8;
    return s->k > digits && s->n < INT32_MAX;
}

template <class T> static int launch(const ont_select *s, const void *x, void *values, void *positions, void *stream)
{
    const int64_t lines = s->outer * s->inner;
    if (!lines || !s->k || !s->n) return 0;
    if (s->k == 1 && !values && s->inner >= 32)
        return ONT_LAUNCH(select_columns_kernel<T>, ont_blocks(lines, ONT_THREADS), ONT_THREADS, 0, stream, *s,
                          (const T *)x, (int64_t *)positions);
    if (ont_select_needs_positions(s))
        return ONT_LAUNCH(radix_select_kernel<T>, ont_blocks(lines, 1), ont_row_threads(s->n), 0, stream, *s,
                          (const T *)x, (T *)values, (int64_t *)positions);
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
