/*
 * A product of 16-bit operands of one shape, by the native GEMM or oneDNN's primitive, as the rule has it: for kernels
 * that compute products beside other work, so that nothing competes. Both accumulate in float32 and round once.
 */
#ifndef ONT_DEVICE_HALF_PRODUCT_H
#define ONT_DEVICE_HALF_PRODUCT_H

#include "device/gemm_native.h"
#include "device/matmul.h"

typedef struct ont_half_product {
    ont_gemm_native native; /* without a kernel: the primitives, of which the second one adds to C */
    ont_dnnl_matmul *primitives[2];
} ont_half_product;

/* NULL, or why neither may be used for the dtype: the processor lacks it, or ONNXTRAIN_GEMM names something else. */
const char *ont_half_product_refuses(ont_dtype dtype);
/* C is `out`, float32 or the operands' dtype; only float32 can be added to. Zero *p first; release it in any case. */
ont_status ont_half_product_prepare(ont_half_product *p, const ont_gemm *g, ont_dtype out, bool bias) ONT_MUST_USE;
void ont_half_product_release(ont_half_product *p);
size_t ont_half_product_work_bytes(const ont_half_product *p);
/* c = a b + bias (n), which may be NULL; or c += a b. work: ont_half_product_work_bytes(). */
ont_status ont_half_product_run(const ont_half_product *p, const void *a, const void *b, const void *bias, void *c,
                                bool adds, void *work) ONT_MUST_USE;

#endif
