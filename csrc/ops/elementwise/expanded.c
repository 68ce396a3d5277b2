/*
 * Operators by expansion into a few others, which also give their gradients: Celu, ThresholdedRelu, Shrink, Hardmax,
 * LpNormalization, SwiGLU, OneHot, Tile, TensorScatter.
 */
#include <string.h>

#include "ops/op.h"

#define FAIL(code, ...) \
    do { \
        ont_build_fail(b, code, __VA_ARGS__); \
        return; \
    } while (0)
#define U(op, x) ont_build1(b, op, (x))
#define B(op, x, y) ont_build2(b, op, (x), (y))
#define WHERE(c, x, y) ont_build3(b, "Where", (c), (x), (y))
#define SCALAR(value) ont_build_scalar(b, x->dtype, (value))

static ont_status float_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (!ont_dtype_is_float(x->dtype))
        return ont_fail(ONT_ETYPE, "input is %s, a float is expected", ont_dtype_name(x->dtype));
    return ont_infer_same(g, node);
}

/* x where it is positive, else alpha (exp(x / alpha) - 1); positive numbers are kept from exp(), which would
 * overflow */
static void celu_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *alpha = SCALAR(ont_attr_float(node, "alpha", 1.0)), *zero = SCALAR(0);
    ont_value *positive = B("Greater", x, zero);
    ont_value *low = WHERE(positive, zero, x);
    outputs[0] = WHERE(positive, x, B("Mul", alpha, B("Sub", U("Exp", B("Div", low, alpha)), SCALAR(1))));
}

static void thresholded_relu_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    outputs[0] = WHERE(B("Greater", x, SCALAR(ont_attr_float(node, "alpha", 1.0))), x, SCALAR(0));
}

/* Integers are computed in double, since bias and lambd may be fractions. */
static void shrink_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    ont_dtype dtype = x->dtype;
    if (!ont_dtype_is_float(dtype)) x = ont_build_cast(b, x, ONT_FLOAT64);
    if (!x) return;
    double lambda = ont_attr_float(node, "lambd", 0.5);
    ont_value *bias = SCALAR(ont_attr_float(node, "bias", 0.0));
    ont_value *above = WHERE(B("Greater", x, SCALAR(lambda)), B("Sub", x, bias), SCALAR(0));
    outputs[0] = ont_build_cast(b, WHERE(B("Less", x, SCALAR(-lambda)), B("Add", x, bias), above), dtype);
}

/* x as (product of dims before axis, product of the others): operators before opset 13 read an axis so. */
static ont_shape flattened(const ont_shape *x, int axis)
{
    return ont_shape_of(2, (int64_t[]){ont_shape_count_range(x, 0, axis), ont_shape_count_range(x, axis, x->rank)});
}

/* Positions 0, 1, ... along `axis` of a tensor of that rank, in a shape that broadcasts to it. */
static ont_value *positions(ont_builder *b, int64_t n, int axis, int rank)
{
    ont_value *zero = ont_build_scalar(b, ONT_INT64, 0), *one = ont_build_scalar(b, ONT_INT64, 1);
    ont_shape shape = {.rank = rank};
    for (int d = 0; d < rank; d++) shape.dims[d] = d == axis ? n : 1;
    return ont_build_reshape(b, ont_build3(b, "Range", zero, ont_build_scalar(b, ONT_INT64, (double)n), one), &shape);
}

static void hardmax_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    bool flattens = node->version < 13;
    int axis;
    b->status = ont_shape_axis(ont_attr_int(node, "axis", flattens ? 1 : -1), x->shape.rank, &axis);
    if (b->status != ONT_OK) return;
    ont_shape shape = x->shape, flat = flattened(&shape, axis);
    if (flattens) x = ont_build_reshape(b, x, &flat);
    if (flattens) axis = 1;
    if (!x) return;
    if (!ont_shape_count(&shape)) {
        outputs[0] = ont_node_in(node, 0);
        return;
    }
    ont_node *arg = ont_build_node(b, "", "ArgMax", &x, 1, 1);
    if (arg) b->status = ont_attr_set_int(b->graph, arg, "axis", axis);
    ont_value *most = ont_build_done(b, arg);
    ont_value *hit = B("Equal", most, positions(b, x->shape.dims[axis], axis, x->shape.rank));
    outputs[0] = ont_build_reshape(b, ont_build_cast(b, hit, x->dtype), &shape);
}

/* Where the norm is 0, the result is 0. */
static void lp_normalization_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    int axis;
    int64_t p = ont_attr_int(node, "p", 2);
    b->status = ont_shape_axis(ont_attr_int(node, "axis", -1), x->shape.rank, &axis);
    if (p != 1 && p != 2) ont_build_fail(b, ONT_EINVAL, "p is %lld, expected 1 or 2", (long long)p);
    if (b->status != ONT_OK) return;
    ont_value *norm = ont_build_reduce(b, p == 1 ? "ReduceL1" : "ReduceL2", x, &(int64_t){axis}, 1, true);
    ont_value *flat = B("Equal", norm, SCALAR(0));
    outputs[0] = WHERE(flat, SCALAR(0), B("Div", x, WHERE(flat, SCALAR(1), norm)));
}

static ont_status swiglu_infer(ont_graph *g, ont_node *node)
{
    ont_value *gate, *x;
    ONT_TRY(ont_need_input(node, 0, &gate));
    ONT_TRY(ont_need_input(node, 1, &x));
    if (!ont_shape_equal(&gate->shape, &x->shape)) return ont_fail(ONT_EINVAL, "A and B differ in shape");
    ONT_TRY(ont_infer_broadcast(g, node));
    return float_infer(g, node);
}

static void swiglu_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_node *swish = ont_build_node(b, "", "Swish", (ont_value *[]){ont_node_in(node, 0)}, 1, 1);
    if (swish) b->status = ont_attr_set_float(b->graph, swish, "alpha", ont_attr_float(node, "alpha", 1.0));
    outputs[0] = B("Mul", ont_build_done(b, swish), ont_node_in(node, 1));
}

/* ---- OneHot: values[1] where the index equals the position, else values[0]; indices have any numeric dtype ---- */

static void one_hot_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *indices = ont_node_in(node, 0), *values = ont_node_in(node, 2);
    double depth;
    int axis, rank = indices ? indices->shape.rank + 1 : 1;
    if (!indices || !values) FAIL(ONT_EINVAL, "an input is missing");
    if ((b->status = ont_const_scalar(node, 1, &depth)) != ONT_OK) return;
    if (!(depth >= 1 && depth < 0x1p40)) FAIL(ONT_EINVAL, "depth is %g, expected 1 to 2^40", depth);
    if (rank > ONT_MAX_RANK) FAIL(ONT_EUNSUPPORTED, "rank %d, at most %d", rank, ONT_MAX_RANK);
    if (values->shape.rank != 1 || values->shape.dims[0] != 2)
        FAIL(ONT_EINVAL, "values must be two numbers: off_value and on_value");
    if ((b->status = ont_shape_axis(ont_attr_int(node, "axis", -1), rank, &axis)) != ONT_OK) return;
    ont_shape wide = {.rank = rank};
    for (int d = 0, from = 0; d < rank; d++) wide.dims[d] = d == axis ? 1 : indices->shape.dims[from++];
    int64_t n = (int64_t)depth;
    ont_value *index = ont_build_reshape(b, ont_build_cast(b, indices, ONT_INT64), &wide);
    ont_value *zero = ont_build_scalar(b, ONT_INT64, 0), *size = ont_build_scalar(b, ONT_INT64, (double)n);
    index = WHERE(B("Less", index, zero), B("Add", index, size), index);
    ont_value *off = B("Gather", values, zero), *on = B("Gather", values, ont_build_scalar(b, ONT_INT64, 1));
    outputs[0] = WHERE(B("Equal", index, positions(b, n, axis, rank)), on, off);
}

/* ---- Tile: Expand of inserted dims, (d0, d1) -> (r0, d0, r1, d1) -> (r0 * d0, r1 * d1) ---- */

static void tile_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    int64_t repeats[ONT_MAX_RANK];
    int n;
    if (!x) FAIL(ONT_EINVAL, "input 0 is missing");
    if ((b->status = ont_const_ints(node, 1, NULL, repeats, ONT_MAX_RANK, &n)) != ONT_OK) return;
    if (n != x->shape.rank) FAIL(ONT_EINVAL, "%d repeats, the input has rank %d", n, x->shape.rank);
    ont_shape split = {0}, wide = {0}, result = x->shape;
    for (int d = 0; d < n; d++) {
        if (repeats[d] < 0) FAIL(ONT_EINVAL, "repeats[%d] is %lld, at least 0 is expected", d, (long long)repeats[d]);
        result.dims[d] = x->shape.dims[d] * repeats[d];
        bool between = repeats[d] != 1 && x->shape.dims[d] != 1;
        if (split.rank + between >= ONT_MAX_RANK) FAIL(ONT_EUNSUPPORTED, "too many repeated dims");
        if (between) {
            split.dims[split.rank++] = 1;
            wide.dims[wide.rank++] = repeats[d];
        }
        split.dims[split.rank++] = x->shape.dims[d];
        wide.dims[wide.rank++] = between ? x->shape.dims[d] : result.dims[d];
    }
    if (ont_shape_equal(&result, &x->shape)) {
        outputs[0] = x;
        return;
    }
    ont_value *spread = ont_build_reshape(b, x, &split);
    if (!ont_shape_equal(&split, &wide))
        spread = B("Expand", spread, ont_build_const_ints(b, wide.dims, (size_t)wide.rank));
    outputs[0] = ont_build_reshape(b, spread, &result);
}

/* ---- TensorScatter: writes a window of the cache along an axis, at a position for each batch entry ---- */

static ont_status tensor_scatter_infer(ont_graph *g, ont_node *node)
{
    ont_value *cache, *update, *where = ont_node_in(node, 2);
    int axis;
    ONT_TRY(ont_need_input(node, 0, &cache));
    ONT_TRY(ont_need_input(node, 1, &update));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", -2), cache->shape.rank, &axis));
    const char *mode = ont_attr_string(node, "mode", "linear");
    if (strcmp(mode, "linear") && strcmp(mode, "circular"))
        return ont_fail(ONT_EUNSUPPORTED, "attribute mode is '%s', expected linear or circular", mode);
    if (!axis) return ont_fail(ONT_EINVAL, "axis is 0, which is the batch: another axis is expected");
    ont_shape expected = cache->shape;
    char a[ONT_SHAPE_TEXT], c[ONT_SHAPE_TEXT];
    if (update->shape.rank == expected.rank && update->shape.dims[axis] <= expected.dims[axis])
        expected.dims[axis] = update->shape.dims[axis];
    if (update->dtype != cache->dtype || !ont_shape_equal(&update->shape, &expected))
        return ont_fail(ONT_EINVAL, "update is %s%s, the cache %s%s", ont_dtype_name(update->dtype),
                        ont_shape_text(&update->shape, a), ont_dtype_name(cache->dtype),
                            ont_shape_text(&cache->shape, c));
    if (where && (where->shape.rank != 1 || where->shape.dims[0] != cache->shape.dims[0]))
        return ont_fail(ONT_EINVAL, "write_indices has shape %s, one index per batch entry is expected",
                        ont_shape_text(&where->shape, a));
    return ont_infer_same(g, node);
}

static void tensor_scatter_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *cache = ont_node_in(node, 0), *update = ont_node_in(node, 1), *where = ont_node_in(node, 2);
    int axis, rank = cache->shape.rank;
    b->status = ont_shape_axis(ont_attr_int(node, "axis", -2), rank, &axis);
    if (b->status != ONT_OK) return;
    ont_value *at = positions(b, update->shape.dims[axis], axis, rank);
    ont_shape per_batch = {.rank = rank};
    for (int d = 0; d < rank; d++) per_batch.dims[d] = d ? 1 : cache->shape.dims[0];
    if (where) at = B("Add", at, ont_build_reshape(b, ont_build_cast(b, where, ONT_INT64), &per_batch));
    if (!strcmp(ont_attr_string(node, "mode", "linear"), "circular"))
        at = B("Mod", at, ont_build_scalar(b, ONT_INT64, (double)cache->shape.dims[axis]));
    at = B("Expand", at, ont_build_const_ints(b, update->shape.dims, (size_t)rank));
    if (b->status != ONT_OK) return;
    ont_node *scatter = ont_build_node(b, "", "ScatterElements", (ont_value *[]){cache, at, update}, 3, 1);
    if (scatter) b->status = ont_attr_set_int(b->graph, scatter, "axis", axis);
    outputs[0] = ont_build_done(b, scatter);
}

#define FORMULA(name_, since_, n_, attributes_, infer_, expand_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = since_, .min_inputs = n_, .max_inputs = n_, \
                                   .attributes = attributes_, .infer = infer_, .expand = expand_}
FORMULA(Celu, 12, 1, "alpha:f", float_infer, celu_expand);
FORMULA(ThresholdedRelu, 1, 1, "alpha:f", float_infer, thresholded_relu_expand);
FORMULA(Shrink, 9, 1, "bias:f lambd:f", ont_infer_same, shrink_expand);
FORMULA(Hardmax, 1, 1, "axis:i", float_infer, hardmax_expand);
FORMULA(LpNormalization, 1, 1, "axis:i p:i", float_infer, lp_normalization_expand);
FORMULA(SwiGLU, 28, 2, "alpha:f", swiglu_infer, swiglu_expand);
FORMULA(Tile, 6, 2, "", NULL, tile_expand);
const ont_op ont_op_OneHot = {.domain = "", .name = "OneHot", .since = 9, .min_inputs = 3, .max_inputs = 3,
                              .nondiff_inputs = 3, .attributes = "axis:i", .expand = one_hot_expand};
const ont_op ont_op_TensorScatter = {.domain = "", .name = "TensorScatter", .since = 24, .min_inputs = 2,
                                     .max_inputs = 3,
                                     .nondiff_inputs = 4, .attributes = "axis:i mode:s", .infer = tensor_scatter_infer,
                                     .expand = tensor_scatter_expand};
