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

enum { LEVELS = 16, FP4 = 0, NF4 = 1 };

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

/* out (n) = weights [first, first + n) in row-major order; they may begin and end anywhere in a block or a byte. */
#define DEQUANTIZE(suffix, type) \
    static void dequantize_##suffix(const ont_call *call, const bnb4_desc *d, int64_t first, int64_t n, type *out) \
    { \
        const uint8_t *codes = call->in[1]; \
        type levels[LEVELS]; \
        for (int64_t i = first, end = first + n; i < end;) { \
            int64_t block = i / d->block, stop = ont_min(end, (block + 1) * d->block); \
            levels_##suffix(call, d, block, levels); \
            if (i % 2) *out++ = levels[codes[i++ / 2] & 15]; \
            for (; i + 1 < stop; i += 2) { \
                uint8_t pair = codes[i / 2]; \
                *out++ = levels[pair >> 4]; \
                *out++ = levels[pair & 15]; \
            } \
            if (i < stop) *out++ = levels[codes[i++ / 2] >> 4]; \
        } \
    }
DEQUANTIZE(f32, float)
DEQUANTIZE(f64, double)

static void dequantize(const ont_call *call, const bnb4_desc *d, int64_t first, int64_t n, void *out)
{
    if (ont_node_in(call->node, 0)->dtype == ONT_FLOAT32) dequantize_f32(call, d, first, n, out);
    else dequantize_f64(call, d, first, n, out);
}

/* ---- kernel: panels of the weight ---- */

/*
 * Each task dequantizes a panel of the weight into its scratch and multiplies by it, on its own thread. A panel is
 * (rows, k) where it is transposed. Otherwise it is (rows, columns), and products of the panels below each other add up
 * in the columns of the result.
 */
enum { PANEL_ELEMENTS = 1 << 17, MIN_ROWS = 32, MAX_ROWS = 256, MIN_COLUMNS = 64 };

typedef struct bnb4_state {
    bnb4_desc d;
    ont_gemm gemm; /* of a whole panel */
    const ont_gemm_backend *backend;
    int64_t rows, columns; /* of a panel, at most */
    int64_t n_panels, n_tasks; /* panels that can be computed at the same time */
    size_t size, panel_bytes;  /* bytes of an element, of a task's scratch */
} bnb4_state;

static ont_status bnb4_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    bnb4_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (bnb4_state){0};
    bnb4_desc *d = &s->d;
    ONT_TRY(bnb4_read(node, d));
    int64_t threads = ont_parallel_threads();
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    s->size = ont_dtype_size(dtype);
    s->columns = d->trans_b ? d->k : ont_min(d->k, ont_max(MIN_COLUMNS, ont_ceil_div(d->k, threads)));
    s->columns = d->trans_b ? s->columns : ont_min(s->columns, PANEL_ELEMENTS / MAX_ROWS);
    s->rows = ont_min(d->n, ont_min(MAX_ROWS, ont_max(MIN_ROWS, PANEL_ELEMENTS / s->columns)));
    s->n_panels = d->trans_b ? ont_ceil_div(d->n, s->rows) : ont_ceil_div(d->k, s->columns);
    s->n_tasks = ont_min(threads, s->n_panels);
    s->panel_bytes = (size_t)ont_round_up(s->rows * s->columns * (int64_t)s->size, 64);
    s->gemm = (ont_gemm){.dtype = dtype, .trans_b = d->trans_b, .m = d->m, .alpha = 1,
                         .n = d->trans_b ? s->rows : s->columns, .k = d->trans_b ? d->k : s->rows,
                         .lda = d->trans_b ? d->k : d->n, .ldb = s->columns, .ldc = d->trans_b ? d->n : d->k};
    s->backend = d->m ? ont_gemm_choose(&s->gemm) : ont_gemm_reference();
    out->state = s;
    out->work_bytes = s->panel_bytes * (size_t)s->n_tasks;
    return ONT_OK;
}

/* Columns [first, first + rows) of the result: rows of the weight. */
static void multiply_rows(const ont_call *call, const bnb4_state *s, int64_t first, char *panel)
{
    ont_gemm gemm = s->gemm;
    gemm.n = ont_min(s->rows, s->d.n - first);
    dequantize(call, &s->d, first * s->d.k, gemm.n * s->d.k, panel);
    s->backend->run(&gemm, call->in[0], panel, (char *)call->out[0] + (size_t)first * s->size);
}

/* Columns [first, first + columns) of the result, which are those of the weight. */
static void multiply_columns(const ont_call *call, const bnb4_state *s, int64_t first, char *panel)
{
    ont_gemm gemm = s->gemm;
    gemm.n = ont_min(s->columns, s->d.k - first);
    for (int64_t row = 0; row < s->d.n; row += s->rows) {
        gemm.k = ont_min(s->rows, s->d.n - row);
        gemm.beta = row > 0;
        for (int64_t i = 0; i < gemm.k; i++)
            dequantize(call, &s->d, (row + i) * s->d.k + first, gemm.n, panel + (size_t)(i * gemm.ldb) * s->size);
        s->backend->run(&gemm, (const char *)call->in[0] + (size_t)row * s->size, panel,
                        (char *)call->out[0] + (size_t)first * s->size);
    }
}

static void run_tasks(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const bnb4_state *s = call->state;
    for (int64_t task = first; task < last; task++) {
        char *panel = (char *)call->work + (size_t)task * s->panel_bytes;
        for (int64_t i = task; i < s->n_panels; i += s->n_tasks)
            if (s->d.trans_b) multiply_rows(call, s, i * s->rows, panel);
            else multiply_columns(call, s, i * s->columns, panel);
    }
}

static ont_status bnb4_run(const ont_call *call)
{
    const bnb4_state *s = call->state;
    if (s->d.m) ont_parallel(s->n_tasks, 1, run_tasks, (void *)call);
    return ONT_OK;
}

/* ---- kernel of bfloat16: the whole weight ---- */

/*
 * The weight is dequantized into scratch, and multiplied there by all threads: a product of panels would pack A again
 * for each of them. For few rows, panels in float32 take less time.
 */
enum { FEW_ROWS = 8, GRAIN = 1 << 14 }; /* GRAIN: weights that a thread dequantizes at a time */

typedef struct half_state {
    bnb4_desc d;
    ont_half_product product;
    size_t weight_bytes;
} half_state;

static const char *half_accept(const ont_node *node)
{
    bnb4_desc d;
    if (ont_node_in(node, 0)->dtype != ONT_BFLOAT16) return "dtype is not bfloat16";
    if (bnb4_read(node, &d) != ONT_OK) return "operands";
    if (d.weight_dtype != ONT_BFLOAT16 || ont_node_in(node, 2)->dtype != ONT_FLOAT32) return "dtype of W or absmax";
    return d.m > FEW_ROWS ? ont_half_product_refuses(ONT_BFLOAT16) : "few rows";
}

static ont_status half_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    half_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (half_state){0};
    bnb4_desc *d = &s->d;
    ONT_TRY(bnb4_read(node, d));
    int64_t inner = d->trans_b ? d->k : d->n, outer = d->trans_b ? d->n : d->k;
    ont_gemm gemm = {.dtype = ONT_BFLOAT16, .trans_b = d->trans_b, .m = d->m, .n = outer, .k = inner, .alpha = 1,
                     .lda = inner, .ldb = d->k, .ldc = outer};
    ONT_TRY(ont_half_product_prepare(&s->product, &gemm, ONT_BFLOAT16, false));
    s->weight_bytes = (size_t)ont_round_up(d->n * d->k * (int64_t)sizeof(uint16_t), 64);
    out->state = s;
    out->work_bytes = s->weight_bytes + ont_half_product_work_bytes(&s->product);
    return ONT_OK;
}

static void half_release(void *state)
{
    ont_half_product_release(&((half_state *)state)->product);
}

/* Blocks [first, last) of the weight, of which the last one may end within a byte. */
static void dequantize_blocks(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const bnb4_desc *d = &((const half_state *)call->state)->d;
    const uint8_t *codes = call->in[1];
    float exact[LEVELS];
    uint16_t levels[LEVELS], *out = call->work;
    for (int64_t block = first; block < last; block++) {
        int64_t at = block * d->block, n = ont_min(d->block, d->n * d->k - at);
        levels_f32(call, d, block, exact);
        ont_simd()->float_to_bfloat(exact, levels, LEVELS); /* exactly: they are rounded */
        ont_simd()->decode_nibbles(codes + at / 2, levels, out + at, n / 2);
        if (n % 2) out[at + n - 1] = levels[codes[(at + n) / 2] >> 4];
    }
}

static ont_status half_run(const ont_call *call)
{
    const half_state *s = call->state;
    const bnb4_desc *d = &s->d;
    ont_parallel(ont_ceil_div(d->n * d->k, d->block), ont_max(1, GRAIN / d->block), dequantize_blocks, (void *)call);
    return ont_half_product_run(&s->product, call->in[0], call->work, NULL, call->out[0], false,
                                (char *)call->work + s->weight_bytes);
}

/* ---- reference ---- */

#define REFERENCE(suffix, type) \
    static void reference_##suffix(const ont_call *call, const bnb4_desc *d) \
    { \
        const type *a = call->in[0]; \
        type *y = call->out[0], w; \
        int64_t inner = d->trans_b ? d->k : d->n, outer = d->trans_b ? d->n : d->k; \
        for (int64_t i = 0; i < d->m; i++) \
            for (int64_t j = 0; j < outer; j++) { \
                double sum = 0; \
                for (int64_t l = 0; l < inner; l++) { \
                    dequantize_##suffix(call, d, d->trans_b ? j * d->k + l : l * d->k + j, 1, &w); \
                    sum += (double)a[i * inner + l] * (double)w; \
                } \
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
    {.name = "matmul_bnb4_half", .accept = half_accept, .prepare = half_prepare, .run = half_run,
     .release = half_release},
    {.name = "matmul_bnb4_panels", .accept = ont_accept_float, .prepare = bnb4_prepare, .run = bnb4_run},
    {.name = "matmul_bnb4_ref", .accept = ont_accept_float, .run = bnb4_run_ref},
};
const ont_op ont_op_MatMulBnb4 = {
    .domain = DOMAIN, .name = "MatMulBnb4", .since = 1, .min_inputs = 3, .max_inputs = 3, .nondiff_inputs = 6,
    .attributes = "K:i N:i block_size:i quant_type:i training_mode:i transB:i weight_dtype:i grad_weight_dtype:i",
    .infer = bnb4_infer, .grad = bnb4_grad, .expand = bnb4_expand, .cost = ONT_COST_MATMUL, .rows = ONT_ROWS_MATMUL,
    ONT_KERNELS(bnb4_kernels)};
