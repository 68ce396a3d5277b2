/*
 * Pooling of one plane, compiled once per instruction set: rows of a window are joined first, then columns. pool.c
 * and ops/pool/lp_pool.c call it; it knows geometry and memory, no nodes.
 */
#ifndef ONT_SIMD_POOL_H
#define ONT_SIMD_POOL_H

#include "base/dtype.h"

enum { ONT_POOL_MAX, ONT_POOL_MEAN, ONT_POOL_LP };

/* Windows over (depth, row, column); a plane of lower rank has leading dims of 1. */
typedef struct ont_pool {
    int64_t in[3], out[3], kernel[3], stride[3], dilation[3];
    int64_t begin[3], limit[3]; /* leading padding; end of the trailing padding, in cells of the input */
    int64_t planes, in_count, out_count;
    int kind;
    bool include_pad;  /* whether a mean divides by padding cells too */
    bool adaptive;     /* output o covers cells [o * in / out, (o + 1) * in / out), rounded outwards; strides are 0 */
    bool column_major; /* order of the indices within a plane: storage_order 1 */
    double p;          /* exponent of ONT_POOL_LP */
} ont_pool;

static inline int64_t ont_pool_steps(int64_t cells, int64_t step)
{
    return step == 1 ? cells : (cells + step - 1) / step;
}

/* Kernel positions [first, end) of a window that are inside the input; `padded` counts those before the limit. */
static inline void ont_pool_span(const ont_pool *p, int d, int64_t o, int64_t *first, int64_t *end, int64_t *padded)
{
    if (p->adaptive) {
        *first = o * p->in[d] / p->out[d];
        *end = ((o + 1) * p->in[d] + p->out[d] - 1) / p->out[d];
        *padded = *end - *first;
        return;
    }
    int64_t start = o * p->stride[d] - p->begin[d], step = p->dilation[d], k = p->kernel[d];
    int64_t inside = start < p->in[d] ? ont_pool_steps(p->in[d] - start, step) : 0;
    int64_t counted = start < p->limit[d] ? ont_pool_steps(p->limit[d] - start, step) : 0;
    *first = start < 0 ? ont_pool_steps(-start, step) : 0;
    *end = inside < k ? inside : k;
    if (*end < *first) *end = *first;
    *padded = counted < k ? counted : k;
}

/*
 * Rows of scratch have the length that the windows of a whole number of vectors cover, with leading and trailing
 * padding: the loops over columns then need neither bounds nor remainders.
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

/* Bytes of scratch for one call: values and cells, of an input row and of an output row. */
static inline size_t ont_pool_scratch(const ont_pool *p)
{
    return (size_t)(ont_pool_row(p) + ont_pool_outputs(p)) * 16;
}

/* Several planes at a time, one in a lane, where rows are so short that they would leave most of a vector unused. */
enum { ONT_POOL_LANES = 32 };
static inline bool ont_pool_small(const ont_pool *p)
{
    int64_t limit = p->kind == ONT_POOL_LP ? 0 : 256;
    return p->in_count <= limit && p->out_count <= limit && p->in[2] < p->in_count && p->planes >= ONT_POOL_LANES / 4;
}

static inline size_t ont_pool_small_scratch(const ont_pool *p)
{
    return (size_t)(2 * p->in_count + p->out_count) * ONT_POOL_LANES * 8;
}

/*
 * Pools planes of one dtype. `index` is the first index of the plane in the whole tensor; `indices` may be NULL. As in
 * PyTorch, a maximum is the first largest cell, or the last NaN. Windows without a cell give the lowest value, 0, or 0
 * / 0.
 */
typedef struct ont_pool_loops {
    void (*max)(const ont_pool *p, const void *x, void *y, int64_t *indices, int64_t index, void *scratch);
    void (*max_grad)(const ont_pool *p, const void *x, const void *dy, void *dx, void *scratch);
    void (*sum)(const ont_pool *p, const void *x, void *y, void *scratch); /* mean or p-norm, float dtypes */
    /* x and y are read for a p-norm alone */
    void (*sum_grad)(const ont_pool *p, const void *x, const void *y, const void *dy, void *dx, void *scratch);
    /* Maxima and means of many small planes, one in a lane. */
    void (*small)(const ont_pool *p, const void *x, void *y, int64_t planes, void *scratch);
    void (*small_grad)(const ont_pool *p, const void *x, const void *dy, void *dx, int64_t planes, void *scratch);
} ont_pool_loops;

/* Loops of the instruction set in use, for float32, float64, int8 and uint8; NULL for other dtypes. */
const ont_pool_loops *ont_simd_pool(ont_dtype dtype);

#endif
