/*
 * Selects the loops of Winograd convolution: the instruction set that simd.c selected.
 */
#include "simd/winograd/winograd.h"

#include "simd/isa.h"

extern const ont_winograd_loops ont_winograd_loops_plain, ont_winograd_loops_avx2, ont_winograd_loops_avx512,
    ont_winograd_loops_neon;

const ont_winograd_loops *ont_simd_winograd(void)
{
    return ONT_ISA_CHOICE(&ont_winograd_loops_, &ont_winograd_loops_plain);
}
