/*
 * Attention by expansion into MatMul, masks and Softmax, which also give its gradient. Grouped heads, sliding window,
 * logit softcap and key-value cache included. A query that attends to no key gives zeros and no gradient. Sources:
 * Vaswani et al., Attention Is All You Need, 2017; Ainslie et al., GQA, 2023.
 */
#include <inttypes.h>
#include <math.h>

#include "ops/support/compose.h"

enum { Q, K, V, MASK, PAST_K, PAST_V, KV_SEQLENS }; /* inputs */
enum { RAW, CAPPED, BIASED, PROBABILITIES };     /* qk_matmul_output_mode: contents of output 3 */

typedef struct attention {
    ont_builder *b;
    ont_node *node;
    bool packed;             /* (batch, seqlen, heads * head_dim) rather than (batch, heads, seqlen, head_dim) */
    int64_t batch, heads, kv_heads, group; /* heads = kv_heads * group */
    int64_t seqlen_q, seqlen_new, seqlen_past, seqlen_k; /* of Q, of input K, of the cache; seqlen_k: cache and input */
    int64_t head_dim, head_dim_v;
    double scale, softcap;
    bool causal;
    int64_t window_left, window_right; /* keys to the left and right of the query's position; -1: no limit */
    int output_mode;
    ont_dtype dtype, softmax_dtype;
} attention;

/* ---- arguments ---- */

static ont_status head_size(const ont_value *v, const char *name, int64_t heads, bool packed, int64_t *size)
{
    if (!packed && v->shape.dims[1] != heads)
        return ont_fail(ONT_EINVAL, "%s has %" PRId64 " heads, expected %" PRId64, name, v->shape.dims[1], heads);
    if (packed && (heads < 1 || v->shape.dims[2] % heads))
        return ont_fail(ONT_EINVAL, "%s has %" PRId64 " features for %" PRId64 " heads", name, v->shape.dims[2], heads);
    *size = packed ? v->shape.dims[2] / heads : v->shape.dims[3];
    return ONT_OK;
}

static ont_status check_past(const ont_node *node, uint32_t index, const attention *a, int64_t size)
{
    const ont_value *v = ont_node_in(node, index);
    char got[ONT_SHAPE_TEXT], want[ONT_SHAPE_TEXT];
    ont_shape shape = ont_shape_of(4, (int64_t[]){a->batch, a->kv_heads, a->seqlen_past, size});
    if (v && (v->dtype != a->dtype || !ont_shape_equal(&v->shape, &shape)))
        return ont_fail(ONT_EINVAL, "input %u is %s%s, expected %s%s", index, ont_dtype_name(v->dtype),
                        ont_shape_text(&v->shape, got), ont_dtype_name(a->dtype), ont_shape_text(&shape, want));
    return ONT_OK;
}

static ont_status read_sizes(const ont_node *node, attention *a)
{
    ont_value *v[3];
    for (uint32_t i = 0; i < 3; i++) {
        ONT_TRY(ont_need_input(node, i, &v[i]));
        if (v[i]->shape.rank != v[0]->shape.rank || (v[i]->shape.rank != 3 && v[i]->shape.rank != 4))
            return ont_fail(ONT_EINVAL, "Q, K and V must all have rank 3 or 4");
        if (v[i]->dtype != v[0]->dtype || !ont_dtype_is_float(v[i]->dtype))
            return ont_fail(ONT_ETYPE, "Q is %s and input %u is %s, floats of one dtype are expected",
                            ont_dtype_name(v[0]->dtype), i, ont_dtype_name(v[i]->dtype));
        if (v[i]->shape.dims[0] != v[0]->shape.dims[0])
            return ont_fail(ONT_EINVAL, "the batch sizes of Q, K and V differ");
    }
    a->packed = v[0]->shape.rank == 3;
    int s = a->packed ? 1 : 2;
    a->dtype = v[0]->dtype;
    a->batch = v[0]->shape.dims[0];
    a->heads = a->packed ? ont_attr_int(node, "q_num_heads", 0) : v[0]->shape.dims[1];
    a->kv_heads = a->packed ? ont_attr_int(node, "kv_num_heads", 0) : v[1]->shape.dims[1];
    a->seqlen_q = v[0]->shape.dims[s];
    a->seqlen_new = v[1]->shape.dims[s];
    int64_t k_size;
    ONT_TRY(head_size(v[0], "Q", a->heads, a->packed, &a->head_dim));
    ONT_TRY(head_size(v[1], "K", a->kv_heads, a->packed, &k_size));
    ONT_TRY(head_size(v[2], "V", a->kv_heads, a->packed, &a->head_dim_v));
    if (k_size != a->head_dim || v[2]->shape.dims[s] != a->seqlen_new || a->kv_heads < 1 || a->heads % a->kv_heads)
        return ont_fail(ONT_EINVAL, "Q has %" PRId64 " heads of size %" PRId64 ", K has %" PRId64 " of size %" PRId64,
                        a->heads, a->head_dim, a->kv_heads, k_size);
    a->group = a->heads / a->kv_heads;
    return ONT_OK;
}

static ont_status read_mask(const ont_node *node, const attention *a)
{
    const ont_value *mask = ont_node_in(node, MASK);
    if (!mask) return ONT_OK;
    char text[ONT_SHAPE_TEXT];
    ont_shape full = ont_shape_of(4, (int64_t[]){a->batch, a->heads, a->seqlen_q, a->seqlen_k}), seen = mask->shape,
        both;
    int last = seen.rank - 1;
    if (mask->dtype != ONT_BOOL && !ont_dtype_is_float(mask->dtype) && !ont_dtype_is_int(mask->dtype))
        return ont_fail(ONT_ETYPE, "attn_mask is %s, bool or a number is expected", ont_dtype_name(mask->dtype));
    /* From opset 24 on, a shorter last dim is padded. So a last dim of 1 broadcasts only where seqlen_k is 1. */
    if (last >= 0 && seen.dims[last] < a->seqlen_k) seen.dims[last] = a->seqlen_k;
    if (seen.rank > 4 || ont_shape_broadcast(&full, &seen, &both) != ONT_OK || !ont_shape_equal(&both, &full))
        return ont_fail(ONT_EINVAL, "attn_mask %s does not fit the scores", ont_shape_text(&mask->shape, text));
    return ONT_OK;
}

static ont_status read_attention(const ont_node *node, attention *a)
{
    ONT_TRY(read_sizes(node, a));
    const ont_value *pk = ont_node_in(node, PAST_K), *pv = ont_node_in(node, PAST_V),
                    *lens = ont_node_in(node, KV_SEQLENS);
    if (!pk != !pv) return ont_fail(ONT_EINVAL, "past_key and past_value must be given together");
    if (pk && lens) return ont_fail(ONT_EINVAL, "nonpad_kv_seqlen cannot be given with past_key");
    if (pk && pk->shape.rank == 4) a->seqlen_past = pk->shape.dims[2];
    a->seqlen_k = a->seqlen_past + a->seqlen_new;
    ONT_TRY(check_past(node, PAST_K, a, a->head_dim));
    ONT_TRY(check_past(node, PAST_V, a, a->head_dim_v));
    if (lens && (lens->dtype != ONT_INT64 || lens->shape.rank != 1 || lens->shape.dims[0] != a->batch))
        return ont_fail(ONT_EINVAL, "nonpad_kv_seqlen must have shape (%" PRId64 ") and dtype int64", a->batch);
    ONT_TRY(read_mask(node, a));
    a->scale = ont_attr_float(node, "scale", a->head_dim ? 1 / sqrt((double)a->head_dim) : 1);
    a->softcap = ont_attr_float(node, "softcap", 0);
    a->causal = ont_attr_int(node, "is_causal", 0) != 0;
    a->window_left = ont_attr_int(node, "left_window_size", -1);
    a->window_right = ont_attr_int(node, "right_window_size", -1);
    if (a->window_left < -1 || a->window_right < -1)
        return ont_fail(ONT_EINVAL, "left_window_size and right_window_size must be at least -1");
    a->output_mode = (int)ont_attr_int(node, "qk_matmul_output_mode", RAW);
    if (a->output_mode < RAW || a->output_mode > PROBABILITIES)
        return ont_fail(ONT_EINVAL, "qk_matmul_output_mode is %d, expected %d to %d", a->output_mode, RAW,
                        PROBABILITIES);
    int64_t wide = ont_attr_int(node, "softmax_precision", a->dtype);
    if (wide < 0 || wide >= ONT_DTYPE_COUNT || !ont_dtype_is_float((ont_dtype)wide))
        return ont_fail(ONT_EINVAL, "softmax_precision is %" PRId64 ", the number of a float dtype is expected", wide);
    a->softmax_dtype = (ont_dtype)wide;
    return ONT_OK;
}

static ont_status attention_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    attention a = {0};
    ONT_TRY(read_attention(node, &a));
    ont_shape y = ont_shape_of(4, (int64_t[]){a.batch, a.heads, a.seqlen_q, a.head_dim_v});
    if (a.packed) y = ont_shape_of(3, (int64_t[]){a.batch, a.seqlen_q, a.heads * a.head_dim_v});
    ont_shape k = ont_shape_of(4, (int64_t[]){a.batch, a.kv_heads, a.seqlen_k, a.head_dim}), v = k;
    v.dims[3] = a.head_dim_v;
    ONT_TRY(ont_infer_out(node, 0, a.dtype, &y));
    ONT_TRY(ont_infer_out(node, 1, a.dtype, &k));
    ONT_TRY(ont_infer_out(node, 2, a.dtype, &v));
    return ont_infer_out(node, 3, a.dtype, &(ont_shape){.rank = 4, .dims = {a.batch, a.heads, a.seqlen_q, a.seqlen_k}});
}

/* ---- masks ---- */

/* 0, 1, ..., n - 1 as int64, (n) for keys or (n, 1) for queries. */
static ont_value *positions(const attention *a, int64_t n, bool queries)
{
    int64_t *values = ont_arena_array(&a->b->graph->arena, (size_t)n + 1, sizeof *values);
    if (!values) {
        ont_build_fail(a->b, ONT_ENOMEM, "out of memory");
        return NULL;
    }
    for (int64_t i = 0; i < n; i++) values[i] = i;
    ont_value *v = ont_build_const_ints(a->b, values, (size_t)n);
    return v && queries ? ont_build_reshape(a->b, v, &(ont_shape){.rank = 2, .dims = {n, 1}}) : v;
}

static ont_value *both(ont_builder *b, ont_value *x, ont_value *y)
{
    return x && y ? ont_build2(b, "And", x, y) : x ? x : y;
}

/* Number of valid keys of each sample, (batch, 1, 1, 1); NULL without input nonpad_kv_seqlen. */
static ont_value *kv_seqlens(const attention *a)
{
    ont_value *lens = ont_node_in(a->node, KV_SEQLENS);
    return lens ? ont_build_reshape(a->b, lens, &(ont_shape){.rank = 4, .dims = {a->batch, 1, 1, 1}}) : NULL;
}

/* Keys that causality, window and cache allow: bool, broadcasts to (batch, 1, seqlen_q, seqlen_k); NULL: all. */
static ont_value *allowed_by_position(const attention *a)
{
    ont_builder *b = a->b;
    ont_value *lens = kv_seqlens(a), *key = positions(a, a->seqlen_k, false), *allowed = NULL;
    if (lens) allowed = ont_build2(b, "Less", key, lens);
    if (!a->causal && a->window_left < 0 && a->window_right < 0) return allowed;
    ont_value *at = positions(a, a->seqlen_q, true); /* position of each query among the keys */
    if (lens)
        at = ont_build2(b, "Add", at, ont_build_shift(b, lens, (double)-a->seqlen_q));
    else
        at = ont_build_shift(b, at, (double)a->seqlen_past);
    if (a->causal) allowed = both(b, allowed, ont_build2(b, "LessOrEqual", key, at));
    if (a->window_left >= 0)
        allowed = both(b, allowed, ont_build2(b, "GreaterOrEqual", key,
                                              ont_build_shift(b, at, (double)-a->window_left)));
    if (a->window_right >= 0)
        allowed = both(b, allowed, ont_build2(b, "LessOrEqual", key, ont_build_shift(b, at, (double)a->window_right)));
    return allowed;
}

/* Whether a query may attend to no key, as far as shapes tell. */
static bool may_mask_rows(const attention *a)
{
    if (ont_node_in(a->node, MASK) || ont_node_in(a->node, KV_SEQLENS)) return true;
    for (int64_t i = 0; i < a->seqlen_q; i++) {
        int64_t at = i + a->seqlen_past, low = a->window_left >= 0 && at > a->window_left ? at - a->window_left : 0,
            high = a->seqlen_k - 1;
        if (a->causal && at < high) high = at;
        if (a->window_right >= 0 && at + a->window_right < high) high = at + a->window_right;
        if (low > high) return true;
    }
    return false;
}

typedef struct masks {
    ont_value *allowed; /* bool, broadcasts to the scores (batch, heads, seqlen_q, seqlen_k); NULL: all are allowed */
    ont_value *bias;    /* float, broadcasts to the scores and is added to them; NULL: none */
    ont_value *masked_rows; /* bool (..., 1): queries that attend to no key; NULL: there is none */
} masks;

/* Adds input attn_mask, whose last dim is padded to all keys; padded keys are not allowed. */
static void given_mask(const attention *a, masks *m)
{
    ont_builder *b = a->b;
    ont_value *mask = ont_node_in(a->node, MASK);
    if (!mask) return;
    if (mask->dtype != ONT_BOOL && mask->dtype != a->dtype) mask = ont_build_cast(b, mask, a->dtype);
    if (!mask) return;
    int last = mask->shape.rank - 1;
    int64_t short_by = last < 0 ? 0 : a->seqlen_k - mask->shape.dims[last];
    if (short_by) {
        ont_shape rest = mask->shape;
        rest.dims[last] = short_by;
        ont_value *filler = ont_build_full(b, mask->dtype, &rest, 0);
        if (mask->dtype != ONT_BOOL) {
            ont_value *end = ont_build_const_ints(b, (int64_t[]){mask->shape.dims[last]}, 1);
            m->allowed = both(b, m->allowed, ont_build2(b, "Less", positions(a, a->seqlen_k, false), end));
        }
        mask = ont_build_concat(b, (ont_value *[]){mask, filler}, 2, last);
    }
    if (mask && mask->dtype == ONT_BOOL)
        m->allowed = both(b, m->allowed, mask);
    else
        m->bias = mask;
}

/* Queries that attend to no key, computed from mask and bias alone. */
static ont_value *masked_queries(const attention *a, const masks *m)
{
    ont_builder *b = a->b;
    ont_value *minus_inf = ont_build_scalar(b, ONT_FLOAT32, -INFINITY), *score = NULL;
    if (m->bias) score = ont_build_cast(b, m->bias, ONT_FLOAT32);
    if (m->allowed)
        score = ont_build3(b, "Where", m->allowed, score ? score : ont_build_scalar(b, ONT_FLOAT32, 0), minus_inf);
    if (!score || score->shape.rank == 0) return NULL;
    ont_value *row_max = ont_build_reduce(b, "ReduceMax", score, (int64_t[]){score->shape.rank - 1}, 1, true);
    return ont_build2(b, "Equal", row_max, minus_inf);
}

/* ---- the expansion ---- */

/* (batch, seqlen, heads * size) to (batch, heads, seqlen, size) */
static ont_value *unpack(const attention *a, ont_value *x, int64_t heads, int64_t size)
{
    if (!a->packed || !x) return x;
    ont_shape shape = ont_shape_of(4, (int64_t[]){a->batch, x->shape.dims[1], heads, size});
    return ont_build_transpose(a->b, ont_build_reshape(a->b, x, &shape), (int64_t[]){0, 2, 1, 3});
}

static ont_value *with_past(const attention *a, uint32_t index, ont_value *fresh)
{
    ont_value *past = ont_node_in(a->node, index);
    return past ? ont_build_concat(a->b, (ont_value *[]){past, fresh}, 2, 2) : fresh;
}

static ont_value *reshape4(const attention *a, ont_value *x, int64_t heads, int64_t rows, int64_t columns)
{
    return x ? ont_build_reshape(a->b, x, &(ont_shape){.rank = 4, .dims = {a->batch, heads, rows, columns}}) : NULL;
}

static ont_value *biased(const attention *a, ont_value *scores, const masks *m)
{
    ont_builder *b = a->b;
    if (m->bias) scores = ont_build2(b, "Add", scores, m->bias);
    if (m->allowed) scores = ont_build3(b, "Where", m->allowed, scores, ont_build_scalar(b, a->dtype, -INFINITY));
    return scores;
}

static ont_value *zero_masked_rows(const attention *a, ont_value *x, const masks *m)
{
    return m->masked_rows ? ont_build3(a->b, "Where", m->masked_rows, ont_build_scalar(a->b, a->dtype, 0), x) : x;
}

/* Lets queries without a key attend to all keys: softmax gives no NaN, and zero_masked_rows() zeroes the result. */
static masks without_masked_rows(const attention *a, const masks *m)
{
    masks safe = *m;
    if (!m->masked_rows) return safe;
    if (m->allowed) safe.allowed = ont_build2(a->b, "Or", m->allowed, m->masked_rows);
    if (m->bias) safe.bias = ont_build3(a->b, "Where", m->masked_rows, ont_build_scalar(a->b, a->dtype, 0), m->bias);
    return safe;
}

static ont_value *softmax(const attention *a, ont_value *scores)
{
    ont_builder *b = a->b;
    scores = ont_build_cast(b, scores, a->softmax_dtype);
    ont_node *node = scores ? ont_build_node(b, "", "Softmax", &scores, 1, 1) : NULL;
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", -1);
    return ont_build_cast(b, ont_build_done(b, node), a->dtype);
}

static void attention_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    attention a = {.b = b, .node = node};
    b->status = read_attention(node, &a);
    if (b->status != ONT_OK) return;
    ont_value *k = with_past(&a, PAST_K, unpack(&a, ont_node_in(node, K), a.kv_heads, a.head_dim));
    ont_value *v = with_past(&a, PAST_V, unpack(&a, ont_node_in(node, V), a.kv_heads, a.head_dim_v));
    outputs[1] = k;
    outputs[2] = v;
    /* The query heads of a group are rows of one matrix, (batch, kv_heads, group * seqlen_q, head_dim). */
    ont_value *q = reshape4(&a, unpack(&a, ont_node_in(node, Q), a.heads, a.head_dim), a.kv_heads, a.group * a.seqlen_q,
                            a.head_dim);
    ont_value *raw = reshape4(&a, ont_build_matmul(b, q, false, k, true, a.scale), a.heads, a.seqlen_q, a.seqlen_k);
    ont_value *capped = raw;
    if (a.softcap > 0)
        capped = ont_build_scale(b, ont_build1(b, "Tanh", ont_build_scale(b, raw, 1 / a.softcap)), a.softcap);
    masks m = {.allowed = allowed_by_position(&a)};
    given_mask(&a, &m);
    if (may_mask_rows(&a)) m.masked_rows = masked_queries(&a, &m);
    masks safe = without_masked_rows(&a, &m);
    ont_value *p = softmax(&a, biased(&a, capped, &safe));
    ont_value *rows = ont_build_matmul(b, reshape4(&a, p, a.kv_heads, a.group * a.seqlen_q, a.seqlen_k), false, v,
                                       false, 1);
    ont_value *y = zero_masked_rows(&a, reshape4(&a, rows, a.heads, a.seqlen_q, a.head_dim_v), &m);
    if (a.packed) {
        y = ont_build_transpose(b, y, (int64_t[]){0, 2, 1, 3});
        if (y)
            y = ont_build_reshape(b, y,
                                  &(ont_shape){.rank = 3, .dims = {a.batch, a.seqlen_q, a.heads * a.head_dim_v}});
    }
    outputs[0] = y;
    if (!ont_node_out(node, 3)) return;
    outputs[3] = a.output_mode == RAW      ? raw
                 : a.output_mode == CAPPED ? capped
                 : a.output_mode == BIASED ? biased(&a, capped, &m)
                                           : zero_masked_rows(&a, p, &m);
}

const ont_op ont_op_Attention = {.domain = "", .name = "Attention", .since = 23, .min_inputs = 3, .max_inputs = 7,
                                 .attributes = "is_causal:i kv_num_heads:i left_window_size:i q_num_heads:i "
                                               "qk_matmul_output_mode:i right_window_size:i scale:f softcap:f "
                                               "softmax_precision:i",
                                 .nondiff_inputs = 1 << KV_SEQLENS, .infer = attention_infer,
                                 .expand = attention_expand};
