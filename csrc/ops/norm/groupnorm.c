/*
 * Normalisation over groups of channels. GroupNorm of our own domain has the kernels; GroupNormalization (one scale for
 * each group before opset 21, for each channel since) and InstanceNormalization (a group is a channel) are expanded to
 * it. A group is contiguous. Its mean and inverse standard deviation are saved for the gradient. Source: Wu and He,
 * Group Normalization, 2018.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/support/compose.h"

enum { LANES = 16 }; /* partial sums, so that loops vectorise */

typedef struct groups_state {
    int64_t n, groups, channels, d; /* channels of a group, elements of a channel */
    double eps;
    bool shorter; /* short channels: loops run over a whole group, with scale and bias repeated for each element */
} groups_state;

static ont_status layout(const ont_node *node, const ont_shape *x, groups_state *s)
{
    int64_t groups = ont_attr_int(node, "groups", 1);
    if (x->rank < 2) return ont_fail(ONT_EINVAL, "the input has rank %d, expected at least 2", x->rank);
    if (groups < 1 || x->dims[1] % groups)
        return ont_fail(ONT_EINVAL, "%" PRId64 " channels are not divisible into %" PRId64 " groups", x->dims[1],
                        groups);
    *s = (groups_state){.n = x->dims[0], .groups = groups, .channels = x->dims[1] / groups,
                        .d = ont_shape_count_range(x, 2, x->rank), .eps = ont_attr_float(node, "epsilon", 1e-5)};
    s->shorter = s->d <= 2 * LANES;
    return ONT_OK;
}

/* What is per channel or group: float32 beside 16 bits. */
static ont_dtype channel_dtype(ont_dtype dtype)
{
    return ont_dtype_size(dtype) < ont_dtype_size(ONT_FLOAT32) ? ONT_FLOAT32 : dtype;
}

/* Scale and bias have the input's float dtype, or with `wide` float32 beside 16 bits, and `entries` elements each. */
static ont_status check_operands(const ont_node *node, int64_t entries, bool wide)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (!ont_dtype_is_float(x->dtype))
        return ont_fail(ONT_ETYPE, "the input is %s, expected a float", ont_dtype_name(x->dtype));
    for (uint32_t i = 1; i < 3; i++) {
        ont_value *v;
        ONT_TRY(ont_need_input(node, i, &v));
        bool fits = v->dtype == x->dtype || (wide && v->dtype == channel_dtype(x->dtype));
        if (!fits || v->shape.rank != 1 || v->shape.dims[0] != entries)
            return ont_fail(ONT_EINVAL, "%s '%s' must have %" PRId64 " entries of %s", i == 1 ? "scale" : "bias",
                            v->name, entries, ont_dtype_name(x->dtype));
    }
    return ONT_OK;
}

/* (x, scale, bias) -> y, mean (N, groups), inv_std (N, groups) */
static ont_status infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    groups_state s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(layout(node, &x->shape, &s));
    ONT_TRY(check_operands(node, x->shape.dims[1], true));
    ont_shape saved = {.rank = 2, .dims = {s.n, s.groups}};
    ONT_TRY(ont_infer_out(node, 1, channel_dtype(x->dtype), &saved));
    ONT_TRY(ont_infer_out(node, 2, channel_dtype(x->dtype), &saved));
    return ont_infer_out(node, 0, x->dtype, &x->shape);
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    groups_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(layout(node, &ont_node_in(node, 0)->shape, s));
    out->state = s;
    ont_shape wide = {.rank = 3, .dims = {2, s->groups * s->channels, s->d}};
    return s->shorter ? ont_shape_bytes(&wide, ONT_FLOAT64, &out->work_bytes) : ONT_OK;
}

/* Backward scratch: sums of dy and of dy * xhat, (N, channels); for short channels (N, channels, d), and the repeated
 * scale. */
static ont_status prepare_grad(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(prepare(node, arena, out));
    const groups_state *s = out->state;
    ont_shape sums = {.rank = 3, .dims = {2, s->n, s->groups * s->channels}};
    if (s->shorter) sums = (ont_shape){.rank = 3, .dims = {3, s->groups * s->channels, s->d}};
    return ont_shape_bytes(&sums, ONT_FLOAT64, &out->work_bytes);
}

static void *result(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

#define LANE_SUM(n_, term, result_) \
    do { \
        int64_t i_ = 0; \
        for (int lane = 0; lane < LANES; lane++) part[lane] = 0; \
        for (; i_ + LANES <= (n_); i_ += LANES) \
            for (int lane = 0; lane < LANES; lane++) { \
                int64_t i = i_ + lane; \
                part[lane] += (term); \
            } \
        double sum_ = 0; \
        for (; i_ < (n_); i_++) { \
            int64_t i = i_; \
            sum_ += (double)(term); \
        } \
        for (int lane = 0; lane < LANES; lane++) sum_ += (double)part[lane]; \
        (result_) = sum_; \
    } while (0)

#define GROUPS(suffix, type) \
    /* Groups [first, last) of all images. */ \
    static void forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const groups_state *s = call->state; \
        const type *scale = call->in[1], *bias = call->in[2]; \
        type *means = result(call, 1), *invs = result(call, 2), part[LANES]; \
        int64_t m = s->channels * s->d; \
        for (int64_t g = first; g < last; g++) { \
            const type *x = (const type *)call->in[0] + g * m; \
            type *y = (type *)call->out[0] + g * m; \
            int64_t channel = g % s->groups * s->channels; \
            double sum = 0, square = 0, piece; \
            for (int64_t c = 0; c < s->channels; c++) { \
                const type *row = x + c * s->d; \
                LANE_SUM(s->d, row[i], piece); \
                sum += piece; \
            } \
            type mean = (type)(sum / (double)m); \
            for (int64_t c = 0; c < s->channels; c++) { \
                const type *row = x + c * s->d; \
                LANE_SUM(s->d, (row[i] - mean) * (row[i] - mean), piece); \
                square += piece; \
            } \
            type inv = (type)(1 / sqrt(square / (double)m + s->eps)); \
            for (int64_t c = 0; c < s->channels; c++) { \
                type a = inv * scale[channel + c], b = bias[channel + c]; \
                for (int64_t i = c * s->d; i < (c + 1) * s->d; i++) y[i] = (x[i] - mean) * a + b; \
            } \
            if (means) means[g] = mean; \
            if (invs) invs[g] = inv; \
        } \
    } \
    /* (x, scale, mean, inv_std, dy) -> dx = inv_std (g - mean(g) - xhat mean(g xhat)), with g = dy * scale */ \
    static void backward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const groups_state *s = call->state; \
        const type *scale = call->in[1], *means = call->in[2], *invs = call->in[3]; \
        type part[LANES]; \
        int64_t m = s->channels * s->d, all = s->groups * s->channels; \
        for (int64_t g = first; g < last; g++) { \
            const type *x = (const type *)call->in[0] + g * m, *dy = (const type *)call->in[4] + g * m; \
            type mean = means[g], inv = invs[g], *dx = call->out[0] ? (type *)call->out[0] + g * m : NULL; \
            double *sums = (double *)call->work + g * s->channels, *dots = sums + s->n * all; \
            double sum = 0, dot = 0; \
            const type *weights = scale + g % s->groups * s->channels; \
            for (int64_t c = 0; c < s->channels; c++) { \
                const type *row = x + c * s->d, *drow = dy + c * s->d; \
                LANE_SUM(s->d, drow[i], sums[c]); \
                LANE_SUM(s->d, drow[i] * (row[i] - mean), dots[c]); \
                dots[c] *= m ? (double)inv : 0; /* 0 * NaN is NaN */ \
                sum += sums[c] * (double)weights[c]; \
                dot += dots[c] * (double)weights[c]; \
            } \
            type shift = (type)(sum / (double)m), slope = (type)(dot / (double)m * (double)inv); \
            for (int64_t c = 0; dx && c < s->channels; c++) \
                for (int64_t i = c * s->d; i < (c + 1) * s->d; i++) \
                    dx[i] = inv * (dy[i] * weights[c] - shift - (x[i] - mean) * slope); \
        } \
    } \
    /* dscale and dbias: the sums of the images, added in order */ \
    static void channels_##suffix(const ont_call *call) \
    { \
        const groups_state *s = call->state; \
        type *dscale = result(call, 1), *dbias = result(call, 2); \
        int64_t all = s->groups * s->channels; \
        const double *sums = call->work, *dots = sums + s->n * all; \
        for (int64_t c = 0; c < all; c++) { \
            double sum = 0, dot = 0; \
            for (int64_t n = 0; n < s->n; n++) sum += sums[n * all + c], dot += dots[n * all + c]; \
            if (dscale) dscale[c] = (type)dot; \
            if (dbias) dbias[c] = (type)sum; \
        } \
    }

/* Short channels. call->work holds the scales, unless d is 1 and the operand itself has one for each element. */
#define SHORT_CHANNELS(suffix, type) \
    static void lay_out_##suffix(const groups_state *s, const type *each, type *to) \
    { \
        for (int64_t c = 0; s->d != 1 && c < s->groups * s->channels; c++) \
            for (int64_t i = c * s->d; i < (c + 1) * s->d; i++) to[i] = each[c]; \
    } \
    static void short_forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const groups_state *s = call->state; \
        type *means = result(call, 1), *invs = result(call, 2), part[LANES]; \
        int64_t m = s->channels * s->d; \
        const type *scales = s->d == 1 ? call->in[1] : call->work; \
        const type *biases = s->d == 1 ? call->in[2] : scales + s->groups * m; \
        for (int64_t g = first; g < last; g++) { \
            const type *x = (const type *)call->in[0] + g * m; \
            const type *scale = scales + g % s->groups * m, *bias = biases + g % s->groups * m; \
            type *restrict y = (type *)call->out[0] + g * m; \
            double sum, square; \
            LANE_SUM(m, x[i], sum); \
            type mean = (type)(sum / (double)m); \
            LANE_SUM(m, (x[i] - mean) * (x[i] - mean), square); \
            type inv = (type)(1 / sqrt(square / (double)m + s->eps)); \
            for (int64_t i = 0; i < m; i++) y[i] = (x[i] - mean) * (inv * scale[i]) + bias[i]; \
            if (means) means[g] = mean; \
            if (invs) invs[g] = inv; \
        } \
    } \
    static void short_backward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const groups_state *s = call->state; \
        const type *scales = s->d == 1 ? call->in[1] : call->work; \
        type part[LANES]; \
        int64_t m = s->channels * s->d; \
        for (int64_t g = first; g < last; g++) { \
            const type *x = (const type *)call->in[0] + g * m, *dy = (const type *)call->in[4] + g * m; \
            const type *scale = scales + g % s->groups * m; \
            type mean = ((const type *)call->in[2])[g], inv = ((const type *)call->in[3])[g]; \
            type *restrict dx = (type *)call->out[0] + g * m; \
            double sum, dot; \
            LANE_SUM(m, dy[i] * scale[i], sum); \
            LANE_SUM(m, dy[i] * (x[i] - mean) * scale[i], dot); \
            type shift = (type)(sum / (double)m), slope = (type)(dot / (double)m * (double)inv * (double)inv); \
            for (int64_t i = 0; i < m; i++) dx[i] = inv * (dy[i] * scale[i] - shift - (x[i] - mean) * slope); \
        } \
    } \
    /* Channels [first, last): adds up dy and dy * xhat of the images element by element, then along a channel. */ \
    static void short_channels_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const groups_state *s = call->state; \
        type *dscale = result(call, 1), *dbias = result(call, 2); \
        int64_t all = s->groups * s->channels * s->d, m = s->channels * s->d; \
        double *sums = (double *)call->work + all, *dots = sums + all; \
        memset(sums + first * s->d, 0, (size_t)((last - first) * s->d) * sizeof *sums); \
        memset(dots + first * s->d, 0, (size_t)((last - first) * s->d) * sizeof *dots); \
        for (int64_t c = first, end; c < last; c = end) { \
            int64_t g = c / s->channels; \
            end = (g + 1) * s->channels < last ? (g + 1) * s->channels : last; \
            for (int64_t n = 0; n < s->n; n++) { \
                const type *x = (const type *)call->in[0] + n * all, *dy = (const type *)call->in[4] + n * all; \
                type mean = ((const type *)call->in[2])[n * s->groups + g]; \
                double inv = (double)((const type *)call->in[3])[n * s->groups + g]; \
                for (int64_t i = c * s->d; m && i < end * s->d; i++) { \
                    sums[i] += (double)dy[i]; \
                    dots[i] += (double)(dy[i] * (x[i] - mean)) * inv; \
                } \
            } \
        } \
        for (int64_t c = first; c < last; c++) { \
            double sum = 0, dot = 0; \
            for (int64_t i = c * s->d; i < (c + 1) * s->d; i++) sum += sums[i], dot += dots[i]; \
            if (dscale) dscale[c] = (type)dot; \
            if (dbias) dbias[c] = (type)sum; \
        } \
    } \
    static void short_run_##suffix(const ont_call *call, int64_t grain) \
    { \
        const groups_state *s = call->state; \
        lay_out_##suffix(s, call->in[1], call->work); \
        lay_out_##suffix(s, call->in[2], (type *)call->work + s->groups * s->channels * s->d); \
        ont_parallel(s->n * s->groups, grain, short_forward_##suffix, (void *)call); \
    } \
    static void short_run_grad_##suffix(const ont_call *call, int64_t grain) \
    { \
        const groups_state *s = call->state; \
        lay_out_##suffix(s, call->in[1], call->work); \
        if (call->out[0]) ont_parallel(s->n * s->groups, grain, short_backward_##suffix, (void *)call); \
        if (result(call, 1) || result(call, 2)) \
            ont_parallel(s->groups * s->channels, 16384 / (s->n * s->d + 1) + 1, short_channels_##suffix, \
                         (void *)call); \
    }
GROUPS(f32, float)
GROUPS(f64, double)
SHORT_CHANNELS(f32, float)
SHORT_CHANNELS(f64, double)

static int64_t grain(const groups_state *s)
{
    return 16384 / (s->channels * s->d + 1) + 1;
}

static ont_status run(const ont_call *call)
{
    const groups_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    if (s->shorter)
        (f32 ? short_run_f32 : short_run_f64)(call, grain(s));
    else
        ont_parallel(s->n * s->groups, grain(s), f32 ? forward_f32 : forward_f64, (void *)call);
    return ONT_OK;
}

static ont_status run_grad(const ont_call *call)
{
    const groups_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    if (s->shorter) {
        (f32 ? short_run_grad_f32 : short_run_grad_f64)(call, grain(s));
        return ONT_OK;
    }
    ont_parallel(s->n * s->groups, grain(s), f32 ? backward_f32 : backward_f64, (void *)call);
    (f32 ? channels_f32 : channels_f64)(call);
    return ONT_OK;
}

static void grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *mean, *inv;
    b->status = ont_node_ensure_output(b->graph, g->node, 1, &mean);
    if (b->status == ONT_OK) b->status = ont_node_ensure_output(b->graph, g->node, 2, &inv);
    if (b->status == ONT_OK) b->status = infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {I(0), I(1), mean, inv, GO(0)};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "GroupNormGrad", operands, 5, 3);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (!ont_build_done(b, node)) return;
    for (uint32_t i = 0; i < 3; i++) GI(i, node->outputs[i]);
}

/* ---- the ONNX operators ---- */

static ont_status group_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    groups_state s;
    ONT_TRY(ont_need_input(node, 0, &x));
    int64_t groups = ont_attr_int(node, "num_groups", 0), stash = ont_attr_int(node, "stash_type", ONT_FLOAT32);
    if (x->shape.rank < 2) return ont_fail(ONT_EINVAL, "the input has rank %d, expected at least 2", x->shape.rank);
    if (groups < 1 || x->shape.dims[1] % groups)
        return ont_fail(ONT_EINVAL, "%" PRId64 " channels are not divisible into num_groups = %" PRId64,
                        x->shape.dims[1], groups);
    if (stash < 0 || stash >= ONT_DTYPE_COUNT || !ont_dtype_is_float((ont_dtype)stash))
        return ont_fail(ONT_EINVAL, "stash_type is %" PRId64 ", a float type is expected", stash);
    ONT_TRY(layout(node, &x->shape, &s));
    ONT_TRY(check_operands(node, node->version < 21 ? groups : x->shape.dims[1], false));
    return ont_infer_out(node, 0, x->dtype, &x->shape);
}

/* In the dtype of x; 16 bits are rounded once, from float32. */
static ont_value *build_norm(ont_builder *b, const ont_node *from, ont_value *x, ont_value *scale, ont_value *bias,
                             int64_t groups)
{
    if (b->status != ONT_OK || !x) return NULL;
    ont_dtype wide = channel_dtype(x->dtype);
    ont_value *operands[] = {x, ont_build_cast(b, scale, wide), ont_build_cast(b, bias, wide)};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "GroupNorm", operands, 3, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "groups", groups);
    if (b->status == ONT_OK)
        b->status = ont_attr_set_float(b->graph, node, "epsilon", ont_attr_float(from, "epsilon", 1e-5));
    return ont_build_done(b, node);
}

/* (groups) -> (groups * channels): each entry is repeated for every channel of its group */
static ont_value *per_channel(ont_builder *b, ont_value *v, int64_t channels)
{
    if (b->status != ONT_OK || !v) return NULL;
    int64_t groups = v->shape.dims[0];
    ont_value *column = ont_build_reshape(b, v, &(ont_shape){.rank = 2, .dims = {groups, 1}});
    ont_value *wide = ont_build_expand_to(b, column, &(ont_shape){.rank = 2, .dims = {groups, channels}});
    return ont_build_reshape(b, wide, &(ont_shape){.rank = 1, .dims = {groups * channels}});
}

static void group_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *scale = ont_node_in(node, 1), *bias = ont_node_in(node, 2);
    int64_t groups = ont_attr_int(node, "num_groups", 1), channels = x->shape.dims[1] / groups;
    ont_dtype dtype = x->dtype, wide = (ont_dtype)ont_attr_int(node, "stash_type", ONT_FLOAT32);
    if (ont_dtype_size(wide) < ont_dtype_size(dtype)) wide = dtype;
    if (node->version < 21) {
        if (channels != 1) scale = per_channel(b, scale, channels), bias = per_channel(b, bias, channels);
        if (ont_dtype_size(dtype) < 4) wide = ONT_FLOAT32;
    }
    bool rounds_once = wide == ONT_FLOAT32 && (dtype == ONT_FLOAT16 || dtype == ONT_BFLOAT16);
    if (!rounds_once) x = ont_build_cast(b, x, wide);
    scale = ont_build_cast(b, scale, wide);
    bias = ont_build_cast(b, bias, wide);
    outputs[0] = ont_build_cast(b, build_norm(b, node, x, scale, bias, groups), dtype);
}

static ont_status instance_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (x->shape.rank < 2) return ont_fail(ONT_EINVAL, "the input has rank %d, expected at least 2", x->shape.rank);
    ONT_TRY(check_operands(node, x->shape.dims[1], false));
    return ont_infer_out(node, 0, x->dtype, &x->shape);
}

static void instance_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    outputs[0] = x->shape.dims[1] ? build_norm(b, node, x, ont_node_in(node, 1), ont_node_in(node, 2), x->shape.dims[1])
                                  : x;
}

static const ont_kernel kernels[] = {
    {.name = "groupnorm_lanes", .accept = ont_accept_float, .prepare = prepare, .run = run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "groupnorm_grad_lanes", .accept = ont_accept_float, .prepare = prepare_grad, .run = run_grad},
};
const ont_op ont_op_GroupNorm = {.domain = ONT_DOMAIN, .name = "GroupNorm", .since = 1, .min_inputs = 3,
                                 .max_inputs = 3, .flags = ONT_OP_PUBLIC, .nondiff_outputs = ~1ull,
                                 .attributes = "epsilon:f groups:i", .infer = infer, .grad = grad,
                                 ONT_KERNELS(kernels)};
const ont_op ont_op_GroupNormGrad = {.domain = ONT_DOMAIN, .name = "GroupNormGrad", .since = 1, .min_inputs = 5,
                                     .max_inputs = 5, .attributes = "epsilon:f groups:i",
                                     .infer = ont_infer_norm_grad, ONT_KERNELS(grad_kernels)};
const ont_op ont_op_GroupNormalization = {.domain = "", .name = "GroupNormalization", .since = 18, .min_inputs = 3,
                                          .max_inputs = 3, .attributes = "epsilon:f num_groups:i stash_type:i",
                                          .infer = group_infer, .expand = group_expand};
const ont_op ont_op_InstanceNormalization = {.domain = "", .name = "InstanceNormalization", .since = 1, .min_inputs = 3,
                                             .max_inputs = 3, .attributes = "consumed_inputs:I epsilon:f",
                                             .infer = instance_infer, .expand = instance_expand};
