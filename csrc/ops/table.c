/*
 * The operator table, expanded from ops.def. Lookups are by domain, name and opset.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "ops/op.h"

#define X(symbol) extern const ont_op ont_op_##symbol;
#include "ops/ops.def"
#undef X

static const ont_op *const table[] = {
#define X(symbol) &ont_op_##symbol,
#include "ops/ops.def"
#undef X
    NULL,
};

const ont_op *const *ont_op_all(size_t *count)
{
    *count = sizeof table / sizeof table[0] - 1;
    return table;
}

const ont_op *ont_op_find(const char *domain, const char *name, int64_t version)
{
    const ont_op *best = NULL;
    for (const ont_op *const *op = table; *op; op++)
        if ((*op)->since <= version && (!best || (*op)->since > best->since) && !strcmp((*op)->name, name) &&
            !strcmp((*op)->domain, domain))
            best = *op;
    return best;
}

static char *disabled; /* ",name,name," */

ont_status ont_op_disable_kernels(const char *names)
{
    size_t length = names ? strlen(names) : 0;
    char *list = length ? malloc(length + 3) : NULL; /* process-wide: outside the count of live blocks */
    if (length && !list) return ont_fail(ONT_ENOMEM, "out of memory");
    if (list) snprintf(list, length + 3, ",%s,", names);
    free(disabled);
    disabled = list;
    return ONT_OK;
}

static bool is_disabled(const char *name)
{
    size_t length = strlen(name);
    for (const char *at = disabled; at && (at = strstr(at, name)); at += length)
        if (at[-1] == ',' && at[length] == ',') return true;
    return false;
}

ont_status ont_op_choose(const ont_node *node, const ont_kernel **kernel)
{
    char reasons[512] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < node->op->n_kernels; i++) {
        const ont_kernel *candidate = &node->op->kernels[i];
        const char *reason = is_disabled(candidate->name) ? "disabled" : candidate->accept(node);
        if (!reason) {
            *kernel = candidate;
            return ONT_OK;
        }
        ont_log(ONT_LOG_DEBUG, "%s '%s': kernel %s declines: %s", node->op_type, node->name, candidate->name, reason);
        int n = snprintf(reasons + used, sizeof reasons - used, "%s%s: %s", used ? "; " : "", candidate->name, reason);
        if (n > 0 && used + (size_t)n < sizeof reasons) used += (size_t)n;
    }
    return ont_fail(ONT_EUNSUPPORTED, "%s '%s': no kernel takes it (%s)", node->op_type, node->name,
                    used ? reasons : "there is none");
}
