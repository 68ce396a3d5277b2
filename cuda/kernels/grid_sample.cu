/*
 * GridSample and DeformCols: values between the cells of an image, and the gradients of image, points and mask.
 * Coordinates and weights are computed in float64, as on the CPU, so that both read the same cells.
 *
 * Many points may read one cell, and its gradient is their sum in one order: taps (cell, number of the tap) are sorted
 * by a stable sort, and a thread adds those of a cell for some channels. A block adds those of a cell that has more
 * than LONG_RUN. The scratch has 24 bytes for each tap of float32: 4 taps for a point between the cells of a plane.
 */
#include "kernels/launch.cuh"

#define ONT_FUNCTION ONT_DEVICE
#include "kernels/kernels.h"
#include "ops/support/sample_axis.h"

#ifdef ONT_EMULATE
#define UNROLL_TAPS (void)UNROLLED;
enum { CHANNELS = 2, LONG_RUN = 32, GROUPS = 2 }; /* so that small cases of tests have several of each */
#else
#define UNROLL_TAPS _Pragma("unroll UNROLLED")
enum { CHANNELS = 8, LONG_RUN = 512, GROUPS = 16 }; /* channels of a thread; groups of channels of a long run */
#endif

/* TAPS: of an axis, which says the mode; the sampler's own is then known to the compiler. */
template <int RANK, int TAPS> struct point_taps {
    enum { COUNT = (RANK > 2 ? TAPS : 1) * (RANK > 1 ? TAPS : 1) * TAPS, UNROLLED = COUNT > 8 ? 1 : COUNT };
    ont_axis_taps axis[RANK];
};

/* Where the point lies before it is moved: cell k of window o. */
template <int RANK> ONT_DEVICE void place_of(const ont_sampling &s, uint32_t k, uint32_t o, double *x)
{
    ONT_UNROLL
    for (int d = RANK - 1; d >= 0; d--) {
        const uint32_t above = o / (uint32_t)s.out[d], row = k / (uint32_t)s.kernel[d];
        x[d] = (double)((o - above * s.out[d]) * s.stride[d] + (k - row * s.kernel[d]) * s.dilation[d] - s.begin[d]);
        o = above;
        k = row;
    }
}

template <class T, int RANK, int TAPS>
ONT_DEVICE void taps_of(const ont_sampling &s, const T *at, int64_t image, uint32_t p, point_taps<RANK, TAPS> *to)
{
    ont_sampler sampler = s.sampler;
    sampler.mode = TAPS == 1 ? ONT_SAMPLE_NEAREST : TAPS == 2 ? ONT_SAMPLE_LINEAR : ONT_SAMPLE_CUBIC;
    double x[RANK];
    if (s.windows) {
        const uint32_t windows = (uint32_t)s.windows, k = p / windows, o = p - k * windows;
        const int64_t cells = (uint32_t)s.points / windows;
        place_of<RANK>(s, k, o, x);
        for (int d = 0; d < RANK; d++) x[d] += (double)at[((image * cells + k) * RANK + d) * s.windows + o];
    } else {
        for (int d = 0; d < RANK; d++) { /* the grid's coordinates begin with the last dim */
            const double u = (double)at[(image * s.points + p) * RANK + RANK - 1 - d];
            x[d] = (u + 1) * ont_sample_unit(&sampler, d) - (sampler.corners ? 0 : 0.5);
        }
    }
    ONT_UNROLL
    for (int d = 0; d < RANK; d++) {
        ont_sample_axis(&sampler, d, x[d], &to->axis[d]);
        for (int j = 0; j < TAPS; j++)
            if (j >= to->axis[d].n) to->axis[d].cell[j] = -1;
    }
}

/* Tap t of all: its cell, or -1, and its weight; slopes may be NULL. */
template <int RANK, int TAPS>
ONT_DEVICE int64_t tap_of(const ont_sampling &s, const point_taps<RANK, TAPS> &p, int t, double *weight, double *slope)
{
    int64_t cell = 0, step = 1;
    double product = 1;
    ONT_UNROLL
    for (int d = RANK - 1, rest = t; d >= 0; d--, rest /= TAPS) {
        const int j = rest % TAPS;
        if (p.axis[d].cell[j] < 0) return -1;
        cell += p.axis[d].cell[j] * step;
        step *= s.sampler.dims[d];
        product *= p.axis[d].weight[j];
    }
    *weight = product;
    if (!slope) return cell;
    ONT_UNROLL
    for (int d = 0; d < RANK; d++) {
        slope[d] = 1;
        ONT_UNROLL
        for (int e = RANK - 1, rest = t; e >= 0; e--, rest /= TAPS)
            slope[d] *= e == d ? p.axis[e].slope[rest % TAPS] : p.axis[e].weight[rest % TAPS];
    }
    return cell;
}

/* A thread for each point of some channels. */
template <class T, int RANK, int TAPS>
__global__ void __launch_bounds__(ONT_THREADS, 2)
    sample_kernel(const ont_sampling s, const T *x, const T *at, const T *mask, T *y)
{
    const int64_t chunks = (s.channels + CHANNELS - 1) / CHANNELS;
    ONT_FOR(i, s.images * chunks * s.points)
    {
        const uint32_t row = (uint32_t)i / (uint32_t)s.points, p = (uint32_t)i - row * (uint32_t)s.points;
        const int64_t image = row / (uint32_t)chunks, first = row % (uint32_t)chunks * CHANNELS;
        const int n = s.channels - first < CHANNELS ? (int)(s.channels - first) : (int)CHANNELS;
        const T *from = x + (image * s.channels + first) * s.cells;
        point_taps<RANK, TAPS> taps;
        T sum[CHANNELS];
        taps_of<T, RANK, TAPS>(s, at, image, p, &taps);
        for (int c = 0; c < CHANNELS; c++) sum[c] = 0;
        constexpr int UNROLLED = point_taps<RANK, TAPS>::UNROLLED;
        UNROLL_TAPS
        for (int t = 0; t < taps.COUNT; t++) {
            double weight;
            const int64_t cell = tap_of<RANK, TAPS>(s, taps, t, &weight, nullptr);
            if (cell < 0) continue;
            for (int c = 0; c < CHANNELS; c++)
                if (c < n) sum[c] += (T)weight * from[c * s.cells + cell];
        }
        const T scale = mask ? mask[image * s.points + p] : (T)1;
        for (int c = 0; c < CHANNELS; c++)
            if (c < n) y[(image * s.channels + first + c) * s.points + p] = scale * sum[c];
    }
}

/* The gradients of points and mask; either may be NULL. A thread for each point, over all channels. */
template <class T, int RANK, int TAPS>
__global__ void __launch_bounds__(ONT_THREADS, 2)
    sample_points_kernel(const ont_sampling s, const T *x, const T *at, const T *mask, const T *dy, T *dat, T *dmask)
{
    ONT_FOR(i, s.images * s.points)
    {
        const uint32_t points = (uint32_t)s.points, image = (uint32_t)i / points, p = (uint32_t)i - image * points;
        const T *from = x + image * (s.channels * s.cells), *grad = dy + image * s.channels * s.points + p;
        point_taps<RANK, TAPS> taps;
        double moved[RANK], value = 0;
        taps_of<T, RANK, TAPS>(s, at, image, p, &taps);
        for (int d = 0; d < RANK; d++) moved[d] = 0;
        constexpr int UNROLLED = point_taps<RANK, TAPS>::UNROLLED;
        UNROLL_TAPS
        for (int t = 0; t < taps.COUNT; t++) {
            double weight, slope[RANK];
            const int64_t cell = tap_of<RANK, TAPS>(s, taps, t, &weight, slope);
            if (cell < 0) continue;
            T sum = 0;
            for (int64_t c = 0; c < s.channels; c++) sum += grad[c * s.points] * from[c * s.cells + cell];
            value += weight * (double)sum;
            for (int d = 0; d < RANK; d++) moved[d] += slope[d] * (double)sum;
        }
        if (dmask) dmask[i] = (T)value;
        if (!dat) continue;
        if (s.windows) {
            const uint32_t windows = (uint32_t)s.windows, k = p / windows, o = p - k * windows;
            const int64_t cells = points / windows;
            const double scale = mask ? (double)mask[i] : 1;
            for (int d = 0; d < RANK; d++)
                dat[((image * cells + k) * RANK + d) * windows + o] = (T)(scale * moved[d]);
            continue;
        }
        for (int d = 0; d < RANK; d++) /* rounding has the slope 0 */
            dat[i * RANK + RANK - 1 - d] = TAPS == 1 ? (T)0 : (T)(moved[d] * ont_sample_unit(&s.sampler, d));
    }
}

/* ---- the gradient of x ---- */

/* keys: image * cells + cell, or images * cells where a tap adds nothing. A point of a grid with a NaN has no cell. */
template <class T, int RANK, int TAPS>
__global__ void __launch_bounds__(ONT_THREADS)
    sample_items_kernel(const ont_sampling s, const T *at, const T *mask, int32_t *keys, T *weights)
{
    constexpr int EACH = point_taps<RANK, TAPS>::COUNT;
    ONT_FOR(i, s.images * s.points)
    {
        const uint32_t points = (uint32_t)s.points, image = (uint32_t)i / points, p = (uint32_t)i - image * points;
        const double scale = mask ? (double)mask[i] : 1;
        point_taps<RANK, TAPS> taps;
        taps_of<T, RANK, TAPS>(s, at, image, p, &taps);
        constexpr int UNROLLED = point_taps<RANK, TAPS>::UNROLLED;
        UNROLL_TAPS
        for (int t = 0; t < EACH; t++) {
            double weight = 0;
            const int64_t cell = tap_of<RANK, TAPS>(s, taps, t, &weight, nullptr);
            const bool adds = cell >= 0 && (s.windows || weight == weight);
            keys[i * EACH + t] = (int32_t)(adds ? image * s.cells + cell : s.images * s.cells);
            weights[i * EACH + t] = (T)(scale * weight);
        }
    }
}

/* starts[k]: the first of the sorted taps whose key is k or more */
__global__ void __launch_bounds__(ONT_THREADS)
    sample_starts_kernel(int64_t count, int64_t table, const ont_pair *sorted, int32_t *starts)
{
    ONT_FOR(key, table + 1)
    {
        int64_t low = 0, high = count;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (sorted[middle].key < key)
                low = middle + 1;
            else
                high = middle;
        }
        starts[key] = (int32_t)low;
    }
}

/* Taps by cell, and `each` of a point; those of cell k are starts[k] to starts[k + 1]. */
struct sorted_taps {
    const ont_pair *sorted;
    const int32_t *starts;
    int each;
};

/* A thread for each cell of some channels; longer runs are left to the kernel below. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    sample_sums_kernel(const ont_sampling s, const sorted_taps taps, const T *weights, const T *dy, T *dx)
{
    const int64_t chunks = (s.channels + CHANNELS - 1) / CHANNELS;
    ONT_FOR(i, s.images * chunks * s.cells)
    {
        const uint32_t row = (uint32_t)i / (uint32_t)s.cells, cell = (uint32_t)i - row * (uint32_t)s.cells;
        const int64_t image = row / (uint32_t)chunks, first = row % (uint32_t)chunks * CHANNELS;
        const int n = s.channels - first < CHANNELS ? (int)(s.channels - first) : (int)CHANNELS;
        const int32_t start = taps.starts[image * s.cells + cell], end = taps.starts[image * s.cells + cell + 1];
        if (end - start > LONG_RUN) continue;
        const T *from = dy + (image * s.channels + first) * s.points - image * s.points;
        T sum[CHANNELS];
        for (int c = 0; c < CHANNELS; c++) sum[c] = 0;
        for (int32_t k = start; k < end; k++) {
            const int32_t position = taps.sorted[k].position, point = position / taps.each;
            for (int c = 0; c < CHANNELS; c++)
                if (c < n) sum[c] += weights[position] * from[c * s.points + point];
        }
        for (int c = 0; c < CHANNELS; c++)
            if (c < n) dx[(image * s.channels + first + c) * s.cells + cell] = sum[c];
    }
}

/* A block for each LONG_RUN taps and each group of channels: it has work where a longer run begins among these taps, of
 * which there is one at most. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    sample_long_sums_kernel(const ont_sampling s, uint32_t groups, const sorted_taps taps, const T *weights,
                            const T *dy, T *dx)
{
    __shared__ T scratch[32];
    const int64_t count = s.images * s.points * taps.each, pieces = count / LONG_RUN, table = s.images * s.cells;
    for (int64_t item = blockIdx.x; item < pieces * groups; item += gridDim.x) {
        const uint32_t piece = (uint32_t)item / groups;
        const int64_t next = (piece + 1) * LONG_RUN; /* the first tap behind these, which such a run has */
        if (next >= count) continue;
        const int32_t key = taps.sorted[next].key;
        if (key >= table) continue;
        const int32_t start = taps.starts[key], end = taps.starts[key + 1];
        if (start >= next || start < next - LONG_RUN || end - start <= LONG_RUN) continue; /* alike in all threads */
        const int64_t image = (uint32_t)key / (uint32_t)s.cells, cell = key - image * s.cells;
        for (int64_t c = (uint32_t)item - piece * groups; c < s.channels; c += groups) {
            const T *from = dy + (image * s.channels + c) * s.points - image * s.points;
            T sum = 0;
            for (int32_t k = start + (int32_t)threadIdx.x; k < end; k += (int32_t)blockDim.x)
                sum += weights[taps.sorted[k].position] * from[taps.sorted[k].position / taps.each];
            sum = ont_block_sum(sum, scratch);
            if (!threadIdx.x) dx[(image * s.channels + c) * s.cells + cell] = sum;
            __syncthreads();
        }
    }
}

/* ---- launchers ---- */

static int taps_of_axis(const ont_sampling *s)
{
    return s->sampler.mode == ONT_SAMPLE_NEAREST ? 1 : s->sampler.mode == ONT_SAMPLE_LINEAR ? 2 : 4;
}

static int64_t taps_of_point(const ont_sampling *s)
{
    int64_t n = 1;
    for (int d = 0; d < s->sampler.rank; d++) n *= taps_of_axis(s);
    return n;
}

/* Scratch for dx. */
struct parts {
    size_t weights, starts, sort, bytes; /* keys are first */
};

static parts parts_of(const ont_sampling *s)
{
    const int64_t count = s->images * s->points * taps_of_point(s);
    const size_t each = s->dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float);
    parts p;
    p.weights = ((size_t)count * sizeof(int32_t) + 15) / 16 * 16;
    p.starts = p.weights + ((size_t)count * each + 15) / 16 * 16;
    p.sort = p.starts + ((size_t)(s->images * s->cells + 1) * sizeof(int32_t) + 15) / 16 * 16;
    p.bytes = p.sort + ont_sort_work(count);
    return p;
}

extern "C" size_t ont_sample_grad_work(const ont_sampling *s) { return parts_of(s).bytes; }

template <class T, int RANK, int TAPS>
static int forward(const ont_sampling *s, const void *const *in, void *y, void *stream)
{
    const int64_t n = s->images * ((s->channels + CHANNELS - 1) / CHANNELS) * s->points;
    if (!n) return 0;
    return ONT_LAUNCH((sample_kernel<T, RANK, TAPS>), ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s,
                      (const T *)in[0], (const T *)in[1], (const T *)in[2], (T *)y);
}

template <class T>
static int sums(const ont_sampling *s, const sorted_taps &taps, const T *weights, const T *dy, T *dx, void *stream)
{
    const int64_t n = s->images * ((s->channels + CHANNELS - 1) / CHANNELS) * s->cells;
    const int64_t pieces = s->images * s->points * taps.each / LONG_RUN, most = GROUPS;
    const int64_t groups = s->channels < most ? s->channels : most;
    const int error = ONT_LAUNCH(sample_sums_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s, taps,
                                 weights, dy, dx);
    if (error || !pieces) return error;
    return ONT_LAUNCH(sample_long_sums_kernel<T>, ont_blocks(pieces * groups, 1), ont_row_threads(LONG_RUN), 0, stream,
                      *s, (uint32_t)groups, taps, weights, dy, dx);
}

template <class T, int RANK, int TAPS>
static int image_gradient(const ont_sampling *s, const void *const *in, void *dx, void *work, void *stream)
{
    const parts p = parts_of(s);
    const int64_t n = s->images * s->points, count = n * point_taps<RANK, TAPS>::COUNT, table = s->images * s->cells;
    int32_t *keys = (int32_t *)work, *starts = (int32_t *)((char *)work + p.starts);
    T *weights = (T *)((char *)work + p.weights);
    const ont_pair *sorted = nullptr;
    int error = 0;
    if (!table || !s->channels) return 0;
    if (n)
        error = ONT_LAUNCH((sample_items_kernel<T, RANK, TAPS>), ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s,
                           (const T *)in[1], (const T *)in[2], keys, weights);
    if (!error) error = ont_launch_sort(count, table, keys, (char *)work + p.sort, &sorted, stream);
    if (!error)
        error = ONT_LAUNCH(sample_starts_kernel, ont_blocks(table + 1, ONT_THREADS), ONT_THREADS, 0, stream, count,
                           table, sorted, starts);
    if (error) return error;
    const sorted_taps taps = {sorted, starts, point_taps<RANK, TAPS>::COUNT};
    return sums<T>(s, taps, weights, (const T *)in[3], (T *)dx, stream);
}

template <class T, int RANK, int TAPS>
static int backward(const ont_sampling *s, const void *const *in, void *const *out, void *work, void *stream)
{
    const int64_t n = s->images * s->points;
    int error = 0;
    if (out[0]) error = image_gradient<T, RANK, TAPS>(s, in, out[0], work, stream);
    if (error || !n || (!out[1] && !out[2])) return error;
    return ONT_LAUNCH((sample_points_kernel<T, RANK, TAPS>), ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s,
                      (const T *)in[0], (const T *)in[1], (const T *)in[2], (const T *)in[3], (T *)out[1],
                      (T *)out[2]);
}

#define BY_MODE(f, type, rank, ...) \
    (taps_of_axis(s) == 1 ? f<type, rank, 1>(__VA_ARGS__) \
     : taps_of_axis(s) == 2 ? f<type, rank, 2>(__VA_ARGS__) : f<type, rank, 4>(__VA_ARGS__))
#define BY_RANK(f, type, ...) \
    (s->sampler.rank == 1 ? BY_MODE(f, type, 1, __VA_ARGS__) \
     : s->sampler.rank == 2 ? BY_MODE(f, type, 2, __VA_ARGS__) : BY_MODE(f, type, 3, __VA_ARGS__))
#define BY_DTYPE(f, ...) (s->dtype == ONT_FLOAT64 ? BY_RANK(f, double, __VA_ARGS__) : BY_RANK(f, float, __VA_ARGS__))

extern "C" int ont_launch_sample(const ont_sampling *s, const void *const *in, void *y, void *stream)
{
    return BY_DTYPE(forward, s, in, y, stream);
}

extern "C" int ont_launch_sample_grad(const ont_sampling *s, const void *const *in, void *const *out, void *work,
                                      void *stream)
{
    return BY_DTYPE(backward, s, in, out, work, stream);
}
