/*
 * SplitToSequence read by SequenceAt, which is how torch.split comes out of the exporter: resolved into a Split while
 * shapes are inferred, so that no sequence exists at run time. Other uses of sequences are refused by name.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/op.h"

/* A dead node still needs a type until it is removed. */
static ont_status dead(ont_node *node, const ont_value *x)
{
    return ont_infer_out(node, 0, x->dtype, &(ont_shape){0});
}

/* The parts along the axis: one size for all but the last, or a list. */
static ont_status part_sizes(const ont_node *node, int64_t dim, ont_arena *arena, int64_t **sizes, uint32_t *n)
{
    const ont_value *split = ont_node_in(node, 1);
    int64_t given[256];
    int count = 0;
    if (split) ONT_TRY(ont_const_ints(node, 1, NULL, given, 256, &count));
    bool list = split && split->shape.rank == 1;
    int64_t each = !split ? 1 : list ? 0 : given[0];
    if (!list && each <= 0) return ont_fail(ONT_EINVAL, "split is %" PRId64, each);
    int64_t parts = list ? count : (dim + each - 1) / each;
    if (parts < 1 || parts > 4096) return ont_fail(ONT_EUNSUPPORTED, "%" PRId64 " parts", parts);
    *sizes = ont_arena_array(arena, (size_t)parts, sizeof **sizes);
    if (!*sizes) return ONT_ENOMEM;
    for (int64_t i = 0; i < parts; i++) (*sizes)[i] = list ? given[i] : i + 1 < parts ? each : dim - i * each;
    *n = (uint32_t)parts;
    return ONT_OK;
}

/* Every reader takes its part of the Split. */
static ont_status resolve_readers(ont_graph *g, ont_node *node, ont_node *split)
{
    for (ont_use *use = node->outputs[0]->uses; use; use = use->next) {
        ont_node *reader = use->user;
        int64_t index;
        int count;
        if (strcmp(reader->op_type, "SequenceAt"))
            return ont_fail(ONT_EUNSUPPORTED, "its sequence is read by %s '%s'", reader->op_type, reader->name);
        ONT_TRY(ont_const_ints(reader, 1, NULL, &index, 1, &count));
        if (index < 0) index += split->n_outputs;
        if (count != 1 || index < 0 || index >= split->n_outputs)
            return ont_fail(ONT_EINDEX, "SequenceAt '%s': position is out of range for %u parts", reader->name, split->n_outputs);
        ont_value_replace_uses(g, reader->outputs[0], split->outputs[index]);
    }
    return ONT_OK;
}

static ont_status split_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    int axis;
    int64_t *sizes;
    uint32_t n;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (!node->outputs[0]->uses) return dead(node, x);
    if (ont_node_in(node, 1) == NULL && !ont_attr_int(node, "keepdims", 1))
        return ont_fail(ONT_EUNSUPPORTED, "keepdims 0");
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis));
    ONT_TRY(part_sizes(node, x->shape.dims[axis], &g->arena, &sizes, &n));
    ont_builder b = {.graph = g, .before = node, .backward = node->backward, .status = ONT_OK};
    ont_value *operands[] = {x, ont_build_const_ints(&b, sizes, n)};
    ont_node *split = b.status == ONT_OK ? ont_build_node(&b, "", "Split", operands, 2, n) : NULL;
    if (split) b.status = ont_attr_set_int(g, split, "axis", axis);
    ont_build_done(&b, split);
    ONT_TRY(b.status);
    ONT_TRY(resolve_readers(g, node, split));
    return dead(node, x);
}

static ont_status at_infer(ont_graph *g, ont_node *node)
{
    ont_value *sequence;
    ONT_TRY(ont_need_input(node, 0, &sequence));
    if (node->outputs[0]->uses || ont_value_is_output(g, node->outputs[0]))
        return ont_fail(ONT_EUNSUPPORTED, "its sequence does not come from SplitToSequence");
    return dead(node, sequence);
}

const ont_op ont_op_SplitToSequence = {.domain = "", .name = "SplitToSequence", .since = 11, .min_inputs = 1,
                                       .max_inputs = 2, .flags = ONT_OP_NO_GRAD | ONT_OP_NO_FOLD,
                                       .attributes = "axis:i keepdims:i", .infer = split_infer};
const ont_op ont_op_SequenceAt = {.domain = "", .name = "SequenceAt", .since = 11, .min_inputs = 2, .max_inputs = 2,
                                  .flags = ONT_OP_NO_GRAD | ONT_OP_NO_FOLD, .attributes = "", .infer = at_infer};
