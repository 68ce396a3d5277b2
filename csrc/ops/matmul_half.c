/*
 * The kernel of products of 16-bit floats: oneDNN's, or our own where that is faster. Both sum in float32 and round
 * once. Where the processor has no such products it declines, and passes/promote.c has them computed in float32.
 */
#include <stdlib.h>
#include <string.h>

#include "base/parallel.h"
#include "device/gemm.h"
#include "device/matmul.h"
#include "device/tiled.h"
#include "ops/matmul.h"

typedef struct half_state {
    ont_dnnl_matmul *handle; /* NULL: our own */
    ont_tiled tiled;
} half_state;

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
    if (asked && *asked && strcmp(asked, "onednn") && strcmp(asked, "tiled"))
        return "ONNXTRAIN_GEMM asks for another provider";
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

/* Cuts the product where our own kernel is to compute it. */
static ont_status cut(const ont_node *node, half_state *s)
{
    ont_product p;
    ONT_TRY(ont_product_read(node, &p));
    ont_product_fold(&p);
    ont_gemm g = {.dtype = ont_node_in(node, 0)->dtype, .trans_a = p.trans_a, .trans_b = p.trans_b, .m = p.m, .n = p.n,
                  .k = p.k, .lda = p.a.dims[p.a.rank - 1], .ldb = p.b.dims[p.b.rank - 1], .ldc = p.n, .alpha = p.alpha};
    ont_dtype out = node->outputs[0]->dtype;
    bool row = node->n_inputs > 2 && node->inputs[2].value;
    if (g.dtype != ONT_BFLOAT16 || ont_shape_count(&p.batch) != 1) return ONT_OK;
    const ont_gemm_kernel *kernel = ont_gemm_kernel_of(ont_gemm_choose_half(&g, out, row), g.dtype);
    if (kernel) ont_tiled_cut(&s->tiled, kernel, &g, out, ont_parallel_threads());
    return ONT_OK;
}

ont_status ont_matmul_half_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    half_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (half_state){0};
    ONT_TRY(cut(node, s));
    if (s->tiled.kernel) {
        out->work_bytes = ont_tiled_work_bytes(&s->tiled);
    } else {
        ONT_TRY(ont_product_primitive(node, out));
        s->handle = out->state;
    }
    out->state = s;
    return ONT_OK;
}

ont_status ont_matmul_half_run(const ont_call *call)
{
    const half_state *s = call->state;
    const void *row = call->node->n_inputs > 2 ? call->in[2] : NULL;
    if (s->handle) return ont_dnnl_matmul_run(s->handle, call->in[0], call->in[1], row, call->out[0], call->work);
    ont_tiled_run(&s->tiled, call->in[0], call->in[1], row, call->out[0], NULL, call->work);
    return ONT_OK;
}

void ont_matmul_half_release(void *state)
{
    ont_dnnl_matmul_destroy(((half_state *)state)->handle);
}
