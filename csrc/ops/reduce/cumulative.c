/*
 * CumSum and CumProd along an axis, in either direction, inclusive or exclusive, and the gradient of CumProd.
 */
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"
#include "ops/reduce/cumulative.h"

static ont_status scan_axis(const ont_node *node, int *axis)
{
    const ont_value *x = ont_node_in(node, 0);
    int64_t given;
    int n;
    size_t count;
    const int64_t *kept = ont_attr_ints(node, "axis", &count); /* CumProdGrad has the axis as attribute */
    if (kept && count == 1) return ont_shape_axis(kept[0], x->shape.rank, axis);
    ONT_TRY(ont_const_ints(node, 1, NULL, &given, 1, &n));
    if (n != 1) return ont_fail(ONT_EINVAL, "axis must be one integer");
    return ont_shape_axis(given, x->shape.rank, axis);
}

static ont_status scan_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    int axis;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(scan_axis(node, &axis));
    return ont_infer_same(g, node);
}

const char *ont_scan_accept(const ont_node *node)
{
    switch (ont_node_in(node, 0)->dtype) {
    case ONT_FLOAT32:
    case ONT_FLOAT64:
    case ONT_INT32:
    case ONT_INT64:
    case ONT_UINT32:
    case ONT_UINT64: return NULL;
    default: return "dtype is not one of float, double, int32, int64, uint32, uint64";
    }
}

ont_status ont_scan_read(const ont_node *node, ont_scan *s)
{
    const ont_value *x = ont_node_in(node, 0);
    int axis;
    ONT_TRY(scan_axis(node, &axis));
    *s = (ont_scan){.outer = ont_shape_count_range(&x->shape, 0, axis), .n = x->shape.dims[axis],
                    .inner = ont_shape_count_range(&x->shape, axis + 1, x->shape.rank),
                    .product = !ONT_IS(node, CumSum), .exclusive = ont_attr_int(node, "exclusive", 0) != 0,
                    .reverse = ont_attr_int(node, "reverse", 0) != 0, .dtype = (int32_t)x->dtype};
    return ONT_OK;
}

static ont_status scan_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    out->state = ont_arena_alloc(arena, sizeof(ont_scan));
    return out->state ? ont_scan_read(node, out->state) : ONT_ENOMEM;
}

enum { LANES = 64 }; /* lines that are walked at once */

/* Threads take groups of lines: neighbours in memory, or, along the last axis, whole rows. */
static int64_t groups_of(const ont_scan *s)
{
    int64_t lanes = s->inner > 1 ? s->inner : s->outer, each = s->inner > 1 ? LANES : LANES / 8;
    return (lanes + each - 1) / each * (s->inner > 1 ? s->outer : 1);
}

typedef struct scan_group {
    int64_t start, stride; /* offset of the first element; from element to element of a line */
    int64_t apart, lanes;  /* from line to line; number of lines */
} scan_group;

static scan_group group_at(const ont_scan *s, int64_t group)
{
    scan_group g = {.stride = s->reverse ? -s->inner : s->inner};
    if (s->inner > 1) {
        int64_t groups = (s->inner + LANES - 1) / LANES, lane = group % groups * LANES;
        g.start = group / groups * s->n * s->inner + lane;
        g.apart = 1;
        g.lanes = s->inner - lane < LANES ? s->inner - lane : LANES;
    } else {
        int64_t row = group * (LANES / 8);
        g.start = row * s->n;
        g.apart = s->n;
        g.lanes = s->outer - row < LANES / 8 ? s->outer - row : LANES / 8;
    }
    if (s->reverse) g.start += (s->n - 1) * s->inner;
    return g;
}

/* Runs over lane c at offset `at`; the compiler vectorises neighbouring lines. `in` may equal `out`. */
#define EACH_LANE(g, body) \
    if ((g).apart == 1) \
        _Pragma("GCC ivdep") for (int64_t c = 0; c < (g).lanes; c++) { const int64_t at = c; body } \
    else \
        for (int64_t c = 0; c < (g).lanes; c++) { const int64_t at = c * (g).apart; body }

/* Floats are summed in double, so that float32 keeps its precision over long axes. */
#define SCAN_GROUP(suffix, type, acc_type) \
    static void scan_##suffix(const ont_scan *s, const void *in, void *out, scan_group g) \
    { \
        const type *x = (const type *)in + g.start; \
        type *y = (type *)out + g.start; \
        acc_type acc[LANES]; \
        for (int64_t c = 0; c < g.lanes; c++) acc[c] = s->product ? 1 : 0; \
        for (int64_t i = 0; i < s->n; i++, x += g.stride, y += g.stride) { \
            if (s->exclusive && s->product) { \
                EACH_LANE(g, type v = x[at]; y[at] = (type)acc[c]; acc[c] *= v;) \
            } else if (s->exclusive) { \
                EACH_LANE(g, type v = x[at]; y[at] = (type)acc[c]; acc[c] += v;) \
            } else if (s->product) { \
                EACH_LANE(g, acc[c] *= x[at]; y[at] = (type)acc[c];) \
            } else { \
                EACH_LANE(g, acc[c] += x[at]; y[at] = (type)acc[c];) \
            } \
        } \
    }
SCAN_GROUP(f32, float, double)
SCAN_GROUP(f64, double, double)
SCAN_GROUP(u32, uint32_t, uint32_t)
SCAN_GROUP(u64, uint64_t, uint64_t)

static void scan_groups(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_scan *s = call->state;
    for (int64_t i = first; i < last; i++) {
        scan_group g = group_at(s, i);
        switch (s->dtype) {
        case ONT_FLOAT32: scan_f32(s, call->in[0], call->out[0], g); break;
        case ONT_FLOAT64: scan_f64(s, call->in[0], call->out[0], g); break;
        case ONT_INT32:
        case ONT_UINT32: scan_u32(s, call->in[0], call->out[0], g); break;
        default: scan_u64(s, call->in[0], call->out[0], g); break;
        }
    }
}

static ont_status scan_run(const ont_call *call)
{
    const ont_scan *s = call->state;
    if (s->n && s->outer && s->inner) ont_parallel(groups_of(s), 16384 / (s->n * 8) + 1, scan_groups, (void *)call);
    return ONT_OK;
}

/* The adjoint of a running sum is the running sum in the other direction. */
static void cumsum_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_node *node = ont_build_node(b, "", "CumSum", (ont_value *[]){GO(0), I(1)}, 2, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "exclusive", ont_attr_int(g->node, "exclusive", 0));
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_int(b->graph, node, "reverse", !ont_attr_int(g->node, "reverse", 0));
    GI(0, ont_build_done(b, node));
}

static void cumprod_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    int axis;
    if ((b->status = scan_axis(g->node, &axis)) != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "CumProdGrad", (ont_value *[]){I(0), GO(0)}, 2, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, node, "axis", &(int64_t){axis}, 1);
    GI(0, ont_build_done(b, node));
}

static const ont_kernel scan_kernels[] = {
    {.name = "scan_ref", .accept = ont_scan_accept, .prepare = scan_prepare, .run = scan_run, .inplace = 1},
};
const ont_op ont_op_CumSum = {.domain = "", .name = "CumSum", .since = 11, .min_inputs = 2, .max_inputs = 2,
                              .nondiff_inputs = 2, .attributes = "exclusive:i reverse:i", .infer = scan_infer,
                              .grad = cumsum_grad, ONT_KERNELS(scan_kernels)};
const ont_op ont_op_CumProd = {.domain = "", .name = "CumProd", .since = 26, .min_inputs = 2, .max_inputs = 2,
                               .nondiff_inputs = 2, .attributes = "exclusive:i reverse:i", .infer = scan_infer,
                               .grad = cumprod_grad, ONT_KERNELS(scan_kernels)};
/* The same for models of any opset. */
const ont_op ont_op_TorchCumProd = {.domain = ONT_DOMAIN, .name = "TorchCumProd", .since = 1, .min_inputs = 2,
                                     .max_inputs = 2, .flags = ONT_OP_PUBLIC, .nondiff_inputs = 2,
                                     .attributes = "exclusive:i reverse:i", .infer = scan_infer, .grad = cumprod_grad,
                                     ONT_KERNELS(scan_kernels)};

/* ---- CumProdGrad(x, dy): dx_k = sum over i >= k of dy_i * product of x_j over j <= i, j != k ---- */

/*
 * dx_k = (x_0 ... x_{k-1}) S_k with S_k = dy_k + x_{k+1} S_{k+1}: without a division, so zeros need no special case.
 * Exclusive: output i + 1 is the product up to x_i, so its gradient stands for dy_i.
 */
#define PROD_GRAD_GROUP(suffix, type) \
    static void prod_grad_##suffix(const ont_scan *s, const void *in, const void *grad, void *out, scan_group g) \
    { \
        const type *x = (const type *)in + g.start, *dy = (const type *)grad + g.start; \
        type *dx = (type *)out + g.start; \
        double tail[LANES], before[LANES]; \
        for (int64_t c = 0; c < g.lanes; c++) before[c] = 1; \
        for (int64_t k = 0; k < s->n; k++) { \
            const type *own = x + k * g.stride; \
            type *to = dx + k * g.stride; \
            EACH_LANE(g, to[at] = (type)before[c]; before[c] *= (double)own[at];) \
        } \
        for (int64_t k = s->n - 1, shift = s->exclusive; k >= 0; k--) { \
            const type *next = x + (k + 1) * g.stride, *own = dy + (k + shift) * g.stride; \
            type *to = dx + k * g.stride; \
            if (k + shift >= s->n) { \
                EACH_LANE(g, to[at] = 0;) \
            } else if (k + shift == s->n - 1) { \
                EACH_LANE(g, tail[c] = (double)own[at]; to[at] = (type)((double)to[at] * tail[c]);) \
            } else { \
                EACH_LANE(g, tail[c] = (double)own[at] + (double)next[at] * tail[c]; \
                          to[at] = (type)((double)to[at] * tail[c]);) \
            } \
        } \
    }
PROD_GRAD_GROUP(f32, float)
PROD_GRAD_GROUP(f64, double)

static void prod_grad_groups(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_scan *s = call->state;
    for (int64_t i = first; i < last; i++)
        (s->dtype == ONT_FLOAT32 ? prod_grad_f32 : prod_grad_f64)(s, call->in[0], call->in[1], call->out[0],
                                                                 group_at(s, i));
}

static ont_status prod_grad_run(const ont_call *call)
{
    const ont_scan *s = call->state;
    if (s->n && s->outer && s->inner) ont_parallel(groups_of(s), 8192 / (s->n * 8) + 1, prod_grad_groups, (void *)call);
    return ONT_OK;
}

static const ont_kernel prod_grad_kernels[] = {
    {.name = "cum_prod_grad_ref", .accept = ont_accept_float, .prepare = scan_prepare, .run = prod_grad_run},
};
const ont_op ont_op_CumProdGrad = {.domain = ONT_DOMAIN, .name = "CumProdGrad", .since = 1, .min_inputs = 2,
                                   .max_inputs = 2, .attributes = "axis:I exclusive:i reverse:i", .infer = scan_infer,
                                   ONT_KERNELS(prod_grad_kernels)};
