/*
 * Dispatch of the pooling loops to the instruction set that simd.c chose.
 */
#include "simd/pool/pool.h"

#include <string.h>

#include "simd/simd.h"

extern const ont_pool_loops ont_pool_loops_plain[], ont_pool_loops_avx2[], ont_pool_loops_avx512[];

const ont_pool_loops *ont_simd_pool(ont_dtype dtype)
{
    const char *isa = ont_simd()->isa;
    const ont_pool_loops *table = !strcmp(isa, "avx512") ? ont_pool_loops_avx512
                                  : !strcmp(isa, "avx2") ? ont_pool_loops_avx2
                                                         : ont_pool_loops_plain;
    switch (dtype) {
    case ONT_FLOAT32: return &table[0];
    case ONT_FLOAT64: return &table[1];
    case ONT_INT8: return &table[2];
    case ONT_UINT8: return &table[3];
    default: return NULL;
    }
}
