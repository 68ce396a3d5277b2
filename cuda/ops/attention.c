/*
 * FusedAttention and FusedAttentionGrad on CUDA: attributes (fused_attention.h) to kernel parameters (flash.h), or to a
 * plan of cuDNN (libs/sdpa.h).
 *
 * A plan is used after its first results have been compared with those of the own kernels, on the program's own
 * operands. Where they differ, the own results are returned, a warning says so, and the own kernels stay.
 */
#include <math.h>
#include <string.h>

#include "kernels/flash.h"
#include "kernels/sdpa.h"
#include "libs/dnn_graph.h"
#include "libs/sdpa.h"
#include "ops/compare.h"
#include "ops_common.h"

_Static_assert((int)ONT_FLASH_BATCH_DIMS == ONT_ATTENTION_BATCH_DIMS && (int)ONT_FLASH_Y == ONT_ATTENTION_Y &&
                   (int)ONT_FLASH_MASKED_ROWS == ONT_ATTENTION_MASKED_ROWS,
               "flash.h numbers inputs as ops/attention/fused_attention.h does");

typedef struct state {
    ont_flash_params flash;
    int64_t targets[4]; /* output index of the gradient of Q, K, V and bias; -1: none */
    bool clears[4];     /* by output: zeroed first, since Q, K and V do not write all of it */
    ont_sdpa *sdpa;     /* NULL: the own kernels */
    size_t tiles_at, tiles_bytes; /* in the workspace; 0 bytes: all tiles of scores are computed */
} state;

static ont_status read_node(const ont_node *node, state *s)
{
    ont_attention a;
    ONT_TRY(ont_attention_read(node, &a));
    const ont_value *bias = ont_node_in(node, ONT_ATTENTION_BIAS);
    const ont_value *q = ont_node_in(node, ONT_ATTENTION_Q); /* VisibleKeys has none */
    s->flash = (ont_flash_params){.dtype = q ? q->dtype : ONT_FLOAT32, .bias_dtype = bias ? bias->dtype : ONT_FLOAT32,
                                  .n_batch_dims = a.n_batch_dims, .causal = a.causal, .mask_polarity = a.mask_polarity,
                                  .zero_nan = a.zero_nan, .has_dropout = a.has_dropout,
                                  .dropout_threshold = a.dropout_threshold, .n_bh = a.n_bh, .seqlen_q = a.seqlen_q,
                                  .seqlen_k = a.seqlen_k, .head_dim = a.head_dim, .head_dim_v = a.head_dim_v,
                                  .causal_offset = a.causal_offset, .scale = a.scale, .mask_value = a.mask_value,
                                  .dropout_scale = a.dropout_scale, .rng_stream = a.rng_stream};
    for (int d = 0; d < a.n_batch_dims; d++) s->flash.batch_dims[d] = a.batch_dims[d];
    for (int i = 0; i < ONT_FLASH_LAYOUTS; i++) {
        ont_flash_layout *v = &s->flash.layout[i];
        *v = (ont_flash_layout){.offset = a.layout[i].offset, .row_stride = a.layout[i].row_stride,
                                .col_stride = a.layout[i].col_stride};
        for (int d = 0; d < a.n_batch_dims; d++) v->batch_stride[d] = a.layout[i].batch_stride[d];
    }
    size_t n;
    const int64_t *targets = ont_attr_ints(node, "targets", &n);
    for (size_t i = 0; i < 4; i++) s->targets[i] = i < n ? targets[i] : -1;
    for (uint32_t i = 0; i < node->n_outputs && i < 4 && n; i++)
        s->clears[i] = node->outputs[i] && s->targets[3] != (int64_t)i &&
                       ont_attention_covered(&a, s->targets, i) < ont_shape_count(&node->outputs[i]->shape);
    return ONT_OK;
}

static const char *accept(const ont_node *node)
{
    state s = {.clears = {false}};
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (!ont_is_float32_or_64(dtype) && !ont_dtype_is_half(dtype)) return "dtype";
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = ont_node_in(node, i);
        bool any = i == ONT_ATTENTION_BIAS || i == ONT_ATTENTION_MASK || i == ONT_ATTENTION_MASKED_ROWS ||
                   i == ONT_ATTENTION_STATS;
        if (v && !any && v->dtype != dtype) return "dtypes differ";
    }
    if (read_node(node, &s) != ONT_OK) return "attributes";
    /* Forward too only where the gradient, which needs more shared memory, will be accepted. */
    return ont_flash_fits(&s.flash, true) ? NULL : "size of the heads";
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_node(node, s));
    out->state = s;
    if (node->n_inputs > ONT_ATTENTION_DY)
        s->tiles_at = (size_t)(s->flash.n_bh * s->flash.seqlen_q) *
                      (s->flash.dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float));
    s->tiles_bytes = ont_flash_tiles_bytes(&s->flash, ont_node_in(node, ONT_ATTENTION_BIAS) != NULL,
                                           ont_node_in(node, ONT_ATTENTION_MASK) != NULL);
    out->work_bytes = s->tiles_at + s->tiles_bytes;
    return ONT_OK;
}

static ont_flash_params operands(const ont_call *call)
{
    const state *s = call->state;
    ont_flash_params f = s->flash;
    f.q = call->in[ONT_ATTENTION_Q];
    f.k = call->in[ONT_ATTENTION_K];
    f.v = call->in[ONT_ATTENTION_V];
    f.bias = ont_operand(call, ONT_ATTENTION_BIAS);
    f.mask = ont_operand(call, ONT_ATTENTION_MASK);
    f.masked_rows = ont_operand(call, ONT_ATTENTION_MASKED_ROWS);
    f.seed = call->seed_at;
    if (s->tiles_bytes) f.tiles = (uint8_t *)call->work + s->tiles_at;
    return f;
}

/* With results in `out`, which has the node's outputs. */
static ont_flash_params parameters(const ont_call *call, void *const *out)
{
    const state *s = call->state;
    ont_flash_params f = operands(call);
    if (call->node->n_inputs <= ONT_ATTENTION_DY) {
        f.y = out[0];
        f.stats = call->node->n_outputs > 1 ? out[1] : NULL;
        return f;
    }
    f.y = (void *)(uintptr_t)call->in[ONT_ATTENTION_Y]; /* read only */
    f.stats = (void *)(uintptr_t)call->in[ONT_ATTENTION_STATS];
    f.dy = call->in[ONT_ATTENTION_DY];
    f.delta = call->work;
    void **grads[] = {&f.dq, &f.dk, &f.dv, &f.dbias};
    for (int i = 0; i < 4; i++)
        if (s->targets[i] >= 0) *grads[i] = out[s->targets[i]];
    return f;
}

static size_t output_bytes(const ont_call *call, uint32_t i)
{
    const ont_value *v = call->node->outputs[i];
    return (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype);
}

static ont_status clear_outputs(const ont_call *call, void *const *out)
{
    const state *s = call->state;
    for (uint32_t i = 0; i < call->node->n_outputs && i < 4; i++)
        if (s->clears[i] && out[i])
            ONT_TRY(call->device->ops->clear(call->device, out[i], output_bytes(call, i), call->stream));
    return ONT_OK;
}

static int launch_own(const ont_flash_params *f, void *stream)
{
    return (f->dy ? ont_launch_flash_grad : ont_launch_flash)(f, stream);
}

static ont_status run(const ont_call *call)
{
    ont_flash_params f = parameters(call, call->out);
    ONT_TRY(clear_outputs(call, call->out));
    return ont_launched(launch_own(&f, call->stream));
}

/* ---- cuDNN ---- */

/* The first of the batch dims that is not 1; n_batch_dims where all are. */
static int first_dim(const ont_flash_params *f)
{
    int first = 0;
    while (first < f->n_batch_dims && f->batch_dims[first] == 1) first++;
    return first;
}

/*
 * The batch dims as one of batch and one of heads: the first dim that is not 1, and those behind it. Their strides in
 * the operand; false where they are not one dim. A stride of 0 in the last dims of K and V (repeats > 1) is a head that
 * several heads of Q share.
 */
static bool merge_dims(const ont_flash_params *f, int operand, int64_t repeats, int64_t strides[3])
{
    const ont_flash_layout *v = &f->layout[operand];
    const int first = first_dim(f);
    int64_t expected = 0, inner = 1;
    if (v->col_stride != 1 || v->row_stride <= 0 || v->row_stride % 8 || v->offset % 8) return false;
    int64_t rows = operand == ONT_FLASH_K || operand == ONT_FLASH_V ? f->seqlen_k : f->seqlen_q;
    strides[0] = strides[1] = v->row_stride * rows; /* of a dim of 1 */
    strides[2] = v->row_stride;
    if (first < f->n_batch_dims) strides[0] = v->batch_stride[first];
    for (int d = f->n_batch_dims - 1; d > first; d--) {
        if (f->batch_dims[d] == 1) continue;
        if (inner < repeats) {
            if (v->batch_stride[d]) return false;
        } else if (!expected) {
            strides[1] = v->batch_stride[d];
            expected = strides[1] * f->batch_dims[d];
        } else {
            if (v->batch_stride[d] != expected) return false;
            expected *= f->batch_dims[d];
        }
        inner *= f->batch_dims[d];
    }
    return strides[0] > 0 && strides[1] > 0 && strides[0] % 8 == 0 && strides[1] % 8 == 0;
}

/* Number of heads of Q that share a head of K or V: the last dims with stride 0, but for the first dim. */
static int64_t repeats_of(const ont_flash_params *f, int operand)
{
    int first = first_dim(f);
    int64_t repeats = 1;
    for (int d = f->n_batch_dims - 1; d > first; d--) {
        if (f->batch_dims[d] == 1) continue;
        if (f->layout[operand].batch_stride[d]) break;
        repeats *= f->batch_dims[d];
    }
    return repeats;
}

/* NULL, or why cuDNN does not compute the node. */
static const char *sdpa_shape(const ont_node *node, const state *s, ont_sdpa_shape *shape)
{
    const ont_flash_params *f = &s->flash;
    bool gradient = node->n_inputs > ONT_ATTENTION_DY;
    if (!ont_dtype_is_half((ont_dtype)f->dtype)) return "not a 16-bit float";
    if (ont_node_in(node, ONT_ATTENTION_BIAS) || ont_node_in(node, ONT_ATTENTION_MASK)) return "a bias or a mask";
    if (ont_node_in(node, ONT_ATTENTION_MASKED_ROWS) || f->zero_nan) return "masked rows";
    if (ont_node_in(node, ONT_ATTENTION_Q_ROWS)) return "rows are left out";
    if (f->has_dropout) return "dropout";
    if (f->causal && f->causal_offset) return "causal with an offset";
    if (f->head_dim % 8 || f->head_dim_v % 8 || f->head_dim > 128 || f->head_dim_v > 128) return "size of the heads";
    if (f->seqlen_q < 2 || f->seqlen_k < 2) return "one query or one key";
    for (int i = 0; i < 3; i++)
        if (gradient && s->targets[i] < 0) return "fewer than three gradients";
    memset(shape, 0, sizeof *shape);
    const int operands[] = {ONT_FLASH_Q, ONT_FLASH_K, ONT_FLASH_V, ONT_FLASH_Y};
    const int64_t repeats[] = {1, repeats_of(f, ONT_FLASH_K), repeats_of(f, ONT_FLASH_V), 1};
    int first = first_dim(f);
    shape->batch = first < f->n_batch_dims ? f->batch_dims[first] : 1;
    shape->heads = f->n_bh / shape->batch;
    shape->k_heads = shape->heads / repeats[1];
    shape->v_heads = shape->heads / repeats[2];
    for (int i = 0; i < 4; i++)
        if (!merge_dims(f, operands[i], repeats[i], shape->strides[i])) return "strides";
    shape->seqlen_q = f->seqlen_q;
    shape->seqlen_k = f->seqlen_k;
    shape->head_dim = f->head_dim;
    shape->head_dim_v = f->head_dim_v;
    shape->scale = f->scale;
    shape->dtype = f->dtype;
    shape->causal = f->causal;
    shape->gradient = gradient;
    return NULL;
}

/* The plan is made here, so that the name of the kernel says what runs. */
static const char *accept_dnn(const ont_node *node)
{
    state s = {.clears = {false}};
    ont_sdpa_shape shape;
    const char *refusal = accept(node);
    if (!refusal && read_node(node, &s) != ONT_OK) refusal = "attributes";
    if (!refusal) refusal = sdpa_shape(node, &s, &shape);
    return refusal ? refusal : ont_sdpa_get(&shape, &s.sdpa);
}

static ont_status prepare_dnn(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_sdpa_shape shape;
    ONT_TRY(prepare(node, arena, out));
    state *s = out->state;
    const char *refusal = sdpa_shape(node, s, &shape);
    if (!refusal) refusal = ont_sdpa_get(&shape, &s->sdpa);
    if (refusal) return ont_fail(ONT_ESTATE, "cuDNN declined what it had accepted: %s", refusal);
    size_t bytes = ont_sdpa_work_bytes(s->sdpa);
    if (bytes > out->work_bytes) out->work_bytes = bytes;
    return ONT_OK;
}

typedef struct dnn_call {
    const ont_call *call;
    ont_sdpa *sdpa;
    ont_flash_params dnn, own; /* own: with results in memory of its own */
} dnn_call;

/* The tensors of the graph; false where one is not aligned to 16 bytes. */
static bool tensors_of(const ont_flash_params *f, void *data[ONT_SDPA_TENSORS])
{
    const struct {
        const void *base;
        int layout;
    } of[ONT_SDPA_TENSORS] = {
        [ONT_SDPA_Q] = {f->q, ONT_FLASH_Q},   [ONT_SDPA_K] = {f->k, ONT_FLASH_K},
        [ONT_SDPA_V] = {f->v, ONT_FLASH_V},   [ONT_SDPA_Y] = {f->y, ONT_FLASH_Y},
        [ONT_SDPA_DY] = {f->dy, ONT_FLASH_Y}, [ONT_SDPA_DQ] = {f->dq, ONT_FLASH_Q},
        [ONT_SDPA_DK] = {f->dk, ONT_FLASH_K}, [ONT_SDPA_DV] = {f->dv, ONT_FLASH_V}};
    bool fits = true;
    for (int i = 0; i < ONT_SDPA_TENSORS; i++) {
        data[i] = of[i].base ? (char *)(uintptr_t)of[i].base + 2 * f->layout[of[i].layout].offset : NULL;
        fits = fits && (uintptr_t)data[i] % 16 == 0;
    }
    return fits;
}

/* cuDNN and the conversions of the statistics. 0, or an error code. */
static int launch_dnn(const dnn_call *c)
{
    const ont_flash_params *f = &c->dnn;
    void *data[ONT_SDPA_TENSORS], *stream = c->call->stream;
    float *lse = ont_sdpa_lse(c->sdpa, c->call->work);
    int64_t n = f->n_bh * f->seqlen_q;
    tensors_of(f, data);
    int error = f->dy ? ont_launch_stats_to_lse(f->stats, lse, n, stream) : 0;
    if (!error) error = ont_sdpa_run(c->sdpa, data, c->call->work, stream);
    return error || f->dy || !f->stats ? error : ont_launch_lse_to_stats(lse, f->stats, n, stream);
}

static int launch_candidate(const void *context, int candidate)
{
    const dnn_call *c = context;
    return candidate ? launch_own(&c->own, c->call->stream) : launch_dnn(c);
}

/* ---- comparison with the own kernels ---- */

/* Both results of each output. Statistics are compared as one number a row, for which `lse` has room. */
static ont_status compare_outputs(const dnn_call *c, void *const *own, float *lse, ont_verdict *verdict)
{
    const ont_call *call = c->call;
    int64_t head_dim = c->dnn.dy ? c->dnn.head_dim : c->dnn.head_dim_v;
    *verdict = ONT_VERDICT_ACCEPTED;
    for (uint32_t i = 0; i < call->node->n_outputs; i++) {
        if (!call->out[i]) continue;
        int64_t count = ont_shape_count(&call->node->outputs[i]->shape), n = count % head_dim ? 8 : head_dim;
        ont_compared pair = {c->dnn.dtype, ont_tolerance_of(c->dnn.dtype), call->out[i], own[i], count / n, n};
        if (!c->dnn.dy && i == 1) {
            ONT_TRY(ont_launched(ont_launch_stats_to_lse(own[1], lse, count / 2, call->stream)));
            pair = (ont_compared){ONT_FLOAT32, 1e-3, ont_sdpa_lse(c->sdpa, call->work), lse, count / 2, 1};
        }
        ONT_TRY(ont_compare_rows(call, &pair, verdict));
    }
    return ONT_OK;
}

/* What follows from the comparison: cuDNN is used where it is right, and not slower where kernels may be measured. */
static ont_status decide(const dnn_call *c, void *const *own, ont_verdict verdict)
{
    const ont_call *call = c->call;
    const ont_dnn_graph *dnn = ont_dnn_graph_get();
    const char *op = call->node->op_type, *name = call->node->name;
    if (verdict == ONT_VERDICT_REFUSED) {
        ont_log(ONT_LOG_WARNING, "%s '%s': cuDNN's results differ from those of the own kernels, which are used from "
                "now on", op, name);
        for (uint32_t i = 0; i < call->node->n_outputs; i++)
            if (call->out[i])
                ONT_TRY(call->device->ops->copy(call->device, call->out[i], own[i], output_bytes(call, i),
                                                call->stream));
    } else if (verdict == ONT_VERDICT_ACCEPTED && dnn->time && !ont_gemm_is_deterministic()) {
        double theirs = dnn->time(launch_candidate, c, 0, call->stream);
        double ours = dnn->time(launch_candidate, c, 1, call->stream);
        if (theirs < 0 || (ours >= 0 && ours < theirs)) verdict = ONT_VERDICT_REFUSED;
        ont_log(ONT_LOG_INFO, "%s '%s': cuDNN %.3f ms, own kernels %.3f ms", op, name, theirs / 3, ours / 3);
    }
    ont_sdpa_judge(c->sdpa, verdict);
    return ONT_OK;
}

/* Of results that cuDNN has just written: the own kernels write the same outputs to memory of their own. */
static ont_status check(dnn_call *c)
{
    const ont_call *call = c->call;
    const ont_device_ops *ops = call->device->ops;
    void *own[4] = {NULL};
    size_t at = ont_sdpa_aligned((size_t)(c->dnn.n_bh * c->dnn.seqlen_q) * sizeof(float)), bytes = at; /* behind lse */
    ont_memory memory = {0};
    ont_verdict verdict = ONT_VERDICT_UNKNOWN;
    for (uint32_t i = 0; i < call->node->n_outputs; i++)
        if (call->out[i]) bytes += ont_sdpa_aligned(output_bytes(call, i));
    ONT_TRY(ops->alloc(call->device, bytes, ONT_UINT8, &memory));
    for (uint32_t i = 0; i < call->node->n_outputs; i++) {
        if (!call->out[i]) continue;
        own[i] = (char *)memory.data + at;
        at += ont_sdpa_aligned(output_bytes(call, i));
    }
    c->own = parameters(call, own);
    ont_status status = clear_outputs(call, own);
    if (status == ONT_OK) status = ont_launched(launch_own(&c->own, call->stream));
    if (status == ONT_OK) status = compare_outputs(c, own, memory.data, &verdict);
    if (status == ONT_OK) status = decide(c, own, verdict);
    if (status == ONT_OK) status = ops->synchronize(call->device, call->stream);
    ops->free(call->device, &memory, bytes);
    return status;
}

/* The own kernels where the plan is refused, an address is not aligned, or a captured graph would be the first use. */
static ont_status run_dnn(const ont_call *call)
{
    const state *s = call->state;
    dnn_call c = {.call = call, .sdpa = s->sdpa, .dnn = parameters(call, call->out)};
    void *data[ONT_SDPA_TENSORS];
    bool capturing = call->device->ops->capturing(call->device, call->stream);
    ont_verdict verdict = ont_sdpa_verdict_of(s->sdpa);
    if (verdict == ONT_VERDICT_REFUSED || (verdict == ONT_VERDICT_UNKNOWN && capturing) || !tensors_of(&c.dnn, data))
        return run(call);
    ONT_TRY(clear_outputs(call, call->out));
    int error = launch_dnn(&c);
    if (!error && (verdict == ONT_VERDICT_ACCEPTED || check(&c) == ONT_OK)) return ONT_OK;
    if (!error) return run(call); /* no memory for the comparison: the next call tries again */
    if (capturing) return ont_fail(ONT_ESTATE, "cuDNN's attention: status %d", error);
    ont_log(ONT_LOG_WARNING, "%s '%s': cuDNN failed (status %d), the own kernels are used from now on",
            call->node->op_type, call->node->name, error);
    ont_sdpa_judge(s->sdpa, ONT_VERDICT_REFUSED);
    return run(call);
}

/* ---- VisibleKeys ---- */

typedef struct visible_state {
    state attention; /* first: operands() reads it */
    int64_t inner;
} visible_state;

static ont_status visible_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    visible_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_node(node, &s->attention));
    s->attention.tiles_at = s->attention.tiles_bytes = 0;
    s->inner = ont_attr_int(node, "inner", 1);
    out->state = s;
    out->work_bytes = ont_visible_keys_work(&s->attention.flash);
    return ONT_OK;
}

static ont_status visible_run(const ont_call *call)
{
    const visible_state *s = call->state;
    const ont_flash_params f = operands(call);
    ONT_TRY(call->device->ops->clear(call->device, call->out[0], output_bytes(call, 0), call->stream));
    return ont_launched(ont_launch_visible_keys(&f, s->inner, call->work, call->out[0], call->stream));
}

const ont_kernel ont_cuda_visible_keys_kernels[1] = {
    {.name = "cuda_visible_keys", .accept = ont_cuda_accept_any, .prepare = visible_prepare, .run = visible_run},
};

const ont_kernel ont_cuda_attention_kernels[2] = {
    {.name = "cuda_attention_dnn", .accept = accept_dnn, .prepare = prepare_dnn, .run = run_dnn},
    {.name = "cuda_attention", .accept = accept, .prepare = prepare, .run = run},
};

const ont_kernel ont_cuda_attention_grad_kernels[2] = {
    {.name = "cuda_attention_grad_dnn", .accept = accept_dnn, .prepare = prepare_dnn, .run = run_dnn},
    {.name = "cuda_attention_grad", .accept = accept, .prepare = prepare, .run = run},
};
