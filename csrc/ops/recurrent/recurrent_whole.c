/*
 * The gradient of RNN, GRU and LSTM where a device's kernel takes the whole node: RecurrentGrad, with what that kernel
 * has saved. On the CPU the nodes are expanded, and RecurrentGrad has no kernel.
 */
#include "ops/recurrent/recurrent_whole.h"

#include "base/assert.h"

enum { GRADIENTS = ONT_RECURRENT_Y };
/* of RNN, GRU and LSTM: initial_h, initial_c */
enum { NODE_H0 = 5, NODE_C0 };

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    static const ont_shape none = {.rank = 1};
    const ont_value *x = ont_node_in(node, ONT_RECURRENT_X);
    for (uint32_t i = 0; i < GRADIENTS; i++) {
        const ont_value *input = ont_node_in(node, i);
        ONT_TRY(ont_infer_out(node, i, x->dtype, input ? &input->shape : &none));
    }
    return ONT_OK;
}

/* The node's kernel says how many bytes it saves: the output of that size is added. */
static ont_status ensure_saved(ont_graph *graph, ont_node *node, ont_value **y, ont_value **saved)
{
    const ont_kernel *kernel;
    ONT_TRY(ont_op_choose(node, graph->device, false, &kernel));
    if (!kernel->saved_bytes) return ont_fail(ONT_EUNSUPPORTED, "kernel %s has no gradient", kernel->name);
    size_t bytes = kernel->saved_bytes(node);
    ONT_ASSERT(bytes); /* 0: the kernel declines what it has just accepted */
    ONT_TRY(ont_attr_set_int(graph, node, "saved_bytes", (int64_t)bytes));
    ONT_TRY(ont_node_ensure_output(graph, node, 0, y));
    ONT_TRY(ont_node_ensure_output(graph, node, ONT_RECURRENT_SAVED, saved));
    return node->op->infer(graph, node);
}

static ont_value *gradient_of(const ont_grad *g, uint32_t output)
{
    return O(output) ? g->out_grads[output] : NULL;
}

void ont_recurrent_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *y, *saved;
    ont_recurrent_form form;
    if (ont_recurrent_read(g->node, &form)) ont_build_fail(b, ONT_EINTERNAL, "a node that should have been expanded");
    if (b->status == ONT_OK) b->status = ensure_saved(b->graph, g->node, &y, &saved);
    if (b->status != ONT_OK) return;
    ont_value *operands[ONT_RECURRENT_INPUTS] = {
        I(0), I(1), I(2), I(3), I(NODE_H0), form.cell == ONT_CELL_LSTM ? I(NODE_C0) : NULL, y, saved, gradient_of(g, 0),
        gradient_of(g, 1), form.cell == ONT_CELL_LSTM ? gradient_of(g, 2) : NULL};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "RecurrentGrad", operands, ONT_RECURRENT_INPUTS, GRADIENTS);
    if (node) b->status = ont_attr_set_int(b->graph, node, "cell", form.cell);
    ont_build_done(b, node);
    if (b->status != ONT_OK) return;
    for (uint32_t i = 0; i <= ONT_RECURRENT_B; i++)
        if (I(i)) GI(i, ont_node_out(node, i));
    if (I(NODE_H0)) GI(NODE_H0, ont_node_out(node, ONT_RECURRENT_H0));
    if (form.cell == ONT_CELL_LSTM && I(NODE_C0)) GI(NODE_C0, ont_node_out(node, ONT_RECURRENT_C0));
}

const ont_op ont_op_RecurrentGrad = {.domain = ONT_DOMAIN, .name = "RecurrentGrad", .since = 1, .min_inputs = 3,
                                     .max_inputs = ONT_RECURRENT_INPUTS, .attributes = "cell:i", .infer = grad_infer};
