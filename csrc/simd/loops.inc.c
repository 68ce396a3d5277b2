/*
 * The inner loops, compiled once per instruction set, which ONT_ISA names (with ONT_ISA_PLAIN for the scalar one). Ends
 * in the table ont_simd_<isa>. In the plain build all math is libm's: the reference that tests compare the others with.
 */
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "simd/macros.h"
#include "simd/math.h"
#include "simd/shuffle.h"
#include "simd/simd.h"
#include "simd/special.h"

#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

/* ---- math by dtype: makes the expressions of simd.h type-generic ---- */

INLINE double f64_vlgamma(double a)
{
    int sign;
    return lgamma_r(a, &sign);
}

#if ONT_ISA_PLAIN
#define f32_vlog logf
#define f32_vsinh sinhf
#define f32_vcosh coshf
#define f32_vlog1p log1pf
#define f32_vexp expf
#define f32_vexp_low expf
#define f32_vexp2 exp2f
#define f32_vexpm1 expm1f
#define f32_vsin sinf
#define f32_vcos cosf
#define f32_vtan tanf
#define f32_vasin asinf
#define f32_vacos acosf
#define f32_vatan atanf
#define f32_vatanh atanhf
#define f32_vpow powf
#define f32_vatan2 atan2f
#define f32_vfmod fmodf
INLINE float f32_vlgamma(float a) { return (float)f64_vlgamma((double)a); }
INLINE float f32_verfinv(float a) { return (float)f64_erfinv((double)a); }
#define f32_vtanh tanhf
#define f32_verf erff
#define f32_verfc erfcf
INLINE float f32_vnormal(float a) { return 0.5f * (1 + erff(a * 0.707106781f)); }
INLINE float f32_vsigmoid(float a) { return 1 / (1 + expf(-a)); }
#else
#define f32_vlog f32_log
#define f32_vsinh f32_sinh
#define f32_vcosh f32_cosh
#define f32_vlog1p f32_log1p
#define f32_vexp f32_exp
#define f32_vexp_low f32_exp_low
#define f32_vexp2 f32_exp2
#define f32_vexpm1 f32_expm1
#define f32_vsin f32_sin
#define f32_vcos f32_cos
#define f32_vtan f32_tan
#define f32_vasin f32_asin
#define f32_vacos f32_acos
#define f32_vatan f32_atan
#define f32_vatanh f32_atanh
#define f32_vpow f32_pow
#define f32_vatan2 f32_atan2
#define f32_vfmod f32_fmod
#define f32_vlgamma f32_lgamma
#define f32_verfinv f32_erfinv
#define f32_vnormal f32_normal
#define f32_vtanh f32_tanh
#define f32_verf f32_erf
#define f32_verfc f32_erfc
#define f32_vsigmoid f32_sigmoid
#endif
INLINE double f64_vsigmoid(double a) { return 1 / (1 + exp(-a)); }
INLINE double f64_vnormal(double a) { return 0.5 * (1 + erf(a * 0.70710678118654752440)); }

#define GENERIC(f32, f64) _Generic((NUM)0, float: f32, double: f64)
#define vsqrt(a) GENERIC(sqrtf, sqrt)(a)
#define vexp(a) GENERIC(f32_vexp, exp)(a)
#define vexp_low(a) GENERIC(f32_vexp_low, exp)(a) /* for a below 88 */
#define vnormal(a) GENERIC(f32_vnormal, f64_vnormal)(a)
#define vlog(a) GENERIC(f32_vlog, log)(a)
#define vexp2(a) GENERIC(f32_vexp2, exp2)(a)
#define vexpm1(a) GENERIC(f32_vexpm1, expm1)(a)
#define vlog1p(a) GENERIC(f32_vlog1p, log1p)(a)
#define verf(a) GENERIC(f32_verf, erf)(a)
#define verfc(a) GENERIC(f32_verfc, erfc)(a)
#define vtanh(a) GENERIC(f32_vtanh, tanh)(a)
#define vsigmoid(a) GENERIC(f32_vsigmoid, f64_vsigmoid)(a)
#define vsin(a) GENERIC(f32_vsin, sin)(a)
#define vcos(a) GENERIC(f32_vcos, cos)(a)
#define vtan(a) GENERIC(f32_vtan, tan)(a)
#define vasin(a) GENERIC(f32_vasin, asin)(a)
#define vacos(a) GENERIC(f32_vacos, acos)(a)
#define vatan(a) GENERIC(f32_vatan, atan)(a)
#define vsinh(a) GENERIC(f32_vsinh, sinh)(a)
#define vcosh(a) GENERIC(f32_vcosh, cosh)(a)
#define vasinh(a) GENERIC(asinhf, asinh)(a)
#define vacosh(a) GENERIC(acoshf, acosh)(a)
#define vatanh(a) GENERIC(f32_vatanh, atanh)(a)
#define vlgamma(a) GENERIC(f32_vlgamma, f64_vlgamma)(a)
#define vdigamma(a) GENERIC(f32_digamma, f64_digamma)(a)
#define vtrigamma(a) GENERIC(f32_trigamma, f64_trigamma)(a)
#define verfinv(a) GENERIC(f32_verfinv, f64_erfinv)(a)
#define vfloor(a) GENERIC(floorf, floor)(a)
#define vceil(a) GENERIC(ceilf, ceil)(a)
#define vround(a) GENERIC(rintf, rint)(a) /* ties to even */
#define vatan2(a, b) GENERIC(f32_vatan2, atan2)(a, b)
#define vpow(a, b) GENERIC(f32_vpow, pow)(a, b)
#define vfmod(a, b) GENERIC(f32_vfmod, fmod)(a, b)
#define vremainder(a, b) floored(vfmod(a, b), b)
/* A remainder with the sign of the divisor; as in PyTorch, a zero is that of fmod. */
#define floored(m, b) GENERIC(floored_f32, floored_f64)(m, b)
INLINE float floored_f32(float m, float b) { return (m != 0) & ((m < 0) != (b < 0)) ? m + b : m; }
INLINE double floored_f64(double m, double b) { return (m != 0) & ((m < 0) != (b < 0)) ? m + b : m; }
#define vabs(a) ((a) < 0 ? -(a) : (a))
#define vmax(x, y) ((x) > (y) ? (x) : (NUM)(y))
#define vmin(x, y) ((x) < (y) ? (x) : (NUM)(y))
/* NaN in either operand gives NaN, as in torch.minimum. */
#define vminimum(x, y) ((x) != (x) || (x) < (y) ? (x) : (y))
#define vmaximum(x, y) ((x) != (x) || (x) > (y) ? (x) : (y))
#define P0 p0
#define P1 p1
/* Read before the loop: GCC does not vectorise a loop that reads in one branch alone. */
#define PARAMETERS(p) \
    const NUM p0 = p ? (NUM)p[0] : 0, p1 = p ? (NUM)p[1] : 0; \
    (void)p0, (void)p1
#define HALF ((NUM)0.5)
#define THIRD ((NUM)(1.0 / 3))
#define SIXTH ((NUM)(1.0 / 6))
#define INV_SQRT_2PI ((NUM)0.39894228040143267794)
#define TWO_INV_SQRT_PI ((NUM)1.12837916709551257390)
#define SQRT_2_PI ((NUM)0.79788456080286535588)
#define GELU_C ((NUM)0.044715)
#define GELU_W(a) ((2 * SQRT_2_PI) * ((a) + GELU_C * (a) * (a) * (a))) /* (1 + tanh(w / 2)) / 2 is sigmoid(w) */

/* Integer division by -1 wraps; the kernel refuses division by 0 before; narrow types divide as int. */
INLINE int32_t div_i32(int32_t a, int32_t b) { return b == -1 ? (int32_t)(0u - (uint32_t)a) : a / b; }
INLINE int64_t div_i64(int64_t a, int64_t b) { return b == -1 ? (int64_t)(0ull - (uint64_t)a) : a / b; }
INLINE uint32_t div_u32(uint32_t a, uint32_t b) { return a / b; }
INLINE uint64_t div_u64(uint64_t a, uint64_t b) { return a / b; }
INLINE float div_f32(float a, float b) { return a / b; }
INLINE double div_f64(double a, double b) { return a / b; }
#define vdiv(a, b) \
    _Generic((NUM)0, float: div_f32, double: div_f64, uint32_t: div_u32, int64_t: div_i64, uint64_t: div_u64, \
             default: div_i32)(a, b)

/* tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1) for e >= 0 */
INLINE float tanh_softplus_f32(float e) { return e * (e + 2) / (e * (e + 2) + 2); }
INLINE double tanh_softplus_f64(double e) { return e * (e + 2) / (e * (e + 2) + 2); }
#define tanh_softplus(e) GENERIC(tanh_softplus_f32, tanh_softplus_f64)(e)

#define NUM float
INLINE float gelu_tanh_slope_f32(float a)
{
    float w = GELU_W(a), e = vexp_low(w < 0 ? w : -w), s = 1 / (1 + e);
    return (w < 0 ? e * s : s) + a * e * s * s * (2 * SQRT_2_PI) * (1 + 3 * GELU_C * a * a);
}
#undef NUM
#define NUM double
INLINE double gelu_tanh_slope_f64(double a)
{
    double w = GELU_W(a), e = vexp_low(w < 0 ? w : -w), s = 1 / (1 + e);
    return (w < 0 ? e * s : s) + a * e * s * s * (2 * SQRT_2_PI) * (1 + 3 * GELU_C * a * a);
}
#undef NUM
#define gelu_tanh_slope(a) GENERIC(gelu_tanh_slope_f32, gelu_tanh_slope_f64)(a)

/* ---- loop bodies ---- */

#define UNARY_LOOP(name, suffix, type, expression) \
    static void PASTE(name##_, suffix)(const void *x, void *y, int64_t n, const double *p) \
    { \
        const type *in = x; \
        type *out = y; \
        PARAMETERS(p); \
        for (int64_t i = 0; i < n; i++) { \
            type a = in[i]; \
            out[i] = (type)(expression); \
        } \
    }

/* Three cases of strides, so that each is a plain vector loop. */
#define BINARY_LOOP(name, suffix, type, result, expression) \
    static void PASTE(name##_, suffix)(const void *x, int64_t sx, const void *y, int64_t sy, void *z, int64_t n, \
                                       const double *p) \
    { \
        const type *in0 = x, *in1 = y; \
        result *out = z; \
        PARAMETERS(p); \
        if (sx && sy) { \
            for (int64_t i = 0; i < n; i++) { \
                type a = in0[i], b = in1[i]; \
                out[i] = (result)(expression); \
            } \
        } else if (sx) { \
            type b = n ? *in1 : 0; \
            for (int64_t i = 0; i < n; i++) { \
                type a = in0[i]; \
                out[i] = (result)(expression); \
            } \
        } else { \
            type a = n ? *in0 : 0; \
            for (int64_t i = 0; i < n; i++) { \
                type b = in1[sy ? i : 0]; \
                out[i] = (result)(expression); \
            } \
        } \
    }

#if ONT_ISA_PLAIN
#define CIRCULAR_LOOP(name, expression) UNARY_LOOP(name, f32, float, expression)
#define FAR_BINARY_LOOP(name, expression) BINARY_LOOP(name, f32, float, float, expression)
#else
enum { BLOCK = 64 };
#define far_Sin sinf
#define far_Cos cosf
#define far_Tan tanf
#define far_Pow powf
#define far_Fmod fmodf
#define far_Remainder(a, b) floored_f32(fmodf(a, b), b)
#define is_far_Pow f32_pow_is_far
#define is_far_Fmod(a, b) !(fabsf(a) < F32_NEAR_QUOTIENT * fabsf(b))
#define is_far_Remainder is_far_Fmod

/* Lanes out of the range of the vector math are recomputed by libm. The operand is copied for them, since the result
 * may overwrite it. */
#define CIRCULAR_LOOP(name, expression) \
    UNARY_LOOP(near_##name, f32, float, expression) \
    static void name##_f32(const void *x, void *y, int64_t n, const double *p) \
    { \
        const float *in = x; \
        float *out = y, kept[BLOCK]; \
        for (int64_t m; n > 0; n -= m, in += m, out += m) { \
            int far = 0; \
            m = n < BLOCK ? n : BLOCK; \
            for (int64_t i = 0; i < m; i++) far |= fabsf(in[i]) > F32_FAR; \
            if (far) memcpy(kept, in, (size_t)m * sizeof *in); \
            near_##name##_f32(in, out, m, p); \
            for (int64_t i = 0; far && i < m; i++) \
                if (fabsf(kept[i]) > F32_FAR) out[i] = far_##name(kept[i]); \
        } \
    }

/* Expands a scalar to a row. */
#define FAR_BINARY_LOOP(name, expression) \
    BINARY_LOOP(near_##name, f32, float, float, expression) \
    static void name##_f32(const void *x, int64_t sx, const void *y, int64_t sy, void *z, int64_t n, \
                           const double *p) \
    { \
        const float *in0 = x, *in1 = y; \
        float *out = z, row0[BLOCK], row1[BLOCK]; \
        for (int64_t i = 0; !sx && i < BLOCK; i++) row0[i] = *in0; \
        for (int64_t i = 0; !sy && i < BLOCK; i++) row1[i] = *in1; \
        for (int64_t done = 0, m; done < n; done += m) { \
            const float *a = sx ? in0 + done : row0, *b = sy ? in1 + done : row1; \
            int far = 0; \
            m = n - done < BLOCK ? n - done : BLOCK; \
            for (int64_t i = 0; i < m; i++) far |= is_far_##name(a[i], b[i]); \
            if (far && sx) a = memcpy(row0, a, (size_t)m * sizeof *a); \
            if (far && sy) b = memcpy(row1, b, (size_t)m * sizeof *b); \
            near_##name##_f32(a, 1, b, 1, out + done, m, p); \
            for (int64_t i = 0; far && i < m; i++) \
                if (is_far_##name(a[i], b[i])) out[done + i] = far_##name(a[i], b[i]); \
        } \
    }
#endif

#define NUM float
#define X(name, expression) UNARY_LOOP(name, f32, float, expression)
ONT_UNARY_DIRECT_LIST(X) ONT_UNARY_NUMBER_LIST(X)
#undef X
ONT_CIRCULAR_LIST(CIRCULAR_LOOP)
#define X(name, expression) BINARY_LOOP(name, f32, float, float, expression)
ONT_BINARY_DIRECT_LIST(X) ONT_BINARY_NUMBER_LIST(X)
#undef X
ONT_BINARY_FAR_LIST(FAR_BINARY_LOOP)
#define X(name, expression) BINARY_LOOP(name, f32, float, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

#define NUM double
#define X(name, expression) UNARY_LOOP(name, f64, double, expression)
ONT_UNARY_FLOAT_LIST(X) ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, f64, double, double, expression)
ONT_BINARY_FLOAT_LIST(X) ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, f64, double, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

/* Integers: as in PyTorch, arithmetic wraps (the build has -fwrapv). */
#pragma GCC diagnostic ignored "-Wtype-limits" /* an unsigned number is never below 0: one list of expressions serves
                                                * all types */
#define NUM int8_t
#define X(name, expression) UNARY_LOOP(name, i8, int8_t, expression)
ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, i8, int8_t, int8_t, expression)
ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, i8, int8_t, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

#define NUM int16_t
#define X(name, expression) UNARY_LOOP(name, i16, int16_t, expression)
ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, i16, int16_t, int16_t, expression)
ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, i16, int16_t, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

#define NUM int32_t
#define X(name, expression) UNARY_LOOP(name, i32, int32_t, expression)
ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, i32, int32_t, int32_t, expression)
ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, i32, int32_t, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

#define NUM int64_t
#define X(name, expression) UNARY_LOOP(name, i64, int64_t, expression)
ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, i64, int64_t, int64_t, expression)
ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, i64, int64_t, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

#define NUM uint8_t
#define X(name, expression) UNARY_LOOP(name, u8, uint8_t, expression)
ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, u8, uint8_t, uint8_t, expression)
ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, u8, uint8_t, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

#define NUM uint16_t
#define X(name, expression) UNARY_LOOP(name, u16, uint16_t, expression)
ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, u16, uint16_t, uint16_t, expression)
ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, u16, uint16_t, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

#define NUM uint32_t
#define X(name, expression) UNARY_LOOP(name, u32, uint32_t, expression)
ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, u32, uint32_t, uint32_t, expression)
ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, u32, uint32_t, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

#define NUM uint64_t
#define X(name, expression) UNARY_LOOP(name, u64, uint64_t, expression)
ONT_UNARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, u64, uint64_t, uint64_t, expression)
ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) BINARY_LOOP(name, u64, uint64_t, uint8_t, expression)
ONT_COMPARE_LIST(X)
#undef X
#undef NUM

/* ---- selection ---- */

/* By masks, so that GCC vectorises the loop. */
#define SELECT(type, left, right) \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) \
    { \
        type mask = (type)-(type)(c[i] != 0); \
        to[i] = (type)(((left) & mask) | ((right) & (type)~mask)); \
    }
#define WHERE(type) \
    static void where_##type(const uint8_t *c, const type *x, const type *y, const int64_t strides[3], type *to, \
                             int64_t n) \
    { \
        if (!n) return; \
        const int64_t sc = strides[0], sx = strides[1], sy = strides[2]; \
        type first = *x, second = *y; \
        if (sc == 0) { \
            const type *from = *c ? x : y; \
            int64_t stride = *c ? sx : sy; \
            if (stride == 1) \
                memmove(to, from, (size_t)n * sizeof *to); \
            else \
                for (int64_t i = 0; i < n; i++) to[i] = from[i * stride]; \
        } else if (sc == 1 && sx == 1 && sy == 1) { \
            SELECT(type, x[i], y[i]) \
        } else if (sc == 1 && sx == 1 && sy == 0) { \
            SELECT(type, x[i], second) \
        } else if (sc == 1 && sx == 0 && sy == 1) { \
            SELECT(type, first, y[i]) \
        } else if (sc == 1 && sx == 0 && sy == 0) { \
            SELECT(type, first, second) \
        } else { \
            for (int64_t i = 0; i < n; i++) to[i] = c[i * sc] ? x[i * sx] : y[i * sy]; \
        } \
    }
WHERE(uint8_t)
WHERE(uint16_t)
WHERE(uint32_t)
WHERE(uint64_t)
#undef WHERE
#undef SELECT

static void where(size_t size, const uint8_t *c, const void *x, const void *y, const int64_t strides[3], void *out,
                  int64_t n)
{
    switch (size) {
    case 1: where_uint8_t(c, x, y, strides, out, n); break;
    case 2: where_uint16_t(c, x, y, strides, out, n); break;
    case 4: where_uint32_t(c, x, y, strides, out, n); break;
    case 8: where_uint64_t(c, x, y, strides, out, n); break;
    default:
        for (int64_t i = 0; i < n; i++) {
            bool first = c[i * strides[0]];
            memcpy((char *)out + (size_t)i * size,
                   (const char *)(first ? x : y) + (size_t)(i * strides[first ? 1 : 2]) * size, size);
        }
    }
}

#define BOUNDS(type) \
    for (int64_t i = 0; i < n; i++) { \
        int64_t v = ((const type *)indices)[i]; \
        low = v < low ? v : low; \
        high = v > high ? v : high; \
    }
static void index_bounds(const void *indices, bool wide, int64_t n, int64_t *lowest, int64_t *highest)
{
    int64_t low = INT64_MAX, high = INT64_MIN;
    if (wide) {
        BOUNDS(int64_t)
    } else {
        BOUNDS(int32_t)
    }
    *lowest = low;
    *highest = high;
}
#undef BOUNDS

/* ---- 16-bit floats ---- */

/* GCC 12 vectorises neither conversion. Each loop ends in the scalar one. */
static void half_to_float(const void *x, float *y, int64_t n)
{
    const _Float16 *in = x;
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(in + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < n; i++) y[i] = (float)in[i];
}

static void float_to_half(const float *x, void *y, int64_t n)
{
    _Float16 *out = y;
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(out + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) out[i] = (_Float16)x[i];
}

static void bfloat_to_float(const void *x, float *y, int64_t n)
{
    const uint16_t *in = x;
    for (int64_t i = 0; i < n; i++) y[i] = f32_from_bits((uint32_t)in[i] << 16);
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
static void float_to_bfloat(const float *x, void *y, int64_t n)
{
    uint16_t *out = y;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

typedef uint8_t byte16 __attribute__((vector_size(16)));
ONT_DEFINE_SHUFFLE(shuffle_bytes, byte16, byte16)

/* The halves of 16 levels are two vectors of bytes, in which a shuffle looks 16 codes up at a time. */
static void decode_nibbles(const uint8_t *codes, const uint16_t *levels, uint16_t *out, int64_t n)
{
    const byte16 first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, second = first + 8;
    byte16 low, high;
    int64_t i = 0;
    for (int level = 0; level < 16; level++) low[level] = (uint8_t)levels[level], high[level] = levels[level] >> 8;
    for (; i + 16 <= n; i += 16) {
        byte16 pairs;
        memcpy(&pairs, codes + i, sizeof pairs);
        byte16 earlier = pairs >> 4, later = pairs & 15;
        for (int half = 0; half < 2; half++) {
            byte16 at = shuffle_bytes(earlier, later, half ? second : first);
            byte16 lows = shuffle_bytes(low, low, at), highs = shuffle_bytes(high, high, at);
            byte16 words[] = {shuffle_bytes(lows, highs, first), shuffle_bytes(lows, highs, second)};
            memcpy(out + 2 * i + 16 * half, words, sizeof words);
        }
    }
    for (; i < n; i++) {
        out[2 * i] = levels[codes[i] >> 4];
        out[2 * i + 1] = levels[codes[i] & 15];
    }
}

static float bfloat_at(const uint16_t *x, int64_t i)
{
    return f32_from_bits((uint32_t)x[i] << 16);
}

/* Several rows at a time: the sums are read and written once for all of them; rows are added in order. */
static void add_bfloat_rows(float *acc, const void *x, int64_t rows, int64_t stride, int64_t n)
{
    const uint16_t *in = x;
    for (; rows >= 4; rows -= 4, in += 4 * stride) {
        const uint16_t *second = in + stride, *third = second + stride, *fourth = third + stride;
        for (int64_t i = 0; i < n; i++)
            acc[i] = acc[i] + bfloat_at(in, i) + bfloat_at(second, i) + bfloat_at(third, i) + bfloat_at(fourth, i);
    }
    for (; rows > 0; rows--, in += stride)
        for (int64_t i = 0; i < n; i++) acc[i] += bfloat_at(in, i);
}

#include "simd/rows.h"

/* ---- table ---- */

#define UNARY_ENTRY(name, dtype, suffix) [ONT_LOOP_##name][ONT_##dtype] = name##_##suffix,
#define FLOATS(name, expression) UNARY_ENTRY(name, FLOAT32, f32) UNARY_ENTRY(name, FLOAT64, f64)
#define NUMBERS(name, expression) \
    FLOATS(name, expression) UNARY_ENTRY(name, INT8, i8) UNARY_ENTRY(name, INT16, i16) UNARY_ENTRY(name, INT32, i32) \
    UNARY_ENTRY(name, INT64, i64) UNARY_ENTRY(name, UINT8, u8) UNARY_ENTRY(name, UINT16, u16) \
    UNARY_ENTRY(name, UINT32, u32) UNARY_ENTRY(name, UINT64, u64)
#define COMPARES(name, expression) NUMBERS(name, expression) UNARY_ENTRY(name, BOOL, u8)

const ont_simd_table PASTE(ont_simd_table_, ONT_ISA) = {
    .isa = TEXT(ONT_ISA),
    .unary = {ONT_UNARY_FLOAT_LIST(FLOATS) ONT_UNARY_NUMBER_LIST(NUMBERS)},
    .binary = {ONT_BINARY_FLOAT_LIST(FLOATS) ONT_BINARY_NUMBER_LIST(NUMBERS) ONT_COMPARE_LIST(COMPARES)},
    .where = where,
    .half_to_float = half_to_float,
    .index_bounds = index_bounds,
    .float_to_half = float_to_half,
    .bfloat_to_float = bfloat_to_float,
    .float_to_bfloat = float_to_bfloat,
    .decode_nibbles = decode_nibbles,
    .add_bfloat_rows = add_bfloat_rows,
    .sum = row_sum,
    .dot = row_dot,
    .max = row_max,
    .add_to = row_add_to,
    .add_taps = row_add_taps,
    .softmax = row_softmax,
    .log_softmax = row_log_softmax,
    .log_sum_exp = row_log_sum_exp,
    .scaled_softmax = row_scaled_softmax,
    .softmax_grad = row_softmax_grad,
    .log_softmax_grad = row_log_softmax_grad,
    .layernorm = row_layernorm,
    .layernorm_grad = row_layernorm_grad,
    .dropout = row_dropout,
    .rotate = row_rotate,
    .rotate_wide = row_rotate_wide,
};
