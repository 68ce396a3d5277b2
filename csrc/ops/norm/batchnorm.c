/*
 * BatchNormalization over (N, C, D...): training mode with batch statistics, inference mode with running statistics.
 *
 * Outputs: y, running_mean, running_var (training), then two of our own for the gradient: mean and inverse standard
 * deviation of the batch. As in the ONNX specification, running statistics become running * momentum + batch * (1 -
 * momentum), with the biased variance.
 *
 * FusedBatchNorm, built by passes/fuse_batchnorm.c, adds a residual to y and applies ReLU if `relu` is 1. Its
 * BatchNormGrad reads y or, without a residual, the bias from which it recomputes y; dy counts as 0 where y is not
 * positive.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/norm/batchnorm.h"
#include "ops/support/compose.h"

static bool is_training(const ont_node *node)
{
    return ont_attr_int(node, "training_mode", 0) != 0;
}

static bool is_read(const ont_graph *g, const ont_value *v)
{
    return v && (v->uses || ont_value_is_output(g, v));
}

/*
 * Before opset 14 the number of outputs decided between batch and running statistics, before 7 an attribute too. The
 * decision is stored as attribute training_mode, since a gradient adds outputs of our own. Outputs that mean something
 * else in an old opset are refused.
 */
static ont_status settle_mode(ont_graph *g, ont_node *node)
{
    if (!ont_attr_find(node, "training_mode", ONT_ATTR_INT)) {
        bool test = ont_attr_int(node, "is_test", 0), training = node->version < 14 && node->n_outputs > 1 && !test;
        if (node->version < 7 && !test && !training)
            return ont_fail(ONT_EUNSUPPORTED,
                            "is_test is 0, which means training, but running statistics are not among the outputs");
        ONT_TRY(ont_attr_set_int(g, node, "training_mode", training));
    }
    if (!is_training(node) &&
        (is_read(g, ont_node_out(node, BN_NEW_MEAN)) || is_read(g, ont_node_out(node, BN_NEW_VAR))))
        return ont_fail(ONT_EINVAL, "running statistics are outputs, which needs training_mode = 1");
    bool own = ont_attr_int(node, "saves_statistics", 0);
    if (!own && (is_read(g, ont_node_out(node, BN_SAVED_MEAN)) || is_read(g, ont_node_out(node, BN_SAVED_INV))))
        return ont_fail(ONT_EUNSUPPORTED, "the outputs saved_mean and saved_var are not supported");
    return ONT_OK;
}

/* Old opsets: with spatial = 0, each position of an image has statistics of its own, not each channel. */
static bool is_spatial(const ont_node *node)
{
    return ont_attr_int(node, "spatial", 1) != 0;
}

static ont_status bn_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(settle_mode(g, node));
    ONT_TRY(ont_need_input(node, BN_X, &x));
    if (x->shape.rank < 2) return ont_fail(ONT_EINVAL, "input has rank %d, at least 2 is expected", x->shape.rank);
    if (!ont_dtype_is_float(x->dtype))
        return ont_fail(ONT_ETYPE, "the input is %s, expected a float", ont_dtype_name(x->dtype));
    ont_shape channels = ont_shape_of(is_spatial(node) ? 1 : x->shape.rank - 1, &x->shape.dims[1]);
    for (uint32_t i = BN_SCALE; i <= BN_RUNNING_VAR; i++) {
        ont_value *v;
        ONT_TRY(ont_need_input(node, i, &v));
        /* From opset 15 on, and in our domain, x, scale and bias, and the statistics may have three dtypes. */
        uint32_t group = i < BN_RUNNING_MEAN ? BN_SCALE : BN_RUNNING_MEAN;
        ont_dtype like = !*node->domain && node->version < 15 ? x->dtype : ont_node_in(node, group)->dtype;
        if (v->dtype != like || !ont_dtype_is_float(like) || !ont_shape_equal(&v->shape, &channels))
            return ont_fail(ONT_EINVAL, "'%s' must have %lld entries of %s", v->name,
                            (long long)ont_shape_count(&channels),
                            ont_dtype_name(ont_dtype_is_float(like) ? like : x->dtype));
    }
    ont_dtype statistics = ont_node_in(node, BN_RUNNING_MEAN)->dtype;
    for (uint32_t i = BN_NEW_MEAN; i < node->n_outputs; i++) ONT_TRY(ont_infer_out(node, i, statistics, &channels));
    return ont_infer_out(node, BN_Y, x->dtype, &x->shape);
}

/* Mixed dtypes, or a dtype without a kernel, are computed in the widest. Positions with statistics of their own become
 * channels. */
static void bn_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *operands[BN_RUNNING_VAR + 1];
    ont_dtype wide = ONT_FLOAT32;
    const ont_shape shape = ont_node_in(node, BN_X)->shape, channels = ont_node_in(node, BN_SCALE)->shape;
    ont_shape flat = {.rank = 2, .dims = {shape.dims[0], ont_shape_count_range(&shape, 1, shape.rank)}};
    ont_shape entries = {.rank = 1, .dims = {flat.dims[1]}};
    bool spatial = is_spatial(node), same = spatial;
    for (uint32_t i = BN_X; i <= BN_RUNNING_VAR; i++)
        if (ont_node_in(node, i)->dtype == ONT_FLOAT64) wide = ONT_FLOAT64;
    for (uint32_t i = BN_SCALE; i <= BN_RUNNING_VAR; i++) same &= ont_node_in(node, i)->dtype == wide;
    /* Kernels for a 16-bit x want float32 parameters and statistics. If these are float32 already, the kernels have
     * declined for another reason, and x is cast too. */
    bool keeps_x = spatial && !same && ont_dtype_is_half(ont_node_in(node, BN_X)->dtype);
    if (same && ont_node_in(node, BN_X)->dtype == wide) { /* the expansion would be this node again */
        b->status = ont_fail(ONT_EUNSUPPORTED, "every kernel that supports it is disabled");
        return;
    }
    for (uint32_t i = BN_X; i <= BN_RUNNING_VAR; i++) {
        operands[i] = i == BN_X && keeps_x ? ont_node_in(node, i) : ont_build_cast(b, ont_node_in(node, i), wide);
        if (!spatial) operands[i] = ont_build_reshape(b, operands[i], i == BN_X ? &flat : &entries);
    }
    uint32_t n = is_training(node) ? 3 : 1;
    ont_node *norm = ont_build_node(b, "", "BatchNormalization", operands, BN_RUNNING_VAR + 1, n);
    if (norm) norm->version = 15; /* the first one in which x has a dtype of its own */
    if (norm) b->status = ont_attr_set_int(b->graph, norm, "training_mode", is_training(node));
    if (b->status == ONT_OK)
        b->status = ont_attr_set_float(b->graph, norm, "epsilon", ont_attr_float(node, "epsilon", 1e-5));
    if (b->status == ONT_OK)
        b->status = ont_attr_set_float(b->graph, norm, "momentum", ont_attr_float(node, "momentum", 0.9));
    if (!ont_build_done(b, norm)) return;
    for (uint32_t i = BN_Y; i < n; i++) {
        ont_value *v = norm->outputs[i];
        if (!spatial) v = ont_build_reshape(b, v, i == BN_Y ? &shape : &channels);
        outputs[i] = ont_build_cast(b, v, ont_node_in(node, i == BN_Y ? BN_X : BN_RUNNING_MEAN)->dtype);
    }
}

static const char *accept_float(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    for (uint32_t i = 1; i < node->n_inputs; i++)
        if (ont_node_in(node, i) && ont_node_in(node, i)->dtype != dtype) return "several dtypes";
    if (!is_spatial(node)) return "spatial is 0";
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "dtype";
}

/* What is per channel is float32, and so are the sums; x, y and their gradients are bfloat16. */
static const char *accept_bf16(const ont_node *node)
{
    bool gradient = ONT_IS(node, BatchNormGrad);
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        bool data = i == BN_X || (gradient ? i == BN_GRAD_DY || i == BN_GRAD_Y : i == BN_RESIDUAL);
        const ont_value *v = ont_node_in(node, i);
        if (v && v->dtype != (data ? ONT_BFLOAT16 : ONT_FLOAT32)) return "dtype";
    }
    if (!is_spatial(node)) return "spatial is 0";
    return ont_bn_rows_accept(node) ? NULL : "short pieces of channels, which are float32's";
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *x = &ont_node_in(node, BN_X)->shape;
    ont_batchnorm *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ont_dtype dtype = ont_node_in(node, BN_X)->dtype;
    *s = (ont_batchnorm){.n = x->dims[0], .c = x->dims[1], .d = ont_shape_count_range(x, 2, x->rank),
                         .eps = ont_attr_float(node, "epsilon", 1e-5),
                         .momentum = ont_attr_float(node, "momentum", 0.9), .f32 = dtype != ONT_FLOAT64,
                         .size = ont_dtype_size(dtype),
                         .training = is_training(node), .relu = ont_attr_int(node, "relu", 0) != 0,
                         .loops = ont_simd_batchnorm(dtype)};
    out->state = s;
    return ONT_OK;
}

static const char *accept_rows(const ont_node *node)
{
    const char *reason = accept_float(node);
    return reason ? reason : ont_bn_rows_accept(node);
}

static ont_status prepare_rows(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(prepare(node, arena, out));
    ont_bn_rows_prepare(out->state, out);
    return ONT_OK;
}

/* ---- reference ---- */

/* Channels [first, last). Sums are double: a channel can hold millions of elements. */
#define BATCHNORM(suffix, type) \
    static void forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_batchnorm *s = call->state; \
        const type *scale = call->in[BN_SCALE], *bias = call->in[BN_BIAS], *old_mean = call->in[BN_RUNNING_MEAN]; \
        const type *old_var = call->in[BN_RUNNING_VAR], *residual = ont_bn_operand(call, BN_RESIDUAL); \
        type *new_mean = ont_bn_result(call, BN_NEW_MEAN), *new_var = ont_bn_result(call, BN_NEW_VAR); \
        type *saved_mean = ont_bn_result(call, BN_SAVED_MEAN), *saved_inv = ont_bn_result(call, BN_SAVED_INV); \
        for (int64_t c = first; c < last; c++) { \
            double mean = (double)old_mean[c], var = (double)old_var[c]; \
            if (s->training) { \
                double sum = 0, square = 0, count = (double)(s->n * s->d); \
                for (int64_t n = 0; n < s->n; n++) { \
                    const type *x = (const type *)call->in[BN_X] + (n * s->c + c) * s->d; \
                    double part = 0; \
                    for (int64_t i = 0; i < s->d; i++) part += (double)x[i]; \
                    sum += part; \
                } \
                mean = sum / count; \
                for (int64_t n = 0; n < s->n; n++) { \
                    const type *x = (const type *)call->in[BN_X] + (n * s->c + c) * s->d; \
                    double part = 0; \
                    for (int64_t i = 0; i < s->d; i++) part += ((double)x[i] - mean) * ((double)x[i] - mean); \
                    square += part; \
                } \
                var = square / count; \
                if (new_mean) new_mean[c] = (type)(s->momentum * (double)old_mean[c] + (1 - s->momentum) * mean); \
                if (new_var) new_var[c] = (type)(s->momentum * (double)old_var[c] + (1 - s->momentum) * var); \
            } \
            double inv = 1 / sqrt(var + s->eps); \
            if (saved_mean) saved_mean[c] = (type)mean; \
            if (saved_inv) saved_inv[c] = (type)inv; \
            type m = (type)mean, a = (type)((double)(type)inv * (double)scale[c]); \
            for (int64_t n = 0; n < s->n; n++) { \
                int64_t at = (n * s->c + c) * s->d; \
                for (int64_t i = 0; i < s->d; i++) { \
                    type v = (((const type *)call->in[BN_X])[at + i] - m) * a + bias[c]; \
                    if (residual) v += residual[at + i]; \
                    ((type *)call->out[BN_Y])[at + i] = s->relu && v < 0 ? 0 : v; \
                } \
            } \
        } \
    } \
    /* (x, scale, mean, inv_std, dy, y, bias) -> dx, dscale, dbias */ \
    static void backward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_batchnorm *s = call->state; \
        const type *x = call->in[0], *scale = call->in[1], *mean = call->in[2], *inv = call->in[3], *dy = call->in[4]; \
        const type *y = ont_bn_operand(call, BN_GRAD_Y), *bias = ont_bn_operand(call, BN_GRAD_BIAS); \
        type *dx = ont_bn_result(call, 0), *dscale = ont_bn_result(call, 1), *dbias = ont_bn_result(call, 2); \
        for (int64_t c = first; c < last; c++) { \
            double sum = 0, dot = 0, count = (double)(s->n * s->d); \
            type a = (type)((double)inv[c] * (double)scale[c]); \
            for (int64_t n = 0; n < s->n; n++) { \
                int64_t at = (n * s->c + c) * s->d; \
                for (int64_t i = 0; i < s->d; i++) { \
                    bool on = !(y ? y[at + i] <= 0 : bias && (x[at + i] - mean[c]) * a + bias[c] <= 0); \
                    double g = on ? (double)dy[at + i] : 0; \
                    sum += g; \
                    dot += g * (double)(x[at + i] - mean[c]); \
                } \
            } \
            if (dscale) dscale[c] = count > 0 ? (type)(dot * (double)inv[c]) : 0; /* 0 * NaN is NaN */ \
            if (dbias) dbias[c] = (type)sum; \
            type factor = scale[c] * inv[c]; \
            type shift = s->training ? (type)(sum / count) : 0; \
            type slope = s->training ? (type)(dot * (double)inv[c] * (double)inv[c] / count) : 0; \
            for (int64_t n = 0; dx && n < s->n; n++) { \
                int64_t at = (n * s->c + c) * s->d; \
                for (int64_t i = 0; i < s->d; i++) { \
                    bool on = !(y ? y[at + i] <= 0 : bias && (x[at + i] - mean[c]) * a + bias[c] <= 0); \
                    type share = slope == 0 ? 0 : (x[at + i] - mean[c]) * slope; /* 0 even where x is not finite */ \
                    dx[at + i] = factor * ((on ? dy[at + i] : 0) - shift - share); \
                } \
            } \
        } \
    }
BATCHNORM(f32, float)
BATCHNORM(f64, double)

static int64_t grain(const ont_batchnorm *s)
{
    return 16384 / (s->n * s->d + 1) + 1;
}

static ont_status forward_ref(const ont_call *call)
{
    const ont_batchnorm *s = call->state;
    ont_parallel(s->c, grain(s), call->node->outputs[BN_Y]->dtype == ONT_FLOAT32 ? forward_f32 : forward_f64,
                 (void *)call);
    return ONT_OK;
}

static ont_status backward_ref(const ont_call *call)
{
    const ont_batchnorm *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ont_parallel(s->c, grain(s), f32 ? backward_f32 : backward_f64, (void *)call);
    return ONT_OK;
}

/* ---- SIMD loops ---- */

/* Channels at a time, at most: they stay in the L2 cache over all passes, and their rows are long enough for the
 * hardware prefetcher. */
enum { GROUP = 16, CACHE_BYTES = 1 << 19 };

static const void *entry_at(const void *data, int64_t index, size_t size)
{
    return data ? (const char *)data + (size_t)index * size : NULL;
}

static int64_t group_size(const ont_batchnorm *s, int tensors)
{
    int64_t fit = CACHE_BYTES / ((int64_t)s->size * tensors * s->n * s->d + 1);
    return fit < 1 ? 1 : fit > GROUP ? GROUP : fit;
}

/* Sets mean and var of channels [first, first + n), in two passes. */
static void batch_statistics(const ont_call *call, int64_t first, int64_t n, size_t size, double *mean, double *var)
{
    const ont_batchnorm *s = call->state;
    double count = (double)(s->n * s->d), rest[GROUP];
    for (int64_t k = 0; k < n; k++) mean[k] = var[k] = rest[k] = 0;
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t k = 0; k < n; k++)
            s->loops->sum(entry_at(call->in[BN_X], (i * s->c + first + k) * s->d, size), s->d, &mean[k]);
    for (int64_t k = 0; k < n; k++) mean[k] /= count;
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t k = 0; k < n; k++)
            s->loops->squares(entry_at(call->in[BN_X], (i * s->c + first + k) * s->d, size), mean[k], s->d, &rest[k],
                              &var[k]);
    for (int64_t k = 0; k < n; k++) {
        var[k] = (var[k] - rest[k] * rest[k] / count) / count; /* corrects for the rounding of the mean, around which
                                                                * the squares were taken */
        if (var[k] < 0) var[k] = 0;
    }
}

static void forward_group(const ont_call *call, int64_t first, int64_t n)
{
    const ont_batchnorm *s = call->state;
    size_t size = s->size;
    double mean[GROUP] = {0}, var[GROUP] = {0};
    ont_channel channels[GROUP];
    const void *residual = ont_bn_operand(call, BN_RESIDUAL);
    if (s->training) batch_statistics(call, first, n, size, mean, var);
    for (int64_t k = 0; k < n; k++) channels[k] = ont_bn_settle(call, first + k, mean[k], var[k]);
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t k = 0; k < n; k++) {
            int64_t at = (i * s->c + first + k) * s->d;
            s->loops->apply(&channels[k], entry_at(call->in[BN_X], at, size), entry_at(residual, at, size), s->relu,
                            (void *)entry_at(call->out[BN_Y], at, size), s->d);
        }
}

static void forward_channels(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    int64_t group = group_size(call->state, 1);
    for (int64_t c = first; c < last; c += group) forward_group(call, c, last - c < group ? last - c : group);
}

static ont_batchnorm_gradient gradient_at(const ont_call *call, int64_t at, size_t size)
{
    return (ont_batchnorm_gradient){ont_bn_mask(call), entry_at(call->in[BN_GRAD_X], at, size),
                                    entry_at(ont_bn_operand(call, BN_GRAD_Y), at, size),
                                    entry_at(call->in[BN_GRAD_DY], at, size)};
}

static void backward_group(const ont_call *call, int64_t first, int64_t n)
{
    const ont_batchnorm *s = call->state;
    size_t size = s->size;
    double sum[GROUP] = {0}, dot[GROUP] = {0};
    ont_channel channels[GROUP];
    for (int64_t k = 0; k < n; k++) channels[k] = ont_bn_grad_channel(call, first + k);
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t k = 0; k < n; k++) {
            ont_batchnorm_gradient g = gradient_at(call, (i * s->c + first + k) * s->d, size);
            s->loops->grad_sums(&channels[k], &g, s->d, &sum[k], &dot[k]);
        }
    for (int64_t k = 0; k < n; k++) ont_bn_grad_settle(call, first + k, &sum[k], &dot[k]);
    for (int64_t i = 0; ont_bn_result(call, 0) && i < s->n; i++)
        for (int64_t k = 0; k < n; k++) {
            int64_t at = (i * s->c + first + k) * s->d;
            ont_batchnorm_gradient g = gradient_at(call, at, size);
            s->loops->grad(&channels[k], &g, sum[k], dot[k], (void *)entry_at(call->out[0], at, size), s->d);
        }
}

static void backward_channels(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    int64_t group = group_size(call->state, ont_bn_operand(call, BN_GRAD_Y) ? 3 : 2);
    for (int64_t c = first; c < last; c += group) backward_group(call, c, last - c < group ? last - c : group);
}

static ont_status forward_run(const ont_call *call)
{
    const ont_batchnorm *s = call->state;
    ont_parallel(s->c, grain(s), forward_channels, (void *)call);
    return ONT_OK;
}

static ont_status backward_run(const ont_call *call)
{
    const ont_batchnorm *s = call->state;
    ont_parallel(s->c, grain(s), backward_channels, (void *)call);
    return ONT_OK;
}

static void bn_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *mean, *inv;
    if (WANTS(BN_RUNNING_MEAN) || WANTS(BN_RUNNING_VAR)) {
        ont_grad_refuse(g, "with respect to running statistics");
        return;
    }
    b->status = ont_node_ensure_output(b->graph, g->node, BN_SAVED_MEAN, &mean);
    if (b->status == ONT_OK) b->status = ont_node_ensure_output(b->graph, g->node, BN_SAVED_INV, &inv);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, g->node, "saves_statistics", 1);
    if (b->status == ONT_OK) b->status = bn_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {I(BN_X), I(BN_SCALE), mean, inv, GO(BN_Y)};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "BatchNormGrad", operands, 5, 3);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (!ont_build_done(b, node)) return;
    GI(BN_X, node->outputs[0]);
    GI(BN_SCALE, node->outputs[1]);
    GI(BN_BIAS, node->outputs[2]);
}

static ont_status fused_infer(ont_graph *g, ont_node *node)
{
    const ont_value *x = ont_node_in(node, BN_X), *residual = ont_node_in(node, BN_RESIDUAL);
    if (residual && (residual->dtype != x->dtype || !ont_shape_equal(&residual->shape, &x->shape)))
        return ont_fail(ONT_EINVAL, "the residual must have the input's dtype and shape");
    return bn_infer(g, node);
}

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    const ont_value *x = ont_node_in(node, BN_GRAD_X), *y = ont_node_in(node, BN_GRAD_Y),
                    *bias = ont_node_in(node, BN_GRAD_BIAS);
    const ont_value *scale = ont_node_in(node, BN_GRAD_SCALE);
    if (bias && (bias->dtype != scale->dtype || !ont_shape_equal(&bias->shape, &scale->shape)))
        return ont_fail(ONT_EINVAL, "the bias must have the scale's dtype and shape");
    if (y && (y->dtype != x->dtype || !ont_shape_equal(&y->shape, &x->shape)))
        return ont_fail(ONT_EINVAL, "y must have the input's dtype and shape");
    return ont_infer_norm_grad(g, node);
}

/* A channel is written once all inputs of its sums have been read: dx may overwrite dy. */
enum {
    FORWARD_INPLACE = 1 << BN_X | 1 << BN_RESIDUAL,
    GRAD_INPLACE = 1 << BN_GRAD_X | 1 << BN_GRAD_DY | 1 << BN_GRAD_Y,
};

static const ont_kernel forward_kernels[] = {
    {.name = "batchnorm_rows", .accept = accept_rows, .prepare = prepare_rows, .run = ont_bn_rows_forward,
     .inplace = FORWARD_INPLACE},
    {.name = "batchnorm_simd", .accept = accept_float, .prepare = prepare, .run = forward_run,
     .inplace = FORWARD_INPLACE},
    {.name = "batchnorm_bf16", .accept = accept_bf16, .prepare = prepare, .run = forward_run,
     .inplace = FORWARD_INPLACE},
    {.name = "batchnorm_ref", .accept = accept_float, .prepare = prepare, .run = forward_ref,
     .inplace = FORWARD_INPLACE},
};
static const ont_kernel grad_kernels[] = {
    {.name = "batchnorm_grad_rows", .accept = accept_rows, .prepare = prepare_rows, .run = ont_bn_rows_backward,
     .inplace = GRAD_INPLACE},
    {.name = "batchnorm_grad_simd", .accept = accept_float, .prepare = prepare, .run = backward_run,
     .inplace = GRAD_INPLACE},
    {.name = "batchnorm_grad_bf16", .accept = accept_bf16, .prepare = prepare, .run = backward_run,
     .inplace = GRAD_INPLACE},
    {.name = "batchnorm_grad_ref", .accept = accept_float, .prepare = prepare, .run = backward_ref,
     .inplace = GRAD_INPLACE},
};
#define BN_ATTRIBUTES "consumed_inputs:I epsilon:f is_test:i momentum:f saves_statistics:i spatial:i training_mode:i"
const ont_op ont_op_BatchNormalization = {.domain = "", .name = "BatchNormalization", .since = 1, .min_inputs = 5,
                                          .max_inputs = 5, .nondiff_outputs = ~1ull, .attributes = BN_ATTRIBUTES,
                                          .infer = bn_infer, .grad = bn_grad, .expand = bn_expand,
                                          ONT_KERNELS(forward_kernels)};
const ont_op ont_op_FusedBatchNorm = {.domain = ONT_DOMAIN, .name = "FusedBatchNorm", .since = 1, .min_inputs = 5,
                                      .max_inputs = 6, .attributes = BN_ATTRIBUTES " relu:i", .infer = fused_infer,
                                      ONT_KERNELS(forward_kernels)};
const ont_op ont_op_BatchNormGrad = {.domain = ONT_DOMAIN, .name = "BatchNormGrad", .since = 1, .min_inputs = 5,
                                     .max_inputs = 7, .attributes = BN_ATTRIBUTES,
                                     .infer = grad_infer, ONT_KERNELS(grad_kernels)};
