/*
 * Flushing of denormals ends with the caller's own mode, in its thread and in its team.
 */
#include <omp.h>

#include "base/denormals.h"
#include "check.h"

enum { FLUSHES = 1 << 15 }; /* a bit of a mode */

static int workers_that_flush(void)
{
    int n = 0;
#pragma omp parallel reduction(+ : n)
    n += omp_get_thread_num() && ont_float_mode() & FLUSHES;
    return n;
}

/* Flushing as a callback of a backward does that runs another program, in its caller's own mode. */
static void flush_within(bool outer_team, bool inner_team)
{
    ont_float_modes outer, inner;
    uint32_t own = ont_float_mode();
    ont_denormals_flush(outer_team, &outer);
    uint32_t flushing = ont_float_mode();
    ont_float_mode_set(own);
    ont_denormals_flush(inner_team, &inner);
    ont_denormals_restore(inner);
    CHECK_INT(ont_float_mode(), own);
    ont_float_mode_set(flushing);
    CHECK_INT(ont_denormals_pause(), flushing);
    CHECK_INT(ont_float_mode(), outer_team ? flushing : own); /* new threads of a team inherit it */
    ont_float_mode_set(flushing);
    ont_denormals_restore(outer);
    CHECK_INT(ont_float_mode(), own);
}

TEST(denormals_are_flushed_within_a_flush)
{
    uint32_t own = ont_float_mode();
    omp_set_num_threads(3);
    CHECK_INT(workers_that_flush(), 0);
    for (int caller = 0; caller < 2; caller++) { /* torch.set_flush_denormal() speaks of the caller alone */
        ont_float_mode_set(own | (caller ? FLUSHES : 0));
        for (int k = 0; k < 4; k++) {
            flush_within(k & 1, k & 2);
            CHECK_INT(workers_that_flush(), 0);
        }
    }
    ont_float_mode_set(own);
}
