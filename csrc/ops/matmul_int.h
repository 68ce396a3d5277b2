/*
 * The GEMM provider for 32- and 64-bit integers, signed or not, and the scaled C of Gemm. alpha and beta are whole
 * numbers.
 */
#ifndef ONT_OPS_MATMUL_INT_H
#define ONT_OPS_MATMUL_INT_H

#include "device/gemm.h"

extern const ont_gemm_provider ont_gemm_int;
/* y (m, n) = beta * c, which is read by `strides`. */
void ont_gemm_int_fill(ont_dtype dtype, const void *c, void *y, const int64_t *strides, int64_t m, int64_t n,
                       int64_t beta);

#endif
