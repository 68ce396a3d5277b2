/*
 * Dispatch of the loops of recurrent cells to the instruction set that simd.c chose.
 */
#include "simd/recurrent/recurrent.h"

#include "simd/isa.h"

typedef const ont_cell_loops cell_table[2][ONT_CELLS];
extern cell_table ont_cell_loops_plain, ont_cell_loops_avx2, ont_cell_loops_avx512, ont_cell_loops_neon;

const ont_cell_loops *ont_simd_cell(ont_cell cell, ont_dtype dtype, bool plain)
{
    cell_table *table = plain ? &ont_cell_loops_plain : ONT_ISA_CHOICE(&ont_cell_loops_, &ont_cell_loops_plain);
    return &(*table)[dtype == ONT_FLOAT64][cell];
}
