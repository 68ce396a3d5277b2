/*
 * Sixteen blocks of Philox4x32-10 at once, the same words as philox() of math.h. Part of files that are compiled once
 * per instruction set. The product of two 32-bit words has 64 bits: a word is held in a lane of 64 bits, whose upper
 * half is ignored. Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
 */
#ifndef ONT_SIMD_PHILOX_BLOCKS_H
#define ONT_SIMD_PHILOX_BLOCKS_H

#include "simd/math.h"

enum { PHILOX_BLOCKS = 16 };

#if defined(__AVX2__)
#include <immintrin.h>

#if defined(__AVX512F__)
enum { PHILOX_LANES = 8 };
typedef __m512i philox_vec;
#define PHILOX_SET(v) _mm512_set1_epi64((int64_t)(v))
#define PHILOX_MUL(a, b) _mm512_mul_epu32(a, b)
/* a shuffle, since shifts would use the port of the multiplications */
#define PHILOX_HIGH(a) (__m512i)_mm512_movehdup_ps((__m512)(a))
#define PHILOX_XOR(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x96)
#define PHILOX_FIRST(block) _mm512_add_epi64(PHILOX_SET(block), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7))
/* low words of `a`, and of `b` above them */
#define PHILOX_PAIR(a, b) _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32))

INLINE void philox_store(uint32_t *out, philox_vec a, philox_vec b)
{
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), b));
    _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), b));
}
#else
enum { PHILOX_LANES = 4 };
typedef __m256i philox_vec;
#define PHILOX_SET(v) _mm256_set1_epi64x((int64_t)(v))
#define PHILOX_MUL(a, b) _mm256_mul_epu32(a, b)
#define PHILOX_HIGH(a) _mm256_srli_epi64(a, 32)
#define PHILOX_XOR(a, b, c) _mm256_xor_si256(a, _mm256_xor_si256(b, c))
#define PHILOX_FIRST(block) _mm256_add_epi64(PHILOX_SET(block), _mm256_setr_epi64x(0, 1, 2, 3))
#define PHILOX_PAIR(a, b) _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa)

INLINE void philox_store(uint32_t *out, philox_vec a, philox_vec b)
{
    __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256((__m256i *)(void *)(out + 8), _mm256_permute2x128_si256(even, odd, 0x31));
}
#endif

/* Words of blocks [block, block + PHILOX_BLOCKS) in order; the multiplications of two vectors are interleaved. */
INLINE void philox_blocks(uint64_t key, uint64_t stream, uint64_t block, uint32_t *bits)
{
    const philox_vec m0 = PHILOX_SET(0xD2511F53u), m1 = PHILOX_SET(0xCD9E8D57u);
    for (int done = 0; done < PHILOX_BLOCKS; done += 2 * PHILOX_LANES) {
        philox_vec c0[2], c1[2], c2[2], c3[2];
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
        for (int v = 0; v < 2; v++) {
            c0[v] = PHILOX_FIRST(block + (uint64_t)(done + v * PHILOX_LANES));
            c1[v] = PHILOX_HIGH(c0[v]);
            c2[v] = PHILOX_SET(stream);
            c3[v] = PHILOX_HIGH(c2[v]);
        }
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
            for (int v = 0; v < 2; v++) {
                philox_vec p0 = PHILOX_MUL(m0, c0[v]), p1 = PHILOX_MUL(m1, c2[v]);
                c0[v] = PHILOX_XOR(PHILOX_HIGH(p1), c1[v], PHILOX_SET(k0));
                c2[v] = PHILOX_XOR(PHILOX_HIGH(p0), c3[v], PHILOX_SET(k1));
                c1[v] = p1;
                c3[v] = p0;
            }
        for (int v = 0; v < 2; v++)
            philox_store(bits + 4 * (done + v * PHILOX_LANES), PHILOX_PAIR(c0[v], c1[v]), PHILOX_PAIR(c2[v], c3[v]));
    }
}

#else

INLINE void philox_blocks(uint64_t key, uint64_t stream, uint64_t block, uint32_t *bits)
{
    for (int b = 0; b < PHILOX_BLOCKS; b++) {
        philox4 r = philox(key, stream, block + (uint64_t)b);
        for (int w = 0; w < 4; w++) bits[b * 4 + w] = r.x[w];
    }
}

#endif
#endif
