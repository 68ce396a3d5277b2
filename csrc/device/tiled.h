/*
 * Large products by simd/gemm_kernel.h: how a product is cut into parts for threads and into blocks that stay in
 * a core's second cache. A row that is added, a scale and a result past the caches cost no pass of their own, and parts
 * follow from shapes alone: a thread computes the same rows of a weight's gradient as it multiplies rows of the weight,
 * which are then in its cache. Float32 rows of A that lie along k are read as they are stored; where those of B do too
 * and are more, as a linear layer's weight, the transposed result is computed, whose A they are, unless turning that
 * result would be more than laying them out. A last panel of few columns costs what they are: with such an A it has two
 * steps of k in a vector, and else the transposed result is computed, where they are rows.
 */
#ifndef ONT_DEVICE_TILED_H
#define ONT_DEVICE_TILED_H

#include "device/gemm.h"
#include "simd/gemm_kernel.h"

typedef enum ont_tiled_order {
    ONT_TILED_COLUMNS, /* A is laid out whole, B by blocks of columns */
    ONT_TILED_ROWS,    /* B whole, A by blocks of rows */
    ONT_TILED_CHUNKS,  /* neither: both by chunks of k, once for each block of the result */
} ont_tiled_order;

/* One product, cut. */
typedef struct ont_tiled {
    ont_gemm gemm;                 /* with `turned` that of the transposed result, but for ldc */
    const ont_gemm_kernel *kernel; /* which says what A, B and the row are made of */
    ont_dtype out;                 /* float32, or A's dtype */
    bool turned, direct, paired;   /* A is not laid out; as an ont_gemm_block's */
    ont_tiled_order order;
    int64_t parts_m, parts_n; /* one for each thread */
    int64_t part_m, part_n;   /* of a part, at most */
    int64_t block_m, block_n;
    int64_t chunk;            /* of k */
    size_t a_bytes, b_bytes, sum_bytes, part_bytes; /* laid out, of A's sums, and of all of a part's scratch */
    bool stream;
} ont_tiled;

/* `threads` of them at most have a part each. beta is 0, and no dim. */
void ont_tiled_cut(ont_tiled *t, const ont_gemm_kernel *kernel, const ont_gemm *g, ont_dtype out, int threads);
size_t ont_tiled_work_bytes(const ont_tiled *t);
/*
 * C = alpha op(A) op(B) + row (n), which may be NULL; `work` has ont_tiled_work_bytes(). sums, where not NULL: (m),
 * op(A) summed along k, by kernels that are `direct` where A is transposed: it is read once for both.
 */
void ont_tiled_run(const ont_tiled *t, const void *a, const void *b, const void *row, void *c, float *sums, void *work);

#endif
