/*
 * Rotate: rotary position embedding (RoPE) as one node, built by passes/fuse_rotary.c. With (a, b) the halves of a row
 * of x, y = x * cos + (-b, a) * sin; with attribute "back" the transpose of that map. cos and sin broadcast to x, and
 * have the last dim of x. They have its dtype, or are float32 beside 16 bits: then y is rounded once, and the CPU gets
 * Casts (passes/promote.c). Source: Su et al., RoFormer, 2021, in the variant that rotates halves.
 */
#include "ops/support/compose.h"

#include "base/parallel.h"
#include "simd/simd.h"

enum { GRAIN = 8192 }; /* elements that are worth a thread */

typedef struct rope_state {
    int64_t rows, half;
    int rank; /* number of dims of x but the last */
    int64_t dims[ONT_MAX_RANK], cos[ONT_MAX_RANK], sin[ONT_MAX_RANK]; /* strides of cos and sin, in elements */
    bool back, wide; /* back: the transpose; wide: float64 */
} rope_state;

static ont_status rope_infer(ont_graph *g, ont_node *node)
{
    ont_value *x, *angle;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &angle));
    ont_dtype dtype = angle->dtype;
    if (dtype != x->dtype && !(ont_dtype_is_half(x->dtype) && dtype == ONT_FLOAT32))
        return ont_fail(ONT_EINVAL, "input 1 is %s, and x is %s", ont_dtype_name(dtype), ont_dtype_name(x->dtype));
    int64_t n = x->shape.rank ? x->shape.dims[x->shape.rank - 1] : 1;
    if (n % 2) return ont_fail(ONT_EINVAL, "a row of %lld elements has no halves", (long long)n);
    for (uint32_t i = 1; i < 3; i++) {
        ont_shape shape;
        ONT_TRY(ont_need_input(node, i, &angle));
        ONT_TRY(ont_shape_broadcast(&x->shape, &angle->shape, &shape));
        bool fits = angle->shape.rank && angle->shape.dims[angle->shape.rank - 1] == n;
        if (angle->dtype != dtype || !fits || !ont_shape_equal(&shape, &x->shape))
            return ont_fail(ONT_EINVAL, "input %u does not broadcast to the rows of x", (unsigned)i);
    }
    return ont_infer_same(g, node);
}

/* R(x) = (-b, a) for a row x = (a, b) */
static ont_value *rotate_half(ont_builder *b, ont_value *x)
{
    ont_value *half[2];
    if (!x) return NULL;
    ont_build_split_even(b, x, x->shape.rank - 1, 2, half);
    ont_value *parts[] = {ont_build1(b, "Neg", half[1]), half[0]};
    return parts[0] ? ont_build_concat(b, parts, 2, x->shape.rank - 1) : NULL;
}

/* Gradients of cos and sin are computed in their dtype. */
static void rope_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_dtype dtype = ont_node_in(g->node, 1)->dtype;
    bool back = ont_attr_int(g->node, "back", 0) != 0;
    if (WANTS(0)) {
        ont_node *node = ont_build_node(b, ONT_DOMAIN, "Rotate", (ont_value *[]){GO(0), I(1), I(2)}, 3, 1);
        if (node) b->status = ont_attr_set_int(b->graph, node, "back", !back);
        GI(0, ont_build_done(b, node));
    }
    if (!WANTS(1) && !WANTS(2)) return;
    ont_value *x = ont_build_cast(b, I(0), dtype), *dy = ont_build_cast(b, GO(0), dtype);
    if (WANTS(1)) GI(1, ont_build2(b, "Mul", dy, x));
    /* With back, y = x cos + R'(x sin), so the gradient of sin is R(dy) x; without, y = x cos + R(x) sin, and it is dy
     * R(x). */
    if (WANTS(2)) {
        if (back)
            dy = rotate_half(b, dy);
        else
            x = rotate_half(b, x);
        GI(2, ont_build2(b, "Mul", dy, x));
    }
}

static ont_status rope_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    rope_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (rope_state){.rank = x->shape.rank - 1, .back = ont_attr_int(node, "back", 0) != 0,
                        .wide = x->dtype == ONT_FLOAT64};
    int64_t n = x->shape.dims[s->rank];
    s->half = n / 2;
    s->rows = n ? ont_shape_count(&x->shape) / n : 0;
    for (int d = 0; d < s->rank; d++) s->dims[d] = x->shape.dims[d];
    ont_shape_broadcast_strides(&ont_node_in(node, 1)->shape, &x->shape, s->cos);
    ont_shape_broadcast_strides(&ont_node_in(node, 2)->shape, &x->shape, s->sin);
    out->state = s;
    return ONT_OK;
}

static int64_t offset_of(const rope_state *s, const int64_t *strides, int64_t row)
{
    int64_t offset = 0;
    for (int d = s->rank - 1; d >= 0; row /= s->dims[d--]) offset += row % s->dims[d] * strides[d];
    return offset;
}

typedef struct rope_job {
    const ont_call *call;
    const ont_simd_table *simd;
} rope_job;

static void rope_rows(void *context, int64_t first, int64_t last)
{
    const rope_job *job = context;
    const rope_state *s = job->call->state;
    for (int64_t row = first; row < last; row++) {
        int64_t at = row * s->half * 2, c = offset_of(s, s->cos, row), t = offset_of(s, s->sin, row);
        const void *const *in = job->call->in;
        if (s->wide)
            job->simd->rotate_wide((const double *)in[0] + at, (const double *)in[1] + c, (const double *)in[2] + t,
                                   (double *)job->call->out[0] + at, s->half, s->back);
        else
            job->simd->rotate((const float *)in[0] + at, (const float *)in[1] + c, (const float *)in[2] + t,
                              (float *)job->call->out[0] + at, s->half, s->back);
    }
}

static ont_status run(const ont_call *call, const ont_simd_table *simd)
{
    const rope_state *s = call->state;
    rope_job job = {call, simd};
    if (s->rows) ont_parallel(s->rows, GRAIN / (2 * s->half) + 1, rope_rows, &job);
    return ONT_OK;
}

static ont_status rope_run(const ont_call *call) { return run(call, ont_simd()); }
static ont_status rope_ref(const ont_call *call) { return run(call, ont_simd_plain()); }

static const ont_kernel rope_kernels[] = {
    {.name = "rotate_simd", .accept = ont_accept_float, .prepare = rope_prepare, .run = rope_run, .inplace = 1},
    {.name = "rotate_ref", .accept = ont_accept_float, .prepare = rope_prepare, .run = rope_ref, .inplace = 1},
};
const ont_op ont_op_Rotate = {.domain = ONT_DOMAIN, .name = "Rotate", .since = 1, .min_inputs = 3, .max_inputs = 3,
                              .flags = ONT_OP_MEMORY_BOUND, .attributes = "back:i", .infer = rope_infer,
                              .grad = rope_grad, .rows = ONT_ROWS_ELEMENTWISE,
                              ONT_KERNELS(rope_kernels)};
