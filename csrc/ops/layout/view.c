/*
 * Operators that rename or reshape: the output shares the storage of the input, and no kernel runs.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/op.h"

static void reshape_back(ont_grad *g)
{
    GI(0, ont_build_reshape(&g->b, GO(0), &I(0)->shape));
}

static ont_status set_view(ont_node *node, const ont_shape *shape)
{
    const ont_value *x = ont_node_in(node, 0);
    if (ont_shape_count(shape) != ont_shape_count(&x->shape)) {
        char from[ONT_SHAPE_TEXT], to[ONT_SHAPE_TEXT];
        return ont_fail(ONT_EINVAL, "%s cannot be seen as %s", ont_shape_text(&x->shape, from),
                        ont_shape_text(shape, to));
    }
    return ont_infer_out(node, 0, x->dtype, shape);
}

#define VIEW(name_, domain_, since_, max_, infer_, grad_, flags_, rows_, attributes_) \
    const ont_op ont_op_##name_ = {.domain = domain_, .name = #name_, .since = since_, .min_inputs = 1, \
                                   .max_inputs = max_, .flags = ONT_OP_VIEW | (flags_), .nondiff_inputs = ~1ull, \
                                   .attributes = attributes_, .infer = infer_, .grad = grad_, .rows = rows_}

/* ---- Identity, StopGradient ---- */

/* For a sequence or an optional: its users use the input instead. */
static ont_status identity_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (x->container != ONT_TENSOR) ont_value_replace_uses(g, node->outputs[0], x);
    return ont_infer_same(g, node);
}

VIEW(Identity, "", 1, 1, identity_infer, reshape_back, ONT_OP_CONTAINERS, ONT_ROWS_ELEMENTWISE, "");
VIEW(StopGradient, ONT_DOMAIN, 1, 1, ont_infer_same, NULL, ONT_OP_NO_GRAD | ONT_OP_PUBLIC, ONT_ROWS_ELEMENTWISE, "");

/* ---- Reshape ---- */

static ont_status reshape_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    int64_t dims[ONT_MAX_RANK], known = 1, total;
    int n, infer = -1;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_const_ints(node, 1, "shape", dims, ONT_MAX_RANK, &n));
    if (n < 0) return ont_fail(ONT_EINVAL, "no shape is given");
    bool allow_zero = ont_attr_int(node, "allowzero", 0);
    total = ont_shape_count(&x->shape);
    for (int i = 0; i < n; i++) {
        if (dims[i] == 0 && !allow_zero) {
            if (i >= x->shape.rank)
                return ont_fail(ONT_EINVAL, "shape[%d] is 0, but the input has rank %d", i, x->shape.rank);
            dims[i] = x->shape.dims[i];
        }
        if (dims[i] < -1) return ont_fail(ONT_EINVAL, "shape[%d] is %" PRId64, i, dims[i]);
        if (dims[i] == -1) {
            if (infer >= 0) return ont_fail(ONT_EINVAL, "shape has more than one -1");
            infer = i;
        } else if (__builtin_mul_overflow(known, dims[i], &known)) {
            return ont_fail(ONT_EINVAL, "shape overflows");
        }
    }
    if (infer >= 0) {
        if (known == 0 || total % known)
            return ont_fail(ONT_EINVAL, "%" PRId64 " elements cannot fill the -1 of the shape", total);
        dims[infer] = total / known;
    }
    ont_shape shape = ont_shape_of(n, dims);
    return set_view(node, &shape);
}

VIEW(Reshape, "", 1, 2, reshape_infer, reshape_back, 0, ONT_ROWS_VIEW, "shape:I allowzero:i consumed_inputs:I");

/* ---- Flatten ---- */

static ont_status flatten_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    int64_t axis = ont_attr_int(node, "axis", 1), rank = x->shape.rank;
    if (axis < -rank || axis > rank)
        return ont_fail(ONT_EINVAL, "axis %" PRId64 " is out of range for rank %" PRId64, axis, rank);
    if (axis < 0) axis += rank;
    ont_shape shape = {.rank = 2};
    shape.dims[0] = ont_shape_count_range(&x->shape, 0, (int)axis);
    shape.dims[1] = ont_shape_count_range(&x->shape, (int)axis, x->shape.rank);
    return set_view(node, &shape);
}

VIEW(Flatten, "", 1, 1, flatten_infer, reshape_back, 0, ONT_ROWS_VIEW, "axis:i");

/* ---- Squeeze, Unsqueeze ---- */

/* Marks the axes given by an input or attribute, for a tensor of `rank`. *count is -1 where none is given. */
static ont_status read_axes(const ont_node *node, int rank, bool *marked, int *count)
{
    int64_t axes[ONT_MAX_RANK];
    ONT_TRY(ont_const_ints(node, 1, "axes", axes, ONT_MAX_RANK, count));
    memset(marked, 0, ONT_MAX_RANK * sizeof *marked);
    for (int i = 0; i < *count; i++) {
        int axis;
        ONT_TRY(ont_shape_axis(axes[i], rank, &axis));
        if (marked[axis]) return ont_fail(ONT_EINVAL, "axis %d is given twice", axis);
        marked[axis] = true;
    }
    return ONT_OK;
}

static ont_status squeeze_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    bool drop[ONT_MAX_RANK];
    int count;
    ont_shape shape = {0};
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(read_axes(node, x->shape.rank, drop, &count));
    for (int i = 0; i < x->shape.rank; i++) {
        if (count < 0) drop[i] = x->shape.dims[i] == 1;
        if (drop[i] && x->shape.dims[i] != 1)
            return ont_fail(ONT_EINVAL, "axis %d has %" PRId64 " entries, not 1", i, x->shape.dims[i]);
        if (!drop[i]) shape.dims[shape.rank++] = x->shape.dims[i];
    }
    return set_view(node, &shape);
}

static ont_status unsqueeze_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    bool added[ONT_MAX_RANK];
    int64_t axes[ONT_MAX_RANK];
    int count, from = 0;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_const_ints(node, 1, "axes", axes, ONT_MAX_RANK, &count));
    if (count < 0) return ont_fail(ONT_EINVAL, "no axes are given");
    ont_shape shape = {.rank = x->shape.rank + count};
    if (shape.rank > ONT_MAX_RANK) return ont_fail(ONT_EUNSUPPORTED, "rank %d, at most %d", shape.rank, ONT_MAX_RANK);
    ONT_TRY(read_axes(node, shape.rank, added, &count));
    for (int i = 0; i < shape.rank; i++) shape.dims[i] = added[i] ? 1 : x->shape.dims[from++];
    return set_view(node, &shape);
}

VIEW(Squeeze, "", 1, 2, squeeze_infer, reshape_back, 0, ONT_ROWS_VIEW, "axes:I");
VIEW(Unsqueeze, "", 1, 2, unsqueeze_infer, reshape_back, 0, ONT_ROWS_VIEW, "axes:I");

/* ---- Shape, Size: constants once the shape of the input is known ---- */

static ont_status set_data(ont_graph *g, ont_node *node, const ont_shape *shape, const int64_t *values, size_t count)
{
    ONT_TRY(ont_infer_out(node, 0, ONT_INT64, shape));
    ont_tensor *data = ont_arena_alloc(&g->arena, sizeof *data);
    int64_t *copy = ont_arena_array(&g->arena, count + 1, sizeof *copy);
    if (!data || !copy) return ONT_ENOMEM;
    if (count) memcpy(copy, values, count * sizeof *copy);
    *data = (ont_tensor){ONT_INT64, *shape, count * sizeof *copy, copy};
    node->outputs[0]->data = data;
    return ONT_OK;
}

static int64_t clamp(int64_t value, int64_t rank)
{
    if (value < 0) value += rank;
    return value < 0 ? 0 : value > rank ? rank : value;
}

static ont_status shape_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    int64_t rank = x->shape.rank;
    int64_t start = clamp(ont_attr_int(node, "start", 0), rank), end = clamp(ont_attr_int(node, "end", rank), rank);
    int64_t count = end > start ? end - start : 0;
    ont_shape shape = {.rank = 1, .dims = {count}};
    return set_data(g, node, &shape, x->shape.dims + start, (size_t)count);
}

static ont_status size_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    int64_t count = ont_shape_count(&x->shape);
    return set_data(g, node, &(ont_shape){0}, &count, 1);
}

const ont_op ont_op_Shape = {.domain = "", .name = "Shape", .since = 1, .min_inputs = 1, .max_inputs = 1,
                             .flags = ONT_OP_NO_GRAD, .attributes = "start:i end:i", .infer = shape_infer};
const ont_op ont_op_Size = {.domain = "", .name = "Size", .since = 1, .min_inputs = 1, .max_inputs = 1,
                            .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = size_infer};
