/*
 * Normalisations by expansion: LRN and MeanVarianceNormalization.
 */
#include <inttypes.h>

#include "ops/support/compose.h"

static ont_status need_float(const ont_node *node, ont_value **x)
{
    ONT_TRY(ont_need_input(node, 0, x));
    if (!ont_dtype_is_float((*x)->dtype))
        return ont_fail(ONT_ETYPE, "the input is %s, expected a float", ont_dtype_name((*x)->dtype));
    return ONT_OK;
}

/* ---- LRN: y = x / (bias + alpha / size * sum of squares over neighbouring channels)^beta ---- */

static ont_status lrn_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(need_float(node, &x));
    int64_t size = ont_attr_int(node, "size", 0);
    if (x->shape.rank < 2) return ont_fail(ONT_EINVAL, "the input has rank %d, expected at least 2", x->shape.rank);
    if (size < 1 || size > INT32_MAX)
        return ont_fail(ONT_EINVAL, "size is %" PRId64 ", expected 1 to %d", size, INT32_MAX);
    return ont_infer_out(node, 0, x->dtype, &x->shape);
}

/* The mean of squares, with channels outside counted as zeros, is an average pooling over (channels, positions). */
static void lrn_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    int64_t size = ont_attr_int(node, "size", 1);
    if (!ont_shape_count(&x->shape)) {
        outputs[0] = x;
        return;
    }
    ont_dtype wide = ont_dtype_size(x->dtype) < 4 ? ONT_FLOAT32 : x->dtype;
    ont_shape plane = {.rank = 4,
                       .dims = {x->shape.dims[0], 1, x->shape.dims[1],
                                ont_shape_count_range(&x->shape, 2, x->shape.rank)}};
    ont_value *xw = ont_build_cast(b, x, wide);
    ont_value *squares = ont_build_reshape(b, ont_build2(b, "Mul", xw, xw), &plane);
    ont_node *pool = ont_build_node(b, "", "AveragePool", &squares, 1, 1);
    if (pool) b->status = ont_attr_set_ints(b->graph, pool, "kernel_shape", (int64_t[]){size, 1}, 2);
    if (b->status == ONT_OK)
        b->status = ont_attr_set_ints(b->graph, pool, "pads", (int64_t[]){(size - 1) / 2, 0, size / 2, 0}, 4);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, pool, "count_include_pad", 1);
    ont_value *mean = ont_build_reshape(b, ont_build_done(b, pool), &x->shape);
    ont_value *base = ont_build_shift(b, ont_build_scale(b, mean, ont_attr_float(node, "alpha", 1e-4)),
                                      ont_attr_float(node, "bias", 1));
    ont_value *power = ont_build2(b, "Pow", base, ont_build_scalar(b, wide, ont_attr_float(node, "beta", 0.75)));
    outputs[0] = ont_build_cast(b, ont_build2(b, "Div", xw, power), x->dtype);
}

/* ---- MeanVarianceNormalization: (x - mean) / (deviation + 1e-9) ---- */

static ont_status mvn_axes(const ont_node *node, const ont_shape *x, int64_t *axes, int *n)
{
    ONT_TRY(ont_const_ints(node, -1, "axes", axes, ONT_MAX_RANK, n));
    if (*n < 0) {
        *n = 3;
        axes[0] = 0, axes[1] = 2, axes[2] = 3;
    }
    for (int i = 0; i < *n; i++) {
        int axis;
        ONT_TRY(ont_shape_axis(axes[i], x->rank, &axis));
        for (int j = 0; j < i; j++)
            if (axes[j] == axis) return ont_fail(ONT_EINVAL, "axes names axis %d twice", axis);
        axes[i] = axis;
    }
    return ONT_OK;
}

static ont_status mvn_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    int64_t axes[ONT_MAX_RANK];
    int n;
    ONT_TRY(need_float(node, &x));
    ONT_TRY(mvn_axes(node, &x->shape, axes, &n));
    return ont_infer_out(node, 0, x->dtype, &x->shape);
}

static void mvn_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    int64_t axes[ONT_MAX_RANK];
    int n;
    b->status = mvn_axes(node, &x->shape, axes, &n);
    if (b->status != ONT_OK) return;
    ont_dtype wide = ont_dtype_size(x->dtype) < 4 ? ONT_FLOAT32 : x->dtype;
    ont_value *xw = ont_build_cast(b, x, wide);
    ont_value *centred = ont_build2(b, "Sub", xw, ont_build_reduce(b, "ReduceMean", xw, axes, (size_t)n, true));
    ont_value *variance = ont_build_reduce(b, "ReduceMean", ont_build2(b, "Mul", centred, centred), axes, (size_t)n,
                                           true);
    ont_value *divisor = ont_build_shift(b, ont_build1(b, "Sqrt", variance), 1e-9);
    outputs[0] = ont_build_cast(b, ont_build2(b, "Div", centred, divisor), x->dtype);
}

const ont_op ont_op_LRN = {.domain = "", .name = "LRN", .since = 1, .min_inputs = 1, .max_inputs = 1,
                           .attributes = "alpha:f beta:f bias:f size:i", .infer = lrn_infer, .expand = lrn_expand};
const ont_op ont_op_MeanVarianceNormalization = {.domain = "", .name = "MeanVarianceNormalization", .since = 9,
                                                 .min_inputs = 1, .max_inputs = 1, .attributes = "axes:I",
                                                 .infer = mvn_infer, .expand = mvn_expand};
