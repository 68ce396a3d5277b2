/*
 * Products of blocks of attention for bfloat16 by AVX512-BF16, sums in float32: see ont_tile_pairs. Part of
 * attention_product.inc.c, included by nothing else.
 */
#pragma GCC push_options
#pragma GCC target("avx512bf16")

#define T(name) name##_pairs
#define STEP 2
#define MULTIPLY(sum, x, line) (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(line))
#include "simd/attention_tile.h"

static void copy_pairs(const uint16_t *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld)
{
    char *to = (char *)y;
    for (int64_t i = 0; i < rows; i++, x += stride, to += 4 * ld) {
        memcpy(to, x, (size_t)(2 * width));
        memset(to + 2 * width, 0, (size_t)(4 * ld - 2 * width));
    }
}

static void copy_joined(const uint16_t *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld)
{
    for (int64_t i = 0; i < rows; i += 2, x += 2 * stride, y += ld)
        for (int64_t k = 0; k < ld; k += LANES) {
            __mmask16 inside = first_of_16(width - k), second = i + 1 < rows ? inside : 0;
            __m256i low = _mm256_maskz_loadu_epi16(inside, x + (inside ? k : 0));
            __m256i high = _mm256_maskz_loadu_epi16(second, x + (second ? stride + k : 0));
            _mm512_storeu_si512(y + k, joined(low, high));
        }
}

/* Sixteen floats rounded; those from `n` on are 0. */
INLINE __m256i rounded(const float *x, int64_t n)
{
    return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_of_16(n), x));
}

static void narrow(const float *x, int64_t ldx, int64_t rows, int64_t width, float *y, int64_t ld)
{
    for (int64_t i = 0; i < rows; i++, x += ldx, y += ld)
        for (int64_t k = 0; k < width; k += LANES)
            _mm256_storeu_si256((__m256i *)(void *)(y + k / 2), rounded(x + k, width - k));
}

static void narrow_joined(const float *x, int64_t ldx, int64_t rows, int64_t width, float *y, int64_t ld)
{
    for (int64_t i = 0; i < rows; i += 2, x += 2 * ldx, y += ld)
        for (int64_t k = 0; k < width; k += LANES) {
            __m256i high = i + 1 < rows ? rounded(x + ldx + k, width - k) : _mm256_setzero_si256();
            _mm512_storeu_si512(y + k, joined(rounded(x + k, width - k), high));
        }
}

extern const ont_tile_pairs PASTE(ont_tile_pairs_, ONT_ISA);
const ont_tile_pairs PASTE(ont_tile_pairs_, ONT_ISA) = {product_pairs, copy_pairs, copy_joined, narrow, narrow_joined};

#pragma GCC pop_options
