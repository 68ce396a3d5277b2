/*
 * Chooses the products of attention's blocks: the instruction set is the one that simd.c chose.
 */
#include "simd/attention_product.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_tile_loops ont_tile_loops_avx2, ont_tile_loops_avx512;

const ont_tile_loops *ont_simd_tiles(void)
{
    const char *isa = ont_simd()->isa;
    return !strcmp(isa, "avx512") ? &ont_tile_loops_avx512 : !strcmp(isa, "avx2") ? &ont_tile_loops_avx2 : NULL;
}

extern const ont_tile_pairs ont_tile_pairs_avx512;

const ont_tile_pairs *ont_simd_tile_pairs(void)
{
    return !strcmp(ont_simd()->isa, "avx512") && __builtin_cpu_supports("avx512bf16") ? &ont_tile_pairs_avx512 : NULL;
}
