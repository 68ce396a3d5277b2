/*
 * LinearAttention and CausalConvWithState by expansion. The recurrence over a (d_k, d_v) state of each head is unrolled
 * step by step, in float32 where the inputs are narrower. Sources: Katharopoulos et al., Transformers are RNNs, 2020;
 * Yang et al., Gated Delta Networks, 2024.
 */
#include <math.h>
#include <string.h>

#include "ops/op.h"

#define B(op, x, y) ont_build2(b, op, (x), (y))
#define FAIL(code, ...) \
    do { \
        ont_build_fail(b, code, __VA_ARGS__); \
        return; \
    } while (0)

typedef struct linear {
    int64_t batch, steps, heads, group, d_k, d_v; /* heads: of k and v; group: query heads that share one of these */
    bool gated, delta;
    ont_dtype wide;
    ont_value **q, **k, **v, **decay, **beta; /* by step: (B, H, G, d_k), (B, H, 1, d_k), (B, H, 1, d_v), (B, H, d_k
                                               * or 1, 1), (B, H or 1, 1, 1) */
} linear;

/* Splits x (B, T, heads * rows * columns) into T steps of (B, heads, rows, columns). */
static ont_value **steps_of(ont_builder *b, const linear *l, ont_value *x, int64_t heads, int64_t rows, int64_t columns)
{
    ont_arena *arena = &b->graph->arena;
    ont_value **pieces = ont_arena_array(arena, (size_t)l->steps + 1, sizeof *pieces);
    int64_t *ones = ont_arena_array(arena, (size_t)l->steps + 1, sizeof *ones);
    if ((!pieces || !ones) && b->status == ONT_OK) b->status = ONT_ENOMEM;
    x = ont_build_cast(b, x, l->wide);
    if (b->status != ONT_OK || !l->steps) return pieces;
    for (int64_t t = 0; t < l->steps; t++) ones[t] = 1;
    ont_value *in[] = {x, ont_build_const_ints(b, ones, (size_t)l->steps)};
    ont_node *split = b->status == ONT_OK ? ont_build_node(b, "", "Split", in, 2, (uint32_t)l->steps) : NULL;
    if (split) b->status = ont_attr_set_int(b->graph, split, "axis", 1);
    ont_build_done(b, split);
    ont_shape shape = ont_shape_of(4, (int64_t[]){l->batch, heads, rows, columns});
    for (int64_t t = 0; t < l->steps && b->status == ONT_OK; t++)
        pieces[t] = ont_build_reshape(b, split->outputs[t], &shape);
    return pieces;
}

static bool divides(const ont_value *v, int64_t batch, int64_t steps, int64_t heads)
{
    const int64_t *d = v->shape.dims;
    return v->shape.rank == 3 && d[0] == batch && d[1] == steps && d[2] % heads == 0;
}

static void read_linear(ont_builder *b, const ont_node *node, linear *l)
{
    const ont_value *q = ont_node_in(node, 0), *k = ont_node_in(node, 1), *v = ont_node_in(node, 2),
        *past = ont_node_in(node, 3);
    const ont_value *decay = ont_node_in(node, 4), *beta = ont_node_in(node, 5);
    const char *rule = ont_attr_string(node, "update_rule", "gated_delta");
    int64_t q_heads = ont_attr_int(node, "q_num_heads", 0), heads = ont_attr_int(node, "kv_num_heads", 0);
    static const char *const rules[] = {"linear", "gated", "delta", "gated_delta"};
    int which = 0;
    while (which < 4 && strcmp(rule, rules[which])) which++;
    if (which == 4)
        FAIL(ONT_EUNSUPPORTED, "attribute update_rule is '%s', expected linear, gated, delta or gated_delta", rule);
    l->gated = which & 1;
    l->delta = which & 2;
    if (heads < 1 || q_heads < 1 || q_heads % heads)
        FAIL(ONT_EINVAL, "q_num_heads %lld must be a multiple of kv_num_heads %lld", (long long)q_heads,
             (long long)heads);
    if (!q || !k || !v || q->shape.rank != 3) FAIL(ONT_EINVAL, "query, key and value of rank 3 are expected");
    l->batch = q->shape.dims[0];
    l->steps = q->shape.dims[1];
    l->heads = heads;
    l->group = q_heads / heads;
    if (!divides(q, l->batch, l->steps, q_heads) || !divides(k, l->batch, l->steps, heads) ||
        !divides(v, l->batch, l->steps, heads))
        FAIL(ONT_EINVAL, "query, key and value must be (batch, steps, heads * size) with the same batch and steps");
    l->d_k = k->shape.dims[2] / heads;
    l->d_v = v->shape.dims[2] / heads;
    if (q->shape.dims[2] / q_heads != l->d_k) FAIL(ONT_EINVAL, "heads of query and key differ in size");
    if (l->gated != (decay != NULL) || l->delta != (beta != NULL))
        FAIL(ONT_EINVAL, "update_rule '%s' %s decay and %s beta", rule, l->gated ? "needs" : "has no", l->delta
             ? "needs" : "has no");
    if (decay && (!divides(decay, l->batch, l->steps, 1) || (decay->shape.dims[2] != heads &&
                                                             decay->shape.dims[2] != heads * l->d_k)))
        FAIL(ONT_EINVAL, "decay must have one entry per head, or per head and key dim");
    if (beta && (!divides(beta, l->batch, l->steps, 1) || (beta->shape.dims[2] != heads && beta->shape.dims[2] != 1)))
        FAIL(ONT_EINVAL, "beta must have one entry per head, or one");
    ont_shape state = ont_shape_of(4, (int64_t[]){l->batch, heads, l->d_k, l->d_v});
    if (past && !ont_shape_equal(&past->shape, &state))
        FAIL(ONT_EINVAL, "past_state must have the shape (batch, heads, d_k, d_v)");
    if (!ont_dtype_is_float(q->dtype)) FAIL(ONT_ETYPE, "query is %s, a float is expected", ont_dtype_name(q->dtype));
    l->wide = q->dtype == ONT_FLOAT64 ? ONT_FLOAT64 : ONT_FLOAT32;
}

/* One step: state *= exp(decay); state += k^T (beta (v - k state)). Returns q state. */
static ont_value *step(ont_builder *b, const linear *l, int64_t t, ont_value **state)
{
    ont_value *v = l->v[t], *k = l->k[t];
    if (l->gated) *state = B("Mul", *state, ont_build1(b, "Exp", l->decay[t]));
    if (l->delta) v = B("Mul", l->beta[t], B("Sub", v, B("MatMul", k, *state)));
    ont_shape column = ont_shape_of(4, (int64_t[]){l->batch, l->heads, l->d_k, 1});
    *state = B("Add", *state, B("Mul", ont_build_reshape(b, k, &column), v));
    return B("MatMul", l->q[t], *state);
}

static void linear_attention_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    linear l = {0};
    read_linear(b, node, &l);
    if (b->status != ONT_OK) return;
    ont_value *past = ont_node_in(node, 3), *decay = ont_node_in(node, 4), *beta = ont_node_in(node, 5);
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    double scale = ont_attr_float(node, "scale", 0);
    ont_shape state_shape = ont_shape_of(4, (int64_t[]){l.batch, l.heads, l.d_k, l.d_v});
    ont_value *q = ont_build_cast(b, ont_node_in(node, 0), l.wide);
    q = B("Mul", q, ont_build_scalar(b, l.wide, scale != 0 ? scale : 1 / sqrt((double)l.d_k)));
    l.q = steps_of(b, &l, q, l.heads, l.group, l.d_k);
    l.k = steps_of(b, &l, ont_node_in(node, 1), l.heads, 1, l.d_k);
    l.v = steps_of(b, &l, ont_node_in(node, 2), l.heads, 1, l.d_v);
    if (decay) l.decay = steps_of(b, &l, decay, l.heads, decay->shape.dims[2] / l.heads, 1);
    if (beta) l.beta = steps_of(b, &l, beta, beta->shape.dims[2], 1, 1);
    ont_value *state = past ? ont_build_cast(b, past, l.wide) : ont_build_full(b, l.wide, &state_shape, 0);
    ont_value **results = ont_arena_array(&b->graph->arena, (size_t)l.steps + 1, sizeof *results);
    ont_shape flat = ont_shape_of(3, (int64_t[]){l.batch, 1, l.heads * l.group * l.d_v});
    if (!results && b->status == ONT_OK) b->status = ONT_ENOMEM;
    for (int64_t t = 0; t < l.steps && b->status == ONT_OK; t++)
        results[t] = ont_build_reshape(b, step(b, &l, t, &state), &flat);
    if (b->status != ONT_OK) return;
    outputs[1] = ont_build_cast(b, state, past ? past->dtype : dtype);
    flat.dims[1] = l.steps;
    if (!l.steps) {
        outputs[0] = ont_build_full(b, dtype, &flat, 0);
        return;
    }
    ont_node *concat = ont_build_node(b, "", "Concat", results, (uint32_t)l.steps, 1);
    if (concat) b->status = ont_attr_set_int(b->graph, concat, "axis", 1);
    outputs[0] = ont_build_cast(b, ont_build_done(b, concat), dtype);
}

/* ---- CausalConvWithState: a depthwise convolution over the previous k - 1 positions and the input ---- */

static void causal_conv_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *w = ont_node_in(node, 1), *bias = ont_node_in(node, 2),
        *past = ont_node_in(node, 3);
    const char *activation = ont_attr_string(node, "activation", "none");
    bool swish = !strcmp(activation, "silu") || !strcmp(activation, "swish");
    if (!swish && strcmp(activation, "none"))
        FAIL(ONT_EUNSUPPORTED, "attribute activation is '%s', expected none, silu or swish", activation);
    if (!x || !w || x->shape.rank != 3 || w->shape.rank != 3 || w->shape.dims[0] != x->shape.dims[1] ||
        w->shape.dims[1] != 1 ||
        w->shape.dims[2] < 1)
        FAIL(ONT_EINVAL, "input (batch, channels, length) and weight (channels, 1, k) are expected");
    int64_t channels = x->shape.dims[1], length = x->shape.dims[2], kept = w->shape.dims[2] - 1;
    ont_shape before = ont_shape_of(3, (int64_t[]){x->shape.dims[0], channels, kept});
    if (past && !ont_shape_equal(&past->shape, &before))
        FAIL(ONT_EINVAL, "past_state must have the shape (batch, channels, k - 1)");
    if (!past) past = ont_build_full(b, x->dtype, &before, 0);
    if (b->status != ONT_OK) return;
    ont_node *concat = ont_build_node(b, "", "Concat", (ont_value *[]){past, x}, 2, 1);
    if (concat) b->status = ont_attr_set_int(b->graph, concat, "axis", 2);
    ont_value *padded = ont_build_done(b, concat);
    if (!padded) return;
    ont_node *conv = ont_build_node(b, "", "Conv", (ont_value *[]){padded, w, bias}, bias ? 3 : 2, 1);
    if (conv) b->status = ont_attr_set_int(b->graph, conv, "group", channels);
    ont_value *y = ont_build_done(b, conv);
    outputs[0] = swish ? ont_build1(b, "Swish", y) : y;
    int64_t start = length, end = length + kept, axis = 2;
    ont_value *in[] = {padded, ont_build_const_ints(b, &start, 1), ont_build_const_ints(b, &end, 1),
                       ont_build_const_ints(b, &axis, 1)};
    if (b->status == ONT_OK) outputs[1] = ont_build_done(b, ont_build_node(b, "", "Slice", in, 4, 1));
}

const ont_op ont_op_LinearAttention = {.domain = "", .name = "LinearAttention", .since = 27, .min_inputs = 3,
                                       .max_inputs = 6,
                                       .attributes = "chunk_size:i kv_num_heads:i q_num_heads:i scale:f update_rule:s",
                                       .expand = linear_attention_expand};
const ont_op ont_op_CausalConvWithState = {.domain = "", .name = "CausalConvWithState", .since = 27, .min_inputs = 2,
                                           .max_inputs = 4, .attributes = "activation:s", .expand = causal_conv_expand};
