/*
 * The kernel of products of 16-bit floats: oneDNN's, which sums in float32 and rounds once. Where the processor has no
 * such products it declines, and passes/widen.c has them computed in float32.
 */
#include <stdlib.h>
#include <string.h>

#include "device/matmul.h"
#include "ops/matmul.h"

/* Of Gemm's C only what is a bias: a row, added as it is. */
static const char *refuses_c(const ont_node *node, const ont_product *p)
{
    const ont_value *c = node->n_inputs > 2 ? node->inputs[2].value : NULL;
    if (!c) return NULL;
    if (ont_attr_float(node, "alpha", 1.0) != 1 || ont_attr_float(node, "beta", 1.0) != 1) return "alpha or beta";
    return ont_product_is_row(p, &c->shape) ? NULL : "C is no row";
}

bool ont_matmul_half_is_fast(void)
{
    return !ont_dnnl_matmul_refuses(ONT_BFLOAT16);
}

const char *ont_matmul_half_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    ont_product p;
    if (dtype != ONT_BFLOAT16 && dtype != ONT_FLOAT16) return "dtype";
    const char *refusal = ont_dnnl_matmul_refuses(dtype);
    if (refusal) return refusal;
    const char *asked = getenv("ONNXTRAIN_GEMM");
    if (asked && *asked && strcmp(asked, "onednn")) return "ONNXTRAIN_GEMM asks for another provider";
    if (ont_product_read(node, &p) != ONT_OK) return "operands";
    if (!(p.m && p.n && p.k && ont_shape_count(&p.batch))) return "nothing to multiply";
    return refuses_c(node, &p);
}

bool ont_product_is_row(const ont_product *p, const ont_shape *c)
{
    return c->rank >= 1 && c->dims[c->rank - 1] == p->n && ont_shape_count(c) == p->n;
}

ont_status ont_product_primitive(const ont_node *node, ont_prepared *out)
{
    ont_product p;
    ONT_TRY(ont_product_read(node, &p));
    ont_product_fold(&p);
    ont_matmul m = {.dtype = ont_node_in(node, 0)->dtype, .out = node->outputs[0]->dtype, .a = p.a, .b = p.b,
                    .c = p.batch, .trans_a = p.trans_a, .trans_b = p.trans_b,
                    .bias = node->n_inputs > 2 && node->inputs[2].value,
                    .alpha = p.alpha};
    m.c.dims[m.c.rank++] = p.m;
    m.c.dims[m.c.rank++] = p.n;
    ont_dnnl_matmul *h;
    ONT_TRY(ont_dnnl_matmul_create(&m, &h));
    out->state = h;
    out->work_bytes = ont_dnnl_matmul_work_bytes(h);
    return ONT_OK;
}

ont_status ont_matmul_half_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    (void)arena;
    return ont_product_primitive(node, out);
}

ont_status ont_matmul_half_run(const ont_call *call)
{
    ont_dnnl_matmul *h = (ont_dnnl_matmul *)(uintptr_t)call->state;
    const void *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    return ont_dnnl_matmul_run(h, call->in[0], call->in[1], bias, call->out[0], call->work);
}

void ont_matmul_half_release(void *state)
{
    ont_dnnl_matmul_destroy(state);
}
