/*
 * Token pasting, and functions that are always inlined: for files that are compiled once per instruction set, and for
 * the headers that these share.
 */
#ifndef ONT_SIMD_MACROS_H
#define ONT_SIMD_MACROS_H

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define INLINE static inline __attribute__((always_inline))

#endif
