/*
 * Settings of the process that passes read: which of them are left out or forced, for bisection and tests, and torch's
 * precision of matmuls.
 */
#ifndef ONT_PASSES_OPTIONS_H
#define ONT_PASSES_OPTIONS_H

#include <stdbool.h>

#include "base/status.h"

/*
 * Comma-separated names of passes to skip from now on (for bisection); NULL or "": none. "+name" runs a pass for
 * devices on the CPU as well, and "+schedule" takes another order of steps regardless of its benefit: for tests.
 */
ont_status ont_passes_disable(const char *names) ONT_MUST_USE;
bool ont_pass_is_disabled(const char *name);
bool ont_pass_is_forced(const char *name); /* whether "+name" is set */

/* For tests: recompute every value that can be and saves bytes, however small the graph. */
void ont_recompute_everywhere(bool on);
bool ont_recompute_is_everywhere(void);

/*
 * torch's float32 matmul precision, for programs built from now on. `everywhere` (for tests) applies it also where it
 * is not profitable, except for "high" without AMX tiles, which changes nothing. ont_matmul_precision_setting()
 * combines both into one number for the program's cache key.
 */
typedef enum ont_matmul_precision { ONT_PRECISION_HIGHEST, ONT_PRECISION_HIGH,
                                   ONT_PRECISION_MEDIUM } ont_matmul_precision;
enum { ONT_PRECISION_EVERYWHERE = 8 }; /* a flag of the setting */
void ont_set_matmul_precision(ont_matmul_precision precision, bool everywhere);
int ont_matmul_precision_setting(void);

#endif
