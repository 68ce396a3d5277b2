/*
 * Fuses softmax(scale Q K' + masks) V, with dropout on the probabilities, into one FusedAttention node, which reads Q,
 * K and V in place, from before they were split, transposed and repeated (strides.c). Before differentiation, so that
 * the node's own gradient writes directly into the gradient of the matmul that produced Q, K and V.
 *
 * The match starts at a Softmax, goes up to the matmul of the scores and down to the matmul with V. Each value in
 * between must have one use, and each node must be of a kind that FusedAttention supports; otherwise the graph is left
 * unchanged.
 */
#include "passes/fuse_attention.h"

#include <math.h>
#include <string.h>

#include "ops/attention/fused_attention.h"
#include "ops/random/random.h"
#include "passes/match.h"
#include "passes/move_transpose.h"
#include "passes/pass.h"
#include "passes/causal_mask.h"
#include "passes/strides.h"

typedef struct match {
    ont_graph *g;
    ont_node *softmax, *scores, *values; /* `values`: the matmul with V */
    ont_node *dropout;                   /* NULL: no dropout */
    int64_t seqlen_q, seqlen_k, n_rows;  /* n_rows: batch dims * seqlen_q */
    int64_t head_dim, head_dim_v;
    double scale, masked_value;
    ont_value *bias, *mask, *masked_rows; /* added mask, boolean mask, boolean for fully masked rows; NULL: absent */
    ont_value *second_bias;               /* added to `bias`, or NULL */
    ont_shape bias_shape, mask_shape, masked_rows_shape; /* shapes that they broadcast to */
    bool mask_keeps, causal, zero_nan; /* mask_keeps: the boolean mask is true for visible entries */
    int64_t causal_offset; /* row i sees columns up to i + causal_offset */
    ont_value *y;          /* result of the matmul with V, or of the Where that zeroes fully masked rows */
    ont_value *result;     /* the same after the transpose that follows */
    ont_strided_view view[ONT_ATTENTION_INPUTS + 1]; /* views of (n_rows, ...), one per input and the result */
    int64_t key_stride[ONT_ATTENTION_INPUTS + 1];    /* stride along seqlen_k: of K, V, bias, mask */
} match;

static bool is_single_or_narrow(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT16 || dtype == ONT_BFLOAT16;
}

/* A Cast between scores and softmax of 16-bit matmuls; the fused node computes in float32 throughout. */
static bool is_float_cast(const ont_node *node)
{
    return ONT_IS(node, Cast) && is_single_or_narrow(ont_node_in(node, 0)->dtype) &&
           is_single_or_narrow(node->outputs[0]->dtype);
}

/* ---- from the softmax up to the matmul ---- */

/* A constant float scalar. */
static bool const_float(const ont_node *node, uint32_t index, double *value)
{
    const ont_value *v = ont_node_in(node, index);
    return v && v->kind == ONT_VALUE_CONSTANT && v->data && ont_dtype_is_float(v->dtype) &&
           ont_shape_count(&v->shape) == 1 && ont_const_scalar(node, index, value) == ONT_OK;
}

static bool is_all_scores(const match *m, const ont_value *v)
{
    return v && v->shape.rank && v->shape.dims[v->shape.rank - 1] == m->seqlen_k &&
           ont_shape_count(&v->shape) == m->n_rows * m->seqlen_k;
}

/* Which operand of an Add, Mul or Div are the scores: the one of full size that comes from a matmul; -1: neither. */
static int scores_operand(const match *m, const ont_node *node)
{
    for (int i = 0; i < 2; i++) {
        const ont_value *v = ont_node_in(node, (uint32_t)i);
        for (int depth = 0; depth < 12 && is_all_scores(m, v); depth++) {
            const ont_node *def = ont_producer(v);
            if (!def) break;
            if (ont_is_matmul(def)) return i;
            int next = ONT_IS(def, Where) ? (is_all_scores(m, ont_node_in(def, 1)) ? 1 : 2) : 0;
            if (next == 0 && !is_all_scores(m, ont_node_in(def, 0))) next = 1;
            v = ont_node_in(def, (uint32_t)next);
        }
    }
    return -1;
}

/* Strips Expand and Identity off `mask` while it still broadcasts to `shape`. */
static ont_value *strip_expand(ont_value *mask, const ont_shape *shape)
{
    for (ont_node *def; (def = ont_producer(mask)) && (ONT_IS(def, Expand) ||
                                                                ONT_IS(def, Identity));) {
        ont_value *x = ont_node_in(def, 0);
        ont_shape both;
        if (!x || ont_shape_broadcast(&x->shape, shape, &both) != ONT_OK || !ont_shape_equal(&both, shape)) break;
        mask = x;
    }
    return mask;
}

/*
 * The match_...() functions record one node between softmax and matmul and return the value to continue with; NULL: no
 * match.
 */
static ont_value *match_add(match *m, ont_node *node)
{
    const ont_shape *shape = &node->outputs[0]->shape;
    int i = scores_operand(m, node);
    if (i < 0 || m->second_bias || m->scale != 1 || (m->bias && !ont_shape_equal(shape, &m->bias_shape))) return NULL;
    ont_value *mask = ont_node_in(node, (uint32_t)(1 - i));
    m->bias_shape = *shape;
    if (m->bias)
        m->second_bias = mask;
    else
        m->bias = strip_expand(mask, shape);
    return ont_node_in(node, (uint32_t)i);
}

static ont_value *match_where(match *m, ont_node *node)
{
    if (m->bias || m->mask || m->scale != 1) return NULL; /* a bias added after the replacement is another formula */
    m->mask_keeps = const_float(node, 2, &m->masked_value);
    if (!m->mask_keeps && !const_float(node, 1, &m->masked_value)) return NULL;
    m->mask_shape = node->outputs[0]->shape;
    m->mask = ont_node_in(node, 0);
    return ont_node_in(node, m->mask_keeps ? 1 : 2);
}

static ont_value *match_scale(match *m, ont_node *node)
{
    double factor;
    bool divides = ONT_IS(node, Div);
    int i = scores_operand(m, node);
    if (i < 0 || (divides && i) || !const_float(node, (uint32_t)(1 - i), &factor)) return NULL;
    m->scale *= divides ? 1 / factor : factor;
    return ont_node_in(node, (uint32_t)i);
}

static bool find_scores(match *m)
{
    ont_value *x = ont_node_in(m->softmax, 0);
    for (int depth = 0; depth < 16 && is_all_scores(m, x); depth++) {
        ont_node *node = ont_producer(x);
        if (!node || !ont_single_user(m->g, x)) return false;
        if (ont_is_matmul(node)) {
            m->scores = node;
            m->scale *= ont_attr_float(node, "alpha", 1);
            return true;
        }
        if (ont_node_keeps_order(node) || is_float_cast(node))
            x = ont_node_in(node, 0);
        else if (ONT_IS(node, Add))
            x = match_add(m, node);
        else if (ONT_IS(node, Where))
            x = match_where(m, node);
        else if (ONT_IS(node, Mul) || ONT_IS(node, Div))
            x = match_scale(m, node);
        else
            return false;
    }
    return false;
}

/* ---- from the softmax down to the matmul with V, and on to the result ---- */

static bool match_dropout(match *m, ont_node *node)
{
    double ratio = ont_attr_float(node, "ratio", 0.5), training = 0;
    if (ont_node_out(node, 1) || m->dropout || node->version < 12) return false;
    if (ont_node_in(node, 1) && ont_const_scalar(node, 1, &ratio) != ONT_OK) return false;
    if (ont_node_in(node, 2) && ont_const_scalar(node, 2, &training) != ONT_OK) return false;
    if (training != 0 && ratio > 0) m->dropout = node;
    return ratio >= 0 && ratio <= 1;
}

/*
 * Where(IsNaN(p), 0, p), which the TorchScript exporter emits for fully masked rows. A row has NaN in all entries or in
 * none, so whole rows are replaced; they have no gradient, as in torch.
 */
static ont_value *match_nan_to_zero(match *m, ont_value *p)
{
    ont_node *where = NULL, *is_nan = NULL;
    int n = 0;
    for (const ont_use *use = p->uses; use; use = use->next, n++) {
        if (ONT_IS(use->user, Where)) where = use->user;
        if (ONT_IS(use->user, IsNaN)) is_nan = use->user;
    }
    double zero;
    if (n != 2 || !where || !is_nan || ont_value_is_output(m->g, p) || ont_node_in(where, 0) != is_nan->outputs[0])
        return p;
    if (ont_single_user(m->g, is_nan->outputs[0]) != where || ont_node_in(where, 2) != p ||
        !const_float(where, 1, &zero) ||
        zero != 0)
        return p;
    if (!ont_shape_equal(&p->shape, &where->outputs[0]->shape)) return p;
    m->zero_nan = true;
    return where->outputs[0];
}

static bool find_values(match *m)
{
    ont_value *p = match_nan_to_zero(m, m->softmax->outputs[0]);
    for (int depth = 0; depth < 8 && is_all_scores(m, p); depth++) {
        ont_node *node = ont_single_user(m->g, p);
        if (!node || ont_node_in(node, 0) != p) return false;
        if (ont_is_matmul(node)) {
            m->values = node;
            m->y = node->outputs[0];
            return !ont_attr_int(node, "transA", 0) && ont_attr_float(node, "alpha", 1) == 1;
        }
        if (ONT_IS(node, Dropout) ? !match_dropout(m, node)
                                             : !ont_node_keeps_order(node) && !is_float_cast(node))
            return false;
        p = node->outputs[0];
    }
    return false;
}

/* Where(fully masked rows, 0, result) */
static void match_empty_rows(match *m)
{
    ont_value *y = m->y;
    for (ont_node *node; (node = ont_single_user(m->g, y)) && ont_node_keeps_order(node) && ont_node_in(node, 0) == y;)
        y = node->outputs[0];
    ont_node *node = ont_single_user(m->g, y);
    double zero;
    if (!ONT_IS(node, Where) || ont_node_in(node, 2) != y || !const_float(node, 1, &zero) || zero != 0)
        return;
    ont_value *cond = ont_node_in(node, 0);
    ont_shape *shape = &node->outputs[0]->shape;
    int last = shape->rank - 1;
    if (!ont_shape_equal(shape, &y->shape) || shape->dims[last] != m->head_dim_v) return;
    if (cond->shape.rank && cond->shape.dims[cond->shape.rank - 1] != 1) return;
    m->masked_rows = cond;
    m->masked_rows_shape = *shape;
    m->masked_rows_shape.dims[last] = 1;
    m->y = node->outputs[0];
}

/* Follows the result through single users up to its last Transpose. */
static void find_result(match *m)
{
    m->result = m->y;
    for (ont_value *v = m->y;;) {
        ont_node *node = ont_single_user(m->g, v);
        bool moves = ONT_IS(node, Transpose);
        if (!node || ont_node_in(node, 0) != v || !(moves || ont_node_keeps_order(node))) return;
        v = node->outputs[0];
        if (moves) m->result = v;
    }
}

/* ---- views ---- */

/* One operand of a matmul as a view of [batch..., rows, columns], with the last two dims swapped if `flip`. */
static bool matrix_view(const match *m, const ont_node *product, uint32_t index, bool flip, bool parts,
                        ont_strided_view *view)
{
    ont_value *v = ont_node_in(product, index);
    ont_shape shape = v->shape, full = product->outputs[0]->shape;
    int rank = shape.rank, counts[3];
    if (rank < 2 || full.rank < 2 || ont_node_in(product, !index)->shape.rank < 2) return false;
    int64_t rows = shape.dims[rank - 2], columns = shape.dims[rank - 1];
    ont_strided_view_limits limits = {.parts = parts, .scales = product != m->values};
    ont_strided_view_of(v, &limits, view);
    full.dims[full.rank - 2] = rows;
    full.dims[full.rank - 1] = columns;
    if (!ont_strided_view_expand(view, &shape, &full)) return false;
    int64_t batch = ont_shape_count_range(&full, 0, full.rank - 2);
    if (!ont_strided_view_regroup(view, (int64_t[]){batch, rows, columns}, 3, counts)) return false;
    if (!flip) return true;
    ont_factor swapped[ONT_STRIDED_VIEW_FACTORS];
    int n = counts[0];
    for (int i = 0; i < counts[2]; i++) swapped[n++] = view->factors[counts[0] + counts[1] + i];
    for (int i = 0; i < counts[1]; i++) swapped[n++] = view->factors[counts[0] + i];
    memcpy(view->factors + counts[0], swapped + counts[0], (size_t)(n - counts[0]) * sizeof *swapped);
    return true;
}

/* Splits the innermost group of `size` entries off a view; it must be one factor, whose stride is returned. */
static bool split_inner(ont_strided_view *view, int64_t outer, int64_t size, int64_t *stride)
{
    int counts[2];
    if (!ont_strided_view_regroup(view, (int64_t[]){outer, size}, 2, counts) || counts[1] > 1) return false;
    *stride = counts[1] ? view->factors[--view->n_factors].stride : 0;
    return true;
}

/* K or V as a view of (batch, seqlen_k, size): all query rows of one matrix read the same keys. */
static bool key_view(match *m, int which, int64_t batch, int64_t size)
{
    ont_strided_view *view = &m->view[which];
    int64_t unit;
    if (!split_inner(view, batch * m->seqlen_k, size, &unit) || (size > 1 && unit != 1)) return false;
    if (!split_inner(view, batch, m->seqlen_k, &m->key_stride[which])) return false;
    if (view->n_factors == ONT_STRIDED_VIEW_FACTORS || batch <= 0 || m->n_rows % batch) return false;
    if (m->n_rows != batch) view->factors[view->n_factors++] = (ont_factor){m->n_rows / batch, 0};
    return m->seqlen_k == 1 || m->key_stride[which] >= size;
}

static bool operand_views(match *m, bool parts)
{
    const ont_node *s = m->scores, *p = m->values;
    bool flip_q = ont_attr_int(s, "transA", 0) != 0, flip_k = !ont_attr_int(s, "transB", 0),
         flip_v = ont_attr_int(p, "transB", 0) != 0;
    if (!matrix_view(m, s, 0, flip_q, parts, &m->view[ONT_ATTENTION_Q]) ||
        !matrix_view(m, s, 1, flip_k, parts, &m->view[ONT_ATTENTION_K]) ||
        !matrix_view(m, p, 1, flip_v, parts, &m->view[ONT_ATTENTION_V]))
        return false;
    const ont_shape *q = &ont_node_in(s, 0)->shape, *full = &s->outputs[0]->shape, *last = &p->outputs[0]->shape;
    int64_t unit;
    m->head_dim = q->dims[q->rank - (flip_q ? 2 : 1)];
    m->head_dim_v = last->dims[last->rank - 1];
    if (!split_inner(&m->view[ONT_ATTENTION_Q], m->n_rows, m->head_dim, &unit) || (m->head_dim > 1 && unit != 1))
        return false;
    return key_view(m, ONT_ATTENTION_K, ont_shape_count_range(full, 0, full->rank - 2), m->head_dim) &&
           key_view(m, ONT_ATTENTION_V, ont_shape_count_range(last, 0, last->rank - 2), m->head_dim_v);
}

/*
 * Whether Q, K and V together cover the tensors that they are parts of; otherwise their gradients would be mostly
 * zeros.
 */
static bool is_whole(const match *m)
{
    for (int i = 0; i < 3; i++) {
        int64_t sum = 0;
        for (int j = 0; j < 3; j++) {
            const ont_strided_view *v = &m->view[j];
            if (v->root != m->view[i].root) continue;
            int64_t n = (j == ONT_ATTENTION_V ? m->head_dim_v : m->head_dim) * (j == ONT_ATTENTION_Q ? 1 : m->seqlen_k);
            for (int k = 0; k < v->n_factors; k++) n *= v->factors[k].stride ? v->factors[k].size : 1;
            sum += n;
        }
        if (sum < ont_shape_count(&m->view[i].root->shape)) return false;
    }
    return true;
}

static bool mask_view(match *m, int which, ont_value *mask, const ont_shape *shape, int64_t width)
{
    ont_strided_view_limits limits = {.parts = false,
                                      /* the gradient of a bias has the shape of the bias */
                                      .stop = which == ONT_ATTENTION_BIAS ? mask : NULL};
    ont_strided_view *view = &m->view[which];
    ont_strided_view_of(mask, &limits, view);
    return ont_strided_view_expand(view, &mask->shape, shape) &&
           split_inner(view, m->n_rows, width, &m->key_stride[which]) &&
           (m->key_stride[which] == 0 || m->key_stride[which] == 1);
}

/* Inverts the view of `result` on `y`: where the rows of the matmul are stored in the result. */
static bool result_view(match *m)
{
    ont_strided_view *view = &m->view[ONT_ATTENTION_Y];
    ont_strided_view_limits limits = {.stop = m->y};
    ont_strided_view_of(m->result, &limits, view);
    if (view->root != m->y) return false;
    int64_t step = 1, unit;
    ont_factor turned[ONT_STRIDED_VIEW_FACTORS];
    for (int i = view->n_factors - 1; i >= 0; i--) {
        int k = view->n_factors - 1 - i;
        for (; k > 0 && turned[k - 1].stride < view->factors[i].stride; k--) turned[k] = turned[k - 1];
        turned[k] = view->factors[i];
    }
    for (int i = view->n_factors - 1; i >= 0; i--) { /* sorted by stride in the matmul, largest first */
        for (int k = 0; k < view->n_factors; k++)
            if (turned[k].stride == view->factors[i].stride)
                turned[k].stride = -step; /* the strides of a permutation are distinct */
        step *= view->factors[i].size;
    }
    for (int i = 0; i < view->n_factors; i++) view->factors[i] = (ont_factor){turned[i].size, -turned[i].stride};
    return split_inner(view, m->n_rows, m->head_dim_v, &unit) && (m->head_dim_v == 1 || unit == 1);
}

static bool find_views(match *m)
{
    if (!operand_views(m, true) || !is_whole(m))
        if (!operand_views(m, false)) return false;
    match_empty_rows(m);
    find_result(m);
    if (!result_view(m)) {
        m->result = m->y;
        if (!result_view(m)) return false;
    }
    if (m->bias && !mask_view(m, ONT_ATTENTION_BIAS, m->bias, &m->bias_shape, m->seqlen_k)) return false;
    if (m->mask && !mask_view(m, ONT_ATTENTION_MASK, m->mask, &m->mask_shape, m->seqlen_k)) return false;
    if (m->masked_rows && !mask_view(m, ONT_ATTENTION_MASKED_ROWS, m->masked_rows, &m->masked_rows_shape, 1))
        return false;
    m->scale *= m->view[ONT_ATTENTION_Q].scale * m->view[ONT_ATTENTION_K].scale;
    return true;
}

/* ---- causal masks ---- */

enum { MASKED_SCORE = -1000000000 }; /* a masked score at or below this has probability 0 */

/*
 * Whether the known mask shows row i the columns up to i + diagonal and nothing else. Every row must see at least one
 * column: the result of fully masked rows depends on the masked value.
 */
static bool is_causal(const match *m, const ont_value *mask, const ont_shape *shape, bool bias, int64_t *diagonal)
{
    ont_causal_mask step;
    if (shape->rank < 2 || shape->dims[shape->rank - 2] != m->seqlen_q || (!bias && m->masked_value > MASKED_SCORE))
        return false;
    if (!ont_causal_mask_of(mask, m->seqlen_q, m->seqlen_k, &step)) return false;
    bool lower = bias ? step.lower == 0 : (step.lower != 0) == m->mask_keeps;
    bool upper = bias ? !(step.upper < MASKED_SCORE) : (step.upper != 0) == m->mask_keeps;
    if (bias && upper && step.upper != 0) return false;
    *diagonal = upper ? m->seqlen_k - 1 : step.diagonal;
    return lower && *diagonal >= 0;
}

static void find_causal(match *m)
{
    int64_t diagonal = 0;
    if (m->second_bias && is_causal(m, m->second_bias, &m->bias_shape, true, &diagonal)) {
        m->second_bias = NULL;
        m->causal = true;
        m->causal_offset = diagonal;
    }
    if (m->bias && !m->causal && is_causal(m, m->bias, &m->bias_shape, true, &diagonal)) {
        m->bias = m->second_bias;
        m->second_bias = NULL;
        m->causal = true;
        m->causal_offset = diagonal;
    }
    if (m->causal || !m->mask || !is_causal(m, m->mask, &m->mask_shape, false, &diagonal)) return;
    m->mask = NULL;
    m->causal = true;
    m->causal_offset = diagonal;
}

/* ---- the node ---- */

/*
 * Without a 16-bit kernel the fused node computes in float32, while separate matmuls are faster in 16 bits: then fusion
 * pays if memory traffic of the scores dominates, and earlier with a causal mask, which skips half of them. With a
 * 16-bit kernel it pays as soon as tiling gains more than rounding between the tiles costs: with many keys, or with
 * heads whose products take longer than their softmax. Measured by tests/bench/attention.py --bf16.
 */
enum { MIN_KEYS_16_BIT = 256, MIN_HEAD_16_BIT = 64, MIN_KEYS_PROMOTED = 2048, MIN_KEYS_PROMOTED_CAUSAL = 512 };

static bool is_narrow(ont_dtype dtype) { return dtype != ONT_FLOAT32 && dtype != ONT_FLOAT64; }

/* Called while both the fused node and the separate nodes exist. */
static bool is_profitable(const match *m, const ont_node *node)
{
    if (m->g->device) return ont_op_has_kernel(node, m->g->device); /* devices have no promotion to float32 */
    if (!is_narrow(ont_node_in(node, 0)->dtype)) return true;
    if (m->seqlen_k >= (m->causal ? MIN_KEYS_PROMOTED_CAUSAL : MIN_KEYS_PROMOTED)) return true;
    return (m->seqlen_k >= MIN_KEYS_16_BIT || m->head_dim >= MIN_HEAD_16_BIT) && ont_op_has_kernel(node, NULL);
}

static bool find(match *m)
{
    const ont_value *x = ont_node_in(m->softmax, 0);
    int rank = x->shape.rank, axis;
    if (rank < 2 || !ont_shape_count(&x->shape)) return false;
    bool flattens = m->softmax->version < 13; /* before opset 13 all dims from the axis on are flattened */
    if (ont_shape_axis(ont_attr_int(m->softmax, "axis", flattens ? 1 : -1), rank, &axis) != ONT_OK || axis != rank - 1)
        return false;
    m->seqlen_q = x->shape.dims[rank - 2];
    m->seqlen_k = x->shape.dims[rank - 1];
    m->n_rows = ont_shape_count_range(&x->shape, 0, rank - 1);
    if (!find_scores(m) || !find_values(m)) return false;
    const ont_value *q = ont_node_in(m->scores, 0), *k = ont_node_in(m->scores, 1), *v = ont_node_in(m->values, 1);
    if (!q || !k || !v || q->dtype != k->dtype || q->dtype != v->dtype || m->y->dtype != q->dtype) return false;
    if (!ont_dtype_is_float(q->dtype) || !ont_shape_count(&q->shape) || !ont_shape_count(&v->shape)) return false;
    if (m->y->shape.rank < 2 || ont_shape_count_range(&m->y->shape, 0, m->y->shape.rank - 1) != m->n_rows) return false;
    if (m->second_bias && m->second_bias->dtype != m->bias->dtype) return false;
    find_causal(m);
    return true;
}

static bool has(const match *m, int which)
{
    return (which != ONT_ATTENTION_BIAS || m->bias) && (which != ONT_ATTENTION_MASK || m->mask) &&
           (which != ONT_ATTENTION_MASKED_ROWS || m->masked_rows);
}

/*
 * Finds batch dims common to all views and one stride along seqlen_q per view; false if the node cannot express them.
 */
static bool find_leads(match *m, ont_attention *a)
{
    ont_strided_view *views[ONT_ATTENTION_INPUTS + 1];
    int n = 0;
    for (int i = 0; i <= ONT_ATTENTION_Y; i++)
        if (has(m, i)) views[n++] = &m->view[i];
    if (!ont_strided_view_refine(views, n, m->seqlen_q)) return false;
    const ont_strided_view *q = &m->view[ONT_ATTENTION_Q];
    a->n_batch_dims = q->n_factors - (m->seqlen_q > 1);
    if (a->n_batch_dims < 0 || a->n_batch_dims > ONT_ATTENTION_BATCH_DIMS) return false;
    if (m->seqlen_q > 1 && q->factors[a->n_batch_dims].size != m->seqlen_q) return false;
    for (int d = 0; d < a->n_batch_dims; d++) a->batch_dims[d] = q->factors[d].size;
    for (int i = 0; i <= ONT_ATTENTION_Y; i++) {
        if (!has(m, i)) continue;
        a->layout[i].offset = m->view[i].offset;
        for (int d = 0; d < a->n_batch_dims; d++) a->layout[i].batch_stride[d] = m->view[i].factors[d].stride;
        a->layout[i].row_stride = m->seqlen_q > 1 ? m->view[i].factors[a->n_batch_dims].stride : 0;
        a->layout[i].col_stride = m->key_stride[i];
    }
    if (m->seqlen_q == 1) return true;
    return a->layout[ONT_ATTENTION_Q].row_stride >= m->head_dim &&
           a->layout[ONT_ATTENTION_Y].row_stride >= m->head_dim_v &&
           !a->layout[ONT_ATTENTION_K].row_stride && !a->layout[ONT_ATTENTION_V].row_stride;
}

static void set_view(ont_builder *b, ont_node *node, const ont_attention *a, int which)
{
    int64_t values[ONT_ATTENTION_BATCH_DIMS + 3];
    const ont_matrix_layout *v = &a->layout[which];
    size_t n = 0;
    values[n++] = v->offset;
    for (int d = 0; d < a->n_batch_dims; d++) values[n++] = v->batch_stride[d];
    values[n++] = which == ONT_ATTENTION_K || which == ONT_ATTENTION_V ? v->col_stride : v->row_stride;
    if (which == ONT_ATTENTION_BIAS || which == ONT_ATTENTION_MASK) values[n++] = v->col_stride;
    if (b->status == ONT_OK)
        b->status = ont_attr_set_ints(b->graph, node, ont_attention_layout_names[which], values, n);
}

static void set_int(ont_builder *b, ont_node *node, const char *name, int64_t value)
{
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, name, value);
}

static void set_float(ont_builder *b, ont_node *node, const char *name, double value)
{
    if (b->status == ONT_OK) b->status = ont_attr_set_float(b->graph, node, name, value);
}

static void set_dims(ont_builder *b, ont_node *node, const char *name, const int64_t *values, int n)
{
    if (b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, node, name, values, (size_t)n);
}

static void set_attributes(ont_builder *b, ont_node *node, const match *m, const ont_attention *a)
{
    set_dims(b, node, "sizes", (int64_t[]){m->seqlen_q, m->seqlen_k, m->head_dim, m->head_dim_v}, 4);
    set_dims(b, node, "batch_dims", a->batch_dims, a->n_batch_dims);
    set_dims(b, node, "shape", m->result->shape.dims, m->result->shape.rank);
    for (int i = 0; i <= ONT_ATTENTION_Y; i++)
        if (has(m, i)) set_view(b, node, a, i);
    set_float(b, node, "scale", m->scale);
    if (m->bias) set_dims(b, node, "bias_shape", m->bias_shape.dims, m->bias_shape.rank);
    if (m->mask) {
        set_float(b, node, "mask_value", m->masked_value);
        set_int(b, node, "mask_polarity", m->mask_keeps);
    }
    if (m->zero_nan) set_int(b, node, "zero_nan", 1);
    if (m->causal) {
        set_int(b, node, "causal", 1);
        set_int(b, node, "causal_offset", m->causal_offset);
    }
    double ratio = m->dropout ? ont_attr_float(m->dropout, "ratio", 0.5) : 0;
    if (m->dropout && ont_node_in(m->dropout, 1) && b->status == ONT_OK)
        b->status = ont_const_scalar(m->dropout, 1, &ratio);
    if (!m->dropout) return;
    set_float(b, node, "ratio", ratio);
    set_int(b, node, "rng_stream", (int64_t)ont_random_stream(m->dropout));
}

static ont_status fuse(ont_graph *g, match *m, bool *done)
{
    ont_attention a = {.n_batch_dims = 0};
    if (!find(m)) return ONT_OK;
    if (m->second_bias) {
        ont_builder b = {.graph = g, .before = m->softmax, .origin = ont_node_origin(m->softmax)};
        m->bias = ont_build2(&b, "Add", m->second_bias, m->bias);
        ONT_TRY(b.status);
        *done = true; /* if fusion fails below, DCE removes the sum */
    }
    if (!find_views(m) || !find_leads(m, &a)) return ONT_OK;
    if (!a.n_batch_dims) { /* one matrix: a batch dim of 1, so that attribute batch_dims is never empty */
        a.n_batch_dims = 1;
        a.batch_dims[0] = 1;
    }
    ont_builder b = {.graph = g, .before = m->result->def, .origin = ont_node_origin(m->softmax)};
    ont_value *inputs[ONT_ATTENTION_INPUTS] = {m->view[0].root, m->view[1].root, m->view[2].root,
                                               m->bias,         m->mask,         NULL};
    if (m->mask) inputs[ONT_ATTENTION_MASK] = m->view[ONT_ATTENTION_MASK].root;
    if (m->masked_rows) inputs[ONT_ATTENTION_MASKED_ROWS] = m->view[ONT_ATTENTION_MASKED_ROWS].root;
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "FusedAttention", inputs, ONT_ATTENTION_INPUTS, 2);
    if (node) set_attributes(&b, node, m, &a);
    ont_value *y = ont_build_done(&b, node);
    ONT_TRY(b.status);
    *done = true;
    if (!is_profitable(m, node)) return ONT_OK;
    ont_value_replace_uses(g, m->result, y);
    return ONT_OK;
}

ont_status ont_pass_fuse_attention(ont_graph *g)
{
    bool changed = false;
    ONT_TRY(ont_move_transposes(g, &changed));
    if (changed) ONT_TRY(ont_pass_dce(g)); /* dead nodes would count as users in the match */
    for (ont_node *node = g->first; node; node = node->next) {
        if (!ONT_IS(node, Softmax)) continue;
        match m = {.g = g, .softmax = node, .scale = 1};
        ONT_TRY(fuse(g, &m, &changed));
    }
    return changed ? ont_pass_dce(g) : ONT_OK;
}
