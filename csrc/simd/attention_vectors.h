/*
 * What attention_rows.h calls per element, for float32 in vectors of the running set: the compiler leaves the largest
 * score to scalar code and the sum to a pass of its own, and scales exponentials in six instructions, where AVX-512 has
 * one. Part of attention.inc.c, included by nothing else.
 */
#if defined(__AVX512F__)
enum { WIDTH = 16 };
typedef __m512 vec;
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SET _mm512_set1_ps
#define LARGER _mm512_max_ps /* of a, b: b where either is NaN */
#else
enum { WIDTH = 8 };
typedef __m256 vec;
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define SET _mm256_set1_ps
#define LARGER _mm256_max_ps
#endif

/* f32_exp() of math.h lane by lane, its polynomial and its accuracy; NaN stays, nothing is above 127 ln 2. */
INLINE vec exponential(vec x)
{
    x = LARGER(SET(-104.0f), x);
#if defined(__AVX512F__)
    vec k = _mm512_roundscale_ps(x * SET(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vec k = _mm256_round_ps(x * SET(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
    vec r = x - k * SET(0.693359375f) + k * SET(2.12194440e-4f), p = SET(1.98948709e-4f);
    p = p * r + SET(1.39296169e-3f);
    p = p * r + SET(8.33330402e-3f);
    p = p * r + SET(4.16665033e-2f);
    p = p * r + SET(1.66666667e-1f);
    p = p * r + SET(0.5f);
    p = p * (r * r) + r + SET(1.0f);
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, k);
#else
    __m256i n = _mm256_cvtps_epi32(k), half = _mm256_srai_epi32(n, 1), bias = _mm256_set1_epi32(127);
    vec low = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    vec high = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23));
    return p * low * high;
#endif
}

/* The last elements of a row, fewer than a vector, and `rest` in the other lanes. */
INLINE vec load_tail(const float *p, int64_t n, float rest)
{
    float lanes[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) lanes[i] = i < n ? p[i] : rest;
    return LOAD(lanes);
}

INLINE void store_tail(float *p, int64_t n, vec x)
{
    float lanes[WIDTH];
    STORE(lanes, x);
    for (int64_t i = 0; i < n; i++) p[i] = lanes[i];
}

INLINE float largest_f32(const float *s, int64_t n, float least)
{
    float lanes[WIDTH];
    vec a = SET(least), b = a;
    int64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        a = LARGER(LOAD(s + i), a);
        b = LARGER(LOAD(s + i + WIDTH), b);
    }
    for (; i + WIDTH <= n; i += WIDTH) a = LARGER(LOAD(s + i), a);
    if (i < n) b = LARGER(load_tail(s + i, n - i, least), b);
    STORE(lanes, LARGER(a, b));
    for (int half = WIDTH / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] = lanes[l] > lanes[l + half] ? lanes[l] : lanes[l + half];
    return lanes[0];
}

INLINE float exponentials_f32(float *s, int64_t n, float base)
{
    float lanes[WIDTH];
    vec start = SET(base), a = SET(0), b = a;
    int64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        vec x = exponential(LOAD(s + i) - start), y = exponential(LOAD(s + i + WIDTH) - start);
        STORE(s + i, x);
        STORE(s + i + WIDTH, y);
        a += x;
        b += y;
    }
    for (; i < n; i += WIDTH) {
        vec x = exponential(load_tail(s + i, n - i, -INFINITY) - start);
        store_tail(s + i, n - i < WIDTH ? n - i : WIDTH, x);
        a += x;
    }
    STORE(lanes, a + b);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

INLINE void gradients_f32(float *s, float *dp, int64_t n, float most, float factor, float delta)
{
    vec base = SET(most), inverse = SET(factor), middle = SET(delta);
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vec p = exponential(LOAD(s + i) - base) * inverse;
        STORE(s + i, p);
        STORE(dp + i, p * (LOAD(dp + i) - middle));
    }
    if (i == n) return;
    vec p = exponential(load_tail(s + i, n - i, -INFINITY) - base) * inverse;
    store_tail(s + i, n - i, p);
    store_tail(dp + i, n - i, p * (load_tail(dp + i, n - i, 0) - middle));
}
