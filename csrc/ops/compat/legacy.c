/*
 * Operators of opsets 1 to 7 whose later versions have another form, attributes or broadcast rule. Each is expanded to
 * the later version. consumed_inputs only allowed an output to overwrite an input: it has no effect.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/support/compose.h"

#define FAIL(code, ...) \
    do { \
        ont_build_fail(b, code, __VA_ARGS__); \
        return; \
    } while (0)

/* The later operator with the node's inputs and attributes, but for those listed (ending in NULL); not yet inferred. */
static ont_node *begin(ont_builder *b, const ont_node *node, const char *const *dropped)
{
    ont_value **inputs = ont_arena_array(&b->graph->arena, (size_t)node->n_inputs + 1, sizeof *inputs);
    if (!inputs) b->status = ONT_ENOMEM;
    for (uint32_t i = 0; inputs && i < node->n_inputs; i++) inputs[i] = ont_node_in(node, i);
    if (b->status != ONT_OK) return NULL;
    ont_node *now = ont_build_node(b, "", node->op_type, inputs, node->n_inputs, node->n_outputs);
    if (!now) return NULL;
    b->status = ont_attr_copy_all(b->graph, now, node);
    for (ont_attr **at = &now->attrs; *at;) {
        bool drop = false;
        for (const char *const *name = dropped; *name && !drop; name++) drop = !strcmp((*at)->name, *name);
        if (drop)
            *at = (*at)->next;
        else
            at = &(*at)->next;
    }
    for (uint32_t i = 1; i < node->n_outputs; i++)
        if (!node->outputs[i]) now->outputs[i] = NULL;
    return b->status == ONT_OK ? now : NULL;
}

static void finish(ont_builder *b, ont_node *now, ont_value **outputs)
{
    if (!ont_build_done(b, now)) return;
    for (uint32_t i = 0; i < now->n_outputs; i++) outputs[i] = now->outputs[i];
}

/* Attributes removed since do not affect the result. output_sequence of LSTM and others says whether output 0 has a
 * name. */
static void same_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    static const char *const dropped[] = {"consumed_inputs", "output_sequence", NULL};
    finish(b, begin(b, node, dropped), outputs);
}

static void cast_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    static const char *const names[] = {[1] = "FLOAT", "UINT8", "INT8",    "UINT16", "INT16",  "INT32", "INT64",
                                        "STRING",      "BOOL",  "FLOAT16", "DOUBLE", "UINT32", "UINT64"};
    static const char *const dropped[] = {"to", NULL};
    const char *to = ont_attr_string(node, "to", "");
    int number = 0;
    for (int i = 1; i < (int)(sizeof names / sizeof *names); i++)
        if (!strcmp(to, names[i])) number = i;
    if (!number) ont_build_fail(b, ONT_EINVAL, "attribute to is '%s', which is not the name of a dtype", to);
    ont_node *now = begin(b, node, dropped);
    if (now) b->status = ont_attr_set_int(b->graph, now, "to", number);
    finish(b, now, outputs);
}

static void concat_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    static const char *const dropped[] = {NULL};
    ont_node *now = begin(b, node, dropped);
    if (now) b->status = ont_attr_set_int(b->graph, now, "axis", ont_attr_int(node, "axis", 1));
    finish(b, now, outputs);
}

/* The default constants had fewer digits. */
static void selu_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    static const char *const dropped[] = {"consumed_inputs", NULL};
    ont_node *now = begin(b, node, dropped);
    if (now) b->status = ont_attr_set_float(b->graph, now, "alpha", ont_attr_float(node, "alpha", 1.6732));
    if (b->status == ONT_OK && now)
        b->status = ont_attr_set_float(b->graph, now, "gamma", ont_attr_float(node, "gamma", 1.0507));
    finish(b, now, outputs);
}

/* is_test 1 returns the input; else elements are dropped, which is training mode since opset 12. */
static void dropout_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    if (ont_node_out(node, 1))
        ont_build_fail(b, ONT_EUNSUPPORTED, "output mask of opset %" PRId64 " is not supported", node->version);
    if (ont_attr_int(node, "is_test", 0)) {
        outputs[0] = ont_node_in(node, 0);
        return;
    }
    ont_value *inputs[] = {ont_node_in(node, 0), ont_build_scalar(b, ONT_FLOAT32, ont_attr_float(node, "ratio", 0.5)),
                           ont_build_scalar(b, ONT_BOOL, 1)};
    ont_node *now = b->status == ONT_OK ? ont_build_node(b, "", "Dropout", inputs, 3, 1) : NULL;
    if (now) b->status = ont_attr_set_int(b->graph, now, "rng_stream", ont_attr_int(node, "rng_stream", 0));
    finish(b, now, outputs);
}

/* Tile(x, tiles, axis): along one axis. */
static void tile_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    int64_t repeats[ONT_MAX_RANK];
    double tiles, given;
    int axis;
    b->status = ont_const_scalar(node, 1, &tiles);
    if (b->status == ONT_OK) b->status = ont_const_scalar(node, 2, &given);
    if (b->status == ONT_OK) b->status = ont_shape_axis((int64_t)given, x->shape.rank, &axis);
    if (b->status != ONT_OK) return;
    for (int i = 0; i < x->shape.rank; i++) repeats[i] = i == axis ? (int64_t)tiles : 1;
    outputs[0] = ont_build2(b, "Tile", x, ont_build_const_ints(b, repeats, (size_t)x->shape.rank));
}

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
    static const char *const dropped[] = {"broadcast", NULL};
    const ont_value *c = ont_node_in(node, 2);
    finish(b, begin(b, node, dropped), outputs);
    if (outputs[0] && c && !ont_attr_int(node, "broadcast", 0) && !ont_shape_equal(&c->shape, &outputs[0]->shape))
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

#define CONSUMED "consumed_inputs:I"
#define OLD(name_, min_, max_, flags_, attributes_, expand_) \
    const ont_op ont_op_##name_##Opset1 = {.domain = "", .name = #name_, .since = 1, .min_inputs = min_, \
                                           .max_inputs = max_, .flags = flags_, .attributes = attributes_, \
                                           .expand = expand_}
#define OLD_UNARY(name_, attributes_) OLD(name_, 1, 1, 0, attributes_ CONSUMED, same_expand)
#define OLD_BINARY(name_, more_) OLD(name_, 2, 2, 0, "axis:i broadcast:i" more_, binary_expand)
#define OLD_CHAIN(name_) OLD(name_, 1, 64, 0, CONSUMED, chain_expand)
#define OLD_RECURRENT(name_, max_, attributes_) \
    OLD(name_, 3, max_, 0, "activation_alpha:F activation_beta:F activations:S clip:f direction:s hidden_size:i " \
                           "output_sequence:i" attributes_, same_expand)

OLD_UNARY(Abs, "");
OLD_UNARY(Ceil, "");
OLD_UNARY(Exp, "");
OLD_UNARY(Floor, "");
OLD_UNARY(Log, "");
OLD_UNARY(Neg, "");
OLD_UNARY(Reciprocal, "");
OLD_UNARY(Relu, "");
OLD_UNARY(Sigmoid, "");
OLD_UNARY(Sqrt, "");
OLD_UNARY(Tanh, "");
OLD_UNARY(Elu, "alpha:f ");
OLD_UNARY(LeakyRelu, "alpha:f ");
OLD_UNARY(HardSigmoid, "alpha:f beta:f ");
OLD_UNARY(Clip, "min:f max:f ");
OLD_BINARY(Add, " " CONSUMED);
OLD_BINARY(Sub, " " CONSUMED);
OLD_BINARY(Mul, " " CONSUMED);
OLD_BINARY(Div, " " CONSUMED);
OLD_BINARY(Pow, "");
OLD_BINARY(And, "");
OLD_BINARY(Or, "");
OLD_BINARY(Xor, "");
OLD_BINARY(Equal, "");
OLD_BINARY(Greater, "");
OLD_BINARY(Less, "");
OLD_CHAIN(Sum);
OLD_CHAIN(Mean);
OLD_CHAIN(Min);
OLD_CHAIN(Max);
OLD_RECURRENT(RNN, 6, "");
OLD_RECURRENT(LSTM, 8, " input_forget:i");
OLD_RECURRENT(GRU, 6, " linear_before_reset:i");
OLD(Selu, 1, 1, 0, "alpha:f gamma:f " CONSUMED, selu_expand);
OLD(Cast, 1, 1, 0, "to:s", cast_expand);
OLD(Concat, 1, UINT32_MAX, 0, "axis:i", concat_expand);
OLD(Split, 1, 2, 0, "axis:i split:I", same_expand);
OLD(Tile, 3, 3, 0, "", tile_expand);
OLD(Dropout, 1, 1, ONT_OP_RANDOM, "is_test:i ratio:f rng_stream:i " CONSUMED, dropout_expand);
OLD(Gemm, 3, 3, 0, "alpha:f beta:f broadcast:i transA:i transB:i", gemm_expand);
OLD(PRelu, 2, 2, 0, CONSUMED, prelu_expand);
