/*
 * Integer helpers of tiling code: minimum, maximum, division rounded up.
 */
#ifndef ONT_BASE_INT_MATH_H
#define ONT_BASE_INT_MATH_H

#include <stdint.h>

#define ONT_ALWAYS_INLINE static inline __attribute__((always_inline))

ONT_ALWAYS_INLINE int64_t ont_min(int64_t a, int64_t b) { return a < b ? a : b; }
ONT_ALWAYS_INLINE int64_t ont_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* For a >= 0 and b > 0. */
ONT_ALWAYS_INLINE int64_t ont_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/* The smallest multiple of `multiple` that is at least `a`; a >= 0, multiple > 0. */
ONT_ALWAYS_INLINE int64_t ont_round_up(int64_t a, int64_t multiple) { return ont_ceil_div(a, multiple) * multiple; }

#endif
