/*
 * What the kernels of MatMul, Gemm and FusedMatMul share: the description of a node's matrix product.
 */
#ifndef ONT_OPS_MATMUL_H
#define ONT_OPS_MATMUL_H

#include "ops/op.h"

/* op(A) (batch, m, k) times op(B) (batch, k, n). A vector operand is a matrix with one row (A) or one column (B). */
typedef struct ont_matmul_desc {
    ont_shape a, b; /* as stored; rank >= 2 */
    bool vector_a, vector_b;
    bool trans_a, trans_b;
    ont_shape batch; /* the batch dims of a and b, broadcast */
    int64_t m, n, k;
    double alpha;
} ont_matmul_desc;

/* matmul_desc.c */
ont_status ont_matmul_desc_read(const ont_node *node, ont_matmul_desc *p) ONT_MUST_USE;
/* Folds the batch dims of A into m, where B is one matrix and A is not transposed: one GEMM instead of a batch. */
void ont_matmul_desc_fold_batch(ont_matmul_desc *p);
/* Whether a value of this shape is a bias (n), which is added to each row of the product. */
bool ont_matmul_desc_is_bias(const ont_matmul_desc *p, const ont_shape *c);

/* matmul_half.c. Creates oneDNN's primitive for the node; a third input is the bias. out->state: the primitive. */
ont_status ont_matmul_prepare_primitive(const ont_node *node, ont_prepared *out) ONT_MUST_USE;

/* matmul_half.c: 16-bit operands, accumulated in float32, where the processor multiplies them. */
bool ont_matmul_half_is_fast(void); /* for bfloat16 */
/* Whether FusedMatMul with `bf16x3` uses three bfloat16 products; otherwise it computes in float32. */
bool ont_matmul_has_bf16x3(void);
const char *ont_matmul_half_accept(const ont_node *node);
ont_status ont_matmul_half_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out) ONT_MUST_USE;
ont_status ont_matmul_half_run(const ont_call *call) ONT_MUST_USE;
void ont_matmul_half_release(void *state);
const char *ont_matmul_half_native_accept(const ont_node *node);
ont_status ont_matmul_half_native_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out) ONT_MUST_USE;
ont_status ont_matmul_half_native_run(const ont_call *call);
#define ONT_MATMUL_HALF_KERNELS(op) \
    {.name = op "_half_native", .accept = ont_matmul_half_native_accept, .prepare = ont_matmul_half_native_prepare, \
     .run = ont_matmul_half_native_run, .tuned = true}, \
    {.name = op "_half", .accept = ont_matmul_half_accept, .prepare = ont_matmul_half_prepare, \
     .run = ont_matmul_half_run, .release = ont_matmul_half_release, .tuned = true}

/* matmul_small.c: GEMMs so small that the call of a library would dominate; and batches of tiny ones. */
const char *ont_matmul_small_accept(const ont_node *node);
ont_status ont_matmul_small_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out) ONT_MUST_USE;
ont_status ont_matmul_small_run(const ont_call *call);
const char *ont_matmul_batch_accept(const ont_node *node);
ont_status ont_matmul_batch_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out) ONT_MUST_USE;
ont_status ont_matmul_batch_run(const ont_call *call);

#endif
