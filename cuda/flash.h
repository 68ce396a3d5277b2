/*
 * Attention without stored probabilities, forward and backward, over strided views: what ops/fused_attention.h says, as
 * kernels get it. C and C++.
 */
#ifndef ONT_CUDA_FLASH_H
#define ONT_CUDA_FLASH_H

#include "device/device.h"

enum { ONT_FLASH_LEADS = 6, ONT_FLASH_MAX_SIZE = 256 };
enum { ONT_FLASH_Q, ONT_FLASH_K, ONT_FLASH_V, ONT_FLASH_BIAS, ONT_FLASH_KEEP, ONT_FLASH_EMPTY, ONT_FLASH_Y,
      ONT_FLASH_VIEWS };

typedef struct ont_flash_view { /* elements; of K and V, row is the step from column to column of the scores */
    int64_t offset, lead[ONT_FLASH_LEADS], row, column;
} ont_flash_view;

typedef struct ont_flash {
    int32_t dtype, bias_dtype, n_leads;
    int32_t causal, keep_if, zero_nan, drops;
    uint32_t threshold;      /* of dropout's words: element e of the scores by word e of the stream */
    int64_t leads[ONT_FLASH_LEADS], count; /* count: their product */
    int64_t rows, columns, size, v_size, diagonal;
    ont_flash_view view[ONT_FLASH_VIEWS];
    double scale, fill, keep_scale;
    uint64_t stream;
    const uint64_t *seed;
    const void *q, *k, *v, *bias; /* bias: of any float type, or NULL */
    const uint8_t *keep, *empty;  /* or NULL */
    void *y;                 /* the gradient reads it */
    void *stats;             /* (count * rows, 2): largest score, sum of exponentials; float, or double for float64 */
    /* The gradient: each of those written may be NULL. dbias is (count * rows, columns) of bias_dtype. */
    const void *dy;
    void *dq, *dk, *dv, *dbias;
    void *delta;             /* scratch: count * rows of the statistics' type */
} ont_flash;

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the shared memory of the current device is enough for the general kernels. */
int ont_flash_fits(const ont_flash *f, int gradient);
int ont_launch_flash(const ont_flash *f, void *stream);
int ont_launch_flash_grad(const ont_flash *f, void *stream);

/* flash_mma.cu: whether tensor cores can take it, pointers included; and the launches, delta apart. */
int ont_flash_has_mma(const ont_flash *f, int gradient);
int ont_launch_flash_mma(const ont_flash *f, void *stream);
int ont_launch_flash_mma_grad(const ont_flash *f, void *stream);

#ifdef __cplusplus
}
#endif
#endif
