/*
 * Operators that move elements without arithmetic: Transpose, Expand, Slice, Split, Concat, and PutSlice, the gradient
 * of a slice.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/support/strided.h"

static ont_status run_copy(const ont_call *call)
{
    ont_strided_copy(call->state, call->in[0], call->out[0]);
    return ONT_OK;
}

static ont_strided *new_copy(ont_arena *arena, ont_prepared *out)
{
    ont_strided *s = ont_arena_alloc(arena, sizeof *s);
    out->state = s;
    return s;
}

/* ---- Transpose ---- */

static ont_status transpose_perm(const ont_node *node, int rank, int *perm)
{
    int64_t given[ONT_MAX_RANK];
    bool seen[ONT_MAX_RANK] = {false};
    int n;
    ONT_TRY(ont_const_ints(node, -1, "perm", given, ONT_MAX_RANK, &n));
    if (n >= 0 && n != rank) return ont_fail(ONT_EINVAL, "perm has %d entries, the input has rank %d", n, rank);
    for (int i = 0; i < rank; i++) {
        int64_t p = n < 0 ? rank - 1 - i : given[i];
        if (p < 0 || p >= rank || seen[p]) return ont_fail(ONT_EINVAL, "perm is not a permutation of %d axes", rank);
        seen[p] = true;
        perm[i] = (int)p;
    }
    return ONT_OK;
}

static ont_status transpose_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    int perm[ONT_MAX_RANK];
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(transpose_perm(node, x->shape.rank, perm));
    ont_shape shape = {.rank = x->shape.rank};
    for (int i = 0; i < shape.rank; i++) shape.dims[i] = x->shape.dims[perm[i]];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_status transpose_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *y = node->outputs[0];
    int perm[ONT_MAX_RANK];
    int64_t own[ONT_MAX_RANK], from[ONT_MAX_RANK], to[ONT_MAX_RANK];
    ont_strided *s = new_copy(arena, out);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(transpose_perm(node, x->shape.rank, perm));
    ont_shape_strides(&x->shape, own);
    ont_shape_strides(&y->shape, to);
    for (int i = 0; i < x->shape.rank; i++) from[i] = own[perm[i]];
    ont_strided_init(s, &y->shape, from, 0, to, 0, ont_dtype_size(x->dtype));
    return ONT_OK;
}

static void transpose_grad(ont_grad *g)
{
    int perm[ONT_MAX_RANK];
    int64_t inverse[ONT_MAX_RANK];
    if (transpose_perm(g->node, I(0)->shape.rank, perm) != ONT_OK) return;
    for (int i = 0; i < I(0)->shape.rank; i++) inverse[perm[i]] = i;
    GI(0, ont_build_transpose(&g->b, GO(0), inverse));
}

static const ont_kernel transpose_kernels[] = {
    {.name = "transpose_ref", .accept = ont_accept_any, .prepare = transpose_prepare, .run = run_copy},
};
const ont_op ont_op_Transpose = {.domain = "", .name = "Transpose", .since = 1, .min_inputs = 1, .max_inputs = 1,
                                 .flags = ONT_OP_MEMORY_BOUND, .attributes = "perm:I", .infer = transpose_infer,
                                 .grad = transpose_grad, .rows = ONT_ROWS_TRANSPOSE,
                                 ONT_KERNELS(transpose_kernels)};

/* ---- Expand ---- */

static ont_status expand_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    int64_t dims[ONT_MAX_RANK];
    int n;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_const_ints(node, 1, NULL, dims, ONT_MAX_RANK, &n));
    if (n < 0) return ont_fail(ONT_EINVAL, "no shape is given");
    for (int i = 0; i < n; i++)
        if (dims[i] < 0) return ont_fail(ONT_EINVAL, "shape[%d] is %" PRId64, i, dims[i]);
    ont_shape shape = ont_shape_of(n, dims);
    ONT_TRY(ont_shape_broadcast(&x->shape, &shape, &shape));
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_status expand_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *y = node->outputs[0];
    int64_t from[ONT_MAX_RANK], to[ONT_MAX_RANK];
    ont_strided *s = new_copy(arena, out);
    if (!s) return ONT_ENOMEM;
    ont_shape_broadcast_strides(&x->shape, &y->shape, from);
    ont_shape_strides(&y->shape, to);
    ont_strided_init(s, &y->shape, from, 0, to, 0, ont_dtype_size(x->dtype));
    return ONT_OK;
}

static void expand_grad(ont_grad *g)
{
    GI(0, GO(0)); /* differentiation sums over the broadcast dims */
}

static const ont_kernel expand_kernels[] = {
    {.name = "expand_ref", .accept = ont_accept_any, .prepare = expand_prepare, .run = run_copy},
};
const ont_op ont_op_Expand = {.domain = "", .name = "Expand", .since = 8, .min_inputs = 2, .max_inputs = 2,
                              .nondiff_inputs = 2, .flags = ONT_OP_MEMORY_BOUND, .attributes = "",
                              .infer = expand_infer, .grad = expand_grad, .rows = ONT_ROWS_EXPAND,
                              ONT_KERNELS(expand_kernels)};

/* ---- Slice and its gradient: a box of the input with steps ---- */

typedef struct box {
    ont_shape shape;               /* of the slice */
    int64_t start[ONT_MAX_RANK], step[ONT_MAX_RANK];
} box;

static int64_t bounded(int64_t v, int64_t low, int64_t high)
{
    return v < low ? low : v > high ? high : v;
}

/* starts, ends, axes and steps are inputs from opset 10 on, attributes before. */
static ont_status slice_box(const ont_node *node, const ont_shape *x, box *out)
{
    int64_t starts[ONT_MAX_RANK], ends[ONT_MAX_RANK], axes[ONT_MAX_RANK], steps[ONT_MAX_RANK];
    int n, n_ends, n_axes, n_steps;
    ONT_TRY(ont_const_ints(node, 1, "starts", starts, ONT_MAX_RANK, &n));
    ONT_TRY(ont_const_ints(node, 2, "ends", ends, ONT_MAX_RANK, &n_ends));
    ONT_TRY(ont_const_ints(node, 3, "axes", axes, ONT_MAX_RANK, &n_axes));
    ONT_TRY(ont_const_ints(node, 4, "steps", steps, ONT_MAX_RANK, &n_steps));
    if (n < 0 || n_ends != n || (n_axes >= 0 && n_axes != n) || (n_steps >= 0 && n_steps != n))
        return ont_fail(ONT_EINVAL, "starts, ends, axes and steps have %d, %d, %d and %d entries", n, n_ends, n_axes,
                        n_steps);
    out->shape = *x;
    for (int d = 0; d < x->rank; d++) out->start[d] = 0, out->step[d] = 1;
    for (int i = 0; i < n; i++) {
        int axis;
        ONT_TRY(ont_shape_axis(n_axes < 0 ? i : axes[i], x->rank, &axis));
        int64_t dim = x->dims[axis], step = n_steps < 0 ? 1 : steps[i];
        if (!step || step == INT64_MIN)
            return ont_fail(ONT_EINVAL, "step of axis %d is %" PRId64 ", which is not allowed", axis, step);
        int64_t start = starts[i] < 0 ? starts[i] + dim : starts[i];
        int64_t end = ends[i] < 0 && ends[i] >= -dim ? ends[i] + dim : ends[i] < -dim ? -1 : ends[i];
        start = step > 0 ? bounded(start, 0, dim) : bounded(start, 0, dim - 1);
        end = step > 0 ? bounded(end, 0, dim) : bounded(end, -1, dim - 1);
        int64_t span = step > 0 ? end - start : start - end, size = step > 0 ? step : -step;
        out->shape.dims[axis] = span <= 0 || !dim ? 0 : (span - 1) / size + 1;
        out->start[axis] = start;
        out->step[axis] = step;
    }
    return ONT_OK;
}

static ont_status slice_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    box b;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(slice_box(node, &x->shape, &b));
    return ont_infer_out(node, 0, x->dtype, &b.shape);
}

/* Strides and offset of the box in a tensor of shape `whole`, in elements. */
static int64_t box_layout(const box *b, const ont_shape *whole, int64_t *strides)
{
    int64_t offset = 0;
    ont_shape_strides(whole, strides);
    for (int d = 0; d < whole->rank; d++) {
        if (b->shape.dims[d]) offset += b->start[d] * strides[d];
        strides[d] *= b->step[d];
    }
    return offset;
}

static ont_status slice_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    box b;
    int64_t from[ONT_MAX_RANK], to[ONT_MAX_RANK];
    ont_strided *s = new_copy(arena, out);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(slice_box(node, &x->shape, &b));
    int64_t offset = box_layout(&b, &x->shape, from);
    ont_shape_strides(&b.shape, to);
    ont_strided_init(s, &b.shape, from, offset, to, 0, ont_dtype_size(x->dtype));
    return ONT_OK;
}

/* PutSlice(dy; shape, start, step): zeros of `shape` with dy in the box. */
static ont_value *put_slice(ont_builder *b, ont_value *dy, const ont_shape *shape, const int64_t *start,
                            const int64_t *step)
{
    size_t rank = (size_t)shape->rank;
    ont_node *node = b->status == ONT_OK ? ont_build_node(b, ONT_DOMAIN, "PutSlice", &dy, 1, 1) : NULL;
    if (node) b->status = ont_attr_set_ints(b->graph, node, "shape", shape->dims, rank);
    if (b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, node, "start", start, rank);
    if (b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, node, "step", step, rank);
    return ont_build_done(b, node);
}

static void slice_grad(ont_grad *g)
{
    box b;
    if (slice_box(g->node, &I(0)->shape, &b) != ONT_OK) return;
    GI(0, put_slice(&g->b, GO(0), &I(0)->shape, b.start, b.step));
}

static const ont_kernel slice_kernels[] = {
    {.name = "slice_ref", .accept = ont_accept_any, .prepare = slice_prepare, .run = run_copy},
};
const ont_op ont_op_Slice = {.domain = "", .name = "Slice", .since = 1, .min_inputs = 1, .max_inputs = 5,
                             .nondiff_inputs = ~1ull, .flags = ONT_OP_MEMORY_BOUND,
                             .attributes = "starts:I ends:I axes:I", .infer = slice_infer,
                             .grad = slice_grad, .rows = ONT_ROWS_SLICE,
                             ONT_KERNELS(slice_kernels)};

static ont_status put_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *dy = ont_node_in(node, 0), *dx = node->outputs[0];
    size_t n;
    box b = {.shape = dy->shape};
    int64_t from[ONT_MAX_RANK], to[ONT_MAX_RANK];
    ont_strided *s = new_copy(arena, out);
    if (!s) return ONT_ENOMEM;
    const int64_t *start = ont_attr_ints(node, "start", &n), *step = ont_attr_ints(node, "step", &n);
    for (size_t d = 0; d < n; d++) b.start[d] = start[d], b.step[d] = step[d];
    int64_t offset = box_layout(&b, &dx->shape, to);
    ont_shape_strides(&dy->shape, from);
    ont_strided_init(s, &dy->shape, from, 0, to, offset, ont_dtype_size(dy->dtype));
    return ONT_OK;
}

static ont_status put_run(const ont_call *call)
{
    const ont_value *dy = ont_node_in(call->node, 0), *dx = call->node->outputs[0];
    int64_t count = ont_shape_count(&dx->shape);
    if (ont_shape_count(&dy->shape) < count) memset(call->out[0], 0, (size_t)count * ont_dtype_size(dx->dtype));
    return run_copy(call);
}

static const ont_kernel put_kernels[] = {
    {.name = "put_slice_ref", .accept = ont_accept_any, .prepare = put_prepare, .run = put_run},
};
const ont_op ont_op_PutSlice = {.domain = ONT_DOMAIN, .name = "PutSlice", .since = 1, .min_inputs = 1, .max_inputs = 1,
                                .attributes = "shape:I start:I step:I", .infer = ont_infer_shape_attr,
                                ONT_KERNELS(put_kernels)};

/* ---- Split, Concat ---- */

static ont_status split_sizes(const ont_node *node, int64_t dim, int64_t *sizes)
{
    int n = (int)node->n_outputs, given;
    int64_t *list = sizes, sum = 0;
    ONT_TRY(ont_const_ints(node, 1, "split", list, n, &given));
    if (given >= 0 && given != n) return ont_fail(ONT_EINVAL, "%d split sizes for %d outputs", given, n);
    if (given < 0) {
        int64_t parts = ont_attr_int(node, "num_outputs", n), chunk = parts > 0 ? (dim + parts - 1) / parts : 0;
        if (parts != n) return ont_fail(ONT_EINVAL, "num_outputs is %" PRId64 ", the node has %d", parts, n);
        for (int i = 0; i < n; i++) sizes[i] = bounded(dim - i * chunk, 0, chunk);
    }
    for (int i = 0; i < n; i++) {
        if (sizes[i] < 0) return ont_fail(ONT_EINVAL, "split[%d] is %" PRId64 ", at least 0 is expected", i, sizes[i]);
        if (sizes[i] > dim - sum)
            return ont_fail(ONT_EINVAL, "split sizes add up to more than the %" PRId64 " of the axis", dim);
        sum += sizes[i];
    }
    return sum == dim ? ONT_OK
                      : ont_fail(ONT_EINVAL, "split sizes add up to %" PRId64 ", the axis has %" PRId64, sum, dim);
}

static ont_status split_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    int axis;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis));
    int64_t *sizes = ont_arena_array(&g->arena, node->n_outputs, sizeof *sizes);
    if (!sizes) return ONT_ENOMEM;
    ONT_TRY(split_sizes(node, x->shape.dims[axis], sizes));
    ont_shape shape = x->shape;
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        shape.dims[axis] = sizes[i];
        ONT_TRY(ont_infer_out(node, i, x->dtype, &shape));
    }
    return ONT_OK;
}

/* Copies one part: a box of the whole along `axis`, to or from the part. */
static ont_status parts_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out, bool split)
{
    uint32_t n = split ? node->n_outputs : node->n_inputs;
    const ont_value *whole = split ? ont_node_in(node, 0) : node->outputs[0];
    ont_strided *copies = ont_arena_array(arena, n, sizeof *copies);
    int64_t *sizes = ont_arena_array(arena, n, sizeof *sizes);
    int64_t strides[ONT_MAX_RANK], own[ONT_MAX_RANK], at = 0;
    int axis;
    if (!copies || !sizes) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), whole->shape.rank, &axis));
    if (split) ONT_TRY(split_sizes(node, whole->shape.dims[axis], sizes));
    ont_shape_strides(&whole->shape, strides);
    for (uint32_t i = 0; i < n; i++) {
        ont_shape part = whole->shape;
        part.dims[axis] = split ? sizes[i] : ont_node_in(node, i)->shape.dims[axis];
        ont_shape_strides(&part, own);
        if (split)
            ont_strided_init(&copies[i], &part, strides, at * strides[axis], own, 0, ont_dtype_size(whole->dtype));
        else
            ont_strided_init(&copies[i], &part, own, 0, strides, at * strides[axis], ont_dtype_size(whole->dtype));
        at += part.dims[axis];
    }
    out->state = copies;
    return ONT_OK;
}

static ont_status split_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return parts_prepare(node, arena, out, true);
}

static ont_status split_run(const ont_call *call)
{
    for (uint32_t i = 0; i < call->node->n_outputs; i++)
        if (call->out[i]) ont_strided_copy((const ont_strided *)call->state + i, call->in[0], call->out[i]);
    return ONT_OK;
}

static ont_status concat_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return parts_prepare(node, arena, out, false);
}

static ont_status concat_run(const ont_call *call)
{
    for (uint32_t i = 0; i < call->node->n_inputs; i++)
        ont_strided_copy((const ont_strided *)call->state + i, call->in[i], call->out[0]);
    return ONT_OK;
}

static ont_status concat_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    int axis;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (!ont_attr_find(node, "axis", ONT_ATTR_INT)) return ont_fail(ONT_EINVAL, "attribute axis is missing");
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis));
    ont_shape shape = x->shape;
    for (uint32_t i = 1; i < node->n_inputs; i++) {
        ont_value *y;
        ONT_TRY(ont_need_input(node, i, &y));
        ont_shape rest = y->shape;
        if (rest.rank == shape.rank) rest.dims[axis] = shape.dims[axis];
        if (y->dtype != x->dtype || !ont_shape_equal(&rest, &shape)) {
            char a[ONT_SHAPE_TEXT], b[ONT_SHAPE_TEXT];
            return ont_fail(ONT_EINVAL, "input %u is %s%s, does not join %s%s along axis %d", i,
                            ont_dtype_name(y->dtype), ont_shape_text(&y->shape, a), ont_dtype_name(x->dtype),
                            ont_shape_text(&x->shape, b), axis);
        }
        if (__builtin_add_overflow(shape.dims[axis], y->shape.dims[axis], &shape.dims[axis]))
            return ont_fail(ONT_EINVAL, "axis %d overflows", axis);
    }
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static void split_grad(ont_grad *g)
{
    uint32_t n = g->node->n_outputs;
    ont_value **parts = ont_arena_array(&g->b.graph->arena, n, sizeof *parts);
    if (!parts) {
        g->b.status = ONT_ENOMEM;
        return;
    }
    /* A part without a user gets its output back, so that its zero gradient has a shape. */
    for (uint32_t i = 0; i < n && g->b.status == ONT_OK; i++) {
        ont_value *part;
        if (!O(i)) g->b.status = ont_node_ensure_output(g->b.graph, g->node, i, &part);
        if (g->b.status == ONT_OK) g->b.status = split_infer(g->b.graph, g->node);
        parts[i] = g->b.status == ONT_OK ? GO(i) : NULL;
    }
    if (g->b.status != ONT_OK) return;
    ont_node *node = ont_build_node(&g->b, "", "Concat", parts, n, 1);
    if (node) g->b.status = ont_attr_set_int(g->b.graph, node, "axis", ont_attr_int(g->node, "axis", 0));
    GI(0, ont_build_done(&g->b, node));
}

static void concat_grad(ont_grad *g)
{
    int64_t at = 0;
    int axis;
    ont_builder *b = &g->b;
    if (ont_shape_axis(ont_attr_int(g->node, "axis", 0), O(0)->shape.rank, &axis) != ONT_OK) return;
    for (uint32_t i = 0; i < g->node->n_inputs; i++) {
        int64_t size = I(i)->shape.dims[axis], along = axis;
        if (WANTS(i)) {
            ont_value *bounds[] = {GO(0), ont_build_const_ints(b, (int64_t[]){at}, 1),
                                   ont_build_const_ints(b, (int64_t[]){at + size}, 1),
                                   ont_build_const_ints(b, &along, 1)};
            GI(i, ont_build_done(b, ont_build_node(b, "", "Slice", bounds, 4, 1)));
        }
        at += size;
    }
}

static const ont_kernel split_kernels[] = {
    {.name = "split_ref", .accept = ont_accept_any, .prepare = split_prepare, .run = split_run},
};
static const ont_kernel concat_kernels[] = {
    {.name = "concat_ref", .accept = ont_accept_any, .prepare = concat_prepare, .run = concat_run},
};
const ont_op ont_op_Split = {.domain = "", .name = "Split", .since = 2, .min_inputs = 1, .max_inputs = 2,
                             .nondiff_inputs = 2, .attributes = "axis:i split:I num_outputs:i", .infer = split_infer,
                             .grad = split_grad, .rows = ONT_ROWS_SPLIT,
                             ONT_KERNELS(split_kernels)};
const ont_op ont_op_Concat = {.domain = "", .name = "Concat", .since = 4, .min_inputs = 1, .max_inputs = 65536,
                              .flags = ONT_OP_MEMORY_BOUND, .attributes = "axis:i", .infer = concat_infer,
                              .grad = concat_grad, .rows = ONT_ROWS_CONCAT,
                              ONT_KERNELS(concat_kernels)};
