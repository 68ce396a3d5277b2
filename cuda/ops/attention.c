/*
 * FusedAttention and FusedAttentionGrad on CUDA: attributes (fused_attention.h) to kernel parameters (flash.h).
 */
#include "kernels/flash.h"
#include "ops_common.h"

_Static_assert((int)ONT_FLASH_BATCH_DIMS == ONT_ATTENTION_BATCH_DIMS && (int)ONT_FLASH_Y == ONT_ATTENTION_Y &&
                   (int)ONT_FLASH_MASKED_ROWS == ONT_ATTENTION_MASKED_ROWS,
               "flash.h numbers inputs as ops/attention/fused_attention.h does");

typedef struct state {
    ont_flash_params flash;
    int64_t targets[4];       /* output index of the gradient of Q, K, V and bias; -1: none */
    bool clears[4];           /* by output: zeroed first, since Q, K and V do not write all of it */
} state;

static ont_status read_node(const ont_node *node, state *s)
{
    ont_attention a;
    ONT_TRY(ont_attention_read(node, &a));
    const ont_value *bias = ont_node_in(node, ONT_ATTENTION_BIAS);
    s->flash = (ont_flash_params){.dtype = ont_node_in(node, 0)->dtype, .bias_dtype = bias ? bias->dtype : ONT_FLOAT32,
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

static bool is_narrow(ont_dtype dtype)
{
    return dtype == ONT_FLOAT16 || dtype == ONT_BFLOAT16;
}

static const char *accept(const ont_node *node)
{
    state s = {.clears = {false}};
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (!ont_is_float32_or_64(dtype) && !is_narrow(dtype)) return "dtype";
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = ont_node_in(node, i);
        bool any = i == ONT_ATTENTION_BIAS || i == ONT_ATTENTION_MASK || i == ONT_ATTENTION_MASKED_ROWS ||
                   i == ONT_ATTENTION_STATS;
        if (v && !any && v->dtype != dtype) return "dtypes differ";
    }
    if (read_node(node, &s) != ONT_OK) return "attributes";
    return ont_flash_fits(&s.flash, node->n_inputs > ONT_ATTENTION_DY) ? NULL : "size of the heads";
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_node(node, s));
    out->state = s;
    if (node->n_inputs > ONT_ATTENTION_DY)
        out->work_bytes = (size_t)(s->flash.n_bh * s->flash.seqlen_q) *
                          (s->flash.dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float));
    return ONT_OK;
}

static ont_flash_params operands(const ont_call *call)
{
    ont_flash_params f = ((const state *)call->state)->flash;
    f.q = call->in[ONT_ATTENTION_Q];
    f.k = call->in[ONT_ATTENTION_K];
    f.v = call->in[ONT_ATTENTION_V];
    f.bias = ont_operand(call, ONT_ATTENTION_BIAS);
    f.mask = ont_operand(call, ONT_ATTENTION_MASK);
    f.masked_rows = ont_operand(call, ONT_ATTENTION_MASKED_ROWS);
    f.seed = call->seed_at;
    return f;
}

static ont_status run(const ont_call *call)
{
    ont_flash_params f = operands(call);
    f.y = call->out[0];
    f.stats = ont_result(call, 1);
    return ont_launched(ont_launch_flash(&f, call->stream));
}

static ont_status run_grad(const ont_call *call)
{
    const state *s = call->state;
    ont_flash_params f = operands(call);
    f.y = (void *)(uintptr_t)call->in[ONT_ATTENTION_Y]; /* read only */
    f.stats = (void *)(uintptr_t)call->in[ONT_ATTENTION_STATS];
    f.dy = call->in[ONT_ATTENTION_DY];
    f.delta = call->work;
    void **grads[] = {&f.dq, &f.dk, &f.dv, &f.dbias};
    for (int i = 0; i < 4; i++)
        if (s->targets[i] >= 0) *grads[i] = call->out[s->targets[i]];
    for (uint32_t i = 0; i < call->node->n_outputs && i < 4; i++) {
        if (!s->clears[i] || !call->out[i]) continue;
        const ont_value *v = call->node->outputs[i];
        ONT_TRY(call->device->ops->clear(call->device, call->out[i],
                                         (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype), call->stream));
    }
    return ont_launched(ont_launch_flash_grad(&f, call->stream));
}

const ont_kernel ont_cuda_attention_kernels[2] = {
    {.name = "cuda_attention", .accept = accept, .prepare = prepare, .run = run},
    {.name = "cuda_attention_grad", .accept = accept, .prepare = prepare, .run = run_grad},
};
