/*
 * Selects the loops of reductions: the instruction set that simd.c selected.
 */
#include "simd/reduce/reduce.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_reduce_loops ont_reduce_loops_plain, ont_reduce_loops_avx2, ont_reduce_loops_avx512;

const ont_reduce_loops *ont_simd_reduce(void)
{
    const char *isa = ont_simd()->isa;
    return !strcmp(isa, "avx512") ? &ont_reduce_loops_avx512
           : !strcmp(isa, "avx2") ? &ont_reduce_loops_avx2
                                  : &ont_reduce_loops_plain;
}
