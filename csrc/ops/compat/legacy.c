/*
 * Operators of opsets 1 to 8 whose later versions mean something else: binary operators with attributes broadcast and
 * axis in place of NumPy's rule, and Gemm and PRelu of that time. Each is expanded to its later version.
 */
#include <string.h>

#include "ops/op.h"

#define FAIL(code, ...) \
    do { \
        ont_build_fail(b, code, __VA_ARGS__); \
        return; \
    } while (0)

/* The second operand begins at `axis` of the first, or has its last dims where no axis is given; without broadcast,
 * shapes are equal. */
static void binary_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *y = ont_node_in(node, 1);
    if (!x || !y) FAIL(ONT_EINVAL, "an operand is missing");
    if (!ont_attr_int(node, "broadcast", 0)) {
        if (!ont_shape_equal(&x->shape, &y->shape)) FAIL(ONT_EINVAL, "the operands differ in shape and broadcast is 0");
    } else if (ont_attr_find(node, "axis", ONT_ATTR_INT)) {
        int64_t axis = ont_attr_int(node, "axis", 0);
        ont_shape wide = {.rank = x->shape.rank};
        if (axis < 0) axis += x->shape.rank - y->shape.rank + 1;
        if (axis < 0 || axis + y->shape.rank > x->shape.rank)
            FAIL(ONT_EINVAL, "axis %lld is out of range: B has rank %d and A has rank %d", (long long)axis,
                 y->shape.rank, x->shape.rank);
        for (int d = 0; d < wide.rank; d++)
            wide.dims[d] = d >= axis && d < axis + y->shape.rank ? y->shape.dims[d - axis] : 1;
        y = ont_build_reshape(b, y, &wide);
    }
    if (b->status != ONT_OK) return;
    ont_node *now = ont_build_node(b, "", node->op_type, (ont_value *[]){x, y}, 2, 1);
    outputs[0] = ont_build_done(b, now);
    if (outputs[0] && !ont_shape_equal(&outputs[0]->shape, &x->shape))
        FAIL(ONT_EINVAL, "the first operand would be broadcast, which this opset does not allow");
}

/* Sum, Mean, Min, Max: operands have one shape. */
static void chain_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *inputs[64];
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        inputs[i] = ont_node_in(node, i);
        if (!inputs[i] || !ont_shape_equal(&inputs[i]->shape, &inputs[0]->shape))
            FAIL(ONT_EINVAL, "operands differ in shape, which this opset does not allow");
    }
    outputs[0] = ont_build_done(b, ont_build_node(b, "", node->op_type, inputs, node->n_inputs, 1));
}

/* C is broadcast only with attribute broadcast. */
static void gemm_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *in[] = {ont_node_in(node, 0), ont_node_in(node, 1), ont_node_in(node, 2)};
    ont_node *now = ont_build_node(b, "", "Gemm", in, 3, 1);
    static const char *const ints[] = {"transA", "transB"}, *const floats[] = {"alpha", "beta"};
    for (int i = 0; i < 2 && now && b->status == ONT_OK; i++) {
        b->status = ont_attr_set_int(b->graph, now, ints[i], ont_attr_int(node, ints[i], 0));
        if (b->status == ONT_OK)
            b->status = ont_attr_set_float(b->graph, now, floats[i], ont_attr_float(node, floats[i], 1));
    }
    outputs[0] = ont_build_done(b, now);
    if (outputs[0] && in[2] && !ont_attr_int(node, "broadcast", 0) && !ont_shape_equal(&in[2]->shape,
            &outputs[0]->shape))
        FAIL(ONT_EINVAL, "C has another shape than the result and broadcast is 0");
}

/* One slope, or one for each channel. */
static void prelu_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *slope = ont_node_in(node, 1);
    if (!x || !slope) FAIL(ONT_EINVAL, "an operand is missing");
    ont_shape wide = {.rank = x->shape.rank};
    bool channels = slope->shape.rank == 1 && slope->shape.dims[0] != 1 && x->shape.rank > 1;
    for (int d = 0; d < wide.rank; d++) wide.dims[d] = d == 1 ? slope->shape.dims[0] : 1;
    outputs[0] = ont_build2(b, "PRelu", x, channels ? ont_build_reshape(b, slope, &wide) : slope);
}

#define LEGACY(name_, least_, most_, attributes_, expand_) \
    const ont_op ont_op_##name_##1 = {.domain = "", .name = #name_, .since = 1, .min_inputs = least_, \
                                      .max_inputs = most_, \
                                      .attributes = attributes_, .expand = expand_}
#define CONSUMED "consumed_inputs:I" /* an optimisation hint of opset 1 without effect */
#define BINARY(name_) LEGACY(name_, 2, 2, "axis:i broadcast:i", binary_expand)
#define BINARY1(name_) LEGACY(name_, 2, 2, "axis:i broadcast:i " CONSUMED, binary_expand)
BINARY1(Add);
BINARY1(Sub);
BINARY1(Mul);
BINARY1(Div);
BINARY(Pow);
BINARY(And);
BINARY(Or);
BINARY(Xor);
BINARY(Equal);
BINARY(Greater);
BINARY(Less);
LEGACY(Sum, 1, 64, CONSUMED, chain_expand);
LEGACY(Mean, 1, 64, CONSUMED, chain_expand);
LEGACY(Min, 1, 64, CONSUMED, chain_expand);
LEGACY(Max, 1, 64, CONSUMED, chain_expand);
LEGACY(Gemm, 3, 3, "alpha:f beta:f broadcast:i transA:i transB:i", gemm_expand);
LEGACY(PRelu, 2, 2, CONSUMED, prelu_expand);
