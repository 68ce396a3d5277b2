/*
 * Dispatch of the attention loops to the instruction set that simd.c chose.
 */
#include "simd/attention/attention.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_attention_loops ont_attention_loops_plain[], ont_attention_loops_avx2[], ont_attention_loops_avx512[];

const ont_attention_loops *ont_simd_attention(ont_dtype dtype)
{
    const char *isa = ont_simd()->isa;
    const ont_attention_loops *table = !strcmp(isa, "avx512") ? ont_attention_loops_avx512
                                       : !strcmp(isa, "avx2") ? ont_attention_loops_avx2
                                                              : ont_attention_loops_plain;
    return dtype == ONT_FLOAT32 ? &table[0] : dtype == ONT_FLOAT64 ? &table[1] : NULL;
}
