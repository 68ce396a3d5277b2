/*
 * Convolutions of the emulated graph API (dnn_graph.c): what cuDNN requires of their descriptors, and their results by
 * loops in double, through the strides that the tensors have. Faults (ONT_EMULATE_DNN_FAULT): "kernel" turns the
 * weight's window around, "layout" reads images as if they had the order (N, C, H, W), "dilation" ignores it, "last"
 * leaves the last channel out. "tf32" is none: operands in float32 are rounded as tensor cores do.
 */
#include "emulate/dnn_graph.h"

typedef struct names { /* of an operation's attributes */
    int operation, how, alpha, beta, w, x, y;
} names;

#define NAMES(kind, name, w, x, y) \
    {DNN_BACKEND_OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_##name##_CONV_DESC, \
     DNN_ATTR_OPERATION_CONVOLUTION_##name##_ALPHA, DNN_ATTR_OPERATION_CONVOLUTION_##name##_BETA, \
     DNN_ATTR_OPERATION_CONVOLUTION_##name##_##w, DNN_ATTR_OPERATION_CONVOLUTION_##name##_##x, \
     DNN_ATTR_OPERATION_CONVOLUTION_##name##_##y}
enum { FORWARD, BACKWARD_DATA, BACKWARD_FILTER, KINDS };
static const names all_names[KINDS] = {[FORWARD] = NAMES(FORWARD, FORWARD, W, X, Y),
                                       [BACKWARD_DATA] = NAMES(BACKWARD_DATA, BWD_DATA, W, DX, DY),
                                       [BACKWARD_FILTER] = NAMES(BACKWARD_FILTER, BWD_FILTER, DW, X, DY)};

static int kind_of(const descriptor *op)
{
    int kind = 0;
    while (all_names[kind].operation != op->type) kind++;
    return kind;
}

static const int64_t *pair_of(const descriptor *how, int name)
{
    return find(how, name)->values;
}

static float float_of(const descriptor *d, int name)
{
    return *(const float *)find(d, name)->values;
}

/* Images are dense, and their channels lie together. */
static bool is_channels_last(const descriptor *t)
{
    const int64_t *d = dims_of(t), *s = find(t, DNN_ATTR_TENSOR_STRIDES)->values;
    return s[1] == 1 && s[3] == d[1] && s[2] == d[1] * d[3] && s[0] == d[1] * d[2] * d[3];
}

static int refuse_window(const descriptor *how, const int64_t *x, const int64_t *w, const int64_t *y)
{
    const int64_t *before = pair_of(how, DNN_ATTR_CONVOLUTION_PRE_PADDINGS);
    const int64_t *behind = pair_of(how, DNN_ATTR_CONVOLUTION_POST_PADDINGS);
    const int64_t *stride = pair_of(how, DNN_ATTR_CONVOLUTION_FILTER_STRIDES);
    const int64_t *dilation = pair_of(how, DNN_ATTR_CONVOLUTION_DILATIONS);
    if (int64_of(how, DNN_ATTR_CONVOLUTION_SPATIAL_DIMS) != 2) return refuse(BAD_PARAM, "spatial dims", 0);
    if (int_of(how, DNN_ATTR_CONVOLUTION_CONV_MODE) != DNN_CROSS_CORRELATION) return refuse(BAD_PARAM, "mode", 0);
    if (int_of(how, DNN_ATTR_CONVOLUTION_COMP_TYPE) != DNN_DATA_FLOAT) return refuse(NOT_SUPPORTED, "arithmetic", 0);
    for (int d = 0; d < 2; d++) {
        if (before[d] < 0 || behind[d] < 0 || stride[d] < 1 || dilation[d] < 1)
            return refuse(BAD_PARAM, "padding, stride or dilation", d);
        int64_t reach = x[d + 2] + before[d] + behind[d] - dilation[d] * (w[d + 2] - 1) - 1;
        if (reach < 0 || reach / stride[d] + 1 != y[d + 2]) return refuse(BAD_PARAM, "a dim of a convolution", d);
    }
    return 0;
}

int ont_emulate_dnn_finalize_convolution(const descriptor *op)
{
    const names *n = &all_names[kind_of(op)];
    const descriptor *w = part(op, n->w), *x = part(op, n->x), *y = part(op, n->y);
    const int64_t *dw = dims_of(w), *dx = dims_of(x), *dy = dims_of(y);
    int type = int_of(w, DNN_ATTR_TENSOR_DATA_TYPE);
    if (float_of(op, n->alpha) != 1 || float_of(op, n->beta) != 0) return refuse(BAD_PARAM, "factors", 0);
    if ((type != DNN_DATA_FLOAT && type != DNN_DATA_HALF && type != DNN_DATA_BFLOAT16) ||
        type != int_of(x, DNN_ATTR_TENSOR_DATA_TYPE) ||
        (type != int_of(y, DNN_ATTR_TENSOR_DATA_TYPE) && !bool_of(y, DNN_ATTR_TENSOR_IS_VIRTUAL)))
        return refuse(BAD_PARAM, "types of a convolution", type);
    if (dx[0] != dy[0] || dw[0] != dy[1] || dx[1] % dw[1] || dw[0] % (dx[1] / dw[1]))
        return refuse(BAD_PARAM, "channels of a convolution", 0);
    if (!is_channels_last(w) || !is_channels_last(x) || !is_channels_last(y))
        return refuse(NOT_SUPPORTED, "strides of a convolution", 0);
    return refuse_window(part(op, n->how), dx, dw, dy);
}

/* ---- the result ---- */

static void image_strides(value *v)
{
    if (!has_fault("layout")) return;
    for (int64_t d = 3, stride = 1; d >= 0; stride *= v->dims[d--]) v->strides[d] = stride;
}

typedef struct sums { /* of the tensor that is written, row-major */
    double *all;
    const value *of;
} sums;

static double *sum_at(const sums *s, const int64_t at[4])
{
    int64_t i = 0;
    for (int d = 0; d < 4; d++) i = i * s->of->dims[d] + at[d];
    return &s->all[i];
}

static double operand(const value *v, const int64_t at[4])
{
    double x = load(v, at);
    return v->dtype == ONT_FLOAT32 && has_fault("tf32") ? ont_emulate_round_to_tf32(x) : x;
}

/* Adds the products of one output with all weights to what is written. */
static void add_products(int kind, const descriptor *how, const value *x, const value *w, const value *y,
                         const int64_t out[4], const sums *to)
{
    const int64_t *pad = pair_of(how, DNN_ATTR_CONVOLUTION_PRE_PADDINGS);
    const int64_t *stride = pair_of(how, DNN_ATTR_CONVOLUTION_FILTER_STRIDES);
    const int64_t *dilation = pair_of(how, DNN_ATTR_CONVOLUTION_DILATIONS);
    int64_t channels = w->dims[1], first = out[1] / (w->dims[0] / (x->dims[1] / channels)) * channels;
    int64_t last = has_fault("last") ? channels - 1 : channels;
    bool turns = has_fault("kernel"), is_dense = has_fault("dilation");
    for (int64_t k = 0; k < last * w->dims[2] * w->dims[3]; k++) {
        int64_t tap[2] = {k / w->dims[3] % w->dims[2], k % w->dims[3]}, c = k / w->dims[3] / w->dims[2];
        int64_t weight[4] = {out[1], c, turns ? w->dims[2] - 1 - tap[0] : tap[0],
                             turns ? w->dims[3] - 1 - tap[1] : tap[1]};
        int64_t in[4] = {out[0], first + c};
        bool is_inside = true;
        for (int d = 0; d < 2; d++) {
            in[d + 2] = out[d + 2] * stride[d] - pad[d] + tap[d] * (is_dense ? 1 : dilation[d]);
            is_inside = is_inside && in[d + 2] >= 0 && in[d + 2] < x->dims[d + 2];
        }
        if (!is_inside) continue;
        if (kind == FORWARD) *sum_at(to, out) += operand(x, in) * operand(w, weight);
        else if (kind == BACKWARD_DATA) *sum_at(to, in) += operand(y, out) * operand(w, weight);
        else *sum_at(to, weight) += operand(x, in) * operand(y, out);
    }
}

void ont_emulate_dnn_convolve(const descriptor *op, value *(*value_of)(void *job, const descriptor *op, int name),
                              void *job)
{
    int kind = kind_of(op);
    const names *n = &all_names[kind];
    value x = *value_of(job, op, n->x), w = *value_of(job, op, n->w), y = *value_of(job, op, n->y);
    value *written = kind == FORWARD ? &y : kind == BACKWARD_DATA ? &x : &w;
    image_strides(&x);
    const int64_t *d = written->dims, *o = y.dims;
    sums to = {calloc((size_t)(d[0] * d[1] * d[2] * d[3]), sizeof(double)), written};
    if (!to.all) abort();
    for (int64_t i = 0; i < o[0] * o[1] * o[2] * o[3]; i++) {
        int64_t out[4] = {i / o[3] / o[2] / o[1], i / o[3] / o[2] % o[1], i / o[3] % o[2], i % o[3]};
        add_products(kind, part(op, n->how), &x, &w, &y, out, &to);
    }
    for (int64_t i = 0; i < d[0] * d[1] * d[2] * d[3]; i++) {
        int64_t at[4] = {i / d[3] / d[2] / d[1], i / d[3] / d[2] % d[1], i / d[3] % d[2], i % d[3]};
        store(written, at, to.all[i]);
    }
    free(to.all);
}
