/*
 * Parameters of the attention kernels and their launchers. fused_attention.h defines the operator. C and C++.
 */
#ifndef ONT_CUDA_FLASH_H
#define ONT_CUDA_FLASH_H

#include <stdbool.h>
#include <stddef.h>

#include "device/device.h"

enum { ONT_FLASH_BATCH_DIMS = 6, ONT_FLASH_MAX_HEAD_DIM = 256 };
enum { ONT_FLASH_TILE_QUERIES = 64, ONT_FLASH_TILE_KEYS = 32 }; /* of an entry of `tiles` */
enum { ONT_FLASH_Q, ONT_FLASH_K, ONT_FLASH_V, ONT_FLASH_BIAS, ONT_FLASH_MASK, ONT_FLASH_MASKED_ROWS, ONT_FLASH_Y,
      ONT_FLASH_LAYOUTS };

/* A matrix for each index of the batch dims; strides in elements. */
typedef struct ont_flash_layout {
    int64_t offset, batch_stride[ONT_FLASH_BATCH_DIMS], row_stride, col_stride;
} ont_flash_layout;

typedef struct ont_flash_params {
    int32_t dtype, bias_dtype, n_batch_dims;
    int32_t causal, mask_polarity, zero_nan, has_dropout; /* bool */
    uint32_t dropout_threshold; /* element e of the scores is kept where random word e of the stream is at least this */
    int64_t batch_dims[ONT_FLASH_BATCH_DIMS], n_bh; /* n_bh: their product, batch * heads */
    int64_t seqlen_q, seqlen_k, head_dim, head_dim_v, causal_offset;
    ont_flash_layout layout[ONT_FLASH_LAYOUTS];
    double scale, mask_value, dropout_scale;
    uint64_t rng_stream;
    const uint64_t *seed;
    const void *q, *k, *v, *bias; /* bias: of any float type, or NULL */
    const uint8_t *mask, *masked_rows; /* or NULL */
    void *y;                 /* an input of the gradient */
    void *stats;             /* (n_bh * seqlen_q, 2): row_max, row_sum; float, or double for float64 */
    /* The gradient. Each output may be NULL; dbias is (n_bh * seqlen_q, seqlen_k) of bias_dtype. */
    const void *dy;
    void *dq, *dk, *dv, *dbias;
    void *delta;             /* scratch (n_bh * seqlen_q), of the dtype of stats */
    /*
     * NULL, or (n_bh, query_tiles, key_tiles), scratch: 0 where bias and mask hide each key of a tile from each query
     * of a tile, so that the tile adds nothing to any result.
     */
    uint8_t *tiles;
    int32_t query_tiles, key_tiles; /* even, and all entries less than 2^31: two are read at once, at an int */
} ont_flash_params;

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the general kernels take these head sizes with the shared memory of the current device. */
int ont_flash_fits(const ont_flash_params *f, int gradient);
int ont_launch_flash(const ont_flash_params *f, void *stream);
int ont_launch_flash_grad(const ont_flash_params *f, void *stream);

/* flash_hidden.cu: sets query_tiles and key_tiles, and returns the bytes of `tiles`; 0 where it would not pay. The
 * other one fills it, in the gradient once delta is computed. */
size_t ont_flash_tiles_bytes(ont_flash_params *f, bool has_bias, bool has_mask);
int ont_launch_flash_tiles(const ont_flash_params *f, void *stream);
/* The same of whole keys: marks, which is zero, by number of the row of K's tensor, of `inner` elements. */
size_t ont_visible_keys_work(const ont_flash_params *f);
int ont_launch_visible_keys(const ont_flash_params *f, int64_t inner, void *work, uint8_t *marks, void *stream);

/* flash_mma.cu, flash_mma_grad.cu: whether the tensor core kernels take these sizes, layouts and pointers; their
 * launchers. The gradient expects delta to be computed. */
int ont_flash_has_mma(const ont_flash_params *f, int gradient);
int ont_launch_flash_mma(const ont_flash_params *f, void *stream);
int ont_launch_flash_mma_grad(const ont_flash_params *f, void *stream);

#ifdef __cplusplus
}
#endif
#endif
