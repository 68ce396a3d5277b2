/*
 * Products through oneDNN's matmul primitive, one handle per product: 16-bit operands with float32 accumulation,
 * batches and transposes by strides, and a bias or a scale on the fresh result.
 *
 * ops/matmul.c describes the product and calls these. Nothing here knows graphs or operators.
 */
#ifndef ONT_DEVICE_MATMUL_H
#define ONT_DEVICE_MATMUL_H

#include "base/dtype.h"
#include "base/shape.h"

/* C (batch, M, N) = alpha * op(A) op(B) + bias (N); the batch dims of A and B broadcast to those of C. */
typedef struct ont_matmul {
    ont_dtype dtype, out; /* of A, B and bias; of C: the same, or float32 */
    ont_shape a, b;       /* as stored, row-major; rank >= 2 */
    ont_shape c;
    bool trans_a, trans_b, bias;
    double alpha;
} ont_matmul;

typedef struct ont_dnnl_matmul ont_dnnl_matmul;

/* NULL, or why oneDNN does not take the dtype on this processor: it has arithmetic in it, not only conversions. */
const char *ont_dnnl_matmul_refuses(ont_dtype dtype);
/* EUNSUPPORTED where the library declines the product. */
ont_status ont_dnnl_matmul_create(const ont_matmul *m, ont_dnnl_matmul **result) ONT_MUST_USE;
void ont_dnnl_matmul_destroy(ont_dnnl_matmul *matmul);
size_t ont_dnnl_matmul_work_bytes(const ont_dnnl_matmul *matmul);
/* Calls on one handle take turns. */
ont_status ont_dnnl_matmul_run(ont_dnnl_matmul *matmul, const void *a, const void *b, const void *bias, void *c,
                               void *work) ONT_MUST_USE;
#endif
