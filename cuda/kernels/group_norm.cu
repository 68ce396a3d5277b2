/*
 * GroupNorm and its gradient: a block for each group of an image, whose elements are contiguous. The gradient sums over
 * each channel of each image first; both sums over a group and sums over images add these in order.
 */
#include "kernels/launch.cuh"

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

/* means and invs, the inverse standard deviations (n, groups), may be NULL. */
template <class T> struct norm_operands {
    const T *x, *scale, *bias;
    T *y, *means, *invs;
};

/* x (n, groups, channels, d) */
template <class T>
__global__ void __launch_bounds__(512)
    group_norm_kernel(const ont_groupnorm s, const divisor d, const norm_operands<T> o)
{
    __shared__ T scratch[32];
    const uint32_t m = (uint32_t)(s.channels * s.d);
    for (int64_t row = blockIdx.x; row < s.n * s.groups; row += gridDim.x) {
        const T *from = o.x + row * m;
        const int64_t first = row % s.groups * s.channels;
        T sum = 0, square = 0;
        for (uint32_t i = threadIdx.x; i < m; i += blockDim.x) sum += from[i];
        const T mean = ont_block_sum(sum, scratch) / (T)m;
        for (uint32_t i = threadIdx.x; i < m; i += blockDim.x) square += (from[i] - mean) * (from[i] - mean);
        const T inv = 1 / sqrt(ont_block_sum(square, scratch) / (T)m + (T)s.eps);
        for (uint32_t i = threadIdx.x; i < m; i += blockDim.x) {
            const int64_t c = first + quotient(i, d);
            o.y[row * m + i] = (from[i] - mean) * (inv * o.scale[c]) + o.bias[c];
        }
        if (threadIdx.x) continue;
        if (o.means) o.means[row] = mean;
        if (o.invs) o.invs[row] = inv;
    }
}

/* sums and dots (n, groups * channels): sums of dy and of dy * xhat over each channel of each image */
template <class T> struct grad_operands {
    const T *x, *scale, *means, *invs, *dy;
    T *sums, *dots;
};

template <class T>
__global__ void __launch_bounds__(512) group_norm_sums_kernel(const ont_groupnorm s, const grad_operands<T> o)
{
    __shared__ T scratch[32];
    for (int64_t row = blockIdx.x; row < s.n * s.groups * s.channels; row += gridDim.x) {
        const int64_t group = row / s.channels;
        const T mean = o.means[group], inv = s.d ? o.invs[group] : 0; /* invs of empty groups are NaN */
        T sum = 0, dot = 0;
        for (int64_t i = row * s.d + threadIdx.x; i < (row + 1) * s.d; i += blockDim.x) {
            sum += o.dy[i];
            dot += o.dy[i] * (o.x[i] - mean);
        }
        sum = ont_block_sum(sum, scratch);
        dot = ont_block_sum(dot, scratch);
        if (threadIdx.x) continue;
        o.sums[row] = sum;
        o.dots[row] = dot * inv;
    }
}

/* dx = inv (g - mean(g) - xhat mean(g xhat)), with g = dy * scale */
template <class T>
__global__ void __launch_bounds__(512)
    group_norm_grad_kernel(const ont_groupnorm s, const divisor d, const grad_operands<T> o, T *dx)
{
    __shared__ T scratch[32];
    const uint32_t m = (uint32_t)(s.channels * s.d);
    for (int64_t row = blockIdx.x; row < s.n * s.groups; row += gridDim.x) {
        const T *weights = o.scale + row % s.groups * s.channels, mean = o.means[row], inv = o.invs[row];
        T sum = 0, dot = 0;
        for (int64_t c = threadIdx.x; c < s.channels; c += blockDim.x) {
            sum += o.sums[row * s.channels + c] * weights[c];
            dot += o.dots[row * s.channels + c] * weights[c];
        }
        const T shift = ont_block_sum(sum, scratch) / (T)m, slope = ont_block_sum(dot, scratch) / (T)m * inv;
        for (uint32_t i = threadIdx.x; i < m; i += blockDim.x) {
            const int64_t at = row * m + i;
            dx[at] = inv * (o.dy[at] * weights[quotient(i, d)] - shift - (o.x[at] - mean) * slope);
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

template <class T>
static int launch(const ont_groupnorm *s, const void *const *in, void *const *out, void *stream)
{
    const int64_t m = s->channels * s->d;
    const norm_operands<T> o = {(const T *)in[0], (const T *)in[1], (const T *)in[2],
                                (T *)out[0], (T *)out[1], (T *)out[2]};
    if (!s->n) return 0;
    return ONT_LAUNCH(group_norm_kernel<T>, ont_blocks(s->n * s->groups, 1), group_threads(m), 0, stream, *s,
                      divisor_of(s->d ? (uint32_t)s->d : 1), o);
}

extern "C" int ont_launch_groupnorm(const ont_groupnorm *s, const void *const *in, void *const *out, void *stream)
{
    return s->dtype == ONT_FLOAT32 ? launch<float>(s, in, out, stream) : launch<double>(s, in, out, stream);
}

static inline size_t sums_of(const ont_groupnorm *s) { return (size_t)(s->n * s->groups * s->channels); }

extern "C" size_t ont_groupnorm_grad_work(const ont_groupnorm *s)
{
    return 2 * sums_of(s) * (s->dtype == ONT_FLOAT32 ? sizeof(float) : sizeof(double));
}

template <class T>
static int launch_grad(const ont_groupnorm *s, const void *const *in, void *const *out, void *work, void *stream)
{
    T *sums = (T *)work, *dots = sums + sums_of(s);
    const grad_operands<T> o = {(const T *)in[0], (const T *)in[1], (const T *)in[2], (const T *)in[3],
                                (const T *)in[4], sums, dots};
    int error = 0;
    if (sums_of(s))
        error = ONT_LAUNCH(group_norm_sums_kernel<T>, ont_blocks((int64_t)sums_of(s), 1), group_threads(s->d), 0,
                           stream, *s, o);
    if (!error && out[0] && sums_of(s) && s->d)
        error = ONT_LAUNCH(group_norm_grad_kernel<T>, ont_blocks(s->n * s->groups, 1),
                           group_threads(s->channels * s->d), 0, stream, *s, divisor_of((uint32_t)s->d), o,
                           (T *)out[0]);
    if (error || !(out[1] || out[2]) || s->groups * s->channels == 0) return error;
    return ONT_LAUNCH(group_norm_channels_kernel<T>, ont_blocks(s->groups * s->channels, ONT_THREADS), ONT_THREADS, 0,
                      stream, *s, (const T *)sums, (const T *)dots, (T *)out[1], (T *)out[2]);
}

extern "C" int ont_launch_groupnorm_grad(const ont_groupnorm *s, const void *const *in, void *const *out, void *work,
                                         void *stream)
{
    return s->dtype == ONT_FLOAT32 ? launch_grad<float>(s, in, out, work, stream)
                                   : launch_grad<double>(s, in, out, work, stream);
}
