/*
 * Scalar bodies of the vector math, written so that gcc vectorises the loops around them. Included by loops.inc.c once
 * per instruction set; nothing else includes it.
 */
#ifndef ONT_SIMD_MATH_H
#define ONT_SIMD_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "simd/macros.h"

INLINE float f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* exp: x = k ln 2 + r, a polynomial in r (least squares on Chebyshev-spaced points, error 5e-10), then scaled by 2^k.
 */
INLINE float f32_exp(float x)
{
    float clamped = x > 89.0f ? 89.0f : x;
    clamped = clamped < -104.0f ? -104.0f : clamped;
    float k = clamped * 1.44269504f;
    k = (k + 12582912.0f) - 12582912.0f; /* round to nearest */
    float r = clamped - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    float p = 1.98948709e-4f;
    p = p * r + 1.39296169e-3f;
    p = p * r + 8.33330402e-3f;
    p = p * r + 4.16665033e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    int32_t n = (int32_t)k, half = n >> 1; /* in two steps, so that neither scale overflows or is denormal */
    float y = p * f32_from_bits((uint32_t)(half + 127) << 23) * f32_from_bits((uint32_t)(n - half + 127) << 23);
    return x != x ? x : y;
}

INLINE float f32_tanh(float x)
{
    float a = x < 0 ? -x : x;
    float z = x * x;
    float small = -5.70498872745e-3f;
    small = small * z + 2.06390887954e-2f;
    small = small * z - 5.37397155531e-2f;
    small = small * z + 1.33314422036e-1f;
    small = small * z - 3.33332819422e-1f;
    small = x + x * z * small;
    float e = f32_exp(2 * a);
    float large = 1 - 2 / (e + 1);
    large = x < 0 ? -large : large;
    return a < 0.625f ? small : large;
}

INLINE float f32_erf(float x)
{
    float a = x < 0 ? -x : x;
    float z = x * x;
    float small = 7.8825298e-05f;
    small = small * z - 8.01889468e-4f;
    small = small * z + 5.18932054e-3f;
    small = small * z - 2.68543361e-2f;
    small = small * z + 1.12835977e-1f;
    small = small * z - 3.76126269e-1f;
    small = small * z + 1.12837917f;
    small *= x;
    float c = a > 4.2f ? 4.2f : a;
    float t = 1 / (1 + 0.5f * c);
    float q = 1.19005792e-1f;
    q = q * t - 4.70076711e-1f;
    q = q * t + 5.61697799e-1f;
    q = q * t - 1.02392312e-1f;
    q = q * t + 3.47233852e-1f;
    q = q * t + 2.59847644e-1f;
    q = q * t + 2.84887384e-1f;
    q = q * t - 1.52479086e-4f;
    float large = 1 - q * f32_exp(-c * c);
    large = x < 0 ? -large : large;
    return x != x ? x : a < 1 ? small : large;
}

INLINE float f32_sigmoid(float x)
{
    return 1 / (1 + f32_exp(-x));
}

/*
 * Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
 */
typedef struct philox4 {
    uint32_t x[4];
} philox4;

INLINE philox4 philox(uint64_t key, uint64_t stream, uint64_t index)
{
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (philox4){{c0, c1, c2, c3}};
}

#endif
