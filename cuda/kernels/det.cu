/*
 * Det and its gradient by elimination with row pivots in float64, as on the CPU: a block for each matrix, and for each
 * cofactor of the gradient, which takes n^5 operations for a matrix of n rows. Each block has a matrix of scratch.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

#ifdef ONT_EMULATE
enum { MOST_BLOCKS = 8 }; /* so that small cases of tests have several matrices for a block */
#else
enum { MOST_BLOCKS = 1056 };
#endif

/* The row from k on whose entry of column k is the largest, the first of equals; row k where its entry is NaN. */
ONT_DEVICE void find_pivot(const double *a, int64_t n, int64_t k, int64_t *pivot)
{
    const int lane = (int)threadIdx.x;
    int64_t best = k;
    if (lane >= 32) return;
    double most = fabs(a[k * n + k]);
    for (int64_t i = k + 1 + lane; i < n; i += 32)
        if (fabs(a[i * n + k]) > most) {
            most = fabs(a[i * n + k]);
            best = i;
        }
    for (int lanes = 16; lanes; lanes >>= 1) {
        const double other = __shfl_xor_sync(0xffffffffu, most, lanes);
        const int64_t at = __shfl_xor_sync(0xffffffffu, best, lanes);
        if (other > most || (other == most && at < best)) {
            most = other;
            best = at;
        }
    }
    if (!lane) *pivot = best;
}

/* The determinant of the n x n matrix in `a`, which is overwritten, in all threads. Begins with a barrier. */
ONT_DEVICE double eliminate(double *a, int64_t n, int64_t *pivot)
{
    double det = 1;
    __syncthreads();
    for (int64_t k = 0; k < n; k++) {
        find_pivot(a, n, k, pivot);
        __syncthreads();
        const int64_t row = *pivot;
        const double top = a[row * n + k];
        __syncthreads(); /* all have read the pivot, and column k */
        if (top == 0) return 0;
        for (int64_t j = k + threadIdx.x; j < n && row != k; j += blockDim.x) {
            const double swap = a[k * n + j];
            a[k * n + j] = a[row * n + j];
            a[row * n + j] = swap;
        }
        det *= row == k ? top : -top;
        __syncthreads();
        const int64_t width = n - k - 1;
        for (int64_t e = threadIdx.x; e < width * width; e += blockDim.x) {
            const int64_t i = k + 1 + e / width, j = k + 1 + e % width;
            a[i * n + j] -= a[i * n + k] / top * a[k * n + j];
        }
        __syncthreads();
    }
    return det;
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) det_kernel(int64_t batch, int64_t n, const T *x, double *work, T *y)
{
    __shared__ int64_t pivot;
    double *a = work + blockIdx.x * n * n;
    for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
        __syncthreads();
        for (int64_t e = threadIdx.x; e < n * n; e += blockDim.x) a[e] = (double)x[b * n * n + e];
        const double det = eliminate(a, n, &pivot);
        if (!threadIdx.x) y[b] = (T)det;
    }
}

/* dx = dy * cofactor: the signed determinant without the row and the column of the element */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    det_grad_kernel(int64_t batch, int64_t n, const T *x, const T *dy, double *work, T *dx)
{
    __shared__ int64_t pivot;
    const int64_t m = n - 1;
    double *a = work + blockIdx.x * n * n;
    for (int64_t at = blockIdx.x; at < batch * n * n; at += gridDim.x) {
        const int64_t b = at / n / n, row = at / n % n, column = at % n;
        __syncthreads();
        for (int64_t e = threadIdx.x; e < m * m; e += blockDim.x) {
            const int64_t i = e / m, j = e % m;
            a[e] = (double)x[(b * n + i + (i >= row)) * n + j + (j >= column)];
        }
        const double det = eliminate(a, m, &pivot);
        if (!threadIdx.x) dx[at] = (T)((double)dy[b] * ((row + column) % 2 ? -det : det));
    }
}

static unsigned blocks_of(int64_t n)
{
    const int64_t most = MOST_BLOCKS;
    return ont_blocks(n < most ? n : most, 1);
}

extern "C" size_t ont_det_work(int64_t batch, int64_t n, int gradient)
{
    return blocks_of(gradient ? batch * n * n : batch) * (size_t)(n * n) * sizeof(double);
}

extern "C" int ont_launch_det(int dtype, int64_t batch, int64_t n, const void *x, void *y, void *work, void *stream)
{
    if (!batch) return 0;
#define DET(type) \
    ONT_LAUNCH(det_kernel<type>, blocks_of(batch), ont_row_threads(n * n), 0, stream, batch, n, (const type *)x, \
               (double *)work, (type *)y)
    return dtype == ONT_FLOAT64 ? DET(double) : DET(float);
#undef DET
}

extern "C" int ont_launch_det_grad(int dtype, int64_t batch, int64_t n, const void *const *in, void *dx, void *work,
                                   void *stream)
{
    if (!batch || !n) return 0;
#define DET(type) \
    ONT_LAUNCH(det_grad_kernel<type>, blocks_of(batch * n * n), ont_row_threads(n * n), 0, stream, batch, n, \
               (const type *)in[0], (const type *)in[1], (double *)work, (type *)dx)
    return dtype == ONT_FLOAT64 ? DET(double) : DET(float);
#undef DET
}
