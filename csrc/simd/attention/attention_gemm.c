/*
 * Dispatch of the attention GEMM to the instruction set that simd.c chose.
 */
#include "simd/attention/attention_gemm.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_attention_gemm_f32 ont_attention_gemm_f32_avx2, ont_attention_gemm_f32_avx512;

const ont_attention_gemm_f32 *ont_simd_attention_gemm_f32(void)
{
    const char *isa = ont_simd()->isa;
    return !strcmp(isa, "avx512") ? &ont_attention_gemm_f32_avx512
           : !strcmp(isa, "avx2") ? &ont_attention_gemm_f32_avx2
                                  : NULL;
}

extern const ont_attention_gemm_bf16 ont_attention_gemm_bf16_avx512;

const ont_attention_gemm_bf16 *ont_simd_attention_gemm_bf16(void)
{
    return !strcmp(ont_simd()->isa, "avx512") && __builtin_cpu_supports("avx512bf16") ? &ont_attention_gemm_bf16_avx512
                                                                                      : NULL;
}
