/*
 * Operators that move pixels, by expansion into slices, reshapes and transposes: DepthToSpace, SpaceToDepth,
 * CenterCropPad.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/support/compose.h"

/* ---- DepthToSpace, SpaceToDepth ---- */

typedef struct blocks {
    int64_t size, n, c, h, w; /* of the side with the smaller planes: c channels for each cell of a block */
    bool columns;             /* mode CRD: the block dims come after the channel, not before it */
} blocks;

static ont_status read_blocks(const ont_node *node, bool to_depth, blocks *b)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    const char *mode = ont_attr_string(node, "mode", "DCR");
    int64_t size = ont_attr_int(node, "blocksize", 0);
    if (x->shape.rank != 4) return ont_fail(ONT_EINVAL, "the input has rank %d, expected 4", x->shape.rank);
    if (size < 1 || size > 1 << 15)
        return ont_fail(ONT_EINVAL, "blocksize is %" PRId64 ", expected 1 to %d", size, 1 << 15);
    if (strcmp(mode, "DCR") && strcmp(mode, "CRD"))
        return ont_fail(ONT_EINVAL, "mode is '%s', expected DCR or CRD", mode);
    const int64_t *d = x->shape.dims;
    *b = (blocks){.size = size, .n = d[0], .columns = !strcmp(mode, "CRD")};
    if (to_depth ? d[2] % size || d[3] % size : d[1] % (size * size))
        return ont_fail(ONT_EINVAL,
                        "%" PRId64 " channels of (%" PRId64 ", %" PRId64 ") cells do not divide into blocks of "
                        "%" PRId64,
                        d[1],
                        d[2], d[3], size);
    b->c = to_depth ? d[1] : d[1] / (size * size);
    b->h = to_depth ? d[2] / size : d[2];
    b->w = to_depth ? d[3] / size : d[3];
    return ONT_OK;
}

static ont_shape deep(const blocks *b)
{
    return (ont_shape){.rank = 4, .dims = {b->n, b->c * b->size * b->size, b->h, b->w}};
}

static ont_shape wide(const blocks *b)
{
    return (ont_shape){.rank = 4, .dims = {b->n, b->c, b->h * b->size, b->w * b->size}};
}

static ont_status depth_to_space_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    blocks b;
    ONT_TRY(read_blocks(node, false, &b));
    ont_shape shape = wide(&b);
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

static ont_status space_to_depth_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    blocks b;
    ONT_TRY(read_blocks(node, true, &b));
    ont_shape shape = deep(&b);
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

static void depth_to_space_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    blocks k;
    b->status = read_blocks(node, false, &k);
    if (b->status != ONT_OK) return;
    ont_shape rows = {.rank = 6, .dims = {k.n, k.size, k.size, k.c, k.h, k.w}};
    ont_shape columns = {.rank = 6, .dims = {k.n, k.c, k.size, k.size, k.h, k.w}};
    ont_shape to = wide(&k);
    ont_value *x = ont_build_reshape(b, ont_node_in(node, 0), k.columns ? &columns : &rows);
    x = ont_build_transpose(b, x, k.columns ? (int64_t[]){0, 1, 4, 2, 5, 3} : (int64_t[]){0, 3, 4, 1, 5, 2});
    outputs[0] = ont_build_reshape(b, x, &to);
}

static void space_to_depth_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    blocks k;
    b->status = read_blocks(node, true, &k);
    if (b->status != ONT_OK) return;
    ont_shape cells = {.rank = 6, .dims = {k.n, k.c, k.h, k.size, k.w, k.size}}, to = deep(&k);
    ont_value *x = ont_build_reshape(b, ont_node_in(node, 0), &cells);
    x = ont_build_transpose(b, x, k.columns ? (int64_t[]){0, 1, 3, 5, 2, 4} : (int64_t[]){0, 3, 5, 1, 2, 4});
    outputs[0] = ont_build_reshape(b, x, &to);
}

/* ---- CenterCropPad: crops each axis around its centre, or pads it with zeros ---- */

static ont_status crop_sizes(const ont_node *node, const ont_shape *x, ont_shape *to)
{
    int64_t axes[ONT_MAX_RANK], sizes[ONT_MAX_RANK];
    bool seen[ONT_MAX_RANK] = {false};
    int n_axes, n;
    ONT_TRY(ont_const_ints(node, -1, "axes", axes, ONT_MAX_RANK, &n_axes));
    ONT_TRY(ont_const_ints(node, 1, NULL, sizes, ONT_MAX_RANK, &n));
    int expected = n_axes < 0 ? x->rank : n_axes;
    if (n != expected) return ont_fail(ONT_EINVAL, "shape has %d entries for %d axes", n, expected);
    *to = *x;
    for (int i = 0; i < n; i++) {
        int axis;
        ONT_TRY(ont_shape_axis(n_axes < 0 ? i : axes[i], x->rank, &axis));
        if (seen[axis]) return ont_fail(ONT_EINVAL, "axes names axis %d twice", axis);
        if (sizes[i] < 0) return ont_fail(ONT_EINVAL, "shape[%d] is %" PRId64, i, sizes[i]);
        seen[axis] = true;
        to->dims[axis] = sizes[i];
    }
    return ONT_OK;
}

static ont_status crop_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ont_shape to;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(crop_sizes(node, &x->shape, &to));
    return ont_infer_out(node, 0, x->dtype, &to);
}

static void crop_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    ont_shape to;
    b->status = crop_sizes(node, &x->shape, &to);
    for (int d = 0; b->status == ONT_OK && d < to.rank; d++) {
        int64_t from = x->shape.dims[d], size = to.dims[d], front = from > size ? (from - size) / 2 : (size - from) / 2;
        if (from == size) continue;
        if (from > size) {
            x = ont_build_slice(b, x, d, front, front + size, 1);
            if (!x) return;
            continue;
        }
        ont_shape before = x->shape, behind = x->shape;
        before.dims[d] = front;
        behind.dims[d] = size - from - front;
        ont_value *pieces[3];
        uint32_t n = 0;
        if (front) pieces[n++] = ont_build_full(b, x->dtype, &before, 0);
        pieces[n++] = x;
        pieces[n++] = ont_build_full(b, x->dtype, &behind, 0);
        x = ont_build_concat(b, pieces, n, d);
        if (!x) return;
    }
    outputs[0] = x;
}

const ont_op ont_op_DepthToSpace = {.domain = "", .name = "DepthToSpace", .since = 1, .min_inputs = 1, .max_inputs = 1,
                                    .attributes = "blocksize:i mode:s", .infer = depth_to_space_infer,
                                    .expand = depth_to_space_expand};
const ont_op ont_op_SpaceToDepth = {.domain = "", .name = "SpaceToDepth", .since = 1, .min_inputs = 1, .max_inputs = 1,
                                    .attributes = "blocksize:i mode:s", .infer = space_to_depth_infer,
                                    .expand = space_to_depth_expand};
const ont_op ont_op_CenterCropPad = {.domain = "", .name = "CenterCropPad", .since = 18, .min_inputs = 2,
                                     .max_inputs = 2, .nondiff_inputs = 2, .attributes = "axes:I", .infer = crop_infer,
                                     .expand = crop_expand};
