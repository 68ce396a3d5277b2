/*
 * Pooling of one plane, compiled once per instruction set: whole rows in the inner loop, columns after rows. ops/pool.c
 * and ops/lp_pool.c call it; it knows geometry and memory, no nodes.
 */
#ifndef ONT_SIMD_POOL_H
#define ONT_SIMD_POOL_H

#include "base/dtype.h"

enum { ONT_POOL_MAX, ONT_POOL_MEAN, ONT_POOL_LP };

/* Windows over (depth, row, column); absent leading dims are 1 long. */
typedef struct ont_pool {
    int64_t in[3], out[3], kernel[3], stride[3], dilation[3];
    int64_t begin[3], limit[3]; /* leading padding; where the trailing padding ends, in cells of the input */
    int64_t planes, in_count, out_count;
    int kind;
    bool include_pad;  /* a mean counts the padding */
    bool column_major; /* of indices within a plane: storage_order 1 */
    double p;          /* of ONT_POOL_LP */
} ont_pool;

/* Kernel positions [first, end) of a window that lie inside the input; `padded` counts those before the limit. */
static inline void ont_pool_span(const ont_pool *p, int d, int64_t o, int64_t *first, int64_t *end, int64_t *padded)
{
    int64_t start = o * p->stride[d] - p->begin[d], step = p->dilation[d], k = p->kernel[d];
    int64_t inside = start < p->in[d] ? (p->in[d] - start + step - 1) / step : 0;
    int64_t counted = start < p->limit[d] ? (p->limit[d] - start + step - 1) / step : 0;
    *first = start < 0 ? (-start + step - 1) / step : 0;
    *end = inside < k ? inside : k;
    if (*end < *first) *end = *first;
    *padded = counted < k ? counted : k;
}

/*
 * Rows of scratch are as long as the windows of a whole number of vectors reach, leading and trailing padding included:
 * the passes over columns then need neither bounds nor remainders.
 */
static inline int64_t ont_pool_outputs(const ont_pool *p)
{
    return p->stride[2] > 64 ? p->out[2] : (p->out[2] + 15) / 16 * 16;
}

static inline int64_t ont_pool_row(const ont_pool *p)
{
    int64_t reach = (ont_pool_outputs(p) - 1) * p->stride[2] + (p->kernel[2] - 1) * p->dilation[2] + 1;
    int64_t row = p->begin[2] + p->in[2];
    return reach > row ? reach : row;
}

/* Bytes of scratch of one call: values and cells, of a row and of its outputs. */
static inline size_t ont_pool_scratch(const ont_pool *p)
{
    return (size_t)(ont_pool_row(p) + ont_pool_outputs(p)) * 16;
}

/*
 * Planes of one dtype. `index` is the first index of the plane in the whole tensor; indices may be NULL. A maximum is
 * the first largest cell, or the last NaN, as in torch. Windows without a cell give the lowest value, 0, or 0 / 0.
 */
typedef struct ont_pool_loops {
    void (*max)(const ont_pool *p, const void *x, void *y, int64_t *indices, int64_t index, void *scratch);
    void (*max_grad)(const ont_pool *p, const void *x, const void *dy, void *dx, void *scratch);
    void (*sum)(const ont_pool *p, const void *x, void *y, void *scratch); /* mean or p-norm; float dtypes */
    /* x and y are read for a p-norm only */
    void (*sum_grad)(const ont_pool *p, const void *x, const void *y, const void *dy, void *dx, void *scratch);
} ont_pool_loops;

/* Loops of the running instruction set for float32, float64, int8 and uint8; NULL for others. */
const ont_pool_loops *ont_simd_pool(ont_dtype dtype);

#endif
