/*
 * Reads and writes one element of any dtype as double or int64: for constants, and for reference kernels of operators
 * with many dtypes and small tensors. The narrow formats (float8, float6, float4, int4, int2) take one byte per
 * element.
 */
#ifndef ONT_BASE_NUMBER_H
#define ONT_BASE_NUMBER_H

#include "base/dtype.h"

/* 0 for complex and string. */
double ont_number_at(const void *data, ont_dtype dtype, int64_t i);
/* Rounds to nearest, ties to even; to integers as described below. Narrow floats saturate. */
void ont_number_put(void *data, ont_dtype dtype, int64_t i, double value);

/* Exact for integers and bool (uint64 reinterpreted); floats are truncated as by ont_f64_to_i64(). */
int64_t ont_integer_at(const void *data, ont_dtype dtype, int64_t i);
void ont_integer_put(void *data, ont_dtype dtype, int64_t i, int64_t value); /* wraps */
bool ont_integers_have_zero(const void *data, ont_dtype dtype, int64_t n);

/*
 * Conversion of a float beyond the range of the integer, or NaN, is undefined in C and in ONNX. These functions follow
 * torch on x86, whose instruction returns the minimum of int32 or int64; int8, int16 and uint16 take the low bits of an
 * int32, uint8 and uint32 of an int64.
 */
int32_t ont_f64_to_i32(double value);
int64_t ont_f64_to_i64(double value);
uint64_t ont_f64_to_u64(double value); /* 0 for values >= 2^64; negative values wrap */

/*
 * float8, float6, float4 and float8e8m0 as bit patterns. Without `saturate` a value beyond the range becomes infinity,
 * or NaN if the format has no infinity.
 */
double ont_narrow_float_at(uint8_t bits, ont_dtype dtype);
uint8_t ont_narrow_float(double value, ont_dtype dtype, bool saturate);
typedef enum ont_e8m0_round { ONT_E8M0_UP, ONT_E8M0_DOWN, ONT_E8M0_NEAREST } ont_e8m0_round;
uint8_t ont_e8m0(double value, bool saturate, ont_e8m0_round round);

#endif
