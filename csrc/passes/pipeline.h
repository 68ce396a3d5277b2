/*
 * The order of passes before and after differentiation.
 */
#ifndef ONT_PASSES_PIPELINE_H
#define ONT_PASSES_PIPELINE_H

#include "passes/pass.h"

/* Returns early if known->n_required is left above 0. */
ont_status ont_passes_before_grad(ont_graph *g, ont_known_values *known) ONT_MUST_USE;
ont_status ont_passes_after_grad(ont_graph *g) ONT_MUST_USE;

/*
 * Comma-separated names of passes to skip from now on (for bisection); NULL or "": none. "+name" runs a pass for
 * devices on the CPU as well, and "+schedule" takes another order of steps regardless of its benefit: for tests.
 */
ont_status ont_passes_disable(const char *names) ONT_MUST_USE;
bool ont_pass_is_disabled(const char *name);
bool ont_pass_is_forced(const char *name); /* whether "+name" is set */

/*
 * torch's float32 matmul precision, for programs built from now on. `everywhere` (for tests) applies it also where it
 * is not profitable, except for "high" without AMX tiles, which changes nothing. ont_matmul_precision_setting()
 * combines both into one number for the program's cache key.
 */
typedef enum ont_matmul_precision { ONT_PRECISION_HIGHEST, ONT_PRECISION_HIGH,
                                   ONT_PRECISION_MEDIUM } ont_matmul_precision;
void ont_set_matmul_precision(ont_matmul_precision precision, bool everywhere);
int ont_matmul_precision_setting(void);

#endif
