/*
 * Chooses the optimizers' loops: the instruction set that simd.c has chosen.
 */
#include "simd/optim/optim.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_optim_table ont_optim_table_plain, ont_optim_table_avx2, ont_optim_table_avx512;

const ont_optim_table *ont_optim_loops(void)
{
    const char *isa = ont_simd()->isa;
    if (!strcmp(isa, "avx512")) return &ont_optim_table_avx512;
    return !strcmp(isa, "avx2") ? &ont_optim_table_avx2 : &ont_optim_table_plain;
}
