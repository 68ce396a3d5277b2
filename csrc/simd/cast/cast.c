/*
 * Selects the loops of casts: the instruction set that simd.c selected.
 */
#include "simd/cast/cast.h"

#include "simd/isa.h"

extern const ont_cast_loops ont_cast_loops_plain[ONT_DTYPE_COUNT], ont_cast_loops_avx2[ONT_DTYPE_COUNT],
    ont_cast_loops_avx512[ONT_DTYPE_COUNT], ont_cast_loops_neon[ONT_DTYPE_COUNT];

const ont_cast_loops *ont_simd_cast(void)
{
    return ONT_ISA_CHOICE(ont_cast_loops_, ont_cast_loops_plain);
}
