/*
 * The floating-point control word of x86; other processors keep theirs. See denormals.h.
 */
#include "base/denormals.h"

#include <omp.h>

static bool enabled = true;

enum { FLUSH_RESULTS = 1 << 15, FLUSH_OPERANDS = 1 << 6 };
static const uint32_t TOLD = 1u << 31; /* beside the control word, which has 16 bits */

/* Of a worker: its own mode, with TOLD, from ont_denormals_flush() to ont_denormals_restore(). A smaller team in
 * between ends workers, and who comes after them has none. */
static _Thread_local uint32_t of_worker;
/* Of a caller that flushes without its team: its own mode, with TOLD. */
static _Thread_local uint32_t of_caller;

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

static bool has_workers(void)
{
    return !omp_in_parallel() && omp_get_max_threads() > 1;
}

void ont_denormals_flush(bool team, uint32_t *before)
{
    *before = ont_float_mode();
    if (!__atomic_load_n(&enabled, __ATOMIC_RELAXED)) return;
    if (has_workers() && team) {
#pragma omp parallel
        {
            of_worker = ont_float_mode() | TOLD;
            ont_float_mode_set((of_worker & ~TOLD) | FLUSH_RESULTS | FLUSH_OPERANDS);
        }
        *before |= TOLD;
    } else if (has_workers()) {
        of_caller = *before | TOLD;
    }
    ont_float_mode_set((*before & ~TOLD) | FLUSH_RESULTS | FLUSH_OPERANDS);
}

void ont_denormals_restore(uint32_t before)
{
    if (before & TOLD) {
#pragma omp parallel
        {
            ont_float_mode_set((of_worker & TOLD ? of_worker : before) & ~TOLD);
            of_worker = 0;
        }
    }
    of_caller = 0;
    ont_float_mode_set(before & ~TOLD);
}

uint32_t ont_denormals_pause(void)
{
    uint32_t mode = ont_float_mode();
    if ((of_caller & TOLD) && !omp_in_parallel()) ont_float_mode_set(of_caller & ~TOLD);
    return mode;
}
