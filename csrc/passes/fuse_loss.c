/*
 * Cross-entropy of 16-bit logits without a float32 copy: SoftmaxCrossEntropyLoss and its gradient read the 16-bit
 * logits from before their Cast, and the gradient is written in the 16 bits that the next matmul reads, in place of the
 * logits if these have no other use. The loss is still computed in float32. After differentiation, before fuse_gemm,
 * which would make the preceding matmul write float32. Values with other users are left alone.
 *
 * On a device, logits from which a Slice cuts the columns that align_products.c has added are read from before the
 * Slice, and the gradient is written with these columns: GPT-2's logits would be copied twice otherwise.
 */
#include <string.h>

#include "passes/match.h"
#include "passes/pass.h"

/* ---- SoftmaxCrossEntropyGrad, views, Cast ---- */

static ont_status narrow_gradient(ont_graph *g, ont_node *node)
{
    const ont_value *y = node->outputs[0];
    ont_node *cast = ont_single_user_in_phase(g, y);
    if (y->dtype != ONT_FLOAT32 || ont_node_in(node, 0)->dtype != ONT_FLOAT32) return ONT_OK;
    while (ont_node_is_view(cast) && cast->inputs[0].value == y) {
        y = cast->outputs[0];
        cast = ont_single_user_in_phase(g, y);
    }
    if (!cast || !ONT_IS(cast, Cast) || !ont_dtype_is_half(cast->outputs[0]->dtype)) return ONT_OK;
    ont_dtype to = cast->outputs[0]->dtype;
    ONT_TRY(ont_attr_set_int(g, node, "to", to));
    if (!ont_op_has_kernel(node, g->device)) return ont_attr_set_int(g, node, "to", ONT_FLOAT32);
    ont_value *last = ont_node_in(cast, 0);
    for (ont_value *v = last;; v = v->def->inputs[0].value) {
        v->dtype = to;
        if (v->def == node) break;
    }
    ont_value_replace_uses(g, cast->outputs[0], last);
    ont_graph_remove_node(g, cast);
    return ONT_OK;
}

/* ---- Cast, views, SoftmaxCrossEntropyLoss and its gradient ---- */

/* Whether the loss and its gradient are the only users of the logits. */
static bool only_used_by(const ont_graph *g, const ont_value *scores, const ont_node *loss, const ont_node *grad)
{
    if (ont_value_is_output(g, scores)) return false;
    for (const ont_use *use = scores->uses; use; use = use->next)
        if ((use->user != loss && use->user != grad) || use != &use->user->inputs[0]) return false;
    return true;
}

/* The Cast of 16-bit logits, with at most views behind it; NULL: none, or the values in between have other users. */
static ont_node *cast_before(const ont_graph *g, const ont_value *scores)
{
    ont_node *node = scores->def;
    while (ont_node_is_view(node) && node->inputs[0].value->def && node->inputs[0].value->dtype == ONT_FLOAT32) {
        const ont_value *before = node->inputs[0].value;
        if (before->uses->next || ont_value_is_output(g, before)) return NULL;
        node = before->def;
    }
    return node && ONT_IS(node, Cast) && ont_dtype_is_half(ont_node_in(node, 0)->dtype) ? node : NULL;
}

static ont_node *loss_of(const ont_node *grad)
{
    ont_node *loss = ont_node_in(grad, 4)->def;
    return loss && ONT_IS(loss, SoftmaxCrossEntropyLossPairs) &&
                   ont_node_in(loss, 0) == ont_node_in(grad, 0)
               ? loss
               : NULL;
}

static const ont_node *root_producer(const ont_value *value)
{
    const ont_node *node = value->def;
    while (ont_node_is_view(node)) node = node->inputs[0].value->def;
    return node;
}

/*
 * Whether the producer of the logits writes 16 bits itself, a matmul included whose bias fuse_gemm is about to add. If
 * it is promoted, its float32 result is available without rounding.
 */
static bool is_produced_in_16_bits(const ont_graph *g, const ont_value *scores)
{
    const ont_node *node = root_producer(scores);
    if (!node || ont_op_has_kernel(node, g->device)) return true;
    for (uint32_t i = 0; ONT_IS(node, Add) && i < 2; i++) {
        const ont_node *product = root_producer(node->inputs[i].value);
        if (ont_is_matmul(product) && ont_op_has_kernel(product, g->device)) return true;
    }
    return false;
}

static ont_status narrow_scores(ont_graph *g, ont_node *grad)
{
    ont_value *scores = ont_node_in(grad, 0);
    ont_node *loss = loss_of(grad), *cast = cast_before(g, scores);
    if (!loss || !cast || !only_used_by(g, scores, loss, grad)) return ONT_OK;
    ont_value *narrow = ont_node_in(cast, 0);
    if (ont_attr_int(grad, "to", ONT_FLOAT32) != (int64_t)narrow->dtype || loss->outputs[1] ||
        !is_produced_in_16_bits(g, narrow))
        return ONT_OK;
    ont_value *y = cast->outputs[0];
    scores->dtype = narrow->dtype; /* read by accept() */
    bool fits = ont_op_has_kernel(loss, g->device) && ont_op_has_kernel(grad, g->device);
    scores->dtype = ONT_FLOAT32;
    if (!fits) return ONT_OK;
    ONT_TRY(ont_attr_set_int(g, loss, "stash_type", ONT_FLOAT32));
    for (ont_value *v = scores; v != y; v = v->def->inputs[0].value) v->dtype = narrow->dtype;
    ont_value_replace_uses(g, y, narrow);
    ont_graph_remove_node(g, cast);
    return ONT_OK;
}

/* ---- Slice, views, SoftmaxCrossEntropyLoss and its gradient, views, PutSlice ---- */

/* Whether the node is a Slice that leaves out the end of the last dim. */
static bool cuts_columns(const ont_node *node)
{
    int64_t start, axis;
    int n_starts, n_axes;
    if (!node || !ONT_IS(node, Slice) || node->n_inputs != 4) return false;
    if (ont_const_ints(node, 1, NULL, &start, 1, &n_starts) != ONT_OK || n_starts != 1 || start) return false;
    if (ont_const_ints(node, 3, NULL, &axis, 1, &n_axes) != ONT_OK || n_axes != 1) return false;
    return axis == ont_node_in(node, 0)->shape.rank - 1;
}

/* The Slice of the logits, with at most views behind it; NULL: none, or the values in between have other users. */
static ont_node *cut_before(const ont_graph *g, const ont_value *scores)
{
    const int64_t classes = ont_last_dim(scores);
    while (ont_node_is_view(scores->def) && ont_last_dim(ont_node_in(scores->def, 0)) == classes) {
        scores = ont_node_in(scores->def, 0);
        if (scores->uses->next || ont_value_is_output(g, scores)) return NULL;
    }
    return cuts_columns(scores->def) ? scores->def : NULL;
}

/* The PutSlice that is the gradient of such a Slice of a tensor of this shape, with at most views before it. */
static ont_node *put_behind(const ont_graph *g, const ont_value *gradient, const ont_shape *shape)
{
    const int64_t classes = ont_last_dim(gradient);
    ont_node *put = ont_single_user_in_phase(g, gradient);
    while (ont_node_is_view(put) && ont_last_dim(put->outputs[0]) == classes)
        put = ont_single_user_in_phase(g, put->outputs[0]);
    if (!put || !ONT_IS(put, PutSlice) || !ont_shape_equal(&put->outputs[0]->shape, shape)) return NULL;
    size_t n;
    const int64_t *start = ont_attr_ints(put, "start", &n);
    for (size_t d = 0; d < n; d++)
        if (start[d]) return NULL;
    ont_shape cut = *shape;
    cut.dims[cut.rank - 1] = classes;
    return ont_shape_equal(&ont_node_in(put, 0)->shape, &cut) ? put : NULL;
}

static ont_status set_scores(ont_graph *g, ont_node *node, ont_value *scores, int64_t classes)
{
    ont_node_set_input(node, 0, scores);
    return ont_attr_set_int(g, node, "classes", classes);
}

/* Replaces the result of `put` by the gradient, which has all columns now, and removes what was between them. */
static ont_status replace_put(ont_graph *g, ont_node *grad, ont_node *put, int64_t columns)
{
    ont_builder b = {.graph = g, .before = put, .backward = true, .origin = grad};
    grad->outputs[0]->shape.dims[1] = columns;
    ont_value *whole = ont_build_reshape(&b, grad->outputs[0], &put->outputs[0]->shape);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, put->outputs[0], whole);
    for (ont_node *node = put, *before; node != grad; node = before) {
        before = ont_node_in(node, 0)->def;
        ont_graph_remove_node(g, node);
    }
    return ONT_OK;
}

static ont_status read_all_columns(ont_graph *g, ont_node *grad)
{
    ont_value *scores = ont_node_in(grad, 0);
    ont_node *loss = loss_of(grad);
    if (!g->device || !loss || loss->outputs[1] || scores->shape.rank != 2 || !only_used_by(g, scores, loss, grad))
        return ONT_OK;
    ont_node *cut = cut_before(g, scores);
    ont_node *put = cut ? put_behind(g, grad->outputs[0], &ont_node_in(cut, 0)->shape) : NULL;
    if (!put) return ONT_OK;
    const int64_t classes = scores->shape.dims[1], columns = ont_last_dim(ont_node_in(cut, 0));
    const ont_shape rows = ont_shape_of(2, (int64_t[]){scores->shape.dims[0], columns});
    ont_builder b = {.graph = g, .before = loss, .origin = loss};
    ont_value *all = ont_build_reshape(&b, ont_node_in(cut, 0), &rows);
    ONT_TRY(b.status);
    ONT_TRY(set_scores(g, loss, all, classes));
    ONT_TRY(set_scores(g, grad, all, classes));
    if (ont_op_has_kernel(loss, g->device) && ont_op_has_kernel(grad, g->device))
        return replace_put(g, grad, put, columns);
    ONT_TRY(set_scores(g, loss, scores, classes)); /* all columns are classes */
    return set_scores(g, grad, scores, classes);
}

ont_status ont_pass_fuse_loss(ont_graph *g)
{
    for (ont_node *node = g->first; node; node = node->next) {
        if (!ONT_IS(node, SoftmaxCrossEntropyGrad)) continue;
        ONT_TRY(narrow_gradient(g, node));
        ONT_TRY(narrow_scores(g, node));
        ONT_TRY(read_all_columns(g, node));
    }
    return ONT_OK;
}
