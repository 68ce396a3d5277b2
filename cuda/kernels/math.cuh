/*
 * The functions that the expressions of simd/simd.h use, on a device and for any numeric type. Included by the
 * interpreter and, as text, in front of generated kernels. Plain C++ without headers of its own; the numbers of dtypes
 * come from before it.
 */
#ifndef ONT_CUDA_MATH_CUH
#define ONT_CUDA_MATH_CUH

#define ONT_MATH1(name, f32, f64) \
    ONT_DEVICE float name(float a) { return f32(a); } \
    ONT_DEVICE double name(double a) { return f64(a); }
#define ONT_MATH2(name, f32, f64) \
    ONT_DEVICE float name(float a, float b) { return f32(a, b); } \
    ONT_DEVICE double name(double a, double b) { return f64(a, b); }
ONT_MATH1(vsqrt, sqrtf, sqrt)
ONT_MATH1(vexp, expf, exp)
ONT_MATH1(vlog, logf, log)
ONT_MATH1(vexp2, exp2f, exp2)
ONT_MATH1(vexpm1, expm1f, expm1)
ONT_MATH1(vlog1p, log1pf, log1p)
ONT_MATH1(verf, erff, erf)
ONT_MATH1(verfc, erfcf, erfc)
ONT_MATH1(vtanh, tanhf, tanh)
ONT_MATH1(vsin, sinf, sin)
ONT_MATH1(vcos, cosf, cos)
ONT_MATH1(vtan, tanf, tan)
ONT_MATH1(vasin, asinf, asin)
ONT_MATH1(vacos, acosf, acos)
ONT_MATH1(vatan, atanf, atan)
ONT_MATH1(vsinh, sinhf, sinh)
ONT_MATH1(vcosh, coshf, cosh)
ONT_MATH1(vasinh, asinhf, asinh)
ONT_MATH1(vacosh, acoshf, acosh)
ONT_MATH1(vatanh, atanhf, atanh)
ONT_MATH1(vfloor, floorf, floor)
ONT_MATH1(vceil, ceilf, ceil)
ONT_MATH1(vround, rintf, rint)
ONT_MATH1(vlgamma, lgammaf, lgamma)
ONT_MATH1(verfinv, erfinvf, erfinv)
ONT_MATH2(vpow, powf, pow)
ONT_MATH2(vatan2, atan2f, atan2)
ONT_MATH2(vfmod, fmodf, fmod)

#define vabs(a) ((a) < 0 ? -(a) : (a))
#define vmax(x, y) ((x) > (y) ? (x) : (NUM)(y))
#define vmin(x, y) ((x) < (y) ? (x) : (NUM)(y))
#define vminimum(x, y) ((x) != (x) || (x) < (y) ? (x) : (y))
#define vmaximum(x, y) ((x) != (x) || (x) > (y) ? (x) : (y))
#define HALF ((NUM)0.5)
#define THIRD ((NUM)(1.0 / 3))
#define SIXTH ((NUM)(1.0 / 6))
#define INV_SQRT2 ((NUM)0.70710678118654752440)
#define INV_SQRT_2PI ((NUM)0.39894228040143267794)
#define TWO_INV_SQRT_PI ((NUM)1.12837916709551257390)
#define SQRT_2_PI ((NUM)0.79788456080286535588)
#define GELU_C ((NUM)0.044715)
#define GELU_W(a) ((2 * SQRT_2_PI) * ((a) + GELU_C * (a) * (a) * (a))) /* (1 + tanh(w / 2)) / 2 is sigmoid(w) */

template <class NUM> ONT_DEVICE NUM vexp_low(NUM a) { return vexp(a); }
template <class NUM> ONT_DEVICE NUM vnormal(NUM a) { return HALF * (1 + verf(a * INV_SQRT2)); }
template <class NUM> ONT_DEVICE NUM vsigmoid(NUM a) { return 1 / (1 + vexp(-a)); }
template <class NUM> ONT_DEVICE NUM vremainder(NUM a, NUM b)
{
    NUM m = vfmod(a, b);
    return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}
/* As in simd/special.h: the series from 8 on, and reflection below zero. */
template <class NUM> ONT_DEVICE NUM vdigamma(NUM a)
{
    const double terms[] = {1.0 / 12, -691.0 / 32760, 1.0 / 132, -1.0 / 240, 1.0 / 252, -1.0 / 120, 1.0 / 12};
    double x = (double)a, z = x < 0 ? 1 - x : x, y = 0, series = 0;
    for (; z < 8; z += 1) y -= 1 / z;
    for (double term : terms) series = series / (z * z) + term;
    y += log(z) - 0.5 / z - series / (z * z);
    double r = x - rint(x);
    return (NUM)(!(x < 0) ? y : r == 0 ? r / r : y - 3.14159265358979323846 / tan(3.14159265358979323846 * r));
}
template <class NUM> ONT_DEVICE NUM vtrigamma(NUM a)
{
    const double terms[] = {7.0 / 6, -691.0 / 2730, 5.0 / 66, -1.0 / 30, 1.0 / 42, -1.0 / 30, 1.0 / 6};
    double x = (double)a, z = x < 0.5 ? 1 - x : x, y = 0, series = 0;
    for (; z < 8; z += 1) y += 1 / (z * z);
    for (double term : terms) series = series / (z * z) + term;
    y += 1 / z + 0.5 / (z * z) + series / (z * z * z);
    double turn = 3.14159265358979323846 / sin(3.14159265358979323846 * (x - rint(x)));
    return (NUM)(x < 0.5 ? turn * turn - y : y);
}
/* tanh(log(1 + e)) for e >= 0 */
template <class NUM> ONT_DEVICE NUM tanh_softplus(NUM e) { return e * (e + 2) / (e * (e + 2) + 2); }
template <class NUM> ONT_DEVICE NUM gelu_tanh_slope(NUM a)
{
    NUM w = GELU_W(a), e = vexp(w < 0 ? w : -w), s = 1 / (1 + e);
    return (w < 0 ? e * s : s) + a * e * s * s * (2 * SQRT_2_PI) * (1 + 3 * GELU_C * a * a);
}
/* Integers: division by -1 wraps; division by 0, which the kernel reports, gives 0. */
ONT_DEVICE float vdiv(float a, float b) { return a / b; }
ONT_DEVICE double vdiv(double a, double b) { return a / b; }
template <class NUM> ONT_DEVICE NUM vdiv(NUM a, NUM b)
{
    return b == 0 ? (NUM)0 : b == (NUM)-1 && (NUM)-1 < (NUM)1 ? (NUM)(0 - a) : (NUM)(a / b);
}

/* The remainder of integers, with the sign of the divisor or, with `c_style`, of the dividend. It is 0 for the divisors
 * -1, where the smallest number would overflow, and 0, which the kernel reports. */
template <class NUM> ONT_DEVICE NUM vmod(NUM a, NUM b, bool c_style)
{
    if (b == 0 || (b == (NUM)-1 && (NUM)-1 < (NUM)1)) return 0;
    const NUM m = (NUM)(a % b);
    return c_style || m == 0 || (m > 0) == (b > 0) ? m : (NUM)(m + b);
}

/* A shift by the width or more, or by a negative number, gives 0, or -1 for a negative number shifted right. */
template <class NUM> ONT_DEVICE NUM vshift(NUM a, NUM b, bool left)
{
    const uint64_t width = 8 * sizeof(NUM), by = (uint64_t)b;
    if (by < width) return left ? (NUM)((uint64_t)a << by) : (NUM)(a >> by);
    return !left && (NUM)-1 < (NUM)1 ? (NUM)(a >> (width - 1)) : (NUM)0;
}

/* ---- values as bits, by dtype ---- */

template <class T> ONT_DEVICE T ont_value(uint64_t bits)
{
    union {
        uint64_t bits;
        T value;
    } u = {bits};
    return u.value;
}
template <class T> ONT_DEVICE uint64_t ont_bits(T v)
{
    union {
        uint64_t bits;
        T value;
    } u = {0};
    u.value = v;
    return u.bits;
}

ONT_DEVICE bool ont_is_nan(int dtype, uint64_t v)
{
    switch (dtype) {
    case ONT_FLOAT32: return (v & 0x7fffffffu) > 0x7f800000u;
    case ONT_FLOAT64: return (v & 0x7fffffffffffffffull) > 0x7ff0000000000000ull;
    case ONT_FLOAT16: return (v & 0x7fff) > 0x7c00;
    default: return (v & 0x7fff) > 0x7f80;
    }
}

ONT_DEVICE bool ont_is_inf(int dtype, uint64_t v, bool negative, bool positive)
{
    const uint64_t infinity = dtype == ONT_FLOAT32   ? 0x7f800000u
                              : dtype == ONT_FLOAT64 ? 0x7ff0000000000000ull
                              : dtype == ONT_FLOAT16 ? 0x7c00u
                                                     : 0x7f80u;
    const uint64_t sign = 1ull << (dtype == ONT_FLOAT32 ? 31 : dtype == ONT_FLOAT64 ? 63 : 15);
    return v == infinity ? positive : v == (infinity | sign) && negative;
}

/* ---- casts: an integer goes as 64 bits, a float as double ---- */

/* Rounded towards zero with the last bit as a sticky one, so that a second rounding is right. */
ONT_DEVICE float ont_to_odd(double v)
{
    float f = (float)v;
    if ((double)f == v || v != v || isinf(f)) return f;
    int bits = __float_as_int(f);
    bool away = v > 0 ? (double)f > v : (double)f < v;
    if (away) bits--;
    return __int_as_float(bits | 1);
}

ONT_DEVICE int64_t ont_saturated(double v, double limit, int64_t low, int64_t high)
{
    return v != v ? 0 : v >= limit ? high : v < -limit ? low : (int64_t)v;
}

ONT_DEVICE int64_t ont_whole(double v)
{
    return ont_saturated(v, 9223372036854775808.0, -9223372036854775807 - 1, 9223372036854775807);
}

ONT_DEVICE uint64_t ont_wrapped(double v) /* unsigned targets wrap, as the processor's conversion does */
{
    if (v >= 9223372036854775808.0 && v < 18446744073709551616.0) return (uint64_t)v;
    return (uint64_t)ont_whole(v);
}

ONT_DEVICE uint64_t ont_from_double(double v, int to)
{
    switch (to) {
    case ONT_FLOAT32: return ont_bits<float>((float)v);
    case ONT_FLOAT64: return ont_bits<double>(v);
    case ONT_FLOAT16: return ont_float_to_f16(ont_to_odd(v));
    case ONT_BFLOAT16: return ont_float_to_bf16(ont_to_odd(v));
    case ONT_BOOL: return v != 0;
    case ONT_INT8: return ont_bits<int8_t>((int8_t)ont_saturated(v, 128, -128, 127));
    case ONT_INT16: return ont_bits<int16_t>((int16_t)ont_saturated(v, 32768, -32768, 32767));
    case ONT_INT32: return ont_bits<int32_t>((int32_t)ont_saturated(v, 2147483648.0, -2147483647 - 1, 2147483647));
    case ONT_INT64: return (uint64_t)ont_whole(v);
    case ONT_UINT8: return (uint8_t)ont_whole(v);
    case ONT_UINT16: return (uint16_t)ont_whole(v);
    case ONT_UINT32: return (uint32_t)ont_whole(v);
    default: return ont_wrapped(v);
    }
}

ONT_DEVICE uint64_t ont_from_integer(uint64_t v, bool is_unsigned, int to)
{
    switch (to) {
    case ONT_FLOAT32: return ont_bits<float>(is_unsigned ? (float)v : (float)(int64_t)v);
    case ONT_FLOAT64: return ont_bits<double>(is_unsigned ? (double)v : (double)(int64_t)v);
    case ONT_FLOAT16: return ont_float_to_f16(is_unsigned ? (float)v : (float)(int64_t)v);
    case ONT_BFLOAT16: return ont_float_to_bf16(is_unsigned ? (float)v : (float)(int64_t)v);
    case ONT_BOOL: return v != 0;
    case ONT_INT8:
    case ONT_UINT8: return v & 0xff;
    case ONT_INT16:
    case ONT_UINT16: return v & 0xffff;
    case ONT_INT32:
    case ONT_UINT32: return v & 0xffffffffu;
    default: return v;
    }
}

ONT_DEVICE uint64_t ont_cast(int from, int to, uint64_t v)
{
    switch (from) {
    case ONT_FLOAT32: return to == ONT_FLOAT16    ? ont_float_to_f16(ont_value<float>(v))
                             : to == ONT_BFLOAT16 ? ont_float_to_bf16(ont_value<float>(v))
                                                  : ont_from_double((double)ont_value<float>(v), to);
    case ONT_FLOAT64: return ont_from_double(ont_value<double>(v), to);
    case ONT_FLOAT16: return ont_from_double((double)ont_f16_to_float((uint16_t)v), to);
    case ONT_BFLOAT16: return ont_from_double((double)ont_bf16_to_float((uint16_t)v), to);
    case ONT_INT8: return ont_from_integer((uint64_t)(int64_t)ont_value<int8_t>(v), false, to);
    case ONT_INT16: return ont_from_integer((uint64_t)(int64_t)ont_value<int16_t>(v), false, to);
    case ONT_INT32: return ont_from_integer((uint64_t)(int64_t)ont_value<int32_t>(v), false, to);
    case ONT_INT64: return ont_from_integer(v, false, to);
    case ONT_BOOL: return ont_from_integer(v != 0, true, to);
    default: return ont_from_integer(v, true, to);
    }
}

/* Philox4x32-10. Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011. */
ONT_DEVICE void ont_philox(uint64_t key, uint64_t stream, uint64_t index, uint32_t *out)
{
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint32_t n0 = __umulhi(0xCD9E8D57u, c2) ^ c1 ^ k0, n2 = __umulhi(0xD2511F53u, c0) ^ c3 ^ k1;
        c1 = 0xCD9E8D57u * c2;
        c3 = 0xD2511F53u * c0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}
/*
 * The random words that decide in Dropout. random: the run's key, and seed and block of PyTorch's generator. The
 * highest bit of `stream` marks a layout of PyTorch's kernel (random.h): T threads, thread t draws its blocks of four
 * words as subsequence t. With vectors of 2, 4 or 8 elements, thread t takes vectors t, t + T, t + 2T, ..., and a block
 * of four words for each four of its elements, or for its two; without, it takes elements t, t + T, ... and one word
 * for each. The words are inverted, so that small words drop.
 *
 * Computes the block that has the word of `element`, and returns which of the four words it is. The words of a
 * multiple of 4 and of the next three elements are one block, except in layouts with vectors of 2 or none.
 */
ONT_DEVICE int ont_dropout_block(const uint64_t *random, uint64_t stream, int64_t element, uint32_t *words)
{
    if (!(stream >> 63)) {
        ont_philox(random[0], stream, (uint64_t)element >> 2, words);
        return (int)(element & 3);
    }
    const uint64_t first = stream & 0xffffffffffull, threads = ((stream >> 40 & 0xfffff) + 1) * 256;
    const int lanes = (int)(stream >> 60 & 3);
    const uint64_t piece = (uint64_t)element >> lanes, turn = piece / threads, thread = piece - turn * threads;
    const uint64_t block = lanes == 0 ? turn >> 2 : lanes == 3 ? turn * 2 + ((uint64_t)element >> 2 & 1) : turn;
    ont_philox(random[1], thread, random[2] + first + block, words);
    for (int k = 0; k < 4; k++) words[k] = ~words[k];
    return lanes == 0 ? (int)(turn & 3) : (int)(element & (lanes == 1 ? 1 : 3));
}
ONT_DEVICE uint32_t ont_dropout_word(const uint64_t *random, uint64_t stream, int64_t element)
{
    uint32_t words[4];
    const int place = ont_dropout_block(random, stream, element, words);
    return words[place];
}

#endif
