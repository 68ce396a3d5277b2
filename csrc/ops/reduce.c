/*
 * Reductions over axes, and SumTo, the undo of a broadcast. The input is seen as dims that are kept or reduced in turn;
 * adjacent dims of a kind are merged.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/reduce.h"

static ont_reduce_kind kind_of(const ont_node *node)
{
    static const struct {
        const char *name;
        ont_reduce_kind kind;
    } names[] = {{"ReduceSum", ONT_REDUCE_SUM}, {"SumTo", ONT_REDUCE_SUM}, {"ReduceMean", ONT_REDUCE_MEAN},
                 {"ReduceMax", ONT_REDUCE_MAX}, {"ReduceMin", ONT_REDUCE_MIN},
                 {"ReduceProd", ONT_REDUCE_PROD}, {"ReduceL1", ONT_REDUCE_L1}, {"ReduceL2", ONT_REDUCE_L2},
                 {"ReduceSumSquare", ONT_REDUCE_SUM_SQUARE},
                 {"ReduceLogSum", ONT_REDUCE_LOG_SUM}, {"ReduceLogSumExp", ONT_REDUCE_LOG_SUM_EXP}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i].name, node->op->name)) return names[i].kind;
    return ONT_REDUCE_SUM;
}

/* Axes as input or attribute; none: all, or nothing where noop_with_empty_axes says so. */
static ont_status reduced_axes(const ont_node *node, const ont_shape *x, bool *reduce)
{
    int64_t axes[ONT_MAX_RANK];
    int n;
    ONT_TRY(ont_const_ints(node, 1, "axes", axes, ONT_MAX_RANK, &n));
    bool all = n <= 0 && !ont_attr_int(node, "noop_with_empty_axes", 0);
    for (int d = 0; d < x->rank; d++) reduce[d] = all;
    for (int i = 0; i < n; i++) {
        int axis;
        ONT_TRY(ont_shape_axis(axes[i], x->rank, &axis));
        reduce[axis] = true;
    }
    return ONT_OK;
}

static ont_status reduce_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    bool reduce[ONT_MAX_RANK];
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(reduced_axes(node, &x->shape, reduce));
    bool keep = ont_attr_int(node, "keepdims", 1);
    ont_shape shape = {0};
    for (int d = 0; d < x->shape.rank; d++)
        if (!reduce[d] || keep) shape.dims[shape.rank++] = reduce[d] ? 1 : x->shape.dims[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_status sum_to_axes(const ont_shape *x, const ont_shape *to, bool *reduce)
{
    int lead = x->rank - to->rank;
    bool fits = lead >= 0;
    for (int d = 0; fits && d < x->rank; d++) {
        int64_t target = d < lead ? 1 : to->dims[d - lead];
        reduce[d] = d < lead || (target == 1 && x->dims[d] != 1);
        fits = reduce[d] || target == x->dims[d];
    }
    char from[ONT_SHAPE_TEXT], wanted[ONT_SHAPE_TEXT];
    return fits ? ONT_OK
                : ont_fail(ONT_EINVAL, "attribute 'shape' is %s, to which %s does not sum", ont_shape_text(to, wanted),
                           ont_shape_text(x, from));
}

static ont_status sum_to_infer(ont_graph *g, ont_node *node)
{
    bool reduce[ONT_MAX_RANK];
    ONT_TRY(ont_infer_stated(g, node));
    return sum_to_axes(&ont_node_in(node, 0)->shape, &node->outputs[0]->shape, reduce);
}

/* Adds a dim to a list, merged with the one before where they are one run in memory. */
static void push(int64_t *dims, int64_t *strides, int *n, int64_t dim, int64_t stride, bool adjacent)
{
    if (dim == 1) return;
    if (*n && adjacent && strides[*n - 1] == stride * dim) {
        dims[*n - 1] *= dim;
        strides[*n - 1] = stride;
        return;
    }
    dims[*n] = dim;
    strides[(*n)++] = stride;
}

ont_status ont_reduce_read(const ont_node *node, ont_reduce *s)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    bool reduce[ONT_MAX_RANK];
    int64_t strides[ONT_MAX_RANK];
    *s = (ont_reduce){0};
    if (!strcmp(node->op->name, "SumTo"))
        ONT_TRY(sum_to_axes(x, &node->outputs[0]->shape, reduce));
    else
        ONT_TRY(reduced_axes(node, x, reduce));
    s->kind = kind_of(node);
    s->simd = ont_simd();
    s->outputs = s->each = 1;
    ont_shape_strides(x, strides);
    for (int d = 0; d < x->rank; d++) {
        if (reduce[d])
            push(s->reduced, s->reduced_stride, &s->n_reduced, x->dims[d], strides[d], true);
        else
            push(s->kept, s->kept_stride, &s->n_kept, x->dims[d], strides[d], true);
        *(reduce[d] ? &s->each : &s->outputs) *= x->dims[d];
    }
    s->n = -1;
    if (s->n_reduced == 1 && s->outputs && s->each) {
        s->n = s->reduced[0];
        s->tail = s->reduced_stride[0];
        s->lead = s->outputs / s->tail;
    }
    return ONT_OK;
}

static ont_status reduce_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_reduce *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    out->state = s;
    return ont_reduce_read(node, s);
}

/* ---- fast: float32 sum or mean over one run of dims ---- */

static const char *accept_one_run(const ont_node *node)
{
    ont_reduce_kind kind = kind_of(node);
    if (kind != ONT_REDUCE_SUM && kind != ONT_REDUCE_MEAN) return "not a sum";
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    bool reduce[ONT_MAX_RANK];
    int changes = 0;
    if (!strcmp(node->op->name, "SumTo") ? sum_to_axes(x, &node->outputs[0]->shape, reduce) != ONT_OK
                                         : reduced_axes(node, x, reduce) != ONT_OK)
        return "axes";
    bool last = false;
    for (int d = 0; d < x->rank; d++) {
        if (x->dims[d] == 0) return "empty";
        if (x->dims[d] == 1) continue;
        changes += reduce[d] && !last;
        last = reduce[d];
    }
    return changes == 1 ? NULL : "more than one run of axes";
}

static const char *accept_sum_f32(const ont_node *node)
{
    return ont_node_in(node, 0)->dtype == ONT_FLOAT32 ? accept_one_run(node) : "dtype";
}

static void sum_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    float scale = s->kind == ONT_REDUCE_MEAN ? 1 / (float)s->n : 1;
    for (int64_t i = first; i < last; i++)
        ((float *)call->out[0])[i] = scale * s->simd->sum((const float *)call->in[0] + i * s->n, s->n);
}

/* Columns [first, last) of every lead: rows are added whole, in order. */
static void sum_columns(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    float scale = 1 / (float)s->n;
    for (int64_t o = 0; o < s->lead; o++) {
        const float *x = (const float *)call->in[0] + o * s->n * s->tail;
        float *y = (float *)call->out[0] + o * s->tail;
        memcpy(y + first, x + first, (size_t)(last - first) * sizeof *y);
        for (int64_t r = 1; r < s->n; r++) s->simd->add_to(y + first, x + r * s->tail + first, last - first);
        for (int64_t i = first; s->kind == ONT_REDUCE_MEAN && i < last; i++) y[i] *= scale;
    }
}

static ont_status sum_run(const ont_call *call)
{
    const ont_reduce *s = call->state;
    if (s->tail == 1)
        ont_parallel(s->lead, 16384 / s->n + 1, sum_rows, (void *)call);
    else
        ont_parallel(s->tail, 16384 / (s->n * s->lead) + 16, sum_columns, (void *)call);
    return ONT_OK;
}

/* ---- the same over rows of 16-bit floats, as a bias has its gradient: summed in float32, rounded once ---- */

/* Columns of a unit of work: wide ones read pages of memory as a whole, where there are enough of them for every
 * thread. */
enum { STRIP = 512, WIDE_STRIP = 2048 };

static int64_t strip_of(const ont_reduce *s)
{
    return s->tail >= 4 * WIDE_STRIP ? WIDE_STRIP : STRIP;
}

static const char *accept_sum_half(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    ont_reduce s;
    if (x->dtype != ONT_BFLOAT16 && x->dtype != ONT_FLOAT16) return "dtype";
    const char *refusal = accept_one_run(node);
    if (refusal) return refusal;
    return ont_reduce_read(node, &s) == ONT_OK && s.n > 0 && s.tail >= 16 ? NULL : "not along columns";
}

static void sum_strips(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    bool brain = call->node->outputs[0]->dtype == ONT_BFLOAT16;
    void (*widen)(const void *, float *, int64_t) = brain ? s->simd->bfloat_to_float : s->simd->half_to_float;
    int64_t strip = strip_of(s), strips = (s->tail + strip - 1) / strip;
    for (int64_t unit = first; unit < last; unit++) {
        int64_t from = unit % strips * strip, n = s->tail - from < strip ? s->tail - from : strip;
        const uint16_t *x = (const uint16_t *)call->in[0] + unit / strips * s->n * s->tail + from;
        float sum[WIDE_STRIP], row[WIDE_STRIP];
        widen(x, sum, n);
        if (brain) s->simd->add_bfloat_rows(sum, x + s->tail, s->n - 1, s->tail, n);
        for (int64_t r = 1; r < s->n && !brain; r++) {
            widen(x + r * s->tail, row, n);
            s->simd->add_to(sum, row, n);
        }
        for (int64_t i = 0; s->kind == ONT_REDUCE_MEAN && i < n; i++) sum[i] /= (float)s->n;
        uint16_t *y = (uint16_t *)call->out[0] + unit / strips * s->tail + from;
        (brain ? s->simd->float_to_bfloat : s->simd->float_to_half)(sum, y, n);
    }
}

static ont_status sum_half_run(const ont_call *call)
{
    const ont_reduce *s = call->state;
    int64_t strip = strip_of(s);
    ont_parallel(s->lead * ((s->tail + strip - 1) / strip), 32 / s->n + 1, sum_strips, (void *)call);
    return ONT_OK;
}

/* ---- reference: all kinds, all axes ---- */

/* Of nothing the largest is below all numbers, and the smallest above. */
#define REFERENCE(suffix, type, acc_type, lowest, highest) \
    static acc_type element_##suffix(ont_reduce_kind kind, acc_type acc, acc_type v, acc_type most) \
    { \
        switch (kind) { \
        case ONT_REDUCE_MAX: return v > acc || v != v ? v : acc; \
        case ONT_REDUCE_MIN: return v < acc || v != v ? v : acc; \
        case ONT_REDUCE_PROD: return acc * v; \
        case ONT_REDUCE_L1: return acc + (v < 0 ? 0 - v : v); \
        case ONT_REDUCE_L2: \
        case ONT_REDUCE_SUM_SQUARE: return acc + v * v; \
        case ONT_REDUCE_LOG_SUM_EXP: return acc + (acc_type)exp((double)(v - most)); \
        default: return acc + v; \
        } \
    } \
    static acc_type walk_##suffix(const ont_reduce *s, const type *x, ont_reduce_kind kind, acc_type acc, \
                                  acc_type most) \
    { \
        int64_t index[ONT_MAX_RANK] = {0}; \
        for (int64_t e = 0; e < s->each; e++) { \
            int64_t offset = 0; \
            for (int d = 0; d < s->n_reduced; d++) offset += index[d] * s->reduced_stride[d]; \
            acc = element_##suffix(kind, acc, (acc_type)x[offset], most); \
            for (int d = s->n_reduced - 1; d >= 0 && ++index[d] == s->reduced[d]; d--) index[d] = 0; \
        } \
        return acc; \
    } \
    static void reduce_##suffix(const ont_reduce *s, const type *x, type *y, int64_t first, int64_t last) \
    { \
        for (int64_t i = first; i < last; i++) { \
            int64_t rest = i, offset = 0; \
            for (int d = s->n_kept - 1; d >= 0; d--) { \
                offset += rest % s->kept[d] * s->kept_stride[d]; \
                rest /= s->kept[d]; \
            } \
            const type *from = x + offset; \
            bool extremum = s->kind == ONT_REDUCE_MAX || s->kind == ONT_REDUCE_MIN; \
            acc_type most = s->kind == ONT_REDUCE_LOG_SUM_EXP && s->each \
                                                ? walk_##suffix(s, from, ONT_REDUCE_MAX, (acc_type)from[0], 0) : 0; \
            if (s->kind == ONT_REDUCE_LOG_SUM_EXP && isinf((double)most)) most = 0; \
            acc_type none = s->kind == ONT_REDUCE_MAX ? (lowest) : s->kind == ONT_REDUCE_MIN ? (highest) \
                                                : s->kind == ONT_REDUCE_PROD ? 1 : 0; \
            acc_type start = extremum && s->each ? (acc_type)from[0] : none; \
            acc_type acc = walk_##suffix(s, from, s->kind, start, most); \
            if (s->kind == ONT_REDUCE_MEAN) acc = acc / (acc_type)s->each; \
            if (s->kind == ONT_REDUCE_L2) acc = (acc_type)sqrt((double)acc); \
            if (s->kind == ONT_REDUCE_LOG_SUM) acc = (acc_type)log((double)acc); \
            if (s->kind == ONT_REDUCE_LOG_SUM_EXP) acc = (acc_type)log((double)acc) + most; \
            y[i] = (type)acc; \
        } \
    }
#pragma GCC diagnostic ignored "-Wtype-limits" /* ONT_REDUCE_L1 of an unsigned number */
REFERENCE(f32, float, double, -INFINITY, INFINITY)
REFERENCE(f64, double, double, -INFINITY, INFINITY)
REFERENCE(i32, int32_t, int64_t, INT32_MIN, INT32_MAX)
REFERENCE(i64, int64_t, int64_t, INT64_MIN, INT64_MAX)
REFERENCE(u64, uint64_t, uint64_t, 0, UINT64_MAX)
REFERENCE(bool, uint8_t, int64_t, 0, 1)

static const char *accept_ref(const ont_node *node)
{
    ont_dtype d = ont_node_in(node, 0)->dtype;
    ont_reduce_kind kind = kind_of(node);
    const ont_value *x = ont_node_in(node, 0);
    if (d == ONT_BOOL) return kind == ONT_REDUCE_MAX || kind == ONT_REDUCE_MIN ? NULL : "bool";
    if (d != ONT_FLOAT32 && d != ONT_FLOAT64 && d != ONT_INT32 && d != ONT_INT64 && d != ONT_UINT64) return "dtype";
    if (!ont_shape_count(&x->shape) && kind == ONT_REDUCE_MEAN && !ont_dtype_is_float(d)) return "nothing to reduce";
    return NULL;
}

static void ref_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    switch (call->node->outputs[0]->dtype) {
    case ONT_FLOAT32: reduce_f32(s, call->in[0], call->out[0], first, last); break;
    case ONT_FLOAT64: reduce_f64(s, call->in[0], call->out[0], first, last); break;
    case ONT_INT32: reduce_i32(s, call->in[0], call->out[0], first, last); break;
    case ONT_UINT64: reduce_u64(s, call->in[0], call->out[0], first, last); break;
    case ONT_BOOL: reduce_bool(s, call->in[0], call->out[0], first, last); break;
    default: reduce_i64(s, call->in[0], call->out[0], first, last); break;
    }
}

static ont_status ref_run(const ont_call *call)
{
    const ont_reduce *s = call->state;
    ont_parallel(s->outputs, s->each ? 4096 / s->each + 1 : 16384, ref_range, (void *)call);
    return ONT_OK;
}

static const ont_kernel kernels[] = {
    {.name = "reduce_sum_f32", .accept = accept_sum_f32, .prepare = reduce_prepare, .run = sum_run},
    {.name = "reduce_sum_half", .accept = accept_sum_half, .prepare = reduce_prepare, .run = sum_half_run},
    {.name = "reduce_rows", .accept = ont_reduce_rows_accept, .prepare = reduce_prepare, .run = ont_reduce_rows_run},
    {.name = "reduce_ref", .accept = accept_ref, .prepare = reduce_prepare, .run = ref_run},
};

/* ---- gradients: dy and y with the reduced dims kept, broadcast back ---- */

typedef struct spread {
    ont_value *dy, *y;
    ont_shape kept;
    double count;
} spread;

static bool spread_back(ont_grad *g, spread *s)
{
    bool reduce[ONT_MAX_RANK];
    const ont_shape *x = &I(0)->shape;
    if (reduced_axes(g->node, x, reduce) != ONT_OK) return false;
    s->kept = *x;
    s->count = 1;
    for (int d = 0; d < x->rank; d++)
        if (reduce[d]) {
            s->count *= (double)x->dims[d];
            s->kept.dims[d] = 1;
        }
    s->dy = ont_build_reshape(&g->b, GO(0), &s->kept);
    s->y = ont_build_reshape(&g->b, O(0), &s->kept);
    return g->b.status == ONT_OK;
}

static ont_value *expand(ont_grad *g, ont_value *x)
{
    const ont_shape *shape = &I(0)->shape;
    if (x && ont_shape_equal(&x->shape, shape)) return x;
    return ont_build2(&g->b, "Expand", x, ont_build_const_ints(&g->b, shape->dims, (size_t)shape->rank));
}

#define B(op, x, y) ont_build2(&g->b, op, (x), (y))
#define U(op, x) ont_build1(&g->b, op, (x))
#define SCALAR(value) ont_build_scalar(&g->b, I(0)->dtype, (value))
#define REDUCE_GRAD(name, body) \
    static void name(ont_grad *g) \
    { \
        spread s; \
        if (!spread_back(g, &s)) return; \
        GI(0, body); \
    }

REDUCE_GRAD(sum_grad, expand(g, s.dy))
REDUCE_GRAD(mean_grad, expand(g, B("Mul", s.dy, SCALAR(1 / s.count))))
REDUCE_GRAD(l1_grad, B("Mul", s.dy, U("Sign", I(0))))
REDUCE_GRAD(sum_square_grad, B("Mul", B("Mul", s.dy, SCALAR(2)), I(0)))
REDUCE_GRAD(log_sum_grad, expand(g, B("Div", s.dy, U("Exp", s.y))))
REDUCE_GRAD(log_sum_exp_grad, B("Mul", s.dy, U("Exp", B("Sub", I(0), s.y))))
/* 0 where the norm is 0, as torch */
REDUCE_GRAD(l2_grad,
            ont_build3(&g->b, "Where", B("Equal", s.y, SCALAR(0)), SCALAR(0), B("Mul", I(0), B("Div", s.dy, s.y))))


/* As torch.amax: shared evenly among ties. */
static void extremum_grad(ont_grad *g)
{
    spread s;
    if (!spread_back(g, &s)) return;
    ont_value *hit = ont_build_cast(&g->b, B("Equal", I(0), s.y), I(0)->dtype);
    ont_value *ties = ont_build_sum_to(&g->b, hit, &s.kept);
    GI(0, B("Mul", hit, B("Div", s.dy, ties)));
}

/* Of a product the gradient is the product of the others: with one zero only that entry has one, with two none has. */
static void prod_grad(ont_grad *g)
{
    spread s;
    if (!spread_back(g, &s)) return;
    ont_value *zero = SCALAR(0), *one = SCALAR(1), *is_zero = B("Equal", I(0), zero);
    ont_value *zeros = ont_build_sum_to(&g->b, ont_build_cast(&g->b, is_zero, I(0)->dtype), &s.kept);
    ont_value *full = ont_build3(&g->b, "Where", is_zero, one, I(0));
    bool reduce[ONT_MAX_RANK];
    int64_t axes[ONT_MAX_RANK];
    size_t n = 0;
    if ((g->b.status = reduced_axes(g->node, &I(0)->shape, reduce)) != ONT_OK) return;
    for (int d = 0; d < I(0)->shape.rank; d++)
        if (reduce[d]) axes[n++] = d;
    ont_value *others = ont_build_reduce(&g->b, "ReduceProd", full, axes, n, true);
    ont_value *at_zero = ont_build3(&g->b, "Where", B("Equal", zeros, one), others, zero);
    ont_value *elsewhere = ont_build3(&g->b, "Where", B("Equal", zeros, zero), B("Div", others, full), zero);
    GI(0, B("Mul", s.dy, ont_build3(&g->b, "Where", is_zero, at_zero, elsewhere)));
}

#define REDUCE(name_, grad_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 1, .min_inputs = 1, .max_inputs = 2, \
                                   .nondiff_inputs = 2, .attributes = "axes:I keepdims:i noop_with_empty_axes:i", \
                                   .infer = reduce_infer, .grad = grad_, ONT_KERNELS(kernels)}
REDUCE(ReduceSum, sum_grad);
REDUCE(ReduceMean, mean_grad);
REDUCE(ReduceMax, extremum_grad);
REDUCE(ReduceMin, extremum_grad);
REDUCE(ReduceProd, prod_grad);
REDUCE(ReduceL1, l1_grad);
REDUCE(ReduceL2, l2_grad);
REDUCE(ReduceSumSquare, sum_square_grad);
REDUCE(ReduceLogSum, log_sum_grad);
REDUCE(ReduceLogSumExp, log_sum_exp_grad);
const ont_op ont_op_SumTo = {.domain = ONT_DOMAIN, .name = "SumTo", .since = 1, .min_inputs = 1, .max_inputs = 1,
                             .flags = ONT_OP_MODEL, .attributes = "shape:I", .infer = sum_to_infer,
                             ONT_KERNELS(kernels)};
