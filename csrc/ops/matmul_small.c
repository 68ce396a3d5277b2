/*
 * Kernels of MatMul, Gemm and FusedMatMul for small float32 products, of which a library's call is half the time: the
 * gradient of a classifier's last layer takes 18 us in a BLAS and 5 here. The second operand is not transposed: columns
 * of the result are lanes of vectors, and a product of two rows would end in a sum over lanes.
 */
#include <stdlib.h>

#include "base/parallel.h"
#include "ops/matmul.h"
#include "simd/product.h"

enum { LONG = 4096 }; /* terms of a sum, of which each lane of a vector has a part */
static const double LARGE = 1e6, SHARE = 2e5; /* floating-point operations: of a product, of a thread */

typedef struct small_state {
    ont_product_part part;
    ont_product_loop loop;
} small_state;

const char *ont_matmul_small_accept(const ont_node *node)
{
    ont_product p;
    const ont_value *c = ont_node_in(node, 2);
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32 || node->outputs[0]->dtype != ONT_FLOAT32) return "dtype";
    if (ont_product_read(node, &p) != ONT_OK) return "shapes";
    ont_product_fold(&p);
    if (ont_shape_count(&p.batch) != 1) return "a batch of products";
    if (p.alpha != 1) return "a scale";
    if (node->n_outputs > 1) return "sums of an operand";
    if (c && (!ont_product_is_row(&p, &c->shape) || ont_attr_float(node, "beta", 1.0) != 1))
        return "more than a row is added";
    if (2.0 * (double)p.m * (double)p.n * (double)p.k >= LARGE) return "a large product";
    if (p.k > LONG) return "long sums";
    if (p.trans_b) return "the second operand is transposed";
    if (p.n < ONT_PRODUCT_LANES) return "few columns";
    return getenv("ONNXTRAIN_GEMM") ? "ONNXTRAIN_GEMM names another" : NULL;
}

ont_status ont_matmul_small_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_product p;
    small_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_product_read(node, &p));
    ont_product_fold(&p);
    s->loop = ont_simd_product()->one;
    s->part = (ont_product_part){.m = p.m, .n = p.n, .k = p.k, .lda = p.a.dims[p.a.rank - 1], .ldb = p.n, .ldc = p.n,
                                 .trans_a = p.trans_a};
    out->state = s;
    return ONT_OK;
}

/* Rows [first, last) of the result. */
static void rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const small_state *s = call->state;
    ont_product_part p = s->part;
    p.m = last - first;
    p.a = (const float *)call->in[0] + first * (p.trans_a ? 1 : p.lda);
    p.b = call->in[1];
    p.row = call->node->n_inputs > 2 ? call->in[2] : NULL;
    p.c = (float *)call->out[0] + first * p.ldc;
    s->loop(&p);
}

ont_status ont_matmul_small_run(const ont_call *call)
{
    const ont_product_part *p = &((const small_state *)call->state)->part;
    int64_t grain = (int64_t)(SHARE / (2.0 * (double)p->n * (double)p->k + 1)) + 1;
    ont_parallel(p->m, grain, rows, (void *)call);
    return ONT_OK;
}

/* ---- many products of a few elements ---- */

static const double TINY = 512; /* multiplications of one product */

typedef struct batch_state {
    ont_product_batch part;
    ont_product_batch_loop loop;
    ont_shape lead; /* the dims of the batch but the last */
    int64_t last, lead_a[ONT_MAX_RANK], lead_b[ONT_MAX_RANK]; /* the last; elements to the next of each lead */
} batch_state;

const char *ont_matmul_batch_accept(const ont_node *node)
{
    ont_product p;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32 || node->outputs[0]->dtype != ONT_FLOAT32) return "dtype";
    if (ont_product_read(node, &p) != ONT_OK) return "shapes";
    ont_product_fold(&p);
    if (ont_shape_count(&p.batch) <= 1) return "one product";
    if (node->n_outputs > 1 || ont_node_in(node, 2)) return "more than a product";
    if ((double)p.m * (double)p.n * (double)p.k > TINY) return "large products";
    if (p.n < 1 || p.n > ONT_PRODUCT_FEW) return "no columns, or many";
    return getenv("ONNXTRAIN_GEMM") ? "ONNXTRAIN_GEMM names another" : NULL;
}

ont_status ont_matmul_batch_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_product p;
    batch_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_product_read(node, &p));
    ont_product_fold(&p);
    ont_shape of_a = ont_shape_of(p.a.rank - 2, p.a.dims), of_b = ont_shape_of(p.b.rank - 2, p.b.dims);
    ont_shape_broadcast_strides(&of_a, &p.batch, s->lead_a);
    ont_shape_broadcast_strides(&of_b, &p.batch, s->lead_b);
    for (int d = 0; d < p.batch.rank; d++) s->lead_a[d] *= p.m * p.k, s->lead_b[d] *= p.k * p.n;
    int last = p.batch.rank - 1;
    s->lead = ont_shape_of(last, p.batch.dims);
    s->last = p.batch.dims[last];
    s->loop = ont_simd_product()->batch;
    s->part = (ont_product_batch){.m = p.m, .n = p.n, .k = p.k, .alpha = (float)p.alpha,
                                  .a_row = p.trans_a ? 1 : p.k, .a_column = p.trans_a ? p.m : 1,
                                  .b_row = p.trans_b ? 1 : p.n, .b_column = p.trans_b ? p.k : 1,
                                  .next_a = s->lead_a[last], .next_b = s->lead_b[last]};
    out->state = s;
    return ONT_OK;
}

/* Products [first, last) of the batch: runs of its last dim. */
static void products(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const batch_state *s = call->state;
    ont_product_batch p = s->part;
    for (int64_t i = first; i < last; i += p.count) {
        int64_t at = i % s->last, rest = i / s->last;
        p.a = (const float *)call->in[0] + at * p.next_a;
        p.b = (const float *)call->in[1] + at * p.next_b;
        for (int d = s->lead.rank - 1; d >= 0; d--) {
            p.a += rest % s->lead.dims[d] * s->lead_a[d];
            p.b += rest % s->lead.dims[d] * s->lead_b[d];
            rest /= s->lead.dims[d];
        }
        p.c = (float *)call->out[0] + i * p.m * p.n;
        p.count = last - i < s->last - at ? last - i : s->last - at;
        s->loop(&p);
    }
}

ont_status ont_matmul_batch_run(const ont_call *call)
{
    const batch_state *s = call->state;
    int64_t each = 2 * s->part.m * s->part.n * s->part.k + 16;
    ont_parallel(s->last * ont_shape_count(&s->lead), (int64_t)SHARE / each + 1, products, (void *)call);
    return ONT_OK;
}
