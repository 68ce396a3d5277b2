/*
 * AVX-512 helpers for 32-bit words of two bfloat16 that are adjacent along k, as AVX512-BF16 and AMX multiply them.
 * Only for files that are compiled once per instruction set.
 */
#ifndef ONT_SIMD_WORDS_H
#define ONT_SIMD_WORDS_H

#include <immintrin.h>
#include <stdint.h>

#include "simd/macros.h"

/* A mask of the first n of 32 lanes, or of 16. */
INLINE __mmask32 mask_first_32(int64_t n)
{
    return n >= 32 ? UINT32_MAX : n <= 0 ? 0 : ((uint32_t)1 << n) - 1;
}

INLINE __mmask16 mask_first_16(int64_t n)
{
    return (__mmask16)mask_first_32(n);
}

/* Sixteen bfloat16 as floats. */
INLINE __m512 bf16_to_f32(__m256i x)
{
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}

/* Sixteen words: `low` in the lower halves, `high` in the upper ones. */
INLINE __m512i interleave_bf16(__m256i low, __m256i high)
{
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), (__m512i)bf16_to_f32(high));
}

#endif
