/*
 * QuantizeLinear to integers: y = saturate(round(x / scale) + zero point), as csrc/ops/quant/quantize.c.
 */
#include "kernels/launch.cuh"

#include "kernels/bits.cuh"
#include "kernels/kernels.h"
#include "kernels/math.cuh"

/* Dtypes of 2 and 4 bits have a byte for each element: they are read and written as int8 or uint8. */
struct quantization {
    ont_quantize q;
    int x, scale, y, x_size, scale_size, y_size;
};

/* Entry of the scale and the zero point for element i. */
ONT_DEVICE int64_t scale_at(const ont_scales &s, int64_t i)
{
    if (s.one) return 0;
    const int64_t above = i / s.inner, outer = above / s.n, k = above - outer * s.n;
    return s.blocked ? (outer * s.blocks + k / s.block) * s.inner + (i - above * s.inner) : k;
}

ONT_DEVICE double number_at(const void *p, int64_t i, int dtype, int size)
{
    return ont_value<double>(ont_cast(dtype, ONT_FLOAT64, ont_read_bits(p, i, size)));
}

/* Rounds to the precision of dtype. A division rounded once more equals the division in float32 or 16 bits. */
ONT_DEVICE double rounded(double v, int dtype)
{
    switch (dtype) {
    case ONT_FLOAT32: return (double)(float)v;
    case ONT_FLOAT16: return (double)ont_f16_to_float(ont_float_to_f16(ont_to_odd(v)));
    case ONT_BFLOAT16: return (double)ont_bf16_to_float(ont_float_to_bf16(ont_to_odd(v)));
    default: return v;
    }
}

ONT_DEVICE double ratio_of(double x, double scale, int precision)
{
    const double a = rounded(x, precision), b = rounded(scale, precision);
    return precision == ONT_FLOAT64 ? a / b : rounded((double)((float)a / (float)b), precision);
}

__global__ void __launch_bounds__(ONT_THREADS)
    quantize_kernel(const quantization s, int64_t count, const void *x, const void *scale, const void *zero, void *y)
{
    ONT_FOR(i, count) {
        const int64_t k = scale_at(s.q.s, i);
        double v = rint(ratio_of(number_at(x, i, s.x, s.x_size), number_at(scale, k, s.scale, s.scale_size),
                                 (int)s.q.precision));
        if (zero) v += number_at(zero, k, s.y, s.y_size);
        v = v < s.q.low ? s.q.low : v > s.q.high ? s.q.high : v == v ? v : 0;
        ont_write_bits(y, i, s.y, (uint64_t)(int64_t)v);
    }
}

static int size_of(int dtype)
{
    switch (dtype) {
    case ONT_FLOAT64: return 8;
    case ONT_FLOAT32:
    case ONT_INT32: return 4;
    case ONT_INT8:
    case ONT_UINT8: return 1;
    default: return 2;
    }
}

extern "C" int ont_launch_quantize(const ont_quantize *q, int64_t count, const void *const *in, void *y, void *stream)
{
    const bool is_signed = q->y == ONT_INT4 || q->y == ONT_INT2, is_unsigned = q->y == ONT_UINT4 || q->y == ONT_UINT2;
    const int y_dtype = is_signed ? ONT_INT8 : is_unsigned ? ONT_UINT8 : (int)q->y;
    quantization s = {*q, (int)q->x, (int)q->scale, y_dtype, 0, 0, 0};
    s.x_size = size_of(s.x);
    s.scale_size = size_of(s.scale);
    s.y_size = size_of(s.y);
    if (!count) return 0;
    return ONT_LAUNCH(quantize_kernel, ont_blocks(count, ONT_THREADS), ONT_THREADS, 0, stream, s, count, in[0], in[1],
                      in[2], y);
}
