/*
 * One element of any dtype as a double or as an int64, and back: for constants, and for reference kernels of operators
 * whose dtypes are many and whose sizes are small. The narrow formats (float8, float6, float4, int4, int2) lie one to a
 * byte.
 */
#ifndef ONT_BASE_NUMBER_H
#define ONT_BASE_NUMBER_H

#include "base/dtype.h"

/* Complex and string are not numbers: 0. */
double ont_number_at(const void *data, ont_dtype dtype, int64_t i);
/* To nearest, ties to even; to an integer as described below. Narrow floats saturate. */
void ont_number_put(void *data, ont_dtype dtype, int64_t i, double value);

/* Exact for integers and bool (uint64 by its bits); a float is truncated as ont_f64_to_i64 does. */
int64_t ont_integer_at(const void *data, ont_dtype dtype, int64_t i);
void ont_integer_put(void *data, ont_dtype dtype, int64_t i, int64_t value); /* wraps */
bool ont_integers_have_zero(const void *data, ont_dtype dtype, int64_t n);

/*
 * A float beyond an integer's range, or NaN: undefined in C and in ONNX. As torch on x86, whose instruction gives the
 * least int32 or int64 for it; int8, int16 and uint16 take the low bits of an int32, uint8 and uint32 of an int64.
 */
int32_t ont_f64_to_i32(double value);
int64_t ont_f64_to_i64(double value);
uint64_t ont_f64_to_u64(double value); /* 0 from 2^64 on; a negative one wraps */

/* float8, float6, float4 and float8e8m0 by their bits. Without `saturate` what is too large becomes infinity, or NaN
 * where the format has none. */
double ont_narrow_float_at(uint8_t bits, ont_dtype dtype);
uint8_t ont_narrow_float(double value, ont_dtype dtype, bool saturate);
typedef enum ont_e8m0_round { ONT_E8M0_UP, ONT_E8M0_DOWN, ONT_E8M0_NEAREST } ont_e8m0_round;
uint8_t ont_e8m0(double value, bool saturate, ont_e8m0_round round);

#endif
