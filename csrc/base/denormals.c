/*
 * Sets the floating-point control word of x86 (MXCSR); other processors are left alone. See denormals.h.
 */
#include "base/denormals.h"

#include <omp.h>

static bool enabled = true;

enum { FLUSH_RESULTS = 1 << 15, FLUSH_OPERANDS = 1 << 6 };
static const uint32_t IS_SET = 1u << 31; /* marks a stored mode as set; the control word has 16 bits */

/*
 * Of a thread of a team: its own mode with IS_SET, between the outermost ont_denormals_flush() of the team and its
 * ont_denormals_restore(). A smaller team in between ends workers; threads that replace them have 0 here.
 */
static _Thread_local uint32_t worker_mode;
/* Of a caller that flushes without its team: its own mode with IS_SET. */
static _Thread_local uint32_t caller_mode;

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

void ont_denormals_flush(bool team, ont_float_modes *before)
{
    *before = (ont_float_modes){.mode = ont_float_mode(), .caller = caller_mode};
    if (!__atomic_load_n(&enabled, __ATOMIC_RELAXED)) return;
    if (has_workers() && team) {
        bool outermost = before->team = !(worker_mode & IS_SET);
#pragma omp parallel
        {
            uint32_t mode = ont_float_mode();
            if (outermost || !(worker_mode & IS_SET)) worker_mode = mode | IS_SET;
            ont_float_mode_set(mode | FLUSH_RESULTS | FLUSH_OPERANDS);
        }
    } else if (has_workers()) {
        caller_mode = before->mode | IS_SET;
    }
    ont_float_mode_set(before->mode | FLUSH_RESULTS | FLUSH_OPERANDS);
}

void ont_denormals_restore(ont_float_modes before)
{
    if (before.team) {
#pragma omp parallel
        {
            ont_float_mode_set((worker_mode & IS_SET ? worker_mode : before.mode) & ~IS_SET);
            worker_mode = 0;
        }
    }
    caller_mode = before.caller;
    ont_float_mode_set(before.mode);
}

uint32_t ont_denormals_pause(void)
{
    uint32_t mode = ont_float_mode();
    if ((caller_mode & IS_SET) && !omp_in_parallel()) ont_float_mode_set(caller_mode & ~IS_SET);
    return mode;
}
