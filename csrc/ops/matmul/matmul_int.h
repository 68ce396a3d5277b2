/*
 * The GEMM backend for 32- and 64-bit integers, signed or unsigned, and beta * C of Gemm. alpha and beta are whole
 * numbers.
 */
#ifndef ONT_OPS_MATMUL_INT_H
#define ONT_OPS_MATMUL_INT_H

#include "device/gemm.h"

extern const ont_gemm_backend ont_gemm_int;
/* y (m, n) = beta * c, which broadcasts: `strides` are those of c in elements, 0 in a broadcast dim. */
void ont_gemm_int_fill(ont_dtype dtype, const void *c, void *y, const int64_t *strides, int64_t m, int64_t n,
                       int64_t beta);

#endif
