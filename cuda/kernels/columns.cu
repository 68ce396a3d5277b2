/*
 * Im2Col reads the windows of an image as columns, and Col2Im adds such columns: each is the other's gradient. Col2Im
 * gathers: a thread for each cell adds the columns over it in the order of window cells, whatever the order of threads.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/units.cuh"

/* Divisors by the image's, the columns' and the window's dims, and by strides. */
struct column_divisors {
    divisor in[3], out[3], kernel[3], stride[3], in_count, out_count, kernel_count;
};

struct image_at {
    uint32_t d[3];
};

ONT_DEVICE image_at split(const divisor *dims, uint32_t i)
{
    image_at at;
    const uint32_t rows = quotient(i, dims[2]), planes = quotient(rows, dims[1]);
    at.d[2] = i - rows * dims[2].value;
    at.d[1] = rows - planes * dims[1].value;
    at.d[0] = planes;
    return at;
}

/* y (planes, window cells, windows) */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    im2col_kernel(const ont_column_shape s, const column_divisors by, const T *x, T *y)
{
    ONT_FOR(i, s.planes * s.kernel_count * s.out_count)
    {
        const uint32_t row = quotient((uint32_t)i, by.out_count), plane = quotient(row, by.kernel_count);
        const image_at k = split(by.kernel, row - plane * by.kernel_count.value);
        const image_at o = split(by.out, (uint32_t)i - row * by.out_count.value);
        int64_t from = 0;
        bool inside = true;
        for (int d = 0; d < 3; d++) {
            const int64_t at = o.d[d] * s.stride[d] + k.d[d] * s.dilation[d] - s.begin[d];
            inside = inside && at >= 0 && at < s.in[d];
            from = from * s.in[d] + at;
        }
        y[i] = inside ? x[plane * s.in_count + from] : T();
    }
}

/* The window along dim d whose cell k is the cell `at`; -1: there is none. */
ONT_DEVICE int64_t window_over(const ont_column_shape &s, const divisor &stride, int d, uint32_t at, int64_t k)
{
    const int64_t first = at + s.begin[d] - k * s.dilation[d];
    if (first < 0) return -1;
    const int64_t o = first <= INT32_MAX ? quotient((uint32_t)first, stride) : first / stride.value;
    return o * stride.value == first && o < s.out[d] ? o : -1;
}

template <class T> ONT_DEVICE T value_at(const T *p) { return *p; }
template <class T> ONT_DEVICE void put(T *p, T v) { *p = v; }
ONT_DEVICE float value_at(const ont_f16 *p) { return ont_load(p); }
ONT_DEVICE float value_at(const ont_bf16 *p) { return ont_load(p); }
ONT_DEVICE void put(ont_f16 *p, float v) { ont_store(p, v); }
ONT_DEVICE void put(ont_bf16 *p, float v) { ont_store(p, v); }

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    col2im_kernel(const ont_column_shape s, const column_divisors by, const T *x, T *y)
{
    typedef typename ont_compute<T>::type A;
    ONT_FOR(i, s.planes * s.in_count)
    {
        const uint32_t plane = quotient((uint32_t)i, by.in_count);
        const image_at at = split(by.in, (uint32_t)i - plane * by.in_count.value);
        const T *from = x + plane * s.kernel_count * s.out_count;
        A sum = 0;
        for (int64_t a = 0; a < s.kernel[0]; a++) {
            const int64_t u = window_over(s, by.stride[0], 0, at.d[0], a);
            if (u < 0) continue;
            for (int64_t b = 0; b < s.kernel[1]; b++) {
                const int64_t v = window_over(s, by.stride[1], 1, at.d[1], b);
                if (v < 0) continue;
                for (int64_t c = 0; c < s.kernel[2]; c++) {
                    const int64_t w = window_over(s, by.stride[2], 2, at.d[2], c);
                    const int64_t cell = (a * s.kernel[1] + b) * s.kernel[2] + c;
                    if (w >= 0) sum += value_at(from + cell * s.out_count + (u * s.out[1] + v) * s.out[2] + w);
                }
            }
        }
        put(y + i, sum);
    }
}

static column_divisors divisors_of(const ont_column_shape *s)
{
    column_divisors by;
    for (int d = 0; d < 3; d++) {
        by.in[d] = divisor_of((uint32_t)s->in[d]);
        by.out[d] = divisor_of((uint32_t)s->out[d]);
        by.kernel[d] = divisor_of((uint32_t)s->kernel[d]);
        by.stride[d] = divisor_of((uint32_t)s->stride[d]);
    }
    by.in_count = divisor_of((uint32_t)s->in_count);
    by.out_count = divisor_of((uint32_t)s->out_count);
    by.kernel_count = divisor_of((uint32_t)s->kernel_count);
    return by;
}

extern "C" int ont_launch_im2col(const ont_column_shape *s, int size, const void *x, void *y, void *stream)
{
    const int64_t n = s->planes * s->kernel_count * s->out_count;
    if (!n) return 0;
#define READ(type) \
    ONT_LAUNCH(im2col_kernel<type>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s, divisors_of(s), \
               (const type *)x, (type *)y)
    switch (size) {
    case 1: return READ(uint8_t);
    case 2: return READ(uint16_t);
    case 4: return READ(uint32_t);
    default: return READ(uint64_t);
    }
#undef READ
}

extern "C" int ont_launch_col2im(const ont_column_shape *s, int dtype, const void *x, void *y, void *stream)
{
    const int64_t n = s->planes * s->in_count;
    if (!n) return 0;
#define ADD(type) \
    ONT_LAUNCH(col2im_kernel<type>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s, divisors_of(s), \
               (const type *)x, (type *)y)
    switch (dtype) {
    case ONT_FLOAT32: return ADD(float);
    case ONT_FLOAT64: return ADD(double);
    case ONT_FLOAT16: return ADD(ont_f16);
    case ONT_BFLOAT16: return ADD(ont_bf16);
    case ONT_INT32: return ADD(uint32_t);
    default: return ADD(uint64_t);
    }
#undef ADD
}
