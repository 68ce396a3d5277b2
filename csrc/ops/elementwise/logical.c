/*
 * Where, logical operators, Clip, IsNaN: elementwise operators whose operands differ in dtype.
 */
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "base/parallel.h"
#include "ops/support/broadcast.h"
#include "ops/elementwise/tile_program.h"
#include "simd/simd.h"

static ont_status prepare_bcast(const ont_node *node, ont_arena *arena, ont_prepared *out, int n_in)
{
    ont_bcast *b = ont_arena_alloc(arena, sizeof *b);
    if (!b) return ONT_ENOMEM;
    ont_bcast_init(b, node, n_in);
    out->state = b;
    return ONT_OK;
}

static ont_status prepare2(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_bcast(node, arena, out, 2);
}

static ont_status prepare3(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_bcast(node, arena, out, 3);
}

/* ---- Where ---- */

static ont_status where_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *c, *x, *y;
    ONT_TRY(ont_need_input(node, 0, &c));
    ONT_TRY(ont_need_input(node, 1, &x));
    ONT_TRY(ont_need_input(node, 2, &y));
    if (c->dtype != ONT_BOOL) return ont_fail(ONT_ETYPE, "condition is %s, expected bool", ont_dtype_name(c->dtype));
    if (x->dtype != y->dtype)
        return ont_fail(ONT_ETYPE, "branches are %s and %s", ont_dtype_name(x->dtype), ont_dtype_name(y->dtype));
    ont_shape shape;
    ONT_TRY(ont_shape_broadcast(&x->shape, &y->shape, &shape));
    ONT_TRY(ont_shape_broadcast(&c->shape, &shape, &shape));
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static void where_row(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    ont_simd()->where(*(const size_t *)context, (const uint8_t *)at[1], at[2], at[3], b->inner_stride + 1, at[0], n);
}

static bool where_tile(const ont_node *node, ont_tile_step *step)
{
    ont_dtype dtype = node->outputs[0]->dtype;
    *step = (ont_tile_step){.kind = ONT_TILE_WHERE, .in = dtype, .out = dtype, .n_operands = 3};
    return ont_dtype_size(dtype) <= 8;
}

static ont_status where_run(const ont_call *call)
{
    size_t size = ont_dtype_size(call->node->outputs[0]->dtype);
    ont_bcast_run(call->state,
                  (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1], (char *)call->in[2]},
                  where_row, &size);
    return ONT_OK;
}

static void where_grad(ont_grad *g)
{
    ont_value *zero = ont_build_scalar(&g->b, GO(0)->dtype, 0);
    if (WANTS(1)) GI(1, ont_build3(&g->b, "Where", I(0), GO(0), zero));
    if (WANTS(2)) GI(2, ont_build3(&g->b, "Where", I(0), zero, GO(0)));
}

static const ont_kernel where_kernels[] = {
    {.name = "where_ref", .accept = ont_accept_any, .prepare = prepare3, .run = where_run, .inplace = 6},
};

const ont_op ont_op_Where = {.domain = "", .name = "Where", .since = 9, .min_inputs = 3, .max_inputs = 3,
                             .nondiff_inputs = 1, .attributes = "", .infer = where_infer, .grad = where_grad,
                             .tile = where_tile, .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(where_kernels)};

/* ---- logic on bool ---- */

typedef enum logic { LOGIC_AND, LOGIC_OR, LOGIC_XOR } logic;

static void logic_row(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    const uint8_t *x = (const uint8_t *)at[1], *y = (const uint8_t *)at[2];
    uint8_t *out = (uint8_t *)at[0];
    int64_t sx = b->inner_stride[1], sy = b->inner_stride[2];
    if (!sx) { /* one element and a row: the operators commute */
        const uint8_t *swapped = x;
        x = y, y = swapped;
        sx = sy, sy = 0;
    }
/* Loops of their own for dense rows, which the compiler vectorises; `out` may equal an operand. */
#define LOGIC(operator) \
    if (sx == 1 && sy == 1) \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) out[i] = (x[i] != 0) operator(y[i] != 0); \
    else if (sx == 1 && sy == 0) { \
        bool one = *y; \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) out[i] = (x[i] != 0) operator one; \
    } else \
        for (int64_t i = 0; i < n; i++) out[i] = (x[i * sx] != 0) operator(y[i * sy] != 0)
    switch (*(const logic *)context) {
    case LOGIC_AND: LOGIC(&); break;
    case LOGIC_OR: LOGIC(|); break;
    case LOGIC_XOR: LOGIC(^); break;
    }
#undef LOGIC
}

static ont_status logic_run(const ont_call *call)
{
    logic kind = ONT_IS(call->node, And) ? LOGIC_AND : ONT_IS(call->node, Or) ? LOGIC_OR : LOGIC_XOR;
    ont_bcast_run(call->state, (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1]}, logic_row,
                  &kind);
    return ONT_OK;
}

static ont_status logic_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (x->dtype != ONT_BOOL) return ont_fail(ONT_ETYPE, "input is %s, expected bool", ont_dtype_name(x->dtype));
    return ont_infer_broadcast(g, node);
}

static const ont_kernel logic_kernels[] = {
    {.name = "logic_ref", .accept = ont_accept_any, .prepare = prepare2, .run = logic_run, .inplace = 3},
};

#define LOGIC(name_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 7, .min_inputs = 2, .max_inputs = 2, \
                                   .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = logic_infer, \
                                   .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(logic_kernels)}
LOGIC(And);
LOGIC(Or);
LOGIC(Xor);

static void not_part(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const uint8_t *x = call->in[0];
    uint8_t *out = call->out[0];
    _Pragma("GCC ivdep") for (int64_t i = first; i < last; i++) out[i] = !x[i];
}

static ont_status not_run(const ont_call *call)
{
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 65536, not_part, (void *)call);
    return ONT_OK;
}

static const ont_kernel not_kernels[] = {{.name = "not_ref", .accept = ont_accept_any, .run = not_run, .inplace = 1}};

const ont_op ont_op_Not = {.domain = "", .name = "Not", .since = 1, .min_inputs = 1, .max_inputs = 1,
                           .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = logic_infer,
                           .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(not_kernels)};

/* ---- IsNaN ---- */

static ont_status isnan_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    return ont_infer_out(node, 0, ONT_BOOL, &x->shape);
}

static const char *isnan_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return ont_dtype_is_float(dtype) || ont_dtype_is_narrow_float(dtype) ? NULL : "dtype is not a float";
}

static void isnan_part(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    ont_dtype dtype = ont_node_in(call->node, 0)->dtype;
    const float *x = call->in[0];
    uint8_t *out = call->out[0];
    if (dtype == ONT_FLOAT32)
        for (int64_t i = first; i < last; i++) out[i] = x[i] != x[i];
    else
        for (int64_t i = first; i < last; i++) out[i] = isnan(ont_number_at(call->in[0], dtype, i)) != 0;
}

static ont_status isnan_run(const ont_call *call)
{
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 16384, isnan_part, (void *)call);
    return ONT_OK;
}

static const ont_kernel isnan_kernels[] = {{.name = "isnan_ref", .accept = isnan_accept, .run = isnan_run}};

const ont_op ont_op_IsNaN = {.domain = "", .name = "IsNaN", .since = 9, .min_inputs = 1, .max_inputs = 1,
                             .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = isnan_infer,
                             ONT_KERNELS(isnan_kernels)};

/* ---- Clip ---- */

static ont_status clip_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    for (uint32_t i = 1; i < node->n_inputs; i++) {
        const ont_value *bound = ont_node_in(node, i);
        if (bound && (bound->dtype != x->dtype || ont_shape_count(&bound->shape) != 1))
            return ont_fail(ONT_EINVAL, "bound %u must be one %s", i, ont_dtype_name(x->dtype));
    }
    return ont_infer_same(g, node);
}

static const char *clip_accept(const ont_node *node)
{
    ont_dtype d = ont_node_in(node, 0)->dtype;
    return d == ONT_FLOAT32 || d == ONT_FLOAT64 || d == ONT_INT32 || d == ONT_INT64 || d == ONT_UINT64 ? NULL : "dtype";
}

#define CLIP(name, type, lowest, highest) \
    static void clip_##name(const ont_call *call, int64_t n) \
    { \
        const type *x = call->in[0]; \
        type *y = call->out[0]; \
        uint32_t given = call->node->n_inputs; \
        type low = given > 1 && call->in[1] ? *(const type *)call->in[1] : (type)lowest; \
        type high = given > 2 && call->in[2] ? *(const type *)call->in[2] : (type)highest; \
        for (int64_t i = 0; i < n; i++) { \
            type v = x[i]; \
            v = v < low ? low : v; \
            y[i] = v > high ? high : v; \
        } \
    }
CLIP(f32, float, ont_attr_float(call->node, "min", -INFINITY), ont_attr_float(call->node, "max", INFINITY))
CLIP(f64, double, ont_attr_float(call->node, "min", -INFINITY), ont_attr_float(call->node, "max", INFINITY))
CLIP(i32, int32_t, INT32_MIN, INT32_MAX)
CLIP(i64, int64_t, INT64_MIN, INT64_MAX)
CLIP(u64, uint64_t, 0, UINT64_MAX)

static ont_status clip_run(const ont_call *call)
{
    int64_t n = ont_shape_count(&call->node->outputs[0]->shape);
    switch (call->node->outputs[0]->dtype) {
    case ONT_FLOAT32: clip_f32(call, n); break;
    case ONT_FLOAT64: clip_f64(call, n); break;
    case ONT_INT32: clip_i32(call, n); break;
    case ONT_UINT64: clip_u64(call, n); break;
    default: clip_i64(call, n); break;
    }
    return ONT_OK;
}

/* As in torch.clamp: 1 inside the bounds, the bounds included. */
static void clip_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *low = I(1), *high = I(2), *dy = GO(0), *zero = ont_build_scalar(b, I(0)->dtype, 0);
    const ont_attr *a = ont_attr_find(g->node, "min", ONT_ATTR_FLOAT),
                   *c = ont_attr_find(g->node, "max", ONT_ATTR_FLOAT);
    if (!low && a) low = ont_build_scalar(b, I(0)->dtype, a->f);
    if (!high && c) high = ont_build_scalar(b, I(0)->dtype, c->f);
    if (low) dy = ont_build3(b, "Where", ont_build2(b, "GreaterOrEqual", I(0), low), dy, zero);
    if (high) dy = ont_build3(b, "Where", ont_build2(b, "LessOrEqual", I(0), high), dy, zero);
    GI(0, dy);
}

static ont_status hard_tanh_infer(ont_graph *g, ont_node *node)
{
    ont_value *bound;
    ONT_TRY(ont_need_input(node, 1, &bound));
    ONT_TRY(ont_need_input(node, 2, &bound));
    return clip_infer(g, node);
}

/* As in PyTorch's hardtanh and relu6: 1 between the bounds, and for NaN; 0 at the bounds. */
static void hard_tanh_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *zero = ont_build_scalar(b, I(0)->dtype, 0), *dy = GO(0);
    dy = ont_build3(b, "Where", ont_build2(b, "LessOrEqual", O(0), I(1)), zero, dy);
    GI(0, ont_build3(b, "Where", ont_build2(b, "GreaterOrEqual", O(0), I(2)), zero, dy));
}

static const ont_kernel clip_kernels[] = {{.name = "clip_ref", .accept = clip_accept, .run = clip_run, .inplace = 1}};

/* (x, min, max): Clip with another gradient at the bounds. */
const ont_op ont_op_HardTanh = {.domain = ONT_DOMAIN, .name = "HardTanh", .since = 1, .min_inputs = 3, .max_inputs = 3,
                                .flags = ONT_OP_PUBLIC, .nondiff_inputs = 6, .attributes = "", .infer = hard_tanh_infer,
                                .grad = hard_tanh_grad, .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(clip_kernels)};
const ont_op ont_op_Clip = {.domain = "", .name = "Clip", .since = 6, .min_inputs = 1, .max_inputs = 3,
                            .nondiff_inputs = 6, .attributes = "min:f max:f", .infer = clip_infer, .grad = clip_grad,
                            .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(clip_kernels)};
