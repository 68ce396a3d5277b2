/*
 * Work sharing over torch's own OpenMP pool (one libgomp in the process), so torch.set_num_threads rules it.
 *
 * ont_parallel(n, grain, body, context) calls body(context, first, last) on disjoint ranges that cover [0, n); ranges
 * hold at least `grain` items, and small work stays on the calling thread. Bodies must not fail. Where there are fewer
 * ranges than threads the others wait: a region of fewer threads would end them, and the next one make them anew.
 */
#ifndef ONT_BASE_PARALLEL_H
#define ONT_BASE_PARALLEL_H

#include "base/status.h"

typedef void (*ont_range_fn)(void *context, int64_t first, int64_t last);

void ont_parallel(int64_t n, int64_t grain, ont_range_fn body, void *context);
int ont_parallel_threads(void);

/* What a thread had before it called a library. */
typedef struct ont_outside {
    uint32_t mode;
    int threads; /* 0: as many as now */
} ont_outside;

/*
 * Around a call of a library that opens regions of its own; `threads`: how many it counted on when what it runs was
 * prepared, 0 where any number will do. oneDNN cuts work and scratch when a primitive is made.
 */
ont_outside ont_outside_enter(int threads);
void ont_outside_leave(ont_outside before);

#endif
