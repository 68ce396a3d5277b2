/*
 * Pooling, MaxUnpool and their gradients: a thread for each result, or a block for each plane where the window covers
 * the plane. The gradient gathers: every cell adds the terms of the windows over it in their order, so that the
 * result does not depend on the order of threads. The gradient of a maximum goes to the first largest cell of a
 * window, or to the last NaN.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/math.cuh"

/* ont_pool_span() on the device. */
ONT_DEVICE void span(const ont_pool &p, int d, int64_t o, int64_t *first, int64_t *end, int64_t *padded)
{
    if (p.adaptive) {
        *first = o * p.in[d] / p.out[d];
        *end = ((o + 1) * p.in[d] + p.out[d] - 1) / p.out[d];
        *padded = *end - *first;
        return;
    }
    int64_t start = o * p.stride[d] - p.begin[d], step = p.dilation[d], k = p.kernel[d];
    int64_t inside = start < p.in[d] ? (p.in[d] - start + step - 1) / step : 0;
    int64_t counted = start < p.limit[d] ? (p.limit[d] - start + step - 1) / step : 0;
    *first = start < 0 ? (-start + step - 1) / step : 0;
    *end = inside < k ? inside : k;
    if (*end < *first) *end = *first;
    *padded = counted < k ? counted : k;
}

struct window { /* kernel positions [lo, hi) of one output, from cell `start` */
    int64_t start[3], lo[3], hi[3], cells, padded;
};

ONT_DEVICE window window_of(const ont_pool &p, int64_t o)
{
    window w;
    int64_t at[3] = {o / p.out[2] / p.out[1], o / p.out[2] % p.out[1], o % p.out[2]};
    w.cells = w.padded = 1;
    for (int d = 0; d < 3; d++) {
        int64_t padded;
        span(p, d, at[d], &w.lo[d], &w.hi[d], &padded);
        w.start[d] = at[d] * p.stride[d] - p.begin[d];
        w.cells *= w.hi[d] - w.lo[d];
        w.padded *= padded;
    }
    return w;
}

ONT_DEVICE int64_t cell_of(const ont_pool &p, const window &w, int64_t a, int64_t b, int64_t c)
{
    return ((w.start[0] + a * p.dilation[0]) * p.in[1] + w.start[1] + b * p.dilation[1]) * p.in[2] + w.start[2] +
           c * p.dilation[2];
}

/* Where element i of planes of `count` cells is; in channels last, the planes of an image alternate. */
struct place {
    int64_t cell, plane;
};

ONT_DEVICE place place_of(int64_t i, int64_t channels, int64_t count)
{
    if (channels == 1) return {i % count, i / count};
    return {i / channels % count, i / channels / count * channels + i % channels};
}

/* The first element of a plane of `count` cells; the others are `channels` apart. */
ONT_DEVICE int64_t first_of(int64_t plane, int64_t channels, int64_t count)
{
    return channels == 1 ? plane * count : plane / channels * channels * count + plane % channels;
}

/* -1: the window has no cell. */
template <class T> ONT_DEVICE int64_t winner_of(const ont_pool &p, int64_t channels, const T *x, int64_t o)
{
    typedef typename ont_compute<T>::type A;
    window w = window_of(p, o);
    int64_t winner = -1;
    A max_value = 0;
    for (int64_t a = w.lo[0]; a < w.hi[0]; a++)
        for (int64_t b = w.lo[1]; b < w.hi[1]; b++)
            for (int64_t c = w.lo[2]; c < w.hi[2]; c++) {
                int64_t at = cell_of(p, w, a, b, c);
                A v = ont_load(x + at * channels);
                if (winner >= 0 && !(v > max_value) && v == v) continue;
                winner = at;
                max_value = v;
            }
    return winner;
}

ONT_DEVICE int64_t stored_index(const ont_pool &p, int64_t at)
{
    int64_t w = at % p.in[2], h = at / p.in[2] % p.in[1], d = at / p.in[2] / p.in[1];
    return p.column_major ? d + p.in[0] * (h + p.in[1] * w) : at;
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    pool_max_kernel(ont_pool p, int64_t channels, const T *x, T *y, int64_t *indices)
{
    ONT_FOR(i, p.planes * p.out_count)
    {
        place to = place_of(i, channels, p.out_count);
        int64_t first = first_of(to.plane, channels, p.in_count), winner = winner_of(p, channels, x + first, to.cell);
        if (winner < 0)
            ont_store(y + i, -INFINITY);
        else
            y[i] = x[first + winner * channels];
        if (indices) indices[i] = winner < 0 ? -1 : first + stored_index(p, winner);
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) pool_mean_kernel(ont_pool p, int64_t channels, const T *x, T *y)
{
    typedef typename ont_compute<T>::type A;
    ONT_FOR(i, p.planes * p.out_count)
    {
        place to = place_of(i, channels, p.out_count);
        window w = window_of(p, to.cell);
        const T *plane = x + first_of(to.plane, channels, p.in_count);
        A sum = 0;
        for (int64_t a = w.lo[0]; a < w.hi[0]; a++)
            for (int64_t b = w.lo[1]; b < w.hi[1]; b++)
                for (int64_t c = w.lo[2]; c < w.hi[2]; c++) sum += ont_load(plane + cell_of(p, w, a, b, c) * channels);
        ont_store(y + i, w.cells ? sum / (A)(p.include_pad ? w.padded : w.cells) : (A)NAN);
    }
}

template <class A> ONT_DEVICE A power(A v, A e) { return e == 1 ? v : e == 2 ? v * v : e == 0 ? (A)1 : vpow(v, e); }
template <class A> ONT_DEVICE A root(A v, A e) { return e == 1 ? v : e == 2 ? vsqrt(v) : vpow(v, 1 / e); }
template <class A> ONT_DEVICE A absolute(A v) { return vabs(v); }

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) pool_norm_kernel(ont_pool p, const T *x, T *y)
{
    typedef typename ont_compute<T>::type A;
    ONT_FOR(i, p.planes * p.out_count)
    {
        window w = window_of(p, i % p.out_count);
        const T *plane = x + i / p.out_count * p.in_count;
        A sum = 0;
        for (int64_t a = w.lo[0]; a < w.hi[0]; a++)
            for (int64_t b = w.lo[1]; b < w.hi[1]; b++)
                for (int64_t c = w.lo[2]; c < w.hi[2]; c++)
                    sum += power(absolute(ont_load(plane + cell_of(p, w, a, b, c))), (A)p.p);
        ont_store(y + i, root(sum, (A)p.p));
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) pool_plane_norm_kernel(ont_pool p, const T *x, T *y)
{
    typedef typename ont_compute<T>::type A;
    __shared__ A scratch[32];
    for (int64_t plane = blockIdx.x; plane < p.planes; plane += gridDim.x) {
        A sum = 0;
        for (int64_t i = threadIdx.x; i < p.in_count; i += blockDim.x)
            sum += power(absolute(ont_load(x + plane * p.in_count + i)), (A)p.p);
        sum = ont_block_sum(sum, scratch);
        if (!threadIdx.x) ont_store(y + plane, root(sum, (A)p.p));
        __syncthreads();
    }
}

/* The window covers the plane: a block for each. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS) pool_plane_mean_kernel(int64_t planes, int64_t count, const T *x, T *y)
{
    typedef typename ont_compute<T>::type A;
    __shared__ A scratch[32];
    for (int64_t plane = blockIdx.x; plane < planes; plane += gridDim.x) {
        A sum = 0;
        for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += ont_load(x + plane * count + i);
        sum = ont_block_sum(sum, scratch);
        if (!threadIdx.x) ont_store(y + plane, sum / (A)count);
        __syncthreads();
    }
}

/* ---- gradients ---- */

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    pool_winners_kernel(ont_pool p, int64_t channels, const T *x, int32_t *winners)
{
    ONT_FOR(i, p.planes * p.out_count)
    {
        place of = place_of(i, channels, p.out_count);
        winners[i] = (int32_t)winner_of(p, channels, x + first_of(of.plane, channels, p.in_count), of.cell);
    }
}

/* Outputs [first, last] whose windows cover cell `at` of dim d. */
ONT_DEVICE void outputs_over(const ont_pool &p, int d, int64_t at, int64_t *first, int64_t *last)
{
    if (p.adaptive) {
        *first = at * p.out[d] / p.in[d];
        *last = ((at + 1) * p.out[d] + p.in[d] - 1) / p.in[d] - 1;
        return;
    }
    int64_t reach = (p.kernel[d] - 1) * p.dilation[d], from = at + p.begin[d] - reach;
    *first = from > 0 ? (from + p.stride[d] - 1) / p.stride[d] : 0;
    *last = (at + p.begin[d]) / p.stride[d];
    if (*last >= p.out[d]) *last = p.out[d] - 1;
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    pool_grad_kernel(ont_pool p, int64_t channels, const int32_t *winners, const T *x, const T *dy, const T *y, T *dx)
{
    typedef typename ont_compute<T>::type A;
    ONT_FOR(i, p.planes * p.in_count)
    {
        const A own = y ? ont_load(x + i) : (A)0;
        place to = place_of(i, channels, p.in_count);
        int64_t cell = to.cell, outputs = first_of(to.plane, channels, p.out_count), first[3], last[3];
        int64_t at[3] = {cell / p.in[2] / p.in[1], cell / p.in[2] % p.in[1], cell % p.in[2]};
        for (int d = 0; d < 3; d++) outputs_over(p, d, at[d], &first[d], &last[d]);
        A sum = 0;
        for (int64_t a = first[0]; a <= last[0]; a++) {
            if ((at[0] + p.begin[0] - a * p.stride[0]) % p.dilation[0]) continue;
            for (int64_t b = first[1]; b <= last[1]; b++) {
                if ((at[1] + p.begin[1] - b * p.stride[1]) % p.dilation[1]) continue;
                for (int64_t c = first[2]; c <= last[2]; c++) {
                    if ((at[2] + p.begin[2] - c * p.stride[2]) % p.dilation[2]) continue;
                    int64_t o = (a * p.out[1] + b) * p.out[2] + c, from = outputs + o * channels;
                    if (winners) {
                        if (winners[from] == cell) sum += ont_load(dy + from);
                        continue;
                    }
                    if (y) { /* of a p-norm: dy * sign(x) * (|x| / y)^(p - 1) */
                        const A norm = ont_load(y + from), sign = (A)((own > 0) - (own < 0));
                        if (norm != 0) sum += ont_load(dy + from) * sign * power(absolute(own) / norm, (A)p.p - 1);
                        continue;
                    }
                    window w = window_of(p, o);
                    sum += ont_load(dy + from) / (A)(p.include_pad ? w.padded : w.cells);
                }
            }
        }
        ont_store(dx + i, sum);
    }
}

/* ---- launchers ---- */

template <class T>
static int forward(const ont_image_pool *image, const void *x, void *y, int64_t *indices, void *stream)
{
    const ont_pool *p = &image->planes;
    int64_t channels = image->channels;
    int64_t n = p->planes * p->out_count;
    if (!n) return 0;
    if (p->kind == ONT_POOL_MAX)
        return ONT_LAUNCH(pool_max_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *p, channels,
                          (const T *)x, (T *)y, indices);
    bool whole = channels == 1 && p->out_count == 1 && p->kernel[0] == 1 && p->kernel[1] == 1 &&
                 p->kernel[2] == p->in_count && !p->begin[2] && p->limit[2] == p->in[2];
    if (p->kind == ONT_POOL_LP && whole)
        return ONT_LAUNCH(pool_plane_norm_kernel<T>, ont_blocks(p->planes, 1), ont_row_threads(p->in_count), 0, stream,
                          *p, (const T *)x, (T *)y);
    if (p->kind == ONT_POOL_LP)
        return ONT_LAUNCH(pool_norm_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *p, (const T *)x,
                          (T *)y);
    if (whole)
        return ONT_LAUNCH(pool_plane_mean_kernel<T>, ont_blocks(p->planes, 1), ont_row_threads(p->in_count), 0, stream,
                          p->planes, p->in_count, (const T *)x, (T *)y);
    return ONT_LAUNCH(pool_mean_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *p, channels,
                      (const T *)x, (T *)y);
}

template <class T>
static int backward(const ont_image_pool *image, const void *const *in, void *dx, int32_t *winners, void *stream)
{
    const ont_pool *p = &image->planes;
    int64_t channels = image->channels;
    int64_t outputs = p->planes * p->out_count, cells = p->planes * p->in_count;
    int error = 0;
    if (p->kind != ONT_POOL_MAX) winners = nullptr;
    if (winners && outputs)
        error = ONT_LAUNCH(pool_winners_kernel<T>, ont_blocks(outputs, ONT_THREADS), ONT_THREADS, 0, stream, *p,
                           channels, (const T *)in[0], winners);
    if (!error && cells)
        error = ONT_LAUNCH(pool_grad_kernel<T>, ont_blocks(cells, ONT_THREADS), ONT_THREADS, 0, stream, *p, channels,
                           (const int32_t *)winners, (const T *)in[0], (const T *)in[1],
                           (const T *)(p->kind == ONT_POOL_LP ? in[2] : nullptr), (T *)dx);
    return error;
}

extern "C" size_t ont_pool_grad_work(const ont_pool *p)
{
    return p->kind == ONT_POOL_MAX ? (size_t)(p->planes * p->out_count) * sizeof(int32_t) : 0;
}

extern "C" int ont_launch_pool(int dtype, const ont_image_pool *p, const void *x, void *y, int64_t *indices,
                               void *stream)
{
    switch (dtype) {
    case ONT_FLOAT32: return forward<float>(p, x, y, indices, stream);
    case ONT_FLOAT64: return forward<double>(p, x, y, indices, stream);
    case ONT_FLOAT16: return forward<ont_f16>(p, x, y, indices, stream);
    default: return forward<ont_bf16>(p, x, y, indices, stream);
    }
}

extern "C" int ont_launch_pool_grad(int dtype, const ont_image_pool *p, const void *const *in, void *dx, void *work,
                                    void *stream)
{
    switch (dtype) {
    case ONT_FLOAT32: return backward<float>(p, in, dx, (int32_t *)work, stream);
    case ONT_FLOAT64: return backward<double>(p, in, dx, (int32_t *)work, stream);
    case ONT_FLOAT16: return backward<ont_f16>(p, in, dx, (int32_t *)work, stream);
    default: return backward<ont_bf16>(p, in, dx, (int32_t *)work, stream);
    }
}

/* ---- MaxUnpool ---- */

/* Element of the result that value i belongs to; -1, and a reported fault, where the index is out of range. */
ONT_DEVICE int64_t unpooled(const ont_unpool_shape &s, const int64_t *indices, int64_t i)
{
    int64_t rest = indices[i], at = 0, step = 1;
    bool outside = rest < 0 || rest >= s.from_count;
    for (int d = s.rank - 1; d >= 0 && !outside; d--) {
        const int64_t cell = rest % s.from[d];
        rest /= s.from[d];
        outside = cell >= s.to[d];
        at += cell * step;
        step *= s.to[d];
    }
    if (!outside) return at;
    ont_report(s.fault, ONT_FAULT_INDEX, s.step, indices[i], i, s.from_count);
    return -1;
}

/* last[at] = 1 + the position of the last value there, 0 where there is none */
__global__ void __launch_bounds__(ONT_THREADS)
    unpool_last_kernel(const ont_unpool_shape s, const int64_t *indices, int32_t *last)
{
    ONT_FOR(i, s.count)
    {
        const int64_t at = unpooled(s, indices, i);
        if (at >= 0) atomicMax(&last[at], (int32_t)i + 1);
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    unpool_kernel(const ont_unpool_shape s, const T *x, const int32_t *last, T *y)
{
    ONT_FOR(i, s.to_count) { y[i] = last[i] ? x[last[i] - 1] : T(); }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    unpool_grad_kernel(const ont_unpool_shape s, const T *dy, const int64_t *indices, T *dx)
{
    ONT_FOR(i, s.count)
    {
        const int64_t at = unpooled(s, indices, i);
        dx[i] = at < 0 ? T() : dy[at];
    }
}

#define BY_SIZE(run) \
    switch (s->size) { \
    case 1: return run(uint8_t); \
    case 2: return run(uint16_t); \
    case 4: return run(uint32_t); \
    default: return run(uint64_t); \
    }

extern "C" int ont_launch_unpool(const ont_unpool_shape *s, const void *x, const int64_t *indices, void *y,
                                 int32_t *last, void *stream)
{
    const unsigned blocks = ont_blocks(s->to_count, ONT_THREADS);
    if (!s->to_count) return 0;
    int error = 0;
    if (s->count)
        error = ONT_LAUNCH(unpool_last_kernel, ont_blocks(s->count, ONT_THREADS), ONT_THREADS, 0, stream, *s, indices,
                           last);
    if (error) return error;
#define WRITE(type) \
    ONT_LAUNCH(unpool_kernel<type>, blocks, ONT_THREADS, 0, stream, *s, (const type *)x, (const int32_t *)last, \
               (type *)y)
    BY_SIZE(WRITE)
#undef WRITE
}

extern "C" int ont_launch_unpool_grad(const ont_unpool_shape *s, const void *dy, const int64_t *indices, void *dx,
                                      void *stream)
{
    if (!s->count) return 0;
#define READ(type) \
    ONT_LAUNCH(unpool_grad_kernel<type>, ont_blocks(s->count, ONT_THREADS), ONT_THREADS, 0, stream, *s, \
               (const type *)dy, indices, (type *)dx)
    BY_SIZE(READ)
#undef READ
}
