/*
 * QuantizeLinear and DequantizeLinear, per tensor, per axis and in blocks, to and from every integer and narrow format,
 * and DynamicQuantizeLinear. A DequantizeLinear of a QuantizeLinear has a straight-through gradient: to x where it is
 * not clipped, to the scale as in Esser et al., Learned Step Size Quantization, ICLR 2020 (PyTorch's learnable fake
 * quantization). Quantized MatMul and Conv are in quantized_matmul.c.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "base/parallel.h"
#include "ops/op.h"
#include "ops/quant/quantize.h"

#define U(op, x) ont_build1(b, op, (x))
#define B(op, x, y) ont_build2(b, op, (x), (y))
#define WHERE(c, x, y) ont_build3(b, "Where", (c), (x), (y))

/* ---- the scale of an element ---- */

static ont_status scales_of(const ont_node *node, const ont_shape *x, const ont_shape *scale, ont_scales *s)
{
    char a[ONT_SHAPE_TEXT], c[ONT_SHAPE_TEXT];
    int64_t block = ont_attr_int(node, "block_size", 0);
    int axis;
    *s = (ont_scales){.one = ont_shape_count(scale) == 1 && scale->rank <= 1, .inner = 1, .n = 1, .block = 1,
                      .blocks = 1};
    if (s->one) return ONT_OK;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 1), x->rank, &axis));
    s->n = x->dims[axis];
    s->inner = ont_shape_count_range(x, axis + 1, x->rank);
    s->blocked = scale->rank == x->rank && block > 0;
    ont_shape expected = s->blocked ? *x : ont_shape_of(1, &x->dims[axis]);
    if (s->blocked) {
        s->block = block;
        expected.dims[axis] = (s->n + block - 1) / block;
    }
    s->blocks = s->blocked ? expected.dims[axis] : s->n;
    if (!ont_shape_equal(scale, &expected))
        return ont_fail(ONT_EINVAL, "the scale of shape %s does not fit x of shape %s on axis %d in blocks of %" PRId64,
                        ont_shape_text(scale, a), ont_shape_text(x, c), axis, block);
    return ONT_OK;
}

static inline int64_t scale_at(const ont_scales *s, int64_t i)
{
    if (s->one) return 0;
    int64_t k = i / s->inner % s->n;
    if (!s->blocked) return k;
    return (i / s->inner / s->n * s->blocks + k / s->block) * s->inner + i % s->inner;
}

static bool int_range(ont_dtype dtype, double *low, double *high)
{
    static const struct {
        ont_dtype dtype;
        double low, high;
    } ranges[] = {{ONT_INT8, -128, 127}, {ONT_UINT8, 0, 255}, {ONT_INT16, -32768, 32767}, {ONT_UINT16, 0, 65535},
                  {ONT_INT32, -0x1p31, 0x1p31 - 1}, {ONT_INT4, -8, 7}, {ONT_UINT4, 0, 15}, {ONT_INT2, -2, 1},
                      {ONT_UINT2, 0, 3}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (ranges[i].dtype == dtype) {
            *low = ranges[i].low;
            *high = ranges[i].high;
            return true;
        }
    return false;
}

static ont_status known_type(const ont_node *node, const char *attr, ont_dtype otherwise, ont_dtype *dtype)
{
    int64_t given = ont_attr_int(node, attr, 0);
    if (given < 0 || given >= ONT_DTYPE_COUNT)
        return ont_fail(ONT_EINVAL, "attribute %s is %" PRId64 ", which is not a dtype", attr, given);
    *dtype = given ? (ont_dtype)given : otherwise;
    return ONT_OK;
}

static ont_status check_zero_point(const ont_node *node, ont_dtype dtype)
{
    const ont_value *zero = ont_node_in(node, 2), *scale = ont_node_in(node, 1);
    if (!zero) return ONT_OK;
    if (zero->dtype != dtype)
        return ont_fail(ONT_ETYPE, "the zero point is %s, expected %s", ont_dtype_name(zero->dtype),
                        ont_dtype_name(dtype));
    bool ones = ont_shape_count(&zero->shape) == 1 && ont_shape_count(&scale->shape) == 1;
    return ones || ont_shape_equal(&zero->shape, &scale->shape)
               ? ONT_OK : ont_fail(ONT_EINVAL, "scale and zero point differ in shape");
}

/* ---- QuantizeLinear ---- */

static ont_status quantize_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *scale, *zero = ont_node_in(node, 2);
    ont_dtype dtype, precision;
    double low, high;
    ont_scales s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &scale));
    ONT_TRY(known_type(node, "output_dtype", zero ? zero->dtype : ONT_UINT8, &dtype));
    ONT_TRY(known_type(node, "precision", ONT_FLOAT32, &precision));
    if (!int_range(dtype, &low, &high) && !ont_dtype_is_narrow_float(dtype))
        return ont_fail(ONT_ETYPE, "the result is %s, expected an integer of at most 16 bits or a float of at most 8",
                        ont_dtype_name(dtype));
    if (!ont_dtype_is_float(precision))
        return ont_fail(ONT_ETYPE, "precision is %s, a float is expected", ont_dtype_name(precision));
    ONT_TRY(check_zero_point(node, dtype));
    ONT_TRY(scales_of(node, &x->shape, &scale->shape, &s));
    return ont_infer_out(node, 0, dtype, &x->shape);
}

/* Rounds to the precision of dtype. A float64 division rounded once more equals the division in float32 or float16. */
static double rounded(double value, ont_dtype dtype)
{
    uint64_t bits = 0;
    if (dtype == ONT_FLOAT32) return (double)(float)value;
    if (dtype != ONT_FLOAT16 && dtype != ONT_BFLOAT16) return value;
    ont_number_put(&bits, dtype, 0, value);
    return ont_number_at(&bits, dtype, 0);
}

ont_status ont_quantize_read(const ont_node *node, ont_quantize *q)
{
    const ont_value *x = ont_node_in(node, 0), *scale = ont_node_in(node, 1);
    *q = (ont_quantize){.x = x->dtype, .scale = scale->dtype, .y = node->outputs[0]->dtype,
                        .saturate = ont_attr_int(node, "saturate", 1)};
    q->integer = int_range(q->y, &q->low, &q->high);
    ONT_TRY(known_type(node, "precision", x->dtype == ONT_INT32 ? ONT_FLOAT64 : x->dtype, &q->precision));
    return scales_of(node, &x->shape, &scale->shape, &q->s);
}

static ont_status quantize_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_quantize *q = ont_arena_alloc(arena, sizeof *q);
    if (!q) return ONT_ENOMEM;
    out->state = q;
    return ont_quantize_read(node, q);
}

static void quantize_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_quantize *q = call->state;
    const void *zeros = call->node->n_inputs > 2 ? call->in[2] : NULL;
    for (int64_t i = first; i < last; i++) {
        int64_t k = scale_at(&q->s, i);
        double x = rounded(ont_number_at(call->in[0], q->x, i), q->precision);
        double v = rounded(x / rounded(ont_number_at(call->in[1], q->scale, k), q->precision), q->precision);
        if (zeros && !q->integer) v += ont_number_at(zeros, q->y, k);
        if (!q->integer) {
            ((uint8_t *)call->out[0])[i] = ont_narrow_float(v, q->y, q->saturate);
            continue;
        }
        v = nearbyint(v) + (zeros ? ont_number_at(zeros, q->y, k) : 0);
        ont_integer_put(call->out[0], q->y, i, (int64_t)(v < q->low ? q->low : v > q->high ? q->high : v == v ? v : 0));
    }
}

static ont_status quantize_run(const ont_call *call)
{
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 1024, quantize_range, (void *)call);
    return ONT_OK;
}

/* ---- float32 to 8 bits, one scale ---- */

static const char *quantize_accept_8(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0), *scale = ont_node_in(node, 1), *y = node->outputs[0];
    ont_scales s;
    if (x->dtype != ONT_FLOAT32 || scale->dtype != ONT_FLOAT32) return "not float";
    if (y->dtype != ONT_INT8 && y->dtype != ONT_UINT8) return "not to 8 bits";
    if (scales_of(node, &x->shape, &scale->shape, &s) != ONT_OK || !s.one) return "more than one scale";
    int64_t precision = ont_attr_int(node, "precision", 0);
    return precision && precision != ONT_FLOAT32 ? "precision" : NULL;
}

static void quantize_range_8(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_quantize *q = call->state;
    const float *x = call->in[0], scale = *(const float *)call->in[1], low = (float)q->low, high = (float)q->high;
    const void *zeros = call->node->n_inputs > 2 ? call->in[2] : NULL;
    float zero = zeros ? (float)ont_number_at(zeros, q->y, 0) : 0;
    uint8_t *y = call->out[0];
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, ties to even */
    for (int64_t i = first; i < last; i++) {
        float v = x[i] / scale;
        v = v > -1e6f ? v : -1e6f; /* far beyond 8 bits, and well inside the range in which the rounding works */
        v = v < 1e6f ? v : 1e6f;
        v = (v + magic) - magic + zero;
        v = v < low ? low : v;
        v = v > high ? high : v;
        y[i] = (uint8_t)(int32_t)(x[i] == x[i] ? v : 0);
    }
}

static ont_status quantize_run_8(const ont_call *call)
{
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 8192, quantize_range_8, (void *)call);
    return ONT_OK;
}

static const char *quantize_accept(const ont_node *node)
{
    ont_dtype x = ont_node_in(node, 0)->dtype;
    return ont_dtype_is_float(x) || x == ONT_INT32 ? NULL : "x is neither a float nor int32";
}

static const ont_kernel quantize_kernels[] = {
    {.name = "quantize_8", .accept = quantize_accept_8, .prepare = quantize_prepare, .run = quantize_run_8},
    {.name = "quantize_ref", .accept = quantize_accept, .prepare = quantize_prepare, .run = quantize_run},
};
const ont_op ont_op_QuantizeLinear = {.domain = "", .name = "QuantizeLinear", .since = 10, .min_inputs = 2,
                                      .max_inputs = 3,
                                      .flags = ONT_OP_NO_GRAD,
                                      .attributes = "axis:i block_size:i output_dtype:i precision:i saturate:i",
                                      .infer = quantize_infer, ONT_KERNELS(quantize_kernels)};

/* ---- scales as tensors that broadcast to x ---- */

/* Gives the scale the shape in which it broadcasts to x; blocks are repeated, and the last one is cut. */
static ont_value *broadcastable(ont_builder *b, const ont_node *node, const ont_shape *x, ont_value *v)
{
    ont_scales s;
    int axis;
    ont_shape scalar = {0}, wide = {.rank = x->rank};
    if (b->status != ONT_OK || !v) return NULL;
    if ((b->status = scales_of(node, x, &v->shape, &s)) != ONT_OK) return NULL;
    if (s.one) return ont_build_reshape(b, v, &scalar);
    if ((b->status = ont_shape_axis(ont_attr_int(node, "axis", 1), x->rank, &axis)) != ONT_OK) return NULL;
    if (!s.blocked) {
        for (int d = 0; d < x->rank; d++) wide.dims[d] = d == axis ? s.n : 1;
        return ont_build_reshape(b, v, &wide);
    }
    int64_t outer = ont_shape_count_range(x, 0, axis);
    ont_shape apart = ont_shape_of(4, (int64_t[]){outer, s.blocks, 1, s.inner});
    int64_t each[] = {outer, s.blocks, s.block, s.inner}, zero = 0, n = s.n, one = 1;
    v = B("Expand", ont_build_reshape(b, v, &apart), ont_build_const_ints(b, each, 4));
    ont_shape joined = ont_shape_of(3, (int64_t[]){outer, s.blocks * s.block, s.inner});
    ont_value *cut[] = {ont_build_reshape(b, v, &joined), ont_build_const_ints(b, &zero, 1),
                        ont_build_const_ints(b, &n, 1),
                        ont_build_const_ints(b, &one, 1)};
    if (b->status != ONT_OK) return NULL;
    return ont_build_reshape(b, ont_build_done(b, ont_build_node(b, "", "Slice", cut, 4, 1)), x);
}

/* ---- StraightThrough(q, x, scale, zero point) -> q, with the gradients of clip(x / scale) for x and scale ---- */

static ont_status straight_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 1, &x));
    return ont_infer_same(g, node);
}

static void straight_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    double low = ont_attr_float(g->node, "low", 0), high = ont_attr_float(g->node, "high", 0);
    ont_dtype dtype = O(0)->dtype;
    ont_value *x = ont_build_cast(b, I(1), dtype), *scale = ont_build_cast(b, I(2), dtype);
    ont_value *ratio = B("Div", x, scale), *level = U("Round", ratio);
    if (I(3)) level = B("Add", level, I(3));
    ont_value *fits = B("And", B("GreaterOrEqual", level, ont_build_scalar(b, dtype, low)),
                        B("LessOrEqual", level, ont_build_scalar(b, dtype, high)));
    ont_value *d = WHERE(fits, B("Div", GO(0), scale), ont_build_scalar(b, dtype, 0));
    if (WANTS(1)) GI(1, ont_build_cast(b, d, I(1)->dtype));
    if (WANTS(2))
        GI(2, ont_build_cast(b, ont_build_sum_to(b, U("Neg", B("Mul", d, ratio)), &I(2)->shape), I(2)->dtype));
}

const ont_op ont_op_StraightThrough = {.domain = ONT_DOMAIN, .name = "StraightThrough", .since = 1, .min_inputs = 3,
                                       .max_inputs = 4, .flags = ONT_OP_VIEW, .nondiff_inputs = 9,
                                       .attributes = "low:f high:f", .infer = straight_infer, .grad = straight_grad};

/* ---- DequantizeLinear: (x - zero point) * scale ---- */

static ont_status dequantize_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *scale;
    ont_dtype dtype;
    double low, high;
    ont_scales s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &scale));
    ONT_TRY(known_type(node, "output_dtype", scale->dtype == ONT_FLOAT8E8M0 ? ONT_FLOAT32 : scale->dtype, &dtype));
    if (!int_range(x->dtype, &low, &high) && !ont_dtype_is_narrow_float(x->dtype))
        return ont_fail(ONT_ETYPE, "x is %s, a quantised type is expected", ont_dtype_name(x->dtype));
    if (!ont_dtype_is_float(dtype))
        return ont_fail(ONT_ETYPE, "the result is %s, a float is expected", ont_dtype_name(dtype));
    ONT_TRY(check_zero_point(node, x->dtype));
    ONT_TRY(scales_of(node, &x->shape, &scale->shape, &s));
    return ont_infer_out(node, 0, dtype, &x->shape);
}

static bool same_attr(const ont_node *a, const ont_node *b, const char *name, int64_t otherwise)
{
    return ont_attr_int(a, name, otherwise) == ont_attr_int(b, name, otherwise);
}

/* The QuantizeLinear with the same scale and zero point that made x, or NULL. */
static ont_node *made_by(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    ont_node *q = x->kind == ONT_VALUE_NODE ? x->def : NULL;
    double low, high;
    if (!q || q->op != &ont_op_QuantizeLinear || !int_range(x->dtype, &low, &high)) return NULL;
    if (!ont_dtype_is_float(ont_node_in(q, 0)->dtype)) return NULL;
    bool same = ont_node_in(q, 1) == ont_node_in(node, 1) && ont_node_in(q, 2) == ont_node_in(node, 2);
    return same && same_attr(q, node, "axis", 1) && same_attr(q, node, "block_size", 0) ? q : NULL;
}

static void dequantize_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *zero = ont_node_in(node, 2);
    const ont_shape *shape = &x->shape;
    ont_dtype dtype = node->outputs[0]->dtype, wide = dtype == ONT_FLOAT64 ? dtype : ONT_FLOAT32;
    ont_node *q = made_by(node);
    ont_value *scale = broadcastable(b, node, shape, ont_build_cast(b, ont_node_in(node, 1), wide));
    ont_value *level = ont_build_cast(b, x, wide);
    if (zero) zero = ont_build_cast(b, broadcastable(b, node, shape, zero), wide);
    if (b->status != ONT_OK) return;
    if (q) {
        double low = 0, high = 0;
        int_range(x->dtype, &low, &high);
        ont_value *from = ont_build_cast(b, ont_node_in(q, 0), wide);
        if (b->status != ONT_OK) return;
        ont_node *through = ont_build_node(b, ONT_DOMAIN, "StraightThrough", (ont_value *[]){level, from, scale, zero},
                                           zero ? 4 : 3, 1);
        if (through) b->status = ont_attr_set_float(b->graph, through, "low", low);
        if (through && b->status == ONT_OK) b->status = ont_attr_set_float(b->graph, through, "high", high);
        level = ont_build_done(b, through);
    }
    if (zero) level = B("Sub", level, zero);
    outputs[0] = ont_build_cast(b, B("Mul", level, scale), dtype);
}

const ont_op ont_op_DequantizeLinear = {.domain = "", .name = "DequantizeLinear", .since = 10, .min_inputs = 2,
                                        .max_inputs = 3, .attributes = "axis:i block_size:i output_dtype:i",
                                        .infer = dequantize_infer, .expand = dequantize_expand};

/* ---- DynamicQuantizeLinear: to uint8 over the range of x and zero ---- */

static ont_value *whole(ont_builder *b, const char *op, ont_value *x)
{
    int64_t axes[ONT_MAX_RANK];
    for (int d = 0; d < x->shape.rank; d++) axes[d] = d;
    return ont_build_reduce(b, op, x, axes, (size_t)x->shape.rank, false);
}

static void dynamic_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    if (!x || x->dtype != ONT_FLOAT32) {
        ont_build_fail(b, ONT_ETYPE, "x must be float");
        return;
    }
    ont_value *zero = ont_build_scalar(b, ONT_FLOAT32, 0), *most = ont_build_scalar(b, ONT_FLOAT32, 255);
    ont_value *low = B("Min", whole(b, "ReduceMin", x), zero), *high = B("Max", whole(b, "ReduceMax", x), zero);
    ont_value *range = B("Sub", high, low);
    range = WHERE(B("Equal", range, zero), ont_build_scalar(b, ONT_FLOAT32, 1), range);
    ont_value *scale = B("Div", range, most);
    ont_value *at = ont_build3(b, "Clip", U("Neg", B("Div", low, scale)), zero, most);
    ont_value *point = ont_build_cast(b, U("Round", at), ONT_UINT8);
    outputs[0] = ont_build3(b, "QuantizeLinear", x, scale, point);
    outputs[1] = scale;
    outputs[2] = point;
}

const ont_op ont_op_DynamicQuantizeLinear = {.domain = "", .name = "DynamicQuantizeLinear", .since = 11,
                                             .min_inputs = 1,
                                             .max_inputs = 1, .nondiff_outputs = 7, .attributes = "",
                                                 .expand = dynamic_expand};
