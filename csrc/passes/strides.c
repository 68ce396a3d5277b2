/*
 * Strided views. See strides.h.
 */
#include "passes/strides.h"

#include <string.h>

bool ont_node_keeps_order(const ont_node *node)
{
    return ONT_IS(node, Identity) || ONT_IS(node, Reshape) || ONT_IS(node, Squeeze) || ONT_IS(node, Unsqueeze) ||
           ONT_IS(node, Flatten);
}

/* ---- factors ---- */

/* Whether both factors form one run: `outer` continues where `inner` ends. */
static bool continues(ont_factor outer, ont_factor inner)
{
    return outer.stride == inner.stride * inner.size;
}

static void identity(ont_value *v, ont_strided_view *view)
{
    *view = (ont_strided_view){.root = v, .scale = 1};
    int64_t strides[ONT_MAX_RANK];
    ont_shape_strides(&v->shape, strides);
    for (int d = 0; d < v->shape.rank; d++)
        if (v->shape.dims[d] != 1) view->factors[view->n_factors++] = (ont_factor){v->shape.dims[d], strides[d]};
}

bool ont_strided_view_regroup(ont_strided_view *view, const int64_t *sizes, int n, int *counts)
{
    ont_factor done[ONT_STRIDED_VIEW_FACTORS]; /* innermost first */
    int n_done = 0, at = view->n_factors - 1;
    ont_factor rest = at >= 0 ? view->factors[at] : (ont_factor){1, 0};
    for (int g = n - 1; g >= 0; g--) {
        int64_t left = sizes[g];
        counts[g] = 0;
        while (left > 1) {
            while (rest.size == 1 && at > 0) rest = view->factors[--at];
            int64_t take = left < rest.size ? left : rest.size;
            if (take <= 1 || rest.size % take || left % take || n_done == ONT_STRIDED_VIEW_FACTORS) return false;
            ont_factor piece = {take, rest.stride};
            if (counts[g] && continues(piece, done[n_done - 1]))
                done[n_done - 1].size *= take;
            else
                done[n_done++] = piece, counts[g]++;
            rest = (ont_factor){rest.size / take, rest.stride * take};
            left /= take;
        }
    }
    if (at > 0 || rest.size != 1) return false;
    for (int i = 0; i < n_done; i++) view->factors[i] = done[n_done - 1 - i];
    view->n_factors = n_done;
    return true;
}

/* One step of the refinement, from the inside: the smallest remaining size of each view's innermost factor. */
static int64_t next_size(const int *at, const ont_factor *rest, int n, int64_t limit)
{
    int64_t size = limit;
    for (int i = 0; i < n; i++) {
        if (at[i] < 0) return 0;
        if (rest[i].size < size) size = rest[i].size;
    }
    for (int i = 0; i < n; i++)
        if (rest[i].size % size) return 0;
    return limit % size ? 0 : size;
}

static void merge_all(ont_strided_view **views, int n, int64_t split)
{
    int64_t inner = 1; /* entries inside factor k + 1 */
    for (int k = views[0]->n_factors - 2; k >= 0; k--) {
        inner *= views[0]->factors[k + 1].size;
        bool merge = inner != split;
        for (int i = 0; i < n; i++) merge = merge && continues(views[i]->factors[k], views[i]->factors[k + 1]);
        if (!merge) continue;
        inner /= views[0]->factors[k + 1].size;
        for (int i = 0; i < n; i++) {
            ont_strided_view *v = views[i];
            v->factors[k] = (ont_factor){v->factors[k].size * v->factors[k + 1].size, v->factors[k + 1].stride};
            memmove(v->factors + k + 1, v->factors + k + 2, (size_t)(v->n_factors - k - 2) * sizeof *v->factors);
            v->n_factors--;
        }
    }
}

bool ont_strided_view_refine(ont_strided_view **views, int n, int64_t split)
{
    enum { MAX_VIEWS = 12 };
    ont_factor fine[MAX_VIEWS][ONT_STRIDED_VIEW_FACTORS], rest[MAX_VIEWS];
    int at[MAX_VIEWS], count = 0;
    int64_t inner = 1, total = 1;
    if (n > MAX_VIEWS) return false;
    for (int k = 0; k < views[0]->n_factors; k++) total *= views[0]->factors[k].size;
    for (int i = 0; i < n; i++) {
        at[i] = views[i]->n_factors - 1;
        if (at[i] >= 0) rest[i] = views[i]->factors[at[i]];
    }
    while (inner < total) {
        int64_t size = next_size(at, rest, n, inner < split ? split / inner : total / inner);
        if (size <= 1 || count == ONT_STRIDED_VIEW_FACTORS) return false;
        for (int i = 0; i < n; i++) {
            fine[i][count] = (ont_factor){size, rest[i].stride};
            rest[i] = (ont_factor){rest[i].size / size, rest[i].stride * size};
            if (rest[i].size == 1 && --at[i] >= 0) rest[i] = views[i]->factors[at[i]];
        }
        count++;
        inner *= size;
    }
    for (int i = 0; i < n; i++) {
        if (at[i] >= 0) return false;
        for (int k = 0; k < count; k++) views[i]->factors[k] = fine[i][count - 1 - k];
        views[i]->n_factors = count;
    }
    merge_all(views, n, split);
    return true;
}

/* ---- operators ---- */

/* Groups the factors by the dims of `shape`. */
static bool by_dims(ont_strided_view *view, const ont_shape *shape, int *counts)
{
    return ont_strided_view_regroup(view, shape->dims, shape->rank, counts);
}

static bool transpose(ont_strided_view *view, const ont_node *node, const ont_shape *x)
{
    int counts[ONT_MAX_RANK], first[ONT_MAX_RANK], n = 0;
    size_t n_perm;
    const int64_t *perm = ont_attr_ints(node, "perm", &n_perm);
    if ((perm && n_perm != (size_t)x->rank) || !by_dims(view, x, counts)) return false;
    for (int d = 0, at = 0; d < x->rank; at += counts[d++]) first[d] = at;
    ont_factor factors[ONT_STRIDED_VIEW_FACTORS];
    for (int d = 0; d < x->rank; d++) {
        int from = perm ? (int)perm[d] : x->rank - 1 - d;
        for (int i = 0; i < counts[from]; i++) factors[n++] = view->factors[first[from] + i];
    }
    memcpy(view->factors, factors, (size_t)n * sizeof *factors);
    return true;
}

/* Restricts dim `axis` to entries [start, start + size). */
static bool part(ont_strided_view *view, const ont_shape *x, int axis, int64_t start, int64_t size)
{
    int counts[ONT_MAX_RANK], at = 0;
    if (!by_dims(view, x, counts)) return false;
    for (int d = 0; d < axis; d++) at += counts[d];
    if (start < 0 || start + size > x->dims[axis]) return false;
    if (size == x->dims[axis]) return true;
    if (counts[axis] != 1) return false;
    view->offset += start * view->factors[at].stride;
    view->factors[at].size = size;
    if (size != 1) return true;
    memmove(view->factors + at, view->factors + at + 1, (size_t)(view->n_factors - at - 1) * sizeof *view->factors);
    view->n_factors--;
    return true;
}

static bool gather(ont_strided_view *view, const ont_node *node, const ont_shape *x)
{
    int axis, n;
    int64_t index;
    const ont_value *indices = ont_node_in(node, 1);
    if (!indices || !indices->data || ont_shape_count(&indices->shape) != 1) return false;
    if (ont_shape_axis(ont_attr_int(node, "axis", 0), x->rank, &axis) != ONT_OK) return false;
    if (ont_const_ints(node, 1, NULL, &index, 1, &n) != ONT_OK || n != 1) return false;
    if (index < 0) index += x->dims[axis];
    return part(view, x, axis, index, 1);
}

static bool split(ont_strided_view *view, const ont_node *node, const ont_shape *x, uint32_t which)
{
    int axis;
    int64_t start = 0;
    if (ont_shape_axis(ont_attr_int(node, "axis", 0), x->rank, &axis) != ONT_OK) return false;
    for (uint32_t i = 0; i < which; i++) {
        if (!node->outputs[i]) return false; /* its size is unknown */
        start += node->outputs[i]->shape.dims[axis];
    }
    return part(view, x, axis, start, node->outputs[which]->shape.dims[axis]);
}

static bool slice(ont_strided_view *view, const ont_node *node, const ont_shape *x)
{
    int64_t starts[ONT_MAX_RANK], axes[ONT_MAX_RANK], steps[ONT_MAX_RANK];
    int n, n_axes, n_steps;
    if (node->version < 10 || ont_const_ints(node, 1, NULL, starts, ONT_MAX_RANK, &n) != ONT_OK) return false;
    if (ont_const_ints(node, 3, NULL, axes, ONT_MAX_RANK, &n_axes) != ONT_OK) return false;
    if (ont_const_ints(node, 4, NULL, steps, ONT_MAX_RANK, &n_steps) != ONT_OK) return false;
    for (int i = 0; i < n; i++) {
        int axis;
        if (ont_shape_axis(n_axes < 0 ? i : axes[i], x->rank, &axis) != ONT_OK || (n_steps >= 0 && steps[i] != 1))
            return false;
        int64_t size = node->outputs[0]->shape.dims[axis],
                start = starts[i] < 0 ? starts[i] + x->dims[axis] : starts[i];
        ont_shape before = *x; /* axes sliced so far have their new sizes */
        for (int j = 0; j < i; j++) {
            int other;
            if (ont_shape_axis(n_axes < 0 ? j : axes[j], x->rank, &other) != ONT_OK || other == axis) return false;
            before.dims[other] = node->outputs[0]->shape.dims[other];
        }
        if (!part(view, &before, axis, start < 0 ? 0 : start, size)) return false;
    }
    return true;
}

bool ont_strided_view_expand(ont_strided_view *view, const ont_shape *x, const ont_shape *y)
{
    int counts[ONT_MAX_RANK], n = 0, from = 0;
    ont_factor factors[2 * ONT_STRIDED_VIEW_FACTORS];
    if (!by_dims(view, x, counts)) return false;
    for (int d = 0; d < y->rank; d++) {
        int at = d - (y->rank - x->rank);
        int64_t size = at < 0 ? 1 : x->dims[at];
        if (size != y->dims[d]) factors[n++] = (ont_factor){y->dims[d], 0};
        for (int i = 0; at >= 0 && i < counts[at]; i++) factors[n++] = view->factors[from++];
    }
    if (n > ONT_STRIDED_VIEW_FACTORS) return false;
    memcpy(view->factors, factors, (size_t)n * sizeof *factors);
    view->n_factors = n;
    return true;
}

/* For x times or divided by a constant: the operand index of x, or -1. */
static int scaled(const ont_node *node, double *factor)
{
    bool divides = ONT_IS(node, Div);
    if (!divides && !ONT_IS(node, Mul)) return -1;
    for (int i = 1; i >= (divides ? 1 : 0); i--) {
        const ont_value *x = ont_node_in(node, (uint32_t)(1 - i)), *c = ont_node_in(node, (uint32_t)i);
        if (!x || !c || !c->data || ont_shape_count(&c->shape) != 1 ||
            !ont_shape_equal(&x->shape, &node->outputs[0]->shape))
            continue;
        if (c->kind != ONT_VALUE_CONSTANT || !ont_dtype_is_float(c->dtype) ||
            ont_const_scalar(node, (uint32_t)i, factor) != ONT_OK)
            continue;
        if (divides) *factor = 1 / *factor;
        return 1 - i;
    }
    return -1;
}

static bool apply(ont_strided_view *view, const ont_node *node, const ont_value *v,
                  const ont_strided_view_limits *limits)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    if (ont_node_keeps_order(node)) return true; /* the factors list all entries in order, independent of dims */
    if (ONT_IS(node, Transpose)) return transpose(view, node, x);
    if (ONT_IS(node, Expand)) return ont_strided_view_expand(view, x, &v->shape);
    if (!limits->parts) return false;
    if (ONT_IS(node, Gather)) return gather(view, node, x);
    if (ONT_IS(node, Split)) return split(view, node, x, v->def_index);
    if (ONT_IS(node, Slice)) return slice(view, node, x);
    return false;
}

void ont_strided_view_of(ont_value *v, const ont_strided_view_limits *limits, ont_strided_view *view)
{
    identity(v, view);
    if (v == limits->stop || v->kind != ONT_VALUE_NODE || v->data || !ont_shape_count(&v->shape)) return;
    double factor = 1;
    int from = limits->scales ? scaled(v->def, &factor) : -1;
    ont_value *x = ont_node_in(v->def, from >= 0 ? (uint32_t)from : 0);
    if (!x || x->container != ONT_TENSOR || !x->has_shape || (from < 0 && v->def_index && !ONT_IS(v->def, Split)))
        return;
    ont_strided_view below;
    ont_strided_view_of(x, limits, &below);
    below.scale *= factor;
    if (from >= 0 || (v->def->op && apply(&below, v->def, v, limits))) *view = below;
}
