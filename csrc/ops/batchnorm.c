/*
 * BatchNormalization over (N, C, D...): training mode from batch statistics, inference mode from running ones.
 *
 * Outputs: y, running_mean, running_var (training), then our own: mean and inverse deviation of the batch, which the
 * gradient reads. Running statistics follow the specification: running * momentum + batch * (1 - momentum), biased.
 *
 * FusedBatchNorm, made by passes/fuse_batchnorm.c, adds a residual to y and rectifies it if `relu` is 1. BatchNormGrad
 * may have that y, or without a residual the bias that makes y anew, as an operand: dy then counts as 0 where y is not
 * positive.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/compose.h"
#include "simd/batchnorm.h"

enum { X, SCALE, BIAS, RUNNING_MEAN, RUNNING_VAR, RESIDUAL }; /* inputs; the last of FusedBatchNorm */
enum { Y, NEW_MEAN, NEW_VAR, SAVED_MEAN, SAVED_INV }; /* outputs */

typedef struct bn_state {
    int64_t n, c, d;
    double eps, momentum;
    bool training, relu;
    const ont_batchnorm_loops *loops;
} bn_state;

enum { GRAD_X, GRAD_SCALE, GRAD_MEAN, GRAD_INV, GRAD_DY, GRAD_Y, GRAD_BIAS }; /* inputs of the gradient */

static bool is_training(const ont_node *node)
{
    return ont_attr_int(node, "training_mode", 0) != 0;
}

static bool is_read(const ont_graph *g, const ont_value *v)
{
    return v && (v->uses || ont_value_is_output(g, v));
}

/*
 * Before opset 14 the number of outputs said whether statistics are the batch's, before 7 an attribute as well; it is
 * put down as the attribute, since a gradient adds outputs of our own. Outputs that mean something else, or nothing,
 * are refused.
 */
static ont_status settle_mode(ont_graph *g, ont_node *node)
{
    if (!ont_attr_find(node, "training_mode", ONT_ATTR_INT)) {
        bool test = ont_attr_int(node, "is_test", 0), training = node->version < 14 && node->n_outputs > 1 && !test;
        if (node->version < 7 && !test && !training)
            return ont_fail(ONT_EUNSUPPORTED,
                            "is_test is 0, which asks for training, but there are no running statistics as outputs");
        ONT_TRY(ont_attr_set_int(g, node, "training_mode", training));
    }
    if (!is_training(node) && (is_read(g, ont_node_out(node, NEW_MEAN)) || is_read(g, ont_node_out(node, NEW_VAR))))
        return ont_fail(ONT_EINVAL, "running statistics as outputs without training_mode");
    bool own = ont_attr_int(node, "saves_statistics", 0);
    if (!own && (is_read(g, ont_node_out(node, SAVED_MEAN)) || is_read(g, ont_node_out(node, SAVED_INV))))
        return ont_fail(ONT_EUNSUPPORTED, "the outputs saved_mean and saved_var");
    return ONT_OK;
}

/* Old opsets: statistics of every cell of an image by itself, in place of one a channel. */
static bool is_spatial(const ont_node *node)
{
    return ont_attr_int(node, "spatial", 1) != 0;
}

static ont_status bn_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(settle_mode(g, node));
    ONT_TRY(ont_need_input(node, X, &x));
    if (x->shape.rank < 2) return ont_fail(ONT_EINVAL, "input has rank %d, at least 2 is expected", x->shape.rank);
    if (!ont_dtype_is_float(x->dtype))
        return ont_fail(ONT_ETYPE, "the input is %s, expected a float", ont_dtype_name(x->dtype));
    ont_shape channels = ont_shape_of(is_spatial(node) ? 1 : x->shape.rank - 1, &x->shape.dims[1]);
    for (uint32_t i = SCALE; i <= RUNNING_VAR; i++) {
        ont_value *v;
        ONT_TRY(ont_need_input(node, i, &v));
        /* From opset 15 on x, the affine part and the statistics have dtypes of their own. */
        ont_dtype like = node->version < 15 ? x->dtype
                                            : ont_node_in(node, i < RUNNING_MEAN ? SCALE : RUNNING_MEAN)->dtype;
        if (v->dtype != like || !ont_dtype_is_float(like) || !ont_shape_equal(&v->shape, &channels))
            return ont_fail(ONT_EINVAL, "'%s' must have %lld entries of %s", v->name,
                            (long long)ont_shape_count(&channels),
                            ont_dtype_name(ont_dtype_is_float(like) ? like : x->dtype));
    }
    ont_dtype statistics = ont_node_in(node, RUNNING_MEAN)->dtype;
    for (uint32_t i = NEW_MEAN; i < node->n_outputs; i++) ONT_TRY(ont_infer_out(node, i, statistics, &channels));
    return ont_infer_out(node, Y, x->dtype, &x->shape);
}

/* Several dtypes, or one that no kernel has: computed in the widest. Cells with statistics of their own become
 * channels. */
static void bn_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *operands[RUNNING_VAR + 1];
    ont_dtype wide = ONT_FLOAT32;
    const ont_shape shape = ont_node_in(node, X)->shape, channels = ont_node_in(node, SCALE)->shape;
    ont_shape flat = {.rank = 2, .dims = {shape.dims[0], ont_shape_count_range(&shape, 1, shape.rank)}};
    ont_shape entries = {.rank = 1, .dims = {flat.dims[1]}};
    bool spatial = is_spatial(node);
    for (uint32_t i = X; i <= RUNNING_VAR; i++)
        if (ont_node_in(node, i)->dtype == ONT_FLOAT64) wide = ONT_FLOAT64;
    for (uint32_t i = X; i <= RUNNING_VAR; i++) {
        operands[i] = ont_build_cast(b, ont_node_in(node, i), wide);
        if (!spatial) operands[i] = ont_build_reshape(b, operands[i], i == X ? &flat : &entries);
    }
    uint32_t n = is_training(node) ? 3 : 1;
    ont_node *norm = ont_build_node(b, "", "BatchNormalization", operands, RUNNING_VAR + 1, n);
    if (norm) b->status = ont_attr_set_int(b->graph, norm, "training_mode", is_training(node));
    if (b->status == ONT_OK)
        b->status = ont_attr_set_float(b->graph, norm, "epsilon", ont_attr_float(node, "epsilon", 1e-5));
    if (b->status == ONT_OK)
        b->status = ont_attr_set_float(b->graph, norm, "momentum", ont_attr_float(node, "momentum", 0.9));
    if (!ont_build_done(b, norm)) return;
    for (uint32_t i = Y; i < n; i++) {
        ont_value *v = norm->outputs[i];
        if (!spatial) v = ont_build_reshape(b, v, i == Y ? &shape : &channels);
        outputs[i] = ont_build_cast(b, v, ont_node_in(node, i == Y ? X : RUNNING_MEAN)->dtype);
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

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *x = &ont_node_in(node, X)->shape;
    bn_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (bn_state){.n = x->dims[0], .c = x->dims[1], .d = ont_shape_count_range(x, 2, x->rank),
                    .eps = ont_attr_float(node, "epsilon", 1e-5), .momentum = ont_attr_float(node, "momentum", 0.9),
                    .training = is_training(node), .relu = ont_attr_int(node, "relu", 0) != 0,
                    .loops = ont_simd_batchnorm(ont_node_in(node, X)->dtype)};
    out->state = s;
    return ONT_OK;
}

static void *result(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

static const void *operand(const ont_call *call, uint32_t index)
{
    return index < call->node->n_inputs ? call->in[index] : NULL;
}

/* ---- reference ---- */

/* Channels [first, last). Sums are kept in double: a channel can hold millions of entries. */
#define BATCHNORM(suffix, type) \
    static void forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const bn_state *s = call->state; \
        const type *scale = call->in[SCALE], *bias = call->in[BIAS], *old_mean = call->in[RUNNING_MEAN]; \
        const type *old_var = call->in[RUNNING_VAR], *residual = operand(call, RESIDUAL); \
        type *new_mean = result(call, NEW_MEAN), *new_var = result(call, NEW_VAR); \
        type *saved_mean = result(call, SAVED_MEAN), *saved_inv = result(call, SAVED_INV); \
        for (int64_t c = first; c < last; c++) { \
            double mean = (double)old_mean[c], var = (double)old_var[c]; \
            if (s->training) { \
                double sum = 0, square = 0, count = (double)(s->n * s->d); \
                for (int64_t n = 0; n < s->n; n++) { \
                    const type *x = (const type *)call->in[X] + (n * s->c + c) * s->d; \
                    double part = 0; \
                    for (int64_t i = 0; i < s->d; i++) part += (double)x[i]; \
                    sum += part; \
                } \
                mean = sum / count; \
                for (int64_t n = 0; n < s->n; n++) { \
                    const type *x = (const type *)call->in[X] + (n * s->c + c) * s->d; \
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
                    type v = (((const type *)call->in[X])[at + i] - m) * a + bias[c]; \
                    if (residual) v += residual[at + i]; \
                    ((type *)call->out[Y])[at + i] = s->relu && v < 0 ? 0 : v; \
                } \
            } \
        } \
    } \
    /* (x, scale, mean, inv_std, dy, y, bias) -> dx, dscale, dbias */ \
    static void backward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const bn_state *s = call->state; \
        const type *x = call->in[0], *scale = call->in[1], *mean = call->in[2], *inv = call->in[3], *dy = call->in[4]; \
        const type *y = operand(call, GRAD_Y), *bias = operand(call, GRAD_BIAS); \
        type *dx = result(call, 0), *dscale = result(call, 1), *dbias = result(call, 2); \
        for (int64_t c = first; c < last; c++) { \
            double sum = 0, dot = 0, count = (double)(s->n * s->d); \
            type a = (type)((double)inv[c] * (double)scale[c]); \
            for (int64_t n = 0; n < s->n; n++) { \
                int64_t at = (n * s->c + c) * s->d; \
                for (int64_t i = 0; i < s->d; i++) { \
                    bool on = y ? y[at + i] > 0 : !bias || (x[at + i] - mean[c]) * a + bias[c] > 0; \
                    double g = on ? (double)dy[at + i] : 0; \
                    sum += g; \
                    dot += g * (double)(x[at + i] - mean[c]); \
                } \
            } \
            if (dscale) dscale[c] = count > 0 ? (type)(dot * (double)inv[c]) : 0; /* not 0 * NaN */ \
            if (dbias) dbias[c] = (type)sum; \
            type factor = scale[c] * inv[c]; \
            type shift = s->training ? (type)(sum / count) : 0; \
            type slope = s->training ? (type)(dot * (double)inv[c] * (double)inv[c] / count) : 0; \
            for (int64_t n = 0; dx && n < s->n; n++) { \
                int64_t at = (n * s->c + c) * s->d; \
                for (int64_t i = 0; i < s->d; i++) { \
                    bool on = y ? y[at + i] > 0 : !bias || (x[at + i] - mean[c]) * a + bias[c] > 0; \
                    dx[at + i] = factor * ((on ? dy[at + i] : 0) - shift - (x[at + i] - mean[c]) * slope); \
                } \
            } \
        } \
    }
BATCHNORM(f32, float)
BATCHNORM(f64, double)

static int64_t grain(const bn_state *s)
{
    return 16384 / (s->n * s->d + 1) + 1;
}

static ont_status forward_ref(const ont_call *call)
{
    const bn_state *s = call->state;
    ont_parallel(s->c, grain(s), call->node->outputs[Y]->dtype == ONT_FLOAT32 ? forward_f32 : forward_f64,
                 (void *)call);
    return ONT_OK;
}

static ont_status backward_ref(const ont_call *call)
{
    const bn_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ont_parallel(s->c, grain(s), f32 ? backward_f32 : backward_f64, (void *)call);
    return ONT_OK;
}

/*
 * ---- with the loops of the processor: a few channels at a time, so many that they lie in the cache, where all passes
 * but the first find them, and that their rows are long enough for the processor to fetch ahead ----
 */

enum { GROUP = 16, CACHE_BYTES = 1 << 19 };

static const void *entry_at(const void *data, int64_t index, size_t size)
{
    return data ? (const char *)data + (size_t)index * size : NULL;
}

static double read_entry(const void *data, int64_t c, bool f32)
{
    return f32 ? (double)((const float *)data)[c] : ((const double *)data)[c];
}

static void write_entry(void *data, int64_t c, bool f32, double value)
{
    if (!data) return;
    if (f32)
        ((float *)data)[c] = (float)value;
    else
        ((double *)data)[c] = value;
}

static int64_t group_size(const bn_state *s, size_t size, int tensors)
{
    int64_t fit = CACHE_BYTES / ((int64_t)size * tensors * s->n * s->d + 1);
    return fit < 1 ? 1 : fit > GROUP ? GROUP : fit;
}

/* Sets mean and var of the channels [first, first + n). */
static void batch_statistics(const ont_call *call, int64_t first, int64_t n, size_t size, double *mean, double *var)
{
    const bn_state *s = call->state;
    double count = (double)(s->n * s->d), rest[GROUP];
    for (int64_t k = 0; k < n; k++) mean[k] = var[k] = rest[k] = 0;
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t k = 0; k < n; k++)
            s->loops->sum(entry_at(call->in[X], (i * s->c + first + k) * s->d, size), s->d, &mean[k]);
    for (int64_t k = 0; k < n; k++) mean[k] /= count;
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t k = 0; k < n; k++)
            s->loops->squares(entry_at(call->in[X], (i * s->c + first + k) * s->d, size), mean[k], s->d, &rest[k],
                              &var[k]);
    for (int64_t k = 0; k < n; k++) {
        var[k] = (var[k] - rest[k] * rest[k] / count) / count; /* the squares were around a rounded mean */
        if (var[k] < 0) var[k] = 0;
    }
}

static void forward_group(const ont_call *call, int64_t first, int64_t n, bool f32)
{
    const bn_state *s = call->state;
    size_t size = f32 ? sizeof(float) : sizeof(double);
    double mean[GROUP], var[GROUP];
    ont_channel channels[GROUP];
    if (s->training) batch_statistics(call, first, n, size, mean, var);
    for (int64_t k = 0; k < n; k++) {
        int64_t c = first + k;
        double old_mean = read_entry(call->in[RUNNING_MEAN], c, f32),
               old_var = read_entry(call->in[RUNNING_VAR], c, f32);
        if (s->training) {
            write_entry(result(call, NEW_MEAN), c, f32, s->momentum * old_mean + (1 - s->momentum) * mean[k]);
            write_entry(result(call, NEW_VAR), c, f32, s->momentum * old_var + (1 - s->momentum) * var[k]);
        } else {
            mean[k] = old_mean;
            var[k] = old_var;
        }
        double inv = 1 / sqrt(var[k] + s->eps);
        if (f32) inv = (double)(float)inv; /* as the gradient reads it */
        write_entry(result(call, SAVED_MEAN), c, f32, mean[k]);
        write_entry(result(call, SAVED_INV), c, f32, inv);
        channels[k] = (ont_channel){mean[k], inv * read_entry(call->in[SCALE], c, f32),
                                    read_entry(call->in[BIAS], c, f32)};
    }
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t k = 0; k < n; k++) {
            int64_t at = (i * s->c + first + k) * s->d;
            s->loops->apply(&channels[k], entry_at(call->in[X], at, size), entry_at(operand(call, RESIDUAL), at, size),
                            s->relu, (void *)entry_at(call->out[Y], at, size), s->d);
        }
}

static void forward_channels(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    bool f32 = ont_node_in(call->node, X)->dtype == ONT_FLOAT32;
    int64_t group = group_size(call->state, f32 ? sizeof(float) : sizeof(double), 1);
    for (int64_t c = first; c < last; c += group) forward_group(call, c, last - c < group ? last - c : group, f32);
}

static void backward_group(const ont_call *call, int64_t first, int64_t n, bool f32)
{
    const bn_state *s = call->state;
    size_t size = f32 ? sizeof(float) : sizeof(double);
    const void *x = call->in[GRAD_X], *dy = call->in[GRAD_DY], *y = operand(call, GRAD_Y),
               *bias = operand(call, GRAD_BIAS);
    ont_relu_mask mask = y ? ONT_MASK_Y : bias ? ONT_MASK_V : ONT_MASK_NONE;
    double count = (double)(s->n * s->d), sum[GROUP] = {0}, dot[GROUP] = {0};
    ont_channel channels[GROUP];
    for (int64_t k = 0; k < n; k++) {
        int64_t c = first + k;
        channels[k] = (ont_channel){read_entry(call->in[GRAD_MEAN], c, f32),
                                    read_entry(call->in[GRAD_INV], c, f32) * read_entry(call->in[GRAD_SCALE], c, f32),
                                    bias ? read_entry(bias, c, f32) : 0};
    }
    for (int64_t i = 0; i < s->n; i++)
        for (int64_t k = 0; k < n; k++) {
            int64_t at = (i * s->c + first + k) * s->d;
            s->loops->grad_sums(&channels[k], mask, entry_at(x, at, size), entry_at(y, at, size),
                                entry_at(dy, at, size), s->d, &sum[k], &dot[k]);
        }
    for (int64_t k = 0; k < n; k++) {
        double inv = read_entry(call->in[GRAD_INV], first + k, f32);
        write_entry(result(call, 1), first + k, f32, count > 0 ? dot[k] * inv : 0); /* not 0 * NaN */
        write_entry(result(call, 2), first + k, f32, sum[k]);
        sum[k] = s->training ? sum[k] / count : 0;
        dot[k] = s->training ? dot[k] * inv * inv / count : 0;
    }
    for (int64_t i = 0; result(call, 0) && i < s->n; i++)
        for (int64_t k = 0; k < n; k++) {
            int64_t at = (i * s->c + first + k) * s->d;
            s->loops->grad(&channels[k], mask, entry_at(x, at, size), entry_at(y, at, size), entry_at(dy, at, size),
                           channels[k].slope, sum[k], dot[k], (void *)entry_at(call->out[0], at, size), s->d);
        }
}

static void backward_channels(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    bool f32 = ont_node_in(call->node, GRAD_X)->dtype == ONT_FLOAT32;
    int64_t group = group_size(call->state, f32 ? sizeof(float) : sizeof(double), operand(call, GRAD_Y) ? 3 : 2);
    for (int64_t c = first; c < last; c += group) backward_group(call, c, last - c < group ? last - c : group, f32);
}

static ont_status forward_run(const ont_call *call)
{
    const bn_state *s = call->state;
    ont_parallel(s->c, grain(s), forward_channels, (void *)call);
    return ONT_OK;
}

static ont_status backward_run(const ont_call *call)
{
    const bn_state *s = call->state;
    ont_parallel(s->c, grain(s), backward_channels, (void *)call);
    return ONT_OK;
}

static void bn_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *mean, *inv;
    if (WANTS(RUNNING_MEAN) || WANTS(RUNNING_VAR)) {
        ont_grad_refuse(g, "with respect to running statistics");
        return;
    }
    b->status = ont_node_want_output(b->graph, g->node, SAVED_MEAN, &mean);
    if (b->status == ONT_OK) b->status = ont_node_want_output(b->graph, g->node, SAVED_INV, &inv);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, g->node, "saves_statistics", 1);
    if (b->status == ONT_OK) b->status = bn_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {I(X), I(SCALE), mean, inv, GO(Y)};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "BatchNormGrad", operands, 5, 3);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (!ont_build_done(b, node)) return;
    GI(X, node->outputs[0]);
    GI(SCALE, node->outputs[1]);
    GI(BIAS, node->outputs[2]);
}

static ont_status fused_infer(ont_graph *g, ont_node *node)
{
    const ont_value *x = ont_node_in(node, X), *residual = ont_node_in(node, RESIDUAL);
    if (residual && (residual->dtype != x->dtype || !ont_shape_equal(&residual->shape, &x->shape)))
        return ont_fail(ONT_EINVAL, "the residual must be as the input");
    return bn_infer(g, node);
}

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    const ont_value *x = ont_node_in(node, GRAD_X), *y = ont_node_in(node, GRAD_Y),
                    *bias = ont_node_in(node, GRAD_BIAS);
    if (bias && (bias->dtype != x->dtype || !ont_shape_equal(&bias->shape, &ont_node_in(node, GRAD_SCALE)->shape)))
        return ont_fail(ONT_EINVAL, "the bias must be as the scale");
    if (y && (y->dtype != x->dtype || !ont_shape_equal(&y->shape, &x->shape)))
        return ont_fail(ONT_EINVAL, "y must be as the input");
    return ont_infer_norm_grad(g, node);
}

/* A channel is written when all that its sums need has been read. */
enum { FORWARD_INPLACE = 1 << X | 1 << RESIDUAL, GRAD_INPLACE = 1 << GRAD_X | 1 << GRAD_DY | 1 << GRAD_Y };

static const ont_kernel forward_kernels[] = {
    {.name = "batchnorm_simd", .accept = accept_float, .prepare = prepare, .run = forward_run,
     .inplace = FORWARD_INPLACE},
    {.name = "batchnorm_ref", .accept = accept_float, .prepare = prepare, .run = forward_ref,
     .inplace = FORWARD_INPLACE},
};
static const ont_kernel grad_kernels[] = {
    {.name = "batchnorm_grad_simd", .accept = accept_float, .prepare = prepare, .run = backward_run,
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
                                     .max_inputs = 7, .attributes = BN_ATTRIBUTES, .infer = grad_infer,
                                     ONT_KERNELS(grad_kernels)};
