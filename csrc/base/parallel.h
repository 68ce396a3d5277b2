/*
 * Parallel for over torch's own OpenMP pool (one libgomp in the process), so torch.set_num_threads() applies.
 *
 * ont_parallel(n, grain, body, context) calls body(context, first, last) on disjoint ranges that cover [0, n); ranges
 * hold at least `grain` items, and small work stays on the calling thread. Bodies must not fail. If there are fewer
 * ranges than threads, the other threads wait: a region with fewer threads would end them, and the next region would
 * have to create them again.
 */
#ifndef ONT_BASE_PARALLEL_H
#define ONT_BASE_PARALLEL_H

#include "base/status.h"

typedef void (*ont_range_fn)(void *context, int64_t first, int64_t last);

void ont_parallel(int64_t n, int64_t grain, ont_range_fn body, void *context);
int ont_parallel_threads(void);

/* Settings of a thread before it calls a library. */
typedef struct ont_omp_settings {
    uint32_t mode;
    int threads; /* 0: unchanged */
} ont_omp_settings;

/*
 * Encloses a call of a library that opens OpenMP regions. `threads`: the number of threads for which the library
 * prepared what it runs, 0 for any number. oneDNN partitions work and scratch memory when a primitive is created.
 */
ont_omp_settings ont_omp_enter_library(int threads);
void ont_omp_leave_library(ont_omp_settings before);

#endif
