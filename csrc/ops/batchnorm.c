/*
 * BatchNormalization over (N, C, D...): training mode from batch statistics, inference mode from running ones.
 *
 * Outputs: y, running_mean, running_var (training), then our own: mean and inverse deviation of the batch, which the
 * gradient reads. Running statistics follow the specification: running * momentum + batch * (1 - momentum), biased.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"

enum { X, SCALE, BIAS, RUNNING_MEAN, RUNNING_VAR };             /* inputs */
enum { Y, NEW_MEAN, NEW_VAR, SAVED_MEAN, SAVED_INV }; /* outputs */

typedef struct bn_state {
    int64_t n, c, d;
    double eps, momentum;
    bool training;
} bn_state;

static bool is_training(const ont_node *node)
{
    return ont_attr_int(node, "training_mode", 0) != 0;
}

static bool is_read(const ont_graph *g, const ont_value *v)
{
    return v && (v->uses || ont_value_is_output(g, v));
}

/*
 * Before opset 14 the number of outputs said whether statistics are the batch's; it is put down as the attribute, since
 * a gradient adds outputs of our own. Outputs that mean something else, or nothing, are refused.
 */
static ont_status settle_mode(ont_graph *g, ont_node *node)
{
    if (!ont_attr_find(node, "training_mode", ONT_ATTR_INT))
        ONT_TRY(ont_attr_set_int(g, node, "training_mode", node->version < 14 && node->n_outputs > 1));
    if (!is_training(node) && (is_read(g, ont_node_out(node, NEW_MEAN)) || is_read(g, ont_node_out(node, NEW_VAR))))
        return ont_fail(ONT_EINVAL, "running statistics as outputs without training_mode");
    bool own = ont_attr_int(node, "saves_statistics", 0);
    if (!own && (is_read(g, ont_node_out(node, SAVED_MEAN)) || is_read(g, ont_node_out(node, SAVED_INV))))
        return ont_fail(ONT_EUNSUPPORTED, "the outputs saved_mean and saved_var");
    return ONT_OK;
}

static ont_status bn_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(settle_mode(g, node));
    ONT_TRY(ont_need_input(node, X, &x));
    if (x->shape.rank < 2) return ont_fail(ONT_EINVAL, "input has rank %d, at least 2 is expected", x->shape.rank);
    ont_shape channels = ont_shape_of(1, &x->shape.dims[1]);
    for (uint32_t i = SCALE; i <= RUNNING_VAR; i++) {
        ont_value *v;
        ONT_TRY(ont_need_input(node, i, &v));
        if (v->dtype != x->dtype || !ont_shape_equal(&v->shape, &channels))
            return ont_fail(ONT_EINVAL, "'%s' must have %lld entries of %s", v->name, (long long)channels.dims[0],
                            ont_dtype_name(x->dtype));
    }
    for (uint32_t i = NEW_MEAN; i < node->n_outputs; i++) ONT_TRY(ont_infer_out(node, i, x->dtype, &channels));
    return ont_infer_out(node, Y, x->dtype, &x->shape);
}

static const char *accept_float(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "dtype";
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *x = &ont_node_in(node, X)->shape;
    bn_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (bn_state){.n = x->dims[0], .c = x->dims[1], .d = ont_shape_count_range(x, 2, x->rank),
                    .eps = ont_attr_float(node, "epsilon", 1e-5), .momentum = ont_attr_float(node, "momentum", 0.9),
                    .training = is_training(node)};
    out->state = s;
    return ONT_OK;
}

static void *result(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

/* Channels [first, last). Sums are kept in double: a channel can hold millions of entries. */
#define BATCHNORM(suffix, type) \
    static void forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const bn_state *s = call->state; \
        const type *scale = call->in[SCALE], *bias = call->in[BIAS], *old_mean = call->in[RUNNING_MEAN]; \
        const type *old_var = call->in[RUNNING_VAR]; \
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
            type a = (type)(inv * (double)scale[c]), b = (type)((double)bias[c] - mean * inv * (double)scale[c]); \
            for (int64_t n = 0; n < s->n; n++) { \
                int64_t at = (n * s->c + c) * s->d; \
                for (int64_t i = 0; i < s->d; i++) ((type *)call->out[Y])[at + i] = ((const type *)call->in[X])[at + i] * a + b; \
            } \
        } \
    } \
    /* (x, scale, mean, inv_std, dy) -> dx, dscale, dbias */ \
    static void backward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const bn_state *s = call->state; \
        const type *x = call->in[0], *scale = call->in[1], *mean = call->in[2], *inv = call->in[3], *dy = call->in[4]; \
        type *dx = result(call, 0), *dscale = result(call, 1), *dbias = result(call, 2); \
        for (int64_t c = first; c < last; c++) { \
            double sum = 0, dot = 0, count = (double)(s->n * s->d); \
            for (int64_t n = 0; n < s->n; n++) { \
                int64_t at = (n * s->c + c) * s->d; \
                for (int64_t i = 0; i < s->d; i++) { \
                    sum += (double)dy[at + i]; \
                    dot += (double)dy[at + i] * (double)(x[at + i] - mean[c]); \
                } \
            } \
            if (dscale) dscale[c] = (type)(dot * (double)inv[c]); \
            if (dbias) dbias[c] = (type)sum; \
            type factor = scale[c] * inv[c]; \
            type shift = s->training ? (type)(sum / count) : 0; \
            type slope = s->training ? (type)(dot * (double)inv[c] * (double)inv[c] / count) : 0; \
            for (int64_t n = 0; dx && n < s->n; n++) { \
                int64_t at = (n * s->c + c) * s->d; \
                for (int64_t i = 0; i < s->d; i++) dx[at + i] = factor * (dy[at + i] - shift - (x[at + i] - mean[c]) * slope); \
            } \
        } \
    }
BATCHNORM(f32, float)
BATCHNORM(f64, double)

static int64_t grain(const bn_state *s)
{
    return 16384 / (s->n * s->d + 1) + 1;
}

static ont_status forward_run(const ont_call *call)
{
    const bn_state *s = call->state;
    ont_parallel(s->c, grain(s), call->node->outputs[Y]->dtype == ONT_FLOAT32 ? forward_f32 : forward_f64, (void *)call);
    return ONT_OK;
}

static ont_status backward_run(const ont_call *call)
{
    const bn_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ont_parallel(s->c, grain(s), f32 ? backward_f32 : backward_f64, (void *)call);
    return ONT_OK;
}

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *x = ont_node_in(node, 0), *scale = ont_node_in(node, 1);
    ONT_TRY(ont_infer_out(node, 0, x->dtype, &x->shape));
    ONT_TRY(ont_infer_out(node, 1, x->dtype, &scale->shape));
    return ont_infer_out(node, 2, x->dtype, &scale->shape);
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

static const ont_kernel forward_kernels[] = {
    {.name = "batchnorm_ref", .accept = accept_float, .prepare = prepare, .run = forward_run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "batchnorm_grad_ref", .accept = accept_float, .prepare = prepare, .run = backward_run},
};
const ont_op ont_op_BatchNormalization = {.domain = "", .name = "BatchNormalization", .since = 9, .min_inputs = 5,
                                          .max_inputs = 5, .nondiff_outputs = ~1ull,
                                          .attributes = "epsilon:f momentum:f training_mode:i saves_statistics:i",
                                          .infer = bn_infer, .grad = bn_grad, ONT_KERNELS(forward_kernels)};
const ont_op ont_op_BatchNormGrad = {.domain = ONT_DOMAIN, .name = "BatchNormGrad", .since = 1, .min_inputs = 5,
                                     .max_inputs = 5,
                                     .attributes = "epsilon:f momentum:f training_mode:i saves_statistics:i",
                                     .infer = grad_infer, ONT_KERNELS(grad_kernels)};
