/*
 * Sequences and optionals, resolved while a program is built; nothing of them exists at run time. The only sequences
 * that remain are outputs of SequenceConstruct and SequenceEmpty, whose inputs are the items; the only optionals are
 * outputs of Optional. Every other operator is expanded into these, or into the item that it selects. passes/flatten.c
 * replaces graph outputs of these types by their items.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/support/compose.h"
#include "ops/control/control.h"

enum { MOST_ITEMS = 1 << 16 };

/* ---- the operators that remain ---- */

static ont_status container_out(ont_node *node, ont_container container, ont_dtype dtype)
{
    ONT_TRY(ont_infer_out(node, 0, dtype, &(ont_shape){0}));
    node->outputs[0]->container = container;
    return ONT_OK;
}

static ont_status construct_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_dtype dtype = ONT_UNDEFINED;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        ont_value *item;
        ONT_TRY(ont_need_input(node, i, &item));
        if (item->container != ONT_TENSOR) return ont_fail(ONT_EUNSUPPORTED, "item %u is not a tensor", i);
        if (i && item->dtype != dtype)
            return ont_fail(ONT_ETYPE, "item %u is %s, item 0 is %s", i, ont_dtype_name(item->dtype),
                            ont_dtype_name(dtype));
        dtype = item->dtype;
    }
    return container_out(node, ONT_SEQUENCE, dtype);
}

static ont_status empty_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    int64_t dtype = ont_attr_int(node, "dtype", ONT_FLOAT32);
    if (dtype <= 0 || dtype >= ONT_DTYPE_COUNT)
        return ont_fail(ONT_EUNSUPPORTED, "attribute dtype is %" PRId64 ", which is not a supported dtype", dtype);
    return container_out(node, ONT_SEQUENCE, (ont_dtype)dtype);
}

static ont_status optional_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *x = ont_node_in(node, 0);
    if (x && x->container == ONT_OPTIONAL)
        return ont_fail(ONT_EINVAL, "the element of an optional is itself an optional");
    return container_out(node, ONT_OPTIONAL, x ? x->dtype : ONT_FLOAT32);
}

/* ---- reading and making sequences ---- */

/* The node whose inputs are the items of input `index`. */
static const ont_node *sequence_of(ont_builder *b, const ont_node *node, uint32_t index)
{
    const ont_value *v = ont_node_in(node, index);
    if (v && v->container == ONT_SEQUENCE) return v->def;
    ont_build_fail(b, v ? ONT_ETYPE : ONT_EINVAL, "input %u is %s, a sequence is expected", index,
                   !v ? "missing" : v->container == ONT_OPTIONAL ? "an optional" : "a tensor");
    return NULL;
}

static ont_value *make_sequence(ont_builder *b, ont_value *const *items, uint32_t n, ont_dtype dtype)
{
    if (b->status != ONT_OK) return NULL;
    if (n > MOST_ITEMS) ont_build_fail(b, ONT_EUNSUPPORTED, "a sequence of more than %d items", MOST_ITEMS);
    ont_node *node = ont_build_node(b, "", n ? "SequenceConstruct" : "SequenceEmpty", items, n, 1);
    if (node && !n) b->status = ont_attr_set_int(b->graph, node, "dtype", dtype);
    return ont_build_done(b, node);
}

/* Reads a position from input `index`, in [-n, last), counted from the end where negative; `otherwise` where it is
 * absent. */
static int64_t position_of(ont_builder *b, const ont_node *node, uint32_t index, int64_t n, int64_t last,
                           int64_t otherwise)
{
    int64_t position = otherwise;
    int count = 1;
    if (ont_node_in(node, index)) b->status = ont_const_ints(node, (int)index, NULL, &position, 1, &count);
    if (b->status != ONT_OK) return 0;
    if (count != 1) ont_build_fail(b, ONT_EINVAL, "position has %d entries, one is expected", count);
    if (position < -n || position >= last)
        ont_build_fail(b, ONT_EINDEX, "position %" PRId64 " is out of range for a sequence of %" PRId64, position, n);
    return position < 0 ? position + n : position;
}

static ont_value **items_array(ont_builder *b, size_t n)
{
    ont_value **items = ont_arena_array(&b->graph->arena, n + 1, sizeof *items);
    if (!items) ont_build_fail(b, ONT_ENOMEM, "out of memory");
    return items;
}

static void insert_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    const ont_node *from = sequence_of(b, node, 0);
    if (!from) return;
    int64_t n = from->n_inputs, at = position_of(b, node, 2, n, n + 1, n);
    ont_value **items = items_array(b, (size_t)n + 1);
    if (b->status != ONT_OK) return;
    for (int64_t i = 0; i <= n; i++) items[i] = i == at ? ont_node_in(node, 1) : from->inputs[i - (i > at)].value;
    if (!items[at]) ont_build_fail(b, ONT_EINVAL, "the item is missing");
    outputs[0] = make_sequence(b, items, (uint32_t)n + 1, ONT_UNDEFINED);
}

static void erase_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    const ont_node *from = sequence_of(b, node, 0);
    if (!from) return;
    int64_t n = from->n_inputs, at = position_of(b, node, 1, n, n, n - 1);
    ont_value **items = items_array(b, (size_t)n);
    if (b->status != ONT_OK) return;
    for (int64_t i = 0; i + 1 < n; i++) items[i] = from->inputs[i + (i >= at)].value;
    outputs[0] = make_sequence(b, items, (uint32_t)n - 1, from->outputs[0]->dtype);
}

static void at_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    const ont_node *from = sequence_of(b, node, 0);
    if (!from) return;
    int64_t at = position_of(b, node, 1, from->n_inputs, from->n_inputs, INT64_MAX);
    if (b->status == ONT_OK) outputs[0] = from->inputs[at].value;
}

static void length_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    const ont_node *from = sequence_of(b, node, 0);
    if (from) outputs[0] = ont_build_scalar(b, ONT_INT64, from->n_inputs);
}

static void concat_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    const ont_node *from = sequence_of(b, node, 0);
    if (!from) return;
    if (!ont_attr_find(node, "axis", ONT_ATTR_INT)) ont_build_fail(b, ONT_EINVAL, "attribute axis is missing");
    if (!from->n_inputs) ont_build_fail(b, ONT_EINVAL, "the sequence is empty");
    ont_value **items = items_array(b, from->n_inputs);
    if (b->status != ONT_OK) return;
    int64_t given = ont_attr_int(node, "axis", 0), new_axis = ont_attr_int(node, "new_axis", 0);
    int axis, rank = from->inputs[0].value->shape.rank + (new_axis != 0);
    b->status = ont_shape_axis(given, rank, &axis);
    for (uint32_t i = 0; i < from->n_inputs && b->status == ONT_OK; i++) {
        items[i] = from->inputs[i].value;
        if (new_axis) items[i] = ont_build_unsqueeze(b, items[i], axis);
    }
    outputs[0] = ont_build_concat(b, items, from->n_inputs, axis);
}

/* ---- SplitToSequence ---- */

/* The sizes of the parts along the axis: one size for all but the last part, or a list. */
static void part_sizes(ont_builder *b, const ont_node *node, int64_t dim, int64_t **sizes, uint32_t *n)
{
    const ont_value *split = ont_node_in(node, 1);
    int count = 0;
    bool list = split && split->shape.rank == 1;
    int64_t each = 1, capacity = list ? split->shape.dims[0] : 1;
    if (capacity > MOST_ITEMS) {
        ont_build_fail(b, ONT_EUNSUPPORTED, "split makes %" PRId64 " parts, at most %d are supported", capacity,
                       MOST_ITEMS);
        return;
    }
    int64_t *given = ont_arena_array(&b->graph->arena, (size_t)capacity + 1, sizeof *given);
    if (!given) ont_build_fail(b, ONT_ENOMEM, "out of memory");
    if (b->status == ONT_OK && split) b->status = ont_const_ints(node, 1, NULL, given, (int)capacity, &count);
    if (b->status != ONT_OK) return;
    if (split && !list) each = given[0];
    if (!list && each <= 0) {
        ont_build_fail(b, ONT_EINVAL, "split is %" PRId64 ", at least 1 is expected", each);
        return;
    }
    int64_t parts = list ? count : dim / each + (dim % each != 0);
    if (parts > MOST_ITEMS)
        ont_build_fail(b, ONT_EUNSUPPORTED, "split makes %" PRId64 " parts, at most %d are supported", parts,
                       MOST_ITEMS);
    if (b->status != ONT_OK) return;
    *sizes = list ? given : ont_arena_array(&b->graph->arena, (size_t)parts + 1, sizeof **sizes);
    if (!*sizes) ont_build_fail(b, ONT_ENOMEM, "out of memory");
    for (int64_t i = 0; *sizes && !list && i < parts; i++) (*sizes)[i] = i + 1 < parts ? each : dim - i * each;
    *n = (uint32_t)parts;
}

static void split_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    int axis;
    int64_t *sizes = NULL;
    uint32_t n = 0;
    if (!x || x->container != ONT_TENSOR) ont_build_fail(b, ONT_ETYPE, "the input is not a tensor");
    if (b->status == ONT_OK) b->status = ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis);
    if (b->status == ONT_OK) part_sizes(b, node, x->shape.dims[axis], &sizes, &n);
    ont_value **items = items_array(b, n);
    if (b->status != ONT_OK) return;
    if (n == 1 && sizes[0] != x->shape.dims[axis])
        ont_build_fail(b, ONT_EINVAL, "split is one part of %" PRId64 ", but the axis has %" PRId64 " entries",
                       sizes[0], x->shape.dims[axis]);
    if (n) ont_build_split(b, x, axis, sizes, n, items);
    bool keep = ont_node_in(node, 1) || ont_attr_int(node, "keepdims", 1);
    for (uint32_t i = 0; i < n && !keep; i++) items[i] = ont_build_squeeze(b, items[i], axis);
    outputs[0] = make_sequence(b, items, n, x->dtype);
}

/* ---- SequenceMap ---- */

/* Item i of every input that is a sequence, and the other inputs as they are. */
static void map_inputs(ont_builder *b, const ont_node *node, uint32_t n_own, uint32_t i, uint32_t n, ont_value **given)
{
    for (uint32_t k = 0; k < n_own && b->status == ONT_OK; k++) {
        given[k] = ont_node_in(node, k);
        if (!given[k] || given[k]->container != ONT_SEQUENCE) continue;
        const ont_node *from = given[k]->def;
        if (from->n_inputs != n)
            ont_build_fail(b, ONT_EINVAL, "input %u has %u items, input 0 has %u", k, from->n_inputs, n);
        if (b->status == ONT_OK) given[k] = from->inputs[i].value;
    }
}

static void map_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    const ont_graph *body = ont_body_of(b, node, "body", node->n_outputs);
    const ont_node *from = body ? sequence_of(b, node, 0) : NULL;
    if (!from) return;
    uint32_t n = from->n_inputs, n_own = body->first_capture, width = body->n_outputs;
    ont_value **given = items_array(b, n_own), **results = items_array(b, (size_t)width * n),
              **column = items_array(b, n);
    if (b->status != ONT_OK) return;
    b->deferred = true;
    for (uint32_t i = 0; i < n && b->status == ONT_OK; i++) {
        map_inputs(b, node, n_own, i, n, given);
        const ont_body_copy copy = {.node = node, .body = body, .given = given, .n_given = n_own,
                                    .first_capture = n_own, .iteration = i};
        ont_build_body(b, &copy, results + (size_t)i * width);
    }
    for (uint32_t k = 0; k < node->n_outputs && b->status == ONT_OK; k++) {
        for (uint32_t i = 0; i < n; i++) column[i] = results[(size_t)i * width + k];
        outputs[k] = make_sequence(b, column, n, from->outputs[0]->dtype);
    }
}

/* ---- optionals ---- */

static void has_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    const ont_value *x = ont_node_in(node, 0);
    outputs[0] = ont_build_scalar(b, ONT_BOOL, x && (x->container != ONT_OPTIONAL || x->def->n_inputs));
}

static void get_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    if (x->container == ONT_OPTIONAL && !x->def->n_inputs) ont_build_fail(b, ONT_EINVAL, "the optional has no element");
    if (b->status == ONT_OK) outputs[0] = x->container == ONT_OPTIONAL ? x->def->inputs[0].value : x;
}

/* ---- descriptors ---- */

#define STAYS(name_, since_, max_, attributes_, infer_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = since_, .max_inputs = max_, \
                                   .flags = ONT_OP_NO_FOLD | ONT_OP_CONTAINERS, .attributes = attributes_, \
                                   .infer = infer_}
#define GOES(name_, since_, min_, max_, attributes_, expand_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = since_, .min_inputs = min_, \
                                   .max_inputs = max_, \
                                   .flags = ONT_OP_CONTAINERS, .attributes = attributes_, .expand = expand_}
STAYS(SequenceConstruct, 11, UINT32_MAX, "", construct_infer);
STAYS(SequenceEmpty, 11, 0, "dtype:i", empty_infer);
STAYS(Optional, 15, 1, "type:i", optional_infer);
GOES(SequenceInsert, 11, 2, 3, "", insert_expand);
GOES(SequenceErase, 11, 1, 2, "", erase_expand);
GOES(SequenceAt, 11, 2, 2, "", at_expand);
GOES(SequenceLength, 11, 1, 1, "", length_expand);
GOES(ConcatFromSequence, 11, 1, 1, "axis:i new_axis:i", concat_expand);
GOES(SplitToSequence, 11, 1, 2, "axis:i keepdims:i", split_expand);
GOES(SequenceMap, 17, 1, UINT32_MAX, "body:g rng_salt:i", map_expand);
GOES(OptionalHasElement, 15, 0, 1, "", has_expand);
GOES(OptionalGetElement, 15, 1, 1, "", get_expand);
