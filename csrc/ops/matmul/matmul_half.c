/*
 * MatMul, Gemm and FusedMatMul of 16-bit floats by oneDNN's primitive, and by the native GEMM. Both accumulate in
 * float32 and round once. Where the processor does not multiply such numbers, the kernels decline, and passes/promote.c
 * converts the operands to float32.
 */
#include "base/parallel.h"
#include "device/half_product.h"
#include "ops/matmul/matmul.h"

/* NULL, or why C of Gemm is not a bias that both implementations can add. */
static const char *refuse_c(const ont_node *node, const ont_matmul_desc *p)
{
    const ont_value *c = node->n_inputs > 2 ? node->inputs[2].value : NULL;
    if (!c) return NULL;
    if (ont_attr_float(node, "alpha", 1.0) != 1 || ont_attr_float(node, "beta", 1.0) != 1) return "alpha or beta";
    return ont_matmul_desc_is_bias(p, &c->shape) ? NULL : "C is not a bias (n)";
}

bool ont_matmul_half_is_fast(void)
{
    return !ont_dnnl_matmul_refuses(ONT_BFLOAT16);
}

const char *ont_matmul_half_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    ont_matmul_desc p;
    if (dtype != ONT_BFLOAT16 && dtype != ONT_FLOAT16) return "dtype";
    const char *refusal = ont_half_product_refuses(dtype);
    if (refusal) return refusal;
    if (ont_matmul_desc_read(node, &p) != ONT_OK) return "operands";
    if (!(p.m && p.n && p.k && ont_shape_count(&p.batch))) return "a dim is 0";
    return refuse_c(node, &p);
}

ont_status ont_matmul_prepare_primitive(const ont_node *node, ont_prepared *out)
{
    ont_matmul_desc p;
    ONT_TRY(ont_matmul_desc_read(node, &p));
    ont_matmul_desc_fold_batch(&p);
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

static ont_status read_gemm(const ont_node *node, ont_gemm *g, int64_t *count)
{
    ont_matmul_desc p;
    ONT_TRY(ont_matmul_desc_read(node, &p));
    ont_matmul_desc_fold_batch(&p);
    *count = ont_shape_count(&p.batch);
    *g = (ont_gemm){.dtype = ont_node_in(node, 0)->dtype, .trans_a = p.trans_a, .trans_b = p.trans_b, .m = p.m,
                    .n = p.n, .k = p.k, .lda = p.a.dims[p.a.rank - 1], .ldb = p.b.dims[p.b.rank - 1], .ldc = p.n,
                    .alpha = p.alpha};
    return ONT_OK;
}

const char *ont_matmul_half_native_accept(const ont_node *node)
{
    ont_gemm g;
    int64_t count;
    const char *refusal = ont_matmul_half_accept(node);
    if (refusal) return refusal;
    if (read_gemm(node, &g, &count) != ONT_OK || count != 1) return "a batch of matrices";
    return ont_gemm_half_is_native(&g) ? NULL : "by rule oneDNN's primitive is used";
}

ont_status ont_matmul_half_native_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_gemm g;
    int64_t count;
    ont_gemm_native *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_gemm(node, &g, &count));
    ont_gemm_native_init(s, ont_gemm_native_kernel(g.dtype), &g, node->outputs[0]->dtype,
                         ont_parallel_threads());
    out->state = s;
    out->work_bytes = ont_gemm_native_work_bytes(s);
    return ONT_OK;
}

ont_status ont_matmul_half_native_run(const ont_call *call)
{
    const void *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    ont_gemm_native_run(call->state, call->in[0], call->in[1], bias, call->out[0], NULL, call->work);
    return ONT_OK;
}

typedef struct half_state {
    ont_dnnl_matmul *primitive;
} half_state;

ont_status ont_matmul_half_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    half_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_matmul_prepare_primitive(node, out));
    s->primitive = out->state;
    out->state = s;
    return ONT_OK;
}

ont_status ont_matmul_half_run(const ont_call *call)
{
    const half_state *s = call->state;
    const void *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    return ont_dnnl_matmul_run(s->primitive, call->in[0], call->in[1], bias, call->out[0], call->work);
}

void ont_matmul_half_release(void *state)
{
    ont_dnnl_matmul_destroy(((half_state *)state)->primitive);
}
