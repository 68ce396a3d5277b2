/*
 * oneDNN's matmul primitive: one handle for each shape. 16-bit operands are accumulated in float32; batches and
 * transposes are expressed by strides; a bias or a scale is fused. ops/matmul/matmul.c calls this.
 */
#ifndef ONT_DEVICE_MATMUL_H
#define ONT_DEVICE_MATMUL_H

#include "base/dtype.h"
#include "base/shape.h"

/*
 * C (batch, M, N) = alpha * op(A) op(B) + bias (N), or C += op(A) op(B). The batch dims of A and B broadcast to those
 * of C.
 */
typedef struct ont_matmul {
    ont_dtype dtype, out; /* of A, B and bias; of C: the same, or float32 */
    ont_shape a, b;       /* as stored, row-major; rank >= 2 */
    ont_shape c;          /* (batch ..., M, N) */
    bool trans_a, trans_b, bias;
    bool adds_to_c; /* alpha is 1 */
    double alpha;
    int64_t lda, ldb, ldc; /* elements between rows as stored, where there is no batch; 0: as many as a row has */
} ont_matmul;

typedef struct ont_dnnl_matmul ont_dnnl_matmul;

/* NULL, or why oneDNN cannot be used for the dtype: it is missing, or the processor cannot multiply such numbers. */
const char *ont_dnnl_matmul_refuses(ont_dtype dtype);
/* EUNSUPPORTED where oneDNN does not support the product. */
ont_status ont_dnnl_matmul_create(const ont_matmul *m, ont_dnnl_matmul **result) ONT_MUST_USE;
void ont_dnnl_matmul_destroy(ont_dnnl_matmul *matmul);
size_t ont_dnnl_matmul_work_bytes(const ont_dnnl_matmul *matmul);
/* Concurrent calls on one handle run one after the other. work: ont_dnnl_matmul_work_bytes(). */
ont_status ont_dnnl_matmul_run(ont_dnnl_matmul *matmul, const void *a, const void *b, const void *bias, void *c,
                               void *work) ONT_MUST_USE;
#endif
