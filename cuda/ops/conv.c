/*
 * Conv, its gradients, pooling and BatchNormalization on a device: nodes read into what the library (dnn.h) and the
 * launchers take.
 */
#include <string.h>

#include "libs/dnn.h"
#include "ops_common.h"

/* ---- convolution ---- */

typedef struct conv_state {
    ont_conv_shape shape;
    ont_conv_kind kind;
    const ont_dnn *dnn; /* NULL: the own kernels */
    void *plan;
    bool even;          /* padding is the same before and behind */
} conv_state;

static ont_conv_kind kind_of(const ont_node *node)
{
    const char *name = node->op->name;
    if (!strcmp(name, "Conv")) return ONT_CONV_FORWARD;
    return !strcmp(name, "ConvGradInput") ? ONT_CONV_GRAD_INPUT : ONT_CONV_GRAD_WEIGHT;
}

/* x and w, as tensors or as the results that the gradients have. */
static ont_status read_conv(const ont_node *node, conv_state *s)
{
    ont_conv_kind kind = kind_of(node);
    const ont_shape *x = &(kind == ONT_CONV_FORWARD      ? ont_node_in(node, 0)
                           : kind == ONT_CONV_GRAD_INPUT ? node->outputs[0]
                                                         : ont_node_in(node, 1))->shape;
    const ont_shape *w = &(kind == ONT_CONV_GRAD_WEIGHT ? node->outputs[0] : ont_node_in(node, 1))->shape;
    ont_window window;
    ONT_TRY(ont_window_init(node, x, w->dims + 2, &window));
    *s = (conv_state){.kind = kind, .even = true};
    s->shape = (ont_conv_shape){.n = x->dims[0], .c = x->dims[1], .m = w->dims[0],
                                .groups = ont_attr_int(node, "group", 1), .in = {1, 1, 1}, .out = {1, 1, 1},
                                .kernel = {1, 1, 1}, .stride = {1, 1, 1}, .dilation = {1, 1, 1},
                                .in_count = window.in_count, .out_count = window.out_count,
                                .kernel_count = window.kernel_count, .dtype = ont_node_in(node, 0)->dtype,
                                .spatial = window.rank};
    for (int d = 0; d < window.rank; d++) {
        int e = 3 - window.rank + d;
        s->shape.in[e] = window.in[d];
        s->shape.out[e] = window.out[d];
        s->shape.kernel[e] = window.kernel[d];
        s->shape.stride[e] = window.stride[d];
        s->shape.dilation[e] = window.dilation[d];
        s->shape.pad[e] = window.begin[d];
        s->even &= window.begin[d] == window.end[d];
    }
    return ONT_OK;
}

static bool is_empty(const ont_conv_shape *s)
{
    return !(s->n && s->c && s->m && s->in_count && s->out_count);
}

static const char *conv_accept(const ont_node *node)
{
    conv_state s;
    if (!ont_dtype_is_float(ont_node_in(node, 0)->dtype)) return "dtype";
    return read_conv(node, &s) == ONT_OK ? NULL : "shapes";
}

static const char *conv_accept_dnn(const ont_node *node)
{
    conv_state s;
    const ont_dnn *dnn = ont_dnn_get();
    if (!ont_dtype_is_float(ont_node_in(node, 0)->dtype)) return "dtype";
    if (!dnn) return "cuDNN is not found";
    if (read_conv(node, &s) != ONT_OK) return "shapes";
    if (!s.even) return "padding differs before and behind";
    return is_empty(&s.shape) ? "nothing to compute" : dnn->accept(&s.shape, s.kind);
}

static ont_status conv_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    conv_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    out->state = s;
    return read_conv(node, s);
}

static ont_status conv_prepare_dnn(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(conv_prepare(node, arena, out));
    conv_state *s = out->state;
    const ont_dnn *dnn = ont_dnn_get();
    ont_status status = dnn->create(&s->shape, s->kind, &s->plan);
    if (status == ONT_ENOMEM) return status;
    if (status != ONT_OK) { /* asked as late as this: what the library can do it says of a described convolution */
        ont_log(ONT_LOG_INFO, "%s '%s': own kernel: %s", node->op_type, node->name, ont_error_message());
        return ONT_OK;
    }
    s->dnn = dnn;
    out->work_bytes = dnn->work_bytes(s->plan);
    return ONT_OK;
}

static void conv_release(void *opaque)
{
    conv_state *s = opaque;
    if (s->plan) s->dnn->destroy(s->plan);
}

/* Views may begin anywhere. cuDNN does not say which alignment an algorithm needs; no access is wider than 16 bytes. */
static bool is_aligned(const void *first, const void *second, const void *to)
{
    return ((uintptr_t)first | (uintptr_t)second | (uintptr_t)to) % 16 == 0;
}

/* (x, w, bias) -> y, (dy, w) -> dx, (dy, x) -> dw */
static ont_status conv_run(const ont_call *call)
{
    const conv_state *s = call->state;
    const ont_conv_shape *c = &s->shape;
    void *first = (void *)(uintptr_t)call->in[0], *second = (void *)(uintptr_t)call->in[1], *to = call->out[0];
    if (!s->dnn || !is_aligned(first, second, to))
        ONT_TRY(ont_launched(ont_launch_conv(s->kind, c, first, second, to, call->stream)));
    else if (s->kind == ONT_CONV_FORWARD)
        ONT_TRY(s->dnn->run(s->plan, first, second, to, call->work, call->stream));
    else if (s->kind == ONT_CONV_GRAD_INPUT)
        ONT_TRY(s->dnn->run(s->plan, to, second, first, call->work, call->stream));
    else
        ONT_TRY(s->dnn->run(s->plan, second, to, first, call->work, call->stream));
    const void *bias = s->kind == ONT_CONV_FORWARD ? ont_operand(call, 2) : NULL;
    if (!bias) return ONT_OK;
    return ont_launched(ont_launch_channel_bias(c->dtype, c->n, c->m, c->out_count, bias, to, call->stream));
}

const ont_kernel ont_cuda_conv_kernels[2] = {
    {.name = "cuda_conv_dnn", .accept = conv_accept_dnn, .prepare = conv_prepare_dnn, .run = conv_run,
     .release = conv_release},
    {.name = "cuda_conv", .accept = conv_accept, .prepare = conv_prepare, .run = conv_run},
};

/* ---- pooling ---- */

static const char *pool_accept(const ont_node *node)
{
    ont_pool p;
    const ont_value *x = ont_node_in(node, 0);
    if (!ont_dtype_is_float(x->dtype)) return "dtype";
    if (ont_pool_read(node, &x->shape, &p) != ONT_OK) return "window";
    return p.in_count > INT32_MAX ? "the planes are too large" : NULL;
}

static ont_status pool_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_pool *p = ont_arena_alloc(arena, sizeof *p);
    if (!p) return ONT_ENOMEM;
    ONT_TRY(ont_pool_read(node, &ont_node_in(node, 0)->shape, p));
    if (!*node->op->domain) out->work_bytes = 0;
    else out->work_bytes = ont_pool_grad_work(p);
    out->state = p;
    return ONT_OK;
}

static ont_status pool_run(const ont_call *call)
{
    return ont_launched(ont_launch_pool(ont_node_in(call->node, 0)->dtype, call->state, call->in[0], call->out[0],
                                        ont_result(call, 1), call->stream));
}

static ont_status pool_grad_run(const ont_call *call)
{
    return ont_launched(ont_launch_pool_grad(ont_node_in(call->node, 0)->dtype, call->state, call->in[0], call->in[1],
                                             call->out[0], call->work, call->stream));
}

const ont_kernel ont_cuda_pool_kernels[2] = {
    {.name = "cuda_pool", .accept = pool_accept, .prepare = pool_prepare, .run = pool_run},
    {.name = "cuda_pool_grad", .accept = pool_accept, .prepare = pool_prepare, .run = pool_grad_run},
};

/* ---- BatchNormalization ---- */

/* x (and dy) in 16 bits with float32 for what is per channel, or all of one dtype. */
static const char *bn_accept(const ont_node *node)
{
    ont_dtype x = ont_node_in(node, 0)->dtype, channel = x == ONT_FLOAT64 ? ONT_FLOAT64 : ONT_FLOAT32;
    bool grad = *node->op->domain;
    if (!ont_dtype_is_float(x)) return "dtype";
    if (ont_attr_int(node, "spatial", 1) == 0) return "spatial is 0";
    for (uint32_t i = 1; i < 5; i++)
        if (ont_node_in(node, i)->dtype != (grad && i == 4 ? x : channel)) return "dtypes of scale and statistics";
    return NULL;
}

static ont_status bn_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    ont_batchnorm *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_batchnorm){.n = x->dims[0], .c = x->dims[1], .d = ont_shape_count_range(x, 2, x->rank),
                         .eps = ont_attr_float(node, "epsilon", 1e-5),
                         .momentum = ont_attr_float(node, "momentum", 0.9), .dtype = ont_node_in(node, 0)->dtype,
                         .training = ont_attr_int(node, "training_mode", 0) != 0};
    out->state = s;
    out->work_bytes = ont_batchnorm_work(s);
    return ONT_OK;
}

static ont_status bn_run(const ont_call *call)
{
    void *out[] = {call->out[0], ont_result(call, 1), ont_result(call, 2), ont_result(call, 3), ont_result(call, 4)};
    return ont_launched(ont_launch_batchnorm(call->state, call->in, out, call->work, call->stream));
}

static ont_status bn_grad_run(const ont_call *call)
{
    return ont_launched(ont_launch_batchnorm_grad(call->state, call->in, call->out[0], ont_result(call, 1),
                                                  ont_result(call, 2), call->work, call->stream));
}

const ont_kernel ont_cuda_batchnorm_kernels[2] = {
    {.name = "cuda_batchnorm", .accept = bn_accept, .prepare = bn_prepare, .run = bn_run, .inplace = 1},
    {.name = "cuda_batchnorm_grad", .accept = bn_accept, .prepare = bn_prepare, .run = bn_grad_run,
     .inplace = 1 | 1 << 4},
};
