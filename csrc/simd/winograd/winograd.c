/*
 * Selects the loops of Winograd convolution: the instruction set that simd.c selected.
 */
#include "simd/winograd/winograd.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_winograd_loops ont_winograd_loops_plain, ont_winograd_loops_avx2, ont_winograd_loops_avx512;

const ont_winograd_loops *ont_simd_winograd(void)
{
    const char *isa = ont_simd()->isa;
    return !strcmp(isa, "avx512") ? &ont_winograd_loops_avx512
           : !strcmp(isa, "avx2") ? &ont_winograd_loops_avx2
                                  : &ont_winograd_loops_plain;
}
