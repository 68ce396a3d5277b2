/*
 * FusedAttention and FusedAttentionGrad: shapes and the gradient rule. fused_attention.h defines the attributes, which
 * fused_attention_desc.c reads. Source: Dao, Fu, Ermon, Rudra and Re, FlashAttention, 2022; Dao, FlashAttention-2,
 * 2023.
 *
 * The gradients are written through the layouts of the operands. Operands that are disjoint parts of one tensor (the
 * result of one GEMM for all three projections) share one gradient tensor. Attribute targets of FusedAttentionGrad has
 * the output index of the gradient of Q, K, V and bias; -1: not wanted.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "ops/attention/flash.h"
#include "ops/attention/fused_attention.h"
#include "ops/random/random.h"

/* One row of a packed operand stands for all of them. */
static ont_attention one_row(const ont_attention *a)
{
    ont_attention one = *a;
    one.n_bh /= one.batch_dims[0];
    one.batch_dims[0] = one.seqlen_q = one.seqlen_k = 1;
    return one;
}

/* ---- shapes ---- */

/* Whether matrices of (rows, width) elements in this layout lie inside the tensor. */
static bool inside(const ont_attention *a, int which, int64_t rows, int64_t width, const ont_shape *shape)
{
    const ont_matrix_layout *v = &a->layout[which];
    if (ont_attention_is_packed(a, which)) {
        bool queries = which == ONT_ATTENTION_Q || which == ONT_ATTENTION_Y;
        ont_attention one = one_row(a);
        one.packed_q = one.packed_k = 0;
        return v->batch_stride[0] == v->row_stride * (queries ? a->scores_q : a->scores_k) &&
               ont_shape_count(shape) == v->row_stride * (queries ? a->packed_q : a->packed_k) &&
               inside(&one, which, 1, width, &(ont_shape){1, {v->row_stride}});
    }
    int64_t last = v->offset + (rows - 1) * v->row_stride + (width - 1) * v->col_stride;
    bool not_negative = v->offset >= 0 && v->row_stride >= 0 && v->col_stride >= 0;
    for (int d = 0; d < a->n_batch_dims; d++) {
        last += (a->batch_dims[d] - 1) * v->batch_stride[d];
        not_negative = not_negative && v->batch_stride[d] >= 0;
    }
    return not_negative && last < ont_shape_count(shape);
}

static ont_status check_layouts(const ont_node *node, const ont_attention *a)
{
    const int64_t rows[] = {a->seqlen_q, a->seqlen_k, a->seqlen_k, a->seqlen_q, a->seqlen_q, a->seqlen_q};
    const int64_t widths[] = {a->head_dim, a->head_dim, a->head_dim_v, a->seqlen_k, a->seqlen_k, 1};
    for (int i = 0; i < ONT_ATTENTION_INPUTS; i++) {
        const ont_value *v = ont_node_in(node, (uint32_t)i);
        if (!v) continue;
        size_t n;
        if (!ont_attr_ints(node, ont_attention_layout_names[i], &n) || !inside(a, i, rows[i], widths[i], &v->shape))
            return ont_fail(ONT_EINVAL, "layout %s is missing or reaches past its tensor",
                            ont_attention_layout_names[i]);
        if (i >= ONT_ATTENTION_MASK ? v->dtype != ONT_BOOL : !ont_dtype_is_float(v->dtype))
            return ont_fail(ONT_ETYPE, "input %d is %s", i, ont_dtype_name(v->dtype));
    }
    for (uint32_t i = ONT_ATTENTION_Q_ROWS; i <= ONT_ATTENTION_K_ROWS; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (v && (v->dtype != ONT_INT64 || v->shape.rank != 1 || !a->n_batch_dims))
            return ont_fail(ONT_EINVAL, "input %" PRIu32 " is not a vector of rows of sequences", i);
    }
    return ONT_OK;
}

static ont_dtype stats_dtype(ont_dtype dtype) /* 16 bits are too coarse for a sum of exponentials */
{
    return dtype == ONT_FLOAT64 ? ONT_FLOAT64 : ONT_FLOAT32;
}

static ont_status shape_of(const ont_node *node, const char *name, ont_shape *shape)
{
    size_t n;
    const int64_t *dims = ont_attr_ints(node, name, &n);
    if (n > ONT_MAX_RANK) return ont_fail(ONT_EINVAL, "attribute %s has %zu entries", name, n);
    *shape = ont_shape_of((int)n, dims);
    return ONT_OK;
}

/* Outputs: y, and stats (n_bh * seqlen_q, 2): the largest score of a row and the sum of exp(score - largest). */
static ont_status attention_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_attention a;
    ont_value *q, *k, *v;
    ont_shape shape;
    ONT_TRY(ont_need_input(node, ONT_ATTENTION_Q, &q));
    ONT_TRY(ont_need_input(node, ONT_ATTENTION_K, &k));
    ONT_TRY(ont_need_input(node, ONT_ATTENTION_V, &v));
    ONT_TRY(ont_attention_read(node, &a));
    if (k->dtype != q->dtype || v->dtype != q->dtype)
        return ont_fail(ONT_ETYPE, "Q, K and V are %s, %s and %s", ont_dtype_name(q->dtype), ont_dtype_name(k->dtype),
                        ont_dtype_name(v->dtype));
    if (!a.n_bh || !a.seqlen_q || !a.seqlen_k || !a.head_dim || !a.head_dim_v)
        return ont_fail(ONT_EINVAL, "a size is 0");
    ONT_TRY(check_layouts(node, &a));
    ONT_TRY(shape_of(node, "shape", &shape));
    int64_t rows = a.packed_q ? a.n_bh / a.batch_dims[0] * a.packed_q : a.n_bh * a.seqlen_q;
    if (!inside(&a, ONT_ATTENTION_Y, a.seqlen_q, a.head_dim_v, &shape) ||
        ont_shape_count(&shape) != rows * a.head_dim_v)
        return ont_fail(ONT_EINVAL, "layout y does not fit the result");
    ONT_TRY(ont_infer_out(node, 1, stats_dtype(q->dtype), &(ont_shape){.rank = 2, .dims = {a.n_bh * a.seqlen_q, 2}}));
    return ont_infer_out(node, 0, q->dtype, &shape);
}

/* Outputs: at most three gradients of Q, K and V, and the one of bias, at the indices in attribute targets. */
static ont_status attention_grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    size_t n;
    const int64_t *targets = ont_attr_ints(node, "targets", &n);
    if (n != 4) return ont_fail(ONT_EINVAL, "%zu targets, expected 4", n);
    for (uint32_t i = 0; i < 4; i++) {
        if (targets[i] < 0) continue;
        ont_value *v;
        ONT_TRY(ont_need_input(node, i, &v));
        ont_shape shape = v->shape;
        if (i == ONT_ATTENTION_BIAS) ONT_TRY(shape_of(node, "bias_shape", &shape));
        ONT_TRY(ont_infer_out(node, (uint32_t)targets[i], v->dtype, &shape));
    }
    return ONT_OK;
}

/* ---- gradient ---- */

/* Marks the elements of an operand, `unit` of them by one byte; false where one was marked before. */
static bool mark(const ont_attention *a, int which, int64_t rows, int64_t width, int64_t unit, uint8_t *marked)
{
    const ont_matrix_layout *v = &a->layout[which];
    bool fresh = true;
    ont_attention one;
    if (ont_attention_is_packed(a, which)) {
        one = one_row(a);
        a = &one;
        rows = 1;
    }
    for (int64_t bh = 0; bh < a->n_bh; bh++) {
        int64_t rest = bh, at = v->offset, repeats = 0;
        for (int d = a->n_batch_dims - 1; d >= 0; d--) {
            repeats |= !v->batch_stride[d] && rest % a->batch_dims[d]; /* a broadcast dim: not an overlap */
            at += rest % a->batch_dims[d] * v->batch_stride[d];
            rest /= a->batch_dims[d];
        }
        for (int64_t r = 0; r < rows && !repeats; r++)
            for (int64_t e = 0; e < width; e += unit) {
                uint8_t *cell = &marked[(at + r * v->row_stride + e) / unit];
                fresh = fresh && !*cell;
                *cell = 1;
            }
    }
    return fresh;
}

static int64_t gcd(int64_t a, int64_t b)
{
    while (b) {
        int64_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

/* The greatest common divisor of offsets, strides and row lengths of those operands that read `value`. */
static int64_t unit_of(const ont_attention *a, const ont_node *node, const ont_value *value)
{
    int64_t unit = ont_shape_count(&value->shape);
    for (int i = 0; i < 3; i++) {
        if (ont_node_in(node, (uint32_t)i) != value) continue;
        unit = gcd(gcd(gcd(unit, a->layout[i].offset), a->layout[i].row_stride),
                   i == ONT_ATTENTION_V ? a->head_dim_v : a->head_dim);
        for (int d = 0; d < a->n_batch_dims; d++) unit = gcd(unit, a->layout[i].batch_stride[d]);
    }
    return unit;
}

/* Whether those operands that read `value` do not overlap, so that their gradients can share a tensor. */
static bool are_disjoint(ont_builder *b, const ont_attention *a, const ont_node *node, const ont_value *value)
{
    int64_t unit = unit_of(a, node, value);
    uint8_t *marked = ont_arena_alloc(&b->graph->arena, (size_t)(ont_shape_count(&value->shape) / unit) + 1);
    if (!marked) {
        b->status = ONT_ENOMEM;
        return false;
    }
    bool fresh = true;
    for (int i = 0; i < 3; i++)
        if (ont_node_in(node, (uint32_t)i) == value)
            fresh &= mark(a, i, i == ONT_ATTENTION_Q ? a->seqlen_q : a->seqlen_k,
                          i == ONT_ATTENTION_V ? a->head_dim_v : a->head_dim, unit, marked);
    return fresh;
}

/* Sets the output index of each operand's gradient, -1: not wanted. Returns the number of outputs. */
static uint32_t choose_targets(ont_grad *g, const ont_attention *a, int64_t *targets)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < 4; i++) {
        targets[i] = -1;
        if (!WANTS(i) || !I(i)) continue;
        for (uint32_t j = 0; j < i && i < 3; j++)
            if (targets[j] >= 0 && I(j) == I(i) && are_disjoint(&g->b, a, g->node, I(i))) targets[i] = targets[j];
        if (targets[i] < 0) targets[i] = n++;
    }
    return n;
}

static void attention_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_attention a;
    int64_t targets[4];
    if (ont_attention_read(g->node, &a) != ONT_OK) return;
    uint32_t n = choose_targets(g, &a, targets);
    ont_value *inputs[] = {I(0), I(1), I(2), I(3), I(4), I(5), O(0), NULL, GO(0), I(ONT_ATTENTION_Q_ROWS),
                           I(ONT_ATTENTION_K_ROWS)};
    uint32_t n_inputs = a.packed_q || a.packed_k ? ONT_ATTENTION_ALL_INPUTS : ONT_ATTENTION_DY + 1;
    if (b->status == ONT_OK)
        b->status = ont_node_ensure_output(b->graph, g->node, 1, &inputs[ONT_ATTENTION_STATS]);
    if (b->status == ONT_OK) b->status = attention_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "FusedAttentionGrad", inputs, n_inputs, n);
    if (!node) return;
    b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, node, "targets", targets, 4);
    ont_build_done(b, node);
    for (uint32_t i = 0; i < 4 && b->status == ONT_OK; i++) {
        bool first = targets[i] >= 0;
        for (uint32_t j = 0; j < i; j++) first &= targets[j] != targets[i];
        if (first) GI(i, ont_node_out(node, (uint32_t)targets[i]));
    }
}

static const ont_kernel forward_kernels[] = {
    {.name = "attention_tiles", .accept = ont_flash_native_accept, .prepare = ont_flash_native_prepare,
     .run = ont_flash_native_run},
    {.name = "attention_ref", .accept = ont_attention_accept, .prepare = ont_attention_prepare_ref,
     .run = ont_attention_run_ref},
};
static const ont_kernel backward_kernels[] = {
    {.name = "attention_grad_tiles", .accept = ont_flash_native_accept, .prepare = ont_flash_native_prepare_grad,
     .run = ont_flash_native_run_grad},
    {.name = "attention_grad_ref", .accept = ont_attention_accept, .prepare = ont_attention_prepare_ref,
     .run = ont_attention_run_grad_ref},
};

const ont_op ont_op_FusedAttention = {.domain = ONT_DOMAIN, .name = "FusedAttention", .since = 1, .min_inputs = 3,
                                      .max_inputs = ONT_ATTENTION_ALL_INPUTS, .flags = ONT_OP_RANDOM,
                                      .nondiff_inputs = 0x630, .nondiff_outputs = 2,
                                      .attributes = ONT_ATTENTION_ATTRIBUTES,
                                      .infer = attention_infer, .grad = attention_grad, .rows = ONT_ROWS_ATTENTION,
                                      .cost = ONT_COST_ATTENTION, ONT_KERNELS(forward_kernels)};
const ont_op ont_op_FusedAttentionGrad = {.domain = ONT_DOMAIN, .name = "FusedAttentionGrad", .since = 1,
                                          .min_inputs = 3, .max_inputs = ONT_ATTENTION_ALL_INPUTS,
                                          .flags = ONT_OP_RANDOM, .attributes = ONT_ATTENTION_ATTRIBUTES " targets:I",
                                          .infer = attention_grad_infer,
                                          .cost = ONT_COST_ATTENTION, ONT_KERNELS(backward_kernels)};
