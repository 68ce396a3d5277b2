/*
 * FusedAttention and its gradient one row after the other: the oracle of ops/flash.c.
 */
#include <math.h>
#include <string.h>

#include "ops/fused_attention.h"
#include "simd/simd.h"

typedef struct ref_state {
    ont_attention a;
    int64_t targets[4];
} ref_state;

ont_status ont_attention_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ref_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_attention_read(node, &s->a));
    size_t n;
    const int64_t *targets = ont_attr_ints(node, "targets", &n);
    for (size_t i = 0; i < 4; i++) s->targets[i] = i < n ? targets[i] : -1;
    out->state = s;
    out->work_bytes = (size_t)s->a.columns * (2 * sizeof(double) + 1);
    return ONT_OK;
}

int64_t ont_attention_covered(const ont_attention *a, const int64_t *targets, int64_t target)
{
    int64_t sum = 0;
    for (int i = 0; i < 3; i++) {
        if (targets[i] != target) continue;
        int64_t n = (i == ONT_ATTENTION_Q ? a->rows : a->columns) * (i == ONT_ATTENTION_V ? a->v_size : a->size);
        for (int d = 0; d < a->n_leads; d++) n *= a->view[i].lead[d] ? a->leads[d] : 1;
        sum += n;
    }
    return sum;
}

void ont_attention_clear(const ont_call *call, const ont_attention *a, const int64_t *targets)
{
    for (uint32_t i = 0; i < call->node->n_outputs; i++) {
        const ont_value *out = call->node->outputs[i];
        if (!out || targets[3] == (int64_t)i) continue;
        int64_t n = ont_shape_count(&out->shape);
        if (ont_attention_covered(a, targets, i) < n) memset(call->out[i], 0, (size_t)n * ont_dtype_size(out->dtype));
    }
}

/* Whether row i of lead l was taken out: it gives zeros and no gradient. */
static bool is_empty(const ont_call *call, const ont_attention *a, int64_t l, int64_t i)
{
    const uint8_t *empty = call->node->n_inputs > ONT_ATTENTION_EMPTY ? call->in[ONT_ATTENTION_EMPTY] : NULL;
    return empty && empty[ont_attention_at(a, ONT_ATTENTION_EMPTY, l) + i * a->view[ONT_ATTENTION_EMPTY].row];
}

static const uint8_t *keep_row(const ont_call *call, const ont_attention *a, int64_t l, int64_t i)
{
    const uint8_t *keep = call->node->n_inputs > ONT_ATTENTION_KEEP ? call->in[ONT_ATTENTION_KEEP] : NULL;
    return keep ? keep + ont_attention_at(a, ONT_ATTENTION_KEEP, l) + i * a->view[ONT_ATTENTION_KEEP].row : NULL;
}

static void choose_kept(const ont_call *call, const ont_attention *a, int64_t row, uint8_t *kept)
{
    memset(kept, 1, (size_t)a->columns);
    if (a->drops)
        ont_simd_plain()->dropout(NULL, NULL, kept, row * a->columns, a->columns, call->seed, a->stream, a->threshold,
                                  1);
}

#define AT(type, view_, pointer, i) ((type *)(pointer) + ont_attention_at(a, view_, l) + (i) * a->view[view_].row)

#define REFERENCE(suffix, type, exp_) \
    /* p: probabilities of row i; true where column j may carry a gradient is seen again by the caller */ \
    static void scores_##suffix(const ont_call *call, const ont_attention *a, int64_t l, int64_t i, type *s) \
    { \
        const type *q = AT(const type, ONT_ATTENTION_Q, call->in[0], i), *bias = NULL; \
        const uint8_t *keep = keep_row(call, a, l, i); \
        if (call->node->n_inputs > ONT_ATTENTION_BIAS && call->in[ONT_ATTENTION_BIAS]) \
            bias = AT(const type, ONT_ATTENTION_BIAS, call->in[ONT_ATTENTION_BIAS], i); \
        for (int64_t j = 0; j < a->columns; j++) { \
            const type *k = AT(const type, ONT_ATTENTION_K, call->in[1], j); \
            type sum = 0; \
            for (int64_t d = 0; d < a->size; d++) sum += q[d] * k[d]; \
            s[j] = sum * (type)a->scale; \
            if (bias) s[j] += bias[j * a->view[ONT_ATTENTION_BIAS].column]; \
            if (keep && (keep[j * a->view[ONT_ATTENTION_KEEP].column] != 0) != a->keep_if) s[j] = (type)a->fill; \
            if (j >= ont_attention_visible(a, i)) s[j] = -(type)INFINITY; \
        } \
    } \
    static void forward_##suffix(const ont_call *call, const ont_attention *a, int64_t l, int64_t i) \
    { \
        type *s = call->work, *y = AT(type, ONT_ATTENTION_Y, call->out[0], i), most = -(type)INFINITY, sum = 0; \
        uint8_t *kept = (uint8_t *)(s + a->columns); \
        choose_kept(call, a, l * a->rows + i, kept); \
        scores_##suffix(call, a, l, i, s); \
        for (int64_t j = 0; j < a->columns; j++) most = s[j] > most ? s[j] : most; \
        for (int64_t j = 0; j < a->columns; j++) sum += s[j] = exp_(s[j] - (most == -(type)INFINITY ? 0 : most)); \
        for (int64_t e = 0; e < a->v_size; e++) y[e] = 0; \
        for (int64_t j = 0; j < a->columns; j++) { \
            const type *v = AT(const type, ONT_ATTENTION_V, call->in[2], j); \
            type p = s[j] / sum * (a->drops ? kept[j] * (type)a->keep_scale : 1); \
            for (int64_t e = 0; e < a->v_size; e++) y[e] += p * v[e]; \
        } \
        if (ont_attention_is_void(a, (double)sum) || is_empty(call, a, l, i)) \
            for (int64_t e = 0; e < a->v_size; e++) y[e] = 0; \
        if (call->node->n_outputs < 2 || !call->out[1]) return; \
        ((type *)call->out[1])[(l * a->rows + i) * 2] = most; \
        ((type *)call->out[1])[(l * a->rows + i) * 2 + 1] = sum; \
    } \
    static void backward_##suffix(const ont_call *call, const ref_state *state, int64_t l, int64_t i, \
                                  void *const *out) \
    { \
        const ont_attention *a = &state->a; \
        type *s = call->work, *dp = s + a->columns, delta = 0; \
        uint8_t *kept = (uint8_t *)(dp + a->columns); \
        const uint8_t *keep = keep_row(call, a, l, i); \
        const type *stats = (const type *)call->in[ONT_ATTENTION_STATS] + (l * a->rows + i) * 2; \
        const type *dy = AT(const type, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY], i); \
        const type *q = AT(const type, ONT_ATTENTION_Q, call->in[0], i); \
        type *dbias = out[3] ? (type *)out[3] + (l * a->rows + i) * a->columns : NULL; \
        for (int64_t j = 0; dbias && j < a->columns; j++) dbias[j] = 0; \
        if (ont_attention_is_void(a, (double)stats[1]) || is_empty(call, a, l, i)) return; \
        choose_kept(call, a, l * a->rows + i, kept); \
        scores_##suffix(call, a, l, i, s); \
        type base = stats[0] == -(type)INFINITY ? 0 : stats[0]; \
        for (int64_t j = 0; j < a->columns; j++) { \
            const type *v = AT(const type, ONT_ATTENTION_V, call->in[2], j); \
            type scale = a->drops ? kept[j] * (type)a->keep_scale : 1, p = exp_(s[j] - base) / stats[1], sum = 0; \
            for (int64_t e = 0; e < a->v_size; e++) sum += dy[e] * v[e]; \
            dp[j] = sum * scale; \
            delta += p * dp[j]; \
            s[j] = p; \
            type *dv = out[2] ? AT(type, ONT_ATTENTION_V, out[2], j) : NULL; \
            for (int64_t e = 0; dv && e < a->v_size; e++) dv[e] += p * scale * dy[e]; \
        } \
        for (int64_t j = 0; j < a->columns; j++) { \
            bool replaced = keep && (keep[j * a->view[ONT_ATTENTION_KEEP].column] != 0) != a->keep_if; \
            type ds = replaced ? 0 : s[j] * (dp[j] - delta), scale = (type)a->scale; \
            const type *k = AT(const type, ONT_ATTENTION_K, call->in[1], j); \
            type *dk = out[1] ? AT(type, ONT_ATTENTION_K, out[1], j) : NULL; \
            type *dq = out[0] ? AT(type, ONT_ATTENTION_Q, out[0], i) : NULL; \
            if (dbias) dbias[j] = ds; \
            for (int64_t d = 0; dk && d < a->size; d++) dk[d] += scale * ds * q[d]; \
            for (int64_t d = 0; dq && d < a->size; d++) dq[d] += scale * ds * k[d]; \
        } \
    }
REFERENCE(f32, float, expf)
REFERENCE(f64, double, exp)

ont_status ont_attention_run_ref(const ont_call *call)
{
    const ont_attention *a = &((const ref_state *)call->state)->a;
    bool single = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    for (int64_t l = 0; l < a->count; l++)
        for (int64_t i = 0; i < a->rows; i++) (single ? forward_f32 : forward_f64)(call, a, l, i);
    return ONT_OK;
}

ont_status ont_attention_run_grad_ref(const ont_call *call)
{
    const ref_state *s = call->state;
    const ont_attention *a = &s->a;
    void *out[4] = {NULL};
    bool single = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    for (uint32_t i = 0; i < 4; i++) {
        if (s->targets[i] < 0) continue;
        out[i] = call->out[s->targets[i]];
        const ont_value *v = call->node->outputs[s->targets[i]];
        memset(out[i], 0, (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype));
    }
    for (int64_t l = 0; l < a->count; l++)
        for (int64_t i = 0; i < a->rows; i++) (single ? backward_f32 : backward_f64)(call, s, l, i, out);
    return ONT_OK;
}
