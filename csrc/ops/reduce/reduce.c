/*
 * Reductions over axes, and SumTo, the transpose of a broadcast. reduce_desc.c reads their nodes.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/support/sums.h"
#include "simd/reduce/reduce.h"

static ont_status reduce_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    bool reduce[ONT_MAX_RANK];
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_reduce_axes(node, &x->shape, reduce));
    bool keep = ont_attr_int(node, "keepdims", 1);
    ont_shape shape = {0};
    for (int d = 0; d < x->shape.rank; d++)
        if (!reduce[d] || keep) shape.dims[shape.rank++] = reduce[d] ? 1 : x->shape.dims[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_status sum_to_infer(ont_graph *g, ont_node *node)
{
    bool reduce[ONT_MAX_RANK];
    ONT_TRY(ont_infer_shape_attr(g, node));
    return ont_reduce_sum_to_axes(&ont_node_in(node, 0)->shape, &node->outputs[0]->shape, reduce);
}

static ont_status reduce_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_reduce *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    out->state = s;
    return ont_reduce_read(node, s);
}

/* ---- sum or mean over one run of dims, in the order of sums.h. 16-bit columns, for the gradient of a bias, are summed
 * in float32 and rounded once ---- */

/* Columns of a unit of work: wide strips read whole pages of memory, where there are enough strips for every thread. */
enum { STRIP = 512, WIDE_STRIP = 2048, LINE = 16 };

static const char *accept_one_run(const ont_node *node)
{
    ont_reduce_kind kind = ont_reduce_kind_of(node);
    if (kind != ONT_REDUCE_SUM && kind != ONT_REDUCE_MEAN) return "not a sum";
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    bool reduce[ONT_MAX_RANK];
    int changes = 0;
    if (ONT_IS(node, SumTo) ? ont_reduce_sum_to_axes(x, &node->outputs[0]->shape, reduce) != ONT_OK
                                         : ont_reduce_axes(node, x, reduce) != ONT_OK)
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

static const char *accept_sum_f64(const ont_node *node)
{
    return ont_node_in(node, 0)->dtype == ONT_FLOAT64 ? accept_one_run(node) : "dtype";
}

static const char *accept_sum_half(const ont_node *node)
{
    ont_reduce s;
    if (!ont_dtype_is_half(ont_node_in(node, 0)->dtype)) return "dtype";
    const char *refusal = accept_one_run(node);
    if (refusal) return refusal;
    return ont_reduce_read(node, &s) == ONT_OK && s.n > 0 && s.tail >= LINE ? NULL : "not along columns";
}

static int64_t blocks_of(const ont_reduce *s)
{
    return (s->n + ONT_SUM_BLOCK - 1) / ONT_SUM_BLOCK;
}

static ont_status sum_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(reduce_prepare(node, arena, out));
    const ont_reduce *s = out->state;
    if (s->tail == 1 && s->lead == 1) out->work_bytes = (size_t)blocks_of(s) * sizeof(double);
    return ONT_OK;
}

static void put(const ont_call *call, int64_t i, double sum)
{
    const ont_reduce *s = call->state;
    if (s->kind == ONT_REDUCE_MEAN) sum /= (double)s->n;
    if (call->node->outputs[0]->dtype == ONT_FLOAT64)
        ((double *)call->out[0])[i] = sum;
    else
        ((float *)call->out[0])[i] = (float)sum;
}

/* Blocks [first, last) of a row. */
static double sum_blocks(const ont_reduce *s, ont_dtype dtype, const void *row, int64_t first, int64_t last)
{
    double sum = 0;
    for (int64_t at = first * ONT_SUM_BLOCK; first < last; first++, at += ONT_SUM_BLOCK) {
        int64_t n = s->n - at < ONT_SUM_BLOCK ? s->n - at : ONT_SUM_BLOCK;
        sum += ont_sum_block(s->simd, s->kind, dtype, (const char *)row + (size_t)at * ont_dtype_size(dtype), n);
    }
    return sum;
}

static void sum_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    ont_dtype dtype = call->node->outputs[0]->dtype;
    size_t bytes = (size_t)s->n * ont_dtype_size(dtype);
    int64_t blocks = blocks_of(s);
    if (dtype == ONT_FLOAT32 && s->n < ONT_SHORT_ROW) {
        float *y = (float *)call->out[0] + first;
        ont_simd_reduce()->run[ONT_STEP_SUM][dtype]((const char *)call->in[0] + (size_t)first * bytes, y, last - first,
                                                    s->n, 1, 1);
        for (int64_t i = 0; s->kind == ONT_REDUCE_MEAN && i < last - first; i++)
            y[i] = (float)((double)y[i] / (double)s->n);
        return;
    }
    for (int64_t row = first; row < last; row++)
        put(call, row, sum_blocks(s, dtype, (const char *)call->in[0] + (size_t)row * bytes, 0, blocks));
}

static void sum_one_row(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    ont_dtype dtype = call->node->outputs[0]->dtype;
    for (int64_t k = first; k < last; k++)
        ((double *)call->work)[k] = sum_blocks(call->state, dtype, call->in[0], k, k + 1);
}

/* Returns the number of strips of columns, and sets the columns of each: roughly equal, to balance threads. */
static int64_t strips_of(const ont_reduce *s, int64_t *columns)
{
    int64_t width = s->tail >= 4 * WIDE_STRIP ? WIDE_STRIP : STRIP, strips = (s->tail + width - 1) / width;
    *columns = ((s->tail + strips - 1) / strips + LINE - 1) / LINE * LINE;
    return (s->tail + *columns - 1) / *columns;
}

static void sum_strips(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_reduce *s = call->state;
    ont_dtype dtype = call->node->outputs[0]->dtype;
    size_t size = ont_dtype_size(dtype), sum_size = dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float);
    int64_t columns, strips = strips_of(s, &columns), unit = ont_sum_unit(s->n, s->tail);
    for (int64_t i = first; i < last; i++) {
        int64_t lead = i / strips, from = i % strips * columns, n = s->tail - from < columns ? s->tail - from : columns;
        const char *x = (const char *)call->in[0] + (size_t)(lead * s->n * s->tail + from) * size;
        union {
            float f32[WIDE_STRIP];
            double f64[WIDE_STRIP];
        } total, more;
        for (int64_t row = 0, rows; row < s->n; row += rows) {
            rows = s->n - row < unit ? s->n - row : unit;
            memset(row ? &more : &total, 0, (size_t)n * sum_size);
            ont_sum_rows(s->simd, dtype, row ? &more : &total, x + (size_t)(row * s->tail) * size, rows, s->tail, n);
            if (row) ont_sum_rows(s->simd, sum_size == size ? dtype : ONT_FLOAT32, &total, &more, 1, n, n);
        }
        char *at = (char *)call->out[0] + (size_t)(lead * s->tail + from) * size;
        ont_sum_put(s->simd, s->kind, dtype, &total, s->n, at, n);
    }
}

static ont_status sum_run(const ont_call *call)
{
    const ont_reduce *s = call->state;
    if (s->tail > 1) {
        int64_t columns, strips = strips_of(s, &columns);
        ont_parallel(s->lead * strips, 16384 / (columns * s->n) + 1, sum_strips, (void *)call);
    } else if (s->lead > 1) {
        ont_parallel(s->lead, 16384 / s->n + 1, sum_rows, (void *)call);
    } else {
        double sum = 0;
        ont_parallel(blocks_of(s), 16384 / ONT_SUM_BLOCK, sum_one_row, (void *)call);
        for (int64_t k = 0; k < blocks_of(s); k++) sum += ((const double *)call->work)[k];
        put(call, 0, sum);
    }
    return ONT_OK;
}

/* ---- reference: all kinds, all axes ---- */

/* The maximum of no elements is `lowest`, the minimum `highest`. */
#define REFERENCE(suffix, type, acc_type, lowest, highest) \
    static acc_type element_##suffix(ont_reduce_kind kind, acc_type acc, acc_type v, acc_type max) \
    { \
        switch (kind) { \
        case ONT_REDUCE_MAX: return v > acc || v != v ? v : acc; \
        case ONT_REDUCE_MIN: return v < acc || v != v ? v : acc; \
        case ONT_REDUCE_PROD: return acc * v; \
        case ONT_REDUCE_L1: return acc + (v < 0 ? 0 - v : v); \
        case ONT_REDUCE_L2: \
        case ONT_REDUCE_SUM_SQUARE: return acc + v * v; \
        case ONT_REDUCE_LOG_SUM_EXP: return acc + (acc_type)exp((double)(v - max)); \
        default: return acc + v; \
        } \
    } \
    static acc_type walk_##suffix(const ont_reduce *s, const type *x, ont_reduce_kind kind, acc_type acc, \
                                  acc_type max) \
    { \
        int64_t index[ONT_MAX_RANK] = {0}, last = s->n_reduced - 1; \
        int64_t run = last < 0 ? 1 : s->reduced[last], stride = last < 0 ? 0 : s->reduced_stride[last]; \
        for (int64_t e = 0; e < s->each; e += run) { \
            const type *from = x; \
            for (int64_t d = 0; d < last; d++) from += index[d] * s->reduced_stride[d]; \
            for (int64_t k = 0; k < run; k++) acc = element_##suffix(kind, acc, (acc_type)from[k * stride], max); \
            for (int64_t d = last - 1; d >= 0 && ++index[d] == s->reduced[d]; d--) index[d] = 0; \
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
            acc_type max = s->kind == ONT_REDUCE_LOG_SUM_EXP && s->each \
                                                ? walk_##suffix(s, from, ONT_REDUCE_MAX, (acc_type)from[0], 0) : 0; \
            if (s->kind == ONT_REDUCE_LOG_SUM_EXP && isinf((double)max)) max = 0; \
            acc_type none = s->kind == ONT_REDUCE_MAX ? (lowest) : s->kind == ONT_REDUCE_MIN ? (highest) \
                                                : s->kind == ONT_REDUCE_PROD ? 1 : 0; \
            acc_type start = extremum && s->each ? (acc_type)from[0] : none; \
            acc_type acc = walk_##suffix(s, from, s->kind, start, max); \
            if (s->kind == ONT_REDUCE_MEAN) acc = acc / (acc_type)s->each; \
            if (s->kind == ONT_REDUCE_L2) acc = (acc_type)sqrt((double)acc); \
            if (s->kind == ONT_REDUCE_LOG_SUM) acc = (acc_type)log((double)acc); \
            if (s->kind == ONT_REDUCE_LOG_SUM_EXP) acc = (acc_type)log((double)acc) + max; \
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
    ont_reduce_kind kind = ont_reduce_kind_of(node);
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
    {.name = "reduce_sum_f32", .accept = accept_sum_f32, .prepare = sum_prepare, .run = sum_run},
    {.name = "reduce_sum_f64", .accept = accept_sum_f64, .prepare = sum_prepare, .run = sum_run},
    {.name = "reduce_sum_half", .accept = accept_sum_half, .prepare = sum_prepare, .run = sum_run},
    {.name = "reduce_run", .accept = ont_reduce_run_accept, .prepare = ont_reduce_run_prepare,
     .run = ont_reduce_run_run},
    {.name = "reduce_rows", .accept = ont_reduce_rows_accept, .prepare = reduce_prepare, .run = ont_reduce_rows_run},
    {.name = "reduce_ref", .accept = accept_ref, .prepare = reduce_prepare, .run = ref_run},
};

/* ---- gradients: dy and y are reshaped to keep the reduced dims, and broadcast ---- */

typedef struct spread {
    ont_value *dy, *y;
    ont_shape kept;
    double count;
} spread;

static bool spread_back(ont_grad *g, spread *s)
{
    bool reduce[ONT_MAX_RANK];
    const ont_shape *x = &I(0)->shape;
    if (ont_reduce_axes(g->node, x, reduce) != ONT_OK) return false;
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
/* 0 where the norm is 0, as in torch */
REDUCE_GRAD(l2_grad,
            ont_build3(&g->b, "Where", B("Equal", s.y, SCALAR(0)), SCALAR(0), B("Mul", I(0), B("Div", s.dy, s.y))))

/* As torch.amax: ties share the gradient evenly. */
static void extremum_grad(ont_grad *g)
{
    spread s;
    if (!spread_back(g, &s)) return;
    ont_value *hit = ont_build_cast(&g->b, B("Equal", I(0), s.y), I(0)->dtype);
    ont_value *ties = ont_build_sum_to(&g->b, hit, &s.kept);
    GI(0, B("Mul", hit, B("Div", s.dy, ties)));
}

/* The gradient of an element is the product of the others: with one zero, only for that element; with two, for none. */
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
    if ((g->b.status = ont_reduce_axes(g->node, &I(0)->shape, reduce)) != ONT_OK) return;
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
                                   .infer = reduce_infer, .grad = grad_, .rows = ONT_ROWS_REDUCE, \
                                   ONT_KERNELS(kernels)}
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
                             .flags = ONT_OP_PUBLIC, .attributes = "shape:I", .infer = sum_to_infer,
                             ONT_KERNELS(kernels)};
