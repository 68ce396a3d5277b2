/*
 * Shape inference, expansion and constant folding in one walk: shapes that a model computes must be known before the
 * nodes that use them are inferred. Folding runs the operators' own kernels, so a folded value is what the executor
 * would compute. An operator that stands for others (op.h, expand) is replaced by them here.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "passes/pass.h"

/* Larger results are not worth holding for the life of a program: computing them is cheap. */
enum { FOLD_BYTES = 1 << 20 };

static ont_tensor *tensor_like(ont_graph *g, const ont_value *v)
{
    size_t bytes;
    ont_tensor *tensor = ont_arena_alloc(&g->arena, sizeof *tensor);
    if (!tensor || ont_shape_bytes(&v->shape, v->dtype, &bytes) != ONT_OK) return NULL;
    *tensor = (ont_tensor){v->dtype, v->shape, bytes, ont_arena_alloc(&g->arena, bytes ? bytes : 1)};
    return tensor->data ? tensor : NULL;
}

/* True when all inputs are known and the results are small enough to be kept. */
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
    for (uint32_t i = 0; i < node->n_inputs; i++) in[i] = node->inputs[i].value ? node->inputs[i].value->data->data : NULL;
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

/* Computes a node's outputs and stores them as `data`. A node without a kernel for its dtypes is left to run time. */
static ont_status fold(ont_graph *g, ont_node *node)
{
    const ont_kernel *kernel = NULL;
    bool view = node->op->flags & ONT_OP_VIEW;
    if (!view && ont_op_choose(node, &kernel) != ONT_OK) return ONT_OK;
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

/* Readers of a known node output read a constant of its own instead; the node is left to dead-code removal. */
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

/* *next is the node to go on with: behind this one, or the first of those that took its place. */
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
    ONT_TRY(ont_op_check_attributes(node));
    if (node->op->infer) ONT_TRY(ont_context(node->op->infer(g, node), "%s '%s'", node->op_type, node->name));
    if (ont_op_expands(node)) return ont_op_expand(g, node, next);
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

ont_status ont_pass_infer(ont_graph *g)
{
    for (uint32_t i = 0; i < g->n_inputs; i++)
        if (!g->inputs[i]->has_shape || !ont_shape_is_static(&g->inputs[i]->shape))
            return ont_fail(ONT_EINTERNAL, "input '%s' has no static shape", g->inputs[i]->name);
    for (ont_node *node = g->first, *next; node; node = next) ONT_TRY(infer_node(g, node, &next));
    return ont_pass_dce(g);
}
