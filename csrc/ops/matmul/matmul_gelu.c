/*
 * A linear layer with GELU (tanh approximation) as one operator, and its gradient: for devices whose library fuses both
 * into the epilogue of a GEMM. Only passes/fuse_gelu.c creates them. The kernels here are the reference.
 *
 *   GeluMatMul     (A, B, bias (n)) -> gelu(A B + bias)[, A B + bias]
 *   GeluMatMulGrad (A, B, x (m, n)) -> A B * gelu'(x)
 */
#include <math.h>
#include <string.h>

#include "ops/matmul/matmul.h"

static ont_status gelu_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_matmul_desc p;
    bool grad = ONT_IS(node, GeluMatMulGrad);
    ONT_TRY(ont_matmul_desc_read(node, &p));
    const ont_value *third = ont_node_in(node, 2);
    ont_shape shape = p.batch;
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (p.vector_a || p.vector_b || p.alpha != 1 || shape.rank + 2 > ONT_MAX_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "operands must be matrices, and alpha must be 1");
    shape.dims[shape.rank++] = p.m;
    shape.dims[shape.rank++] = p.n;
    if (third->dtype != dtype ||
        (grad ? !ont_shape_equal(&third->shape, &shape) : !ont_matmul_desc_is_bias(&p, &third->shape)))
        return ont_fail(ONT_EUNSUPPORTED, "shape or dtype of the third operand differs from the product's");
    if (node->n_outputs > 1) ONT_TRY(ont_infer_out(node, 1, dtype, &shape));
    return ont_infer_out(node, 0, dtype, &shape);
}

static const char *gelu_accept(const ont_node *node)
{
    ont_matmul_desc p;
    if (ont_matmul_desc_read(node, &p) != ONT_OK) return "shapes";
    ont_matmul_desc_fold_batch(&p);
    return p.batch.rank && ont_shape_count(&p.batch) != 1 ? "a batch of matrices" : ont_accept_float(node);
}

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}

static double gelu_slope(double x)
{
    double t = tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286535588 * (1 + 3 * 0.044715 * x * x);
}

#define GELU_REF(suffix, type) \
    static void gelu_ref_##suffix(const ont_call *call, const ont_matmul_desc *p, bool grad) \
    { \
        const type *a = call->in[0], *b = call->in[1], *third = call->in[2]; \
        type *y = call->out[0], *second = call->node->n_outputs > 1 ? call->out[1] : NULL; \
        for (int64_t i = 0; i < p->m; i++) \
            for (int64_t j = 0; j < p->n; j++) { \
                double sum = grad ? 0 : (double)third[j]; \
                for (int64_t k = 0; k < p->k; k++) \
                    sum += (double)a[p->trans_a ? k * p->m + i : i * p->k + k] * \
                           (double)b[p->trans_b ? j * p->k + k : k * p->n + j]; \
                int64_t at = i * p->n + j; \
                y[at] = (type)(grad ? sum * gelu_slope((double)third[at]) : gelu(sum)); \
                if (second) second[at] = (type)sum; \
            } \
    }
GELU_REF(f32, float)
GELU_REF(f64, double)

static ont_status gelu_run(const ont_call *call)
{
    ont_matmul_desc p;
    ONT_TRY(ont_matmul_desc_read(call->node, &p));
    ont_matmul_desc_fold_batch(&p);
    bool grad = ONT_IS(call->node, GeluMatMulGrad);
    (call->node->outputs[0]->dtype == ONT_FLOAT32 ? gelu_ref_f32 : gelu_ref_f64)(call, &p, grad);
    return ONT_OK;
}

static const ont_kernel gelu_kernels[] = {
    {.name = "gelu_matmul_ref", .accept = gelu_accept, .run = gelu_run},
};
#define GELU_OP(name_) \
    const ont_op ont_op_##name_ = {.domain = ONT_DOMAIN, .name = #name_, .since = 1, .min_inputs = 3, .max_inputs = 3, \
                                   .attributes = "transA:i transB:i", .infer = gelu_infer, \
                                   .cost = ONT_COST_MATMUL, ONT_KERNELS(gelu_kernels)}
GELU_OP(GeluMatMul);
GELU_OP(GeluMatMulGrad);
