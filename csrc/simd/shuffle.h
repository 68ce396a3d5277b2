/*
 * ONT_DEFINE_SHUFFLE(name, type, mask) defines name(a, b, at): a vector whose lanes are those of `a` and `b` that the
 * integers of `at` count, the lanes of `b` after those of `a`. Clang lacks GCC's function and makes it of a loop.
 */
#ifndef ONT_SIMD_SHUFFLE_H
#define ONT_SIMD_SHUFFLE_H

#include "simd/macros.h"

#if defined(__clang__)
#define ONT_DEFINE_SHUFFLE(name, type, mask) \
    INLINE type name(type a, type b, mask at) \
    { \
        const int lanes = (int)(sizeof at / sizeof at[0]); \
        type out = a; \
        for (int i = 0; i < lanes; i++) out[i] = (int)at[i] < lanes ? a[at[i]] : b[(int)at[i] - lanes]; \
        return out; \
    }
#else
#define ONT_DEFINE_SHUFFLE(name, type, mask) \
    INLINE type name(type a, type b, mask at) { return __builtin_shuffle(a, b, at); }
#endif

#endif
