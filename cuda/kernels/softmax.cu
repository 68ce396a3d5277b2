/*
 * Softmax and LogSoftmax along one axis, and their gradients from the saved output: a block for each row, with sums in
 * float (double for float64) in an order that does not depend on the grid.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/math.cuh"

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    softmax_kernel(bool log_form, int64_t rows, int64_t n, int64_t inner, const T *x, T *y)
{
    typedef typename ont_compute<T>::type C;
    __shared__ C scratch[32];
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int64_t base = row / inner * n * inner + row % inner;
        C row_max = ont_load(&x[base]), sum = 0;
        for (int64_t k = threadIdx.x; k < n; k += blockDim.x)
            row_max = ont_larger(row_max, ont_load(&x[base + k * inner]));
        row_max = ont_block_max(row_max, scratch);
        for (int64_t k = threadIdx.x; k < n; k += blockDim.x) sum += vexp(ont_load(&x[base + k * inner]) - row_max);
        sum = ont_block_sum(sum, scratch);
        C log_sum = log_form ? vlog(sum) : 0;
        for (int64_t k = threadIdx.x; k < n; k += blockDim.x) {
            C shifted = ont_load(&x[base + k * inner]) - row_max;
            ont_store(&y[base + k * inner], log_form ? shifted - log_sum : vexp(shifted) / sum);
        }
    }
}

/* softmax: y * (dy - sum(y * dy)); LogSoftmax: dy - exp(y) * sum(dy) */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    softmax_grad_kernel(bool log_form, int64_t rows, int64_t n, int64_t inner, const T *y, const T *dy, T *dx)
{
    typedef typename ont_compute<T>::type C;
    __shared__ C scratch[32];
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int64_t base = row / inner * n * inner + row % inner;
        C sum = 0;
        for (int64_t k = threadIdx.x; k < n; k += blockDim.x) {
            int64_t at = base + k * inner;
            sum += ont_load(&dy[at]) * (log_form ? 1 : ont_load(&y[at]));
        }
        sum = ont_block_sum(sum, scratch);
        for (int64_t k = threadIdx.x; k < n; k += blockDim.x) {
            int64_t at = base + k * inner;
            C v = ont_load(&y[at]), d = ont_load(&dy[at]);
            ont_store(&dx[at], log_form ? d - vexp(v) * sum : v * (d - sum));
        }
    }
}

template <class T> static int forward(const ont_softmax *s, const void *x, void *y, void *stream)
{
    int64_t rows = s->outer * s->inner;
    return ONT_LAUNCH(softmax_kernel<T>, ont_blocks(rows, 1), ont_row_threads(s->n), 0, stream, s->log_form != 0, rows,
                      s->n, s->inner, (const T *)x, (T *)y);
}

template <class T> static int backward(const ont_softmax *s, const void *y, const void *dy, void *dx, void *stream)
{
    int64_t rows = s->outer * s->inner;
    return ONT_LAUNCH(softmax_grad_kernel<T>, ont_blocks(rows, 1), ont_row_threads(s->n), 0, stream, s->log_form != 0,
                      rows, s->n, s->inner, (const T *)y, (const T *)dy, (T *)dx);
}

extern "C" int ont_launch_softmax(const ont_softmax *s, const void *x, void *y, void *stream)
{
    if (!s->outer || !s->n || !s->inner) return 0;
    switch (s->dtype) {
    case ONT_FLOAT32: return forward<float>(s, x, y, stream);
    case ONT_FLOAT64: return forward<double>(s, x, y, stream);
    case ONT_FLOAT16: return forward<ont_f16>(s, x, y, stream);
    default: return forward<ont_bf16>(s, x, y, stream);
    }
}

extern "C" int ont_launch_softmax_grad(const ont_softmax *s, const void *y, const void *dy, void *dx, void *stream)
{
    if (!s->outer || !s->n || !s->inner) return 0;
    switch (s->dtype) {
    case ONT_FLOAT32: return backward<float>(s, y, dy, dx, stream);
    case ONT_FLOAT64: return backward<double>(s, y, dy, dx, stream);
    case ONT_FLOAT16: return backward<ont_f16>(s, y, dy, dx, stream);
    default: return backward<ont_bf16>(s, y, dy, dx, stream);
    }
}
