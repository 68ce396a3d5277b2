/*
 * LayerNormalization and its gradient: a block for each row. Gradients of scale and bias are partial sums over ranges
 * of rows, added in order, so that the result does not depend on the grid.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/math.cuh"

template <class T> struct forward_operands {
    int64_t rows, n;
    T eps;
    const T *x, *scale, *bias;
    T *y, *mean, *inv;
};

template <class T> __global__ void __launch_bounds__(ONT_THREADS) layernorm_kernel(const forward_operands<T> f)
{
    __shared__ T scratch[32];
    int64_t n = f.n;
    for (int64_t row = blockIdx.x; row < f.rows; row += gridDim.x) {
        const T *in = f.x + row * n;
        T mean = 0, var = 0;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) mean += in[i];
        mean = ont_block_sum(mean, scratch) / (T)n;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) var += (in[i] - mean) * (in[i] - mean);
        var = ont_block_sum(var, scratch) / (T)n;
        T inv = 1 / vsqrt(var + f.eps);
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
            f.y[row * n + i] = (in[i] - mean) * inv * (f.scale ? f.scale[i] : (T)1) + (f.bias ? f.bias[i] : (T)0);
        if (!threadIdx.x && f.mean) f.mean[row] = mean;
        if (!threadIdx.x && f.inv) f.inv[row] = inv;
    }
}

/* partial (parts, 2, n): sums of dy * hat and of dy over a range of rows */
template <class T> struct gradient_operands {
    int64_t rows, n, parts;
    const T *x, *scale, *mean, *inv, *dy;
    T *dx, *dscale, *dbias, *partial;
};

/* dx = inv * (g - mean(g) - hat * mean(g * hat)), with g = dy * scale. dx may equal dy. */
template <class T> __global__ void __launch_bounds__(ONT_THREADS) layernorm_dx_kernel(const gradient_operands<T> f)
{
    __shared__ T scratch[32];
    int64_t n = f.n;
    for (int64_t row = blockIdx.x; row < f.rows; row += gridDim.x) {
        T mean = f.mean[row], inv = f.inv[row], g_sum = 0, gx_sum = 0;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            T g = f.dy[row * n + i] * (f.scale ? f.scale[i] : (T)1);
            g_sum += g;
            gx_sum += g * ((f.x[row * n + i] - mean) * inv);
        }
        gx_sum = ont_block_sum(gx_sum, scratch) / (T)n;
        g_sum = ont_block_sum(g_sum, scratch) / (T)n;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            T g = f.dy[row * n + i] * (f.scale ? f.scale[i] : (T)1), hat = (f.x[row * n + i] - mean) * inv;
            f.dx[row * n + i] = inv * (g - g_sum - hat * gx_sum);
        }
    }
}

static inline int64_t parts_of(int64_t rows)
{
    int64_t parts = (rows + 31) / 32;
    return parts < 1 ? 1 : parts > 256 ? 256 : parts;
}

/* A thread for each column. */
template <class T> __global__ void __launch_bounds__(ONT_THREADS) layernorm_parts_kernel(const gradient_operands<T> f)
{
    int64_t n = f.n, part = blockIdx.y, first = f.rows * part / f.parts, last = f.rows * (part + 1) / f.parts;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        T dscale = 0, dbias = 0;
        for (int64_t row = first; row < last; row++) {
            T d = f.dy[row * n + i];
            dscale += d * ((f.x[row * n + i] - f.mean[row]) * f.inv[row]);
            dbias += d;
        }
        f.partial[part * 2 * n + i] = dscale;
        f.partial[part * 2 * n + n + i] = dbias;
    }
}

template <class T> __global__ void __launch_bounds__(ONT_THREADS) layernorm_sums_kernel(const gradient_operands<T> f)
{
    ONT_FOR(i, 2 * f.n) {
        T sum = 0;
        for (int64_t part = 0; part < f.parts; part++) sum += f.partial[part * 2 * f.n + i];
        if (i < f.n && f.dscale) f.dscale[i] = sum;
        if (i >= f.n && f.dbias) f.dbias[i - f.n] = sum;
    }
}

extern "C" size_t ont_layernorm_grad_work(const ont_layernorm *s)
{
    return (size_t)(parts_of(s->rows) * 2 * s->n) * sizeof(double);
}

template <class T> static int forward(const ont_layernorm *s, const void *const *in, void *const *out, void *stream)
{
    forward_operands<T> f = {s->rows, s->n, (T)s->eps, (const T *)in[0], (const T *)in[1], (const T *)in[2],
                             (T *)out[0], (T *)out[1], (T *)out[2]};
    return ONT_LAUNCH(layernorm_kernel<T>, ont_blocks(f.rows, 1), ont_row_threads(f.n), 0, stream, f);
}

template <class T>
static int backward(const ont_layernorm *s, const void *const *in, void *const *out, void *work, void *stream)
{
    gradient_operands<T> f = {s->rows, s->n, parts_of(s->rows), (const T *)in[0], (const T *)in[1], (const T *)in[2],
                              (const T *)in[3], (const T *)in[4], (T *)out[0], (T *)out[1], (T *)out[2], (T *)work};
    unsigned threads = ont_row_threads(f.n);
    int error = 0;
    if (f.dscale || f.dbias) { /* first, since dx may overwrite dy */
        dim3 grid(ont_blocks(f.n, threads), (unsigned)f.parts);
        error = ONT_LAUNCH(layernorm_parts_kernel<T>, grid, threads, 0, stream, f);
        if (!error)
            error = ONT_LAUNCH(layernorm_sums_kernel<T>, ont_blocks(2 * f.n, threads), threads, 0, stream, f);
    }
    if (!error && f.dx && f.rows)
        error = ONT_LAUNCH(layernorm_dx_kernel<T>, ont_blocks(f.rows, 1), threads, 0, stream, f);
    return error;
}

extern "C" int ont_launch_layernorm(const ont_layernorm *s, const void *const *in, void *const *out, void *stream)
{
    if (!s->rows) return 0;
    return (s->dtype == ONT_FLOAT32 ? forward<float> : forward<double>)(s, in, out, stream);
}

extern "C" int ont_launch_layernorm_grad(const ont_layernorm *s, const void *const *in, void *const *out, void *work,
                                         void *stream)
{
    if (!s->n) return 0;
    return (s->dtype == ONT_FLOAT32 ? backward<float> : backward<double>)(s, in, out, work, stream);
}
