/*
 * Fuses a rotary position embedding (RoPE) as models write it, x * cos + concat(-b, a) * sin with a and b the halves of
 * x, into one Rotate node, and moves that node in front of the Transpose that produces x, which attention then reads
 * through. Before differentiation and fuse_attention. 16-bit arithmetic is left alone, since it rounds every
 * intermediate result.
 *
 * narrow_rotary drops the Casts of x and y around a Rotate of 16 bits, as autocast leaves them: the node itself
 * computes in float32 and rounds y. What moves or repeats y before it is cast has 16 bits then, and attention looks
 * through it: heads of K that queries share are not stored for each of them.
 */
#include <string.h>

#include "ops/support/compose.h"
#include "passes/match.h"
#include "passes/pass.h"
#include "passes/strides.h"

typedef struct match {
    ont_value *x, *cos, *sin;
    ont_dtype dtype; /* dtype of cos and sin; x may be narrower, with Casts behind it */
} match;

static ont_node *producer_by(const ont_value *v, const ont_op *op)
{
    ont_node *node = ont_producer(v);
    return ont_is_op(node, op) ? node : NULL;
}

static bool is_last(int64_t axis, const ont_value *v)
{
    return axis == -1 || axis == v->shape.rank - 1;
}

/* Reads one integer of a constant input; `default_value` if the input is absent. */
static bool const_int_or(const ont_node *node, uint32_t index, int64_t default_value, int64_t *number)
{
    int n;
    *number = default_value;
    if (!ont_node_in(node, index)) return true;
    return ont_const_ints(node, (int)index, NULL, number, 1, &n) == ONT_OK && n == 1;
}

/* The x of which `half` is half `which`, by a Split or a Slice; NULL: none. */
static ont_value *half_of(const ont_value *half, int which)
{
    const ont_node *split = producer_by(half, &ont_op_Split), *slice = producer_by(half, &ont_op_Slice);
    const ont_node *node = split ? split : slice;
    ont_value *x = node ? ont_node_in(node, 0) : NULL;
    if (!x || ont_last_dim(x) != 2 * ont_last_dim(half) || !ont_last_dim(half)) return NULL;
    if (split) {
        bool fits = split->n_outputs == 2 && split->outputs[which] == half;
        return fits && is_last(ont_attr_int(split, "axis", 0), x) ? x : NULL;
    }
    int64_t start, axis, step;
    if (!ont_node_in(slice, 1) || !ont_node_in(slice, 3) || !const_int_or(slice, 1, 0, &start) ||
        !const_int_or(slice, 3, 0, &axis) || !const_int_or(slice, 4, 1, &step) || !is_last(axis, x))
        return NULL;
    if (start < 0) start += ont_last_dim(x);
    return step == 1 && start == which * ont_last_dim(half) ? x : NULL;
}

/* The x of concat(-b, a), where a and b are its halves; NULL: no match. */
static ont_value *rotate_half_operand(ont_value *v)
{
    const ont_node *concat = producer_by(ont_before_cast(v), &ont_op_Concat);
    if (!concat || concat->n_inputs != 2 || !is_last(ont_attr_int(concat, "axis", 0), concat->outputs[0])) return NULL;
    const ont_node *neg = producer_by(ont_node_in(concat, 0), &ont_op_Neg);
    ont_value *x = neg ? half_of(ont_node_in(neg, 0), 1) : NULL;
    return x && half_of(ont_node_in(concat, 1), 0) == x ? x : NULL;
}

/* Whether the angles cover whole rows and broadcast to x. */
static bool is_full_row_table(const ont_value *angles, const ont_value *x)
{
    ont_shape shape;
    return ont_last_dim(angles) == ont_last_dim(x) &&
           ont_shape_broadcast(&x->shape, &angles->shape, &shape) == ONT_OK && ont_shape_equal(&shape, &x->shape);
}

/* Matches sum = plain + rotated; operands may be in any order. */
static bool find(const ont_node *sum, match *m)
{
    for (uint32_t order = 0; order < 8; order++) {
        uint32_t first = order & 1, half_index = order >> 1 & 1, same = order >> 2 & 1;
        const ont_node *rotated = producer_by(ont_node_in(sum, first), &ont_op_Mul);
        const ont_node *plain = producer_by(ont_node_in(sum, 1 - first), &ont_op_Mul);
        if (!rotated || !plain) return false;
        ont_value *x = rotate_half_operand(ont_node_in(rotated, half_index));
        if (!x || ont_before_cast(ont_node_in(plain, same)) != x) continue;
        *m = (match){x, ont_node_in(plain, 1 - same), ont_node_in(rotated, 1 - half_index), sum->outputs[0]->dtype};
        return m->cos->dtype == m->dtype && m->sin->dtype == m->dtype && is_full_row_table(m->cos, x) &&
               is_full_row_table(m->sin, x);
    }
    return false;
}

/* The angles as they broadcast to the operand of the Transpose; a view if their non-unit dims keep their order. */
static ont_value *before_transpose(ont_builder *b, ont_value *angles, const int64_t *perm, int rank)
{
    ont_shape full = ont_shape_of(rank, (int64_t[ONT_MAX_RANK]){0}), reordered = full;
    int64_t inverse[ONT_MAX_RANK], latest = -1;
    bool ordered = true;
    for (int d = 0; d < rank; d++) {
        int from = d - (rank - angles->shape.rank);
        full.dims[d] = from < 0 ? 1 : angles->shape.dims[from];
        reordered.dims[perm[d]] = full.dims[d];
        inverse[perm[d]] = d;
    }
    for (int d = 0; d < rank; d++) {
        if (reordered.dims[d] == 1) continue;
        ordered &= inverse[d] > latest;
        latest = inverse[d];
    }
    if (ordered) return ont_build_reshape(b, angles, &reordered);
    ont_value *wide = ont_build_reshape(b, angles, &full);
    return wide ? ont_build_transpose(b, wide, inverse) : NULL;
}

static ont_status fuse(ont_graph *g, ont_node *sum, const match *m)
{
    ont_builder b = {.graph = g, .before = sum, .backward = sum->backward, .origin = sum};
    ont_value *x = m->x, *cos = m->cos, *sin = m->sin;
    const ont_node *transpose = producer_by(x, &ont_op_Transpose);
    size_t rank = 0;
    const int64_t *perm = transpose ? ont_attr_ints(transpose, "perm", &rank) : NULL;
    if (perm && perm[rank - 1] != (int64_t)rank - 1) perm = NULL;
    if (perm) {
        x = ont_node_in(transpose, 0);
        cos = before_transpose(&b, cos, perm, (int)rank);
        sin = before_transpose(&b, sin, perm, (int)rank);
    }
    if (x->dtype != m->dtype) x = ont_build_cast(&b, x, m->dtype);
    ont_value *inputs[] = {x, cos, sin};
    ont_node *node = x && cos && sin ? ont_build_node(&b, ONT_DOMAIN, "Rotate", inputs, 3, 1) : NULL;
    if (node) node->name = sum->name;
    ont_value *y = ont_build_done(&b, node);
    if (perm && y) y = ont_build_transpose(&b, y, perm);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, sum->outputs[0], y);
    return ONT_OK;
}

ont_status ont_pass_fuse_rotary(ont_graph *g)
{
    bool changed = false;
    for (ont_node *node = g->first; node; node = node->next) {
        match m;
        if (!ONT_IS(node, Add)) continue;
        ont_dtype dtype = node->outputs[0]->dtype;
        if ((dtype != ONT_FLOAT32 && dtype != ONT_FLOAT64) || !find(node, &m)) continue;
        ONT_TRY(fuse(g, node, &m));
        changed = true;
    }
    return changed ? ont_pass_dce(g) : ONT_OK;
}

/* ---- narrow_rotary ---- */

/* The Cast of y to `dtype`, behind operators that only move or repeat elements; NULL: none. */
static ont_node *cast_behind(const ont_graph *g, const ont_value *y, ont_dtype dtype)
{
    for (ont_node *node; (node = ont_single_user(g, y)) && ont_node_in(node, 0) == y; y = node->outputs[0]) {
        if (ONT_IS(node, Cast)) return node->outputs[0]->dtype == dtype ? node : NULL;
        if (!ont_node_keeps_order(node) && !ONT_IS(node, Transpose) && !ONT_IS(node, Expand)) return NULL;
    }
    return NULL;
}

ont_status ont_pass_narrow_rotary(ont_graph *g)
{
    bool changed = false;
    for (ont_node *node = g->first; node; node = node->next) {
        if (!ONT_IS(node, Rotate) || node->outputs[0]->dtype != ONT_FLOAT32) continue;
        ont_value *x = ont_before_cast(ont_node_in(node, 0));
        ont_node *cast = x != ont_node_in(node, 0) ? cast_behind(g, node->outputs[0], x->dtype) : NULL;
        if (!cast) continue;
        ont_node_set_input(node, 0, x);
        for (ont_value *v = ont_node_in(cast, 0); v != x; v = ont_node_in(v->def, 0)) v->dtype = x->dtype;
        ont_value_replace_uses(g, cast->outputs[0], ont_node_in(cast, 0));
        changed = true;
    }
    return changed ? ont_pass_dce(g) : ONT_OK;
}
