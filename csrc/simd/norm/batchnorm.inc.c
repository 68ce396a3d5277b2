/*
 * The loops of batch normalisation, compiled once per instruction set, which ONT_ISA names. See batchnorm.h; the bodies
 * are in batchnorm_loops.h, included once per dtype. Vectors are GCC vector extensions; memory is aligned to the
 * element only.
 */
#include <string.h>

#include "simd/norm/batchnorm.h"
#include "simd/macros.h"

#if defined(__AVX512F__)
enum { BYTES = 64 };
#elif defined(__AVX2__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif

#define NUM float
#define WHOLE int32_t
#define DATA float
#define F(name) PASTE(name, _f32)
#include "simd/norm/batchnorm_loops.h"
#define NUM double
#define WHOLE int64_t
#define DATA double
#define F(name) PASTE(name, _f64)
#include "simd/norm/batchnorm_loops.h"
#define NARROW
#define NUM float
#define WHOLE int32_t
#define DATA uint16_t
#define F(name) PASTE(name, _bf16)
#include "simd/norm/batchnorm_loops.h"

const ont_batchnorm_loops PASTE(ont_batchnorm_loops_, ONT_ISA)[] = {
    {sum_f32, squares_f32, apply_f32, grad_sums_f32, grad_f32, rows_squares_f32, rows_apply_f32, rows_grad_sums_f32,
     rows_grad_f32, join_f32},
    {sum_f64, squares_f64, apply_f64, grad_sums_f64, grad_f64, rows_squares_f64, rows_apply_f64, rows_grad_sums_f64,
     rows_grad_f64, join_f64},
    {.sum = sum_bf16, .squares = squares_bf16, .apply = apply_bf16, .grad_sums = grad_sums_bf16, .grad = grad_bf16},
};
