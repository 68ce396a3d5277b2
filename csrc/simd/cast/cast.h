/*
 * Casts between the dtypes that have a C type, compiled once per instruction set. Floats become integers as
 * ont_f64_to_i32() and ont_f64_to_i64() of base/number.h convert them: what is out of range becomes the smallest one.
 */
#ifndef ONT_SIMD_CAST_H
#define ONT_SIMD_CAST_H

#include "base/dtype.h"

typedef void (*ont_cast_loop)(const void *x, void *y, int64_t n);
/* From each dtype; NULL: it has no C type. */
typedef ont_cast_loop ont_cast_loops[ONT_DTYPE_COUNT];

/* To each dtype. */
const ont_cast_loops *ont_simd_cast(void);

#endif
