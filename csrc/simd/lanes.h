/*
 * Float vectors of the width of the instruction set. Only for files that are compiled once per instruction set. Memory
 * needs no alignment beyond that of float.
 */
#ifndef ONT_SIMD_LANES_H
#define ONT_SIMD_LANES_H

#include <stdint.h>

#include "simd/shuffle.h"

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float vec_any __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t shuffle_4 __attribute__((vector_size(16)));
typedef int32_t shuffle_lanes __attribute__((vector_size(LANES * 4)));
typedef float quad_any __attribute__((vector_size(16), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const vec_any *)p; }
INLINE void store(float *p, vec v) { *(vec_any *)p = v; }

ONT_DEFINE_SHUFFLE(shuffle_quads, quad, shuffle_4)
ONT_DEFINE_SHUFFLE(shuffle_vectors, vec, shuffle_lanes)

/* Transposes four rows of four. */
INLINE void transpose_4x4(quad r[4])
{
    quad a = shuffle_quads(r[0], r[1], (shuffle_4){0, 4, 1, 5});
    quad b = shuffle_quads(r[2], r[3], (shuffle_4){0, 4, 1, 5});
    quad c = shuffle_quads(r[0], r[1], (shuffle_4){2, 6, 3, 7});
    quad d = shuffle_quads(r[2], r[3], (shuffle_4){2, 6, 3, 7});
    r[0] = shuffle_quads(a, b, (shuffle_4){0, 1, 4, 5});
    r[1] = shuffle_quads(a, b, (shuffle_4){2, 3, 6, 7});
    r[2] = shuffle_quads(c, d, (shuffle_4){0, 1, 4, 5});
    r[3] = shuffle_quads(c, d, (shuffle_4){2, 3, 6, 7});
}

/* Transposes LANES rows of LANES: swaps blocks of 1, 2, 4 and 8 across the diagonal. */
INLINE void transpose_lanes(vec x[LANES])
{
#if defined(__AVX512F__)
    static const shuffle_lanes low[] = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                                   {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                                   {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                                   {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}};
    static const shuffle_lanes high[] = {{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31},
                                    {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31},
                                    {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31},
                                    {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}};
#elif defined(__AVX2__)
    static const shuffle_lanes low[] = {{0, 8, 2, 10, 4, 12, 6, 14}, {0, 1, 8, 9, 4, 5, 12, 13},
                                        {0, 1, 2, 3, 8, 9, 10, 11}};
    static const shuffle_lanes high[] = {{1, 9, 3, 11, 5, 13, 7, 15}, {2, 3, 10, 11, 6, 7, 14, 15},
                                    {4, 5, 6, 7, 12, 13, 14, 15}};
#else
    static const shuffle_lanes low[] = {{0, 4, 2, 6}, {0, 1, 4, 5}}, high[] = {{1, 5, 3, 7}, {2, 3, 6, 7}};
#endif
#pragma GCC unroll 4
    for (int level = 0; level < (int)(sizeof low / sizeof *low); level++)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & 1 << level)) {
                vec a = x[i], b = x[i + (1 << level)];
                x[i] = shuffle_vectors(a, b, low[level]);
                x[i + (1 << level)] = shuffle_vectors(a, b, high[level]);
            }
}

#endif
