/*
 * The optimizers' inner loops, compiled once per instruction set with ONT_ISA naming it (and ONT_ISA_PLAIN set for
 * the first); ends in the table ont_optim_table_<isa>. See optim.h for what each must do.
 */
#include "base/prefetch.h"
#include "simd/macros.h"
#include "simd/math.h"
#include "simd/optim/optim.h"

#if defined(__F16C__) || defined(__AVX512BW__)
#include <immintrin.h>
#endif

enum { LANES = 16, PIECE = 4096, ADAM_VECTOR = 32, AT_ONCE = 128 };

/* ---- 16-bit floats ---- */

INLINE uint32_t bits_from_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float f32_from_bf16(uint16_t x)
{
    return f32_from_bits((uint32_t)x << 16);
}

INLINE uint16_t bf16_from_f32(float x)
{
    uint32_t bits = bits_from_f32(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : rounded);
}

/* Both ways by scaling with exact powers of two, so that subnormals need no case of their own. */
INLINE float f32_from_f16(uint16_t x)
{
    uint32_t magnitude = (uint32_t)(x & 0x7fff) << 13;
    float scaled = f32_from_bits(magnitude) * 0x1p112f;
    uint32_t bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : bits_from_f32(scaled);
    return f32_from_bits(bits | (uint32_t)(x & 0x8000) << 16);
}

INLINE uint16_t f16_from_f32(float x)
{
    uint32_t bits = bits_from_f32(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds past 65504 */
    if (magnitude < 0x38800000) { /* subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits */
        uint32_t sum = bits_from_f32(f32_from_bits(magnitude) + 0.5f);
        return (uint16_t)(sign | (sum - 0x3f000000));
    }
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
}

/* ---- rules ---- */

/* What the rules take at once: a number, or two bfloat16 in a word. */
INLINE void get_f32(const float *p, float *x) { *x = *p; }
INLINE void put_f32(float *p, const float *x) { *p = *x; }
INLINE void get_f64(const double *p, double *x) { *x = *p; }
INLINE void put_f64(double *p, const double *x) { *p = *x; }

/*
 * To nearest even, in the upper half of the result. NaN needs no case of its own: here it comes from arithmetic or
 * from bfloat16, so that its lower half is zero and nothing carries.
 */
INLINE uint32_t bf16_above(float x)
{
    uint32_t bits = bits_from_f32(x);
    return bits + 0x7fff + (bits >> 16 & 1);
}

INLINE void get_bf16(const uint16_t *p, float *x)
{
    uint32_t word;
    memcpy(&word, p, sizeof word);
    x[0] = f32_from_bits(word << 16); /* little-endian */
    x[1] = f32_from_bits(word & 0xffff0000);
}

INLINE void put_bf16(uint16_t *p, const float *x)
{
    uint32_t word = bf16_above(x[0]) >> 16 | (bf16_above(x[1]) & 0xffff0000);
    memcpy(p, &word, sizeof word);
}

#define S(name) PASTE(name, _f32)
#define STORED float
#define NUM float
#define GET(x) (x)
#define PUT(x) (x)
#define SQRT(x) sqrtf(x)
#define UNIT 1
#include "simd/optim/optim_rules.h"
#undef S
#undef STORED
#undef GET
#undef PUT
#undef UNIT

#define S(name) PASTE(name, _bf16)
#define STORED uint16_t
#define GET(x) f32_from_bf16(x)
#define PUT(x) (uint16_t)(bf16_above(x) >> 16)
#define UNIT 2
#include "simd/optim/optim_rules.h"
#undef S
#undef STORED
#undef NUM
#undef GET
#undef PUT
#undef UNIT
#undef SQRT

#ifdef __AVX512BW__
#include "simd/optim/optim_adam_bf16.h"
#define adam_bf16 adam_wide_bf16 /* in the table below */
#endif

#define S(name) PASTE(name, _f64)
#define STORED double
#define NUM double
#define GET(x) (x)
#define PUT(x) (x)
#define SQRT(x) sqrt(x)
#define UNIT 1
#include "simd/optim/optim_rules.h"
#undef S
#undef STORED
#undef NUM
#undef GET
#undef PUT
#undef UNIT
#undef SQRT

/* ---- conversions ---- */

/* Whole vectors of float16 where the processor converts them; how many elements were done. */
static int64_t f16_load_vectors(const uint16_t *x, float *y, int64_t n)
{
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(x + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(x + i))));
#else
    (void)x, (void)y, (void)n;
#endif
    return i;
}

static int64_t f16_store_vectors(const float *x, uint16_t *y, int64_t n)
{
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) _mm256_storeu_si256((void *)(y + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), 0));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((void *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#else
    (void)x, (void)y, (void)n;
#endif
    return i;
}

#define CONVERT(storage, stored, number, num, get, put, load_vectors, store_vectors) \
    static void load_##storage##_##number(const void *from, int64_t stride, void *to, int64_t n) \
    { \
        const stored *restrict x = from; \
        num *restrict y = to; \
        if (stride == 1) \
            for (int64_t i = load_vectors; i < n; i++) y[i] = (num)get(x[i]); \
        else \
            for (int64_t i = 0; i < n; i++) y[i] = (num)get(x[i * stride]); \
    } \
    static void store_##storage##_##number(const void *from, void *to, int64_t stride, int64_t n) \
    { \
        const num *restrict x = from; \
        stored *restrict y = to; \
        if (stride == 1) \
            for (int64_t i = store_vectors; i < n; i++) y[i] = (stored)put(x[i]); \
        else \
            for (int64_t i = 0; i < n; i++) y[i * stride] = (stored)put(x[i]); \
    }
#define SAME(x) (x)
CONVERT(f32, float, f32, float, SAME, SAME, 0, 0)
CONVERT(f32, float, f64, double, SAME, SAME, 0, 0)
CONVERT(f64, double, f32, float, SAME, SAME, 0, 0)
CONVERT(f64, double, f64, double, SAME, SAME, 0, 0)
CONVERT(bf16, uint16_t, f32, float, f32_from_bf16, bf16_from_f32, 0, 0)
CONVERT(bf16, uint16_t, f64, double, f32_from_bf16, bf16_from_f32, 0, 0)
CONVERT(f16, uint16_t, f32, float, f32_from_f16, f16_from_f32, f16_load_vectors(x, y, n), f16_store_vectors(x, y, n))
CONVERT(f16, uint16_t, f64, double, f32_from_f16, f16_from_f32, 0, 0)

/* ---- stochastic rounding ---- */

/* 16 random bits for each of `n` <= PIECE elements from `first` on: element e has half e % 8 of Philox block e / 8. */
static void random_halves(uint16_t *bits, int64_t n, int64_t first, uint64_t key, uint64_t stream)
{
    uint32_t words[PIECE / 2 + 8];
    int64_t block = first / 8, blocks = (first + n + 7) / 8 - block;
    for (int64_t b = 0; b < blocks; b++) {
        philox4 r = philox(key, stream, (uint64_t)(block + b));
        for (int w = 0; w < 4; w++) words[b * 4 + w] = r.x[w];
    }
    memcpy(bits, (const char *)words + (first - block * 8) * 2, (size_t)n * 2); /* low half first: little-endian */
}

INLINE uint16_t bf16_stochastic(float x, uint16_t random)
{
    uint32_t bits = bits_from_f32(x);
    return (uint16_t)((bits & 0x7f800000) == 0x7f800000 ? bf16_from_f32(x) : (bits + random) >> 16);
}

/* Adds random bits below the last place of the result, which is 2^-24 for subnormals. Past 65504 as to nearest. */
INLINE uint16_t f16_stochastic(float x, uint16_t random)
{
    uint32_t bits = bits_from_f32(x), magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x477fe000) return f16_from_f32(x);
    if (magnitude < 0x38800000) {
        float units = f32_from_bits(magnitude) * 0x1p24f; /* < 2^10 */
        uint32_t whole = (uint32_t)units;
        whole += units - (float)whole > (float)random * 0x1p-16f;
        return (uint16_t)((bits >> 16 & 0x8000) | whole);
    }
    return (uint16_t)((bits >> 16 & 0x8000) | ((magnitude + (random >> 3) - 0x38000000) >> 13));
}

#define STOCHASTIC(storage, convert) \
    static void stochastic_##storage(const float *from, void *to, int64_t stride, int64_t n, int64_t first, \
                                     uint64_t key, uint64_t stream) \
    { \
        uint16_t random[PIECE], *y = to; \
        for (int64_t done = 0; done < n; done += PIECE) { \
            int64_t m = n - done < PIECE ? n - done : PIECE; \
            random_halves(random, m, first + done, key, stream); \
            if (stride == 1) \
                for (int64_t i = 0; i < m; i++) y[done + i] = convert(from[done + i], random[i]); \
            else \
                for (int64_t i = 0; i < m; i++) y[(done + i) * stride] = convert(from[done + i], random[i]); \
        } \
    }
STOCHASTIC(bf16, bf16_stochastic)
STOCHASTIC(f16, f16_stochastic)

/* ---- 8-bit state ---- */

/* Magnitudes compare as their bits do, with infinity above all numbers and NaN above that. */
static float largest(const float *x, int64_t n)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_from_f32(x[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return f32_from_bits(most);
}

static void load_signed(const int8_t *q, const float *scale, float *to, int64_t n)
{
    for (int64_t done = 0; done < n; done += ONT_QUANT_BLOCK) {
        int64_t m = n - done < ONT_QUANT_BLOCK ? n - done : ONT_QUANT_BLOCK;
        float s = scale[done / ONT_QUANT_BLOCK];
        for (int64_t i = 0; i < m; i++) {
            float a = (float)q[done + i] * (1 / 127.0f);
            to[done + i] = s * (a < 0 ? -a * a : a * a);
        }
    }
}

static void store_signed(const float *from, int8_t *q, float *scale, int64_t n)
{
    for (int64_t done = 0; done < n; done += ONT_QUANT_BLOCK) {
        int64_t m = n - done < ONT_QUANT_BLOCK ? n - done : ONT_QUANT_BLOCK;
        float s = largest(from + done, m), inverse = s > 0 && s <= 3e38f ? 1 / s : 0;
        scale[done / ONT_QUANT_BLOCK] = s;
        for (int64_t i = 0; i < m; i++) {
            float x = from[done + i] * inverse, a = sqrtf(x < 0 ? -x : x) * 127 + 0.5f;
            int32_t level = a < 127 ? (int32_t)a : 127;
            q[done + i] = (int8_t)(x < 0 ? -level : level);
        }
    }
}

static void load_unsigned(const uint8_t *q, const float *scale, float *to, int64_t n)
{
    for (int64_t done = 0; done < n; done += ONT_QUANT_BLOCK) {
        int64_t m = n - done < ONT_QUANT_BLOCK ? n - done : ONT_QUANT_BLOCK;
        float s = scale[done / ONT_QUANT_BLOCK];
        for (int64_t i = 0; i < m; i++) {
            float a = (float)q[done + i] * (1 / 255.0f);
            to[done + i] = s * (a * a) * (a * a);
        }
    }
}

static void store_unsigned(const float *from, uint8_t *q, float *scale, int64_t n)
{
    for (int64_t done = 0; done < n; done += ONT_QUANT_BLOCK) {
        int64_t m = n - done < ONT_QUANT_BLOCK ? n - done : ONT_QUANT_BLOCK;
        float s = largest(from + done, m), inverse = s > 0 && s <= 3e38f ? 1 / s : 0;
        scale[done / ONT_QUANT_BLOCK] = s;
        for (int64_t i = 0; i < m; i++) {
            float x = from[done + i] * inverse, a = sqrtf(sqrtf(x > 0 ? x : 0)) * 255 + 0.5f;
            int32_t level = a < 255 ? (int32_t)a : 255;
            q[done + i] = (uint8_t)(level == 0 && from[done + i] > 0 ? 1 : level);
        }
    }
}

/* ---- table ---- */

#define RULE(name, function) \
    [ONT_RULE_##name] = {[ONT_STORAGE_F32] = function##_f32, [ONT_STORAGE_F64] = function##_f64, \
                         [ONT_STORAGE_BF16] = function##_bf16},

const ont_optim_table PASTE(ont_optim_table_, ONT_ISA) = {
    .update = {ONT_RULE_LIST(RULE)},
    .sum_squares = {[ONT_STORAGE_F32] = sum_squares_f32, [ONT_STORAGE_F64] = sum_squares_f64,
                    [ONT_STORAGE_BF16] = sum_squares_bf16},
    .load = {[ONT_STORAGE_F32] = {load_f32_f32, load_f32_f64}, [ONT_STORAGE_F64] = {load_f64_f32, load_f64_f64},
             [ONT_STORAGE_BF16] = {load_bf16_f32, load_bf16_f64}, [ONT_STORAGE_F16] = {load_f16_f32, load_f16_f64}},
    .store = {[ONT_STORAGE_F32] = {store_f32_f32, store_f32_f64}, [ONT_STORAGE_F64] = {store_f64_f32, store_f64_f64},
              [ONT_STORAGE_BF16] = {store_bf16_f32, store_bf16_f64},
              [ONT_STORAGE_F16] = {store_f16_f32, store_f16_f64}},
    .store_stochastic = {[ONT_STORAGE_BF16] = stochastic_bf16, [ONT_STORAGE_F16] = stochastic_f16},
    .load_signed = load_signed,
    .store_signed = store_signed,
    .load_unsigned = load_unsigned,
    .store_unsigned = store_unsigned,
};
