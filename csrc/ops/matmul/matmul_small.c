/*
 * Kernels of MatMul, Gemm and FusedMatMul for small float32 GEMMs, where the call of a library takes half the time: the
 * gradient of a classifier's last layer takes 18 us in a BLAS and 5 here. B must not be transposed: lanes of a vector
 * are columns of C, and a dot product of two rows would need a horizontal sum.
 */
#include "base/parallel.h"
#include "device/gemm.h"
#include "ops/matmul/matmul.h"
#include "simd/gemm/gemm_small.h"

enum { MAX_K = 4096 };
static const double MAX_FLOPS = 1e6;    /* of a GEMM */
static const double THREAD_FLOPS = 2e5; /* worth a thread */

typedef struct small_state {
    ont_gemm_small gemm; /* without pointers */
    ont_gemm_small_fn run;
} small_state;

const char *ont_matmul_small_accept(const ont_node *node)
{
    ont_matmul_desc p;
    const ont_value *c = ont_node_in(node, 2);
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32 || node->outputs[0]->dtype != ONT_FLOAT32) return "dtype";
    if (ont_matmul_desc_read(node, &p) != ONT_OK) return "shapes";
    ont_matmul_desc_fold_batch(&p);
    if (ont_shape_count(&p.batch) != 1) return "a batch of matrices";
    if (p.alpha != 1) return "alpha is not 1";
    if (node->n_outputs > 1) return "sums of A";
    if (c && (!ont_matmul_desc_is_bias(&p, &c->shape) || ont_attr_float(node, "beta", 1.0) != 1))
        return "C is not a bias (n)";
    if (2.0 * (double)p.m * (double)p.n * (double)p.k >= MAX_FLOPS) return "too many operations";
    if (p.k > MAX_K) return "k is too large";
    if (p.trans_b) return "B is transposed";
    if (p.n < ONT_GEMM_SMALL_MIN_N) return "too few columns";
    return ont_gemm_requested() ? "ONNXTRAIN_GEMM names another" : NULL;
}

ont_status ont_matmul_small_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_matmul_desc p;
    small_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_matmul_desc_read(node, &p));
    ont_matmul_desc_fold_batch(&p);
    s->run = ont_simd_gemm_small()->single;
    s->gemm = (ont_gemm_small){.m = p.m, .n = p.n, .k = p.k, .lda = p.a.dims[p.a.rank - 1], .ldb = p.n, .ldc = p.n,
                                 .trans_a = p.trans_a};
    out->state = s;
    return ONT_OK;
}

/* Rows [first, last) of C. */
static void run_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const small_state *s = call->state;
    ont_gemm_small p = s->gemm;
    p.m = last - first;
    p.a = (const float *)call->in[0] + first * (p.trans_a ? 1 : p.lda);
    p.b = call->in[1];
    p.bias = call->node->n_inputs > 2 ? call->in[2] : NULL;
    p.c = (float *)call->out[0] + first * p.ldc;
    s->run(&p);
}

ont_status ont_matmul_small_run(const ont_call *call)
{
    const ont_gemm_small *p = &((const small_state *)call->state)->gemm;
    int64_t grain = (int64_t)(THREAD_FLOPS / (2.0 * (double)p->n * (double)p->k + 1)) + 1;
    ont_parallel(p->m, grain, run_rows, (void *)call);
    return ONT_OK;
}

/* ---- batches of tiny GEMMs ---- */

static const double MAX_MULTIPLICATIONS = 512; /* of one GEMM */

typedef struct batch_state {
    ont_gemm_batch gemm; /* without pointers */
    ont_gemm_batch_fn run;
    ont_shape outer; /* the batch dims except the last */
    int64_t inner;   /* the last batch dim */
    int64_t stride_a[ONT_MAX_RANK], stride_b[ONT_MAX_RANK]; /* elements, for each batch dim */
} batch_state;

const char *ont_matmul_batch_accept(const ont_node *node)
{
    ont_matmul_desc p;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32 || node->outputs[0]->dtype != ONT_FLOAT32) return "dtype";
    if (ont_matmul_desc_read(node, &p) != ONT_OK) return "shapes";
    ont_matmul_desc_fold_batch(&p);
    if (ont_shape_count(&p.batch) <= 1) return "not a batch";
    if (node->n_outputs > 1 || ont_node_in(node, 2)) return "bias or sums of A";
    if ((double)p.m * (double)p.n * (double)p.k > MAX_MULTIPLICATIONS) return "large matrices";
    if (p.n < 1 || p.n > ONT_GEMM_BATCH_MAX_N) return "too many columns";
    return ont_gemm_requested() ? "ONNXTRAIN_GEMM names another" : NULL;
}

ont_status ont_matmul_batch_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_matmul_desc p;
    batch_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_matmul_desc_read(node, &p));
    ont_matmul_desc_fold_batch(&p);
    ont_shape batch_a = ont_shape_of(p.a.rank - 2, p.a.dims), batch_b = ont_shape_of(p.b.rank - 2, p.b.dims);
    ont_shape_broadcast_strides(&batch_a, &p.batch, s->stride_a);
    ont_shape_broadcast_strides(&batch_b, &p.batch, s->stride_b);
    for (int d = 0; d < p.batch.rank; d++) s->stride_a[d] *= p.m * p.k, s->stride_b[d] *= p.k * p.n;
    int last = p.batch.rank - 1;
    s->outer = ont_shape_of(last, p.batch.dims);
    s->inner = p.batch.dims[last];
    s->run = ont_simd_gemm_small()->batch;
    s->gemm = (ont_gemm_batch){.m = p.m, .n = p.n, .k = p.k, .alpha = (float)p.alpha,
                                  .a_row = p.trans_a ? 1 : p.k, .a_column = p.trans_a ? p.m : 1,
                                  .b_row = p.trans_b ? 1 : p.n, .b_column = p.trans_b ? p.k : 1,
                                  .next_a = s->stride_a[last], .next_b = s->stride_b[last]};
    out->state = s;
    return ONT_OK;
}

/* Products [first, last) of the batch, in runs along its last dim. */
static void run_products(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const batch_state *s = call->state;
    ont_gemm_batch p = s->gemm;
    for (int64_t i = first; i < last; i += p.count) {
        int64_t at = i % s->inner, rest = i / s->inner;
        p.a = (const float *)call->in[0] + at * p.next_a;
        p.b = (const float *)call->in[1] + at * p.next_b;
        for (int d = s->outer.rank - 1; d >= 0; d--) {
            p.a += rest % s->outer.dims[d] * s->stride_a[d];
            p.b += rest % s->outer.dims[d] * s->stride_b[d];
            rest /= s->outer.dims[d];
        }
        p.c = (float *)call->out[0] + i * p.m * p.n;
        p.count = last - i < s->inner - at ? last - i : s->inner - at;
        s->run(&p);
    }
}

ont_status ont_matmul_batch_run(const ont_call *call)
{
    const batch_state *s = call->state;
    int64_t each = 2 * s->gemm.m * s->gemm.n * s->gemm.k + 16;
    ont_parallel(s->inner * ont_shape_count(&s->outer), (int64_t)THREAD_FLOPS / each + 1, run_products, (void *)call);
    return ONT_OK;
}
