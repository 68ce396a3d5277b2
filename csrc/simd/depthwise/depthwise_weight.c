/*
 * Dispatch of the loops of depthwise convolution to the instruction set that simd.c chose.
 */
#include "simd/depthwise/depthwise_weight.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_depthwise_loops ont_depthwise_loops_plain, ont_depthwise_loops_avx2, ont_depthwise_loops_avx512;

const ont_depthwise_loops *ont_simd_depthwise(void)
{
    const char *isa = ont_simd()->isa;
    return !strcmp(isa, "avx512") ? &ont_depthwise_loops_avx512
           : !strcmp(isa, "avx2") ? &ont_depthwise_loops_avx2
                                  : &ont_depthwise_loops_plain;
}
