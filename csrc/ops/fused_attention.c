/*
 * FusedAttention and FusedAttentionGrad: attributes, shapes and the gradient rule. See fused_attention.h for what they
 * mean. Source: Dao, Fu, Ermon, Rudra and Re, FlashAttention, 2022; Dao, FlashAttention-2, 2023.
 *
 * The gradient is written through the same views. Operands that are parts of one tensor (a product of all three
 * projections) get one gradient tensor, each its part of it: attribute targets says which output each operand's goes
 * to.
 */
#include <math.h>

#include "ops/flash.h"
#include "ops/fused_attention.h"
#include "ops/random.h"

const char *const ont_attention_views[] = {"q", "k", "v", "bias", "keep", "empty", "y"};
#define VIEWS "sizes:I leads:I q:I k:I v:I y:I bias:I keep:I empty:I shape:I bias_shape:I"
#define SCALARS " scale:f causal:i diagonal:i fill:f keep_if:i ratio:f rng_stream:i zero_nan:i"

/* ---- attributes ---- */

static ont_status read_view(const ont_node *node, int which, ont_attention *a)
{
    size_t n, tail = which == ONT_ATTENTION_BIAS || which == ONT_ATTENTION_KEEP ? 2 : 1;
    const int64_t *values = ont_attr_ints(node, ont_attention_views[which], &n);
    ont_matrix_view *view = &a->view[which];
    if (!values) return ONT_OK; /* infer() says which must be there */
    if (n != 1 + (size_t)a->n_leads + tail)
        return ont_fail(ONT_EINVAL, "attribute %s has %zu entries, expected %zu", ont_attention_views[which], n,
                        1 + (size_t)a->n_leads + tail);
    view->offset = values[0];
    for (int d = 0; d < a->n_leads; d++) view->lead[d] = values[1 + d];
    view->row = values[1 + a->n_leads];
    view->column = tail == 2 ? values[2 + a->n_leads] : 1;
    return ONT_OK;
}

static void read_dropout(const ont_node *node, ont_attention *a)
{
    double ratio = ont_attr_float(node, "ratio", 0);
    bool all = ratio >= 1;
    a->drops = ratio > 0;
    a->threshold = all ? UINT32_MAX : (uint32_t)(ratio * 0x1p32);
    a->keep_scale = all ? 0 : (double)(float)(1 / (1 - ratio)); /* as Dropout's own kernel has it */
    a->stream = ont_random_stream(node);
}

ont_status ont_attention_read(const ont_node *node, ont_attention *a)
{
    size_t n_sizes, n_leads;
    const int64_t *sizes = ont_attr_ints(node, "sizes", &n_sizes), *leads = ont_attr_ints(node, "leads", &n_leads);
    *a = (ont_attention){.count = 1, .n_leads = (int)n_leads};
    if (n_sizes != 4 || n_leads > ONT_ATTENTION_LEADS)
        return ont_fail(ONT_EINVAL, "%zu sizes and %zu leads, expected 4 and at most %d", n_sizes, n_leads,
                        ONT_ATTENTION_LEADS);
    for (size_t d = 0; d < n_leads; d++) a->count *= a->leads[d] = leads[d];
    a->rows = sizes[0];
    a->columns = sizes[1];
    a->size = sizes[2];
    a->v_size = sizes[3];
    for (int i = 0; i <= ONT_ATTENTION_Y; i++) ONT_TRY(read_view(node, i, a));
    a->scale = ont_attr_float(node, "scale", 1);
    a->fill = ont_attr_float(node, "fill", -INFINITY);
    a->keep_if = ont_attr_int(node, "keep_if", 1) != 0;
    a->causal = ont_attr_int(node, "causal", 0) != 0;
    a->zero_nan = ont_attr_int(node, "zero_nan", 0) != 0;
    a->diagonal = ont_attr_int(node, "diagonal", 0);
    read_dropout(node, a);
    return ONT_OK;
}

/* ---- shapes ---- */

/* Whether a view of `rows` times `width` elements per lead stays inside the tensor. */
static bool inside(const ont_attention *a, int which, int64_t rows, int64_t width, const ont_shape *shape)
{
    const ont_matrix_view *v = &a->view[which];
    int64_t last = v->offset + (rows - 1) * v->row + (width - 1) * v->column;
    bool whole = v->offset >= 0 && v->row >= 0 && v->column >= 0;
    for (int d = 0; d < a->n_leads; d++) {
        last += (a->leads[d] - 1) * v->lead[d];
        whole = whole && v->lead[d] >= 0;
    }
    return whole && last < ont_shape_count(shape);
}

static ont_status check_views(const ont_node *node, const ont_attention *a)
{
    const int64_t rows[] = {a->rows, a->columns, a->columns, a->rows, a->rows, a->rows};
    const int64_t widths[] = {a->size, a->size, a->v_size, a->columns, a->columns, 1};
    for (int i = 0; i < ONT_ATTENTION_INPUTS; i++) {
        const ont_value *v = ont_node_in(node, (uint32_t)i);
        if (!v) continue;
        size_t n;
        if (!ont_attr_ints(node, ont_attention_views[i], &n) || !inside(a, i, rows[i], widths[i], &v->shape))
            return ont_fail(ONT_EINVAL, "view %s is missing or reaches past its tensor", ont_attention_views[i]);
        if (i >= ONT_ATTENTION_KEEP ? v->dtype != ONT_BOOL : !ont_dtype_is_float(v->dtype))
            return ont_fail(ONT_ETYPE, "input %d is %s", i, ont_dtype_name(v->dtype));
    }
    return ONT_OK;
}

static ont_dtype wide_of(ont_dtype dtype) /* of the statistics: a 16-bit logarithm of a sum would be too coarse */
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

/* outputs: y, and per row its largest score and the sum of exp(score - largest) */
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
    if (!a.count || !a.rows || !a.columns || !a.size || !a.v_size) return ont_fail(ONT_EINVAL, "a size is 0");
    ONT_TRY(check_views(node, &a));
    ONT_TRY(shape_of(node, "shape", &shape));
    if (!inside(&a, ONT_ATTENTION_Y, a.rows, a.v_size, &shape) ||
        ont_shape_count(&shape) != a.count * a.rows * a.v_size)
        return ont_fail(ONT_EINVAL, "view y does not fit the result");
    ONT_TRY(ont_infer_out(node, 1, wide_of(q->dtype), &(ont_shape){.rank = 2, .dims = {a.count * a.rows, 2}}));
    return ont_infer_out(node, 0, q->dtype, &shape);
}

/* outputs: up to three gradients of Q, K and V, and the one of the bias, as the attribute targets says */
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

/* Marks the view's rows among units of `unit` elements; false where one was marked before. */
static bool mark(const ont_attention *a, int which, int64_t rows, int64_t width, int64_t unit, uint8_t *marked)
{
    const ont_matrix_view *v = &a->view[which];
    bool fresh = true;
    for (int64_t l = 0; l < a->count; l++) {
        int64_t rest = l, at = v->offset, again = 0;
        for (int d = a->n_leads - 1; d >= 0; d--) {
            again |= !v->lead[d] && rest % a->leads[d]; /* the same rows for another lead: no overlap */
            at += rest % a->leads[d] * v->lead[d];
            rest /= a->leads[d];
        }
        for (int64_t r = 0; r < rows && !again; r++)
            for (int64_t e = 0; e < width; e += unit) {
                uint8_t *cell = &marked[(at + r * v->row + e) / unit];
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

/* A size that divides every view's rows and steps, of those operands that are `value`. */
static int64_t unit_of(const ont_attention *a, const ont_node *node, const ont_value *value)
{
    int64_t unit = ont_shape_count(&value->shape);
    for (int i = 0; i < 3; i++) {
        if (ont_node_in(node, (uint32_t)i) != value) continue;
        unit = gcd(gcd(gcd(unit, a->view[i].offset), a->view[i].row), i == ONT_ATTENTION_V ? a->v_size : a->size);
        for (int d = 0; d < a->n_leads; d++) unit = gcd(unit, a->view[i].lead[d]);
    }
    return unit;
}

/* Whether the operands that are `value` lie apart, so that their gradients may share a tensor. */
static bool apart(ont_builder *b, const ont_attention *a, const ont_node *node, const ont_value *value)
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
            fresh &= mark(a, i, i == ONT_ATTENTION_Q ? a->rows : a->columns, i == ONT_ATTENTION_V ? a->v_size : a->size,
                          unit, marked);
    return fresh;
}

/* Which output holds the gradient of each operand; -1: not wanted. The number of outputs. */
static uint32_t choose_targets(ont_grad *g, const ont_attention *a, int64_t *targets)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < 4; i++) {
        targets[i] = -1;
        if (!WANTS(i) || !I(i)) continue;
        for (uint32_t j = 0; j < i && i < 3; j++)
            if (targets[j] >= 0 && I(j) == I(i) && apart(&g->b, a, g->node, I(i))) targets[i] = targets[j];
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
    ont_value *inputs[] = {I(0), I(1), I(2), I(3), I(4), I(5), O(0), NULL, GO(0)};
    if (b->status == ONT_OK)
        b->status = ont_node_ensure_output(b->graph, g->node, 1, &inputs[ONT_ATTENTION_STATS]);
    if (b->status == ONT_OK) b->status = attention_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "FusedAttentionGrad", inputs, sizeof inputs / sizeof *inputs, n);
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

/* All floats of one dtype; the pass that widens sees to it where they are not. */
const char *ont_attention_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, ONT_ATTENTION_Q)->dtype;
    if (dtype != ONT_FLOAT32 && dtype != ONT_FLOAT64) return "dtype";
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (v && v->dtype != dtype && v->dtype != ONT_BOOL) return "dtypes differ";
    }
    return NULL;
}

static const ont_kernel forward_kernels[] = {
    {.name = "attention_tiles", .accept = ont_flash_tiles_accept, .prepare = ont_flash_tiles_prepare,
     .run = ont_flash_tiles_run},
    {.name = "attention_flash", .accept = ont_attention_accept, .prepare = ont_flash_prepare, .run = ont_flash_run},
    {.name = "attention_ref", .accept = ont_attention_accept, .prepare = ont_attention_prepare_ref,
     .run = ont_attention_run_ref},
};
static const ont_kernel backward_kernels[] = {
    {.name = "attention_grad_tiles", .accept = ont_flash_tiles_accept, .prepare = ont_flash_tiles_prepare_grad,
     .run = ont_flash_tiles_run_grad},
    {.name = "attention_grad_flash", .accept = ont_attention_accept, .prepare = ont_flash_prepare,
     .run = ont_flash_run_grad},
    {.name = "attention_grad_ref", .accept = ont_attention_accept, .prepare = ont_attention_prepare_ref,
     .run = ont_attention_run_grad_ref},
};

const ont_op ont_op_FusedAttention = {.domain = ONT_DOMAIN, .name = "FusedAttention", .since = 1, .min_inputs = 3,
                                      .max_inputs = ONT_ATTENTION_INPUTS, .flags = ONT_OP_RANDOM,
                                      .nondiff_inputs = 0x30, .nondiff_outputs = 2, .attributes = VIEWS SCALARS,
                                      .infer = attention_infer, .grad = attention_grad, ONT_KERNELS(forward_kernels)};
const ont_op ont_op_FusedAttentionGrad = {.domain = ONT_DOMAIN, .name = "FusedAttentionGrad", .since = 1,
                                          .min_inputs = 3, .max_inputs = ONT_ATTENTION_DY + 1, .flags = ONT_OP_RANDOM,
                                          .attributes = VIEWS SCALARS " targets:I", .infer = attention_grad_infer,
                                          ONT_KERNELS(backward_kernels)};
