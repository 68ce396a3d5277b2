/*
 * Selects the kernels of small GEMMs: the instruction set that simd.c selected.
 */
#include "simd/gemm/gemm_small.h"

#include "simd/isa.h"

extern const ont_gemm_small_kernels ont_gemm_small_kernels_plain, ont_gemm_small_kernels_avx2,
    ont_gemm_small_kernels_avx512, ont_gemm_small_kernels_neon;

const ont_gemm_small_kernels *ont_simd_gemm_small(void)
{
    return ONT_ISA_CHOICE(&ont_gemm_small_kernels_, &ont_gemm_small_kernels_plain);
}
