/*
 * MatMulBnb4 of the domain com.microsoft: a product with a weight of 4-bit codes, as bitsandbytes' Linear4bit has it.
 *
 *   (A (..., K), B, absmax) -> A W', or with transB = 0 (A (..., N), B, absmax) -> A W, for the weight W (N, K)
 *
 * B has the codes of W in row-major order, two a byte, the earlier one in the high half; absmax a scale for each
 * block_size of them. B and absmax are constants of training. The gradient of A is the product with the other transB.
 *
 * Two attributes are ours. weight_dtype: W is rounded to it, by default to A's dtype. grad_weight_dtype: the same for
 * the gradient, since bitsandbytes' backward rounds to the dtype that the weight had before it was quantized.
 */
#include <inttypes.h>

#include "base/int_math.h"
#include "base/parallel.h"
#include "device/half_product.h"
#include "ops/op.h"
#include "simd/simd.h"

#define DOMAIN "com.microsoft"

enum { LEVELS = 16, FP4 = 0, NF4 = 1, GRAIN = 1 << 14 }; /* weights that a thread dequantizes at a time */

/* Values of the codes, from bitsandbytes/functional.py; FP4: sign, two bits of exponent, one of mantissa. */
static const float values[2][LEVELS] = {
    [FP4] = {0, 0.0625F / 12, 8.0F / 12, 1, 4.0F / 12, 6.0F / 12, 2.0F / 12, 3.0F / 12, 0, -0.0625F / 12,
             -8.0F / 12, -1, -4.0F / 12, -6.0F / 12, -2.0F / 12, -3.0F / 12},
    [NF4] = {-1, -0.6961928009986877F, -0.5250730514526367F, -0.39491748809814453F, -0.28444138169288635F,
             -0.18477343022823334F, -0.09105003625154495F, 0, 0.07958029955625534F, 0.16093020141124725F,
             0.24611230194568634F, 0.33791524171829224F, 0.44070982933044434F, 0.5626170039176941F,
             0.7229568362236023F, 1},
};

/* ---- shapes ---- */

typedef struct bnb4_desc {
    int64_t m, n, k, block; /* A has m rows; the weight is (n, k) */
    bool trans_b;
    const float *values;
    ont_dtype weight_dtype;
} bnb4_desc;

static ont_status read_size(const ont_node *node, const char *name, int64_t least, int64_t *size)
{
    const ont_attr *attr = ont_attr_find(node, name, ONT_ATTR_INT);
    if (!attr) return ont_fail(ONT_EINVAL, "attribute %s is missing", name);
    *size = attr->i;
    if (*size >= least) return ONT_OK;
    return ont_fail(ONT_EINVAL, "attribute %s is %" PRId64 ", at least %" PRId64 " is expected", name, *size, least);
}

/* Attribute `name`, a float dtype; `missing` where it is absent. */
static ont_status read_dtype(const ont_node *node, const char *name, ont_dtype missing, ont_dtype *dtype)
{
    int64_t number = ont_attr_int(node, name, missing);
    if (number < 0 || number >= ONT_DTYPE_COUNT || !ont_dtype_is_float((ont_dtype)number))
        return ont_fail(ONT_EINVAL, "attribute %s is %" PRId64 ", a float type is expected", name, number);
    *dtype = (ont_dtype)number;
    return ONT_OK;
}

static ont_status read_attributes(const ont_node *node, bnb4_desc *d)
{
    int64_t quant_type, count;
    ont_dtype of_gradient;
    ONT_TRY(read_size(node, "N", 1, &d->n));
    ONT_TRY(read_size(node, "K", 1, &d->k));
    ONT_TRY(read_size(node, "block_size", 16, &d->block));
    ONT_TRY(read_size(node, "quant_type", 0, &quant_type));
    if (__builtin_mul_overflow(d->n, d->k, &count) || count > INT64_MAX - d->block)
        return ont_fail(ONT_EINVAL, "N %" PRId64 " times K %" PRId64 " overflows", d->n, d->k);
    if (d->block & (d->block - 1))
        return ont_fail(ONT_EINVAL, "attribute block_size is %" PRId64 ", a power of two is expected", d->block);
    if (quant_type > NF4)
        return ont_fail(ONT_EINVAL, "attribute quant_type is %" PRId64 ", 0 (FP4) or 1 (NF4) is expected", quant_type);
    d->values = values[quant_type];
    d->trans_b = ont_attr_int(node, "transB", 1) != 0;
    ONT_TRY(read_dtype(node, "weight_dtype", ont_node_in(node, 0)->dtype, &d->weight_dtype));
    return read_dtype(node, "grad_weight_dtype", d->weight_dtype, &of_gradient);
}

/* Input `index`, one-dimensional with `count` elements. */
static ont_status check_length(const ont_node *node, uint32_t index, const char *name, int64_t count)
{
    char text[ONT_SHAPE_TEXT];
    const ont_shape *shape = &ont_node_in(node, index)->shape;
    if (shape->rank == 1 && shape->dims[0] == count) return ONT_OK;
    return ont_fail(ONT_EINVAL, "%s is %s, [%" PRId64 "] is expected", name, ont_shape_text(shape, text), count);
}

static ont_status bnb4_read(const ont_node *node, bnb4_desc *d)
{
    ont_value *a, *b, *absmax;
    ONT_TRY(ont_need_input(node, 0, &a));
    ONT_TRY(ont_need_input(node, 1, &b));
    ONT_TRY(ont_need_input(node, 2, &absmax));
    if (!ont_dtype_is_float(a->dtype)) return ont_fail(ONT_ETYPE, "A is %s, a float type is expected",
                                                       ont_dtype_name(a->dtype));
    if (b->dtype != ONT_UINT8) return ont_fail(ONT_ETYPE, "B is %s, uint8 is expected", ont_dtype_name(b->dtype));
    if (absmax->dtype != ONT_FLOAT32 && absmax->dtype != a->dtype)
        return ont_fail(ONT_ETYPE, "absmax is %s, float or the type of A is expected", ont_dtype_name(absmax->dtype));
    ONT_TRY(read_attributes(node, d));
    int64_t last = d->trans_b ? d->k : d->n, count = d->n * d->k;
    if (!a->shape.rank || a->shape.dims[a->shape.rank - 1] != last) {
        char text[ONT_SHAPE_TEXT];
        return ont_fail(ONT_EINVAL, "A is %s, its last dim must be %s, %" PRId64, ont_shape_text(&a->shape, text),
                        d->trans_b ? "K" : "N", last);
    }
    d->m = ont_shape_count_range(&a->shape, 0, a->shape.rank - 1);
    ONT_TRY(check_length(node, 1, "B", ont_ceil_div(count, 2)));
    return check_length(node, 2, "absmax", ont_ceil_div(count, d->block));
}

static ont_status bnb4_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    bnb4_desc d;
    ONT_TRY(bnb4_read(node, &d));
    const ont_value *a = ont_node_in(node, 0);
    ont_shape shape = a->shape;
    shape.dims[shape.rank - 1] = d.trans_b ? d.n : d.k;
    return ont_infer_out(node, 0, a->dtype, &shape);
}

/* ---- weights ---- */

static void round_levels(float *levels, ont_dtype to, int64_t n)
{
    uint16_t half[LEVELS];
    const ont_simd_table *simd = ont_simd();
    if (to == ONT_BFLOAT16) {
        simd->float_to_bfloat(levels, half, n);
        simd->bfloat_to_float(half, levels, n);
    } else if (to == ONT_FLOAT16) {
        simd->float_to_half(levels, half, n);
        simd->half_to_float(half, levels, n);
    }
}

static double absmax_at(const ont_call *call, int64_t block)
{
    bool f32 = ont_node_in(call->node, 2)->dtype == ONT_FLOAT32;
    return f32 ? (double)((const float *)call->in[2])[block] : ((const double *)call->in[2])[block];
}

/* The weights that the codes stand for in a block. */
static void levels_f32(const ont_call *call, const bnb4_desc *d, int64_t block, float *levels)
{
    float scale = (float)absmax_at(call, block);
    for (int i = 0; i < LEVELS; i++) levels[i] = d->values[i] * scale;
    round_levels(levels, d->weight_dtype, LEVELS);
}

static void levels_f64(const ont_call *call, const bnb4_desc *d, int64_t block, double *levels)
{
    double scale = absmax_at(call, block);
    for (int i = 0; i < LEVELS; i++) levels[i] = (double)d->values[i] * scale;
    if (d->weight_dtype == ONT_FLOAT64) return;
    float narrow[LEVELS];
    for (int i = 0; i < LEVELS; i++) narrow[i] = (float)levels[i];
    round_levels(narrow, d->weight_dtype, LEVELS);
    for (int i = 0; i < LEVELS; i++) levels[i] = (double)narrow[i];
}

/* In bfloat16, to which they are rounded. */
static void levels_bf16(const ont_call *call, const bnb4_desc *d, int64_t block, uint16_t *levels)
{
    float scale = (float)absmax_at(call, block), exact[LEVELS];
    for (int i = 0; i < LEVELS; i++) exact[i] = d->values[i] * scale;
    ont_simd()->float_to_bfloat(exact, levels, LEVELS);
}

#define PAIRS(suffix, type) \
    static void pairs_##suffix(const uint8_t *codes, const type *levels, type *out, int64_t n) \
    { \
        for (int64_t i = 0; i + 1 < n; i += 2) { \
            uint8_t pair = codes[i / 2]; \
            out[i] = levels[pair >> 4]; \
            out[i + 1] = levels[pair & 15]; \
        } \
    }
PAIRS(f32, float)
PAIRS(f64, double)

static void pairs_bf16(const uint8_t *codes, const uint16_t *levels, uint16_t *out, int64_t n)
{
    ont_simd()->decode_nibbles(codes, levels, out, n / 2);
}

/* out = the weight (n, k); its blocks [first, last) here, of which the last one may end within a byte. */
#define DEQUANTIZE(suffix, type) \
    static void dequantize_##suffix(const ont_call *call, const bnb4_desc *d, int64_t first, int64_t last, type *out) \
    { \
        const uint8_t *codes = call->in[1]; \
        type levels[LEVELS]; \
        for (int64_t block = first; block < last; block++) { \
            int64_t at = block * d->block, n = ont_min(d->block, d->n * d->k - at); \
            levels_##suffix(call, d, block, levels); \
            pairs_##suffix(codes + at / 2, levels, out + at, n); \
            if (n % 2) out[at + n - 1] = levels[codes[(at + n) / 2] >> 4]; \
        } \
    }
DEQUANTIZE(f32, float)
DEQUANTIZE(f64, double)
DEQUANTIZE(bf16, uint16_t)

/* ---- kernel ---- */

/* The weight is dequantized into scratch, and multiplied there: that costs a few hundredths of the product. */
typedef struct bnb4_state {
    bnb4_desc d;
    ont_gemm gemm;
    const ont_gemm_backend *backend; /* NULL: `half` */
    ont_half_product half;
    size_t weight_bytes;
} bnb4_state;

static const char *bnb4_accept(const ont_node *node)
{
    bnb4_desc d;
    if (ont_node_in(node, 0)->dtype != ONT_BFLOAT16) return ont_accept_float(node);
    if (bnb4_read(node, &d) != ONT_OK) return "operands";
    if (d.weight_dtype != ONT_BFLOAT16 || ont_node_in(node, 2)->dtype != ONT_FLOAT32) return "dtype of W or absmax";
    if (!d.m) return "no rows";
    return ont_half_product_refuses(ONT_BFLOAT16);
}

static ont_status bnb4_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    bnb4_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (bnb4_state){0};
    bnb4_desc *d = &s->d;
    ONT_TRY(bnb4_read(node, d));
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    int64_t inner = d->trans_b ? d->k : d->n, outer = d->trans_b ? d->n : d->k;
    s->gemm = (ont_gemm){.dtype = dtype, .trans_b = d->trans_b, .m = d->m, .n = outer, .k = inner, .alpha = 1,
                         .lda = inner, .ldb = d->k, .ldc = outer};
    s->weight_bytes = (size_t)ont_round_up(d->n * d->k * (int64_t)ont_dtype_size(dtype), 64);
    out->state = s;
    out->work_bytes = s->weight_bytes;
    if (dtype != ONT_BFLOAT16) {
        s->backend = d->m ? ont_gemm_choose(&s->gemm) : ont_gemm_reference();
        return ONT_OK;
    }
    ONT_TRY(ont_half_product_prepare(&s->half, &s->gemm, dtype, false));
    out->work_bytes += ont_half_product_work_bytes(&s->half);
    return ONT_OK;
}

static void bnb4_release(void *state)
{
    ont_half_product_release(&((bnb4_state *)state)->half);
}

static void dequantize(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const bnb4_state *s = call->state;
    if (s->gemm.dtype == ONT_BFLOAT16) dequantize_bf16(call, &s->d, first, last, call->work);
    else if (s->gemm.dtype == ONT_FLOAT32) dequantize_f32(call, &s->d, first, last, call->work);
    else dequantize_f64(call, &s->d, first, last, call->work);
}

static ont_status bnb4_run(const ont_call *call)
{
    const bnb4_state *s = call->state;
    const bnb4_desc *d = &s->d;
    if (!d->m) return ONT_OK;
    ont_parallel(ont_ceil_div(d->n * d->k, d->block), ont_max(1, GRAIN / d->block), dequantize, (void *)call);
    if (!s->backend)
        return ont_half_product_run(&s->half, call->in[0], call->work, NULL, call->out[0], false,
                                    (char *)call->work + s->weight_bytes);
    s->backend->run(&s->gemm, call->in[0], call->work, call->out[0]);
    return ONT_OK;
}

/* ---- reference ---- */

#define REFERENCE(suffix, type) \
    static type weight_##suffix(const ont_call *call, const bnb4_desc *d, int64_t i) \
    { \
        uint8_t pair = ((const uint8_t *)call->in[1])[i / 2]; \
        type levels[LEVELS]; \
        levels_##suffix(call, d, i / d->block, levels); \
        return levels[i % 2 ? pair & 15 : pair >> 4]; \
    } \
    static void reference_##suffix(const ont_call *call, const bnb4_desc *d) \
    { \
        const type *a = call->in[0]; \
        type *y = call->out[0]; \
        int64_t inner = d->trans_b ? d->k : d->n, outer = d->trans_b ? d->n : d->k; \
        for (int64_t i = 0; i < d->m; i++) \
            for (int64_t j = 0; j < outer; j++) { \
                double sum = 0; \
                for (int64_t l = 0; l < inner; l++) \
                    sum += (double)a[i * inner + l] * \
                           (double)weight_##suffix(call, d, d->trans_b ? j * d->k + l : l * d->k + j); \
                y[i * outer + j] = (type)sum; \
            } \
    }
REFERENCE(f32, float)
REFERENCE(f64, double)

static ont_status bnb4_run_ref(const ont_call *call)
{
    bnb4_desc d;
    ONT_TRY(bnb4_read(call->node, &d));
    (ont_node_in(call->node, 0)->dtype == ONT_FLOAT32 ? reference_f32 : reference_f64)(call, &d);
    return ONT_OK;
}

/* ---- gradient and 16 bits ---- */

/* The product of x with the weight, rounded to `dtype`. */
static ont_value *product(ont_builder *b, const ont_node *like, ont_value *x, bool trans_b, int64_t dtype)
{
    ont_value *absmax = ont_node_in(like, 2);
    if (ont_dtype_is_half(absmax->dtype)) absmax = ont_build_cast(b, absmax, ONT_FLOAT32);
    ont_value *inputs[] = {x, ont_node_in(like, 1), absmax};
    ont_node *node = x && absmax ? ont_build_node(b, DOMAIN, "MatMulBnb4", inputs, 3, 1) : NULL;
    if (node) b->status = ont_attr_copy_all(b->graph, node, like);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "transB", trans_b);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "weight_dtype", dtype);
    return ont_build_done(b, node);
}

static void bnb4_grad(ont_grad *g)
{
    bool trans_b = ont_attr_int(g->node, "transB", 1) != 0;
    int64_t rounded = ont_attr_int(g->node, "weight_dtype", I(0)->dtype);
    GI(0, product(&g->b, g->node, GO(0), !trans_b, ont_attr_int(g->node, "grad_weight_dtype", rounded)));
}

/* 16-bit floats that no kernel takes are multiplied in float32, and the sum rounded once. */
static void bnb4_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *a = ont_node_in(node, 0);
    const ont_kernel *kernel;
    if (!ont_dtype_is_half(a->dtype)) {
        b->status = ont_op_choose(node, b->graph->device, false, &kernel); /* says why there is none */
        return;
    }
    ont_value *y = product(b, node, ont_build_cast(b, a, ONT_FLOAT32), ont_attr_int(node, "transB", 1) != 0,
                           ont_attr_int(node, "weight_dtype", a->dtype));
    outputs[0] = ont_build_cast(b, y, a->dtype);
}

static const ont_kernel bnb4_kernels[] = {
    {.name = "matmul_bnb4", .accept = bnb4_accept, .prepare = bnb4_prepare, .run = bnb4_run, .release = bnb4_release},
    {.name = "matmul_bnb4_ref", .accept = ont_accept_float, .run = bnb4_run_ref},
};
const ont_op ont_op_MatMulBnb4 = {
    .domain = DOMAIN, .name = "MatMulBnb4", .since = 1, .min_inputs = 3, .max_inputs = 3, .nondiff_inputs = 6,
    .attributes = "K:i N:i block_size:i quant_type:i training_mode:i transB:i weight_dtype:i grad_weight_dtype:i",
    .infer = bnb4_infer, .grad = bnb4_grad, .expand = bnb4_expand, .cost = ONT_COST_MATMUL, .rows = ONT_ROWS_MATMUL,
    ONT_KERNELS(bnb4_kernels)};
