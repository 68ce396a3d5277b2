/*
 * Convolutions in channels last as graphs of cuDNN (conv_graph.h): the convolution, its bias' addition, and a Relu.
 * Every call that fails means that there is no plan: the convolution stays in the order (N, C, H, W), which cudnn.c
 * computes, or its Relu stays a node of its own.
 *
 * cuDNN takes dims in the order (N, C, H, W) whatever the layout; the strides say that channels are contiguous. A
 * signal is an image of one row. float32 has plans where torch allows TF32: else no tensor core multiplies channels.
 */
#include "libs/conv_graph.h"

#include <pthread.h>
#include <string.h>

#include "libs/dnn_build.h"

/* CANDIDATES: kernels that are timed against each other; each takes milliseconds to be compiled. LIMIT: bytes. */
enum { CANDIDATES = 3, LIMIT = 256 << 20 };
enum { UID_X = 1, UID_W, UID_Y, UID_BIAS, UID_PRODUCT, UID_SUM };

extern const ont_allocator *ont_cuda_allocator;

/* Engines that round operands to 16 bits, add in fewer bits than float32, or in another order at every run, and those
 * that transform operands that are rounded. TF32 alone has none of these notes. */
static const unsigned refused_notes =
    1u << DNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS | 1u << DNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION |
    1u << DNN_NUMERICAL_NOTE_NONDETERMINISTIC | 1u << DNN_NUMERICAL_NOTE_WINOGRAD;

typedef struct key { /* compared by its bytes */
    ont_conv_shape shape;
    int32_t kind, epilogue, device, by_rule; /* by_rule: no choice that was measured may be met */
} key;

struct ont_conv_plan {
    key key;
    const char *refusal; /* NULL, or why there is no plan */
    void *handle, *executions[CANDIDATES];
    int64_t workspace; /* the largest one */
    int n, choice;     /* choice: -1 until it is measured */
    _Atomic ont_verdict verdict;
    ont_dnn_owned descriptors;
    struct ont_conv_plan *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list and choices */
static ont_conv_plan *plans;

/* ---- graphs ---- */

/* (lead, channels, rows, columns), channels contiguous. */
static ont_dnn_tensor tensor_of(ont_dnn_build *b, int64_t uid, int type, int64_t lead, int64_t channels, int64_t rows,
                                int64_t columns)
{
    const int64_t dims[4] = {lead, channels, rows, columns};
    const int64_t strides[4] = {channels * rows * columns, 1, channels * columns, channels};
    return ont_dnn_tensor_of(b, uid, type, dims, strides, uid >= UID_PRODUCT, false);
}

static void *convolution_of(ont_dnn_build *b, const ont_conv_shape *s)
{
    const int64_t rank = 2;
    void *how = ont_dnn_make(b, DNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    ont_dnn_set_int(b, how, DNN_ATTR_CONVOLUTION_COMP_TYPE, DNN_TYPE_DATA_TYPE, DNN_DATA_FLOAT);
    ont_dnn_set_int(b, how, DNN_ATTR_CONVOLUTION_CONV_MODE, DNN_TYPE_CONVOLUTION_MODE, DNN_CROSS_CORRELATION);
    ont_dnn_set(b, how, DNN_ATTR_CONVOLUTION_SPATIAL_DIMS, DNN_TYPE_INT64, 1, &rank);
    ont_dnn_set(b, how, DNN_ATTR_CONVOLUTION_DILATIONS, DNN_TYPE_INT64, rank, s->dilation + 1);
    ont_dnn_set(b, how, DNN_ATTR_CONVOLUTION_FILTER_STRIDES, DNN_TYPE_INT64, rank, s->stride + 1);
    ont_dnn_set(b, how, DNN_ATTR_CONVOLUTION_PRE_PADDINGS, DNN_TYPE_INT64, rank, s->pad + 1);
    ont_dnn_set(b, how, DNN_ATTR_CONVOLUTION_POST_PADDINGS, DNN_TYPE_INT64, rank, s->pad + 1);
    ont_dnn_finish(b, how);
    return how;
}

/* An operation's type, and the names of its attributes. */
typedef struct operation {
    int type, alpha, beta, convolution, w, x, y;
} operation;

static const operation operations[] = {
    [ONT_CONV_FORWARD] = {DNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                          DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
                          DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                          DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y},
    [ONT_CONV_GRAD_INPUT] = {DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                             DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                             DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
                             DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                             DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                             DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY},
    [ONT_CONV_GRAD_WEIGHT] = {DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                              DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                              DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
                              DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                              DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                              DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY}};

static void build_graph(ont_dnn_build *b, const key *k)
{
    const ont_conv_shape *s = &k->shape;
    const operation *of = &operations[k->kind];
    const float one = 1, zero = 0;
    int type = s->dtype == ONT_FLOAT32   ? DNN_DATA_FLOAT
               : s->dtype == ONT_FLOAT16 ? DNN_DATA_HALF
                                         : DNN_DATA_BFLOAT16;
    ont_dnn_tensor x = tensor_of(b, UID_X, type, s->n, s->c, s->in[1], s->in[2]);
    ont_dnn_tensor w = tensor_of(b, UID_W, type, s->m, s->c / s->groups, s->kernel[1], s->kernel[2]);
    ont_dnn_tensor y = tensor_of(b, UID_Y, type, s->n, s->m, s->out[1], s->out[2]), product = y, sum = y;
    if (k->epilogue != ONT_CONV_PLAIN)
        product = tensor_of(b, UID_PRODUCT, DNN_DATA_FLOAT, s->n, s->m, s->out[1], s->out[2]);
    if (k->epilogue == ONT_CONV_BIAS_RELU)
        sum = tensor_of(b, UID_SUM, DNN_DATA_FLOAT, s->n, s->m, s->out[1], s->out[2]);
    void *convolution = convolution_of(b, s), *op = ont_dnn_make(b, of->type);
    ont_dnn_set(b, op, of->alpha, DNN_TYPE_FLOAT, 1, &one);
    ont_dnn_set(b, op, of->beta, DNN_TYPE_FLOAT, 1, &zero);
    ont_dnn_set_descriptor(b, op, of->convolution, convolution);
    ont_dnn_set_descriptor(b, op, of->w, w.descriptor);
    ont_dnn_set_descriptor(b, op, of->x, x.descriptor);
    ont_dnn_set_descriptor(b, op, of->y, product.descriptor);
    ont_dnn_finish_op(b, op);
    if (k->epilogue == ONT_CONV_PLAIN) return;
    ont_dnn_tensor bias = tensor_of(b, UID_BIAS, type, 1, s->m, 1, 1);
    ont_dnn_pointwise(b, DNN_POINTWISE_ADD, &product, &bias, NULL, &sum, 0);
    if (k->epilogue == ONT_CONV_BIAS_RELU) ont_dnn_pointwise(b, DNN_POINTWISE_RELU_FWD, &sum, NULL, NULL, &y, 0);
}

/* ---- plans ---- */

static const char *refusal_of(const ont_conv_shape *s, size_t version, int capability)
{
    if (version < 90000) return "cuDNN is older than 9.0";
    if (capability < 80) return "compute capability below 8.0";
    if (s->dtype == ONT_FLOAT64) return "float64";
    if (s->dtype == ONT_FLOAT32 && !ont_cuda_allocator->tf32_conv) return "float32 without TF32";
    return s->spatial <= 2 ? NULL : "three spatial dims";
}

/* The first deterministic configurations that can run, in cuDNN's order of expected speed. */
static const char *build(const ont_dnn_graph *dnn, ont_conv_plan *p)
{
    ont_dnn_build b = {.dnn = dnn, .handle = p->handle, .owned = &p->descriptors, .limit = LIMIT};
    void *configs[ONT_DNN_CONFIGS];
    int64_t n;
    build_graph(&b, &p->key);
    const char *refusal = ont_dnn_configs(&b, configs, &n);
    for (int64_t i = 0; !refusal && i < n && !b.error && p->n < CANDIDATES; i++) {
        int64_t workspace;
        if (!ont_dnn_lacks_notes(&b, configs[i], refused_notes)) continue;
        void *execution = ont_dnn_execution(&b, configs[i], &workspace);
        if (!execution) continue;
        p->executions[p->n++] = execution;
        if (workspace > p->workspace) p->workspace = workspace;
    }
    if (!refusal && !p->n) refusal = "cuDNN has no deterministic kernel for the graph";
    if (refusal) {
        ont_log(ONT_LOG_INFO, "convolution in channels last%s: %s (status %d)",
                p->key.epilogue == ONT_CONV_BIAS_RELU ? " with Relu" : "", refusal, b.error);
        ont_dnn_release(dnn, &p->descriptors);
    }
    return refusal;
}

const char *ont_conv_plan_get(const ont_conv_shape *shape, ont_conv_kind kind, ont_conv_epilogue epilogue,
                              ont_conv_plan **plan)
{
    const ont_dnn_graph *dnn = ont_dnn_graph_get();
    int device, capability;
    void *handle;
    key k;
    if (!dnn) return "cuDNN is not found";
    if (dnn->open(&device, &capability, &handle) != ONT_OK) return "cuDNN has no handle for the device";
    const char *refusal = refusal_of(shape, dnn->version(), capability);
    if (refusal) return refusal;
    memset(&k, 0, sizeof k);
    k.shape = *shape;
    k.kind = (int32_t)kind;
    k.epilogue = (int32_t)epilogue;
    k.device = device;
    k.by_rule = ont_gemm_is_deterministic();
    pthread_mutex_lock(&lock);
    ont_conv_plan *p = plans;
    while (p && memcmp(&p->key, &k, sizeof k)) p = p->next;
    if (!p && (p = ont_calloc(1, sizeof *p))) {
        p->key = k;
        p->handle = handle;
        p->refusal = build(dnn, p);
        p->choice = p->n <= 1 || !dnn->time || k.by_rule ? 0 : -1;
        p->next = plans;
        plans = p;
    }
    pthread_mutex_unlock(&lock);
    if (!p) return "out of memory";
    *plan = p;
    return p->refusal;
}

size_t ont_conv_plan_work_bytes(const ont_conv_plan *p)
{
    return (size_t)p->workspace;
}

/* ---- runs ---- */

typedef struct call {
    const ont_conv_plan *plan;
    const ont_conv_operands *operands;
} call;

static int launch(const void *context, int candidate)
{
    const call *c = context;
    const ont_conv_operands *o = c->operands;
    ont_dnn_bindings b = {.n = 0};
    ont_dnn_bind(&b, UID_X, o->x);
    ont_dnn_bind(&b, UID_W, o->w);
    ont_dnn_bind(&b, UID_Y, o->y);
    if (c->plan->key.epilogue != ONT_CONV_PLAIN) ont_dnn_bind(&b, UID_BIAS, o->bias);
    return ont_dnn_execute(ont_dnn_graph_get(), c->plan->handle, c->plan->executions[candidate], &b, o->work,
                           o->stream);
}

static double measure(void *context, int candidate)
{
    const call *c = context;
    return ont_dnn_graph_get()->time(launch, c, candidate, c->operands->stream);
}

int ont_conv_plan_run(ont_conv_plan *p, const ont_conv_operands *operands, bool may_measure)
{
    call c = {p, operands};
    int error = 0;
    pthread_mutex_lock(&lock);
    int first = p->choice;
    pthread_mutex_unlock(&lock);
    if (first < 0 && may_measure) {
        first = ont_tune_fastest(p->n, measure, &c);
        if (first < 0) first = 0; /* none can be launched: the error is that of the launch below */
        pthread_mutex_lock(&lock);
        p->choice = first;
        pthread_mutex_unlock(&lock);
    }
    if (first < 0) first = 0;
    for (int i = 0; i < p->n; i++) {
        error = launch(&c, (first + i) % p->n);
        if (!error) return 0;
    }
    return error;
}

ont_verdict ont_conv_plan_verdict(const ont_conv_plan *p)
{
    return p->verdict;
}

void ont_conv_plan_judge(ont_conv_plan *p, ont_verdict verdict)
{
    p->verdict = verdict;
}
