/*
 * What the kernels of MatMul, Gemm and FusedMatMul share: the product that a node states.
 */
#ifndef ONT_OPS_MATMUL_H
#define ONT_OPS_MATMUL_H

#include "ops/op.h"

/* Operands as matrices with batch dims; a vector operand is one row or one column. */
typedef struct ont_product {
    ont_shape a, b;       /* rank >= 2 */
    bool vector_a, vector_b;
    bool trans_a, trans_b;
    ont_shape batch;
    int64_t m, n, k;
    double alpha;
} ont_product;

ont_status ont_product_read(const ont_node *node, ont_product *p) ONT_MUST_USE;
/* Batch dims of A go into M where B is one matrix and A is not transposed: one large product instead of many. */
void ont_product_fold(ont_product *p);

/* Whether a value of this shape is one row that is added to every row of the product. */
bool ont_product_is_row(const ont_product *p, const ont_shape *c);
/* The product as one primitive of oneDNN, with its third input as a bias. */
ont_status ont_product_primitive(const ont_node *node, ont_prepared *out) ONT_MUST_USE;

/* matmul_half.c: 16-bit floats with the sum in float32, where the processor has such products. */
bool ont_matmul_half_is_fast(void); /* for bfloat16 */
/* Whether FusedMatMul with `split` takes operands as sums of two bfloat16: else it is exact. */
bool ont_matmul_splits(void);
const char *ont_matmul_half_accept(const ont_node *node);
ont_status ont_matmul_half_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out) ONT_MUST_USE;
ont_status ont_matmul_half_run(const ont_call *call) ONT_MUST_USE;
void ont_matmul_half_release(void *state);

/* matmul_small.c: products of which a library's call would be the larger part. */
const char *ont_matmul_small_accept(const ont_node *node);
ont_status ont_matmul_small_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out) ONT_MUST_USE;
ont_status ont_matmul_small_run(const ont_call *call);
const char *ont_matmul_batch_accept(const ont_node *node);
ont_status ont_matmul_batch_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out) ONT_MUST_USE;
ont_status ont_matmul_batch_run(const ont_call *call);

#endif
