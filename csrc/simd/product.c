/*
 * Chooses the loop of small products: the instruction set is the one that simd.c chose.
 */
#include "simd/product.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_product_loops ont_product_loops_plain, ont_product_loops_avx2, ont_product_loops_avx512;

const ont_product_loops *ont_simd_product(void)
{
    const char *isa = ont_simd()->isa;
    return !strcmp(isa, "avx512") ? &ont_product_loops_avx512
           : !strcmp(isa, "avx2") ? &ont_product_loops_avx2
                                  : &ont_product_loops_plain;
}
