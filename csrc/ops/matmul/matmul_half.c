/*
 * MatMul, Gemm and FusedMatMul of 16-bit floats: oneDNN's primitive, or the native GEMM where that is faster. Both
 * accumulate in float32 and round once. Where the processor does not multiply such numbers, the kernel declines, and
 * passes/promote.c converts the operands to float32.
 */
#include <string.h>

#include "base/parallel.h"
#include "device/gemm.h"
#include "device/matmul.h"
#include "device/gemm_native.h"
#include "ops/matmul/matmul.h"

typedef struct half_state {
    ont_dnnl_matmul *primitive; /* NULL: native */
    ont_gemm_native native;
} half_state;

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
    const char *refusal = ont_dnnl_matmul_refuses(dtype);
    if (refusal) return refusal;
    const char *requested = ont_gemm_requested();
    if (requested && *requested && strcmp(requested, "onednn") && strcmp(requested, "native"))
        return "ONNXTRAIN_GEMM names another implementation";
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

/* Sets s->native where the native GEMM is to compute the product. */
static ont_status prepare_native(const ont_node *node, half_state *s)
{
    ont_matmul_desc p;
    ONT_TRY(ont_matmul_desc_read(node, &p));
    ont_matmul_desc_fold_batch(&p);
    ont_gemm g = {.dtype = ont_node_in(node, 0)->dtype, .trans_a = p.trans_a, .trans_b = p.trans_b, .m = p.m, .n = p.n,
                  .k = p.k, .lda = p.a.dims[p.a.rank - 1], .ldb = p.b.dims[p.b.rank - 1], .ldc = p.n, .alpha = p.alpha};
    ont_dtype out = node->outputs[0]->dtype;
    bool bias = node->n_inputs > 2 && node->inputs[2].value;
    if (g.dtype != ONT_BFLOAT16 || ont_shape_count(&p.batch) != 1) return ONT_OK;
    const ont_gemm_kernel *kernel = ont_gemm_native_kernel(ont_gemm_choose_half(&g, out, bias), g.dtype);
    if (kernel) ont_gemm_native_init(&s->native, kernel, &g, out, ont_parallel_threads());
    return ONT_OK;
}

ont_status ont_matmul_half_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    half_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (half_state){0};
    ONT_TRY(prepare_native(node, s));
    if (s->native.kernel) {
        out->work_bytes = ont_gemm_native_work_bytes(&s->native);
    } else {
        ONT_TRY(ont_matmul_prepare_primitive(node, out));
        s->primitive = out->state;
    }
    out->state = s;
    return ONT_OK;
}

ont_status ont_matmul_half_run(const ont_call *call)
{
    const half_state *s = call->state;
    const void *bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    if (s->primitive)
        return ont_dnnl_matmul_run(s->primitive, call->in[0], call->in[1], bias, call->out[0], call->work);
    ont_gemm_native_run(&s->native, call->in[0], call->in[1], bias, call->out[0], NULL, call->work);
    return ONT_OK;
}

void ont_matmul_half_release(void *state)
{
    ont_dnnl_matmul_destroy(((half_state *)state)->primitive);
}
