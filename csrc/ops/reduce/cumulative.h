/*
 * What a CumSum, CumProd or CumProdGrad node asks for, for kernels of the CPU and of devices.
 */
#ifndef ONT_OPS_CUMULATIVE_H
#define ONT_OPS_CUMULATIVE_H

#include "base/dtype.h"

struct ont_node;

typedef struct ont_scan {
    int64_t outer, n, inner; /* x is (outer, n, inner), and is scanned along n */
    int32_t product, exclusive, reverse, dtype;
} ont_scan;

ont_status ont_scan_read(const struct ont_node *node, ont_scan *s) ONT_MUST_USE;
/* NULL, or why the dtype is refused: kernels have float, double, int32, int64, uint32 and uint64. */
const char *ont_scan_accept(const struct ont_node *node);

#endif
