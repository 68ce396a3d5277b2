/*
 * The settings of passes; ONNXTRAIN_DISABLE sets the list of those that are left out or forced.
 */
#include "passes/options.h"

#include <string.h>

#include "ops/conv/winograd.h"

static char disabled[512];
static bool recompute_everywhere;
static int precision_setting = ONT_PRECISION_HIGHEST; /* an ont_matmul_precision, with ONT_PRECISION_EVERYWHERE */

ont_status ont_passes_disable(const char *names)
{
    if (!names) names = "";
    if (strlen(names) >= sizeof disabled - 2) return ont_fail(ONT_EINVAL, "list of passes is too long");
    disabled[0] = ',';
    strcpy(disabled + 1, names);
    strcat(disabled, ",");
    ont_winograd_enable(!strstr(disabled, ",winograd,")); /* not a pass, but optional in the same way */
    return ONT_OK;
}

/* Whether the list contains the name after `prefix`. */
static bool is_in_list(const char *name, char prefix)
{
    size_t length = strlen(name);
    for (const char *at = disabled; (at = strstr(at, name)); at += length)
        if (at[-1] == prefix && at[length] == ',' && (prefix == ',' || at[-2] == ',')) return true;
    return false;
}

bool ont_pass_is_disabled(const char *name)
{
    return is_in_list(name, ',');
}

bool ont_pass_is_forced(const char *name)
{
    return is_in_list(name, '+');
}

void ont_recompute_everywhere(bool on)
{
    __atomic_store_n(&recompute_everywhere, on, __ATOMIC_RELAXED);
}

bool ont_recompute_is_everywhere(void)
{
    return __atomic_load_n(&recompute_everywhere, __ATOMIC_RELAXED);
}

void ont_set_matmul_precision(ont_matmul_precision precision, bool everywhere)
{
    int flag = everywhere && precision ? ONT_PRECISION_EVERYWHERE : 0;
    __atomic_store_n(&precision_setting, (int)precision | flag, __ATOMIC_RELAXED);
}

int ont_matmul_precision_setting(void)
{
    return __atomic_load_n(&precision_setting, __ATOMIC_RELAXED);
}
