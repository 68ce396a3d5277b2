/*
 * Operators in versions before the first one of their descriptor: each is expanded to that version. legacy.c has those
 * whose operands were broadcast by attributes. consumed_inputs only allowed an output to overwrite an input.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/support/compose.h"

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

/* Sizes were an attribute or an input; later versions have both forms again. */
static void split_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    static const char *const dropped[] = {NULL};
    finish(b, begin(b, node, dropped), outputs);
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

#define OLD(name_, since_, min_, max_, flags_, attributes_, expand_) \
    const ont_op ont_op_##name_##Opset1 = {.domain = "", .name = #name_, .since = since_, .min_inputs = min_, \
                                           .max_inputs = max_, .flags = flags_, .attributes = attributes_, \
                                           .expand = expand_}
#define OLD_UNARY(name_, attributes_) OLD(name_, 1, 1, 1, 0, attributes_ "consumed_inputs:I", same_expand)
#define OLD_RECURRENT(name_, max_, attributes_) \
    OLD(name_, 1, 3, max_, 0, "activation_alpha:F activation_beta:F activations:S clip:f direction:s hidden_size:i " \
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
OLD(Selu, 1, 1, 1, 0, "alpha:f gamma:f consumed_inputs:I", selu_expand);
OLD(Cast, 1, 1, 1, 0, "to:s", cast_expand);
OLD(Concat, 1, 1, UINT32_MAX, 0, "axis:i", concat_expand);
OLD(Split, 1, 1, 2, 0, "axis:i split:I", split_expand);
OLD(Dropout, 1, 1, 1, ONT_OP_RANDOM, "consumed_inputs:I is_test:i ratio:f rng_stream:i", dropout_expand);
OLD_RECURRENT(RNN, 6, "");
OLD_RECURRENT(LSTM, 8, " input_forget:i");
OLD_RECURRENT(GRU, 6, " linear_before_reset:i");
const ont_op ont_op_TileOpset1 = {.domain = "", .name = "Tile", .since = 1, .min_inputs = 3, .max_inputs = 3,
                                  .nondiff_inputs = 6, .attributes = "", .expand = tile_expand};
