/*
 * RandomNormal, RandomUniform, Bernoulli and Multinomial: element e takes word e of a Philox stream, so results do not
 * depend on the number of threads. The Like forms want the shape of their input alone, and are expanded.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "base/parallel.h"
#include "ops/random/fill.h"
#include "ops/random/random.h"
#include "simd/math.h"

static ont_status out_dtype(const ont_node *node, ont_dtype otherwise, ont_dtype *dtype)
{
    int64_t given = ont_attr_int(node, "dtype", otherwise);
    *dtype = given > 0 && given < ONT_DTYPE_COUNT ? (ont_dtype)given : ONT_UNDEFINED;
    if (ont_dtype_is_float(*dtype)) return ONT_OK;
    bool counts = ONT_IS(node, Bernoulli), draws = ONT_IS(node, Multinomial);
    if (counts && (ont_dtype_is_int(*dtype) || *dtype == ONT_BOOL)) return ONT_OK;
    if (draws && (*dtype == ONT_INT32 || *dtype == ONT_INT64)) return ONT_OK;
    return ont_fail(ONT_ETYPE, "attribute dtype is %" PRId64 " (%s), which is not supported", given,
                    ont_dtype_name(*dtype));
}

static ont_status shape_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    size_t n;
    const int64_t *dims = ont_attr_ints(node, "shape", &n);
    ont_dtype dtype;
    ONT_TRY(out_dtype(node, ONT_FLOAT32, &dtype));
    if (!ont_attr_find(node, "shape", ONT_ATTR_INTS) || n > ONT_MAX_RANK)
        return ont_fail(ONT_EINVAL, "attribute shape is missing, or has more than %d entries", ONT_MAX_RANK);
    ont_shape shape = ont_shape_of((int)n, dims);
    return ont_infer_out(node, 0, dtype, &shape);
}

static ont_status like_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ont_dtype dtype;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(out_dtype(node, x->dtype, &dtype));
    return ont_infer_out(node, 0, dtype, &x->shape);
}

/* The node without its input: nothing has to compute x, or to keep it. */
static void like_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    static const char *const floats[] = {"mean", "scale", "low", "high", "seed"};
    const ont_value *y = node->outputs[0];
    const char *name = ONT_IS(node, RandomNormalLike) ? "RandomNormal" : "RandomUniform";
    ont_node *now = ont_build_node(b, "", name, NULL, 0, 1);
    if (!now) return;
    b->status = ont_attr_set_ints(b->graph, now, "shape", y->shape.dims, (size_t)y->shape.rank);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, now, "dtype", y->dtype);
    if (b->status == ONT_OK)
        b->status = ont_attr_set_int(b->graph, now, "rng_stream", ont_attr_int(node, "rng_stream", 0));
    for (size_t i = 0; i < sizeof floats / sizeof *floats && b->status == ONT_OK; i++)
        if (ont_attr_find(node, floats[i], ONT_ATTR_FLOAT))
            b->status = ont_attr_set_float(b->graph, now, floats[i], ont_attr_float(node, floats[i], 0));
    outputs[0] = ont_build_done(b, now);
}

void ont_fill_read(const ont_node *node, ont_fill *s)
{
    const ont_value *x = ont_node_in(node, 0);
    *s = (ont_fill){.kind = ONT_IS(node, RandomNormal) ? ONT_FILL_NORMAL
                            : ONT_IS(node, Bernoulli)  ? ONT_FILL_BERNOULLI
                                                       : ONT_FILL_UNIFORM,
                    .stream = ont_random_stream(node), .dtype = node->outputs[0]->dtype,
                    .x = x ? x->dtype : ONT_UNDEFINED};
    s->first = s->kind == ONT_FILL_NORMAL ? ont_attr_float(node, "mean", 0) : ont_attr_float(node, "low", 0);
    s->second = s->kind == ONT_FILL_NORMAL ? ont_attr_float(node, "scale", 1) : ont_attr_float(node, "high", 1);
}

static ont_status fill_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_fill *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ont_fill_read(node, s);
    out->state = s;
    return ONT_OK;
}

/* Uniform in [0, 1): 24 bits for float32 and narrower, 53 for float64, so that rounding never gives 1. */
static double uniform(const philox4 *words, ont_dtype dtype)
{
    if (dtype == ONT_FLOAT64) return (double)((uint64_t)words->x[0] << 21 | words->x[1] >> 11) * 0x1p-53;
    int bits = dtype == ONT_BFLOAT16 ? 8 : dtype == ONT_FLOAT16 ? 11 : 24;
    return ldexp((double)(words->x[0] >> (32 - bits)), -bits);
}

/* Box-Muller transform; the uniform number of the radius is in (0, 1]. */
static double normal(const philox4 *words)
{
    double radius = ((double)((uint64_t)words->x[0] << 21 | words->x[1] >> 11) + 1) * 0x1p-53;
    double turn = (double)((uint64_t)words->x[2] << 21 | words->x[3] >> 11) * 0x1p-53;
    return sqrt(-2 * log(radius)) * cos(6.28318530717958647692 * turn);
}

/* Elements [4 first, 4 last) in float32: one Philox counter gives four uniform numbers, or two pairs of normal ones. */
typedef struct fast_job {
    const ont_call *call;
    int64_t n;
} fast_job;

static void four_normals(const philox4 *words, float *v)
{
    for (int pair = 0; pair < 2; pair++) {
        float radius = ((float)(words->x[2 * pair] >> 8) + 1) * 0x1p-24f,
            turn = (float)(words->x[2 * pair + 1] >> 8) * 0x1p-24f;
        float length = sqrtf(-2 * logf(radius));
        v[2 * pair] = length * cosf(6.2831853f * turn);
        v[2 * pair + 1] = length * sinf(6.2831853f * turn);
    }
}

static void fill_fast(void *context, int64_t first, int64_t last)
{
    const fast_job *job = context;
    const ont_fill *s = job->call->state;
    float low = (float)s->first, width = s->kind == ONT_FILL_NORMAL ? (float)s->second : (float)(s->second - s->first);
    for (int64_t i = first; i < last; i++) {
        philox4 words = philox(job->call->seed, s->stream, (uint64_t)i);
        float v[4];
        if (s->kind == ONT_FILL_NORMAL)
            four_normals(&words, v);
        else
            for (int k = 0; k < 4; k++) v[k] = (float)(words.x[k] >> 8) * 0x1p-24f;
        for (int k = 0; k < 4 && 4 * i + k < job->n; k++) ((float *)job->call->out[0])[4 * i + k] = low + width * v[k];
    }
}

static void fill_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_fill *s = call->state;
    for (int64_t i = first; i < last; i++) {
        philox4 words = philox(call->seed, s->stream, (uint64_t)i);
        double v;
        if (s->kind == ONT_FILL_BERNOULLI)
            v = uniform(&words, ONT_FLOAT64) < ont_number_at(call->in[0], s->x, i);
        else if (s->kind == ONT_FILL_NORMAL)
            v = s->first + s->second * normal(&words);
        else
            v = s->first + (s->second - s->first) * uniform(&words, s->dtype);
        ont_number_put(call->out[0], s->dtype, i, v);
    }
}

static ont_status fill_run(const ont_call *call)
{
    const ont_fill *s = call->state;
    fast_job job = {call, ont_shape_count(&call->node->outputs[0]->shape)};
    if (s->dtype == ONT_FLOAT32 && s->kind != ONT_FILL_BERNOULLI) {
        ont_parallel((job.n + 3) / 4, 1024, fill_fast, &job);
        return ONT_OK;
    }
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 1024, fill_range, (void *)call);
    return ONT_OK;
}

/* ---- Multinomial: samples from softmax(log probabilities) ---- */

static ont_status multinomial_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ont_dtype dtype;
    int64_t samples = ont_attr_int(node, "sample_size", 1);
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(out_dtype(node, ONT_INT32, &dtype));
    if (ont_dtype_is_float(dtype)) return ont_fail(ONT_ETYPE, "attribute dtype is %s", ont_dtype_name(dtype));
    if (!ont_dtype_is_float(x->dtype) || x->shape.rank != 2 || !x->shape.dims[1] || samples < 1)
        return ont_fail(ONT_EINVAL, "rows of log probabilities and a sample_size of at least 1 are expected");
    ont_shape shape = ont_shape_of(2, (int64_t[]){x->shape.dims[0], samples});
    return ont_infer_out(node, 0, dtype, &shape);
}

static ont_status multinomial_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0), *y = call->node->outputs[0];
    int64_t rows = x->shape.dims[0], n = x->shape.dims[1], samples = y->shape.dims[1];
    uint64_t stream = ont_random_stream(call->node);
    for (int64_t r = 0; r < rows; r++) {
        double most = -INFINITY, total = 0;
        for (int64_t i = 0; i < n; i++) most = fmax(most, ont_number_at(call->in[0], x->dtype, r * n + i));
        for (int64_t i = 0; i < n; i++) total += exp(ont_number_at(call->in[0], x->dtype, r * n + i) - most);
        for (int64_t k = 0; k < samples; k++) {
            philox4 words = philox(call->seed, stream, (uint64_t)(r * samples + k));
            double left = uniform(&words, ONT_FLOAT64) * total;
            int64_t pick = -1, last = 0; /* last: the last class with a probability above 0, which takes what
                                          * rounding leaves */
            for (int64_t i = 0; i < n && pick < 0; i++) {
                double p = exp(ont_number_at(call->in[0], x->dtype, r * n + i) - most);
                if (p > 0) last = i;
                if (left < p) pick = i;
                left -= p;
            }
            ont_integer_put(call->out[0], y->dtype, r * samples + k, pick < 0 ? last : pick);
        }
    }
    return ONT_OK;
}

static const ont_kernel fill_kernels[] = {{.name = "fill_ref", .accept = ont_accept_any, .prepare = fill_prepare,
                                           .run = fill_run}};
static const ont_kernel multinomial_kernels[] = {{.name = "multinomial_ref", .accept = ont_accept_any,
                                                  .run = multinomial_run}};

#define RANDOM(name_, since_, n_, attributes_, infer_, ...) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = since_, .min_inputs = n_, .max_inputs = n_, \
                                   .attributes = attributes_ " seed:f rng_stream:i", .infer = infer_, __VA_ARGS__}
#define FLAGS .flags = ONT_OP_RANDOM | ONT_OP_NO_GRAD
RANDOM(RandomNormal, 1, 0, "dtype:i mean:f scale:f shape:I", shape_infer, FLAGS, ONT_KERNELS(fill_kernels));
RANDOM(RandomUniform, 1, 0, "dtype:i low:f high:f shape:I", shape_infer, FLAGS, ONT_KERNELS(fill_kernels));
RANDOM(RandomNormalLike, 1, 1, "dtype:i mean:f scale:f", like_infer, FLAGS, .expand = like_expand);
RANDOM(RandomUniformLike, 1, 1, "dtype:i low:f high:f", like_infer, FLAGS, .expand = like_expand);
RANDOM(Bernoulli, 15, 1, "dtype:i", like_infer, FLAGS | ONT_OP_ZERO_DERIVATIVE, ONT_KERNELS(fill_kernels));
RANDOM(Multinomial, 7, 1, "dtype:i sample_size:i", multinomial_infer, FLAGS, ONT_KERNELS(multinomial_kernels));
