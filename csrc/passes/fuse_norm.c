/*
 * Fuses LayerNormalization and RMSNormalization with the Casts around them and with the addition of a residual before
 * them, and their gradients with the additions of gradients before and behind: for devices with such kernels
 * (ops/norm/fused_norm.c). Every tensor is then read and written once, in the type that its other users need. After
 * dtype promotion and rematerialization, before elementwise fusion.
 */
#include "base/alloc.h"
#include "base/assert.h"
#include "passes/match.h"
#include "passes/pass.h"

enum { ADDEND = 3, SUM = 3, COPY = 4 };                   /* of FusedNorm */
enum { DY = 4, DY2 = 5, GRAD_ADDEND = 6, GRAD_COPY = 3 }; /* of FusedNormGrad */

typedef struct fusion {
    ont_graph *g;
    uint32_t *order; /* position by node id, with room for a fused node for each node */
    size_t room;     /* of `order` */
} fusion;

/* Sets input `index` to `v`, or to what v was cast from; leaves it as it was if no kernel takes the node then. */
static bool set_input(const fusion *f, ont_node *node, uint32_t index, ont_value *v)
{
    ont_value *was = ont_node_in(node, index);
    ont_node_set_input(node, index, ont_before_cast(v));
    if (ont_op_has_kernel(node, f->g->device)) return true;
    ont_node_set_input(node, index, v);
    if (ont_op_has_kernel(node, f->g->device)) return true;
    ont_node_set_input(node, index, was);
    return false;
}

/* ---- the node itself ---- */

static bool is_norm(const ont_node *node)
{
    return ONT_IS(node, LayerNormalization) || ONT_IS(node, LayerNormGrad);
}

static bool is_grad(const ont_node *node)
{
    return ONT_IS(node, LayerNormGrad) || ONT_IS(node, FusedNormGrad);
}

/* Replaces the node by a fused one with room for all operands; NULL if no kernel takes that. */
static ont_status replace(const fusion *f, ont_node *norm, ont_node **result)
{
    ont_graph *g = f->g;
    const bool grad = is_grad(norm);
    const uint32_t n = grad ? GRAD_ADDEND + 1 : ADDEND + 1;
    ont_value *inputs[GRAD_ADDEND + 1];
    *result = NULL;
    for (uint32_t i = 0; i < n; i++) inputs[i] = ont_node_in(norm, 0); /* absent ones at the end would have no place */
    ont_builder b = {.graph = g, .before = norm, .backward = norm->backward, .origin = ont_node_origin(norm)};
    ont_node *fused = ont_build_node(&b, ONT_DOMAIN, grad ? "FusedNormGrad" : "FusedNorm", inputs, n,
                                     norm->n_outputs);
    if (!fused) return b.status;
    for (uint32_t i = 0; i < n; i++) ont_node_set_input(fused, i, ont_node_in(norm, i));
    fused->name = norm->name;
    ONT_TRY(ont_attr_copy_all(g, fused, norm));
    ont_build_done(&b, fused);
    ONT_TRY(b.status);
    if (!ont_op_has_kernel(fused, g->device)) {
        ont_graph_remove_node(g, fused);
        return ONT_OK;
    }
    for (uint32_t i = 0; i < norm->n_outputs; i++) {
        if (norm->outputs[i]) ont_value_replace_uses(g, norm->outputs[i], fused->outputs[i]);
        else fused->outputs[i] = NULL;
    }
    ONT_ASSERT(fused->id < f->room);
    f->order[fused->id] = f->order[norm->id];
    ont_graph_remove_node(g, norm);
    *result = fused;
    return ONT_OK;
}

/* ---- additions ---- */

/* The Add in the phase of `node` that computes v from two values of its shape, and does not round it to 16 bits. */
static ont_node *addition(const ont_value *v, const ont_node *node)
{
    ont_node *add = v->def;
    if (ont_dtype_is_half(v->dtype) || !ONT_IS(add, Add) || add->backward != node->backward) return NULL;
    if (ont_node_in(add, 0) == ont_node_in(add, 1)) return NULL;
    for (uint32_t i = 0; i < 2; i++)
        if (!ont_shape_equal(&ont_node_in(add, i)->shape, &v->shape)) return NULL;
    return add;
}

static bool is_used_from(const fusion *f, const ont_value *v, const ont_node *node)
{
    for (const ont_use *use = v->uses; use; use = use->next)
        if (f->order[use->user->id] < f->order[node->id]) return false;
    return true;
}

/* Sets the two inputs to the operands of the Add. */
static bool take_operands(const fusion *f, ont_node *node, uint32_t first, uint32_t second, const ont_node *add)
{
    ont_value *sum = ont_node_in(node, first);
    if (!set_input(f, node, first, ont_node_in(add, 0))) return false;
    if (set_input(f, node, second, ont_node_in(add, 1))) return true;
    ont_node_set_input(node, first, sum);
    return false;
}

/* x = a + b becomes two operands of the norm, which writes the sum if it has other users. */
static ont_status join_addition(const fusion *f, ont_node *norm)
{
    ont_value *x = ont_node_in(norm, 0), *sum;
    ont_node *add = addition(x, norm);
    if (!add || !is_used_from(f, x, norm) || !take_operands(f, norm, 0, ADDEND, add)) return ONT_OK;
    if (x->uses || ont_value_is_output(f->g, x)) {
        ONT_TRY(ont_node_ensure_output(f->g, norm, SUM, &sum));
        ONT_TRY(norm->op->infer(f->g, norm));
        ont_value_replace_uses(f->g, x, sum);
    }
    ont_graph_remove_node(f->g, add);
    return ONT_OK;
}

/* dy = a + b becomes two operands of the gradient. */
static void join_gradients(const fusion *f, ont_node *grad)
{
    ont_value *dy = ont_node_in(grad, DY);
    ont_node *add = addition(dy, grad);
    if (!add || dy->uses->next || ont_value_is_output(f->g, dy)) return;
    if (take_operands(f, grad, DY, DY2, add)) ont_graph_remove_node(f->g, add);
}

/* Turns `dx + other` into an extra input if `other` is computed before the gradient. */
static void join_residual(const fusion *f, ont_node *grad)
{
    ont_value *dx = grad->outputs[0];
    ont_node *add = dx ? ont_single_user_in_phase(f->g, dx) : NULL;
    if (!ONT_IS(add, Add) || addition(add->outputs[0], grad) != add) return;
    ont_value *other = ont_node_in(add, ont_node_in(add, 0) == dx);
    if (other->def && f->order[other->def->id] > f->order[grad->id]) return;
    if (!set_input(f, grad, GRAD_ADDEND, other)) return;
    ont_value_replace_uses(f->g, add->outputs[0], dx);
    ont_graph_remove_node(f->g, add);
}

/* ---- Casts of results ---- */

/* Sets an attribute that names the dtype of an output, or leaves it if no kernel takes the node then. */
static ont_status set_dtype(const fusion *f, ont_node *node, const char *attr, uint32_t index, ont_dtype dtype,
                            bool *done)
{
    ont_dtype was = node->outputs[index]->dtype;
    node->outputs[index]->dtype = dtype;
    *done = ont_op_has_kernel(node, f->g->device);
    node->outputs[index]->dtype = *done ? dtype : was;
    return *done ? ont_attr_set_int(f->g, node, attr, dtype) : ONT_OK;
}

/* The Cast to 16 bits of the first output becomes that output, or a copy of it if there are other users. */
static ont_status join_cast(const fusion *f, ont_node *node)
{
    ont_value *y = node->outputs[0], *narrow = y;
    ont_node *cast = NULL;
    for (const ont_use *use = y ? y->uses : NULL; use && !cast; use = use->next)
        if (ONT_IS(use->user, Cast) && use->user->backward == node->backward &&
            ont_dtype_is_half(use->user->outputs[0]->dtype))
            cast = use->user;
    if (!cast) return ONT_OK;
    ont_dtype to = cast->outputs[0]->dtype;
    bool done, only = !y->uses->next && !ont_value_is_output(f->g, y);
    uint32_t copy = is_grad(node) ? GRAD_COPY : COPY;
    if (!only) {
        ONT_TRY(ont_node_ensure_output(f->g, node, copy, &narrow));
        ONT_TRY(node->op->infer(f->g, node));
    }
    ONT_TRY(set_dtype(f, node, only ? "to" : "copy", only ? 0 : copy, to, &done));
    if (!done) {
        if (!only) node->outputs[copy] = NULL;
        return ONT_OK;
    }
    ont_value_replace_uses(f->g, cast->outputs[0], narrow);
    ont_graph_remove_node(f->g, cast);
    return ONT_OK;
}

/* ---- the pass ---- */

static ont_status replace_all(const fusion *f)
{
    for (ont_node *node = f->g->first, *next; node; node = next) {
        next = node->next;
        bool fused = ONT_IS(node, FusedNorm) || ONT_IS(node, FusedNormGrad);
        if (!fused && !is_norm(node)) continue;
        ONT_TRY(replace(f, node, &node));
        if (!node) continue;
        set_input(f, node, 0, ont_node_in(node, 0));
        if (is_grad(node)) set_input(f, node, DY, ont_node_in(node, DY));
    }
    return ont_pass_dce(f->g); /* Casts that other nodes of the loop have read */
}

static ont_status join_all(const fusion *f)
{
    for (ont_node *node = f->g->first; node; node = node->next) {
        bool forward = ONT_IS(node, FusedNorm);
        if (!forward && !ONT_IS(node, FusedNormGrad)) continue;
        if (forward) ONT_TRY(join_addition(f, node));
        if (!forward) join_gradients(f, node);
        if (!forward) join_residual(f, node);
        ONT_TRY(join_cast(f, node));
        while (!ont_node_in(node, node->n_inputs - 1)) node->n_inputs--;
    }
    return ont_pass_dce(f->g);
}

ont_status ont_pass_fuse_norm(ont_graph *g)
{
    fusion f = {.g = g, .room = 2 * (size_t)g->n_nodes + 1};
    ONT_TRY(ont_node_positions(g, f.room, &f.order));
    ont_status status = replace_all(&f);
    if (status == ONT_OK) status = join_all(&f);
    ont_free(f.order);
    return status;
}
