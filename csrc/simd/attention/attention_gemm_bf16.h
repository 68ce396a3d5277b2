/*
 * GEMM over blocks of attention for bfloat16 by AVX512-BF16, sums in float32: see ont_attention_gemm_bf16. Part of
 * attention_gemm.inc.c, included by nothing else.
 */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#endif

#define T(name) name##_bf16
#define K_PER_WORD 2
#define MULTIPLY(sum, x, b_row) (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(b_row))
#include "simd/attention/attention_gemm_tile.h"

static void copy_bf16(const uint16_t *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld)
{
    char *to = (char *)y;
    for (int64_t i = 0; i < rows; i++, x += stride, to += 4 * ld) {
        memcpy(to, x, (size_t)(2 * width));
        memset(to + 2 * width, 0, (size_t)(4 * ld - 2 * width));
    }
}

static void copy_vnni(const uint16_t *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld)
{
    for (int64_t i = 0; i < rows; i += 2, x += 2 * stride, y += ld)
        for (int64_t k = 0; k < ld; k += LANES) {
            __mmask16 inside = mask_first_16(width - k), second = i + 1 < rows ? inside : 0;
            __m256i low = _mm256_maskz_loadu_epi16(inside, x + (inside ? k : 0));
            __m256i high = _mm256_maskz_loadu_epi16(second, x + (second ? stride + k : 0));
            _mm512_storeu_si512(y + k, interleave_bf16(low, high));
        }
}

/* Sixteen floats rounded to bfloat16; those from `n` on are read as 0. */
INLINE __m256i load_as_bf16(const float *x, int64_t n)
{
    return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask_first_16(n), x));
}

static void to_bf16(const float *x, int64_t ldx, int64_t rows, int64_t width, float *y, int64_t ld)
{
    for (int64_t i = 0; i < rows; i++, x += ldx, y += ld)
        for (int64_t k = 0; k < width; k += LANES)
            _mm256_storeu_si256((__m256i *)(void *)(y + k / 2), load_as_bf16(x + k, width - k));
}

static void to_bf16_vnni(const float *x, int64_t ldx, int64_t rows, int64_t width, float *y, int64_t ld)
{
    for (int64_t i = 0; i < rows; i += 2, x += 2 * ldx, y += ld)
        for (int64_t k = 0; k < width; k += LANES) {
            __m256i high = i + 1 < rows ? load_as_bf16(x + ldx + k, width - k) : _mm256_setzero_si256();
            _mm512_storeu_si512(y + k, interleave_bf16(load_as_bf16(x + k, width - k), high));
        }
}

extern const ont_attention_gemm_bf16 PASTE(ont_attention_gemm_bf16_, ONT_ISA);
const ont_attention_gemm_bf16 PASTE(ont_attention_gemm_bf16_, ONT_ISA) = {gemm_bf16, copy_bf16, copy_vnni, to_bf16,
                                                                          to_bf16_vnni};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
