/*
 * Det of a batch of square matrices by elimination with row pivots, and its gradient dy * cofactors. The gradient of a
 * singular matrix exists too: there the cofactors are computed one by one.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"

static ont_status det_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    int rank = x->shape.rank;
    if (rank < 2 || x->shape.dims[rank - 1] != x->shape.dims[rank - 2])
        return ont_fail(ONT_EINVAL, "square matrices are expected");
    if (!ont_dtype_is_float(x->dtype))
        return ont_fail(ONT_ETYPE, "x is %s, a float is expected", ont_dtype_name(x->dtype));
    ont_shape shape = ont_shape_of(rank - 2, x->shape.dims);
    return ont_infer_out(node, 0, x->dtype, &shape);
}

/* The determinant of the n x n matrix in `a`, which is overwritten. */
static double eliminate(double *a, int64_t n)
{
    double det = 1;
    for (int64_t k = 0; k < n; k++) {
        int64_t pivot = k;
        for (int64_t i = k + 1; i < n; i++)
            if (fabs(a[i * n + k]) > fabs(a[pivot * n + k])) pivot = i;
        double top = a[pivot * n + k];
        if (top == 0) return 0;
        for (int64_t j = k; j < n && pivot != k; j++) {
            double swap = a[k * n + j];
            a[k * n + j] = a[pivot * n + j];
            a[pivot * n + j] = swap;
        }
        det *= pivot == k ? top : -top;
        for (int64_t i = k + 1; i < n; i++) {
            double factor = a[i * n + k] / top;
            for (int64_t j = k + 1; j < n; j++) a[i * n + j] -= factor * a[k * n + j];
        }
    }
    return det;
}

static double get(const void *x, bool f32, int64_t i)
{
    return f32 ? (double)((const float *)x)[i] : ((const double *)x)[i];
}

static void put(void *y, bool f32, int64_t i, double v)
{
    if (f32)
        ((float *)y)[i] = (float)v;
    else
        ((double *)y)[i] = v;
}

static ont_status det_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    (void)arena;
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    int64_t n = x->dims[x->rank - 1];
    out->work_bytes = (size_t)(2 * n * n + 1) * sizeof(double);
    return ONT_OK;
}

static ont_status det_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0);
    int64_t n = x->shape.dims[x->shape.rank - 1], batch = ont_shape_count(&call->node->outputs[0]->shape);
    bool f32 = x->dtype == ONT_FLOAT32;
    double *a = call->work;
    for (int64_t i = 0; i < batch; i++) {
        for (int64_t e = 0; e < n * n; e++) a[e] = get(call->in[0], f32, i * n * n + e);
        put(call->out[0], f32, i, eliminate(a, n));
    }
    return ONT_OK;
}

static void det_grad(ont_grad *g)
{
    GI(0, ont_build2(&g->b, "ours:DetGrad", I(0), GO(0)));
}

/* The cofactor of element (row, col): the signed determinant of the matrix without that row and column. */
static double cofactor(const double *a, double *minor, int64_t n, int64_t row, int64_t col)
{
    double *to = minor;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            if (i != row && j != col) *to++ = a[i * n + j];
    double det = eliminate(minor, n - 1);
    return (row + col) % 2 ? -det : det;
}

static ont_status det_grad_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0);
    int64_t n = x->shape.dims[x->shape.rank - 1], batch = ont_shape_count(&ont_node_in(call->node, 1)->shape);
    bool f32 = x->dtype == ONT_FLOAT32;
    double *a = call->work, *minor = a + n * n;
    for (int64_t i = 0; i < batch; i++) {
        double dy = get(call->in[1], f32, i);
        for (int64_t e = 0; e < n * n; e++) a[e] = get(call->in[0], f32, i * n * n + e);
        for (int64_t e = 0; e < n * n; e++)
            put(call->out[0], f32, i * n * n + e, dy * cofactor(a, minor, n, e / n, e % n));
    }
    return ONT_OK;
}

static const ont_kernel det_kernels[] = {{.name = "det_ref", .accept = ont_accept_float, .prepare = det_prepare,
                                          .run = det_run}};
static const ont_kernel det_grad_kernels[] = {
    {.name = "det_grad_ref", .accept = ont_accept_float, .prepare = det_prepare, .run = det_grad_run},
};
const ont_op ont_op_Det = {.domain = "", .name = "Det", .since = 11, .min_inputs = 1, .max_inputs = 1, .attributes = "",
                           .infer = det_infer, .grad = det_grad, ONT_KERNELS(det_kernels)};
const ont_op ont_op_DetGrad = {.domain = ONT_DOMAIN, .name = "DetGrad", .since = 1, .min_inputs = 2, .max_inputs = 2,
                               .attributes = "", .infer = ont_infer_same, ONT_KERNELS(det_grad_kernels)};
