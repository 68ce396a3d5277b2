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
/* To nearest, ties to even. An integer out of range: signed ones saturate, unsigned ones wrap; NaN is 0. Narrow floats
 * saturate. */
void ont_number_put(void *data, ont_dtype dtype, int64_t i, double value);

/* Exact for integers and bool (uint64 by its bits); a float is truncated as ont_f64_to_i64 does. */
int64_t ont_integer_at(const void *data, ont_dtype dtype, int64_t i);
void ont_integer_put(void *data, ont_dtype dtype, int64_t i, int64_t value); /* wraps */

int64_t ont_f64_to_i64(double value); /* saturates, NaN is 0 */
uint64_t ont_f64_to_u64(double value); /* a negative one wraps, as the processor's conversion does */

/* float8, float6, float4 and float8e8m0 by their bits. Without `saturate` what is too large becomes infinity, or NaN
 * where the format has none. */
double ont_narrow_float_at(uint8_t bits, ont_dtype dtype);
uint8_t ont_narrow_float(double value, ont_dtype dtype, bool saturate);
typedef enum ont_e8m0_round { ONT_E8M0_UP, ONT_E8M0_DOWN, ONT_E8M0_NEAREST } ont_e8m0_round;
uint8_t ont_e8m0(double value, bool saturate, ont_e8m0_round round);

#endif
