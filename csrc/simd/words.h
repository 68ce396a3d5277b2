/*
 * Words of two bfloat16 that are neighbours along k, as processors multiply them, by AVX-512. For files that are
 * compiled once per instruction set, and nobody else.
 */
#ifndef ONT_SIMD_WORDS_H
#define ONT_SIMD_WORDS_H

#include <immintrin.h>
#include <stdint.h>

#include "simd/macros.h"

/* The first n of 32 lanes, or of 16. */
INLINE __mmask32 first_of_32(int64_t n)
{
    return n >= 32 ? UINT32_MAX : n <= 0 ? 0 : ((uint32_t)1 << n) - 1;
}

INLINE __mmask16 first_of_16(int64_t n)
{
    return (__mmask16)first_of_32(n);
}

/* Sixteen elements as floats. */
INLINE __m512 widened(__m256i x)
{
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}

/* Sixteen words of two elements each. */
INLINE __m512i joined(__m256i low, __m256i high)
{
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), (__m512i)widened(high));
}

#endif
