/*
 * GroupNorm and its gradient: a block for each group of an image, whose elements are contiguous. The gradient sums over
 * each channel of each image first; both sums over a group and sums over images add these in order. 16-bit x and y have
 * float32 scale, bias and statistics. Where whole accesses of 16 bytes fit a channel, elements are read and written so.
 */
#include "kernels/chunks.cuh"

#include "kernels/kernels.h"
#include "kernels/units.cuh"

/* Threads for a group of m elements, of which there are few: up to 512. */
static inline unsigned group_threads(int64_t m)
{
#ifdef ONT_EMULATE
    return m <= 32 ? 32 : 64;
#else
    return m > 4096 ? 512 : ont_row_threads(m);
#endif
}

/* means and invs, the inverse standard deviations (n, groups), may be NULL. A is the type of the arithmetic. */
template <class T, class A> struct norm_operands {
    const T *x;
    const A *scale, *bias;
    T *y;
    A *means, *invs;
};

/* x (n, groups, channels, d), in chunks of N elements, each of one channel */
template <class T, class A, int N>
__global__ void __launch_bounds__(512)
    group_norm_kernel(const ont_groupnorm s, const divisor d, const norm_operands<T, A> o)
{
    __shared__ A scratch[32];
    const uint32_t m = (uint32_t)(s.channels * s.d);
    for (int64_t row = blockIdx.x; row < s.n * s.groups; row += gridDim.x) {
        const T *from = o.x + row * m;
        const int64_t first = row % s.groups * s.channels;
        A sum = 0, square = 0, v[N];
        for (uint32_t i = threadIdx.x * N; i < m; i += blockDim.x * N) {
            load_chunk(from + i, v);
            ONT_UNROLL
            for (int j = 0; j < N; j++) sum += v[j];
        }
        const A mean = ont_block_sum(sum, scratch) / (A)m;
        for (uint32_t i = threadIdx.x * N; i < m; i += blockDim.x * N) {
            load_chunk(from + i, v);
            ONT_UNROLL
            for (int j = 0; j < N; j++) square += (v[j] - mean) * (v[j] - mean);
        }
        const A inv = 1 / sqrt(ont_block_sum(square, scratch) / (A)m + (A)s.eps);
        for (uint32_t i = threadIdx.x * N; i < m; i += blockDim.x * N) {
            const int64_t c = first + quotient(i, d);
            const A slope = inv * o.scale[c], bias = o.bias[c];
            load_chunk(from + i, v);
            ONT_UNROLL
            for (int j = 0; j < N; j++) v[j] = (v[j] - mean) * slope + bias;
            store_chunk(o.y + row * m + i, v);
        }
        if (threadIdx.x) continue;
        if (o.means) o.means[row] = mean;
        if (o.invs) o.invs[row] = inv;
    }
}

/* sums and dots (n, groups * channels): sums of dy and of dy * xhat over each channel of each image */
template <class T, class A> struct grad_operands {
    const T *x;
    const A *scale, *means, *invs;
    const T *dy;
    A *sums, *dots;
};

template <class T, class A, int N>
__global__ void __launch_bounds__(512) group_norm_sums_kernel(const ont_groupnorm s, const grad_operands<T, A> o)
{
    __shared__ A scratch[32];
    for (int64_t row = blockIdx.x; row < s.n * s.groups * s.channels; row += gridDim.x) {
        const int64_t group = row / s.channels;
        const A mean = o.means[group], inv = s.d ? o.invs[group] : 0; /* invs of empty groups are NaN */
        A sum = 0, dot = 0, x[N], dy[N];
        for (int64_t i = row * s.d + threadIdx.x * N; i < (row + 1) * s.d; i += blockDim.x * N) {
            load_chunk(o.x + i, x);
            load_chunk(o.dy + i, dy);
            ONT_UNROLL
            for (int j = 0; j < N; j++) {
                sum += dy[j];
                dot += dy[j] * (x[j] - mean);
            }
        }
        sum = ont_block_sum(sum, scratch);
        dot = ont_block_sum(dot, scratch);
        if (threadIdx.x) continue;
        o.sums[row] = sum;
        o.dots[row] = dot * inv;
    }
}

/* dx = inv (g - mean(g) - xhat mean(g xhat)), with g = dy * scale */
template <class T, class A, int N>
__global__ void __launch_bounds__(512)
    group_norm_grad_kernel(const ont_groupnorm s, const divisor d, const grad_operands<T, A> o, T *dx)
{
    __shared__ A scratch[32];
    const uint32_t m = (uint32_t)(s.channels * s.d);
    for (int64_t row = blockIdx.x; row < s.n * s.groups; row += gridDim.x) {
        const A *weights = o.scale + row % s.groups * s.channels, mean = o.means[row], inv = o.invs[row];
        A sum = 0, dot = 0, x[N], dy[N];
        for (int64_t c = threadIdx.x; c < s.channels; c += blockDim.x) {
            sum += o.sums[row * s.channels + c] * weights[c];
            dot += o.dots[row * s.channels + c] * weights[c];
        }
        const A shift = ont_block_sum(sum, scratch) / (A)m, slope = ont_block_sum(dot, scratch) / (A)m * inv;
        for (uint32_t i = threadIdx.x * N; i < m; i += blockDim.x * N) {
            const int64_t at = row * m + i;
            const A weight = weights[quotient(i, d)];
            load_chunk(o.x + at, x);
            load_chunk(o.dy + at, dy);
            ONT_UNROLL
            for (int j = 0; j < N; j++) dy[j] = inv * (dy[j] * weight - shift - (x[j] - mean) * slope);
            store_chunk(dx + at, dy);
        }
    }
}

/* dscale and dbias: the sums of the images, added in order */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    group_norm_channels_kernel(const ont_groupnorm s, const T *sums, const T *dots, T *dscale, T *dbias)
{
    const int64_t all = s.groups * s.channels;
    ONT_FOR(c, all)
    {
        T sum = 0, dot = 0;
        for (int64_t n = 0; n < s.n; n++) {
            sum += sums[n * all + c];
            dot += dots[n * all + c];
        }
        if (dscale) dscale[c] = dot;
        if (dbias) dbias[c] = sum;
    }
}

/* Whether chunks of 16 bytes lie in one channel each. */
template <class T> static bool in_chunks(const ont_groupnorm *s, const void *x, const void *y, const void *z)
{
    const void *pointers[] = {x, y, z};
    return s->d % (16 / (int64_t)sizeof(T)) == 0 && are_aligned(pointers, 3);
}

template <class T>
static int launch(const ont_groupnorm *s, const void *const *in, void *const *out, void *stream)
{
    typedef typename ont_compute<T>::type A;
    enum { N = 16 / sizeof(T) };
    const int64_t m = s->channels * s->d;
    const norm_operands<T, A> o = {(const T *)in[0], (const A *)in[1], (const A *)in[2],
                                   (T *)out[0], (A *)out[1], (A *)out[2]};
    const divisor d = divisor_of(s->d ? (uint32_t)s->d : 1);
    const unsigned blocks = ont_blocks(s->n * s->groups, 1);
    if (!s->n) return 0;
    if (in_chunks<T>(s, in[0], out[0], NULL))
        return ONT_LAUNCH((group_norm_kernel<T, A, N>), blocks, group_threads(m / N), 0, stream, *s, d, o);
    return ONT_LAUNCH((group_norm_kernel<T, A, 1>), blocks, group_threads(m), 0, stream, *s, d, o);
}

#define BY_DTYPE(launcher, ...) \
    switch (s->dtype) { \
    case ONT_FLOAT16: return launcher<ont_f16>(__VA_ARGS__); \
    case ONT_BFLOAT16: return launcher<ont_bf16>(__VA_ARGS__); \
    case ONT_FLOAT32: return launcher<float>(__VA_ARGS__); \
    default: return launcher<double>(__VA_ARGS__); \
    }

extern "C" int ont_launch_groupnorm(const ont_groupnorm *s, const void *const *in, void *const *out, void *stream)
{
    BY_DTYPE(launch, s, in, out, stream)
}

static inline size_t sums_of(const ont_groupnorm *s) { return (size_t)(s->n * s->groups * s->channels); }

extern "C" size_t ont_groupnorm_grad_work(const ont_groupnorm *s)
{
    return 2 * sums_of(s) * (s->dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float));
}

template <class T, class A, int N>
static int launch_passes(const ont_groupnorm *s, const grad_operands<T, A> &o, T *dx, void *stream)
{
    int error = 0;
    if (sums_of(s))
        error = ONT_LAUNCH((group_norm_sums_kernel<T, A, N>), ont_blocks((int64_t)sums_of(s), 1),
                           group_threads(s->d / N), 0, stream, *s, o);
    if (error || !dx || !sums_of(s) || !s->d) return error;
    return ONT_LAUNCH((group_norm_grad_kernel<T, A, N>), ont_blocks(s->n * s->groups, 1),
                      group_threads(s->channels * s->d / N), 0, stream, *s, divisor_of((uint32_t)s->d), o, dx);
}

template <class T>
static int launch_grad(const ont_groupnorm *s, const void *const *in, void *const *out, void *work, void *stream)
{
    typedef typename ont_compute<T>::type A;
    enum { N = 16 / sizeof(T) };
    A *sums = (A *)work, *dots = sums + sums_of(s);
    const grad_operands<T, A> o = {(const T *)in[0], (const A *)in[1], (const A *)in[2], (const A *)in[3],
                                   (const T *)in[4], sums, dots};
    const int error = in_chunks<T>(s, in[0], in[4], out[0])
                          ? launch_passes<T, A, N>(s, o, (T *)out[0], stream)
                          : launch_passes<T, A, 1>(s, o, (T *)out[0], stream);
    if (error || !(out[1] || out[2]) || s->groups * s->channels == 0) return error;
    return ONT_LAUNCH(group_norm_channels_kernel<A>, ont_blocks(s->groups * s->channels, ONT_THREADS), ONT_THREADS, 0,
                      stream, *s, (const A *)sums, (const A *)dots, (A *)out[1], (A *)out[2]);
}

extern "C" int ont_launch_groupnorm_grad(const ont_groupnorm *s, const void *const *in, void *const *out, void *work,
                                         void *stream)
{
    BY_DTYPE(launch_grad, s, in, out, work, stream)
}
