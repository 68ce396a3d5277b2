/*
 * Selects the loops of reductions: the instruction set that simd.c selected.
 */
#include "simd/reduce/reduce.h"

#include "simd/isa.h"

extern const ont_reduce_loops ont_reduce_loops_plain, ont_reduce_loops_avx2, ont_reduce_loops_avx512,
    ont_reduce_loops_neon;

const ont_reduce_loops *ont_simd_reduce(void)
{
    return ONT_ISA_CHOICE(&ont_reduce_loops_, &ont_reduce_loops_plain);
}
