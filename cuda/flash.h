/*
 * Attention without stored probabilities, forward and backward. C and C++.
 */
#ifndef ONT_CUDA_FLASH_H
#define ONT_CUDA_FLASH_H

#include "device/device.h"

enum { ONT_FLASH_MAX_D = 128 };

/* q (batch, heads, lq, d), k and v (batch, kv_heads, lk, d), row-major; heads is a multiple of kv_heads. */
typedef struct ont_flash {
    int64_t batch, heads, kv_heads, lq, lk, d; /* d <= ONT_FLASH_MAX_D */
    int32_t dtype;          /* float32, float16, bfloat16; sums are float32 */
    int32_t causal;         /* query i sees keys 0 to i + lk - lq (bottom right) with 2, 0 to i (top left) with 1 */
    float scale;
    const void *bias;       /* added to the scores, or bool, false: not seen; NULL: none */
    int32_t bias_dtype;     /* float32 or bool */
    int64_t bias_stride[4]; /* elements; 0 along dims that it lacks */
    float drop;             /* share of probabilities that are dropped; element e of them by word e of the stream */
    uint64_t stream;
    const uint64_t *seed;
} ont_flash;

#ifdef __cplusplus
extern "C" {
#endif
/* Seen from outside the plugin: tests call them. */
#define ONT_FLASH_API __attribute__((visibility("default")))

/* lse (batch, heads, lq) float32: logarithm of the sum of exponentials of each row, for the backward. */
ONT_FLASH_API int ont_launch_flash(const ont_flash *f, const void *q, const void *k, const void *v, void *out,
                                   float *lse, void *stream);
/* work: batch * heads * lq floats. No gradient for the bias. */
ONT_FLASH_API int ont_launch_flash_grad(const ont_flash *f, const void *q, const void *k, const void *v,
                                        const void *out, const float *lse, const void *dout, void *dq, void *dk,
                                        void *dv, float *work, void *stream);

#ifdef __cplusplus
}
#endif
#endif
