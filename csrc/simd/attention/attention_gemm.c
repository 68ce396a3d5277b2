/*
 * Dispatch of the attention GEMM to the instruction set that simd.c chose.
 */
#include "simd/attention/attention_gemm.h"

#include "simd/isa.h"

extern const ont_attention_gemm_f32 ont_attention_gemm_f32_plain, ont_attention_gemm_f32_avx2,
    ont_attention_gemm_f32_avx512, ont_attention_gemm_f32_neon;

const ont_attention_gemm_f32 *ont_simd_attention_gemm_f32(void)
{
    return ONT_ISA_CHOICE(&ont_attention_gemm_f32_, &ont_attention_gemm_f32_plain);
}

extern const ont_attention_gemm_bf16 ont_attention_gemm_bf16_avx512;

const ont_attention_gemm_bf16 *ont_simd_attention_gemm_bf16(void)
{
#if defined(__x86_64__)
    if (ont_isa_is("avx512") && __builtin_cpu_supports("avx512bf16")) return &ont_attention_gemm_bf16_avx512;
#endif
    return NULL;
}
