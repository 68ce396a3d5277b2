/*
 * The gradient pass: one reverse traversal of the forward nodes that applies each operator's gradient rule. See pass.h.
 */
#include <string.h>

#include "base/alloc.h"
#include "passes/pass.h"

typedef struct walk {
    ont_graph *g;
    bool *differentiable; /* per forward value: depends differentiably on an input whose gradient is wanted */
    bool *requires_grad;  /* the same, with operators whose derivative is zero everywhere included */
    bool *live;           /* of those: a graph output depends on it in that way */
    ont_value **grads;    /* per forward value: gradient accumulated so far */
    uint32_t n_values;    /* number of forward values */
    ont_node *last;       /* last forward node */
} walk;

/* Whether a gradient may flow from the outputs of `node` to input i. */
static bool flows(const ont_node *node, uint32_t i)
{
    const ont_value *v = node->inputs[i].value;
    return v && ont_dtype_is_float(v->dtype) && !(i < 64 && (node->op->nondiff_inputs >> i & 1));
}

/* Starts from the wanted graph inputs. */
static void mark_differentiable(walk *w, const uint8_t *wants, uint32_t n_inputs)
{
    for (uint32_t i = 0; i < n_inputs; i++)
        w->differentiable[w->g->inputs[i]->id] = wants[i] && ont_dtype_is_float(w->g->inputs[i]->dtype);
    for (const ont_node *node = w->g->first; node; node = node->next) {
        bool reaches = false;
        if (!(node->op->flags & ONT_OP_NO_GRAD))
            for (uint32_t i = 0; i < node->n_inputs && !reaches; i++)
                reaches = flows(node, i) && w->differentiable[node->inputs[i].value->id];
        for (uint32_t i = 0; i < node->n_outputs; i++)
            if (node->outputs[i])
                w->differentiable[node->outputs[i]->id] = reaches && ont_dtype_is_float(node->outputs[i]->dtype) &&
                                                 !(i < 64 && (node->op->nondiff_outputs >> i & 1));
    }
}

/* Whether autograd of eager PyTorch differentiates `node`, its derivative possibly zero everywhere. */
static bool has_derivative(const ont_node *node)
{
    return !(node->op->flags & ONT_OP_NO_GRAD) || node->op->flags & ONT_OP_ZERO_DERIVATIVE;
}

/*
 * After mark_differentiable(): marks the values for which autograd would set requires_grad, and those of them that a
 * graph output depends on.
 */
static void mark_requires_grad(walk *w)
{
    memcpy(w->requires_grad, w->differentiable, w->n_values * sizeof *w->requires_grad);
    for (const ont_node *node = w->g->first; node; node = node->next) {
        bool requires_grad = false;
        for (uint32_t i = 0; has_derivative(node) && i < node->n_inputs && !requires_grad; i++)
            requires_grad = flows(node, i) && w->requires_grad[node->inputs[i].value->id];
        for (uint32_t i = 0; requires_grad && i < node->n_outputs; i++)
            if (node->outputs[i] && ont_dtype_is_float(node->outputs[i]->dtype) &&
                !(i < 64 && (node->op->nondiff_outputs >> i & 1)))
                w->requires_grad[node->outputs[i]->id] = true;
    }
    for (uint32_t i = 0; i < w->g->n_outputs; i++)
        w->live[w->g->outputs[i]->id] = w->requires_grad[w->g->outputs[i]->id];
    for (const ont_node *node = w->last; node; node = node->prev) {
        bool live = false;
        for (uint32_t i = 0; i < node->n_outputs; i++) live |= node->outputs[i] && w->live[node->outputs[i]->id];
        for (uint32_t i = 0; live && has_derivative(node) && i < node->n_inputs; i++)
            if (flows(node, i) && w->requires_grad[node->inputs[i].value->id])
                w->live[node->inputs[i].value->id] = true;
    }
}

/* Accumulates `grad` into the gradient of `value`, reduced to its shape if a rule returned the broadcast shape. */
static ont_status accumulate(walk *w, ont_builder *b, ont_value *value, ont_value *grad)
{
    if (grad->dtype != value->dtype)
        return ont_fail(ONT_EINTERNAL, "gradient of '%s' is %s, the value %s", value->name, ont_dtype_name(grad->dtype),
                        ont_dtype_name(value->dtype));
    grad = ont_build_sum_to(b, grad, &value->shape);
    ont_value **slot = &w->grads[value->id];
    if (b->status == ONT_OK) *slot = *slot ? ont_build2(b, "Add", *slot, grad) : grad;
    return b->status;
}

static ont_status add_output_grads(walk *w, ont_gradients *r, uint32_t n_outputs)
{
    ont_builder b = {.graph = w->g, .backward = true, .status = ONT_OK};
    for (uint32_t i = 0; i < n_outputs; i++) {
        ont_value *out = w->g->outputs[i], *grad;
        r->grad_input[i] = -1;
        if (!w->requires_grad[out->id]) continue;
        char *name = ont_arena_format(&w->g->arena, "%%grad_output_%u", i);
        if (!name) return ONT_ENOMEM;
        ONT_TRY(ont_graph_add_input(w->g, name, out->dtype, &out->shape, &grad));
        grad->anonymous = true;
        r->grad_input[i] = (int32_t)grad->input;
        if (w->differentiable[out->id]) ONT_TRY(accumulate(w, &b, out, grad));
    }
    return ONT_OK;
}

static ont_status differentiate(walk *w, ont_node *node)
{
    /* Values that the rule adds as saved outputs have ids beyond the table: they have no gradient. */
    ont_grad g = {.b = {.graph = w->g, .backward = true, .origin = node, .status = ONT_OK}, .node = node};
    ont_arena *arena = &w->g->arena;
    uint32_t n_outputs = node->n_outputs;
    g.out_grads = ont_arena_array(arena, n_outputs + 8, sizeof *g.out_grads);
    g.in_grads = ont_arena_array(arena, node->n_inputs + 1, sizeof *g.in_grads);
    bool *wants = ont_arena_array(arena, node->n_inputs + 1, sizeof *wants);
    if (!g.out_grads || !g.in_grads || !wants) return ONT_ENOMEM;
    bool reached = false, wanted = false;
    for (uint32_t i = 0; i < n_outputs; i++) {
        ont_value *out = node->outputs[i];
        g.out_grads[i] = out && out->id < w->n_values && w->differentiable[out->id] ? w->grads[out->id] : NULL;
        reached |= g.out_grads[i] != NULL;
    }
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        wants[i] = flows(node, i) && w->differentiable[node->inputs[i].value->id];
        wanted |= wants[i];
    }
    if (!reached || !wanted || (node->op->flags & ONT_OP_NO_GRAD)) return ONT_OK;
    if (!node->op->grad) return ont_fail(ONT_EUNSUPPORTED, "the operator has no gradient");
    g.wants = wants;
    node->op->grad(&g);
    ONT_TRY(g.b.status);
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (g.in_grads[i]) ONT_TRY(accumulate(w, &g.b, node->inputs[i].value, g.in_grads[i]));
    return ONT_OK;
}

/* Appends the gradients of wanted inputs to the graph's outputs. */
static ont_status append_outputs(walk *w, ont_gradients *r)
{
    ont_graph *g = w->g;
    uint32_t n = r->n_forward_outputs;
    ont_value **outputs = ont_arena_array(&g->arena, n + r->n_forward_inputs + 1, sizeof *outputs);
    if (!outputs) return ONT_ENOMEM;
    memcpy(outputs, g->outputs, n * sizeof *outputs);
    ont_builder b = {.graph = g, .backward = true, .status = ONT_OK};
    for (uint32_t i = 0; i < r->n_forward_inputs; i++) {
        const ont_value *in = g->inputs[i];
        ont_value *grad = w->differentiable[in->id] ? w->grads[in->id] : NULL;
        r->grad_output[i] = -1;
        if (!grad && w->live[in->id]) grad = ont_build_full(&b, in->dtype, &in->shape, 0);
        if (!grad) continue;
        r->grad_output[i] = (int32_t)n;
        outputs[n++] = grad;
    }
    ONT_TRY(b.status);
    return ont_graph_set_outputs(g, outputs, n);
}

ont_status ont_pass_grad(ont_graph *g, const uint8_t *wants, ont_gradients *gradients)
{
    walk w = {.g = g, .n_values = g->n_values, .last = g->last};
    ont_gradients r = {.n_forward_outputs = g->n_outputs, .n_forward_inputs = g->n_inputs};
    r.grad_input = ont_arena_array(&g->arena, g->n_outputs + 1, sizeof *r.grad_input);
    r.grad_output = ont_arena_array(&g->arena, g->n_inputs + 1, sizeof *r.grad_output);
    w.differentiable = ont_arena_array(&g->arena, g->n_values + 1, sizeof *w.differentiable);
    w.grads = ont_arena_array(&g->arena, g->n_values + 1, sizeof *w.grads);
    w.requires_grad = ont_arena_array(&g->arena, g->n_values + 1, sizeof *w.requires_grad);
    w.live = ont_arena_array(&g->arena, g->n_values + 1, sizeof *w.live);
    if (!r.grad_input || !r.grad_output || !w.differentiable || !w.grads || !w.requires_grad || !w.live)
        return ONT_ENOMEM;
    mark_differentiable(&w, wants, r.n_forward_inputs);
    mark_requires_grad(&w);
    ONT_TRY(add_output_grads(&w, &r, r.n_forward_outputs));
    for (ont_node *node = w.last; node; node = node->prev)
        ONT_TRY(ont_context(differentiate(&w, node), "gradient of %s '%s'", node->op_type, node->name));
    ONT_TRY(append_outputs(&w, &r));
    *gradients = r;
    return ONT_OK;
}
