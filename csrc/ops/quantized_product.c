/*
 * MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv: products of small integers by expansion, computed in
 * double, which holds them exactly, and brought back to integers at the end.
 */
#include "ops/op.h"

#define B(op, x, y) ont_build2(b, op, (x), (y))
#define FAIL(code, ...) \
    do { \
        ont_build_fail(b, code, __VA_ARGS__); \
        return NULL; \
    } while (0)

/* v with its entries along dim `axis` of a tensor of that rank; one entry stays one. */
static ont_value *placed(ont_builder *b, ont_value *v, int axis, int rank)
{
    ont_shape shape = {0};
    if (!v || b->status != ONT_OK) return NULL;
    int64_t n = ont_shape_count(&v->shape);
    if (v->shape.rank > 1 && n > 1) return v; /* already in the shape in which it broadcasts */
    if (n != 1) shape.rank = rank;
    for (int d = 0; d < shape.rank; d++) shape.dims[d] = d == axis ? n : 1;
    return ont_build_reshape(b, v, &shape);
}

/* x - zero in double, the zero point along `axis` where it has several entries. */
static ont_value *centred(ont_builder *b, ont_value *x, ont_value *zero, int axis)
{
    if (b->status != ONT_OK) return NULL;
    if (!x) FAIL(ONT_EINVAL, "an input is missing");
    bool float8 = ont_dtype_is_narrow_float(x->dtype);
    if (x->dtype != ONT_INT8 && x->dtype != ONT_UINT8 && !float8)
        FAIL(ONT_ETYPE, "'%s' is %s, expected int8, uint8 or a float8", x->name, ont_dtype_name(x->dtype));
    if (zero && zero->dtype != x->dtype) FAIL(ONT_ETYPE, "'%s' and its zero point differ in dtype", x->name);
    ont_value *wide = ont_build_cast(b, x, ONT_FLOAT64);
    if (!zero) return wide;
    return B("Sub", wide, placed(b, ont_build_cast(b, zero, ONT_FLOAT64), axis, x->shape.rank));
}

/* To int32; what does not fit wraps, as a sum in int32 would. */
static ont_value *as_int32(ont_builder *b, ont_value *x)
{
    return ont_build_cast(b, ont_build_cast(b, x, ONT_INT64), ONT_INT32);
}

static int last_but(const ont_value *x, int back)
{
    return x && x->shape.rank > back ? x->shape.rank - 1 - back : 0;
}

static void matmul_integer_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *lhs = ont_node_in(node, 0), *rhs = ont_node_in(node, 1);
    ont_value *x = centred(b, lhs, ont_node_in(node, 2), last_but(lhs, 1)),
        *y = centred(b, rhs, ont_node_in(node, 3), last_but(rhs, 0));
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
    ont_value *x = centred(b, ont_node_in(node, 0), ont_node_in(node, 2), 1),
        *w = centred(b, ont_node_in(node, 1), ont_node_in(node, 3), 0);
    outputs[0] = as_int32(b, conv_of(b, node, x, w, NULL));
}

/* round(sum * (sx * sw / sy)) + zero, saturated, as QuantizeLinear with scale sy / (sx sw) does it. */
static ont_value *requantized(ont_builder *b, ont_value *sum, ont_value *sx, ont_value *sw, ont_value *sy,
                              ont_value *zero)
{
    if (b->status != ONT_OK) return NULL;
    if (!sx || !sw || !sy || !zero) FAIL(ONT_EINVAL, "a scale or the zero point is missing");
    ont_value *factor = ont_build_cast(b, B("Div", B("Mul", sx, sw), sy), ONT_FLOAT64);
    ont_value *scaled = B("Mul", sum, factor);
    if (ont_dtype_is_narrow_float(zero->dtype)) return ont_build_cast(b, scaled, zero->dtype);
    ont_shape scalar = {0};
    if (ont_shape_count(&zero->shape) != 1) FAIL(ONT_EUNSUPPORTED, "a zero point of the result per row");
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
    ont_value *x = centred(b, lhs, ont_node_in(node, 2), last_but(lhs, 1)),
        *y = centred(b, rhs, ont_node_in(node, 5), last_but(rhs, 0));
    ont_value *sum = B("MatMul", x, y);
    if (b->status != ONT_OK) return;
    ont_value *sx = placed(b, ont_node_in(node, 1), last_but(lhs, 1), lhs->shape.rank);
    ont_value *sy = placed(b, ont_node_in(node, 4), last_but(rhs, 0), rhs->shape.rank);
    outputs[0] = requantized(b, sum, sx, sy, placed(b, ont_node_in(node, 6), last_but(sum, 1), sum->shape.rank),
                             ont_node_in(node, 7));
}

static void qlinear_conv_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = centred(b, ont_node_in(node, 0), ont_node_in(node, 2), 1),
        *w = centred(b, ont_node_in(node, 3), ont_node_in(node, 5), 0);
    ont_value *bias = ont_node_in(node, 8);
    ont_value *sum = conv_of(b, node, x, w, bias ? ont_build_cast(b, bias, ONT_FLOAT64) : NULL);
    if (b->status != ONT_OK) return;
    ont_value *sw = placed(b, ont_node_in(node, 4), 1, sum->shape.rank), *sx = placed(b, ont_node_in(node, 1), 1,
            sum->shape.rank);
    outputs[0] = requantized(b, sum, sx, sw, placed(b, ont_node_in(node, 6), 1, sum->shape.rank), ont_node_in(node, 7));
}

#define CONV_ATTRIBUTES "auto_pad:s dilations:I group:i kernel_shape:I pads:I strides:I"
#define PRODUCT(name_, least_, most_, attributes_, expand_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 10, .min_inputs = least_, \
                                   .max_inputs = most_, \
                                   .nondiff_outputs = 1, .attributes = attributes_, .expand = expand_}
PRODUCT(MatMulInteger, 2, 4, "", matmul_integer_expand);
PRODUCT(ConvInteger, 2, 4, CONV_ATTRIBUTES, conv_integer_expand);
PRODUCT(QLinearMatMul, 8, 8, "", qlinear_matmul_expand);
PRODUCT(QLinearConv, 8, 9, CONV_ATTRIBUTES, qlinear_conv_expand);
