/*
 * LayerNormalization and RMSNorm with their gradients: a block for each row. Gradients of scale and bias are partial
 * sums over ranges of rows, added in order, so that the result does not depend on the grid.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/math.cuh"

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    layernorm_kernel(bool centred, int64_t rows, int64_t n, T eps, const T *x, const T *scale, const T *bias, T *y,
                     T *means, T *invs)
{
    __shared__ T scratch[32];
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *in = x + row * n;
        T mean = 0, var = 0;
        for (int64_t i = threadIdx.x; centred && i < n; i += blockDim.x) mean += in[i];
        if (centred) mean = ont_block_sum(mean, scratch) / (T)n;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) var += (in[i] - mean) * (in[i] - mean);
        var = ont_block_sum(var, scratch) / (T)n;
        T inv = 1 / vsqrt(var + eps);
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
            y[row * n + i] = (in[i] - mean) * inv * (scale ? scale[i] : (T)1) + (bias ? bias[i] : (T)0);
        if (!threadIdx.x && means) means[row] = mean;
        if (!threadIdx.x && invs) invs[row] = inv;
    }
}

/* dx = inv * (g - mean(g) - hat * mean(g * hat)), with g = dy * scale; RMSNorm has no mean(g). dx may equal dy. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS) layernorm_dx_kernel(int64_t rows, int64_t n, const T *x, const T *scale,
                                                                   const T *means, const T *invs, const T *dy, T *dx)
{
    __shared__ T scratch[32];
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        T mean = means ? means[row] : (T)0, inv = invs[row], g_sum = 0, gx_sum = 0;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            T g = dy[row * n + i] * (scale ? scale[i] : (T)1);
            g_sum += g;
            gx_sum += g * ((x[row * n + i] - mean) * inv);
        }
        gx_sum = ont_block_sum(gx_sum, scratch) / (T)n;
        g_sum = means ? ont_block_sum(g_sum, scratch) / (T)n : (T)0;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            T g = dy[row * n + i] * (scale ? scale[i] : (T)1), hat = (x[row * n + i] - mean) * inv;
            dx[row * n + i] = inv * (g - g_sum - hat * gx_sum);
        }
    }
}

static inline int64_t parts_of(int64_t rows)
{
    int64_t parts = (rows + 31) / 32;
    return parts < 1 ? 1 : parts > 256 ? 256 : parts;
}

/* partial (parts, 2, n): sums of dy * hat and of dy over a range of rows; a thread for each column */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    layernorm_parts_kernel(int64_t rows, int64_t n, int64_t parts, const T *x, const T *means, const T *invs,
                           const T *dy, T *partial)
{
    int64_t part = blockIdx.y, first = rows * part / parts, last = rows * (part + 1) / parts;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        T dscale = 0, dbias = 0;
        for (int64_t row = first; row < last; row++) {
            T d = dy[row * n + i];
            dscale += d * ((x[row * n + i] - (means ? means[row] : (T)0)) * invs[row]);
            dbias += d;
        }
        partial[part * 2 * n + i] = dscale;
        partial[part * 2 * n + n + i] = dbias;
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    layernorm_sums_kernel(int64_t n, int64_t parts, const T *partial, T *dscale, T *dbias)
{
    ONT_FOR(i, 2 * n) {
        T sum = 0;
        for (int64_t part = 0; part < parts; part++) sum += partial[part * 2 * n + i];
        if (i < n && dscale) dscale[i] = sum;
        if (i >= n && dbias) dbias[i - n] = sum;
    }
}

extern "C" size_t ont_layernorm_grad_work(int64_t rows, int64_t n)
{
    return (size_t)(parts_of(rows) * 2 * n) * sizeof(double);
}

template <class T>
static int forward(bool centred, int64_t rows, int64_t n, double eps, const void *x, const void *scale,
                   const void *bias, void *y, void *mean, void *inv, void *stream)
{
    return ONT_LAUNCH(layernorm_kernel<T>, ont_blocks(rows, 1), ont_row_threads(n), 0, stream, centred, rows, n, (T)eps,
                      (const T *)x, (const T *)scale, (const T *)bias, (T *)y, (T *)mean, (T *)inv);
}

template <class T>
static int backward(int64_t rows, int64_t n, const T *x, const T *scale, const T *mean, const T *inv, const T *dy,
                    T *dx, T *dscale, T *dbias, T *work, void *stream)
{
    int64_t parts = parts_of(rows);
    unsigned threads = ont_row_threads(n);
    int error = 0;
    if (dscale || dbias) { /* first, since dx may overwrite dy */
        dim3 grid(ont_blocks(n, threads), (unsigned)parts);
        error = ONT_LAUNCH(layernorm_parts_kernel<T>, grid, threads, 0, stream, rows, n, parts, x, mean, inv, dy, work);
        if (!error)
            error = ONT_LAUNCH(layernorm_sums_kernel<T>, ont_blocks(2 * n, threads), threads, 0, stream, n, parts,
                               (const T *)work, dscale, dbias);
    }
    if (!error && dx && rows)
        error = ONT_LAUNCH(layernorm_dx_kernel<T>, ont_blocks(rows, 1), threads, 0, stream, rows, n, x, scale, mean,
                           inv, dy, dx);
    return error;
}

extern "C" int ont_launch_layernorm(int dtype, int64_t rows, int64_t n, double eps, const void *x, const void *scale,
                                    const void *bias, void *y, void *mean, void *inv_std, void *stream)
{
    if (!rows) return 0;
    return dtype == ONT_FLOAT32 ? forward<float>(true, rows, n, eps, x, scale, bias, y, mean, inv_std, stream)
                                : forward<double>(true, rows, n, eps, x, scale, bias, y, mean, inv_std, stream);
}

extern "C" int ont_launch_rmsnorm(int dtype, int64_t rows, int64_t n, double eps, const void *x, const void *scale,
                                  void *y, void *inv_rms, void *stream)
{
    if (!rows) return 0;
    return dtype == ONT_FLOAT32 ? forward<float>(false, rows, n, eps, x, scale, nullptr, y, nullptr, inv_rms, stream)
                                : forward<double>(false, rows, n, eps, x, scale, nullptr, y, nullptr, inv_rms, stream);
}

extern "C" int ont_launch_layernorm_grad(int dtype, int64_t rows, int64_t n, const void *x, const void *scale,
                                         const void *mean, const void *inv_std, const void *dy, void *dx, void *dscale,
                                         void *dbias, void *work, void *stream)
{
    if (!n) return 0;
    if (dtype == ONT_FLOAT32)
        return backward<float>(rows, n, (const float *)x, (const float *)scale, (const float *)mean,
                               (const float *)inv_std, (const float *)dy, (float *)dx, (float *)dscale, (float *)dbias,
                               (float *)work, stream);
    return backward<double>(rows, n, (const double *)x, (const double *)scale, (const double *)mean,
                            (const double *)inv_std, (const double *)dy, (double *)dx, (double *)dscale,
                            (double *)dbias, (double *)work, stream);
}
