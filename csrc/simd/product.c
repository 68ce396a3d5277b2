/*
 * Chooses the loop of small products: the instruction set is the one that simd.c chose.
 */
#include "simd/product.h"

#include <string.h>

#include "simd/simd.h"

void ont_product_loop_plain(const ont_product_part *p), ont_product_loop_avx2(const ont_product_part *p),
    ont_product_loop_avx512(const ont_product_part *p);

ont_product_loop ont_simd_product(void)
{
    const char *isa = ont_simd()->isa;
    return !strcmp(isa, "avx512") ? ont_product_loop_avx512
           : !strcmp(isa, "avx2") ? ont_product_loop_avx2
                                  : ont_product_loop_plain;
}
