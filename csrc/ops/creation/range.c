/*
 * Operators that make values from shapes: Range and ConstantOfShape; and Trilu, which keeps a triangle.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"

/* ---- Range ---- */

static ont_status range_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    double start, limit, step;
    ONT_TRY(ont_const_scalar(node, 0, &start));
    ONT_TRY(ont_const_scalar(node, 1, &limit));
    ONT_TRY(ont_const_scalar(node, 2, &step));
    for (uint32_t i = 1; i < 3; i++)
        if (ont_node_in(node, i)->dtype != ont_node_in(node, 0)->dtype)
            return ont_fail(ONT_ETYPE, "input %u is %s, start is %s", i, ont_dtype_name(ont_node_in(node, i)->dtype),
                            ont_dtype_name(ont_node_in(node, 0)->dtype));
    if (step == 0) return ont_fail(ONT_EINVAL, "delta is 0, another number is expected");
    double n = ceil((limit - start) / step);
    if (!(n < 0x1p40)) return ont_fail(ONT_EINVAL, "the range has %g entries, which is too many", n);
    ont_shape shape = {.rank = 1, .dims = {n > 0 ? (int64_t)n : 0}};
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

static const char *range_accept(const ont_node *node)
{
    ont_dtype d = node->outputs[0]->dtype;
    return d == ONT_FLOAT32 || d == ONT_FLOAT64 || d == ONT_INT32 || d == ONT_INT64 ? NULL : "dtype";
}

#define FILL_RANGE(type) \
    do { \
        type start = *(const type *)call->in[0], step = *(const type *)call->in[2]; \
        for (int64_t i = 0; i < n; i++) ((type *)call->out[0])[i] = start + (type)i * step; \
    } while (0)

static ont_status range_run(const ont_call *call)
{
    int64_t n = call->node->outputs[0]->shape.dims[0];
    switch (call->node->outputs[0]->dtype) {
    case ONT_FLOAT32: FILL_RANGE(float); break;
    case ONT_FLOAT64: FILL_RANGE(double); break;
    case ONT_INT32: FILL_RANGE(int32_t); break;
    default: FILL_RANGE(int64_t); break;
    }
    return ONT_OK;
}

static const ont_kernel range_kernels[] = {{.name = "range_ref", .accept = range_accept, .run = range_run}};
const ont_op ont_op_Range = {.domain = "", .name = "Range", .since = 11, .min_inputs = 3, .max_inputs = 3,
                             .flags = ONT_OP_NO_GRAD, .attributes = "stash_type:i", .infer = range_infer,
                             ONT_KERNELS(range_kernels)};

/* ---- ConstantOfShape ---- */

static ont_status constant_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    int64_t dims[ONT_MAX_RANK];
    int n;
    ONT_TRY(ont_const_ints(node, 0, NULL, dims, ONT_MAX_RANK, &n));
    if (n < 0) return ont_fail(ONT_EINVAL, "no shape is given");
    const ont_attr *value = ont_attr_find(node, "value", ONT_ATTR_TENSOR);
    if (value && ont_shape_count(&value->tensor->shape) != 1) return ont_fail(ONT_EINVAL, "value must be one element");
    ont_shape shape = ont_shape_of(n, dims);
    return ont_infer_out(node, 0, value ? value->tensor->dtype : ONT_FLOAT32, &shape);
}

static ont_status constant_run(const ont_call *call)
{
    const ont_value *out = call->node->outputs[0];
    const ont_attr *value = ont_attr_find(call->node, "value", ONT_ATTR_TENSOR);
    size_t size = ont_dtype_size(out->dtype), n = (size_t)ont_shape_count(&out->shape);
    if (!value)
        memset(call->out[0], 0, n * size);
    else
        for (size_t i = 0; i < n; i++) memcpy((char *)call->out[0] + i * size, value->tensor->data, size);
    return ONT_OK;
}

static const ont_kernel constant_kernels[] = {
    {.name = "constant_of_shape_ref", .accept = ont_accept_any, .run = constant_run}};
const ont_op ont_op_ConstantOfShape = {.domain = "", .name = "ConstantOfShape", .since = 9, .min_inputs = 1,
                                       .max_inputs = 1, .flags = ONT_OP_NO_GRAD, .attributes = "value:t",
                                       .infer = constant_infer, ONT_KERNELS(constant_kernels)};

/* ---- Trilu ---- */

static ont_status trilu_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    double k = 0;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (x->shape.rank < 2) return ont_fail(ONT_EINVAL, "the input has rank %d, at least 2 is expected", x->shape.rank);
    const ont_value *diagonal = ont_node_in(node, 1);
    if (diagonal && diagonal->dtype != ONT_INT64)
        return ont_fail(ONT_ETYPE, "k is %s, int64 is expected", ont_dtype_name(diagonal->dtype));
    if (diagonal) ONT_TRY(ont_const_scalar(node, 1, &k));
    return ont_infer_same(g, node);
}

static void trilu_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_shape *x = &call->node->outputs[0]->shape;
    int64_t rows = x->dims[x->rank - 2], cols = x->dims[x->rank - 1], k = 0;
    size_t size = ont_dtype_size(call->node->outputs[0]->dtype);
    bool upper = ont_attr_int(call->node, "upper", 1);
    if (call->node->n_inputs > 1 && call->in[1]) memcpy(&k, call->in[1], sizeof k);
    k = k < -rows ? -rows : k > cols ? cols : k; /* so that no sum overflows */
    for (int64_t i = first; i < last; i++) {
        /* Columns that are kept: [edge, cols) for the upper triangle, [0, edge) for the lower. */
        int64_t edge = i % rows + k + !upper;
        edge = edge < 0 ? 0 : edge > cols ? cols : edge;
        const char *from = (const char *)call->in[0] + (size_t)(i * cols) * size;
        char *to = (char *)call->out[0] + (size_t)(i * cols) * size;
        int64_t keep = upper ? edge : 0, end = upper ? cols : edge;
        memset(to, 0, (size_t)keep * size);
        if (to != from) memcpy(to + (size_t)keep * size, from + (size_t)keep * size, (size_t)(end - keep) * size);
        memset(to + (size_t)end * size, 0, (size_t)(cols - end) * size);
    }
}

static ont_status trilu_run(const ont_call *call)
{
    const ont_shape *x = &call->node->outputs[0]->shape;
    int64_t cols = x->dims[x->rank - 1];
    if (cols) ont_parallel(ont_shape_count(x) / cols, 16384 / cols + 1, trilu_rows, (void *)call);
    return ONT_OK;
}

static void trilu_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_node *node = ont_build_node(b, "", "Trilu", (ont_value *[]){GO(0), I(1)}, 2, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    GI(0, ont_build_done(b, node));
}

static const ont_kernel trilu_kernels[] = {
    {.name = "trilu_ref", .accept = ont_accept_any, .run = trilu_run, .inplace = 1}};
const ont_op ont_op_Trilu = {.domain = "", .name = "Trilu", .since = 14, .min_inputs = 1, .max_inputs = 2,
                             .nondiff_inputs = 2, .attributes = "upper:i", .infer = trilu_infer, .grad = trilu_grad,
                             ONT_KERNELS(trilu_kernels)};
