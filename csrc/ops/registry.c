/*
 * The operator table, expanded from ops.def, with lookup by domain, name and opset version.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "device/device.h"
#include "device/gemm.h"
#include "ops/op.h"

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

/* The letter of each attribute type in ont_op.attributes, and its name in error messages. */
static const struct {
    char letter;
    const char *text;
} kinds[] = {
    [ONT_ATTR_INT] = {'i', "an int"},      [ONT_ATTR_FLOAT] = {'f', "a float"},   [ONT_ATTR_STRING] = {'s', "a string"},
    [ONT_ATTR_TENSOR] = {'t', "a tensor"}, [ONT_ATTR_GRAPH] = {'g', "a graph"},   [ONT_ATTR_INTS] = {'I', "ints"},
    [ONT_ATTR_FLOATS] = {'F', "floats"},   [ONT_ATTR_STRINGS] = {'S', "strings"},
};

static const char *kind_text(char letter)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].letter == letter) return kinds[i].text;
    return "?";
}

/* The letters behind "name:" in `list`, which end at a space; NULL if the list does not have the name. */
static const char *declared_kinds(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; at && *at; at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL)
        if (!strncmp(at, name, length) && at[length] == ':') return at + length + 1;
    return NULL;
}

ont_status ont_op_check_attributes(const ont_node *node)
{
    const char *list = node->op->attributes;
    for (const ont_attr *attr = list ? node->attrs : NULL; attr; attr = attr->next) {
        const char *letters = declared_kinds(list, attr->name);
        if (!letters)
            return ont_fail(ONT_EUNSUPPORTED, "%s '%s': attribute '%s' is not supported (known: %s)", node->op_type,
                            node->name, attr->name, *list ? list : "none");
        if (!memchr(letters, kinds[attr->kind].letter, strcspn(letters, " ")))
            return ont_fail(ONT_EINVAL, "%s '%s': attribute '%s' is %s, expected %s", node->op_type, node->name,
                            attr->name, kinds[attr->kind].text, kind_text(*letters));
    }
    return ONT_OK;
}

static char *disabled; /* ",name,name," */

ont_status ont_op_disable_kernels(const char *names)
{
    size_t length = names ? strlen(names) : 0;
    char *list = length ? malloc(length + 3) : NULL; /* process-wide, hence not counted as a live block */
    if (length && !list) return ont_fail(ONT_ENOMEM, "out of memory");
    if (list) snprintf(list, length + 3, ",%s,", names);
    free(disabled);
    disabled = list;
    return ONT_OK;
}

/* Whether the kernel is disabled by its name, or by "<operator>:" and its name. */
static bool is_disabled(const char *op, const char *kernel)
{
    size_t length = strlen(kernel), prefix = strlen(op);
    for (const char *at = disabled; at && (at = strstr(at, kernel)); at += length) {
        if (at[length] != ',') continue;
        if (at[-1] == ',') return true;
        size_t before = (size_t)(at - disabled);
        if (before > prefix + 1 && at[-1] == ':' && !strncmp(at - 1 - prefix, op, prefix) &&
            at[-2 - (ptrdiff_t)prefix] == ',')
            return true;
    }
    return false;
}

bool ont_op_is_disabled(const ont_op *op, const ont_kernel *kernel)
{
    return is_disabled(op->name, kernel->name);
}

/* Writes "float[2, 3], none, int64[4]" to `text`, truncated to `size`. */
static const char *inputs_text(const ont_node *node, char *text, size_t size)
{
    size_t used = 0;
    char shape[ONT_SHAPE_TEXT];
    text[0] = '\0';
    for (uint32_t i = 0; i < node->n_inputs && used + 1 < size; i++) {
        const ont_value *v = ont_node_in(node, i);
        int n = snprintf(text + used, size - used, "%s%s%s", i ? ", " : "", v ? ont_dtype_name(v->dtype) : "none",
                         v && v->has_shape ? ont_shape_text(&v->shape, shape) : "");
        used += n > 0 ? (size_t)n : 0;
    }
    return text;
}

const ont_kernel *ont_op_kernels(const ont_op *op, const ont_device *device, uint32_t *count)
{
    *count = device ? 0 : op->n_kernels;
    if (!device) return op->kernels;
    for (size_t i = 0; i < device->n_lists; i++) {
        const ont_kernel_list *list = &device->lists[i];
        if (strcmp(list->name, op->name) || strcmp(list->domain, op->domain) || list->since > op->since) continue;
        *count = list->n_kernels;
        return list->kernels;
    }
    return NULL;
}

bool ont_op_has_kernel(const ont_node *node, const ont_device *device)
{
    uint32_t n;
    const ont_kernel *kernels = ont_op_kernels(node->op, device, &n);
    for (uint32_t i = 0; i < n; i++)
        if (!is_disabled(node->op->name, kernels[i].name) && !kernels[i].accept(node)) return true;
    return false;
}

/* NULL, or why the node is computed by another kernel. */
static const char *refusal_of(const ont_kernel *kernel, const ont_node *node, bool measure)
{
    const char *reason = is_disabled(node->op->name, kernel->name) ? "disabled" : kernel->accept(node);
    if (reason || !kernel->measure) return reason;
    return measure ? kernel->measure(node) : "not measured";
}

ont_status ont_op_choose(const ont_node *node, const ont_device *device, bool measure, const ont_kernel **kernel)
{
    char reasons[512] = "", inputs[512];
    size_t used = 0;
    uint32_t n_kernels;
    const ont_kernel *kernels = ont_op_kernels(node->op, device, &n_kernels);
    for (uint32_t i = 0; i < n_kernels; i++) {
        const ont_kernel *candidate = &kernels[i];
        const char *reason = refusal_of(candidate, node, measure);
        if (!reason) {
            *kernel = candidate;
            return ONT_OK;
        }
        ont_log(ONT_LOG_DEBUG, "%s '%s': kernel %s declines: %s", node->op_type, node->name, candidate->name, reason);
        int n = snprintf(reasons + used, sizeof reasons - used, "%s%s: %s", used ? "; " : "", candidate->name, reason);
        if (n > 0 && used + (size_t)n < sizeof reasons) used += (size_t)n;
    }
    return ont_fail(ONT_EUNSUPPORTED, "%s '%s': no kernel%s%s takes it (%s); its inputs are %s", node->op_type,
                    node->name, device ? " of device " : "", device ? device->ops->name : "",
                    used ? reasons : "there is none", inputs_text(node, inputs, sizeof inputs));
}

uint32_t ont_op_rivals(const ont_node *node, const ont_device *device, const ont_kernel *first,
                       const ont_kernel **rivals, uint32_t capacity)
{
    uint32_t n_kernels, n = 0;
    const ont_kernel *kernels = ont_op_kernels(node->op, device, &n_kernels);
    ONT_ASSERT(first >= kernels && first < kernels + n_kernels && capacity);
    bool compete = first->tuned && !ont_gemm_is_by_rule();
    rivals[n++] = first;
    for (const ont_kernel *k = first + 1; compete && k < kernels + n_kernels && n < capacity; k++)
        if (k->tuned && !refusal_of(k, node, true)) rivals[n++] = k;
    return n;
}
