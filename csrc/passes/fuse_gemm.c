/*
 * Fuses the epilogue of a matrix product into FusedMatMul: Add of a bias (n), and Cast of a 16-bit result to float32.
 *
 *   Add(MatMul(A, B), bias)    -> FusedMatMul(A, B, bias)
 *   Cast(MatMul(A, B), float)  -> FusedMatMul(A, B) {to = float}
 *
 * Runs after differentiation, because the gradient rules are written for the parts; before passes/promote.c, which
 * would insert Casts between them; and once more to fuse those Casts. Only where the product has no other user.
 */
#include <string.h>

#include "ops/matmul/matmul.h"
#include "passes/match.h"
#include "passes/pass.h"

/* ---- bias ---- */

/* The bias that `user` adds to the product; NULL where it does anything else. */
static ont_value *added_bias(const ont_node *product, const ont_node *user)
{
    const ont_value *y = product->outputs[0];
    ont_matmul_desc p;
    if (!ONT_IS(user, Add) || product->n_inputs > 2 || ont_attr_float(product, "alpha", 1.0) != 1)
        return NULL;
    if (ont_matmul_desc_read(product, &p) != ONT_OK || p.vector_b || !ont_dtype_is_float(y->dtype)) return NULL;
    ont_value *bias = ont_node_in(user, ont_node_in(user, 0) == y);
    if (bias == y || bias->dtype != y->dtype || y->dtype != ont_node_in(product, 0)->dtype) return NULL;
    bool fits = ont_matmul_desc_is_bias(&p, &bias->shape) && ont_shape_equal(&user->outputs[0]->shape, &y->shape);
    return fits ? bias : NULL;
}

/* Replaces both nodes by one in the place of `user`, where the bias is defined as well. */
static ont_status fuse_bias(ont_graph *g, ont_node *product, ont_node *user, ont_value *bias, ont_node **fused)
{
    ont_value *inputs[] = {ont_node_in(product, 0), ont_node_in(product, 1), bias};
    ont_builder b = {.graph = g, .before = user, .backward = product->backward, .origin = ont_node_origin(product)};
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "FusedMatMul", inputs, 3, 1);
    if (!node) return b.status;
    node->name = product->name;
    ONT_TRY(ont_attr_copy_all(g, node, product));
    ont_build_done(&b, node);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, user->outputs[0], node->outputs[0]);
    ont_graph_remove_node(g, user);
    ont_graph_remove_node(g, product);
    *fused = node;
    return ONT_OK;
}

/* ---- Cast to float32 ---- */

/* The Cast of the product to float32, with only views in between; NULL where there is none. */
static ont_node *cast_of(const ont_graph *g, const ont_node *product)
{
    const ont_value *y = product->outputs[0];
    ont_node *user = ont_single_user_in_phase(g, y);
    if (y->dtype != ONT_BFLOAT16 && y->dtype != ONT_FLOAT16) return NULL;
    while (user && user->op->flags & ONT_OP_VIEW && user->inputs[0].value == y) {
        y = user->outputs[0];
        user = ont_single_user_in_phase(g, y);
    }
    return user && ONT_IS(user, Cast) && user->outputs[0]->dtype == ONT_FLOAT32 ? user : NULL;
}

/*
 * On a device: the gradient of a weight, which no other node reads. Kernels that read another Cast's result read its 16
 * bits in place of it. A bias would need the dtype of C, by cuBLASLt.
 */
static bool absorbs(const ont_graph *g, const ont_node *product, const ont_node *cast)
{
    return !g->device || (product->n_inputs < 3 && !cast->outputs[0]->uses && ont_value_is_output(g, cast->outputs[0]));
}

static ont_status absorb_cast(ont_graph *g, ont_node *product, ont_node *cast)
{
    ONT_TRY(ont_matmul_become_fused(product));
    ONT_TRY(ont_attr_set_int(g, product, "to", ONT_FLOAT32));
    ont_value *y = ont_node_in(cast, 0);
    for (ont_value *v = y;; v = v->def->inputs[0].value) { /* the views, too */
        v->dtype = ONT_FLOAT32;
        if (v->def == product) break;
    }
    ont_value_replace_uses(g, cast->outputs[0], y);
    ont_graph_remove_node(g, cast);
    return ONT_OK;
}

ont_status ont_pass_fuse_gemm(ont_graph *g)
{
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        if (!ont_is_matmul(node)) continue;
        ont_node *user = ont_single_user_in_phase(g, node->outputs[0]), *cast;
        ont_value *bias = user ? added_bias(node, user) : NULL;
        if (bias && next == user) next = user->next;
        if (bias) ONT_TRY(fuse_bias(g, node, user, bias, &node));
        cast = cast_of(g, node);
        if (cast && !absorbs(g, node, cast)) cast = NULL;
        if (cast && next == cast) next = cast->next;
        if (cast) ONT_TRY(absorb_cast(g, node, cast));
    }
    return ONT_OK;
}
