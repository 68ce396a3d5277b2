/*
 * LayerNormalization, and its gradient from the saved mean and inverse standard deviation. A row is all elements of the
 * axes from `axis` on.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"
#include "simd/simd.h"

typedef struct layernorm_state {
    int64_t rows, n;
    double eps;
    const ont_simd_table *simd;
    int parts; /* gradient: row ranges, each with partial sums of its own */
} layernorm_state;

static ont_status layout(const ont_node *node, const ont_shape *x, layernorm_state *s, int *axis)
{
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", -1), x->rank, axis));
    s->rows = ont_shape_count_range(x, 0, *axis);
    s->n = ont_shape_count_range(x, *axis, x->rank);
    s->eps = ont_attr_float(node, "epsilon", 1e-5);
    return ONT_OK;
}

/* Outputs: y, and mean and inv_std, one for each row. */
static ont_status layernorm_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    layernorm_state s;
    int axis;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(layout(node, &x->shape, &s, &axis));
    /* Statistics are computed and saved in float32, the default of stash_type, and for float64 in float64, which is
     * more. */
    int64_t stash = ont_attr_int(node, "stash_type", ONT_FLOAT32);
    if (stash != ONT_FLOAT32 && stash != (int64_t)x->dtype)
        return ont_fail(ONT_EUNSUPPORTED, "attribute stash_type is %lld, expected %d (float) or the input's type",
                        (long long)stash, ONT_FLOAT32);
    for (uint32_t i = 1; i < node->n_inputs; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (v && (v->dtype != x->dtype || ont_shape_count(&v->shape) != s.n))
            return ont_fail(ONT_EUNSUPPORTED, "scale or bias '%s' must have %lld entries of %s", v->name,
                            (long long)s.n, ont_dtype_name(x->dtype));
    }
    ont_shape saved = x->shape;
    for (int d = axis; d < saved.rank; d++) saved.dims[d] = 1;
    ont_dtype statistics = ont_dtype_is_half(x->dtype) ? ONT_FLOAT32 : x->dtype;
    ONT_TRY(ont_infer_out(node, 1, statistics, &saved));
    ONT_TRY(ont_infer_out(node, 2, statistics, &saved));
    return ont_infer_out(node, 0, x->dtype, &x->shape);
}

static const char *accept_f32(const ont_node *node)
{
    return ont_node_in(node, 0)->dtype == ONT_FLOAT32 ? NULL : "dtype";
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    layernorm_state *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(layout(node, &ont_node_in(node, 0)->shape, s, &axis));
    s->simd = ont_simd();
    out->state = s;
    return ONT_OK;
}

static const void *operand(const ont_call *call, uint32_t index)
{
    return index < call->node->n_inputs ? call->in[index] : NULL;
}

static void *result(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

static void forward_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const layernorm_state *s = call->state;
    const ont_layernorm_params norm = {.scale = operand(call, 1), .bias = operand(call, 2), .eps = (float)s->eps,
                                       .n = s->n};
    const float *x = call->in[0];
    float *y = call->out[0], *mean = result(call, 1), *inv = result(call, 2);
    for (int64_t i = first; i < last; i++)
        s->simd->layernorm(&norm, x + i * s->n, y + i * s->n, mean ? mean + i : NULL, inv ? inv + i : NULL);
}

static ont_status forward_simd(const ont_call *call)
{
    const layernorm_state *s = call->state;
    ont_parallel(s->rows, 8192 / (s->n + 1) + 1, forward_rows, (void *)call);
    return ONT_OK;
}

#define FORWARD_REF(suffix, type, sqrt_) \
    static void forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const layernorm_state *s = call->state; \
        const type *scale = operand(call, 1), *bias = operand(call, 2); \
        type *means = result(call, 1), *invs = result(call, 2); \
        for (int64_t r = first; r < last; r++) { \
            const type *x = (const type *)call->in[0] + r * s->n; \
            type *y = (type *)call->out[0] + r * s->n, mean = 0, var = 0; \
            for (int64_t i = 0; i < s->n; i++) mean += x[i] / (type)s->n; \
            for (int64_t i = 0; i < s->n; i++) var += (x[i] - mean) * (x[i] - mean) / (type)s->n; \
            type inv = 1 / sqrt_(var + (type)s->eps); \
            for (int64_t i = 0; i < s->n; i++) y[i] = (x[i] - mean) * inv * (scale ? scale[i] : 1) + \
                                               (bias ? bias[i] : 0); \
            if (means) means[r] = mean; \
            if (invs) invs[r] = inv; \
        } \
    }
FORWARD_REF(f32, float, sqrtf)
FORWARD_REF(f64, double, sqrt)

static ont_status forward_ref(const ont_call *call)
{
    const layernorm_state *s = call->state;
    bool wide = call->node->outputs[0]->dtype == ONT_FLOAT64;
    ont_parallel(s->rows, 8192 / (s->n + 1) + 1, wide ? forward_f64 : forward_f32, (void *)call);
    return ONT_OK;
}

static const ont_kernel forward_kernels[] = {
    {.name = "layernorm_f32_rows", .accept = accept_f32, .prepare = prepare, .run = forward_simd},
    {.name = "layernorm_ref", .accept = ont_accept_float, .prepare = prepare, .run = forward_ref},
};

/* ---- gradient: (x, scale, mean, inv_std, dy) -> dx, dscale, dbias ---- */

/* dscale and dbias have partial sums for each range of rows, which are added in order: the result does not depend on
 * the number of threads. */
enum { PARTS = 8 };

static ont_status grad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(prepare(node, arena, out));
    layernorm_state *s = out->state;
    s->parts = s->rows < PARTS ? (int)s->rows : PARTS;
    out->work_bytes = (size_t)s->parts * 2 * (size_t)s->n * sizeof(float);
    return ONT_OK;
}

static void grad_parts(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const layernorm_state *s = call->state;
    const float *x = call->in[0], *mean = call->in[2], *inv = call->in[3], *dy = call->in[4];
    float *dx = call->out[0];
    bool sums = result(call, 1) || result(call, 2);
    for (int64_t part = first; part < last; part++) {
        float *dscale = sums ? (float *)call->work + part * 2 * s->n : NULL, *dbias = sums ? dscale + s->n : NULL;
        if (sums) memset(dscale, 0, (size_t)(2 * s->n) * sizeof *dscale);
        const ont_layernorm_grad_params norm = {.scale = call->in[1], .dscale = dscale, .dbias = dbias, .n = s->n};
        for (int64_t r = s->rows * part / s->parts; r < s->rows * (part + 1) / s->parts; r++)
            s->simd->layernorm_grad(&norm, x + r * s->n, mean[r], inv[r], dy + r * s->n, dx ? dx + r * s->n : NULL);
    }
}

static ont_status grad_simd(const ont_call *call)
{
    const layernorm_state *s = call->state;
    float *dscale = result(call, 1), *dbias = result(call, 2);
    ont_parallel(s->parts, 8192 * s->parts / (s->rows * s->n + 1) + 1, grad_parts, (void *)call);
    if (dscale) memset(dscale, 0, (size_t)s->n * sizeof *dscale);
    if (dbias) memset(dbias, 0, (size_t)s->n * sizeof *dbias);
    for (int64_t part = 0; part < s->parts; part++) {
        const float *sums = (const float *)call->work + part * 2 * s->n;
        if (dscale) s->simd->add_to(dscale, sums, s->n);
        if (dbias) s->simd->add_to(dbias, sums + s->n, s->n);
    }
    return ONT_OK;
}

#define GRAD_REF(suffix, type) \
    static void grad_##suffix(const ont_call *call) \
    { \
        const layernorm_state *s = call->state; \
        const type *scale = call->in[1], *means = call->in[2], *invs = call->in[3]; \
        type *dx = call->out[0], *dscale = result(call, 1), *dbias = result(call, 2); \
        if (dscale) memset(dscale, 0, (size_t)s->n * sizeof *dscale); \
        if (dbias) memset(dbias, 0, (size_t)s->n * sizeof *dbias); \
        for (int64_t r = 0; r < s->rows; r++) { \
            const type *x = (const type *)call->in[0] + r * s->n, *dy = (const type *)call->in[4] + r * s->n; \
            type g_mean = 0, gx_mean = 0, inv = invs[r]; \
            for (int64_t i = 0; i < s->n; i++) { \
                type g = dy[i] * (scale ? scale[i] : 1), hat = (x[i] - means[r]) * inv; \
                g_mean += g / (type)s->n; \
                gx_mean += g * hat / (type)s->n; \
                if (dscale) dscale[i] += dy[i] * hat; \
                if (dbias) dbias[i] += dy[i]; \
            } \
            for (int64_t i = 0; dx && i < s->n; i++) \
                dx[r * s->n + i] = inv * (dy[i] * (scale ? scale[i] : 1) - g_mean - (x[i] - means[r]) * inv * \
                                          gx_mean); \
        } \
    }
GRAD_REF(f32, float)
GRAD_REF(f64, double)

static ont_status grad_ref(const ont_call *call)
{
    (ont_node_in(call->node, 0)->dtype == ONT_FLOAT32 ? grad_f32 : grad_f64)(call);
    return ONT_OK;
}

static void layernorm_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *mean, *inv;
    for (uint32_t i = 1; i < g->node->n_outputs; i++)
        if (g->out_grads[i]) {
            ont_grad_refuse(g, "from its mean or deviation");
            return;
        }
    /* The forward node saves mean and inv_std, also where the model has no such outputs. */
    b->status = ont_node_ensure_output(b->graph, g->node, 1, &mean);
    if (b->status == ONT_OK) b->status = ont_node_ensure_output(b->graph, g->node, 2, &inv);
    if (b->status == ONT_OK) b->status = layernorm_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {I(0), I(1), mean, inv, GO(0)};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "LayerNormGrad", operands, 5, 3);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (!ont_build_done(b, node)) return;
    GI(0, node->outputs[0]);
    if (WANTS(1)) GI(1, ont_build_reshape(b, node->outputs[1], &I(1)->shape));
    if (WANTS(2)) GI(2, ont_build_reshape(b, node->outputs[2], &I(2)->shape));
}

static const ont_kernel grad_kernels[] = {
    {.name = "layernorm_grad_f32_rows", .accept = accept_f32, .prepare = grad_prepare, .run = grad_simd},
    {.name = "layernorm_grad_ref", .accept = ont_accept_float, .prepare = prepare, .run = grad_ref},
};

const ont_op ont_op_LayerNormalization = {.domain = "", .name = "LayerNormalization", .since = 17, .min_inputs = 2,
                                          .max_inputs = 3, .flags = ONT_OP_MEMORY_BOUND,
                                          .attributes = "axis:i epsilon:f stash_type:i", .infer = layernorm_infer,
                                          .grad = layernorm_grad, .rows = ONT_ROWS_NORM,
                                          ONT_KERNELS(forward_kernels)};
const ont_op ont_op_LayerNormGrad = {.domain = ONT_DOMAIN, .name = "LayerNormGrad", .since = 1, .min_inputs = 5,
                                     .max_inputs = 5,
                                     .attributes = "axis:i epsilon:f stash_type:i",
                                     .infer = ont_infer_norm_grad, ONT_KERNELS(grad_kernels)};
