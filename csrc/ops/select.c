/*
 * Where, logic, Cast, Clip, IsNaN: elementwise operators whose operands differ in dtype.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/broadcast.h"

static const char *accept_any(const ont_node *node)
{
    (void)node;
    return NULL;
}

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
    size_t size = *(const size_t *)context;
    const uint8_t *c = (const uint8_t *)at[1];
    int64_t sc = b->inner_stride[1], sx = b->inner_stride[2], sy = b->inner_stride[3];
    switch (size) {
#define ROW(bytes, type) \
    case bytes: { \
        type *out = (type *)at[0]; \
        const type *x = (const type *)at[2], *y = (const type *)at[3]; \
        for (int64_t i = 0; i < n; i++) out[i] = c[i * sc] ? x[i * sx] : y[i * sy]; \
        break; \
    }
        ROW(1, uint8_t)
        ROW(2, uint16_t)
        ROW(4, uint32_t)
        ROW(8, uint64_t)
#undef ROW
    default:
        for (int64_t i = 0; i < n; i++)
            memcpy(at[0] + (size_t)i * size, c[i * sc] ? at[2] + (size_t)(i * sx) * size : at[3] + (size_t)(i * sy) * size, size);
    }
}

static ont_status where_run(const ont_call *call)
{
    size_t size = ont_dtype_size(call->node->outputs[0]->dtype);
    ont_bcast_run(call->state, (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1], (char *)call->in[2]},
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
    {.name = "where_ref", .accept = accept_any, .prepare = prepare3, .run = where_run, .inplace = 6},
};

const ont_op ont_op_Where = {.domain = "", .name = "Where", .since = 9, .min_inputs = 3, .max_inputs = 3,
                             .nondiff_inputs = 1, .attributes = "", .infer = where_infer, .grad = where_grad,
                             ONT_KERNELS(where_kernels)};

/* ---- logic on bool ---- */

typedef enum logic { LOGIC_AND, LOGIC_OR, LOGIC_XOR } logic;

static void logic_row(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    const uint8_t *x = (const uint8_t *)at[1], *y = (const uint8_t *)at[2];
    uint8_t *out = (uint8_t *)at[0];
    int64_t sx = b->inner_stride[1], sy = b->inner_stride[2];
    switch (*(const logic *)context) {
    case LOGIC_AND:
        for (int64_t i = 0; i < n; i++) out[i] = x[i * sx] && y[i * sy];
        break;
    case LOGIC_OR:
        for (int64_t i = 0; i < n; i++) out[i] = x[i * sx] || y[i * sy];
        break;
    case LOGIC_XOR:
        for (int64_t i = 0; i < n; i++) out[i] = !x[i * sx] != !y[i * sy];
        break;
    }
}

static ont_status logic_run(const ont_call *call)
{
    const char *name = call->node->op->name;
    logic kind = !strcmp(name, "And") ? LOGIC_AND : !strcmp(name, "Or") ? LOGIC_OR : LOGIC_XOR;
    ont_bcast_run(call->state, (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1]}, logic_row, &kind);
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
    {.name = "logic_ref", .accept = accept_any, .prepare = prepare2, .run = logic_run, .inplace = 3},
};

#define LOGIC(name_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 7, .min_inputs = 2, .max_inputs = 2, \
                                   .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = logic_infer, \
                                   ONT_KERNELS(logic_kernels)}
LOGIC(And);
LOGIC(Or);
LOGIC(Xor);

static ont_status not_run(const ont_call *call)
{
    int64_t n = ont_shape_count(&call->node->outputs[0]->shape);
    const uint8_t *x = call->in[0];
    uint8_t *out = call->out[0];
    for (int64_t i = 0; i < n; i++) out[i] = !x[i];
    return ONT_OK;
}

static const ont_kernel not_kernels[] = {{.name = "not_ref", .accept = accept_any, .run = not_run, .inplace = 1}};

const ont_op ont_op_Not = {.domain = "", .name = "Not", .since = 1, .min_inputs = 1, .max_inputs = 1,
                           .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = logic_infer, ONT_KERNELS(not_kernels)};

/* ---- IsNaN ---- */

static ont_status isnan_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    return ont_infer_out(node, 0, ONT_BOOL, &x->shape);
}

static const char *accept_f32_f64(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "dtype";
}

static ont_status isnan_run(const ont_call *call)
{
    int64_t n = ont_shape_count(&call->node->outputs[0]->shape);
    uint8_t *out = call->out[0];
    if (ont_node_in(call->node, 0)->dtype == ONT_FLOAT32)
        for (int64_t i = 0; i < n; i++) out[i] = isnan(((const float *)call->in[0])[i]) != 0;
    else
        for (int64_t i = 0; i < n; i++) out[i] = isnan(((const double *)call->in[0])[i]) != 0;
    return ONT_OK;
}

static const ont_kernel isnan_kernels[] = {{.name = "isnan_ref", .accept = accept_f32_f64, .run = isnan_run}};

const ont_op ont_op_IsNaN = {.domain = "", .name = "IsNaN", .since = 9, .min_inputs = 1, .max_inputs = 1,
                             .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = isnan_infer,
                             ONT_KERNELS(isnan_kernels)};

/* ---- Cast ---- */

typedef void (*cast_loop)(const void *x, void *y, int64_t n);

/* Float to integer outside the range is undefined in C and in ONNX: it saturates here; NaN gives 0. */
#define CAST_LOOP(to_name, to, from_name, from) \
    static void cast_##from_name##_##to_name(const void *x, void *y, int64_t n) \
    { \
        const from *in = x; \
        to *out = y; \
        for (int64_t i = 0; i < n; i++) out[i] = CONVERT(to, in[i]); \
    }
#define INT_LIMITS(to) _Generic((to)0, int64_t: 0x1p63, int32_t: 0x1p31, int16_t: 0x1p15, int8_t: 0x1p7, default: 0.0)
#define FROM_FLOAT(to, v) \
    (INT_LIMITS(to) == 0.0 ? (to)(v) \
     : (v) >= INT_LIMITS(to) ? (to)(INT_LIMITS(to) == 0x1p63 ? INT64_MAX : (int64_t)INT_LIMITS(to) - 1) \
     : (v) < -INT_LIMITS(to) ? (to)(INT_LIMITS(to) == 0x1p63 ? INT64_MIN : -(int64_t)INT_LIMITS(to)) \
     : (v) != (v) ? (to)0 : (to)(v))
#define CONVERT(to, v) (_Generic((v), float: 1, double: 1, default: 0) ? (to)FROM_FLOAT(to, v) : (to)(v))
#define EACH_FROM(from_name, from, to_name, to) CAST_LOOP(to_name, to, from_name, from)

#define CAST_FROM_ALL(to_name, to) \
    EACH_FROM(FLOAT32, float, to_name, to) EACH_FROM(FLOAT64, double, to_name, to) EACH_FROM(INT64, int64_t, to_name, to) \
    EACH_FROM(INT32, int32_t, to_name, to) EACH_FROM(INT16, int16_t, to_name, to) EACH_FROM(INT8, int8_t, to_name, to) \
    EACH_FROM(UINT8, uint8_t, to_name, to) EACH_FROM(BOOL, bool, to_name, to)
CAST_FROM_ALL(FLOAT32, float)
CAST_FROM_ALL(FLOAT64, double)
CAST_FROM_ALL(INT64, int64_t)
CAST_FROM_ALL(INT32, int32_t)
CAST_FROM_ALL(INT16, int16_t)
CAST_FROM_ALL(INT8, int8_t)
CAST_FROM_ALL(UINT8, uint8_t)
CAST_FROM_ALL(BOOL, bool)

#define ROW_OF(to_name) \
    [ONT_##to_name] = {[ONT_FLOAT32] = cast_FLOAT32_##to_name, [ONT_FLOAT64] = cast_FLOAT64_##to_name, \
                       [ONT_INT64] = cast_INT64_##to_name, [ONT_INT32] = cast_INT32_##to_name, \
                       [ONT_INT16] = cast_INT16_##to_name, [ONT_INT8] = cast_INT8_##to_name, \
                       [ONT_UINT8] = cast_UINT8_##to_name, [ONT_BOOL] = cast_BOOL_##to_name}
static const cast_loop cast_loops[ONT_DTYPE_COUNT][ONT_DTYPE_COUNT] = {
    ROW_OF(FLOAT32), ROW_OF(FLOAT64), ROW_OF(INT64), ROW_OF(INT32), ROW_OF(INT16), ROW_OF(INT8), ROW_OF(UINT8), ROW_OF(BOOL),
};

/* 16-bit floats go through double (float16) or float (bfloat16, as torch rounds it), a piece at a time. */
static void load_half(const void *from, ont_dtype dtype, double *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (dtype == ONT_FLOAT16) {
            to[i] = (double)((const _Float16 *)from)[i];
        } else {
            uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
            float v;
            memcpy(&v, &bits, sizeof v);
            to[i] = (double)v;
        }
    }
}

static void store_half(const double *from, void *to, ont_dtype dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (dtype == ONT_FLOAT16) {
            ((_Float16 *)to)[i] = (_Float16)from[i];
        } else {
            float v = (float)from[i];
            uint32_t bits;
            memcpy(&bits, &v, sizeof bits);
            /* to nearest, ties to even; NaN stays one */
            ((uint16_t *)to)[i] = isnan(v) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        }
    }
}

static bool is_half(ont_dtype dtype)
{
    return dtype == ONT_FLOAT16 || dtype == ONT_BFLOAT16;
}

static void cast_pieces(const char *x, ont_dtype from, char *y, ont_dtype to, int64_t n)
{
    enum { PIECE = 256 };
    double piece[PIECE];
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t m = n - at < PIECE ? n - at : PIECE;
        const char *in = x + (size_t)at * ont_dtype_size(from);
        char *out = y + (size_t)at * ont_dtype_size(to);
        if (is_half(from))
            load_half(in, from, piece, m);
        else
            cast_loops[ONT_FLOAT64][from](in, piece, m);
        if (is_half(to))
            store_half(piece, out, to, m);
        else
            cast_loops[to][ONT_FLOAT64](piece, out, m);
    }
}

static ont_status cast_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *like = ont_node_in(node, 1);
    ONT_TRY(ont_need_input(node, 0, &x));
    int64_t to = like ? (int64_t)like->dtype : ont_attr_int(node, "to", 0);
    if (to <= 0 || to >= ONT_DTYPE_COUNT || !ont_dtype_size((ont_dtype)to))
        return ont_fail(ONT_EUNSUPPORTED, "cast to %s (dtype number %lld)", ont_dtype_name((ont_dtype)to), (long long)to);
    return ont_infer_out(node, 0, (ont_dtype)to, &x->shape);
}

static const char *cast_accept(const ont_node *node)
{
    ont_dtype from = ont_node_in(node, 0)->dtype, to = node->outputs[0]->dtype;
    bool known_from = is_half(from) || cast_loops[ONT_FLOAT64][from], known_to = is_half(to) || cast_loops[to][ONT_FLOAT64];
    return known_from && known_to ? NULL : "dtype";
}

static void cast_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    ont_dtype from = ont_node_in(call->node, 0)->dtype, to = call->node->outputs[0]->dtype;
    const char *x = (const char *)call->in[0] + (size_t)first * ont_dtype_size(from);
    char *y = (char *)call->out[0] + (size_t)first * ont_dtype_size(to);
    if (cast_loops[to][from])
        cast_loops[to][from](x, y, last - first);
    else
        cast_pieces(x, from, y, to, last - first);
}

static ont_status cast_run(const ont_call *call)
{
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 16384, cast_range, (void *)call);
    return ONT_OK;
}

static void cast_grad(ont_grad *g)
{
    GI(0, ont_build_cast(&g->b, GO(0), I(0)->dtype));
}

static const ont_kernel cast_kernels[] = {{.name = "cast_ref", .accept = cast_accept, .run = cast_run}};

const ont_op ont_op_Cast = {.domain = "", .name = "Cast", .since = 6, .min_inputs = 1, .max_inputs = 1,
                            .attributes = "to:i saturate:i round_mode:s", .infer = cast_infer, .grad = cast_grad,
                            ONT_KERNELS(cast_kernels)};
const ont_op ont_op_CastLike = {.domain = "", .name = "CastLike", .since = 15, .min_inputs = 2, .max_inputs = 2,
                                .nondiff_inputs = 2, .attributes = "saturate:i round_mode:s", .infer = cast_infer,
                                .grad = cast_grad, ONT_KERNELS(cast_kernels)};

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
    return d == ONT_FLOAT32 || d == ONT_FLOAT64 || d == ONT_INT32 || d == ONT_INT64 ? NULL : "dtype";
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

static ont_status clip_run(const ont_call *call)
{
    int64_t n = ont_shape_count(&call->node->outputs[0]->shape);
    switch (call->node->outputs[0]->dtype) {
    case ONT_FLOAT32: clip_f32(call, n); break;
    case ONT_FLOAT64: clip_f64(call, n); break;
    case ONT_INT32: clip_i32(call, n); break;
    default: clip_i64(call, n); break;
    }
    return ONT_OK;
}

/* As torch.clamp: one inside the bounds, the bounds included. */
static void clip_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *low = I(1), *high = I(2), *dy = GO(0), *zero = ont_build_scalar(b, I(0)->dtype, 0);
    const ont_attr *a = ont_attr_find(g->node, "min", ONT_ATTR_FLOAT), *c = ont_attr_find(g->node, "max", ONT_ATTR_FLOAT);
    if (!low && a) low = ont_build_scalar(b, I(0)->dtype, a->f);
    if (!high && c) high = ont_build_scalar(b, I(0)->dtype, c->f);
    if (low) dy = ont_build3(b, "Where", ont_build2(b, "GreaterOrEqual", I(0), low), dy, zero);
    if (high) dy = ont_build3(b, "Where", ont_build2(b, "LessOrEqual", I(0), high), dy, zero);
    GI(0, dy);
}

static const ont_kernel clip_kernels[] = {{.name = "clip_ref", .accept = clip_accept, .run = clip_run, .inplace = 1}};

const ont_op ont_op_Clip = {.domain = "", .name = "Clip", .since = 6, .min_inputs = 1, .max_inputs = 3,
                            .nondiff_inputs = 6, .attributes = "min:f max:f", .infer = clip_infer, .grad = clip_grad,
                            ONT_KERNELS(clip_kernels)};
