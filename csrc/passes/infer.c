/*
 * Shape inference, expansion and constant folding in one traversal: shapes that a model computes must be known before
 * the nodes that use them are inferred. Folding runs the operators' own kernels, so a folded value is what the executor
 * would compute. Operators with expand() (op.h) are replaced by their expansion.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "passes/pass.h"

/* Larger results are not folded: keeping them for the life of a program costs more than computing them. */
enum { FOLD_BYTES = 1 << 20 };

static ont_tensor *tensor_like(ont_graph *g, const ont_value *v)
{
    size_t bytes;
    ont_tensor *tensor = ont_arena_alloc(&g->arena, sizeof *tensor);
    if (!tensor || ont_shape_bytes(&v->shape, v->dtype, &bytes) != ONT_OK) return NULL;
    *tensor = (ont_tensor){v->dtype, v->shape, bytes, ont_arena_alloc(&g->arena, bytes ? bytes : 1)};
    return tensor->data ? tensor : NULL;
}

/* Whether all inputs are known and the results small enough to keep. */
static bool foldable(const ont_node *node)
{
    if (node->op->flags & (ONT_OP_RANDOM | ONT_OP_NO_FOLD)) return false;
    size_t in_bytes = 0, out_bytes = 0;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        if (v && !v->data) return false;
        if (v) in_bytes += v->data->bytes;
    }
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        size_t bytes = 0;
        const ont_value *v = node->outputs[i];
        if (v && (!v->has_shape || ont_shape_bytes(&v->shape, v->dtype, &bytes) != ONT_OK)) return false;
        out_bytes += bytes;
    }
    return out_bytes <= FOLD_BYTES || out_bytes <= in_bytes;
}

static ont_status run_folded(ont_node *node, const ont_kernel *kernel, ont_tensor *const *results, ont_arena *arena)
{
    const void **in = ont_arena_array(arena, node->n_inputs + 1, sizeof *in);
    void **out = ont_arena_array(arena, node->n_outputs + 1, sizeof *out);
    if (!in || !out) return ONT_ENOMEM;
    for (uint32_t i = 0; i < node->n_inputs; i++)
        in[i] = node->inputs[i].value ? node->inputs[i].value->data->data : NULL;
    for (uint32_t i = 0; i < node->n_outputs; i++) out[i] = results[i] ? results[i]->data : NULL;
    ont_prepared prepared = {0};
    if (kernel->prepare) ONT_TRY(kernel->prepare(node, arena, &prepared));
    void *work = NULL;
    ont_status status = ONT_OK;
    if (prepared.work_bytes && !(work = ont_buffer_alloc(prepared.work_bytes))) status = ONT_ENOMEM;
    if (status == ONT_OK)
        status = kernel->run(&(ont_call){.node = node, .state = prepared.state, .in = in, .out = out, .work = work});
    if (work) ont_buffer_free(work, prepared.work_bytes);
    if (kernel->release && prepared.state) kernel->release(prepared.state);
    return status;
}

/* Computes a node's outputs and stores them as `data`. A node without a kernel for its dtypes is left for run time. */
static ont_status fold(ont_graph *g, ont_node *node)
{
    const ont_kernel *kernel = NULL;
    bool view = node->op->flags & ONT_OP_VIEW;
    if (!view && ont_op_choose(node, NULL, false, &kernel) != ONT_OK) return ONT_OK;
    ont_tensor **results = ont_arena_array(&g->arena, node->n_outputs, sizeof *results);
    if (!results) return ONT_ENOMEM;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i] && !(results[i] = tensor_like(g, node->outputs[i]))) return ONT_ENOMEM;
    if (view)
        memcpy(results[0]->data, node->inputs[0].value->data->data, results[0]->bytes);
    else
        ONT_TRY(ont_context(run_folded(node, kernel, results, &g->arena), "%s '%s'", node->op_type, node->name));
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) node->outputs[i]->data = results[i];
    return ONT_OK;
}

/* Replaces a known node output by a constant; the node is left to dead-code elimination. */
static ont_status replace_by_constant(ont_graph *g, ont_value *known)
{
    ont_value *constant;
    ONT_TRY(ont_graph_add_value(g, ONT_VALUE_CONSTANT, NULL, &constant));
    constant->dtype = known->dtype;
    constant->has_shape = true;
    constant->shape = known->shape;
    constant->data = known->data;
    ont_value_replace_uses(g, known, constant);
    return ONT_OK;
}

static ont_status check_containers(const ont_node *node)
{
    if (node->op->flags & ONT_OP_CONTAINERS) return ONT_OK;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        if (v && v->container != ONT_TENSOR)
            return ont_fail(ONT_ETYPE, "%s '%s': input %u ('%s') is %s, a tensor is expected", node->op_type,
                            node->name, i, v->name, v->container == ONT_SEQUENCE ? "a sequence" : "an optional");
    }
    return ONT_OK;
}

/* Turns the node into an Identity, which copies nothing. */
static ont_status make_identity(ont_node *node)
{
    const ont_op *op = ont_op_find("", "Identity", INT64_MAX);
    if (!op) return ont_fail(ONT_EINTERNAL, "Identity is not in the table");
    node->op = op;
    node->op_type = op->name;
    node->version = op->since;
    node->attrs = NULL;
    return ONT_OK;
}

/* Removes a Transpose with the identity permutation. */
static ont_status drop_transpose(ont_node *node)
{
    size_t n;
    const int64_t *perm = ONT_IS(node, Transpose) ? ont_attr_ints(node, "perm", &n) : NULL;
    for (size_t i = 0; perm && i < n; i++)
        if (perm[i] != (int64_t)i) return ONT_OK;
    return perm ? make_identity(node) : ONT_OK;
}

/* Removes a Slice of everything, such as the first of x[:, i]. */
static ont_status drop_slice(ont_node *node)
{
    int64_t steps[ONT_MAX_RANK];
    int n;
    if (!ONT_IS(node, Slice) || !ont_shape_equal(&ont_node_in(node, 0)->shape, &node->outputs[0]->shape))
        return ONT_OK;
    ONT_TRY(ont_const_ints(node, node->n_inputs > 4 ? 4 : -1, "steps", steps, ONT_MAX_RANK, &n));
    for (int i = 0; i < n; i++)
        if (steps[i] < 0) return ONT_OK;
    for (uint32_t i = 1; i < node->n_inputs; i++) ont_node_set_input(node, i, NULL);
    node->n_inputs = 1;
    return make_identity(node);
}

/*
 * Replaces a Where with a single constant condition by the chosen operand. After differentiation only, since the
 * gradient of the other operand is zeros, not absent.
 */
static ont_status drop_where(ont_node *node)
{
    const ont_value *condition = ONT_IS(node, Where) ? ont_node_in(node, 0) : NULL;
    if (!condition || !condition->data || ont_shape_count(&condition->shape) != 1) return ONT_OK;
    ont_value *chosen = ont_node_in(node, *(const uint8_t *)condition->data->data ? 1 : 2);
    if (!ont_shape_equal(&chosen->shape, &node->outputs[0]->shape)) return ONT_OK;
    ont_node_set_input(node, 0, chosen);
    ont_node_set_input(node, 1, NULL);
    ont_node_set_input(node, 2, NULL);
    node->n_inputs = 1;
    return make_identity(node);
}

/* *next is the node to continue with: the one behind, or the first of those that replaced this one. */
static ont_status infer_node(ont_graph *g, ont_node *node, ont_node **next)
{
    *next = node->next;
    if (!node->op)
        return ont_fail(ONT_EUNSUPPORTED, "operator %s.%s (opset %lld), used by node '%s', is not supported",
                        *node->domain ? node->domain : "ai.onnx", node->op_type, (long long)node->version, node->name);
    uint32_t present = node->n_inputs;
    if (present < node->op->min_inputs || present > node->op->max_inputs)
        return ont_fail(ONT_EINVAL, "%s '%s': %u inputs, expected %u to %u", node->op_type, node->name, present,
                        node->op->min_inputs, node->op->max_inputs);
    for (uint32_t i = 0; !*node->domain && i < node->op->min_inputs;
         i++) /* in our domain passes may omit any input */
        if (!ont_node_in(node, i))
            return ont_fail(ONT_EINVAL, "%s '%s': input %u is missing", node->op_type, node->name, i);
    ONT_TRY(ont_op_check_attributes(node));
    ONT_TRY(check_containers(node));
    if (node->op->infer) ONT_TRY(ont_context(node->op->infer(g, node), "%s '%s'", node->op_type, node->name));
    ONT_TRY(drop_transpose(node));
    ONT_TRY(drop_slice(node));
    if (ont_op_expands(g, node)) return ont_op_expand(g, node, next);
    bool known = node->n_outputs == 1 && node->outputs[0] && node->outputs[0]->data;
    if (!known && foldable(node)) ONT_TRY(fold(g, node));
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        ont_value *out = node->outputs[i];
        if (out && !out->has_shape)
            return ont_fail(node->backward ? ONT_EINTERNAL : ONT_EINVAL, "%s '%s': the operator has no output %u",
                            node->op_type, node->name, i);
        if (out && out->data) ONT_TRY(replace_by_constant(g, out));
    }
    return ONT_OK;
}

/* Whether the type of an input is unknown, because its producer needs unknown values. */
static bool has_unknown_input(const ont_node *node)
{
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (node->inputs[i].value && !node->inputs[i].value->has_shape) return true;
    return false;
}

/*
 * Infers from `node` to the end. *first is the first node that needs unknown values, or NULL; *any_required: whether
 * some node requested the value of an input.
 */
static ont_status infer_from(ont_graph *g, ont_node *node, ont_node **first, bool *any_required)
{
    *first = NULL;
    *any_required = false;
    for (ont_node *next; node; node = next) {
        ont_status status = ONT_OK;
        bool blocked = has_unknown_input(node);
        next = node->next;
        if (!blocked) status = infer_node(g, node, &next);
        if (status != ONT_OK && status != ONT_ENEEDVALUE) return status;
        if (status == ONT_ENEEDVALUE) {
            *any_required = true;
            next = node->next;
        }
        if (!*first && (blocked || status == ONT_ENEEDVALUE)) *first = node;
    }
    return ONT_OK;
}

/*
 * Lists the required values in the order of the nodes that use them, each once. Values that have lost their users are
 * dropped.
 */
static ont_status list_required(ont_graph *g, ont_known_values *known)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->n_values; i++) n += g->values[i]->value_required;
    known->n_required = 0;
    known->required = ont_arena_array(&g->arena, n + 1, sizeof *known->required);
    if (!known->required) return ONT_ENOMEM;
    for (const ont_node *node = g->first; node; node = node->next)
        for (uint32_t i = 0; i < node->n_inputs; i++) {
            ont_value *v = node->inputs[i].value;
            if (!v || !v->value_required) continue;
            v->value_required = false;
            size_t bytes;
            ONT_TRY(ont_shape_bytes(&v->shape, v->dtype, &bytes));
            if (v->probed || bytes > ONT_KNOWN_VALUE_BYTES)
                return ont_fail(ONT_EUNSUPPORTED,
                                v->probed ? "%s '%s': its input '%s' must be a constant"
                                           : "%s '%s': its input '%s' depends on data, and is too large "
                                             "to specialise a program to its value",
                                node->op_type, node->name, v->name);
            known->required[known->n_required++] = v;
        }
    for (uint32_t i = 0; i < g->n_values; i++) g->values[i]->value_required = false;
    return ONT_OK;
}

/* Whether a gradient may flow through this use: then the value must stay a tensor. */
static bool carries_gradient(const ont_use *use)
{
    const ont_op *op = use->user->op;
    size_t index = (size_t)(use - use->user->inputs);
    return op && !(op->flags & ONT_OP_NO_GRAD) && !(index < 64 && op->nondiff_inputs >> index & 1);
}

/* Substitutes a probed constant for `v` in its users, except in those through which a gradient of a float may flow. */
static ont_status substitute_value(ont_graph *g, ont_value *v, const ont_tensor *value)
{
    ont_value *constant;
    if (value->dtype != v->dtype || !ont_shape_equal(&value->shape, &v->shape))
        return ont_fail(ONT_EINTERNAL, "a probe of '%s' has another type", v->name);
    v->probed = true;
    ONT_TRY(ont_graph_add_constant(g, NULL, value, &constant));
    if (!ont_dtype_is_float(v->dtype)) {
        ont_value_replace_uses(g, v, constant);
        return ONT_OK;
    }
    for (ont_use *use = v->uses, *next; use; use = next) {
        next = use->next;
        if (!carries_gradient(use)) ont_node_set_input(use->user, (uint32_t)(use - use->user->inputs), constant);
    }
    return ONT_OK;
}

ont_status ont_pass_infer_with_values(ont_graph *g, ont_known_values *known)
{
    for (uint32_t i = 0; i < g->n_inputs; i++)
        if (!g->inputs[i]->has_shape || !ont_shape_is_static(&g->inputs[i]->shape))
            return ont_fail(ONT_EINTERNAL, "input '%s' has no static shape", g->inputs[i]->name);
    for (uint32_t i = 0; i < g->n_values; i++) g->values[i]->value_required = false; /* what passes have asked for */
    ont_node *from = g->first;
    bool any_required, none_listed = false;
    for (;;) {
        ONT_TRY(infer_from(g, from, &from, &any_required));
        /* the node requested no input of its own: its message stands */
        if (any_required && none_listed) return ONT_EUNSUPPORTED;
        ONT_TRY(ont_pass_dce(g));
        known->n_required = 0;
        if (!any_required) return ONT_OK;
        ONT_TRY(list_required(g, known));
        none_listed = !known->n_required; /* the nodes that requested values may have been removed */
        if (known->n_required && known->used == known->n) return ONT_OK; /* the caller builds a probe */
        if (known->used + known->n_required > known->n) return ont_fail(ONT_EINTERNAL, "a probe is incomplete");
        for (uint32_t i = 0; i < known->n_required; i++)
            ONT_TRY(substitute_value(g, known->required[i], &known->tensors[known->used++]));
        from = g->first; /* *first may have been removed */
    }
}

ont_status ont_pass_infer(ont_graph *g)
{
    ont_known_values none = {0};
    ONT_TRY(ont_pass_infer_with_values(g, &none));
    if (none.n_required)
        return ont_fail(ONT_EUNSUPPORTED, "the value of '%s' depends on data", none.required[0]->name);
    for (ont_node *node = g->first; node; node = node->next) {
        ONT_TRY(drop_where(node));
        bool same = ONT_IS(node, Identity) || ONT_IS(node, StopGradient);
        if (same && !ont_value_is_output(g, node->outputs[0]))
            ont_value_replace_uses(g, node->outputs[0], ont_node_in(node, 0));
    }
    return ont_pass_dce(g);
}
