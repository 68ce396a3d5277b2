/*
 * Vectors of as many lanes as the instruction set has that a file is compiled for. For files that are compiled once per
 * instruction set and nobody else; memory has no alignment beyond that of float.
 */
#ifndef ONT_SIMD_LANES_H
#define ONT_SIMD_LANES_H

#include <stdint.h>

#include "simd/macros.h"

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
typedef int32_t places __attribute__((vector_size(16)));
typedef float quad_any __attribute__((vector_size(16), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const vec_any *)p; }
INLINE void store(float *p, vec v) { *(vec_any *)p = v; }

/* Four rows become four columns. */
INLINE void turn(quad r[4])
{
    quad a = __builtin_shuffle(r[0], r[1], (places){0, 4, 1, 5});
    quad b = __builtin_shuffle(r[2], r[3], (places){0, 4, 1, 5});
    quad c = __builtin_shuffle(r[0], r[1], (places){2, 6, 3, 7});
    quad d = __builtin_shuffle(r[2], r[3], (places){2, 6, 3, 7});
    r[0] = __builtin_shuffle(a, b, (places){0, 1, 4, 5});
    r[1] = __builtin_shuffle(a, b, (places){2, 3, 6, 7});
    r[2] = __builtin_shuffle(c, d, (places){0, 1, 4, 5});
    r[3] = __builtin_shuffle(c, d, (places){2, 3, 6, 7});
}

#endif
