/*
 * CumSum and CumProd along an axis, from either end, with or without the element itself; and the gradient of CumProd.
 */
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"

typedef struct scan_state {
    int64_t outer, n, inner; /* x is (outer, n, inner) */
    bool product, exclusive, reverse;
    ont_dtype dtype;
} scan_state;

static ont_status scan_axis(const ont_node *node, int *axis)
{
    const ont_value *x = ont_node_in(node, 0);
    int64_t given;
    int n;
    size_t count;
    const int64_t *kept = ont_attr_ints(node, "axis", &count); /* CumProdGrad has it so */
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

static const char *scan_accept(const ont_node *node)
{
    switch (ont_node_in(node, 0)->dtype) {
    case ONT_FLOAT32:
    case ONT_FLOAT64:
    case ONT_INT32:
    case ONT_INT64:
    case ONT_UINT32:
    case ONT_UINT64: return NULL;
    default: return "dtype is none of float, double, int32, int64, uint32, uint64";
    }
}

static ont_status scan_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    scan_state *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(scan_axis(node, &axis));
    *s = (scan_state){.outer = ont_shape_count_range(&x->shape, 0, axis), .n = x->shape.dims[axis],
                      .inner = ont_shape_count_range(&x->shape, axis + 1, x->shape.rank),
                      .product = !strncmp(node->op->name, "CumProd", 7), .exclusive = ont_attr_int(node, "exclusive",
                              0),
                      .reverse = ont_attr_int(node, "reverse", 0), .dtype = x->dtype};
    out->state = s;
    return ONT_OK;
}

/* Line i of outer * inner; floats are summed in double, so that float32 keeps its last digits over long axes. */
#define SCAN_LINE(suffix, type, acc_type) \
    static void scan_##suffix(const scan_state *s, const void *in, void *out, int64_t line) \
    { \
        int64_t base = line / s->inner * s->n * s->inner + line % s->inner, step = s->reverse ? -s->inner : s->inner; \
        const type *x = (const type *)in + base + (s->reverse ? (s->n - 1) * s->inner : 0); \
        type *y = (type *)out + base + (s->reverse ? (s->n - 1) * s->inner : 0); \
        acc_type acc = s->product ? 1 : 0; \
        for (int64_t i = 0; i < s->n; i++, x += step, y += step) { \
            type v = *x; \
            if (s->exclusive) *y = (type)acc; \
            acc = s->product ? acc * v : acc + v; \
            if (!s->exclusive) *y = (type)acc; \
        } \
    }
SCAN_LINE(f32, float, double)
SCAN_LINE(f64, double, double)
SCAN_LINE(u32, uint32_t, uint32_t)
SCAN_LINE(u64, uint64_t, uint64_t)

static void scan_lines(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const scan_state *s = call->state;
    for (int64_t i = first; i < last; i++) switch (s->dtype) {
        case ONT_FLOAT32: scan_f32(s, call->in[0], call->out[0], i); break;
        case ONT_FLOAT64: scan_f64(s, call->in[0], call->out[0], i); break;
        case ONT_INT32:
        case ONT_UINT32: scan_u32(s, call->in[0], call->out[0], i); break;
        default: scan_u64(s, call->in[0], call->out[0], i); break;
        }
}

static ont_status scan_run(const ont_call *call)
{
    const scan_state *s = call->state;
    if (s->n) ont_parallel(s->outer * s->inner, 16384 / s->n + 1, scan_lines, (void *)call);
    return ONT_OK;
}

/* The adjoint of a running sum is the running sum from the other end. */
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
    {.name = "scan_ref", .accept = scan_accept, .prepare = scan_prepare, .run = scan_run, .inplace = 1},
};
const ont_op ont_op_CumSum = {.domain = "", .name = "CumSum", .since = 11, .min_inputs = 2, .max_inputs = 2,
                              .nondiff_inputs = 2, .attributes = "exclusive:i reverse:i", .infer = scan_infer,
                              .grad = cumsum_grad, ONT_KERNELS(scan_kernels)};
const ont_op ont_op_CumProd = {.domain = "", .name = "CumProd", .since = 26, .min_inputs = 2, .max_inputs = 2,
                               .nondiff_inputs = 2, .attributes = "exclusive:i reverse:i", .infer = scan_infer,
                               .grad = cumprod_grad, ONT_KERNELS(scan_kernels)};

/* ---- CumProdGrad(x, dy): dx_k = sum over i >= k of dy_i times the product of x_j, j <= i, j not k ---- */

/*
 * dx_k = (x_0 ... x_{k-1}) S_k with S_k = dy_k + x_{k+1} S_{k+1}: no division, so zeros need no care. Exclusive: output
 * i + 1 is the product up to x_i, so its gradient takes the place of dy_i.
 */
#define PROD_GRAD_LINE(suffix, type) \
    static void prod_grad_##suffix(const scan_state *s, const void *in, const void *grad, void *out, int64_t line) \
    { \
        int64_t base = line / s->inner * s->n * s->inner + line % s->inner, step = s->reverse ? -s->inner : s->inner; \
        int64_t start = base + (s->reverse ? (s->n - 1) * s->inner : 0), shift = s->exclusive; \
        const type *x = (const type *)in + start, *dy = (const type *)grad + start; \
        type *dx = (type *)out + start; \
        double tail = 0, before = 1; \
        for (int64_t k = s->n - 1; k >= 0; k--) { \
            double own = k + shift < s->n ? (double)dy[(k + shift) * step] : 0; \
            tail = own + (k + 1 < s->n ? (double)x[(k + 1) * step] * tail : 0); \
            dx[k * step] = (type)tail; \
        } \
        for (int64_t k = 0; k < s->n; k++) { \
            dx[k * step] = (type)(before * (double)dx[k * step]); \
            before *= (double)x[k * step]; \
        } \
    }
PROD_GRAD_LINE(f32, float)
PROD_GRAD_LINE(f64, double)

static void prod_grad_lines(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const scan_state *s = call->state;
    for (int64_t i = first; i < last; i++)
        (s->dtype == ONT_FLOAT32 ? prod_grad_f32 : prod_grad_f64)(s, call->in[0], call->in[1], call->out[0], i);
}

static ont_status prod_grad_run(const ont_call *call)
{
    const scan_state *s = call->state;
    if (s->n) ont_parallel(s->outer * s->inner, 8192 / s->n + 1, prod_grad_lines, (void *)call);
    return ONT_OK;
}

static const ont_kernel prod_grad_kernels[] = {
    {.name = "cum_prod_grad_ref", .accept = ont_accept_float, .prepare = scan_prepare, .run = prod_grad_run},
};
const ont_op ont_op_CumProdGrad = {.domain = ONT_DOMAIN, .name = "CumProdGrad", .since = 1, .min_inputs = 2,
                                   .max_inputs = 2, .attributes = "axis:I exclusive:i reverse:i", .infer = scan_infer,
                                   ONT_KERNELS(prod_grad_kernels)};
