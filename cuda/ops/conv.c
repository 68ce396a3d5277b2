/*
 * Conv, its gradients, columns, pooling and BatchNormalization on a device: nodes read into what the library (dnn.h,
 * conv_graph.h) and the launchers take.
 *
 * A node with attribute "channels_last" has its images in the order (N, H, W, C), and its weight in (M, H, W, C): the
 * pass of csrc/passes/channels_last.c sets it. With attribute "relu" besides, a Relu belongs to the convolution.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ops/conv/columns.h"
#include "libs/conv_graph.h"
#include "libs/dnn.h"
#include "ops/compare.h"
#include "ops_common.h"

static bool is_channels_last(const ont_node *node)
{
    return ont_attr_int(node, "channels_last", 0) != 0;
}

/* The shape of an image or a weight in the order (N, C, H, W). */
static ont_shape planes_of(const ont_node *node, const ont_shape *shape)
{
    ont_shape planes = *shape;
    if (!is_channels_last(node)) return planes;
    for (int d = 2; d < shape->rank; d++) planes.dims[d] = shape->dims[d - 1];
    planes.dims[1] = shape->dims[shape->rank - 1];
    return planes;
}

/* ---- convolution ---- */

typedef struct conv_state {
    ont_conv_shape shape;
    ont_conv_kind kind;
    const ont_dnn *dnn; /* NULL: the own kernels */
    void *plan;
    ont_conv_plan *graph; /* of channels last */
    ont_conv_plan *fused; /* the same with the Relu */
    bool relu, even;      /* even: padding is the same before and behind */
} conv_state;

static ont_conv_kind kind_of(const ont_node *node)
{
    const char *name = node->op->name;
    if (!strcmp(name, "Conv")) return ONT_CONV_FORWARD;
    return !strcmp(name, "ConvGradWeight") ? ONT_CONV_GRAD_WEIGHT : ONT_CONV_GRAD_INPUT; /* or ConvTranspose */
}

/* x and w, as tensors or as the results that the gradients have. */
static ont_status read_conv(const ont_node *node, conv_state *s)
{
    ont_conv_kind kind = kind_of(node);
    const ont_value *image = kind == ONT_CONV_FORWARD      ? ont_node_in(node, 0)
                             : kind == ONT_CONV_GRAD_INPUT ? node->outputs[0]
                                                           : ont_node_in(node, 1);
    const ont_value *weight = kind == ONT_CONV_GRAD_WEIGHT ? node->outputs[0] : ont_node_in(node, 1);
    const ont_shape x = planes_of(node, &image->shape), w = planes_of(node, &weight->shape);
    ont_window window;
    ONT_TRY(ont_window_init(node, &x, w.dims + 2, &window));
    *s = (conv_state){.kind = kind, .even = true, .relu = ont_attr_int(node, "relu", 0) != 0};
    s->shape = (ont_conv_shape){.n = x.dims[0], .c = x.dims[1], .m = w.dims[0],
                                .groups = ont_attr_int(node, "group", 1), .in = {1, 1, 1}, .out = {1, 1, 1},
                                .kernel = {1, 1, 1}, .stride = {1, 1, 1}, .dilation = {1, 1, 1},
                                .in_count = window.in_count, .out_count = window.out_count,
                                .kernel_count = window.kernel_count, .dtype = ont_node_in(node, 0)->dtype,
                                .spatial = window.rank, .channels_last = is_channels_last(node)};
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
    if (is_channels_last(node)) return "channels last, which cuDNN alone computes in time";
    return read_conv(node, &s) == ONT_OK ? NULL : "shapes";
}

static const char *conv_accept_dnn(const ont_node *node)
{
    conv_state s;
    const ont_dnn *dnn = ont_dnn_get();
    if (!ont_dtype_is_float(ont_node_in(node, 0)->dtype)) return "dtype";
    if (is_channels_last(node)) return "channels last";
    if (!dnn) return "cuDNN is not found";
    if (read_conv(node, &s) != ONT_OK) return "shapes";
    if (!s.even) return "padding differs before and behind";
    return is_empty(&s.shape) ? "nothing to compute" : dnn->accept(&s.shape, s.kind);
}

static const char *plan_of(const ont_node *node, conv_state *s)
{
    if (read_conv(node, s) != ONT_OK) return "shapes";
    if (!s->even) return "padding differs before and behind";
    if (is_empty(&s->shape)) return "nothing to compute";
    bool has_bias = s->kind == ONT_CONV_FORWARD && ont_node_in(node, 2);
    const char *refusal = ont_conv_plan_get(&s->shape, s->kind, has_bias ? ONT_CONV_BIAS : ONT_CONV_PLAIN, &s->graph);
    if (refusal || !s->relu) return refusal;
    if (!has_bias) return "a Relu without a bias in front of it";
    return ont_conv_plan_get(&s->shape, s->kind, ONT_CONV_BIAS_RELU, &s->fused);
}

/* The plan is made here, so that the pass learns what cuDNN takes, and the name of the kernel says what runs. */
static const char *conv_accept_graph(const ont_node *node)
{
    conv_state s;
    return is_channels_last(node) ? plan_of(node, &s) : "not in channels last";
}

static ont_status conv_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    conv_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    out->state = s;
    ONT_TRY(read_conv(node, s));
    if (s->relu && !s->shape.channels_last) return ont_fail(ONT_EINTERNAL, "'%s': a Relu is left over", node->name);
    return ONT_OK;
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

static ont_status conv_prepare_graph(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(conv_prepare(node, arena, out));
    conv_state *s = out->state;
    const char *refusal = plan_of(node, s);
    if (refusal) return ont_fail(ONT_ESTATE, "cuDNN declined what it had accepted: %s", refusal);
    out->work_bytes = ont_conv_plan_work_bytes(s->graph);
    if (s->fused && ont_conv_plan_work_bytes(s->fused) > out->work_bytes)
        out->work_bytes = ont_conv_plan_work_bytes(s->fused);
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

static int64_t results_of(const ont_call *call)
{
    return ont_shape_count(&call->node->outputs[0]->shape);
}

/* To the last `count` results, of which to[0] is the first. Channels last are rows of channels. */
static ont_status add_bias(const ont_call *call, void *to, int64_t count)
{
    const conv_state *s = call->state;
    const ont_conv_shape *c = &s->shape;
    const void *bias = ont_operand(call, 2); /* gradients have none */
    bool transposed = s->kind != ONT_CONV_FORWARD;
    int64_t channels = transposed ? c->c : c->m, cells = transposed ? c->in_count : c->out_count;
    if (!bias) return ONT_OK;
    if (c->channels_last) cells = 1;
    return ont_launched(ont_launch_channel_bias(c->dtype, count / channels / cells, channels, cells, bias, to,
                                                call->stream));
}

/*
 * (x, w, bias) -> y, (dy, w) -> dx or, of ConvTranspose, (x, w, bias) -> y, (dy, x) -> dw: the last `count` results, of
 * which to[0] is the first.
 */
static ont_status run_own(const ont_call *call, void *to, int64_t count)
{
    const conv_state *s = call->state;
    ONT_TRY(ont_launched(ont_launch_conv(s->kind, &s->shape, call->in[0], call->in[1], to, count, call->stream)));
    return add_bias(call, to, count);
}

static ont_status conv_run(const ont_call *call)
{
    const conv_state *s = call->state;
    void *first = (void *)(uintptr_t)call->in[0], *second = (void *)(uintptr_t)call->in[1], *to = call->out[0];
    if (!s->dnn || !is_aligned(first, second, to)) return run_own(call, to, results_of(call));
    if (s->kind == ONT_CONV_FORWARD)
        ONT_TRY(s->dnn->run(s->plan, first, second, to, call->work, call->stream));
    else if (s->kind == ONT_CONV_GRAD_INPUT)
        ONT_TRY(s->dnn->run(s->plan, to, second, first, call->work, call->stream));
    else
        ONT_TRY(s->dnn->run(s->plan, second, to, first, call->work, call->stream));
    return add_bias(call, to, results_of(call));
}

/* ---- channels last, by a plan of cuDNN ---- */

static ont_status run_relu(const ont_call *call, void *to, int64_t count)
{
    const conv_state *s = call->state;
    return ont_launched(ont_launch_relu(s->shape.dtype, to, count, call->stream));
}

static ont_conv_operands operands_of(const ont_call *call)
{
    const conv_state *s = call->state;
    void *first = (void *)(uintptr_t)call->in[0], *second = (void *)(uintptr_t)call->in[1], *to = call->out[0];
    void *bias = s->kind == ONT_CONV_FORWARD ? (void *)(uintptr_t)ont_operand(call, 2) : NULL;
    ont_conv_operands o = {.bias = bias, .work = call->work, .stream = call->stream};
    switch (s->kind) {
    case ONT_CONV_FORWARD: o.x = first, o.w = second, o.y = to; break;
    case ONT_CONV_GRAD_INPUT: o.y = first, o.w = second, o.x = to; break;
    default: o.y = first, o.x = second, o.w = to;
    }
    return o;
}

/*
 * The last results are computed by the own kernels too and compared: few enough to take milliseconds at most, since a
 * result of the weight's gradient is a sum over all images. They come from all channels, and from the bottom right.
 */
enum { COMPARED = 1 << 16, COMPARED_WEIGHTS = 1 << 12, ROW = 64 };

static ont_status compare_with_own(const ont_call *call, bool relu, ont_verdict *verdict)
{
    const conv_state *s = call->state;
    const ont_device_ops *ops = call->device->ops;
    int64_t all = results_of(call), most = s->kind == ONT_CONV_GRAD_WEIGHT ? COMPARED_WEIGHTS : COMPARED;
    int64_t unit = s->kind == ONT_CONV_FORWARD ? s->shape.m : 1; /* a bias is added to whole rows of channels */
    int64_t count = all < most ? all : most / unit > 0 ? most / unit * unit : unit, row = count < ROW ? count : ROW;
    size_t size = ont_dtype_size((ont_dtype)s->shape.dtype), bytes = (size_t)count * size;
    ont_memory own = {0};
    *verdict = ONT_VERDICT_ACCEPTED;
    ONT_TRY(ops->alloc(call->device, bytes, ONT_UINT8, &own));
    const ont_compared last = {s->shape.dtype, ont_tolerance_of(s->shape.dtype),
                               (char *)call->out[0] + (size_t)(all - count) * size, own.data, count / row, row};
    ont_status status = run_own(call, own.data, count);
    if (status == ONT_OK && relu) status = run_relu(call, own.data, count);
    if (status == ONT_OK) status = ont_compare_rows(call, &last, verdict);
    if (status == ONT_OK) status = ops->synchronize(call->device, call->stream);
    ops->free(call->device, &own, bytes);
    return status;
}

/* Biases of which a Relu makes 0, NaN and infinity: -infinity, NaN and infinity. */
enum { EXTREMES = 3 };
static const float extremes[EXTREMES] = {-INFINITY, NAN, INFINITY};
static const uint16_t halves[EXTREMES] = {0xfc00, 0x7e00, 0x7c00}, brains[EXTREMES] = {0xff80, 0x7fc0, 0x7f80};

static void make_extremes(int dtype, void *bias, int64_t channels, int64_t first)
{
    for (int64_t i = 0; i < channels; i++) {
        int64_t k = (first + i) % EXTREMES;
        if (dtype == ONT_FLOAT32) ((float *)bias)[i] = extremes[k];
        else ((uint16_t *)bias)[i] = (dtype == ONT_FLOAT16 ? halves : brains)[k];
    }
}

/* Where the product is not finite, 0 may be NaN, and infinity too. */
static bool is_right(int dtype, const void *results, int64_t i, int64_t k)
{
    uint32_t bits, infinity = dtype == ONT_FLOAT32 ? 0x7f800000 : dtype == ONT_FLOAT16 ? 0x7c00 : 0x7f80;
    if (dtype == ONT_FLOAT32) memcpy(&bits, (const float *)results + i, sizeof bits);
    else bits = ((const uint16_t *)results)[i];
    uint32_t sign = dtype == ONT_FLOAT32 ? 0x80000000 : 0x8000, size = bits & ~sign;
    if (size > infinity) return true;
    return k == 0 ? size == 0 : k == 2 && bits == infinity;
}

/* Looks at the results of the last place, whose channels have such biases. */
static ont_status run_extremes(const ont_call *call, ont_conv_plan *plan, void *bias, void *host, int64_t first,
                               bool *right)
{
    const conv_state *s = call->state;
    const ont_device_ops *ops = call->device->ops;
    ont_conv_operands o = operands_of(call);
    size_t bytes = (size_t)s->shape.m * ont_dtype_size((ont_dtype)s->shape.dtype);
    int64_t last = results_of(call) / s->shape.m - 1;
    o.bias = bias;
    make_extremes(s->shape.dtype, host, s->shape.m, first);
    ONT_TRY(ops->write(call->device, bias, host, bytes, call->stream));
    if (ont_conv_plan_run(plan, &o, true)) return ONT_OK; /* so will the run behind this one, which says so */
    ONT_TRY(ops->read(call->device, host, (char *)call->out[0] + (size_t)last * bytes, bytes, call->stream));
    for (int64_t i = 0; i < s->shape.m; i++) *right &= is_right(s->shape.dtype, host, i, (first + i) % EXTREMES);
    return ONT_OK;
}

/*
 * Whether a plan's Relu is behind the bias, and keeps NaN and infinity as eager's does. The comparison does not see
 * that where biases are small and numbers finite. The run behind this one overwrites the results.
 */
static ont_status check_relu(const ont_call *call, ont_conv_plan *plan, bool *right)
{
    const conv_state *s = call->state;
    const ont_device_ops *ops = call->device->ops;
    size_t bytes = (size_t)s->shape.m * ont_dtype_size((ont_dtype)s->shape.dtype);
    ont_memory bias = {0};
    void *host = ont_malloc(bytes);
    ont_status status = host ? ops->alloc(call->device, bytes, ONT_UINT8, &bias) : ONT_ENOMEM;
    *right = true;
    for (int64_t first = 0; first < EXTREMES && status == ONT_OK; first += s->shape.m)
        status = run_extremes(call, plan, bias.data, host, first, right);
    if (bias.data) {
        if (status == ONT_OK) status = ops->synchronize(call->device, call->stream);
        ops->free(call->device, &bias, bytes);
    }
    ont_free(host);
    return status;
}

/* The plan is not used again. What is computed instead is found by conv_run_graph(). */
static void refuse(const ont_call *call, ont_conv_plan *plan, bool relu, const char *why)
{
    ont_log(ONT_LOG_WARNING, "%s '%s': cuDNN%s, %s", call->node->op_type, call->node->name, why,
            relu ? "so that its Relu is a kernel of its own from now on"
                 : "so that the own kernels are used from now on and are slow");
    ont_conv_plan_judge(plan, ONT_VERDICT_REFUSED);
}

/*
 * Runs the plan, and compares its first results; *ran: the results are there and right. A captured graph that is the
 * first use of a plan has cuDNN's kernel: gradients of the first steps may all be 0, or not finite, which decides
 * nothing.
 */
static ont_status run_plan(const ont_call *call, ont_conv_plan *plan, bool relu, bool *ran)
{
    ont_conv_operands o = operands_of(call);
    bool capturing = call->device->ops->capturing(call->device, call->stream), right = true;
    ont_verdict verdict = ont_conv_plan_verdict(plan);
    *ran = false;
    if (verdict == ONT_VERDICT_REFUSED) return ONT_OK;
    bool compares = !capturing && verdict == ONT_VERDICT_UNKNOWN;
    if (relu && compares) ONT_TRY(check_relu(call, plan, &right));
    int error = right ? ont_conv_plan_run(plan, &o, !capturing) : 0;
    if (error && capturing) return ont_fail(ONT_ESTATE, "cuDNN's convolution: status %d", error);
    *ran = right && !error;
    if (error) {
        char failed[40];
        snprintf(failed, sizeof failed, " failed (status %d)", error);
        refuse(call, plan, relu, failed);
    }
    if (!right) refuse(call, plan, relu, "'s Relu is wrong for infinity or NaN");
    if (!*ran || !compares) return ONT_OK;
    ONT_TRY(compare_with_own(call, relu, &verdict));
    *ran = verdict != ONT_VERDICT_REFUSED;
    if (*ran) ont_conv_plan_judge(plan, verdict);
    else refuse(call, plan, relu, "'s results differ from those of the own kernels");
    return ONT_OK;
}

/* By the plan with the Relu, else by the plan without it, else by the own kernels. */
static ont_status conv_run_graph(const ont_call *call)
{
    const conv_state *s = call->state;
    const ont_conv_operands o = operands_of(call);
    bool ran = false;
    if (is_aligned(o.x, o.w, o.y) && (uintptr_t)o.bias % 16 == 0) {
        if (s->fused) ONT_TRY(run_plan(call, s->fused, true, &ran));
        if (ran) return ONT_OK;
        ONT_TRY(run_plan(call, s->graph, false, &ran));
    }
    if (!ran) ONT_TRY(run_own(call, call->out[0], results_of(call)));
    return s->relu ? run_relu(call, call->out[0], results_of(call)) : ONT_OK;
}

const ont_kernel ont_cuda_conv_kernels[3] = {
    {.name = "cuda_conv_graph", .accept = conv_accept_graph, .prepare = conv_prepare_graph, .run = conv_run_graph},
    {.name = "cuda_conv_dnn", .accept = conv_accept_dnn, .prepare = conv_prepare_dnn, .run = conv_run,
     .release = conv_release},
    {.name = "cuda_conv", .accept = conv_accept, .prepare = conv_prepare, .run = conv_run},
};

/* ---- pooling ---- */

static const char *pool_accept(const ont_node *node)
{
    ont_pool p;
    const ont_value *x = ont_node_in(node, 0);
    const ont_shape planes = planes_of(node, &x->shape);
    if (!ont_dtype_is_float(x->dtype)) return "dtype";
    if (ont_pool_read(node, &planes, &p) != ONT_OK) return "window";
    return p.in_count > INT32_MAX ? "the planes are too large" : NULL;
}

static ont_status pool_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape planes = planes_of(node, &ont_node_in(node, 0)->shape);
    ont_image_pool *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_pool_read(node, &planes, &s->planes));
    s->channels = is_channels_last(node) ? planes.dims[1] : 1;
    if (!*node->op->domain) out->work_bytes = 0;
    else out->work_bytes = ont_pool_grad_work(&s->planes);
    out->state = s;
    return ONT_OK;
}

static ont_status pool_run(const ont_call *call)
{
    return ont_launched(ont_launch_pool(ont_node_in(call->node, 0)->dtype, call->state, call->in[0], call->out[0],
                                        ont_result(call, 1), call->stream));
}

static ont_status pool_grad_run(const ont_call *call)
{
    const void *in[] = {call->in[0], call->in[1], ont_operand(call, 2)};
    return ont_launched(ont_launch_pool_grad(ont_node_in(call->node, 0)->dtype, call->state, in, call->out[0],
                                             call->work, call->stream));
}

/* ---- MaxUnpool ---- */

static const char *unpool_accept(const ont_node *node)
{
    const size_t size = ont_dtype_size(ont_node_in(node, 0)->dtype);
    if (size != 1 && size != 2 && size != 4 && size != 8) return "dtype";
    return ont_is_long(ont_node_in(node, 0)) || ont_is_long(node->outputs[0]) ? "2^31 elements or more" : NULL;
}

static ont_status unpool_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_unpool *u;
    ont_unpool_shape *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_cpu_state(node, arena, (const void **)&u));
    *s = (ont_unpool_shape){.count = u->count, .to_count = ont_shape_count(&u->to),
                            .from_count = ont_shape_count(&u->from), .rank = u->from.rank, .size = (int32_t)u->size};
    for (int d = 0; d < s->rank; d++) {
        s->from[d] = u->from.dims[d];
        s->to[d] = u->to.dims[d];
    }
    if (!*node->op->domain) out->work_bytes = (size_t)s->to_count * sizeof(int32_t);
    out->state = s;
    return ONT_OK;
}

static ont_unpool_shape unpool_of(const ont_call *call)
{
    ont_unpool_shape s = *(const ont_unpool_shape *)call->state;
    s.fault = call->fault;
    s.step = call->step;
    return s;
}

static ont_status unpool_run(const ont_call *call)
{
    ont_unpool_shape s = unpool_of(call);
    const size_t bytes = (size_t)s.to_count * sizeof(int32_t);
    if (bytes) ONT_TRY(call->device->ops->clear(call->device, call->work, bytes, call->stream));
    return ont_launched(ont_launch_unpool(&s, call->in[0], call->in[1], call->out[0], call->work, call->stream));
}

static ont_status unpool_grad_run(const ont_call *call)
{
    ont_unpool_shape s = unpool_of(call);
    return ont_launched(ont_launch_unpool_grad(&s, call->in[0], call->in[1], call->out[0], call->stream));
}

const ont_kernel ont_cuda_pool_kernels[4] = {
    {.name = "cuda_pool", .accept = pool_accept, .prepare = pool_prepare, .run = pool_run},
    {.name = "cuda_pool_grad", .accept = pool_accept, .prepare = pool_prepare, .run = pool_grad_run},
    {.name = "cuda_unpool", .accept = unpool_accept, .prepare = unpool_prepare, .run = unpool_run},
    {.name = "cuda_unpool_grad", .accept = unpool_accept, .prepare = unpool_prepare, .run = unpool_grad_run},
};

/* ---- Im2Col, Col2Im ---- */

static const char *columns_accept(const ont_node *node)
{
    const ont_dtype dtype = ont_node_in(node, 0)->dtype;
    const size_t size = ont_dtype_size(dtype);
    const bool adds = ont_dtype_is_float(dtype) || dtype == ONT_INT32 || dtype == ONT_INT64 || dtype == ONT_UINT64;
    const bool copies = *node->op->domain && (size == 1 || size == 2 || size == 4 || size == 8); /* Im2Col */
    if (!adds && !copies) return "dtype";
    return ont_is_long(ont_node_in(node, 0)) || ont_is_long(node->outputs[0]) ? "2^31 elements or more" : NULL;
}

static ont_status columns_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_columns *c;
    ont_column_shape *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_cpu_state(node, arena, (const void **)&c));
    *s = (ont_column_shape){.planes = c->planes, .in_count = c->w.in_count, .out_count = c->w.out_count,
                            .kernel_count = c->w.kernel_count, .in = {1, 1, 1}, .out = {1, 1, 1}, .kernel = {1, 1, 1},
                            .stride = {1, 1, 1}, .dilation = {1, 1, 1}};
    for (int d = 0; d < c->w.rank; d++) {
        const int e = 3 - c->w.rank + d;
        s->in[e] = c->w.in[d];
        s->out[e] = c->w.out[d];
        s->kernel[e] = c->w.kernel[d];
        s->stride[e] = c->w.stride[d];
        s->dilation[e] = c->w.dilation[d];
        s->begin[e] = c->w.begin[d];
    }
    out->state = s;
    return ONT_OK;
}

static ont_status im2col_run(const ont_call *call)
{
    const int size = (int)ont_dtype_size(ont_node_in(call->node, 0)->dtype);
    return ont_launched(ont_launch_im2col(call->state, size, call->in[0], call->out[0], call->stream));
}

static ont_status col2im_run(const ont_call *call)
{
    const int dtype = (int)ont_node_in(call->node, 0)->dtype;
    return ont_launched(ont_launch_col2im(call->state, dtype, call->in[0], call->out[0], call->stream));
}

const ont_kernel ont_cuda_columns_kernels[2] = {
    {.name = "cuda_im2col", .accept = columns_accept, .prepare = columns_prepare, .run = im2col_run},
    {.name = "cuda_col2im", .accept = columns_accept, .prepare = columns_prepare, .run = col2im_run},
};

/* ---- BatchNormalization ---- */

static bool is_norm_grad(const ont_node *node)
{
    return !strcmp(node->op->name, "BatchNormGrad");
}

/* x, and what has its shape, in 16 bits with float32 for what is per channel, or all of one dtype. */
static const char *bn_accept(const ont_node *node)
{
    ont_dtype x = ont_node_in(node, 0)->dtype, channel = x == ONT_FLOAT64 ? ONT_FLOAT64 : ONT_FLOAT32;
    uint32_t images = is_norm_grad(node) ? 1 << 4 | 1 << 5 : 1 << 5;
    if (!ont_dtype_is_float(x)) return "dtype";
    if (ont_attr_int(node, "spatial", 1) == 0) return "spatial is 0";
    for (uint32_t i = 1; i < node->n_inputs; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (v && v->dtype != (images >> i & 1 ? x : channel)) return "dtypes of scale and statistics";
    }
    return NULL;
}

static ont_status bn_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    ont_batchnorm *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    int last = is_channels_last(node) ? x->rank - 1 : 1; /* channels last are rows of channels */
    *s = (ont_batchnorm){.n = ont_shape_count_range(x, 0, last), .c = x->dims[last],
                         .d = ont_shape_count_range(x, last + 1, x->rank),
                         .eps = ont_attr_float(node, "epsilon", 1e-5),
                         .momentum = ont_attr_float(node, "momentum", 0.9), .dtype = ont_node_in(node, 0)->dtype,
                         .training = ont_attr_int(node, "training_mode", 0) != 0,
                         .relu = ont_attr_int(node, "relu", 0) != 0};
    out->state = s;
    out->work_bytes = ont_batchnorm_work(s);
    return ONT_OK;
}

enum { BN_OPERANDS = 7 };

/* With NULL for those that the node does not have. */
static void bn_operands(const ont_call *call, const void *in[BN_OPERANDS])
{
    for (uint32_t i = 0; i < BN_OPERANDS; i++) in[i] = ont_operand(call, i);
}

static ont_status bn_run(const ont_call *call)
{
    const void *in[BN_OPERANDS];
    bn_operands(call, in);
    void *out[] = {call->out[0], ont_result(call, 1), ont_result(call, 2), ont_result(call, 3), ont_result(call, 4)};
    return ont_launched(ont_launch_batchnorm(call->state, in, out, call->work, call->stream));
}

static ont_status bn_grad_run(const ont_call *call)
{
    const void *in[BN_OPERANDS];
    bn_operands(call, in);
    return ont_launched(ont_launch_batchnorm_grad(call->state, in, call->out[0], ont_result(call, 1),
                                                  ont_result(call, 2), call->work, call->stream));
}

const ont_kernel ont_cuda_batchnorm_kernels[2] = {
    {.name = "cuda_batchnorm", .accept = bn_accept, .prepare = bn_prepare, .run = bn_run,
     .inplace = 1 | 1 << 5},
    {.name = "cuda_batchnorm_grad", .accept = bn_accept, .prepare = bn_prepare, .run = bn_grad_run,
     .inplace = 1 | 1 << 4 | 1 << 5},
};
