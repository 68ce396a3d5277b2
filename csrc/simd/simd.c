/*
 * Chooses the table of inner loops once, by processor and ONNXTRAIN_ISA.
 */
#include "simd/simd.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"

extern const ont_simd_table ont_simd_table_plain, ont_simd_table_avx2, ont_simd_table_avx512, ont_simd_table_neon;

const ont_simd_table *ont_simd_plain(void)
{
    return &ont_simd_table_plain;
}

/* The tables that this processor can run, the best first and the plain one last; NULL ends the list. */
static void list_tables(const ont_simd_table *tables[4])
{
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) tables[n++] = &ont_simd_table_avx512;
    if (avx2) tables[n++] = &ont_simd_table_avx2;
#elif defined(__aarch64__)
    tables[n++] = &ont_simd_table_neon; /* every such processor has it */
#endif
    tables[n++] = ont_simd_plain();
    tables[n] = NULL;
}

static const ont_simd_table *detect(void)
{
    const ont_simd_table *tables[4];
    const char *asked = getenv("ONNXTRAIN_ISA");
    list_tables(tables);
    if (!asked || !*asked) return tables[0];
    for (int i = 0; tables[i]; i++)
        if (!strcmp(asked, tables[i]->isa)) return tables[i];
    ont_log(ONT_LOG_WARNING, "ONNXTRAIN_ISA=%s: not an instruction set of this processor that kernels use; using %s",
            asked, tables[0]->isa);
    return tables[0];
}

const ont_simd_table *ont_simd(void)
{
    static const ont_simd_table *chosen; /* threads that race compute the same value */
    const ont_simd_table *table = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (!table) __atomic_store_n(&chosen, table = detect(), __ATOMIC_RELAXED);
    return table;
}
