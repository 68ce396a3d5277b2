/*
 * Attention as graphs of cuDNN (sdpa.h). A graph has the operations, in the order, that NVIDIA's cudnn-frontend 1.x
 * emits for attention (CompositeSDPANode, CompositeSDPABackwardNode), because cuDNN recognizes attention by its
 * pattern. Every call that fails means that there is no plan: the own kernels stay.
 *
 * Shapes in comments: b batch, h heads of Q, g heads of K or V, q and k sequence lengths, d and e head sizes.
 */
#include "libs/sdpa.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "libs/dnn_build.h"

/* Bytes of a workspace. The gradient's has about the size of the scores in 16 bits; above the limit, the batch is
 * computed in parts. */
enum { LIMIT = 512 << 20 };
/* Ids of tensors: that of tensor i is i + 1; then what has no name in sdpa.h; virtual tensors follow. */
enum { UID_SUM = ONT_SDPA_TENSORS + 1, UID_SCALE, UID_HIDDEN, UID_ONE, UID_VIRTUAL = 32 };

struct ont_sdpa {
    ont_sdpa_shape shape;
    bool by_rule; /* no verdict that was measured may be met */
    const char *refusal; /* NULL, or why there is no plan */
    void *handle, *execution;
    int64_t workspace, parts; /* parts: of the batch, which the graph computes one by one */
    float scale, hidden, one;
    _Atomic ont_verdict verdict;
    ont_dnn_owned descriptors;
    struct ont_sdpa *next;
};

typedef ont_dnn_tensor tensor;

typedef struct graph {
    ont_dnn_build b;
    ont_sdpa *plan;
    int64_t last_uid;
    int type;      /* of Q */
    int64_t batch; /* of a part */
} graph;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */
static ont_sdpa *plans;

/* ---- tensors ---- */

static tensor tensor_of(graph *g, int64_t uid, int type, const int64_t dims[4], const int64_t strides[4], bool by_value)
{
    return ont_dnn_tensor_of(&g->b, uid, type, dims, strides, uid >= UID_VIRTUAL, by_value);
}

/* A row-major tensor; uid 0: a virtual one. */
static tensor packed(graph *g, int64_t uid, int type, int64_t b, int64_t h, int64_t rows, int64_t columns)
{
    const int64_t dims[4] = {b, h, rows, columns}, strides[4] = {h * rows * columns, rows * columns, columns, 1};
    return tensor_of(g, uid ? uid : g->last_uid++, type, dims, strides, false);
}

/* A virtual tensor of the dims and strides of `t`. */
static tensor like(graph *g, int type, const tensor *t)
{
    return tensor_of(g, g->last_uid++, type, t->dims, t->strides, false);
}

static tensor transposed(graph *g, int64_t uid, int type, const tensor *t)
{
    const int64_t dims[4] = {t->dims[0], t->dims[1], t->dims[3], t->dims[2]};
    const int64_t strides[4] = {t->strides[0], t->strides[1], t->strides[3], t->strides[2]};
    return tensor_of(g, uid ? uid : g->last_uid++, type, dims, strides, false);
}

static tensor scalar(graph *g, int64_t uid)
{
    const int64_t ones[4] = {1, 1, 1, 1};
    return tensor_of(g, uid, DNN_DATA_FLOAT, ones, ones, true);
}

/* Heads of Q, K, V or Y. */
static int64_t heads_of(const ont_sdpa_shape *s, int layout)
{
    return layout == ONT_SDPA_K ? s->k_heads : layout == ONT_SDPA_V ? s->v_heads : s->heads;
}

/* A tensor of the caller; `layout` is that of Q, K, V or Y. */
static tensor operand(graph *g, int index, int layout)
{
    const ont_sdpa_shape *s = &g->plan->shape;
    bool has_keys = layout == ONT_SDPA_K || layout == ONT_SDPA_V;
    bool has_values = layout == ONT_SDPA_V || layout == ONT_SDPA_Y;
    const int64_t *v = s->strides[layout], strides[4] = {v[0], v[1], v[2], 1};
    const int64_t dims[4] = {g->batch, heads_of(s, layout), has_keys ? s->seqlen_k : s->seqlen_q,
                             has_values ? s->head_dim_v : s->head_dim};
    return tensor_of(g, index + 1, g->type, dims, strides, false);
}

/* K or V with its last two dims exchanged: (b, g, d, k). */
static tensor operand_transposed(graph *g, int index)
{
    const ont_sdpa_shape *s = &g->plan->shape;
    const int64_t *v = s->strides[index], strides[4] = {v[0], v[1], 1, v[2]};
    const int64_t dims[4] = {g->batch, heads_of(s, index), index == ONT_SDPA_V ? s->head_dim_v : s->head_dim,
                             s->seqlen_k};
    return tensor_of(g, index + 1, g->type, dims, strides, false);
}

/* ---- operations ---- */

static void pointwise_to(graph *g, int mode, const tensor *x, const tensor *b, const tensor *t, const tensor *y,
                         int64_t axis)
{
    ont_dnn_pointwise(&g->b, mode, x, b, t, y, axis);
}

/* The virtual result, float32 and of the shape of x. */
static tensor pointwise(graph *g, int mode, const tensor *x, const tensor *b)
{
    tensor y = like(g, DNN_DATA_FLOAT, x);
    pointwise_to(g, mode, x, b, NULL, &y, 0);
    return y;
}

static void reduce_to(graph *g, int operation, const tensor *x, const tensor *y)
{
    void *how = ont_dnn_make(&g->b, DNN_BACKEND_REDUCTION_DESCRIPTOR);
    ont_dnn_set_int(&g->b, how, DNN_ATTR_REDUCTION_COMP_TYPE, DNN_TYPE_DATA_TYPE, DNN_DATA_FLOAT);
    ont_dnn_set_int(&g->b, how, DNN_ATTR_REDUCTION_OPERATOR, DNN_TYPE_REDUCTION_OPERATOR_TYPE, operation);
    ont_dnn_finish(&g->b, how);
    void *op = ont_dnn_make(&g->b, DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_REDUCTION_DESC, how);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_REDUCTION_XDESC, x->descriptor);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_REDUCTION_YDESC, y->descriptor);
    ont_dnn_finish_op(&g->b, op);
}

/* Over the columns: (b, h, rows, 1). */
static tensor reduce_rows(graph *g, int operation, const tensor *x)
{
    tensor y = packed(g, 0, DNN_DATA_FLOAT, x->dims[0], x->dims[1], x->dims[2], 1);
    reduce_to(g, operation, x, &y);
    return y;
}

static void matmul_to(graph *g, const tensor *a, const tensor *b, const tensor *c)
{
    void *how = ont_dnn_make(&g->b, DNN_BACKEND_MATMUL_DESCRIPTOR);
    ont_dnn_set_int(&g->b, how, DNN_ATTR_MATMUL_COMP_TYPE, DNN_TYPE_DATA_TYPE, DNN_DATA_FLOAT);
    ont_dnn_finish(&g->b, how);
    void *op = ont_dnn_make(&g->b, DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_MATMUL_ADESC, a->descriptor);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_MATMUL_BDESC, b->descriptor);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_MATMUL_CDESC, c->descriptor);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_MATMUL_DESC, how);
    ont_dnn_finish_op(&g->b, op);
}

/* The virtual product of `type`, row-major. */
static tensor matmul(graph *g, int type, const tensor *a, const tensor *b)
{
    tensor c = packed(g, 0, type, a->dims[0], a->dims[1], a->dims[2], b->dims[3]);
    matmul_to(g, a, b, &c);
    return c;
}

/* The elements of x, seen with the last two dims exchanged. */
static tensor reshape(graph *g, int type, const tensor *x)
{
    tensor y = transposed(g, 0, type, x);
    void *op = ont_dnn_make(&g->b, DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_RESHAPE_XDESC, x->descriptor);
    ont_dnn_set_descriptor(&g->b, op, DNN_ATTR_OPERATION_RESHAPE_YDESC, y.descriptor);
    ont_dnn_finish_op(&g->b, op);
    return y;
}

/* ---- attention ---- */

/* Scores of keys behind the query become -inf. */
static tensor hide_later_keys(graph *g, const tensor *scores)
{
    tensor row = like(g, DNN_DATA_INT32, scores), column = like(g, DNN_DATA_INT32, scores);
    tensor visible = like(g, DNN_DATA_BOOLEAN, scores), hidden = scalar(g, UID_HIDDEN);
    tensor y = like(g, DNN_DATA_FLOAT, scores);
    pointwise_to(g, DNN_POINTWISE_GEN_INDEX, scores, NULL, NULL, &row, 2);
    pointwise_to(g, DNN_POINTWISE_GEN_INDEX, scores, NULL, NULL, &column, 3);
    pointwise_to(g, DNN_POINTWISE_CMP_GE, &row, &column, NULL, &visible, 0);
    pointwise_to(g, DNN_POINTWISE_BINARY_SELECT, scores, &hidden, &visible, &y, 0);
    return y;
}

static void build_forward(graph *g)
{
    const ont_sdpa_shape *s = &g->plan->shape;
    tensor q = operand(g, ONT_SDPA_Q, ONT_SDPA_Q), k = operand_transposed(g, ONT_SDPA_K);
    tensor v = operand(g, ONT_SDPA_V, ONT_SDPA_V), y = operand(g, ONT_SDPA_Y, ONT_SDPA_Y), scale = scalar(g, UID_SCALE);
    tensor lse = packed(g, ONT_SDPA_LSE + 1, DNN_DATA_FLOAT, g->batch, s->heads, s->seqlen_q, 1);
    tensor scores = matmul(g, DNN_DATA_FLOAT, &q, &k); /* (b, h, q, k) */
    scores = pointwise(g, DNN_POINTWISE_MUL, &scores, &scale);
    if (s->causal) scores = hide_later_keys(g, &scores);
    tensor row_max = reduce_rows(g, DNN_REDUCE_TENSOR_MAX, &scores);
    tensor below = pointwise(g, DNN_POINTWISE_SUB, &scores, &row_max);
    tensor e = pointwise(g, DNN_POINTWISE_EXP, &below, NULL);
    tensor row_sum = reduce_rows(g, DNN_REDUCE_TENSOR_ADD, &e);
    tensor log_sum = pointwise(g, DNN_POINTWISE_LOG, &row_sum, NULL);
    pointwise_to(g, DNN_POINTWISE_ADD, &row_max, &log_sum, NULL, &lse, 0);
    tensor p = like(g, g->type, &e);
    pointwise_to(g, DNN_POINTWISE_DIV, &e, &row_sum, NULL, &p, 0);
    matmul_to(g, &p, &v, &y);
}

/* dK or dV: left (b, h, k, q) times right (b, h, q, d), summed over the heads of Q that share a head. */
static void key_gradient(graph *g, const tensor *left, const tensor *right, int index, int layout)
{
    tensor to = operand(g, index, layout);
    if (g->plan->shape.heads == heads_of(&g->plan->shape, layout)) {
        matmul_to(g, left, right, &to);
        return;
    }
    tensor all = matmul(g, g->type, left, right);
    reduce_to(g, DNN_REDUCE_TENSOR_ADD, &all, &to);
}

/* dQ is written by its product at once; the form that adds to it in float32 is not deterministic. */
static void build_backward(graph *g)
{
    const ont_sdpa_shape *s = &g->plan->shape;
    tensor q = operand(g, ONT_SDPA_Q, ONT_SDPA_Q), k = operand_transposed(g, ONT_SDPA_K);
    tensor v = operand_transposed(g, ONT_SDPA_V), y = operand(g, ONT_SDPA_Y, ONT_SDPA_Y);
    tensor dy = operand(g, ONT_SDPA_DY, ONT_SDPA_Y), dq = operand(g, ONT_SDPA_DQ, ONT_SDPA_Q);
    tensor scale = scalar(g, UID_SCALE), one = scalar(g, UID_ONE);
    tensor lse = packed(g, ONT_SDPA_LSE + 1, DNN_DATA_FLOAT, g->batch, s->heads, s->seqlen_q, 1);
    tensor sum = packed(g, UID_SUM, DNN_DATA_FLOAT, g->batch, s->heads, s->seqlen_q, 1);
    tensor product = packed(g, 0, DNN_DATA_FLOAT, g->batch, s->heads, s->seqlen_q, s->head_dim_v);
    pointwise_to(g, DNN_POINTWISE_MUL, &dy, &y, NULL, &product, 0);
    tensor row = reduce_rows(g, DNN_REDUCE_TENSOR_ADD, &product);
    pointwise_to(g, DNN_POINTWISE_MUL, &row, &one, NULL, &sum, 0);
    tensor scores = matmul(g, DNN_DATA_FLOAT, &q, &k);
    scores = pointwise(g, DNN_POINTWISE_MUL, &scores, &scale);
    scores = pointwise(g, DNN_POINTWISE_SUB, &scores, &lse);
    if (s->causal) scores = hide_later_keys(g, &scores);
    tensor p = pointwise(g, DNN_POINTWISE_EXP, &scores, NULL), p_transposed = reshape(g, g->type, &p);
    key_gradient(g, &p_transposed, &dy, ONT_SDPA_DV, ONT_SDPA_V);
    tensor dp = matmul(g, DNN_DATA_FLOAT, &dy, &v);
    tensor ds = pointwise(g, DNN_POINTWISE_SUB, &dp, &sum);
    ds = pointwise(g, DNN_POINTWISE_MUL, &ds, &p);
    ds = pointwise(g, DNN_POINTWISE_MUL, &ds, &scale);
    tensor ds_transposed = reshape(g, g->type, &ds);
    key_gradient(g, &ds_transposed, &q, ONT_SDPA_DK, ONT_SDPA_K);
    tensor k_rows = reshape(g, DNN_DATA_FLOAT, &k);
    matmul_to(g, &ds, &k_rows, &dq);
}

/* ---- plans ---- */

/* The first configuration, in cuDNN's order of expected speed, that is deterministic and can run. */
static const char *choose(graph *g)
{
    void *configs[ONT_DNN_CONFIGS];
    int64_t n;
    const char *refusal = ont_dnn_configs(&g->b, configs, &n);
    if (refusal) return refusal;
    for (int64_t i = 0; i < n && !g->b.error && !g->plan->execution; i++)
        if (ont_dnn_lacks_notes(&g->b, configs[i], 1u << DNN_NUMERICAL_NOTE_NONDETERMINISTIC))
            g->plan->execution = ont_dnn_execution(&g->b, configs[i], &g->plan->workspace);
    if (g->plan->execution) return NULL;
    return g->b.is_large ? "cuDNN's workspace is above the limit" : "cuDNN has no deterministic kernel for the graph";
}

/* What cudnn-frontend refuses or works around, by version. */
static const char *refusal_by_version(const ont_sdpa_shape *s, size_t version, int capability)
{
    if (version < 90300) return "cuDNN is older than 9.3";
    if (capability < 80) return "compute capability below 8.0";
    if (!s->gradient) return NULL;
    if (capability >= 100) return "the deterministic gradient of compute capability 10.0 needs settings of its own";
    if (version == 91000 || version == 91001) return "the gradient of cuDNN 9.10.0 and 9.10.1 is wrong";
    return version <= 91500 && s->seqlen_k % 128 ? "cuDNN up to 9.15 needs keys in multiples of 128" : NULL;
}

/* For a part of the batch. Sets *is_large where a smaller part could have a plan. */
static const char *build_part(const ont_dnn_graph *dnn, ont_sdpa *p, int64_t batch, bool *is_large)
{
    graph g = {.b = {.dnn = dnn, .handle = p->handle, .owned = &p->descriptors, .limit = LIMIT}, .plan = p,
               .last_uid = UID_VIRTUAL, .batch = batch,
               .type = p->shape.dtype == ONT_FLOAT16 ? DNN_DATA_HALF : DNN_DATA_BFLOAT16};
    (p->shape.gradient ? build_backward : build_forward)(&g);
    const char *refusal = choose(&g);
    *is_large = g.b.is_large;
    if (!refusal) return NULL;
    ont_log(ONT_LOG_INFO, "attention, batch of %lld: %s (status %d)", (long long)batch, refusal, g.b.error);
    ont_dnn_release(dnn, &p->descriptors);
    return refusal;
}

/* In as few parts as the limit of the workspace allows; rows of each part's statistics are aligned to 16 bytes. */
static void build(const ont_dnn_graph *dnn, ont_sdpa *p, int capability)
{
    const ont_sdpa_shape *s = &p->shape;
    size_t version = dnn->version();
    bool is_large = true;
    p->refusal = refusal_by_version(s, version, capability);
    if (p->refusal) return;
    p->scale = (float)s->scale;
    p->hidden = version < 91000 ? -FLT_MAX : -INFINITY;
    p->one = 1;
    for (int64_t parts = 1; parts <= s->batch && is_large && !p->execution; parts++) {
        if (s->batch % parts || (parts > 1 && s->batch / parts * s->heads * s->seqlen_q % 4)) continue;
        if (parts > 1 && p->workspace * p->parts / parts > LIMIT) continue; /* it grows with the batch */
        p->parts = parts;
        p->refusal = build_part(dnn, p, s->batch / parts, &is_large);
    }
}

const char *ont_sdpa_get(ont_sdpa_shape *shape, ont_sdpa **plan)
{
    const ont_dnn_graph *dnn = ont_dnn_graph_get();
    int capability;
    void *handle;
    const bool by_rule = ont_gemm_is_deterministic();
    if (!dnn) return "cuDNN is not found";
    if (dnn->open(&shape->device, &capability, &handle) != ONT_OK) return "cuDNN has no handle for the device";
    pthread_mutex_lock(&lock);
    ont_sdpa *p = plans;
    while (p && (p->by_rule != by_rule || memcmp(&p->shape, shape, sizeof *shape))) p = p->next;
    if (!p && (p = ont_calloc(1, sizeof *p))) {
        p->shape = *shape;
        p->by_rule = by_rule;
        p->handle = handle;
        build(dnn, p, capability);
        p->next = plans;
        plans = p;
    }
    pthread_mutex_unlock(&lock);
    if (!p) return "out of memory";
    *plan = p;
    return p->refusal;
}

/* ---- runs ---- */

static size_t row_bytes(const ont_sdpa *p)
{
    return ont_sdpa_aligned((size_t)(p->shape.batch * p->shape.heads * p->shape.seqlen_q) * sizeof(float));
}

/* The library's workspace, the statistics, and the sums of y * dy. */
size_t ont_sdpa_work_bytes(const ont_sdpa *p)
{
    return ont_sdpa_aligned((size_t)p->workspace) + (p->shape.gradient ? 2 : 1) * row_bytes(p);
}

float *ont_sdpa_lse(const ont_sdpa *p, void *work)
{
    return (float *)(void *)((char *)work + ont_sdpa_aligned((size_t)p->workspace));
}

/* The tensors of a part of the batch. */
static void bind_part(const ont_sdpa *p, void *const data[ONT_SDPA_TENSORS], void *work, int64_t part,
                      ont_dnn_bindings *b)
{
    static const int layouts[ONT_SDPA_TENSORS] = {ONT_SDPA_Q, ONT_SDPA_K, ONT_SDPA_V, ONT_SDPA_Y, -1,
                                                  ONT_SDPA_Y, ONT_SDPA_Q, ONT_SDPA_K, ONT_SDPA_V};
    const ont_sdpa_shape *s = &p->shape;
    int64_t first = part * (s->batch / p->parts);
    float *lse = ont_sdpa_lse(p, work) + first * s->heads * s->seqlen_q;
    for (int i = 0; i < (s->gradient ? ONT_SDPA_TENSORS : ONT_SDPA_DY); i++)
        ont_dnn_bind(b, i + 1, layouts[i] < 0 ? (void *)lse : (char *)data[i] + 2 * first * s->strides[layouts[i]][0]);
    ont_dnn_bind(b, UID_SCALE, &p->scale);
    if (s->causal) ont_dnn_bind(b, UID_HIDDEN, &p->hidden);
    if (!s->gradient) return;
    ont_dnn_bind(b, UID_SUM, (char *)lse + row_bytes(p));
    ont_dnn_bind(b, UID_ONE, &p->one);
}

int ont_sdpa_run(const ont_sdpa *p, void *const data[ONT_SDPA_TENSORS], void *work, void *stream)
{
    int error = 0;
    for (int64_t part = 0; part < p->parts && !error; part++) {
        ont_dnn_bindings b = {.n = 0};
        bind_part(p, data, work, part, &b);
        error = ont_dnn_execute(ont_dnn_graph_get(), p->handle, p->execution, &b, work, stream);
    }
    return error;
}

ont_verdict ont_sdpa_verdict_of(const ont_sdpa *p)
{
    return p->verdict;
}

void ont_sdpa_judge(ont_sdpa *p, ont_verdict verdict)
{
    p->verdict = verdict;
}
