/*
 * Elementwise operators that do not fit the shared unary and binary kernels: Sum, Mean, Min, Max (any number of
 * inputs), Pow (mixed dtypes, constant exponents), PRelu, Swish, Mod, IsInf. Kernels are row functions over
 * broadcast.h.
 */
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "base/parallel.h"
#include "ops/support/broadcast.h"
#include "ops/elementwise/elementwise.h"

#define U(op, x) ont_build1(&g->b, op, (x))
#define B(op, x, y) ont_build2(&g->b, op, (x), (y))
#define SCALAR(value) ont_build_scalar(&g->b, I(0)->dtype, (value))

static const char *accept_float(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "the input is neither float nor double";
}

static ont_status prepare_pair(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_bcast *b = ont_arena_alloc(arena, sizeof *b);
    if (!b) return ONT_ENOMEM;
    ont_bcast_init(b, node, 2);
    out->state = b;
    return ONT_OK;
}

/* ---- Sum, Mean, Min, Max: any number of inputs, combined in order ---- */

typedef struct chain_state {
    ont_binary_loop combine, divide;
    uint32_t n;
    bool mean;
    ont_bcast pair;  /* (out, input 0, input 1), where there are two */
    ont_bcast *rest; /* (out, input i) from i = 2 on */
} chain_state;

static const char *chain_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    bool any_number = ONT_IS(node, Min) || ONT_IS(node, Max);
    if (any_number && ont_dtype_is_int(dtype)) return NULL;
    return accept_float(node);
}

static ont_status chain_prepare_with(const ont_simd_table *simd, const ont_node *node, ont_arena *arena,
                                     ont_prepared *out)
{
    chain_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ont_dtype dtype = node->outputs[0]->dtype;
    s->combine = simd->binary[node->op->loop][dtype];
    s->divide = simd->binary[ONT_LOOP_Div][dtype];
    s->n = node->n_inputs;
    s->mean = ONT_IS(node, Mean);
    s->rest = ont_arena_array(arena, s->n, sizeof *s->rest);
    if (!s->rest) return ONT_ENOMEM;
    ont_bcast_init(&s->pair, node, s->n > 1 ? 2 : 1);
    for (uint32_t i = 2; i < s->n; i++) {
        ont_node one = *node; /* as if input i were the only input */
        one.inputs = &node->inputs[i];
        ont_bcast_init(&s->rest[i], &one, 1);
    }
    out->state = s;
    return ONT_OK;
}

static ont_status chain_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return chain_prepare_with(ont_simd(), node, arena, out);
}

static ont_status chain_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return chain_prepare_with(ont_simd_plain(), node, arena, out);
}

static void chain_first(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    const chain_state *s = context;
    s->combine(at[1], b->inner_stride[1], at[2], b->inner_stride[2], at[0], n, NULL);
}

static void chain_next(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    const chain_state *s = context;
    s->combine(at[0], 1, at[1], b->inner_stride[1], at[0], n, NULL);
}

typedef struct divide_job {
    const chain_state *state;
    void *out;
    bool f32;
} divide_job;

static void divide_range(void *context, int64_t first, int64_t last)
{
    const divide_job *job = context;
    float f32 = (float)job->state->n;
    double f64 = (double)job->state->n;
    char *at = (char *)job->out + (size_t)first * (job->f32 ? sizeof f32 : sizeof f64);
    job->state->divide(at, 1, job->f32 ? (const void *)&f32 : (const void *)&f64, 0, at, last - first, NULL);
}

static ont_status chain_run(const ont_call *call)
{
    const chain_state *s = call->state;
    const ont_value *out = call->node->outputs[0];
    if (s->n == 1) {
        size_t bytes = (size_t)ont_shape_count(&out->shape) * ont_dtype_size(out->dtype);
        if (bytes) memcpy(call->out[0], call->in[0], bytes);
        return ONT_OK;
    }
    ont_bcast_run(&s->pair, (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1]}, chain_first, s);
    for (uint32_t i = 2; i < s->n; i++)
        ont_bcast_run(&s->rest[i], (char *const[]){call->out[0], (char *)call->in[i]}, chain_next, s);
    divide_job job = {s, call->out[0], out->dtype == ONT_FLOAT32};
    if (s->mean) ont_parallel(ont_shape_count(&out->shape), 16384, divide_range, &job);
    return ONT_OK;
}

static void sum_grad(ont_grad *g)
{
    for (uint32_t i = 0; i < g->node->n_inputs; i++)
        if (WANTS(i)) GI(i, GO(0));
}

static void mean_grad(ont_grad *g)
{
    ont_value *share = B("Div", GO(0), SCALAR((double)g->node->n_inputs));
    for (uint32_t i = 0; i < g->node->n_inputs; i++)
        if (WANTS(i)) GI(i, share);
}

/* The part of dy for x, as in torch.minimum and torch.maximum: half for ties, all where either is NaN. */
static ont_value *extremum_share(ont_grad *g, const char *loses, ont_value *x, ont_value *other, ont_value *dy)
{
    ont_value *tie = ont_build3(&g->b, "Where", B("Equal", x, other), B("Mul", dy, SCALAR(0.5)), dy);
    return ont_build3(&g->b, "Where", B(loses, x, other), SCALAR(0), tie);
}

/* min(a, b, c) is min(min(a, b), c): the last input gets its part first, the others share the rest. */
static void extremum_grad(ont_grad *g, const char *loses)
{
    uint32_t n = g->node->n_inputs;
    const char *op_type = g->node->op->name;
    ont_value *dy = GO(0);
    for (uint32_t last = n - 1; last > 0; last--) {
        ont_value *before = I(0);
        for (uint32_t i = 1; i < last; i++) before = B(op_type, before, I(i));
        if (WANTS(last)) GI(last, extremum_share(g, loses, I(last), before, dy));
        dy = extremum_share(g, loses, before, I(last), dy);
    }
    GI(0, dy);
}

static void min_grad(ont_grad *g)
{
    extremum_grad(g, "Greater");
}

static void max_grad(ont_grad *g)
{
    extremum_grad(g, "Less");
}

/* Not in place: if one value is two inputs, it would be overwritten before it is read the second time. */
static const ont_kernel chain_kernels[] = {
    {.name = "chain_simd", .accept = chain_accept, .prepare = chain_prepare, .run = chain_run},
    {.name = "chain_ref", .accept = chain_accept, .prepare = chain_prepare_ref, .run = chain_run},
};

/* ---- Pow ---- */

static ont_status pow_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *e;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &e));
    ont_shape shape;
    ONT_TRY(ont_shape_broadcast(&x->shape, &e->shape, &shape));
    return ont_infer_out(node, 0, x->dtype, &shape);
}

/* The exponent, where it is one constant number that does not broadcast the shape. */
static bool known_exponent(const ont_node *node, double *e)
{
    const ont_value *v = ont_node_in(node, 1);
    if (!v->data || ont_shape_count(&v->shape) != 1 || v->shape.rank > ont_node_in(node, 0)->shape.rank) return false;
    switch (v->data->dtype) {
    case ONT_FLOAT32: *e = (double)*(const float *)v->data->data; return true;
    case ONT_FLOAT64: *e = *(const double *)v->data->data; return true;
    case ONT_INT32: *e = *(const int32_t *)v->data->data; return true;
    case ONT_INT64: *e = (double)*(const int64_t *)v->data->data; return true;
    default: return false;
    }
}

const char *ont_pow_constant_accept(const ont_node *node)
{
    double e;
    if (accept_float(node)) return accept_float(node);
    if (!known_exponent(node, &e)) return "the exponent is not one constant";
    return e == 2 || e == 3 || e == 0.5 || e == -1 || e == 1 ? NULL : "the exponent is not one of -1, 0.5, 1, 2, 3";
}

static void pow_constant_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    double e = 0;
    known_exponent(call->node, &e);
    ont_dtype dtype = call->node->outputs[0]->dtype;
    size_t size = ont_dtype_size(dtype);
    const char *x = (const char *)call->in[0] + (size_t)first * size;
    char *y = (char *)call->out[0] + (size_t)first * size;
    int64_t n = last - first;
    const ont_simd_table *simd = ont_simd();
    if (e == 0.5) simd->unary[ONT_LOOP_Sqrt][dtype](x, y, n, NULL);
    if (e == -1) simd->unary[ONT_LOOP_Reciprocal][dtype](x, y, n, NULL);
    if (e == 2) simd->binary[ONT_LOOP_Mul][dtype](x, 1, x, 1, y, n, NULL);
    if (e == 1) memmove(y, x, (size_t)n * size);
    if (e != 3) return;
    for (int64_t i = 0; dtype == ONT_FLOAT32 && i < n; i++) {
        float v = ((const float *)x)[i];
        ((float *)y)[i] = v * v * v;
    }
    for (int64_t i = 0; dtype == ONT_FLOAT64 && i < n; i++) {
        double v = ((const double *)x)[i];
        ((double *)y)[i] = v * v * v;
    }
}

ont_status ont_pow_constant_run(const ont_call *call)
{
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 8192, pow_constant_range, (void *)call);
    return ONT_OK;
}

/* Powers of two: the base is the constant 2, and the exponent has the shape of the result. */
const char *ont_pow_of_two_accept(const ont_node *node)
{
    const ont_value *base = ont_node_in(node, 0), *e = ont_node_in(node, 1);
    if (accept_float(node)) return accept_float(node);
    if (base->dtype != e->dtype || !base->data || ont_shape_count(&base->shape) != 1 ||
        base->shape.rank > e->shape.rank)
        return "the base is not one constant";
    /* By the dtype of the constant: passes/promote.c asks about a wider node before it converts the constant. */
    return ont_number_at(base->data->data, base->data->dtype, 0) == 2 ? NULL : "the base is not 2";
}

static void pow_of_two_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    ont_dtype dtype = call->node->outputs[0]->dtype;
    size_t at = (size_t)first * ont_dtype_size(dtype);
    ont_simd()->unary[ONT_LOOP_Exp2][dtype]((const char *)call->in[1] + at, (char *)call->out[0] + at, last - first,
                                            NULL);
}

ont_status ont_pow_of_two_run(const ont_call *call)
{
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 8192, pow_of_two_range, (void *)call);
    return ONT_OK;
}

static bool is_number(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 || ont_dtype_is_int(dtype);
}

const char *ont_pow_ref_accept(const ont_node *node)
{
    bool numbers = is_number(ont_node_in(node, 0)->dtype) && is_number(ont_node_in(node, 1)->dtype);
    return numbers ? NULL : "an operand is neither float, double nor an integer";
}

ont_status ont_pow_ref_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_pair(node, arena, out);
}

/* Overflow wraps; a negative power of an integer is 1 / x^n truncated: 0, or 1 or -1 for these. */
static int64_t int_pow(int64_t x, int64_t e)
{
    if (e < 0) return x == 1 ? 1 : x == -1 ? (e % 2 ? -1 : 1) : 0;
    uint64_t result = 1, square = (uint64_t)x;
    for (; e; e >>= 1, square *= square)
        if (e & 1) result *= square;
    return (int64_t)result;
}

/* A float as int64; NaN and values out of range become INT64_MIN, as by the processor's conversion. */
static int64_t saturated(double v)
{
    return v >= -0x1p63 && v < 0x1p63 ? (int64_t)v : INT64_MIN;
}

static void pow_row(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    const ont_node *node = context;
    ont_dtype tx = ont_node_in(node, 0)->dtype, te = ont_node_in(node, 1)->dtype;
    bool integers = ont_dtype_is_int(tx) && ont_dtype_is_int(te);
    for (int64_t i = 0; i < n; i++) {
        int64_t ix = i * b->inner_stride[1], ie = i * b->inner_stride[2], whole = 0;
        double real = 0;
        if (integers)
            whole = int_pow(ont_integer_at(at[1], tx, ix), ont_integer_at(at[2], te, ie));
        else
            whole = saturated(real = pow(ont_number_at(at[1], tx, ix), ont_number_at(at[2], te, ie)));
        if (ont_dtype_is_float(tx))
            ont_number_put(at[0], tx, i, real);
        else
            ont_integer_put(at[0], tx, i, whole);
    }
}

ont_status ont_pow_ref_run(const ont_call *call)
{
    ont_bcast_run(call->state, (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1]}, pow_row,
                  call->node);
    return ONT_OK;
}

/* torch: base' is 0 where the exponent is 0, exponent' is 0 where the base is 0 and the exponent is not negative */
static void pow_grad(ont_grad *g)
{
    double number;
    bool known = known_exponent(g->node, &number) && number != 0;
    ont_value *zero = SCALAR(0), *x = I(0), *e = ont_build_cast(&g->b, I(1), x->dtype);
    if (WANTS(0) && known && number == 2) {
        GI(0, B("Mul", GO(0), B("Mul", x, SCALAR(2))));
    } else if (WANTS(0)) {
        ont_value *slope = B("Mul", e, B("Pow", x, B("Sub", e, SCALAR(1))));
        ont_value *dx = B("Mul", GO(0), slope);
        GI(0, known ? dx : ont_build3(&g->b, "Where", B("Equal", e, zero), zero, dx));
    }
    if (WANTS(1)) {
        ont_value *flat = B("And", B("Equal", x, zero), B("GreaterOrEqual", e, zero));
        ont_value *de = ont_build3(&g->b, "Where", flat, zero, B("Mul", GO(0), B("Mul", O(0), U("Log", x))));
        GI(1, ont_build_cast(&g->b, de, I(1)->dtype));
    }
}

/* ---- PRelu ---- */

static ont_status prelu_infer(ont_graph *g, ont_node *node)
{
    ont_value *x, *slope;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &slope));
    ONT_TRY(ont_infer_broadcast(g, node));
    char text[ONT_SHAPE_TEXT], expected[ONT_SHAPE_TEXT];
    if (!ont_shape_equal(&node->outputs[0]->shape, &x->shape))
        return ont_fail(ONT_EINVAL, "slope of shape %s does not broadcast to the input's %s",
                        ont_shape_text(&slope->shape, text), ont_shape_text(&x->shape, expected));
    return ONT_OK;
}

#define PRELU_ROW(suffix, type) \
    static void prelu_row_##suffix(const void *context, const ont_bcast *b, char *const *at, int64_t n) \
    { \
        type *y = (type *)at[0]; \
        const type *x = (const type *)at[1], *slope = (const type *)at[2]; \
        int64_t sx = b->inner_stride[1], ss = b->inner_stride[2]; \
        (void)context; \
        for (int64_t i = 0; i < n; i++) y[i] = x[i * sx] < 0 ? x[i * sx] * slope[i * ss] : x[i * sx]; \
    }
PRELU_ROW(i32, int32_t)
PRELU_ROW(i64, int64_t)

/* Unsigned numbers are not negative: the result is the input. */
const char *ont_prelu_int_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return dtype == ONT_INT32 || dtype == ONT_INT64 || dtype == ONT_UINT64 ? NULL
        : "dtype is not one of int32, int64, uint64";
}

ont_status ont_prelu_int_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_pair(node, arena, out);
}

ont_status ont_prelu_int_run(const ont_call *call)
{
    const ont_value *y = call->node->outputs[0];
    char *const operands[] = {call->out[0], (char *)call->in[0], (char *)call->in[1]};
    if (y->dtype != ONT_UINT64)
        ont_bcast_run(call->state, operands, y->dtype == ONT_INT32 ? prelu_row_i32 : prelu_row_i64, NULL);
    else if (call->out[0] != call->in[0])
        memcpy(call->out[0], call->in[0], (size_t)ont_shape_count(&y->shape) * ont_dtype_size(y->dtype));
    return ONT_OK;
}

static void prelu_grad(ont_grad *g)
{
    ont_value *zero = SCALAR(0), *positive = B("Greater", I(0), zero);
    if (WANTS(0)) GI(0, ont_build3(&g->b, "Where", positive, GO(0), B("Mul", GO(0), I(1))));
    if (WANTS(1)) GI(1, ont_build3(&g->b, "Where", positive, zero, B("Mul", GO(0), I(0))));
}

/* ---- Swish: x * sigmoid(alpha * x) ---- */

/* with s = sigmoid(a x): dy/dx = s (1 + a x (1 - s)) */
static void swish_grad(ont_grad *g)
{
    ont_value *ax = B("Mul", I(0), SCALAR(ont_attr_float(g->node, "alpha", 1.0)));
    ont_value *s = U("Sigmoid", ax), *one = SCALAR(1);
    GI(0, B("Mul", GO(0), B("Mul", s, B("Add", one, B("Mul", ax, B("Sub", one, s))))));
}

/* ---- Mod: sign of the divisor, or of the dividend with fmod=1 ---- */

static ont_status mod_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    int64_t fmod = ont_attr_int(node, "fmod", 0);
    if (fmod != 0 && fmod != 1) return ont_fail(ONT_EINVAL, "fmod is %lld, expected 0 or 1", (long long)fmod);
    return ont_infer_broadcast(g, node);
}

const char *ont_mod_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    bool has = dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 || dtype == ONT_INT32 || dtype == ONT_INT64 ||
        dtype == ONT_UINT64;
    return has ? NULL : "dtype is not one of float, double, int32, int64, uint64";
}

/* The remainder with the sign of the divisor, also for a zero remainder, as in NumPy and torch. */
static double floored(double remainder, double divisor)
{
    if (remainder == 0) return copysign(0, divisor);
    return (remainder < 0) != (divisor < 0) ? remainder + divisor : remainder;
}

#define MOD_ROW(suffix, type, expression) \
    static void mod_row_##suffix(const void *context, const ont_bcast *b, char *const *at, int64_t n) \
    { \
        type *y = (type *)at[0]; \
        const type *x = (const type *)at[1], *d = (const type *)at[2]; \
        int64_t sx = b->inner_stride[1], sd = b->inner_stride[2]; \
        bool c_style = *(const bool *)context; \
        (void)c_style; \
        for (int64_t i = 0; i < n; i++) { \
            type lhs = x[i * sx], rhs = d[i * sd]; \
            y[i] = (expression); \
        } \
    }

/* rhs is not 0. The smallest integer modulo -1 would trap; the remainder is 0. */
#define INT_MOD(type) \
    (rhs == -1 ? 0 : c_style || lhs % rhs == 0 || (lhs < 0) == (rhs < 0) ? lhs % rhs : (type)(lhs % rhs + rhs))
MOD_ROW(f32, float, c_style ? fmodf(lhs, rhs) : (float)floored((double)fmodf(lhs, rhs), (double)rhs))
MOD_ROW(f64, double, c_style ? fmod(lhs, rhs) : floored(fmod(lhs, rhs), rhs))
MOD_ROW(i32, int32_t, INT_MOD(int32_t))
MOD_ROW(i64, int64_t, INT_MOD(int64_t))
MOD_ROW(u64, uint64_t, lhs % rhs)

ont_status ont_mod_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_pair(node, arena, out);
}

ont_status ont_mod_run(const ont_call *call)
{
    const ont_value *divisor = ont_node_in(call->node, 1);
    static const ont_bcast_row rows[ONT_DTYPE_COUNT] = {
        [ONT_FLOAT32] = mod_row_f32, [ONT_FLOAT64] = mod_row_f64, [ONT_INT32] = mod_row_i32, [ONT_INT64] = mod_row_i64,
        [ONT_UINT64] = mod_row_u64};
    int64_t divisors = ont_shape_count(&divisor->shape);
    if (ont_dtype_is_int(divisor->dtype) && ont_integers_have_zero(call->in[1], divisor->dtype, divisors))
        return ont_fail(ONT_EINVAL, "integer remainder of a division by zero in input '%s'", divisor->name);
    bool c_style = ont_attr_int(call->node, "fmod", 0) == 1;
    ont_bcast_run(call->state, (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1]},
                  rows[divisor->dtype],
                  &c_style);
    return ONT_OK;
}

/* y = a - b trunc(a / b), or floor; that integer is the one nearest to (a - y) / b, infinite as a / b where y is NaN */
static void mod_grad(ont_grad *g)
{
    GI(0, GO(0));
    if (!WANTS(1)) return;
    ont_value *y = ont_build3(&g->b, "Where", B("Equal", O(0), O(0)), O(0), SCALAR(0));
    GI(1, U("Neg", B("Mul", GO(0), U("Round", B("Div", B("Sub", I(0), y), I(1))))));
}

/* Of the quotient towards zero and of the step below it; not from y, which is infinite where b and a have unlike signs
 * and b is infinite. */
static void remainder_grad(ont_grad *g)
{
    GI(0, GO(0));
    if (!WANTS(1)) return;
    ont_node *node = ont_build_node(&g->b, "", "Mod", (ont_value *[]){I(0), I(1)}, 2, 1);
    if (node) g->b.status = ont_attr_set_int(g->b.graph, node, "fmod", 1);
    ont_value *rest = ont_build_done(&g->b, node);
    ont_value *exact = ont_build3(&g->b, "Where", B("Equal", I(1), SCALAR(0)), SCALAR(0), rest); /* 5 / 0 is infinite */
    ont_value *whole = U("Round", B("Div", B("Sub", I(0), exact), I(1)));
    whole = ont_build3(&g->b, "Where", B("Equal", rest, O(0)), whole, B("Sub", whole, SCALAR(1)));
    GI(1, U("Neg", B("Mul", GO(0), whole)));
}

/* ---- IsInf ---- */

static ont_status isinf_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (!ont_dtype_is_float(x->dtype) && !ont_dtype_is_narrow_float(x->dtype))
        return ont_fail(ONT_ETYPE, "input is %s, a float is expected", ont_dtype_name(x->dtype));
    return ont_infer_out(node, 0, ONT_BOOL, &x->shape);
}

static void isinf_part(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    ont_dtype dtype = ont_node_in(call->node, 0)->dtype;
    double low = ont_attr_int(call->node, "detect_negative", 1) ? -INFINITY : NAN;
    double high = ont_attr_int(call->node, "detect_positive", 1) ? INFINITY : NAN;
    const float *x = call->in[0];
    uint8_t *out = call->out[0];
    if (dtype == ONT_FLOAT32) {
        float below = (float)low, above = (float)high;
        for (int64_t i = first; i < last; i++) out[i] = (x[i] == below) | (x[i] == above);
        return;
    }
    for (int64_t i = first; i < last; i++) {
        double v = ont_number_at(call->in[0], dtype, i);
        out[i] = v == low || v == high;
    }
}

static ont_status isinf_run(const ont_call *call)
{
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 16384, isinf_part, (void *)call);
    return ONT_OK;
}

static const ont_kernel isinf_kernels[] = {{.name = "isinf_ref", .accept = ont_accept_any, .run = isinf_run}};

/* ---- descriptors ---- */

#define CHAIN(name_, loop_, grad_, tile_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 8, .min_inputs = 1, .max_inputs = 65536, \
                                   .attributes = "", .infer = ont_infer_broadcast, .grad = grad_, \
                                   .tile = tile_, .loop = loop_, .rows = ONT_ROWS_ELEMENTWISE, \
                                   ONT_KERNELS(chain_kernels)}
CHAIN(Sum, ONT_LOOP_Add, sum_grad, ont_binary_tile); /* the tile() accepts two operands only */
CHAIN(Mean, ONT_LOOP_Add, mean_grad, NULL);
CHAIN(Min, ONT_LOOP_Min, min_grad, ont_binary_tile);
CHAIN(Max, ONT_LOOP_Max, max_grad, ont_binary_tile);
const ont_op ont_op_Pow = {.domain = "", .name = "Pow", .since = 7, .min_inputs = 2, .max_inputs = 2, .attributes = "",
                           .infer = pow_infer, .grad = pow_grad, .loop = ONT_LOOP_Pow,
                           .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_pow_kernels)};
const ont_op ont_op_PRelu = {.domain = "", .name = "PRelu", .since = 7, .min_inputs = 2, .max_inputs = 2,
                             .attributes = "", .infer = prelu_infer, .grad = prelu_grad,
                             .loop = ONT_LOOP_PRelu, ONT_KERNELS(ont_prelu_kernels)};
const ont_op ont_op_Swish = {.domain = "", .name = "Swish", .since = 24, .min_inputs = 1, .max_inputs = 1,
                             .attributes = "alpha:f", .infer = ont_infer_same, .grad = swish_grad,
                             .tile = ont_unary_tile, .loop = ONT_LOOP_Swish,
                             .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_unary_kernels)};
const ont_op ont_op_Mod = {.domain = "", .name = "Mod", .since = 10, .min_inputs = 2, .max_inputs = 2,
                           .attributes = "fmod:i", .infer = mod_infer, .grad = mod_grad, .tile = ont_binary_tile,
                           .loop = ONT_LOOP_Fmod, ONT_KERNELS(ont_mod_kernels)};
/* torch.fmod: floats only; a zero has the sign of the dividend. */
const ont_op ont_op_Remainder = {.domain = ONT_DOMAIN, .name = "Remainder", .since = 1, .min_inputs = 2,
                                 .max_inputs = 2, .flags = ONT_OP_PUBLIC, .attributes = "",
                                 .infer = ont_infer_broadcast, .grad = remainder_grad, .tile = ont_binary_tile,
                                 .loop = ONT_LOOP_Remainder, ONT_KERNELS(ont_binary_kernels)};
const ont_op ont_op_IsInf = {.domain = "", .name = "IsInf", .since = 10, .min_inputs = 1, .max_inputs = 1,
                             .flags = ONT_OP_NO_GRAD, .attributes = "detect_negative:i detect_positive:i",
                             .infer = isinf_infer, ONT_KERNELS(isinf_kernels)};
