/*
 * Dispatch of the batch normalisation loops to the instruction set that simd.c chose.
 */
#include "simd/norm/batchnorm.h"

#include "simd/isa.h"

extern const ont_batchnorm_loops ont_batchnorm_loops_plain[], ont_batchnorm_loops_avx2[],
    ont_batchnorm_loops_avx512[], ont_batchnorm_loops_neon[];

const ont_batchnorm_loops *ont_simd_batchnorm(ont_dtype dtype)
{
    const ont_batchnorm_loops *table = ONT_ISA_CHOICE(ont_batchnorm_loops_, ont_batchnorm_loops_plain);
    return &table[dtype == ONT_FLOAT64 ? 1 : dtype == ONT_BFLOAT16 ? 2 : 0];
}
