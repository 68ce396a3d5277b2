/*
 * Dispatch of the attention loops to the instruction set that simd.c chose.
 */
#include "simd/attention/attention.h"

#include "simd/isa.h"

extern const ont_attention_loops ont_attention_loops_plain, ont_attention_loops_avx2, ont_attention_loops_avx512,
    ont_attention_loops_neon;

const ont_attention_loops *ont_simd_attention(void)
{
    return ONT_ISA_CHOICE(&ont_attention_loops_, &ont_attention_loops_plain);
}
