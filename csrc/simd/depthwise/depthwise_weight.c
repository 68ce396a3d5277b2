/*
 * Dispatch of the loops of depthwise convolution to the instruction set that simd.c chose.
 */
#include "simd/depthwise/depthwise_weight.h"

#include "simd/isa.h"

extern const ont_depthwise_loops ont_depthwise_loops_plain, ont_depthwise_loops_avx2, ont_depthwise_loops_avx512,
    ont_depthwise_loops_neon;

const ont_depthwise_loops *ont_simd_depthwise(void)
{
    return ONT_ISA_CHOICE(&ont_depthwise_loops_, &ont_depthwise_loops_plain);
}
