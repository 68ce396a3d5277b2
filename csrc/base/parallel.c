/*
 * Parallel for with OpenMP. See parallel.h.
 */
#include "base/parallel.h"

#include <omp.h>

#include "base/assert.h"
#include "base/denormals.h"

int ont_parallel_threads(void)
{
    return omp_in_parallel() ? 1 : omp_get_max_threads();
}

void ont_parallel(int64_t n, int64_t grain, ont_range_fn body, void *context)
{
    ONT_ASSERT(body);
    if (n <= 0) return;
    if (grain < 1) grain = 1;
    int64_t parts = n / grain;
    if (parts <= 1 || ont_parallel_threads() <= 1) {
        body(context, 0, n);
        return;
    }
    uint32_t mode = ont_denormals_pause();
#pragma omp parallel
    {
        uint32_t before = ont_float_mode();
        ont_float_mode_set(mode);
        int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        if (team > parts) team = parts;
        int64_t share = n / team, rest = n % team;
        int64_t first = me * share + (me < rest ? me : rest);
        int64_t last = first + share + (me < rest);
        if (me < team) body(context, first, last);
        ont_float_mode_set(before);
    }
    ont_float_mode_set(mode);
}

ont_omp_settings ont_omp_enter_library(int threads)
{
    ont_omp_settings before = {.mode = ont_denormals_pause(), .threads = 0};
    if (threads && threads != omp_get_max_threads()) {
        before.threads = omp_get_max_threads();
        omp_set_num_threads(threads);
    }
    return before;
}

void ont_omp_leave_library(ont_omp_settings before)
{
    if (before.threads) omp_set_num_threads(before.threads);
    ont_float_mode_set(before.mode);
}
