/*
 * The elementwise loops of attention.inc.c by AVX2 and AVX-512. By hand, since GCC computes the maximum in scalar code,
 * sums in a pass of its own, and scales the exponential by six instructions where AVX-512 has one (vscalefps). Part of
 * attention.inc.c, included by nothing else.
 */
#if defined(__AVX512F__)
#include "simd/words.h"

enum { WIDTH = 16 };
typedef __m512 vec;
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SET _mm512_set1_ps
#define MAX _mm512_max_ps /* MAX(a, b) is b where either is NaN */
#else
enum { WIDTH = 8 };
typedef __m256 vec;
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define SET _mm256_set1_ps
#define MAX _mm256_max_ps
#endif

/* f32_exp() of math.h in vectors: the same polynomial and accuracy. NaN gives NaN; x is at most 127 ln 2. */
INLINE vec exponential(vec x)
{
    x = MAX(SET(-104.0f), x);
#if defined(__AVX512F__)
    vec k = _mm512_roundscale_ps(x * SET(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vec k = _mm256_round_ps(x * SET(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
    vec r = x - k * SET(0.693359375f) + k * SET(2.12194440e-4f), p = SET(1.381446689e-3f);
    p = p * r + SET(8.36878055e-3f);
    p = p * r + SET(4.166839422e-2f);
    p = p * r + SET(1.666652011e-1f);
    p = p * r + SET(4.999999341e-1f);
    p = p * r + SET(1.0f);
    p = p * r + SET(1.0f);
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, k);
#else
    __m256i n = _mm256_cvtps_epi32(k), half = _mm256_srai_epi32(n, 1), bias = _mm256_set1_epi32(127);
    vec low = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    vec high = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23));
    return p * low * high;
#endif
}

#if defined(__AVX512F__)

/* The first n elements, with `fill` in the remaining lanes. */
INLINE vec load_first(const float *p, int64_t n, float fill)
{
    return _mm512_mask_loadu_ps(SET(fill), mask_first_16(n), p);
}

INLINE void store_first(float *p, int64_t n, vec x)
{
    _mm512_mask_storeu_ps(p, mask_first_16(n), x);
}

INLINE float max_lane(vec x) { return _mm512_reduce_max_ps(x); }
INLINE float sum_lanes(vec x) { return _mm512_reduce_add_ps(x); }

#else

INLINE __m256i mask_first(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE vec load_first(const float *p, int64_t n, float fill)
{
    __m256i inside = mask_first(n < WIDTH ? n : WIDTH);
    return _mm256_blendv_ps(SET(fill), _mm256_maskload_ps(p, inside), _mm256_castsi256_ps(inside));
}

INLINE void store_first(float *p, int64_t n, vec x)
{
    _mm256_maskstore_ps(p, mask_first(n < WIDTH ? n : WIDTH), x);
}

INLINE float max_lane(vec x)
{
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

INLINE float sum_lanes(vec x)
{
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

#endif

INLINE float max_of(const float *s, int64_t n, float initial)
{
    vec a = SET(initial), b = a;
    int64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        a = MAX(LOAD(s + i), a);
        b = MAX(LOAD(s + i + WIDTH), b);
    }
    for (; i < n; i += WIDTH) a = MAX(load_first(s + i, n - i, initial), a);
    return max_lane(MAX(a, b));
}

INLINE float exp_and_sum(float *s, int64_t n, float base)
{
    vec base_v = SET(base), a = SET(0), b = a;
    int64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        vec x = exponential(LOAD(s + i) - base_v), y = exponential(LOAD(s + i + WIDTH) - base_v);
        STORE(s + i, x);
        STORE(s + i + WIDTH, y);
        a += x;
        b += y;
    }
    for (; i < n; i += WIDTH) {
        vec x = exponential(load_first(s + i, n - i, -INFINITY) - base_v);
        store_first(s + i, n - i, x);
        a += x;
    }
    return sum_lanes(a + b);
}

INLINE void score_grads(float *s, float *dp, int64_t n, float row_max, float inverse_sum, float delta)
{
    vec base = SET(row_max), inverse = SET(inverse_sum), delta_v = SET(delta);
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vec p = exponential(LOAD(s + i) - base) * inverse;
        STORE(s + i, p);
        STORE(dp + i, p * (LOAD(dp + i) - delta_v));
    }
    if (i == n) return;
    vec p = exponential(load_first(s + i, n - i, -INFINITY) - base) * inverse;
    store_first(s + i, n - i, p);
    store_first(dp + i, n - i, p * (load_first(dp + i, n - i, 0) - delta_v));
}

INLINE float dot(const float *x, const float *y, int64_t n)
{
    vec a = SET(0), b = a;
    int64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        a += LOAD(x + i) * LOAD(y + i);
        b += LOAD(x + i + WIDTH) * LOAD(y + i + WIDTH);
    }
    for (; i < n; i += WIDTH) a += load_first(x + i, n - i, 0) * load_first(y + i, n - i, 0);
    return sum_lanes(a + b);
}
