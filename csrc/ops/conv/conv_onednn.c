/*
 * Convolution, its gradients and transposed convolution by oneDNN in float32, and the first three in bfloat16. A table
 * says which tensor of a convolution each operator computes; conv.c has checked the shapes.
 */
#include "ops/conv/conv_onednn.h"

#include <string.h>

#include "base/parallel.h"
#include "device/conv.h"
#include "ops/support/window.h"

/* Where a node has x, w and y of the convolution: an input index, or -1 for output 0. A bias is input 2. */
typedef struct side {
    const ont_op *op;
    ont_conv_kind kind;
    int x, w, y;
    bool bias;
} side;

static const side sides[] = {
    {&ont_op_Conv, ONT_CONV_FORWARD, 0, 1, -1, true},
    {&ont_op_ConvGradInput, ONT_CONV_GRAD_INPUT, -1, 1, 0, false},
    {&ont_op_ConvGradWeight, ONT_CONV_GRAD_WEIGHT, 1, -1, 0, false},
    {&ont_op_ConvTransposePlain, ONT_CONV_GRAD_INPUT, -1, 1, 0, true},
};

typedef struct conv_state {
    ont_dnnl_conv *handle; /* first member: the shared release() reads only this */
    const side *side;
    int64_t channels, planes, each; /* of x: channels, images * channels, cells of a plane; to add a bias to x */
} conv_state;

static const side *side_of(const ont_node *node)
{
    const side *s = sides;
    while (s->op != node->op) s++;
    return s;
}

static const ont_shape *shape_at(const ont_node *node, int index)
{
    return index < 0 ? &node->outputs[0]->shape : &ont_node_in(node, (uint32_t)index)->shape;
}

static const ont_value *bias_of(const ont_node *node)
{
    return side_of(node)->bias ? ont_node_in(node, 2) : NULL;
}

ont_status ont_conv_read(const ont_node *node, ont_conv *c, ont_conv_kind *kind)
{
    const side *s = side_of(node);
    const ont_shape *x = shape_at(node, s->x), *w = shape_at(node, s->w);
    ont_window window;
    *kind = s->kind;
    ONT_TRY(ont_window_init(node, x, w->dims + 2, &window));
    *c = (ont_conv){.dtype = ont_node_in(node, 0)->dtype, .spatial = window.rank, .n = x->dims[0], .c = x->dims[1],
                    .o = w->dims[0], .groups = ont_attr_int(node, "group", 1)};
    for (int d = 0; d < 3; d++) {
        int from = d - (3 - window.rank);
        bool own = from >= 0;
        c->in[d] = own ? window.in[from] : 1;
        c->out[d] = own ? window.out[from] : 1;
        c->kernel[d] = own ? window.kernel[from] : 1;
        c->stride[d] = own ? window.stride[from] : 1;
        c->dilation[d] = own ? window.dilation[from] : 1;
        c->pad[d] = own ? window.begin[from] : 0;
        c->pad_end[d] = own ? window.end[from] : 0;
    }
    return ONT_OK;
}

/* A 1 x 1 convolution is a GEMM. oneDNN packs both operands for it, which costs more than it gains (bench/conv.py). */
static bool is_pointwise(const ont_conv *c)
{
    bool pointwise = c->groups == 1 && c->c >= 16 && c->o >= 16;
    for (int d = 0; d < 3; d++) pointwise &= c->kernel[d] == 1 && c->stride[d] == 1 && !c->pad[d] && !c->pad_end[d];
    return pointwise;
}

/*
 * 4 us in bfloat16 on the EPYC, of which the call is a large part: 4 images of 3 x 32 x 32 to 8 channels by 4 x 4
 * filters are as fast in float32.
 */
static const double MIN_BF16_MULTIPLICATIONS = 1e6;

static const char *accept(const ont_node *node, ont_dtype dtype)
{
    const side *s = side_of(node);
    ont_conv c;
    ont_conv_kind kind;
    if (ont_node_in(node, 0)->dtype != dtype) return "dtype";
    if (!ont_shape_count(shape_at(node, s->x)) || !ont_shape_count(shape_at(node, s->w)) ||
        !ont_shape_count(shape_at(node, s->y)))
        return "no elements";
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    if (dtype == ONT_FLOAT32 && is_pointwise(&c)) return "a 1 x 1 convolution";
    /* oneDNN unrolls the windows of many groups for the weight's gradient, and the rest gains little. */
    if (dtype == ONT_BFLOAT16 && c.groups > 1) return "groups";
    if (dtype == ONT_BFLOAT16 && ont_conv_multiplications(&c) < MIN_BF16_MULTIPLICATIONS) return "too small to gain";
    return ont_dnnl_conv_refuses(&c, s->kind, s->kind == ONT_CONV_FORWARD && bias_of(node));
}

const char *ont_conv_onednn_accept(const ont_node *node)
{
    return accept(node, ONT_FLOAT32);
}

const char *ont_conv_onednn_accept_bf16(const ont_node *node)
{
    return accept(node, ONT_BFLOAT16);
}

ont_status ont_conv_onednn_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_conv c;
    ont_conv_kind kind;
    conv_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_conv_read(node, &c, &kind));
    s->side = side_of(node);
    s->channels = c.c;
    s->planes = c.n * c.c;
    s->each = c.in[0] * c.in[1] * c.in[2];
    ONT_TRY(ont_dnnl_conv_create(&c, s->side->kind, s->side->kind == ONT_CONV_FORWARD && bias_of(node), &s->handle));
    out->work_bytes = ont_dnnl_conv_work_bytes(s->handle);
    out->state = s;
    return ONT_OK;
}

/* oneDNN's backward primitive takes no bias; ConvTranspose has one. */
static void add_bias(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const conv_state *s = call->state;
    for (int64_t plane = first; plane < last; plane++) {
        float bias = ((const float *)call->in[2])[plane % s->channels], *x = (float *)call->out[0] + plane * s->each;
        for (int64_t i = 0; i < s->each; i++) x[i] += bias;
    }
}

static const void *data_at(const ont_call *call, int index)
{
    return index < 0 ? call->out[0] : call->in[index];
}

ont_status ont_conv_onednn_run(const ont_call *call)
{
    const conv_state *s = call->state;
    const void *bias = bias_of(call->node) ? call->in[2] : NULL;
    ONT_TRY(ont_dnnl_conv_run(s->handle, data_at(call, s->side->x), data_at(call, s->side->w),
                              data_at(call, s->side->y), bias, call->work));
    if (bias && s->side->kind == ONT_CONV_GRAD_INPUT)
        ont_parallel(s->planes, 16384 / s->each + 1, add_bias, (void *)call);
    return ONT_OK;
}

void ont_conv_onednn_release(void *state)
{
    ont_dnnl_conv_destroy(((conv_state *)state)->handle);
}
