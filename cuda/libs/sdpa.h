/*
 * Attention of 16-bit floats by cuDNN, as plans that are kept by shape for the life of the process. A plan is used
 * once a caller has compared its results with those of the own kernels (ont_sdpa_judge).
 */
#ifndef ONT_CUDA_SDPA_H
#define ONT_CUDA_SDPA_H

#include "core_shim.h"
#include "libs/verdict.h"

/* The tensors of a graph. LSE: log of the sum of exp(score) over a row, (batch, heads, seqlen_q), float32. */
enum { ONT_SDPA_Q, ONT_SDPA_K, ONT_SDPA_V, ONT_SDPA_Y, ONT_SDPA_LSE, ONT_SDPA_DY, ONT_SDPA_DQ, ONT_SDPA_DK,
       ONT_SDPA_DV, ONT_SDPA_TENSORS };

/* All bytes are set, so that shapes compare by memcmp(). */
typedef struct ont_sdpa_shape {
    int64_t batch, heads, k_heads, v_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
    int64_t strides[4][3]; /* of Q, K, V and Y: of batch, head and row, in elements; columns are contiguous */
    double scale;
    int32_t dtype, causal, gradient, device;
} ont_sdpa_shape;

typedef struct ont_sdpa ont_sdpa;

/* Blocks of one workspace begin at multiples of 256 bytes. */
static inline size_t ont_sdpa_aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* NULL and the plan for the current device, or the reason why there is none. Fills shape->device. */
const char *ont_sdpa_get(ont_sdpa_shape *shape, ont_sdpa **plan);
size_t ont_sdpa_work_bytes(const ont_sdpa *plan);
/* The row statistics in `work`, for ont_sdpa_run(). */
float *ont_sdpa_lse(const ont_sdpa *plan, void *work);
/* data[i]: the first element of tensor i; that of LSE is not read. Returns 0, or cuDNN's error code. */
int ont_sdpa_run(const ont_sdpa *plan, void *const data[ONT_SDPA_TENSORS], void *work, void *stream);
ont_verdict ont_sdpa_verdict_of(const ont_sdpa *plan);
void ont_sdpa_judge(ont_sdpa *plan, ont_verdict verdict);

#endif
