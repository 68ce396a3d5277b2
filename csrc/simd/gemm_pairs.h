/*
 * ont_simd_gemm_pairs() of gemm_kernel.h by AVX512-BF16. Part of gemm_kernel.inc.c, included by nothing else. A word of
 * a panel is two elements that follow each other along k.
 */
#pragma GCC push_options
#pragma GCC target("avx512bf16")

/* ---- panels ---- */

/* Panels of `width` words of an operand stored (k, count): two rows share a line. */
INLINE void pairs_across(const ont_gemm_source *s, const int64_t width, float *panels)
{
    int64_t steps = (s->k + 1) / 2;
    for (int64_t step = 0; step < steps; step++, panels += width) {
        const uint16_t *x = (const uint16_t *)s->x + 2 * step * s->ld;
        bool second = 2 * step + 1 < s->k;
        if (2 * step + AHEAD < s->k)
            for (int64_t line = 0; line < s->count; line += 2 * LINE) {
                __builtin_prefetch(x + AHEAD * s->ld + line);
                __builtin_prefetch(x + (AHEAD + 1) * s->ld + line);
            }
        float *to = panels;
        for (int64_t i = 0; i < s->count; i += width, to += width * steps)
            for (int64_t l = 0; l < width; l += LANES) {
                __mmask16 inside = first_of_16(s->count - i - l);
                const uint16_t *at = x + (inside ? i + l : 0);
                __m256i low = _mm256_maskz_loadu_epi16(inside, at), high = _mm256_setzero_si256();
                if (second) high = _mm256_maskz_loadu_epi16(inside, at + s->ld);
                _mm512_mask_storeu_epi32(to + l, first_of_16(width - l), joined(low, high));
            }
    }
}

/* The same of an operand stored (count, k): LANES rows of LANES words at a time are turned. */
INLINE void pairs_along(const ont_gemm_source *s, const int64_t width, float *panels)
{
    const int64_t group = width < LANES ? width : LANES;
    int64_t steps = (s->k + 1) / 2;
    for (int64_t i = 0; i < s->count; i += width, panels += width * steps)
        for (int64_t g = 0; g < width; g += group) {
            int64_t rows = least(group, s->count - i - g);
            const uint16_t *x = (const uint16_t *)s->x + (rows > 0 ? i + g : 0) * s->ld;
            for (int64_t step = 0; step < steps; step += LANES) {
                __mmask32 inside = first_of_32(s->k - 2 * step);
                vec v[LANES];
#pragma GCC unroll 16
                for (int r = 0; r < LANES; r++) {
                    v[r] = (vec){0};
                    if (r >= rows) continue;
                    v[r] = (vec)_mm512_maskz_loadu_epi16(inside, x + r * s->ld + 2 * step);
                    __builtin_prefetch(x + r * s->ld + 2 * step + AHEAD * 2 * LINE);
                }
                turn_all(v);
                float *to = panels + step * width + g;
                for (int64_t l = 0; l < least(LANES, steps - step); l++)
                    _mm512_mask_storeu_ps(to + l * width, first_of_16(group), (__m512)v[l]);
            }
        }
}

static void lay_pairs_a(const ont_gemm_source *s, void *panels)
{
    if (s->across) pairs_across(s, ROWS, panels);
    else pairs_along(s, ROWS, panels);
}

static void lay_pairs_b(const ont_gemm_source *s, void *panels)
{
    if (s->across) pairs_across(s, COLUMNS, panels);
    else pairs_along(s, COLUMNS, panels);
}

/* ---- results ---- */

/* Up to 32 results, of which `inside` are written. */
INLINE void write_lanes(const ont_gemm_place *to, const vec sums[2], const uint16_t *row, char *c, __mmask32 inside,
                        bool stream)
{
    __m512 y[2];
    for (int v = 0; v < 2; v++) {
        __mmask16 part = (__mmask16)(inside >> (v * LANES));
        y[v] = (__m512)(to->alpha * sums[v]);
        if (row) y[v] += widened(_mm256_maskz_loadu_epi16(part, row + v * LANES));
    }
    if (to->half) {
        __m512i narrow = (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]);
        if (stream) _mm512_stream_si512((__m512i *)(void *)c, narrow);
        else _mm512_mask_storeu_epi16(c, inside, narrow);
        return;
    }
    for (int v = 0; v < 2; v++)
        if (stream) _mm512_stream_ps((float *)(void *)c + v * LANES, y[v]);
        else _mm512_mask_storeu_ps(c + 64 * v, (__mmask16)(inside >> (v * LANES)), y[v]);
}

INLINE void write_pairs(const ont_gemm_place *to, int64_t r, const vec sums[2])
{
    write_lanes(to, sums, to->row, (char *)to->c + r * to->ldc * (to->half ? 2 : 4), UINT32_MAX, false);
}

/* Up to 32 sums, those from n on 0. */
INLINE void load_lanes(const float *sums, int64_t n, vec to[2])
{
    for (int v = 0; v < 2; v++) to[v] = (vec)_mm512_maskz_loadu_ps(first_of_16(n - v * LANES), sums + v * LANES);
}

static void put_pairs(const float *sums, int64_t ld, int64_t m, int64_t n, const ont_gemm_place *to)
{
    int64_t size = to->half ? 2 : 4;
    for (int64_t i = 0; i < m; i++, sums += ld) {
        char *c = (char *)to->c + i * to->ldc * size;
        const uint16_t *row = to->row;
        int64_t head = to->stream ? least(n, (int64_t)(-(uintptr_t)c & 63) / size) : 0;
        vec both[2];
        if (head) {
            load_lanes(sums, head, both);
            write_lanes(to, both, row, c, first_of_32(head), false);
        }
        for (int64_t j = head; j < n; j += 2 * LANES) {
            __mmask32 inside = first_of_32(n - j);
            load_lanes(sums + j, n - j, both);
            write_lanes(to, both, row ? row + j : NULL, c + j * size, inside, to->stream && inside == UINT32_MAX);
        }
    }
    if (to->stream) _mm_sfence();
}

/* ---- products ---- */

INLINE vec spread_word(const float *a)
{
    int32_t word;
    memcpy(&word, a, sizeof word);
    return (vec)_mm512_set1_epi32(word);
}

#define T(name) name##_pairs
#define W(name) name##_pairs
#define STORED 0
#define DEPTH 2
#define SPREAD(a) spread_word(a)
#define MULTIPLY(sum, x, line) (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(line))
#include "simd/gemm_tile.h"

extern const ont_gemm_kernel PASTE(ont_gemm_pairs_, ONT_ISA);
const ont_gemm_kernel PASTE(ont_gemm_pairs_, ONT_ISA) = {
    .rows = ROWS, .columns = COLUMNS, .step = 2, .chunk = 768, .element = 2, .laid = 2,
    .lay_a = lay_pairs_a, .lay_b = lay_pairs_b, .multiply = multiply_pairs};

#pragma GCC pop_options
