/*
 * MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv, expanded into float64 MatMul and Conv, which are exact for
 * 8-bit operands; the result is converted back to integers.
 */
#include "ops/op.h"

#define B(op, x, y) ont_build2(b, op, (x), (y))
#define FAIL(code, ...) \
    do { \
        ont_build_fail(b, code, __VA_ARGS__); \
        return NULL; \
    } while (0)

/* Reshapes v (n) to broadcast along `axis` of a tensor of that rank; a single element becomes a scalar. */
static ont_value *along_axis(ont_builder *b, ont_value *v, int axis, int rank)
{
    ont_shape shape = {0};
    if (!v || b->status != ONT_OK) return NULL;
    int64_t n = ont_shape_count(&v->shape);
    if (v->shape.rank > 1 && n > 1) return v; /* has a shape that broadcasts already */
    if (n != 1) shape.rank = rank;
    for (int d = 0; d < shape.rank; d++) shape.dims[d] = d == axis ? n : 1;
    return ont_build_reshape(b, v, &shape);
}

/* x - zero in float64; a zero point with several elements lies along `axis`. */
static ont_value *dequantized(ont_builder *b, ont_value *x, ont_value *zero, int axis)
{
    if (b->status != ONT_OK) return NULL;
    if (!x) FAIL(ONT_EINVAL, "an input is missing");
    bool float8 = ont_dtype_is_narrow_float(x->dtype);
    if (x->dtype != ONT_INT8 && x->dtype != ONT_UINT8 && !float8)
        FAIL(ONT_ETYPE, "'%s' is %s, expected int8, uint8 or a float8", x->name, ont_dtype_name(x->dtype));
    if (zero && zero->dtype != x->dtype) FAIL(ONT_ETYPE, "'%s' and its zero point differ in dtype", x->name);
    ont_value *wide = ont_build_cast(b, x, ONT_FLOAT64);
    if (!zero) return wide;
    return B("Sub", wide, along_axis(b, ont_build_cast(b, zero, ONT_FLOAT64), axis, x->shape.rank));
}

/* To int32; overflow wraps, as it would in an int32 accumulator. */
static ont_value *as_int32(ont_builder *b, ont_value *x)
{
    return ont_build_cast(b, ont_build_cast(b, x, ONT_INT64), ONT_INT32);
}

/* The axis `back` before the last one. */
static int axis_from_end(const ont_value *x, int back)
{
    return x && x->shape.rank > back ? x->shape.rank - 1 - back : 0;
}

static void matmul_integer_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *lhs = ont_node_in(node, 0), *rhs = ont_node_in(node, 1);
    ont_value *x = dequantized(b, lhs, ont_node_in(node, 2), axis_from_end(lhs, 1)),
        *y = dequantized(b, rhs, ont_node_in(node, 3), axis_from_end(rhs, 0));
    outputs[0] = as_int32(b, B("MatMul", x, y));
}

static ont_value *conv_of(ont_builder *b, const ont_node *node, ont_value *x, ont_value *w, ont_value *bias)
{
    if (b->status != ONT_OK) return NULL;
    ont_node *conv = ont_build_node(b, "", "Conv", (ont_value *[]){x, w, bias}, bias ? 3 : 2, 1);
    if (conv) b->status = ont_attr_copy_all(b->graph, conv, node);
    return ont_build_done(b, conv);
}

static void conv_integer_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = dequantized(b, ont_node_in(node, 0), ont_node_in(node, 2), 1),
        *w = dequantized(b, ont_node_in(node, 1), ont_node_in(node, 3), 0);
    outputs[0] = as_int32(b, conv_of(b, node, x, w, NULL));
}

/* saturate(round(sum * (sx * sw / sy)) + zero): QuantizeLinear with scale sy / (sx * sw). */
static ont_value *requantized(ont_builder *b, ont_value *sum, ont_value *sx, ont_value *sw, ont_value *sy,
                              ont_value *zero)
{
    if (b->status != ONT_OK) return NULL;
    if (!sx || !sw || !sy || !zero) FAIL(ONT_EINVAL, "a scale or the zero point is missing");
    ont_value *factor = ont_build_cast(b, B("Div", B("Mul", sx, sw), sy), ONT_FLOAT64);
    ont_value *scaled = B("Mul", sum, factor);
    if (ont_dtype_is_narrow_float(zero->dtype)) return ont_build_cast(b, scaled, zero->dtype);
    ont_shape scalar = {0};
    if (ont_shape_count(&zero->shape) != 1) FAIL(ONT_EUNSUPPORTED, "the zero point of the result must be a scalar");
    bool byte = zero->dtype == ONT_UINT8;
    ont_value *level = B("Add", ont_build1(b, "Round", scaled), ont_build_reshape(b,
            ont_build_cast(b, zero, ONT_FLOAT64), &scalar));
    level = ont_build3(b, "Clip", level, ont_build_scalar(b, ONT_FLOAT64, byte ? 0 : -128),
                       ont_build_scalar(b, ONT_FLOAT64, byte ? 255 : 127));
    return ont_build_cast(b, level, zero->dtype);
}

static void qlinear_matmul_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *lhs = ont_node_in(node, 0), *rhs = ont_node_in(node, 3);
    ont_value *x = dequantized(b, lhs, ont_node_in(node, 2), axis_from_end(lhs, 1)),
        *y = dequantized(b, rhs, ont_node_in(node, 5), axis_from_end(rhs, 0));
    ont_value *sum = B("MatMul", x, y);
    if (b->status != ONT_OK) return;
    ont_value *sx = along_axis(b, ont_node_in(node, 1), axis_from_end(lhs, 1), lhs->shape.rank);
    ont_value *sy = along_axis(b, ont_node_in(node, 4), axis_from_end(rhs, 0), rhs->shape.rank);
    ont_value *scale = along_axis(b, ont_node_in(node, 6), axis_from_end(sum, 1), sum->shape.rank);
    outputs[0] = requantized(b, sum, sx, sy, scale, ont_node_in(node, 7));
}

static void qlinear_conv_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = dequantized(b, ont_node_in(node, 0), ont_node_in(node, 2), 1),
        *w = dequantized(b, ont_node_in(node, 3), ont_node_in(node, 5), 0);
    ont_value *bias = ont_node_in(node, 8);
    ont_value *sum = conv_of(b, node, x, w, bias ? ont_build_cast(b, bias, ONT_FLOAT64) : NULL);
    if (b->status != ONT_OK) return;
    int rank = sum->shape.rank;
    ont_value *sw = along_axis(b, ont_node_in(node, 4), 1, rank), *sx = along_axis(b, ont_node_in(node, 1), 1, rank);
    outputs[0] = requantized(b, sum, sx, sw, along_axis(b, ont_node_in(node, 6), 1, rank), ont_node_in(node, 7));
}

#define CONV_ATTRIBUTES "auto_pad:s dilations:I group:i kernel_shape:I pads:I strides:I"
#define QUANTIZED_OP(name_, min_inputs_, max_inputs_, attributes_, expand_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 10, .min_inputs = min_inputs_, \
                                   .max_inputs = max_inputs_, \
                                   .nondiff_outputs = 1, .attributes = attributes_, .expand = expand_}
QUANTIZED_OP(MatMulInteger, 2, 4, "", matmul_integer_expand);
QUANTIZED_OP(ConvInteger, 2, 4, CONV_ATTRIBUTES, conv_integer_expand);
QUANTIZED_OP(QLinearMatMul, 8, 8, "", qlinear_matmul_expand);
QUANTIZED_OP(QLinearConv, 8, 9, CONV_ATTRIBUTES, qlinear_conv_expand);
