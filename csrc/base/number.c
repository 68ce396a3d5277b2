/*
 * Elements as numbers. See number.h.
 *
 * Source of the float8 formats: Micikevicius et al., FP8 Formats for Deep Learning, 2022, and ONNX's table of float8
 * conversions; of float4, float6 and e8m0: OCP Microscaling Formats 1.0.
 */
#include "base/number.h"

#include <math.h>
#include <string.h>

typedef struct narrow_format {
    int exponent_bits, mantissa_bits, bias;
    double most;
    bool infinite; /* has infinities and the NaNs of IEEE 754 */
    int nan;       /* bits of its only NaN; -1: IEEE 754 NaNs, or none */
} narrow_format;

static const narrow_format *format_of(ont_dtype dtype)
{
    static const narrow_format e4m3fn = {4, 3, 7, 448, false, 0x7f}, e4m3fnuz = {4, 3, 8, 240, false, 0x80},
                               e5m2 = {5, 2, 15, 57344, true, -1}, e5m2fnuz = {5, 2, 16, 57344, false, 0x80},
                               e2m1 = {2, 1, 1, 6, false, -1}, e2m3 = {2, 3, 1, 7.5, false, -1},
                               e3m2 = {3, 2, 3, 28, false, -1};
    switch (dtype) {
    case ONT_FLOAT8E4M3FN: return &e4m3fn;
    case ONT_FLOAT8E4M3FNUZ: return &e4m3fnuz;
    case ONT_FLOAT8E5M2: return &e5m2;
    case ONT_FLOAT8E5M2FNUZ: return &e5m2fnuz;
    case ONT_FLOAT4E2M1: return &e2m1;
    case ONT_FLOAT6E2M3: return &e2m3;
    case ONT_FLOAT6E3M2: return &e3m2;
    default: return NULL;
    }
}

double ont_narrow_float_at(uint8_t bits, ont_dtype dtype)
{
    if (dtype == ONT_FLOAT8E8M0) return bits == 0xff ? NAN : ldexp(1.0, bits - 127);
    const narrow_format *f = format_of(dtype);
    if (!f) return 0;
    int width = f->exponent_bits + f->mantissa_bits, all = (1 << f->exponent_bits) - 1;
    int exponent = bits >> f->mantissa_bits & all, mantissa = bits & ((1 << f->mantissa_bits) - 1);
    bool negative = bits >> width & 1;
    if (f->nan >= 0 && (bits == f->nan || (f->nan == 0x7f && bits == 0xff))) return NAN;
    if (f->infinite && exponent == all) return mantissa ? NAN : negative ? -INFINITY : INFINITY;
    double v = exponent ? ldexp(1.0 + ldexp(mantissa, -f->mantissa_bits), exponent - f->bias)
                        : ldexp(mantissa, 1 - f->bias - f->mantissa_bits);
    return negative ? -v : v;
}

uint8_t ont_e8m0(double value, bool saturate, ont_e8m0_round round)
{
    if (isnan(value) || (isinf(value) && !saturate)) return 0xff;
    if (isinf(value)) return 0xfe;
    value = fabs(value);
    if (value == 0) return 0;
    int exponent;
    double fraction = frexp(value, &exponent) * 2; /* in [1, 2) */
    exponent -= 1;
    if ((round == ONT_E8M0_UP && fraction > 1) || (round == ONT_E8M0_NEAREST && fraction >= 1.5)) exponent++;
    if (exponent > 127) return saturate ? 0xfe : 0xff;
    return exponent < -127 ? 0 : (uint8_t)(exponent + 127);
}

uint8_t ont_narrow_float(double value, ont_dtype dtype, bool saturate)
{
    if (dtype == ONT_FLOAT8E8M0) return ont_e8m0(value, saturate, ONT_E8M0_UP);
    const narrow_format *f = format_of(dtype);
    if (!f) return 0;
    int width = f->exponent_bits + f->mantissa_bits, all = (1 << f->exponent_bits) - 1;
    bool unsigned_zero = f->nan == 0x80;
    uint8_t sign = (uint8_t)((signbit(value) != 0) << width);
    uint8_t infinity = (uint8_t)(sign | all << f->mantissa_bits);
    if (isnan(value))
        return unsigned_zero ? 0x80 : f->nan >= 0 ? (uint8_t)(sign | f->nan) : f->infinite ? infinity | 3 : 0;
    double v = fabs(value);
    /* Rounds to a multiple of the unit in the last place; rint() rounds ties to even. */
    int exponent;
    frexp(v, &exponent);
    int last = (exponent - 1 < 1 - f->bias ? 1 - f->bias : exponent - 1) - f->mantissa_bits;
    if (v != 0 && !isinf(v)) v = ldexp(rint(ldexp(v, -last)), last);
    if (v > f->most) {
        if (!saturate && f->infinite) return infinity;
        if (!saturate && f->nan >= 0) return unsigned_zero ? 0x80 : (uint8_t)(sign | f->nan);
        v = f->most;
    }
    if (v == 0) return unsigned_zero ? 0 : sign;
    frexp(v, &exponent);
    exponent -= 1;
    if (exponent < 1 - f->bias) return (uint8_t)(sign | (int)ldexp(v, f->bias - 1 + f->mantissa_bits));
    int mantissa = (int)ldexp(v, f->mantissa_bits - exponent) & ((1 << f->mantissa_bits) - 1);
    return (uint8_t)(sign | (exponent + f->bias) << f->mantissa_bits | mantissa);
}

int64_t ont_f64_to_i64(double v)
{
    return v >= -0x1p63 && v < 0x1p63 ? (int64_t)v : INT64_MIN;
}

int32_t ont_f64_to_i32(double v)
{
    return v > -0x1p31 - 1 && v < 0x1p31 ? (int32_t)v : INT32_MIN;
}

uint64_t ont_f64_to_u64(double v)
{
    return v >= 0x1p64 ? 0 : v >= 0x1p63 ? (uint64_t)v : (uint64_t)ont_f64_to_i64(v);
}

static float bfloat_at(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* Rounds through float32 as torch does; NaN stays NaN. */
static uint16_t bfloat(double value)
{
    float v = (float)value;
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return isnan(v) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double ont_number_at(const void *data, ont_dtype dtype, int64_t i)
{
    switch (dtype) {
    case ONT_FLOAT32: return (double)((const float *)data)[i];
    case ONT_FLOAT64: return ((const double *)data)[i];
    case ONT_FLOAT16: return (double)((const _Float16 *)data)[i];
    case ONT_BFLOAT16: return (double)bfloat_at(((const uint16_t *)data)[i]);
    case ONT_UINT64: return (double)((const uint64_t *)data)[i];
    case ONT_FLOAT8E4M3FN:
    case ONT_FLOAT8E4M3FNUZ:
    case ONT_FLOAT8E5M2:
    case ONT_FLOAT8E5M2FNUZ:
    case ONT_FLOAT8E8M0:
    case ONT_FLOAT6E2M3:
    case ONT_FLOAT6E3M2:
    case ONT_FLOAT4E2M1: return ont_narrow_float_at(((const uint8_t *)data)[i], dtype);
    default: return (double)ont_integer_at(data, dtype, i);
    }
}

void ont_number_put(void *data, ont_dtype dtype, int64_t i, double v)
{
    switch (dtype) {
    case ONT_FLOAT32: ((float *)data)[i] = (float)v; break;
    case ONT_FLOAT64: ((double *)data)[i] = v; break;
    case ONT_FLOAT16: ((_Float16 *)data)[i] = (_Float16)v; break;
    case ONT_BFLOAT16: ((uint16_t *)data)[i] = bfloat(v); break;
    case ONT_BOOL: ((uint8_t *)data)[i] = v != 0; break;
    case ONT_INT8:
    case ONT_INT16:
    case ONT_UINT16:
    case ONT_INT32: ont_integer_put(data, dtype, i, ont_f64_to_i32(v)); break;
    case ONT_UINT64: ((uint64_t *)data)[i] = ont_f64_to_u64(v); break;
    case ONT_FLOAT8E4M3FN:
    case ONT_FLOAT8E4M3FNUZ:
    case ONT_FLOAT8E5M2:
    case ONT_FLOAT8E5M2FNUZ:
    case ONT_FLOAT8E8M0:
    case ONT_FLOAT6E2M3:
    case ONT_FLOAT6E3M2:
    case ONT_FLOAT4E2M1: ((uint8_t *)data)[i] = ont_narrow_float(v, dtype, true); break;
    default: ont_integer_put(data, dtype, i, ont_f64_to_i64(v)); break;
    }
}

int64_t ont_integer_at(const void *data, ont_dtype dtype, int64_t i)
{
    switch (dtype) {
    case ONT_INT64: return ((const int64_t *)data)[i];
    case ONT_INT32: return ((const int32_t *)data)[i];
    case ONT_INT16: return ((const int16_t *)data)[i];
    case ONT_INT8:
    case ONT_INT4:
    case ONT_INT2: return ((const int8_t *)data)[i];
    case ONT_UINT64: return (int64_t)((const uint64_t *)data)[i];
    case ONT_UINT32: return ((const uint32_t *)data)[i];
    case ONT_UINT16: return ((const uint16_t *)data)[i];
    case ONT_UINT8:
    case ONT_UINT4:
    case ONT_UINT2:
    case ONT_BOOL: return ((const uint8_t *)data)[i];
    case ONT_UNDEFINED:
    case ONT_STRING:
    case ONT_COMPLEX64:
    case ONT_COMPLEX128: return 0;
    default: return ont_f64_to_i64(ont_number_at(data, dtype, i));
    }
}

/* Each block is scanned to its end, so that the compiler can vectorise the loop. */
#define HAS_ZERO(type) \
    for (int64_t i = 0; i < n && !found; i += BLOCK) { \
        int64_t m = n - i < BLOCK ? n - i : BLOCK; \
        for (int64_t j = 0; j < m; j++) found |= !((const type *)data)[i + j]; \
    }

bool ont_integers_have_zero(const void *data, ont_dtype dtype, int64_t n)
{
    enum { BLOCK = 4096 };
    uint8_t found = 0;
    if (dtype == ONT_INT64 || dtype == ONT_UINT64) {
        HAS_ZERO(int64_t)
    } else if (dtype == ONT_INT32 || dtype == ONT_UINT32) {
        HAS_ZERO(int32_t)
    } else {
        for (int64_t i = 0; i < n && !found; i++) found = !ont_integer_at(data, dtype, i);
    }
    return found;
}

void ont_integer_put(void *data, ont_dtype dtype, int64_t i, int64_t v)
{
    uint64_t bits = (uint64_t)v;
    switch (dtype) {
    case ONT_INT64:
    case ONT_UINT64: ((uint64_t *)data)[i] = bits; break;
    case ONT_INT32:
    case ONT_UINT32: ((uint32_t *)data)[i] = (uint32_t)bits; break;
    case ONT_INT16:
    case ONT_UINT16: ((uint16_t *)data)[i] = (uint16_t)bits; break;
    case ONT_INT8:
    case ONT_UINT8: ((uint8_t *)data)[i] = (uint8_t)bits; break;
    case ONT_UINT4: ((uint8_t *)data)[i] = bits & 15; break;
    case ONT_UINT2: ((uint8_t *)data)[i] = bits & 3; break;
    case ONT_INT4: ((int8_t *)data)[i] = (int8_t)((int)((bits + 8) & 15) - 8); break;
    case ONT_INT2: ((int8_t *)data)[i] = (int8_t)((int)((bits + 2) & 3) - 2); break;
    case ONT_BOOL: ((uint8_t *)data)[i] = v != 0; break;
    case ONT_UNDEFINED:
    case ONT_STRING:
    case ONT_COMPLEX64:
    case ONT_COMPLEX128: break;
    default: ont_number_put(data, dtype, i, (double)v); break;
    }
}
