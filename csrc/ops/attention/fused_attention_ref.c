/*
 * Reference of FusedAttention and its gradient: one row of scores at a time, on each thread. Tests compare the other
 * kernel with it; float64, a dtype for checks, has no other one.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/attention/flash.h"

ont_status ont_attention_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_flash_state *s;
    ONT_TRY(ont_flash_state_init(node, arena, &s));
    s->block_q = s->a.seqlen_q; /* a single block: the gradient is divided by batch index alone */
    s->block_k = s->a.seqlen_k;
    s->slot_bytes = ((size_t)s->a.seqlen_k * (2 * s->elem_size + 1) + 63) / 64 * 64;
    out->state = s;
    out->work_bytes = s->slot_bytes * (size_t)s->slots;
    return ONT_OK;
}

/* Whether input masked_rows masks query i at batch index bh. */
static bool is_masked_row(const ont_call *call, const ont_attention *a, int64_t bh, int64_t i)
{
    enum { WHICH = ONT_ATTENTION_MASKED_ROWS };
    const uint8_t *masked = call->node->n_inputs > WHICH ? call->in[WHICH] : NULL;
    return masked && masked[ont_attention_offset(a, WHICH, bh) +
                            ont_attention_position(a, i) * a->layout[WHICH].row_stride];
}

static const uint8_t *mask_row(const ont_call *call, const ont_attention *a, int64_t bh, int64_t i)
{
    enum { WHICH = ONT_ATTENTION_MASK };
    const uint8_t *mask = call->node->n_inputs > WHICH ? call->in[WHICH] : NULL;
    return mask ? mask + ont_attention_offset(a, WHICH, bh) + ont_attention_position(a, i) * a->layout[WHICH].row_stride
                : NULL;
}

/* Element of the scores at query i and key 0 of batch index bh. */
static int64_t element(const ont_attention *a, int64_t bh, int64_t i)
{
    return (bh * a->scores_q + ont_attention_position(a, i)) * a->scores_k + a->first_key;
}

/* dropout_mask has room for scores_k bytes. */
static void draw_dropout_mask(const ont_call *call, const ont_attention *a, int64_t first, uint8_t *dropout_mask)
{
    int64_t n = a->seqlen_k ? ont_attention_column(a, a->seqlen_k - 1) + 1 : 0;
    const ont_dropout_params dropout = {.key = call->seed, .stream = a->rng_stream,
                                        .threshold = a->dropout_threshold, .scale = 1};
    memset(dropout_mask, 1, (size_t)n);
    if (a->has_dropout)
        ont_simd_plain()->dropout(&dropout, NULL, NULL, dropout_mask, first, n);
    for (int64_t j = 0; a->key_rows && j < a->seqlen_k; j++) dropout_mask[j] = dropout_mask[ont_attention_column(a, j)];
}

/* Row i of the matrix of an operand at batch index bh. */
#define AT(type, operand, pointer, i) \
    ((type *)(pointer) + ont_attention_offset(a, operand, bh) + (i) * a->layout[operand].row_stride)

#define REFERENCE(suffix, type, exp_) \
    /* s (seqlen_k): scores of query i */ \
    static void scores_##suffix(const ont_call *call, const ont_attention *a, int64_t bh, int64_t i, type *s) \
    { \
        const type *q = AT(const type, ONT_ATTENTION_Q, call->in[0], i), *bias = NULL; \
        const uint8_t *mask = mask_row(call, a, bh, i); \
        if (call->node->n_inputs > ONT_ATTENTION_BIAS && call->in[ONT_ATTENTION_BIAS]) \
            bias = AT(const type, ONT_ATTENTION_BIAS, call->in[ONT_ATTENTION_BIAS], ont_attention_position(a, i)); \
        for (int64_t j = 0; j < a->seqlen_k; j++) { \
            const type *k = AT(const type, ONT_ATTENTION_K, call->in[1], j); \
            type sum = 0; \
            for (int64_t d = 0; d < a->head_dim; d++) sum += q[d] * k[d]; \
            s[j] = sum * (type)a->scale; \
            int64_t column = ont_attention_column(a, j); \
            if (bias) s[j] += bias[column * a->layout[ONT_ATTENTION_BIAS].col_stride]; \
            if (mask && (mask[column * a->layout[ONT_ATTENTION_MASK].col_stride] != 0) != a->mask_polarity) \
                s[j] = (type)a->mask_value; \
            if (j >= ont_attention_visible_keys(a, i)) s[j] = -(type)INFINITY; \
        } \
    } \
    static void forward_##suffix(const ont_call *call, const ont_attention *a, int64_t bh, int64_t i, void *work) \
    { \
        type *s = work, *y = AT(type, ONT_ATTENTION_Y, call->out[0], i), row_max = -(type)INFINITY, row_sum = 0; \
        uint8_t *dropout_mask = (uint8_t *)(s + a->seqlen_k); \
        draw_dropout_mask(call, a, element(a, bh, i), dropout_mask); \
        scores_##suffix(call, a, bh, i, s); \
        for (int64_t j = 0; j < a->seqlen_k; j++) row_max = s[j] > row_max ? s[j] : row_max; \
        for (int64_t j = 0; j < a->seqlen_k; j++) \
            row_sum += s[j] = exp_(s[j] - (row_max == -(type)INFINITY ? 0 : row_max)); \
        for (int64_t e = 0; e < a->head_dim_v; e++) y[e] = 0; \
        for (int64_t j = 0; j < a->seqlen_k; j++) { \
            const type *v = AT(const type, ONT_ATTENTION_V, call->in[2], j); \
            type p = s[j] / row_sum * (a->has_dropout ? dropout_mask[j] * (type)a->dropout_scale : 1); \
            for (int64_t e = 0; e < a->head_dim_v; e++) y[e] += p * v[e]; \
        } \
        if (ont_attention_row_is_masked(a, (double)row_sum) || is_masked_row(call, a, bh, i)) \
            for (int64_t e = 0; e < a->head_dim_v; e++) y[e] = 0; \
        if (call->node->n_outputs < 2 || !call->out[1]) return; \
        ((type *)call->out[1])[(bh * a->scores_q + i) * 2] = row_max; \
        ((type *)call->out[1])[(bh * a->scores_q + i) * 2 + 1] = row_sum; \
    } \
    static void backward_##suffix(const ont_call *call, const ont_attention *a, int64_t bh, int64_t i, \
                                  const ont_flash_work_item *out, void *work) \
    { \
        type *s = work, *dp = s + a->seqlen_k, delta = 0; \
        uint8_t *dropout_mask = (uint8_t *)(dp + a->seqlen_k); \
        const uint8_t *mask = mask_row(call, a, bh, i); \
        const type *stats = (const type *)call->in[ONT_ATTENTION_STATS] + (bh * a->scores_q + i) * 2; \
        const type *dy = AT(const type, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY], i); \
        const type *q = AT(const type, ONT_ATTENTION_Q, call->in[0], i); \
        type *dbias = out->dbias ? (type *)out->dbias + element(a, bh, i) : NULL; \
        if (ont_attention_row_is_masked(a, (double)stats[1]) || is_masked_row(call, a, bh, i)) return; \
        draw_dropout_mask(call, a, element(a, bh, i), dropout_mask); \
        scores_##suffix(call, a, bh, i, s); \
        type base = stats[0] == -(type)INFINITY ? 0 : stats[0]; \
        for (int64_t j = 0; j < a->seqlen_k; j++) { \
            const type *v = AT(const type, ONT_ATTENTION_V, call->in[2], j); \
            type scale = a->has_dropout ? dropout_mask[j] * (type)a->dropout_scale : 1, \
                 p = exp_(s[j] - base) / stats[1], sum = 0; \
            for (int64_t e = 0; e < a->head_dim_v; e++) sum += dy[e] * v[e]; \
            dp[j] = sum * scale; \
            delta += p * dp[j]; \
            s[j] = p; \
            type *dv = out->dv ? AT(type, ONT_ATTENTION_V, out->dv, j) : NULL; \
            for (int64_t e = 0; dv && e < a->head_dim_v; e++) dv[e] += p * scale * dy[e]; \
        } \
        for (int64_t j = 0; j < a->seqlen_k; j++) { \
            int64_t column = ont_attention_column(a, j) * a->layout[ONT_ATTENTION_MASK].col_stride; \
            bool is_masked = mask && (mask[column] != 0) != a->mask_polarity; \
            type ds = is_masked ? 0 : s[j] * (dp[j] - delta), scale = (type)a->scale; \
            const type *k = AT(const type, ONT_ATTENTION_K, call->in[1], j); \
            type *dk = out->dk ? AT(type, ONT_ATTENTION_K, out->dk, j) : NULL; \
            type *dq = out->dq ? AT(type, ONT_ATTENTION_Q, out->dq, i) : NULL; \
            if (dbias) dbias[ont_attention_column(a, j)] = ds; \
            for (int64_t d = 0; dk && d < a->head_dim; d++) dk[d] += scale * ds * q[d]; \
            for (int64_t d = 0; dq && d < a->head_dim; d++) dq[d] += scale * ds * k[d]; \
        } \
    }
REFERENCE(f32, float, expf)
REFERENCE(f64, double, exp)

static void forward_slots(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_flash_state *s = call->state;
    bool single = s->elem_size == sizeof(float);
    for (int64_t slot = first; slot < last; slot++)
        for (int64_t bh = slot; bh < s->a.n_bh; bh += s->slots) {
            void *work = (char *)call->work + (size_t)slot * s->slot_bytes;
            ont_flash_state packed;
            const ont_attention *a = &ont_flash_at(call, s, bh, slot, &packed)->a;
            for (int64_t i = 0; i < a->seqlen_q; i++) (single ? forward_f32 : forward_f64)(call, a, bh, i, work);
        }
}

ont_status ont_attention_run_ref(const ont_call *call)
{
    const ont_flash_state *s = call->state;
    ont_attention_zero_spare(call, &s->a, ONT_ATTENTION_Y, call->out[0]);
    ont_parallel(s->slots, 1, forward_slots, (void *)call);
    return ONT_OK;
}

static void run_work_item(const ont_call *call, const ont_flash_state *s, const ont_flash_work_item *item, int64_t slot)
{
    void *work = (char *)call->work + (size_t)slot * s->slot_bytes;
    bool single = s->elem_size == sizeof(float);
    for (int64_t i = item->i0; i < item->i1; i++)
        (single ? backward_f32 : backward_f64)(call, &s->a, item->bh, i, item, work);
}

ont_status ont_attention_run_grad_ref(const ont_call *call)
{
    for (uint32_t i = 0; i < call->node->n_outputs; i++) {
        const ont_value *v = call->node->outputs[i];
        if (v) memset(call->out[i], 0, (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype));
    }
    return ont_flash_backward(call, run_work_item);
}
