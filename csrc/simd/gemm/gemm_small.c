/*
 * Selects the kernels of small GEMMs: the instruction set that simd.c selected.
 */
#include "simd/gemm/gemm_small.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_gemm_small_kernels ont_gemm_small_kernels_plain, ont_gemm_small_kernels_avx2,
    ont_gemm_small_kernels_avx512;

const ont_gemm_small_kernels *ont_simd_gemm_small(void)
{
    const char *isa = ont_simd()->isa;
    return !strcmp(isa, "avx512") ? &ont_gemm_small_kernels_avx512
           : !strcmp(isa, "avx2") ? &ont_gemm_small_kernels_avx2
                                  : &ont_gemm_small_kernels_plain;
}
