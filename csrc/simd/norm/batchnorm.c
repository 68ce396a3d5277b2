/*
 * Dispatch of the batch normalisation loops to the instruction set that simd.c chose.
 */
#include "simd/norm/batchnorm.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_batchnorm_loops ont_batchnorm_loops_plain[], ont_batchnorm_loops_avx2[], ont_batchnorm_loops_avx512[];

const ont_batchnorm_loops *ont_simd_batchnorm(ont_dtype dtype)
{
    const char *isa = ont_simd()->isa;
    const ont_batchnorm_loops *table = !strcmp(isa, "avx512") ? ont_batchnorm_loops_avx512
                                       : !strcmp(isa, "avx2") ? ont_batchnorm_loops_avx2
                                                              : ont_batchnorm_loops_plain;
    return &table[dtype == ONT_FLOAT64];
}
