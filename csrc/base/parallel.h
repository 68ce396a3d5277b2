/*
 * Work sharing over torch's own OpenMP pool (one libgomp in the process), so torch.set_num_threads rules it.
 *
 * ont_parallel(n, grain, body, context) calls body(context, first, last) on disjoint ranges that cover [0, n); ranges
 * hold at least `grain` items, and small work stays on the calling thread. Bodies must not fail.
 */
#ifndef ONT_BASE_PARALLEL_H
#define ONT_BASE_PARALLEL_H

#include "base/status.h"

typedef void (*ont_range_fn)(void *context, int64_t first, int64_t last);

void ont_parallel(int64_t n, int64_t grain, ont_range_fn body, void *context);
int ont_parallel_threads(void);

#endif
