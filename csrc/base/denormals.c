/*
 * The floating-point control word of x86; other processors keep theirs. See denormals.h.
 */
#include "base/denormals.h"

#include <omp.h>

static bool enabled = true;
static _Thread_local uint32_t mine; /* of a thread of a team, between flush and restore */

enum { FLUSH_RESULTS = 1 << 15, FLUSH_OPERANDS = 1 << 6 };
static const uint32_t TEAM_TOLD = 1u << 31; /* beside the control word, which has 16 bits */

void ont_denormals_enable(bool on)
{
    __atomic_store_n(&enabled, on, __ATOMIC_RELAXED);
}

uint32_t ont_float_mode(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr();
#else
    return 0;
#endif
}

void ont_float_mode_set(uint32_t mode)
{
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(mode);
#else
    (void)mode;
#endif
}

/* Without threads there is nobody to tell. */
static bool has_team(bool team)
{
    return team && !omp_in_parallel() && omp_get_max_threads() > 1;
}

void ont_denormals_flush(bool team, uint32_t *before)
{
    *before = ont_float_mode();
    if (!__atomic_load_n(&enabled, __ATOMIC_RELAXED)) return;
    if (has_team(team)) {
#pragma omp parallel
        {
            mine = ont_float_mode();
            ont_float_mode_set(mine | FLUSH_RESULTS | FLUSH_OPERANDS);
        }
        *before |= TEAM_TOLD;
    }
    ont_float_mode_set((*before & ~TEAM_TOLD) | FLUSH_RESULTS | FLUSH_OPERANDS);
}

void ont_denormals_restore(uint32_t before)
{
    if (before & TEAM_TOLD) {
#pragma omp parallel
        ont_float_mode_set(mine);
    }
    ont_float_mode_set(before & ~TEAM_TOLD);
}
