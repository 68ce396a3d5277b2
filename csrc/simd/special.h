/*
 * Special functions computed in double, so that GCC vectorises the loops around them. Results are correctly rounded for
 * float32 and within a few units in the last place for float64. Included by loops.inc.c once per instruction set, and
 * by nothing else.
 */
#ifndef ONT_SIMD_SPECIAL_H
#define ONT_SIMD_SPECIAL_H

#include "simd/math.h"

#define F64_PI 3.14159265358979323846

INLINE double f64_from_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Logarithm of a positive, normal, finite number, reduced as in f32_log, by the series of artanh (error 2e-17). */
INLINE double f64_log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint64_t e = (bits + (0x4000000000000000u - 0x3fe6a09e667f3bcdu)) >> 52; /* biased by 1024 */
    double k = f64_from_bits(e | 0x4330000000000000u) - (4503599627370496.0 + 1024);
    double m = f64_from_bits(bits - (e << 52) + 0x4000000000000000u), t = (m - 1) / (m + 1), z = t * t;
    double p = 2.0 / 21;
    p = p * z + 2.0 / 19;
    p = p * z + 2.0 / 17;
    p = p * z + 2.0 / 15;
    p = p * z + 2.0 / 13;
    p = p * z + 2.0 / 11;
    p = p * z + 2.0 / 9;
    p = p * z + 2.0 / 7;
    p = p * z + 2.0 / 5;
    p = p * z + 2.0 / 3;
    p = p * z + 2.0;
    return k * 0.69314718055994530942 + p * t;
}

/* sin(pi r) and cos(pi r) for |r| up to 1/2, by Taylor series (error 3e-16). */
INLINE double f64_sine(double r)
{
    double x = F64_PI * r, z = x * x, p = -1.0 / 121645100408832000;
    p = p * z + 1.0 / 355687428096000;
    p = p * z - 1.0 / 1307674368000;
    p = p * z + 1.0 / 6227020800;
    p = p * z - 1.0 / 39916800;
    p = p * z + 1.0 / 362880;
    p = p * z - 1.0 / 5040;
    p = p * z + 1.0 / 120;
    p = p * z - 1.0 / 6;
    return x + p * z * x;
}

INLINE double f64_cosine(double r)
{
    double x = F64_PI * r, z = x * x, p = 1.0 / 2432902008176640000;
    p = p * z - 1.0 / 6402373705728000;
    p = p * z + 1.0 / 20922789888000;
    p = p * z - 1.0 / 87178291200;
    p = p * z + 1.0 / 479001600;
    p = p * z - 1.0 / 3628800;
    p = p * z + 1.0 / 40320;
    p = p * z - 1.0 / 720;
    p = p * z + 1.0 / 24;
    p = p * z - 0.5;
    return 1 + p * z;
}

/*
 * log |gamma(x)|: Stirling's series from 7 on (error 2e-15), to which the recurrence leads; reflection below 1/2;
 * Taylor series near the zeros at 1 and 2.
 */
INLINE float f32_lgamma(float x)
{
    double a = (double)x, whole = __builtin_rint(a);
    bool low = a < 0.5;
    double z = low ? 1 - a : a, product = z;
    bool shifted = z < 7;
    for (int i = 1; i < 7; i++) product *= z + i;
    product = shifted ? product : 1;
    double w = shifted ? z + 7 : z, v = 1 / w, q = v * v;
    double series = 1.0 / 156;
    series = series * q - 691.0 / 360360;
    series = series * q + 1.0 / 1188;
    series = series * q - 1.0 / 1680;
    series = series * q + 1.0 / 1260;
    series = series * q - 1.0 / 360;
    series = series * q + 1.0 / 12;
    double high = (w - 0.5) * (f64_log(w) - 1) + (0.91893853320467274178 - 0.5) + series * v;
    double sine = __builtin_fabs(f64_sine(a - whole));
    double rest = f64_log((low ? product * F64_PI : 1) / (low ? sine : product));
    double y = (low ? -high : high) + rest;
    bool one = z < 1.5;
    double e = one ? z - 1 : z - 2;
    double near = one ? -0.40068563438653142847 : -0.067352301053198095133;
    near = near * e + (one ? 0.82246703342411321824 : 0.32246703342411321824);
    near = near * e + (one ? -0.57721566490153286061 : 0.42278433509846713939);
    y = (__builtin_fabs(e) < 0.0009765625) & !low ? near * e + 0.0 : y; /* + 0.0 turns -0.0 into 0 */
    bool infinite = ((a <= 0) & (a == whole)) | (__builtin_fabsf(x) > 3.402823466e38f);
    return infinite ? INFINITY : (float)y;
}

/*
 * Digamma and trigamma: the asymptotic series of Abramowitz and Stegun, 6.3.18 and 6.4.12, from 8 on, to which the
 * recurrence leads. The sum over 1 / (z + i) is computed as one quotient: the derivative of a product over that
 * product.
 */
INLINE double f64_digamma(double x)
{
    double whole = __builtin_rint(x), r = x - whole;
    bool low = x < 0;
    double z = low ? 1 - x : x, product = z, slope = 1;
    bool shifted = z < 8;
    for (int i = 1; i < 8; i++) {
        slope = slope * (z + i) + product;
        product *= z + i;
    }
    product = shifted ? product : 1;
    slope = shifted ? slope : 0;
    double w = shifted ? z + 8 : z, v = 1 / w, q = v * v;
    double series = 1.0 / 12;
    series = series * q - 691.0 / 32760;
    series = series * q + 1.0 / 132;
    series = series * q - 1.0 / 240;
    series = series * q + 1.0 / 252;
    series = series * q - 1.0 / 120;
    series = series * q + 1.0 / 12;
    double sine = low ? f64_sine(r) : 1, turn = low ? F64_PI * f64_cosine(r) * product : 0;
    double y = f64_log(w) - 0.5 * v - series * q - (slope * sine + turn) / (product * sine);
    y = x > 1.7976931348623157e308 ? x : y;
    return low & (r == 0) ? NAN : y;
}

INLINE double f64_trigamma(double x)
{
    double r = x - __builtin_rint(x);
    bool low = x < 0.5;
    double z = low ? 1 - x : x, product = z, slope = 1, bend = 0; /* bend: half of the second derivative */
    bool shifted = z < 8;
    for (int i = 1; i < 8; i++) {
        bend = bend * (z + i) + slope;
        slope = slope * (z + i) + product;
        product *= z + i;
    }
    double sum = shifted ? (slope * slope - 2 * bend * product) / (product * product) : 0;
    double w = shifted ? z + 8 : z, v = 1 / w, q = v * v;
    double series = 7.0 / 6;
    series = series * q - 691.0 / 2730;
    series = series * q + 5.0 / 66;
    series = series * q - 1.0 / 30;
    series = series * q + 1.0 / 42;
    series = series * q - 1.0 / 30;
    series = series * q + 1.0 / 6;
    double high = sum + v + 0.5 * q + series * q * v, turn = F64_PI / f64_sine(r);
    return low ? turn * turn - high : high;
}

INLINE float f32_digamma(float x) { return (float)f64_digamma((double)x); }
INLINE float f32_trigamma(float x) { return (float)f64_trigamma((double)x); }

/* erfinv(x) / x by polynomials in -log(1 - x^2) and in its square root: Giles, Approximating the erfinv function, 2012
 * (error 1e-8). */
INLINE float f32_erfinv(float x)
{
    float w = -f32_log(__builtin_fmaf(-x, x, 1.0f));
    bool near = w < 5.0f;
    float r = near ? w - 2.5f : __builtin_sqrtf(w) - 3.0f;
    float p = (near ? -8.79107006e-09f : 0.000115704334f);
    p = p * r + (near ? 2.3232516e-08f : -0.000309570652f);
    p = p * r + (near ? 4.66170807e-07f : -5.6780348e-05f);
    p = p * r + (near ? -3.46270323e-06f : 0.00148509027f);
    p = p * r + (near ? -4.96334825e-06f : -0.00359740179f);
    p = p * r + (near ? 0.000218344434f : 0.00568697402f);
    p = p * r + (near ? -0.00125274188f : -0.00763728997f);
    p = p * r + (near ? -0.00417738677f : 0.00944528645f);
    p = p * r + (near ? 0.246640286f : 1.00167497f);
    p = p * r + (near ? 1.50140936f : 2.8329768f);
    return __builtin_fabsf(x) == 1 ? f32_signed(INFINITY, x) : p * x;
}

/* erfinv by the quantiles of the normal distribution: Wichura, Algorithm AS241, 1988. */
INLINE double f64_erfinv(double x)
{
    double a = __builtin_fabs(x), inner = 0.180625 - 0.25 * x * x, beyond = 0.5 - 0.5 * a;
    bool centre = a <= 0.85;
    double root = __builtin_sqrt(-f64_log(centre | !(a < 1) ? 1 : beyond));
    bool middle = root <= 5;
    double r = centre ? inner : middle ? root - 1.6 : root - 5;
#define OF(a, b, c) (centre ? (a) : middle ? (b) : (c))
    double p = OF(2.5090809287301226727e+3, 7.74545014278341407640e-4, 2.01033439929228813265e-7);
    p = p * r + OF(3.3430575583588128105e+4, 2.27238449892691845833e-2, 2.71155556874348757815e-5);
    p = p * r + OF(6.7265770927008700853e+4, 2.41780725177450611770e-1, 1.24266094738807843860e-3);
    p = p * r + OF(4.5921953931549871457e+4, 1.27045825245236838258, 2.65321895265761230930e-2);
    p = p * r + OF(1.3731693765509461125e+4, 3.64784832476320460504, 2.96560571828504891230e-1);
    p = p * r + OF(1.9715909503065514427e+3, 5.76949722146069140550, 1.78482653991729133580);
    p = p * r + OF(1.3314166789178437745e+2, 4.63033784615654529590, 5.46378491116411436990);
    p = p * r + OF(3.3871328727963666080, 1.42343711074968357734, 6.65790464350110377720);
    double q = OF(5.2264952788528545610e+3, 1.05075007164441684324e-9, 2.04426310338993978564e-15);
    q = q * r + OF(2.8729085735721942674e+4, 5.47593808499534494600e-4, 1.42151175831644588870e-7);
    q = q * r + OF(3.9307895800092710610e+4, 1.51986665636164571966e-2, 1.84631831751005468180e-5);
    q = q * r + OF(2.1213794301586595867e+4, 1.48103976427480074590e-1, 7.86869131145613259100e-4);
    q = q * r + OF(5.3941960214247511077e+3, 6.89767334985100004550e-1, 1.48753612908506148525e-2);
    q = q * r + OF(6.8718700749205790830e+2, 1.67638483018380384940, 1.36929880922735805310e-1);
    q = q * r + OF(4.2313330701600911252e+1, 2.05319162663775882187, 5.99832206555887937690e-1);
    q = q * r + 1;
#undef OF
    double y = 0.70710678118654752440 * (centre ? 0.5 * a : 1) * p / q;
    y = a == 1 ? INFINITY : y;
    return a <= 1 ? __builtin_copysign(y, x) : NAN;
}

#endif
