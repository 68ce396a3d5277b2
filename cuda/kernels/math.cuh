/*
 * The functions that the expressions of simd/simd.h use, on a device and for any numeric type. Included by the
 * interpreter and, as text, in front of generated kernels. Plain C++ without headers of its own.
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
/* Word `element` of a stream. */
ONT_DEVICE uint32_t ont_philox_word(uint64_t key, uint64_t stream, int64_t element)
{
    uint32_t words[4];
    ont_philox(key, stream, (uint64_t)element >> 2, words);
    return words[element & 3];
}

/*
 * The random word that decides about an element in Dropout. random: the run's key, and seed and block of PyTorch's
 * generator. The highest bit of `stream` marks a layout of PyTorch's kernel (random.h): T threads, thread t draws
 * its blocks of four words as subsequence t. With vectors of 2, 4 or 8 elements, thread t takes vectors t, t + T, t +
 * 2T, ..., and a block of four words for each four of its elements, or for its two; without, it takes elements t, t +
 * T, ... and one word for each. The word is inverted, so that small words drop.
 */
ONT_DEVICE uint32_t ont_dropout_word(const uint64_t *random, uint64_t stream, int64_t element)
{
    if (!(stream >> 63)) return ont_philox_word(random[0], stream, element);
    const uint64_t first = stream & 0xffffffffffull, threads = ((stream >> 40 & 0xfffff) + 1) * 256;
    const int lanes = (int)(stream >> 60 & 3);
    const uint64_t piece = (uint64_t)element >> lanes, turn = piece / threads, thread = piece - turn * threads;
    const uint64_t block = lanes == 0 ? turn >> 2 : lanes == 3 ? turn * 2 + ((uint64_t)element >> 2 & 1) : turn;
    const int word = lanes == 0 ? (int)(turn & 3) : (int)(element & (lanes == 1 ? 1 : 3));
    uint32_t words[4];
    ont_philox(random[1], thread, random[2] + first + block, words);
    return ~words[word];
}

#endif
