/*
 * Fuses BatchNormalization with the residual Add and the Relu behind it: one pass over memory instead of three. In
 * backward the gradient of Relu is fused into BatchNormGrad, which then reads y and dy in each of its passes. After
 * differentiation, before elementwise fusion; also before promotion, which puts Casts around a Relu in 16 bits.
 */
#include <string.h>

#include "passes/pass.h"

enum { BIAS = 2, RESIDUAL = 5 }; /* input indices of FusedBatchNorm and of BatchNormGrad */
enum { MEAN = 2, DY = 4, GRAD_Y = 5, GRAD_BIAS = 6 };

/*
 * Where to insert the fused node: at the norm, or behind the producer of the residual. NULL if another result of the
 * norm is used before that.
 */
static ont_node *find_insertion_point(const ont_node *norm, const ont_value *residual, const ont_node *last)
{
    ont_node *insertion_point = norm->next;
    bool is_used = false, used_before = false;
    for (ont_node *node = norm->next; residual && node != last; node = node->next) {
        for (uint32_t i = 0; i < node->n_inputs; i++) {
            const ont_value *v = ont_node_in(node, i);
            is_used = is_used || (v && v->def == norm);
        }
        if (residual->def != node) continue;
        insertion_point = node->next;
        used_before = is_used;
    }
    return used_before ? NULL : insertion_point;
}

/* Fuses norm, Add and Relu; Add or Relu may be absent. *next is the node to continue with. */
static ont_status fuse_forward(ont_graph *g, ont_node *norm, ont_node **next)
{
    ont_value *y = norm->outputs[0], *residual = NULL;
    ont_node *add = ont_single_user_in_phase(g, y), *relu;
    if (ONT_IS(add, Add) && ont_node_in(add, 0) != ont_node_in(add, 1)) {
        residual = ont_node_in(add, ont_node_in(add, 0) == y);
        if (!ont_shape_equal(&residual->shape, &y->shape) || residual->def == norm) return ONT_OK;
        relu = ont_single_user_in_phase(g, add->outputs[0]);
    } else {
        relu = add;
        add = NULL;
    }
    if (!ONT_IS(relu, Relu)) relu = NULL;
    ont_node *last = relu ? relu : add, *insertion_point = last ? find_insertion_point(norm, residual, last) : NULL;
    if (!insertion_point) return ONT_OK;
    ont_node *before = norm->prev;
    ont_value *inputs[RESIDUAL + 1];
    for (uint32_t i = 0; i < RESIDUAL; i++) inputs[i] = ont_node_in(norm, i);
    inputs[RESIDUAL] = residual;
    ont_builder b = {.graph = g, .before = insertion_point, .backward = norm->backward,
                     .origin = ont_node_origin(norm)};
    ont_node *fused = ont_build_node(&b, ONT_DOMAIN, "FusedBatchNorm", inputs, RESIDUAL + (residual != NULL),
                                     norm->n_outputs);
    if (!fused) return b.status;
    ONT_TRY(ont_attr_copy_all(g, fused, norm));
    ONT_TRY(ont_attr_set_int(g, fused, "relu", relu != NULL));
    ont_build_done(&b, fused);
    ONT_TRY(b.status);
    for (uint32_t i = 1; i < norm->n_outputs; i++)
        if (norm->outputs[i]) ont_value_replace_uses(g, norm->outputs[i], fused->outputs[i]);
    ont_value_replace_uses(g, last->outputs[0], fused->outputs[0]);
    if (relu) ont_graph_remove_node(g, relu);
    if (add) ont_graph_remove_node(g, add);
    ont_graph_remove_node(g, norm);
    *next = before ? before->next : g->first;
    return ONT_OK;
}

/*
 * Whether every user of the Relu's gradient can read its operands instead. If dy is a sum of two gradients, the Relu's
 * gradient is fused with that Add, which costs less.
 */
static bool relu_grad_is_free(const ont_graph *g, const ont_value *dy, const ont_value *dx)
{
    if (ont_value_is_output(g, dx)) return false;
    if (dy->def && dy->def->op->tile && !dy->uses->next && dy->def->backward == dx->def->backward) return false;
    for (const ont_use *use = dx->uses; use; use = use->next) {
        const ont_node *user = use->user;
        bool norm = ONT_IS(user, BatchNormGrad) && use == &user->inputs[DY];
        if (!norm && !ONT_IS(user, Add)) return false;
    }
    return true;
}

static ont_status fuse_backward(ont_graph *g, ont_node *norm)
{
    ont_value *dx = ont_node_in(norm, DY);
    ont_node *relu = dx->def;
    if (norm->n_inputs != DY + 1 || !ONT_IS(relu, ReluGrad) || relu->backward != norm->backward)
        return ONT_OK;
    ont_value *y = ont_node_in(relu, 0), *dy = ont_node_in(relu, 1);
    if (!ont_shape_equal(&y->shape, &dx->shape) || !ont_shape_equal(&dy->shape, &dx->shape)) return ONT_OK;
    if (!relu_grad_is_free(g, dy, dx)) return ONT_OK;
    /* y = relu(norm(x)): its sign is recomputed from x */
    const ont_node *producer = y->def;
    bool recompute_sign = ONT_IS(producer, FusedBatchNorm) && !ont_node_in(producer, RESIDUAL) &&
                          ont_node_in(norm, MEAN)->def == producer;
    ont_value *inputs[GRAD_BIAS + 1] = {0};
    for (uint32_t i = 0; i < DY; i++) inputs[i] = ont_node_in(norm, i);
    inputs[DY] = dy;
    inputs[GRAD_Y] = recompute_sign ? NULL : y;
    inputs[GRAD_BIAS] = recompute_sign ? ont_node_in(producer, BIAS) : NULL;
    ont_builder b = {.graph = g, .before = norm, .backward = norm->backward, .origin = ont_node_origin(norm)};
    ont_node *fused = ont_build_node(&b, ONT_DOMAIN, "BatchNormGrad", inputs, GRAD_BIAS + recompute_sign,
                                     norm->n_outputs);
    if (!fused) return b.status;
    ONT_TRY(ont_attr_copy_all(g, fused, norm));
    ont_build_done(&b, fused);
    ONT_TRY(b.status);
    for (uint32_t i = 0; i < norm->n_outputs; i++)
        if (norm->outputs[i]) ont_value_replace_uses(g, norm->outputs[i], fused->outputs[i]);
    ont_graph_remove_node(g, norm);
    if (!dx->uses) ont_graph_remove_node(g, relu);
    return ONT_OK;
}

ont_status ont_pass_fuse_batchnorm(ont_graph *g)
{
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        if (ONT_IS(node, BatchNormalization))
            ONT_TRY(fuse_forward(g, node, &next));
        else if (ONT_IS(node, BatchNormGrad))
            ONT_TRY(fuse_backward(g, node));
    }
    return ONT_OK;
}
