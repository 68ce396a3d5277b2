/*
 * Fuses GELU (tanh approximation) into the matmul before it, and its gradient into the matmul whose result it
 * multiplies: for devices with such kernels (matmul_gelu.c). After fuse_gemm, which adds the bias, and before dtype
 * promotion, which would put Casts in between.
 */
#include <string.h>

#include "passes/match.h"
#include "passes/pass.h"

static bool is_tanh_form(const ont_node *node)
{
    return !strcmp(ont_attr_string(node, "approximate", "none"), "tanh");
}

/* A matmul without scale, with the given number of operands. */
static bool is_product(const ont_node *node, uint32_t operands)
{
    uint32_t n = node->n_inputs;
    if (n > 2 && !ont_node_in(node, 2)) n = 2;
    if (!ont_is_matmul_or_gemm(node)) return false;
    if (ont_attr_float(node, "alpha", 1.0) != 1 || (n > 2 && ont_attr_float(node, "beta", 1.0) != 1)) return false;
    return n == operands && node->outputs[0]->dtype == ont_node_in(node, 0)->dtype;
}

/* Builds and infers the node in front of `before`; *result is NULL if the device has no kernel for it. */
static ont_status build(ont_graph *g, const char *op_type, ont_node *before, const ont_node *product, ont_value *third,
                        uint32_t n_outputs, ont_node **result)
{
    ont_value *inputs[] = {ont_node_in(product, 0), ont_node_in(product, 1), third};
    ont_builder b = {.graph = g, .before = before, .backward = before->backward, .origin = ont_node_origin(before)};
    *result = NULL;
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, op_type, inputs, 3, n_outputs);
    if (!node) return b.status;
    node->name = product->name;
    ONT_TRY(ont_attr_set_int(g, node, "transA", ont_attr_int(product, "transA", 0)));
    ONT_TRY(ont_attr_set_int(g, node, "transB", ont_attr_int(product, "transB", 0)));
    ont_status status = node->op->infer(g, node);
    if (status == ONT_ENOMEM) return status;
    if (status == ONT_OK && ont_op_has_kernel(node, g->device)) {
        *result = node;
        return ONT_OK;
    }
    ont_graph_remove_node(g, node);
    return ONT_OK;
}

/* y = A B + bias, z = gelu(y): both from one node; y only if it has other users. */
static ont_status fuse_forward(ont_graph *g, ont_node *gelu)
{
    ont_value *y = ont_node_in(gelu, 0);
    ont_node *product = y->def, *node;
    if (!product || product->backward != gelu->backward || !is_product(product, 3)) return ONT_OK;
    bool single_use = !y->uses->next && !ont_value_is_output(g, y);
    ONT_TRY(build(g, "GeluMatMul", product, product, ont_node_in(product, 2), single_use ? 1 : 2, &node));
    if (!node) return ONT_OK;
    ont_value_replace_uses(g, gelu->outputs[0], node->outputs[0]);
    ont_graph_remove_node(g, gelu);
    if (!single_use) ont_value_replace_uses(g, y, node->outputs[1]);
    ont_graph_remove_node(g, product);
    return ONT_OK;
}

/*
 * dx = A B * gelu'(x), if A B has no other use. The sum of dx for the bias stays a node: cuBLASLt would
 * compute it by a kernel of its own behind the product, not in the epilogue, which saves no pass over dx
 * (docs/performance/cuda_model.md).
 */
static ont_status fuse_backward(ont_graph *g, ont_node *grad)
{
    ont_value *x = ont_node_in(grad, 0), *dy = ont_node_in(grad, 1), *dx = grad->outputs[0];
    ont_node *product = dy->def, *node;
    if (!product || product->backward != grad->backward || !is_product(product, 2) || x == dy) return ONT_OK;
    if (dy->uses->next || ont_value_is_output(g, dy)) return ONT_OK;
    ONT_TRY(build(g, "GeluMatMulGrad", grad, product, x, 1, &node));
    if (!node) return ONT_OK;
    ont_value_replace_uses(g, dx, node->outputs[0]);
    ont_graph_remove_node(g, grad);
    ont_graph_remove_node(g, product);
    return ONT_OK;
}

ont_status ont_pass_fuse_gelu(ont_graph *g)
{
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        bool forward = ONT_IS(node, Gelu), backward = ONT_IS(node, GeluGrad);
        if ((!forward && !backward) || !is_tanh_form(node)) continue;
        ONT_TRY(forward ? fuse_forward(g, node) : fuse_backward(g, node));
    }
    return ONT_OK;
}
