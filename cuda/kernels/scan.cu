/*
 * CumSum and CumProd: lines along an axis. A block for each line takes tiles of it and scans each in shared memory;
 * where there are many neighbouring lines, a thread takes each. Floats are summed in double, as on the CPU.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

#ifdef ONT_EMULATE
enum { SCAN = 64, MANY_LINES = 128 }; /* for the duration of tests */
#else
enum { SCAN = 256, MANY_LINES = 4096 };
#endif

template <class A> ONT_DEVICE A scan_join(bool product, A a, A b) { return product ? a * b : a + b; }

/* Offset of the first element of a line, and from one element to the next. */
ONT_DEVICE int64_t line_start(const ont_scan &s, int64_t line, int64_t *stride)
{
    const int64_t outer = line / s.inner, start = outer * s.n * s.inner + (line - outer * s.inner);
    *stride = s.reverse ? -s.inner : s.inner;
    return s.reverse ? start + (s.n - 1) * s.inner : start;
}

template <class T, class A>
__global__ void __launch_bounds__(SCAN) scan_lines_kernel(const ont_scan s, const T *x, T *y)
{
    ONT_FOR(line, s.outer * s.inner)
    {
        int64_t stride, at = line_start(s, line, &stride);
        A sum = s.product ? 1 : 0;
        for (int64_t i = 0; i < s.n; i++, at += stride) {
            const A own = (A)x[at], with = scan_join(s.product, sum, own);
            y[at] = (T)(s.exclusive ? sum : with);
            sum = with;
        }
    }
}

template <class T, class A>
__global__ void __launch_bounds__(SCAN) scan_tiles_kernel(const ont_scan s, const T *x, T *y)
{
    __shared__ A sums[SCAN];
    const int self = (int)threadIdx.x;
    for (int64_t line = blockIdx.x; line < s.outer * s.inner; line += gridDim.x) {
        int64_t stride, start = line_start(s, line, &stride);
        A base = s.product ? 1 : 0;
        for (int64_t first = 0; first < s.n; first += SCAN) {
            const int64_t i = first + self;
            sums[self] = i < s.n ? (A)x[start + i * stride] : (A)(s.product ? 1 : 0);
            __syncthreads();
            for (int distance = 1; distance < SCAN; distance *= 2) {
                const A before = self >= distance ? sums[self - distance] : (A)(s.product ? 1 : 0);
                __syncthreads();
                sums[self] = scan_join(s.product, before, sums[self]);
                __syncthreads();
            }
            const A own = !s.exclusive ? scan_join(s.product, base, sums[self])
                          : self       ? scan_join(s.product, base, sums[self - 1])
                                       : base;
            if (i < s.n) y[start + i * stride] = (T)own;
            base = scan_join(s.product, base, sums[SCAN - 1]);
            __syncthreads();
        }
    }
}

template <class T, class A> static int launch(const ont_scan *s, const void *x, void *y, void *stream)
{
    const int64_t lines = s->outer * s->inner;
    if (!lines || !s->n) return 0;
    if (s->inner >= 32 && lines >= MANY_LINES)
        return ONT_LAUNCH((scan_lines_kernel<T, A>), ont_blocks(lines, SCAN), SCAN, 0, stream, *s, (const T *)x,
                          (T *)y);
    return ONT_LAUNCH((scan_tiles_kernel<T, A>), ont_blocks(lines, 1), SCAN, 0, stream, *s, (const T *)x, (T *)y);
}

extern "C" int ont_launch_scan(const ont_scan *s, const void *x, void *y, void *stream)
{
    switch (s->dtype) {
    case ONT_FLOAT32: return launch<float, double>(s, x, y, stream);
    case ONT_FLOAT64: return launch<double, double>(s, x, y, stream);
    case ONT_INT32:
    case ONT_UINT32: return launch<uint32_t, uint32_t>(s, x, y, stream);
    default: return launch<uint64_t, uint64_t>(s, x, y, stream);
    }
}

/*
 * CumProdGrad: dx_k is the product of all before k, times S_k = dy_k + x_{k+1} S_{k+1}, as in cumulative.c.
 * Exclusive: output i + 1 is the product up to x_i, so its gradient stands for dy_i.
 */
template <class T>
__global__ void __launch_bounds__(SCAN) product_grad_kernel(const ont_scan s, const T *x, const T *dy, T *dx)
{
    ONT_FOR(line, s.outer * s.inner)
    {
        int64_t stride;
        const int64_t start = line_start(s, line, &stride), shift = s.exclusive;
        double before = 1, tail = 0;
        for (int64_t k = 0; k < s.n; k++) {
            dx[start + k * stride] = (T)before;
            before *= (double)x[start + k * stride];
        }
        for (int64_t k = s.n - 1; k >= 0; k--) {
            const int64_t at = start + k * stride;
            const bool none = k + shift >= s.n, last = k + shift == s.n - 1;
            if (!none) tail = (double)dy[at + shift * stride] + (last ? 0 : (double)x[at + stride] * tail);
            dx[at] = none ? (T)0 : (T)((double)dx[at] * tail);
        }
    }
}

extern "C" int ont_launch_product_grad(const ont_scan *s, const void *x, const void *dy, void *dx, void *stream)
{
    const unsigned blocks = ont_blocks(s->outer * s->inner, SCAN);
    if (s->outer * s->inner == 0 || !s->n) return 0;
    if (s->dtype == ONT_FLOAT32)
        return ONT_LAUNCH(product_grad_kernel<float>, blocks, SCAN, 0, stream, *s, (const float *)x, (const float *)dy,
                          (float *)dx);
    return ONT_LAUNCH(product_grad_kernel<double>, blocks, SCAN, 0, stream, *s, (const double *)x, (const double *)dy,
                      (double *)dx);
}
