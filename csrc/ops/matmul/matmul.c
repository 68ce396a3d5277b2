/*
 * MatMul, Gemm, and FusedMatMul: a MatMul with transposes and a scale as attributes, which the gradient rules use so
 * that no operand is transposed in memory. Its optional third input is a bias (n). Its optional second output is op(A)
 * summed over k: the gradient of a linear layer's bias (passes/fuse_sums.c).
 */
#include "base/assert.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "device/matmul.h"
#include "device/gemm_native.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul/matmul_int.h"

/* ---- shapes ---- */

static ont_status matmul_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_matmul_desc p;
    ONT_TRY(ont_matmul_desc_read(node, &p));
    ont_shape shape = p.batch;
    if (shape.rank + 2 > ONT_MAX_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "the result has rank %d, at most %d is supported", shape.rank + 2,
                        ONT_MAX_RANK);
    if (!p.vector_a) shape.dims[shape.rank++] = p.m;
    if (!p.vector_b) shape.dims[shape.rank++] = p.n;
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    const ont_value *c = ont_node_in(node, 2);
    if (c && (c->dtype != dtype || !ont_matmul_desc_is_bias(&p, &c->shape) || p.alpha != 1 || ont_dtype_is_int(dtype)))
        return ont_fail(ONT_EUNSUPPORTED, "the bias must be (n) and of the product's dtype, with alpha 1");
    ont_dtype to = (ont_dtype)ont_attr_int(node, "to", dtype);
    if (to != dtype && (to != ONT_FLOAT32 || (dtype != ONT_BFLOAT16 && dtype != ONT_FLOAT16)))
        return ont_fail(ONT_EUNSUPPORTED, "a product of %s operands with a result in %s is not supported",
                        ont_dtype_name(dtype), ont_dtype_name(to));
    ont_shape rows = ont_shape_of(1, &p.m);
    if (node->n_outputs > 1 && (!p.trans_a || p.a.rank != 2 || dtype != ONT_FLOAT32))
        return ont_fail(ONT_EUNSUPPORTED, "sums of A need a transposed float32 matrix A");
    ONT_TRY(ont_infer_out(node, 1, dtype, &rows));
    return ont_infer_out(node, 0, to, &shape);
}

/* ---- kernels: float32, float64 and integers, by the implementations of device/gemm.h ---- */

typedef struct matmul_state {
    ont_gemm gemm;
    const ont_gemm_backend *backend; /* NULL where one of the last two is used */
    ont_shape batch;
    int64_t count; /* matrices of the batch */
    int64_t stride_a[ONT_MAX_RANK], stride_b[ONT_MAX_RANK]; /* bytes, for each batch dim */
    size_t c_bytes; /* of one matrix */
    bool bias; /* input 2 is a bias (n), added unscaled */
    ont_dnnl_matmul *primitive;
    ont_gemm_native native;
} matmul_state;

/* Gemm's alpha and beta are floats: for integers they must be whole numbers. */
static const char *int_accept(const ont_node *node)
{
    double alpha = ont_attr_float(node, "alpha", 1.0), beta = ont_attr_float(node, "beta", 1.0);
    if (!ont_gemm_int.available(ont_node_in(node, 0)->dtype)) return "dtype";
    return alpha == (double)(int32_t)alpha && beta == (double)(int32_t)beta ? NULL
                                                                            : "alpha or beta is not a whole number";
}

bool ont_matmul_has_bf16x3(void)
{
    return ont_simd_gemm_bf16x3() != NULL;
}

/* Bytes between matrices of the operand, for each dim of the broadcast batch. */
static void batch_strides(const ont_shape *operand, const ont_shape *batch, size_t size, int64_t *strides)
{
    ont_shape own = ont_shape_of(operand->rank - 2, operand->dims);
    int64_t matrix = operand->dims[operand->rank - 1] * operand->dims[operand->rank - 2] * (int64_t)size;
    ont_shape_broadcast_strides(&own, batch, strides);
    for (int d = 0; d < batch->rank; d++) strides[d] *= matrix;
}

static ont_status read_product(const ont_node *node, matmul_state *s)
{
    ont_matmul_desc p;
    ONT_TRY(ont_matmul_desc_read(node, &p));
    ont_matmul_desc_fold_batch(&p);
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    size_t size = ont_dtype_size(dtype);
    const ont_value *c = ont_node_in(node, 2);
    *s = (matmul_state){.batch = p.batch, .count = ont_shape_count(&p.batch), .c_bytes = (size_t)(p.m * p.n) * size,
                        .bias = c && ont_matmul_desc_is_bias(&p, &c->shape) && ont_attr_float(node, "beta", 1.0) == 1};
    s->gemm = (ont_gemm){.dtype = dtype, .trans_a = p.trans_a, .trans_b = p.trans_b, .m = p.m, .n = p.n, .k = p.k,
                         .lda = p.a.dims[p.a.rank - 1], .ldb = p.b.dims[p.b.rank - 1], .ldc = p.n, .alpha = p.alpha};
    batch_strides(&p.a, &p.batch, size, s->stride_a);
    batch_strides(&p.b, &p.batch, size, s->stride_b);
    return ONT_OK;
}

static bool is_empty(const ont_gemm *g)
{
    return !g->m || !g->n || !g->k;
}

/* NULL if the node is one float32 product, to which at most a bias is added; else why not. */
static const char *refuse_single(const ont_node *node, matmul_state *s)
{
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32) return "dtype";
    if (read_product(node, s) != ONT_OK) return "operands";
    if (s->count != 1) return "a batch of matrices";
    if (is_empty(&s->gemm)) return "a dim is 0";
    return !ont_node_in(node, 2) || (s->bias && s->gemm.alpha == 1) ? NULL : "C is not a bias (n)";
}

static const char *bf16x3_accept(const ont_node *node)
{
    matmul_state s;
    if (!ont_attr_int(node, "bf16x3", 0)) return "not asked for";
    return ont_matmul_has_bf16x3() ? refuse_single(node, &s) : "no such instructions";
}

static const char *native_accept(const ont_node *node)
{
    matmul_state s;
    if (!ont_gemm_native_kernel(ONT_FLOAT32)) return "no such instructions";
    const char *refusal = refuse_single(node, &s);
    return refusal ? refusal : ont_gemm_refuses("native", &s.gemm);
}

static const char *primitive_accept(const ont_node *node)
{
    matmul_state s;
    const char *refusal = refuse_single(node, &s);
    if (!refusal) refusal = ont_gemm_refuses("primitive", &s.gemm);
    if (!refusal && !ont_gemm_requested() && ont_gemm_is_deterministic())
        refusal = "its sums may depend on the number of threads";
    return refusal ? refusal : ont_dnnl_matmul_refuses(ONT_FLOAT32); /* last: it opens oneDNN */
}

static const char *blas_accept(const ont_node *node)
{
    matmul_state s;
    const char *refusal = ont_accept_float(node);
    if (refusal || read_product(node, &s) != ONT_OK || is_empty(&s.gemm)) return refusal;
    return ont_gemm_choose(&s.gemm) == ont_gemm_reference() ? "no library" : NULL;
}

static ont_status new_state(const ont_node *node, ont_arena *arena, ont_prepared *out, matmul_state **s)
{
    *s = out->state = ont_arena_alloc(arena, sizeof **s);
    return *s ? read_product(node, *s) : ONT_ENOMEM;
}

static ont_status matmul_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    matmul_state *s;
    ONT_TRY(new_state(node, arena, out, &s));
    s->backend = is_empty(&s->gemm) ? ont_gemm_reference() : ont_gemm_choose(&s->gemm);
    return ONT_OK;
}

static ont_status matmul_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    matmul_state *s;
    ONT_TRY(new_state(node, arena, out, &s));
    s->backend = ont_dtype_is_int(s->gemm.dtype) ? &ont_gemm_int : ont_gemm_reference();
    return ONT_OK;
}

static ont_status prepare_own(const ont_node *node, const ont_gemm_kernel *kernel, ont_arena *arena, ont_prepared *out)
{
    matmul_state *s;
    ONT_TRY(new_state(node, arena, out, &s));
    ont_gemm_native_init(&s->native, kernel, &s->gemm, ONT_FLOAT32, ont_parallel_threads());
    out->work_bytes = ont_gemm_native_work_bytes(&s->native);
    return ONT_OK;
}

static ont_status matmul_prepare_native(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_own(node, ont_gemm_native_kernel(ONT_FLOAT32), arena, out);
}

static ont_status matmul_prepare_bf16x3(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_own(node, ont_simd_gemm_bf16x3(), arena, out);
}

static ont_status matmul_prepare_primitive(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    matmul_state *s;
    ont_prepared primitive = {0};
    ONT_TRY(new_state(node, arena, out, &s));
    ont_status status = ont_matmul_prepare_primitive(node, &primitive);
    if (status == ONT_EUNSUPPORTED) { /* another oneDNN than ours, without an implementation for this shape */
        s->backend = ont_gemm_choose(&s->gemm);
        return ONT_OK;
    }
    ONT_TRY(status);
    s->primitive = primitive.state;
    out->work_bytes = primitive.work_bytes;
    return ONT_OK;
}

static void matmul_release(void *state)
{
    ont_dnnl_matmul_destroy(((matmul_state *)state)->primitive);
}

/* Matrices [first, last) of the batch. Inside a parallel region, a BLAS uses the calling thread only. */
static void matmul_batch(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const matmul_state *s = call->state;
    for (int64_t i = first; i < last; i++) {
        const char *a = call->in[0], *b = call->in[1];
        int64_t rest = i;
        for (int d = s->batch.rank - 1; d >= 0; d--) {
            int64_t index = rest % s->batch.dims[d];
            rest /= s->batch.dims[d];
            a += index * s->stride_a[d];
            b += index * s->stride_b[d];
        }
        s->backend->run(&s->gemm, a, b, (char *)call->out[0] + (size_t)i * s->c_bytes);
    }
}

static void run_backend(const ont_call *call, const void *bias)
{
    const matmul_state *s = call->state;
    ONT_ASSERT(s->backend);
    if (s->count > 1) ont_parallel(s->count, 1, matmul_batch, (void *)call);
    else s->backend->run(&s->gemm, call->in[0], call->in[1], call->out[0]);
    if (bias) ont_gemm_add_bias(&s->gemm, s->count, bias, call->out[0]);
}

static ont_status matmul_run(const ont_call *call)
{
    const matmul_state *s = call->state;
    const void *a = call->in[0], *b = call->in[1], *bias = s->bias ? call->in[2] : NULL;
    float *sums = call->node->n_outputs > 1 ? call->out[1] : NULL;
    if (!s->c_bytes || !s->count) {
        if (sums) ont_gemm_sum_a(&s->gemm, a, sums);
        return ONT_OK;
    }
    bool summed = s->native.kernel && s->native.kernel->is_full;
    if (s->native.kernel)
        ont_gemm_native_run(&s->native, a, b, bias, call->out[0], summed ? sums : NULL, call->work);
    else if (s->primitive)
        ONT_TRY(ont_dnnl_matmul_run(s->primitive, a, b, bias, call->out[0], call->work));
    else
        run_backend(call, bias);
    if (sums && !summed) ont_gemm_sum_a(&s->gemm, a, sums);
    return ONT_OK;
}

/* ---- gradients ---- */

static ont_value *fused(ont_grad *g, ont_value *a, bool trans_a, ont_value *b, bool trans_b, double alpha)
{
    ont_builder *w = &g->b;
    ont_node *node = a && b ? ont_build_node(w, ONT_DOMAIN, "FusedMatMul", (ont_value *[]){a, b}, 2, 1) : NULL;
    if (node) w->status = ont_attr_set_int(w->graph, node, "transA", trans_a);
    if (node && w->status == ONT_OK) w->status = ont_attr_set_int(w->graph, node, "transB", trans_b);
    if (node && w->status == ONT_OK) w->status = ont_attr_set_float(w->graph, node, "alpha", alpha);
    return ont_build_done(w, node);
}

/* (..., r, c) as a matrix (... * r, c). */
static ont_value *as_matrix(ont_grad *g, ont_value *x)
{
    int rank = x ? x->shape.rank : 0;
    if (rank <= 2) return x;
    ont_shape flat = {.rank = 2};
    flat.dims[0] = ont_shape_count_range(&x->shape, 0, rank - 1);
    flat.dims[1] = x->shape.dims[rank - 1];
    return ont_build_reshape(&g->b, x, &flat);
}

/* C = alpha op(A) op(B): dA = alpha dC op(B)', dB = alpha op(A)' dC; transposed where the operand is. */
static void product_grads(ont_grad *g, ont_value *a, ont_value *b, ont_value *dc, const ont_matmul_desc *p)
{
    bool ta = p->trans_a, tb = p->trans_b;
    if (dc && dc->dtype != a->dtype) dc = ont_build_cast(&g->b, dc, a->dtype);
    if (g->b.status != ONT_OK) return;
    ont_value *of_a = a, *of_dc = dc;
    /* If B is one matrix, its gradient sums over the batch: one product of the flattened operands does that. */
    if (WANTS(1) && b->shape.rank == 2 && !ta) {
        of_a = as_matrix(g, a);
        of_dc = as_matrix(g, dc);
    }
    /* That of B first: A, as a rule an activation as large as dA, is read here for the last time. */
    if (WANTS(1)) GI(1, tb ? fused(g, of_dc, true, of_a, ta, p->alpha) : fused(g, of_a, !ta, of_dc, false, p->alpha));
    if (WANTS(0)) GI(0, ta ? fused(g, b, tb, dc, true, p->alpha) : fused(g, dc, false, b, !tb, p->alpha));
}

static void matmul_grad(ont_grad *g)
{
    ont_matmul_desc p;
    ont_builder *w = &g->b;
    if (ont_matmul_desc_read(g->node, &p) != ONT_OK) return;
    ont_value *dc = GO(0);
    if (WANTS(2)) GI(2, dc && dc->dtype != I(2)->dtype ? ont_build_cast(w, dc, I(2)->dtype) : dc);
    if (!p.vector_a && !p.vector_b) {
        product_grads(g, I(0), I(1), dc, &p);
        return;
    }
    /* Vector operands: compute with matrices, then reshape the gradients. */
    ont_shape full = p.batch;
    full.dims[full.rank++] = p.m;
    full.dims[full.rank++] = p.n;
    ont_value *a = ont_build_reshape(w, I(0), &p.a), *b = ont_build_reshape(w, I(1), &p.b);
    dc = ont_build_reshape(w, dc, &full);
    if (w->status != ONT_OK) return;
    product_grads(g, a, b, dc, &p);
    for (uint32_t i = 0; i < 2; i++) {
        ont_value *grad = g->in_grads[i];
        if (!WANTS(i) || !grad) continue;
        ont_value *matrix = ont_build_sum_to(w, grad, i ? &p.b : &p.a);
        GI(i, matrix ? ont_build_reshape(w, matrix, &I(i)->shape) : NULL);
    }
}

/* The kernels of one product as a whole, for matmul_kernels and gemm_kernels. */
#define PRODUCT_KERNELS(op) \
    {.name = op "_native", .accept = native_accept, .prepare = matmul_prepare_native, .run = matmul_run, \
     .tuned = true}, \
    {.name = op "_primitive", .accept = primitive_accept, .prepare = matmul_prepare_primitive, .run = matmul_run, \
     .release = matmul_release, .tuned = true}

static const ont_kernel matmul_kernels[] = {
    ONT_MATMUL_HALF_KERNELS("matmul"),
    {.name = "matmul_small", .accept = ont_matmul_small_accept, .prepare = ont_matmul_small_prepare,
     .run = ont_matmul_small_run},
    {.name = "matmul_batch", .accept = ont_matmul_batch_accept, .prepare = ont_matmul_batch_prepare,
     .run = ont_matmul_batch_run},
    {.name = "matmul_bf16x3", .accept = bf16x3_accept, .prepare = matmul_prepare_bf16x3, .run = matmul_run},
    PRODUCT_KERNELS("matmul"),
    {.name = "matmul_blas", .accept = blas_accept, .prepare = matmul_prepare, .run = matmul_run, .tuned = true},
    {.name = "matmul_ref", .accept = ont_accept_float, .prepare = matmul_prepare_ref, .run = matmul_run},
    {.name = "matmul_int", .accept = int_accept, .prepare = matmul_prepare_ref, .run = matmul_run},
};
const ont_op ont_op_MatMul = {.domain = "", .name = "MatMul", .since = 1, .min_inputs = 2, .max_inputs = 2,
                              .attributes = "", .infer = matmul_infer, .grad = matmul_grad,
                              .cost = ONT_COST_MATMUL, .rows = ONT_ROWS_MATMUL, ONT_KERNELS(matmul_kernels)};
const ont_op ont_op_FusedMatMul = {.domain = ONT_DOMAIN, .name = "FusedMatMul", .since = 1, .min_inputs = 2,
                                   .max_inputs = 3, .flags = ONT_OP_PUBLIC,
                                   .attributes = "transA:i transB:i alpha:f to:i bf16x3:i",
                                   .infer = matmul_infer, .grad = matmul_grad,
                                   .cost = ONT_COST_MATMUL, .rows = ONT_ROWS_MATMUL, ONT_KERNELS(matmul_kernels)};

/* ---- Gemm: alpha op(A) op(B) + beta C, two dims, C broadcast ---- */

static ont_status gemm_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_matmul_desc p;
    ONT_TRY(ont_matmul_desc_read(node, &p));
    if (ont_node_in(node, 0)->shape.rank != 2 || ont_node_in(node, 1)->shape.rank != 2)
        return ont_fail(ONT_EINVAL, "A and B must be matrices");
    ont_shape shape = ont_shape_of(2, (int64_t[]){p.m, p.n}), whole = shape;
    const ont_value *c = ont_node_in(node, 2);
    if (c) {
        if (c->dtype != ont_node_in(node, 0)->dtype)
            return ont_fail(ONT_ETYPE, "C is %s, the dtype of A is expected", ont_dtype_name(c->dtype));
        ONT_TRY(ont_shape_broadcast(&c->shape, &shape, &whole));
        if (!ont_shape_equal(&whole, &shape)) return ont_fail(ONT_EINVAL, "C does not broadcast to the product");
    }
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

/* y (m, n) = scale * C, which broadcasts; the GEMM then adds to y. */
#define FILL(name, type) \
    static void name(const ont_call *call, const int64_t *strides, int64_t m, int64_t n, double scale) \
    { \
        const type *c = call->in[2]; \
        type *y = call->out[0], beta = (type)scale; \
        for (int64_t i = 0; i < m; i++) \
            for (int64_t j = 0; j < n; j++) y[i * n + j] = beta * c[i * strides[0] + j * strides[1]]; \
    }
FILL(fill_f32, float)
FILL(fill_f64, double)

static ont_status gemm_run(const ont_call *call)
{
    const matmul_state *s = call->state;
    const ont_value *c = ont_node_in(call->node, 2), *y = call->node->outputs[0];
    if (!s->c_bytes) return ONT_OK;
    ont_gemm gemm = s->gemm;
    if (c) {
        int64_t strides[ONT_MAX_RANK];
        ont_shape_broadcast_strides(&c->shape, &y->shape, strides);
        double beta = ont_attr_float(call->node, "beta", 1.0);
        if (ont_dtype_is_int(y->dtype))
            ont_gemm_int_fill(y->dtype, call->in[2], call->out[0], strides, gemm.m, gemm.n, (int64_t)beta);
        else
            (y->dtype == ONT_FLOAT32 ? fill_f32 : fill_f64)(call, strides, gemm.m, gemm.n, beta);
        gemm.beta = 1;
    }
    s->backend->run(&gemm, call->in[0], call->in[1], call->out[0]);
    return ONT_OK;
}

static void gemm_grad(ont_grad *g)
{
    ont_matmul_desc p;
    if (ont_matmul_desc_read(g->node, &p) != ONT_OK) return;
    product_grads(g, I(0), I(1), GO(0), &p);
    if (!WANTS(2)) return;
    double beta = ont_attr_float(g->node, "beta", 1.0);
    ont_value *scaled = GO(0);
    if (beta != 1) scaled = ont_build2(&g->b, "Mul", scaled, ont_build_scalar(&g->b, I(2)->dtype, beta));
    GI(2, scaled);
}

static const ont_kernel gemm_kernels[] = {
    ONT_MATMUL_HALF_KERNELS("gemm"),
    {.name = "gemm_small", .accept = ont_matmul_small_accept, .prepare = ont_matmul_small_prepare,
     .run = ont_matmul_small_run},
    PRODUCT_KERNELS("gemm"),
    {.name = "gemm_blas", .accept = blas_accept, .prepare = matmul_prepare, .run = gemm_run, .tuned = true},
    {.name = "gemm_ref", .accept = ont_accept_float, .prepare = matmul_prepare_ref, .run = gemm_run},
    {.name = "gemm_int", .accept = int_accept, .prepare = matmul_prepare_ref, .run = gemm_run},
};
const ont_op ont_op_Gemm = {.domain = "", .name = "Gemm", .since = 7, .min_inputs = 2, .max_inputs = 3,
                            .attributes = "transA:i transB:i alpha:f beta:f", .infer = gemm_infer, .grad = gemm_grad,
                            .cost = ONT_COST_MATMUL, .rows = ONT_ROWS_MATMUL, ONT_KERNELS(gemm_kernels)};
