/*
 * Chooses the optimizers' loops: the instruction set that simd.c has chosen.
 */
#include "simd/optim/optim.h"

#include "simd/isa.h"

extern const ont_optim_table ont_optim_table_plain, ont_optim_table_avx2, ont_optim_table_avx512,
    ont_optim_table_neon;

const ont_optim_table *ont_optim_loops(void)
{
    return ONT_ISA_CHOICE(&ont_optim_table_, &ont_optim_table_plain);
}
