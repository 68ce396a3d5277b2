/*
 * RMSNormalization by expansion: y = scale * x / sqrt(mean(x^2) + epsilon), with the statistics in float32 where x is
 * narrower. Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
 */
#include "ops/op.h"

static ont_status rms_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *scale;
    int axis;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &scale));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", -1), x->shape.rank, &axis));
    if (!ont_dtype_is_float(x->dtype) || !ont_dtype_is_float(scale->dtype))
        return ont_fail(ONT_ETYPE, "x is %s and scale %s, floats are expected", ont_dtype_name(x->dtype),
                        ont_dtype_name(scale->dtype));
    int64_t stash = ont_attr_int(node, "stash_type", ONT_FLOAT32);
    if (stash < 0 || stash >= ONT_DTYPE_COUNT || !ont_dtype_is_float((ont_dtype)stash))
        return ont_fail(ONT_EINVAL, "stash_type is %lld, a float type is expected", (long long)stash);
    ont_shape shape;
    ONT_TRY(ont_shape_broadcast(&x->shape, &scale->shape, &shape));
    if (!ont_shape_equal(&shape, &x->shape)) return ont_fail(ONT_EINVAL, "scale does not broadcast to x");
    return ont_infer_out(node, 0, scale->dtype, &x->shape);
}

static void rms_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *scale = ont_node_in(node, 1);
    ont_dtype wide = (ont_dtype)ont_attr_int(node, "stash_type", ONT_FLOAT32);
    if (ont_dtype_size(x->dtype) > ont_dtype_size(wide)) wide = x->dtype;
    int axis;
    b->status = ont_shape_axis(ont_attr_int(node, "axis", -1), x->shape.rank, &axis);
    if (b->status != ONT_OK) return;
    int64_t axes[ONT_MAX_RANK];
    size_t n = 0;
    for (int i = axis; i < x->shape.rank; i++) axes[n++] = i;
    ont_value *xw = ont_build_cast(b, x, wide);
    ont_value *mean = ont_build_reduce(b, "ReduceMean", ont_build2(b, "Mul", xw, xw), axes, n, true);
    ont_value *eps = ont_build_scalar(b, wide, ont_attr_float(node, "epsilon", 1e-5));
    ont_value *rms = ont_build1(b, "Sqrt", ont_build2(b, "Add", mean, eps));
    ont_value *normal = ont_build_cast(b, ont_build2(b, "Div", xw, rms), scale->dtype);
    outputs[0] = ont_build2(b, "Mul", normal, scale);
}

const ont_op ont_op_RMSNormalization = {.domain = "", .name = "RMSNormalization", .since = 23, .min_inputs = 2,
                                        .max_inputs = 2, .attributes = "axis:i epsilon:f stash_type:i",
                                        .infer = rms_infer, .expand = rms_expand};
