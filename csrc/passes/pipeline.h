/*
 * The order of passes, on both sides of differentiation.
 */
#ifndef ONT_PASSES_PIPELINE_H
#define ONT_PASSES_PIPELINE_H

#include "passes/pass.h"

/* Stops early where facts->n_needs is left above 0. */
ont_status ont_passes_before_grad(ont_graph *g, ont_known_values *known) ONT_MUST_USE;
ont_status ont_passes_after_grad(ont_graph *g) ONT_MUST_USE;

/*
 * Comma-separated pass names that are skipped from now on (for a bisect); NULL or "": none. "+name" has a pass that is
 * for devices run on the CPU as well, and "+schedule" another order of steps taken whatever it gains: for tests.
 */
ont_status ont_passes_disable(const char *names) ONT_MUST_USE;
bool ont_pass_is_disabled(const char *name);
bool ont_pass_is_forced(const char *name); /* by "+name" */

/*
 * torch's float32 matmul precision, for programs built from now on; `everywhere` (for tests) also where nothing is
 * gained by it, but for "high" without tiles (AMX), which changes nothing. ont_matmul_precision_setting() tells settings
 * apart: part of a program's key.
 */
typedef enum ont_matmul_precision { ONT_PRECISION_HIGHEST, ONT_PRECISION_HIGH,
                                   ONT_PRECISION_MEDIUM } ont_matmul_precision;
void ont_set_matmul_precision(ont_matmul_precision precision, bool everywhere);
int ont_matmul_precision_setting(void);

#endif
