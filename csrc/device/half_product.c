/*
 * See half_product.h.
 */
#include <string.h>

#include "base/parallel.h"
#include "device/half_product.h"

const char *ont_half_product_refuses(ont_dtype dtype)
{
    const char *requested = ont_gemm_requested(), *refusal = ont_dnnl_matmul_refuses(dtype);
    if (refusal) return refusal;
    if (requested && strcmp(requested, "onednn") && strcmp(requested, "primitive") && strcmp(requested, "native"))
        return "ONNXTRAIN_GEMM names another implementation";
    return NULL;
}

static ont_status create_primitive(const ont_gemm *g, ont_dtype out, bool bias, bool adds, ont_dnnl_matmul **result)
{
    ont_matmul m = {.dtype = g->dtype, .out = out, .trans_a = g->trans_a, .trans_b = g->trans_b, .bias = bias,
                    .adds_to_c = adds, .alpha = 1, .lda = g->lda, .ldb = g->ldb, .ldc = g->ldc};
    m.a = ont_shape_of(2, (int64_t[]){g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k});
    m.b = ont_shape_of(2, (int64_t[]){g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n});
    m.c = ont_shape_of(2, (int64_t[]){g->m, g->n});
    return ont_dnnl_matmul_create(&m, result);
}

ont_status ont_half_product_prepare(ont_half_product *p, const ont_gemm *g, ont_dtype out, bool bias)
{
    if (ont_gemm_half_is_native(g)) {
        ont_gemm_native_init(&p->native, ont_gemm_native_kernel(g->dtype), g, out, ont_parallel_threads());
        return ONT_OK;
    }
    ONT_TRY(create_primitive(g, out, bias, false, &p->primitives[0]));
    return out == ONT_FLOAT32 ? create_primitive(g, out, false, true, &p->primitives[1]) : ONT_OK;
}

void ont_half_product_release(ont_half_product *p)
{
    for (int adds = 0; adds < 2; adds++) ont_dnnl_matmul_destroy(p->primitives[adds]);
}

size_t ont_half_product_work_bytes(const ont_half_product *p)
{
    size_t bytes = p->native.kernel ? ont_gemm_native_work_bytes(&p->native) : 0;
    for (int adds = 0; adds < 2; adds++) {
        size_t own = p->primitives[adds] ? ont_dnnl_matmul_work_bytes(p->primitives[adds]) : 0;
        bytes = own > bytes ? own : bytes;
    }
    return bytes;
}

ont_status ont_half_product_run(const ont_half_product *p, const void *a, const void *b, const void *bias, void *c,
                                bool adds, void *work)
{
    if (!p->native.kernel) return ont_dnnl_matmul_run(p->primitives[adds], a, b, bias, c, work);
    ont_gemm_native native = p->native;
    native.gemm.beta = adds;
    ont_gemm_native_run(&native, a, b, bias, c, NULL, work);
    return ONT_OK;
}
