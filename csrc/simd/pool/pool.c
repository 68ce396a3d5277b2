/*
 * Dispatch of the pooling loops to the instruction set that simd.c chose.
 */
#include "simd/pool/pool.h"

#include "simd/isa.h"

extern const ont_pool_loops ont_pool_loops_plain[], ont_pool_loops_avx2[], ont_pool_loops_avx512[],
    ont_pool_loops_neon[];

const ont_pool_loops *ont_simd_pool(ont_dtype dtype)
{
    const ont_pool_loops *table = ONT_ISA_CHOICE(ont_pool_loops_, ont_pool_loops_plain);
    switch (dtype) {
    case ONT_FLOAT32: return &table[0];
    case ONT_FLOAT64: return &table[1];
    case ONT_INT8: return &table[2];
    case ONT_UINT8: return &table[3];
    default: return NULL;
    }
}
