/*
 * Chooses the table of inner loops once, by processor and ONNXTRAIN_ISA.
 */
#include "simd/simd.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"

extern const ont_simd_table ont_simd_table_plain, ont_simd_table_avx2, ont_simd_table_avx512;

const ont_simd_table *ont_simd_plain(void)
{
    return &ont_simd_table_plain;
}

static const ont_simd_table *detect(void)
{
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const ont_simd_table *best = avx512 ? &ont_simd_table_avx512 : avx2 ? &ont_simd_table_avx2 : ont_simd_plain();
    const char *asked = getenv("ONNXTRAIN_ISA");
    if (!asked || !*asked) return best;
    if (!strcmp(asked, "plain")) return ont_simd_plain();
    if (!strcmp(asked, "avx2") && avx2) return &ont_simd_table_avx2;
    if (!strcmp(asked, "avx512") && avx512) return &ont_simd_table_avx512;
    ont_log(ONT_LOG_WARNING,
            "ONNXTRAIN_ISA=%s is not plain, avx2 or avx512, or this processor does not have it: using %s",
            asked, best->isa);
    return best;
}

const ont_simd_table *ont_simd(void)
{
    static const ont_simd_table *chosen; /* threads that race compute the same value */
    const ont_simd_table *table = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (!table) __atomic_store_n(&chosen, table = detect(), __ATOMIC_RELAXED);
    return table;
}
