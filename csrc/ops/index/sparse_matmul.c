/*
 * A sparse matrix times a dense one, and its gradient with respect to the sparse matrix, as graph networks sum their
 * messages. passes/fuse_sparse_matmul.c builds both, after differentiation.
 *
 * SparseMatMul(x, from, to, weight?, base?; shape, from_end). Entry k of the matrix has the column from[k], the row
 * to[k] and the value weight[k], or 1 without weights: row r of the result is the base's row r, or zeros, plus the sum
 * of weight[k] times row from[k] of x over all k with to[k] = r. A row of several heads has a weight for each:
 * weight (entries, heads). Entries are sorted by row, so that a row is summed once, by one thread, in the order of its
 * entries.
 *
 * SampledMatMul(a, from, b, to; shape, from_end): for each entry and head the inner product of row from[k] of a and row
 * to[k] of b, (entries, heads).
 */
#include <string.h>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/parallel.h"
#include "ops/index/row_hits.h"
#include "simd/simd.h"

enum { ENTRIES = 64 }; /* of a row, that are added in one call */

typedef struct product {
    ont_gather from, to; /* from: rows of x; to: rows of the result */
    int64_t heads, width; /* of a row: heads * width elements */
} product;

typedef struct job {
    const ont_call *call;
    const product *p;
    ont_row_hits hits;
} job;

static const char *accept_floats(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "not float32 or float64";
}

static const char *accept(const ont_node *node)
{
    const char *reason = accept_floats(node);
    if (reason) return reason;
    const ont_shape *index = &ont_node_in(node, 2)->shape;
    return ont_row_hits_fit(node->outputs[0]->shape.dims[0], ont_shape_count(index))
               ? NULL
               : "more rows or indices than 32 bits count";
}

static ont_gather rows_of(const ont_shape *shape, const ont_value *index, bool from_end)
{
    return (ont_gather){.outer = 1, .table = shape->dims[0], .inner = ont_shape_count_range(shape, 1, shape->rank),
                        .count = ont_shape_count(&index->shape), .size = ont_dtype_size(ONT_FLOAT32),
                        .wide = index->dtype == ONT_INT64, .from_end = from_end};
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    product *p = ont_arena_alloc(arena, sizeof *p);
    if (!p) return ONT_ENOMEM;
    const ont_value *x = ont_node_in(node, 0), *from = ont_node_in(node, 1), *to = ont_node_in(node, 2);
    *p = (product){.from = rows_of(&x->shape, from, ont_attr_int(node, "from_end", 0)),
                   .to = rows_of(&node->outputs[0]->shape, to, true)};
    ONT_ASSERT(p->from.count == p->to.count && p->from.inner == p->to.inner);
    const ont_value *weight = ont_node_in(node, 3);
    p->heads = weight && p->to.count ? ont_shape_count(&weight->shape) / p->to.count : 1;
    p->width = p->to.inner / ont_max(p->heads, 1);
    ONT_ASSERT(p->heads * p->width == p->to.inner);
    out->state = p;
    out->work_bytes = ont_row_hits_bytes(p->to.count);
    return ONT_OK;
}

/* Adds `count` entries to one row of the result. */
static void add_entries(const job *j, float *out, const ont_row_hit *hits, int64_t count)
{
    const ont_call *call = j->call;
    const product *p = j->p;
    const float *weight = ont_node_in(call->node, 3) ? call->in[3] : NULL;
    int64_t position[ENTRIES], at[ENTRIES];
    float scale[ENTRIES];
    for (int64_t k = 0, n; k < count; k += n) {
        n = ont_min(count - k, ENTRIES);
        for (int64_t i = 0; i < n; i++) {
            position[i] = ont_hit_position(hits[k + i]);
            at[i] = ont_gather_index(&p->from, call->in[1], position[i]) * p->from.inner;
        }
        for (int64_t head = 0; head < p->heads; head++) {
            for (int64_t i = 0; i < n; i++) scale[i] = weight ? weight[position[i] * p->heads + head] : 1;
            const float *x = (const float *)call->in[0] + head * p->width;
            ont_simd()->add_taps(out + head * p->width, x, scale, at, n, p->width);
        }
    }
}

static void add_wide_entries(const job *j, double *out, const ont_row_hit *hits, int64_t count)
{
    const ont_call *call = j->call;
    const product *p = j->p;
    const double *weight = ont_node_in(call->node, 3) ? call->in[3] : NULL;
    for (int64_t k = 0; k < count; k++) {
        int64_t position = ont_hit_position(hits[k]);
        int64_t row = ont_gather_index(&p->from, call->in[1], position) * p->from.inner;
        for (int64_t head = 0; head < p->heads; head++) {
            const double *x = (const double *)call->in[0] + row + head * p->width;
            double scale = weight ? weight[position * p->heads + head] : 1, *y = out + head * p->width;
            for (int64_t i = 0; i < p->width; i++) y[i] += scale * x[i];
        }
    }
}

/* Rows whose work has its middle in units [first, last). */
static void sum_rows(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_call *call = j->call;
    bool wide = call->node->outputs[0]->dtype == ONT_FLOAT64;
    size_t bytes = (size_t)j->p->to.inner * (wide ? sizeof(double) : sizeof(float));
    const char *base = ont_node_in(call->node, 4) ? call->in[4] : NULL;
    int64_t row = ont_row_hits_row_at(&j->hits, first), end = ont_row_hits_row_at(&j->hits, last);
    char *out = call->out[0];
    if (!base)
        memset(out + (size_t)row * bytes, 0, (size_t)(end - row) * bytes);
    else if (base != out)
        memcpy(out + (size_t)row * bytes, base + (size_t)row * bytes, (size_t)(end - row) * bytes);
    int64_t k = ont_row_hits_before(&j->hits, row), stop = ont_row_hits_before(&j->hits, end);
    for (int64_t count; k < stop; k += count) {
        int64_t at = ont_hit_row(j->hits.at[k]);
        for (count = 1; k + count < stop && ont_hit_row(j->hits.at[k + count]) == at;) count++;
        if (wide)
            add_wide_entries(j, (double *)(out + (size_t)at * bytes), j->hits.at + k, count);
        else
            add_entries(j, (float *)(out + (size_t)at * bytes), j->hits.at + k, count);
    }
}

static ont_status run(const ont_call *call)
{
    const product *p = call->state;
    ONT_TRY(ont_gather_check(&p->from, ont_node_in(call->node, 1), call->in[1]));
    ONT_TRY(ont_gather_check(&p->to, ont_node_in(call->node, 2), call->in[2]));
    if (!p->to.table || !p->to.inner) return ONT_OK;
    job j = {.call = call, .p = p};
    j.hits = ont_row_hits_sort(&p->to, call->in[2], call->work, true);
    ont_parallel(ont_row_hits_units(&j.hits), 32768 / (p->to.inner + 1) + 1, sum_rows, &j);
    return ONT_OK;
}

/* ---- SampledMatMul ---- */

static ont_status prepare_sampled(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    product *p = ont_arena_alloc(arena, sizeof *p);
    if (!p) return ONT_ENOMEM;
    const ont_value *a = ont_node_in(node, 0), *from = ont_node_in(node, 1);
    const ont_value *b = ont_node_in(node, 2), *to = ont_node_in(node, 3);
    *p = (product){.from = rows_of(&a->shape, from, ont_attr_int(node, "from_end", 0) & 1),
                   .to = rows_of(&b->shape, to, ont_attr_int(node, "from_end", 0) & 2)};
    ONT_ASSERT(p->from.count == p->to.count && p->from.inner == p->to.inner);
    p->heads = p->to.count ? ont_shape_count(&node->outputs[0]->shape) / p->to.count : 1;
    p->width = p->to.inner / ont_max(p->heads, 1);
    ONT_ASSERT(p->heads * p->width == p->to.inner);
    out->state = p;
    return ONT_OK;
}

/* Inner products [first, last) of (entries, heads). */
static void multiply_entries(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const product *p = call->state;
    bool wide = call->node->outputs[0]->dtype == ONT_FLOAT64;
    for (int64_t i = first; i < last; i++) {
        int64_t entry = i / p->heads, column = i % p->heads * p->width;
        int64_t a = ont_gather_index(&p->from, call->in[1], entry) * p->from.inner + column;
        int64_t b = ont_gather_index(&p->to, call->in[3], entry) * p->to.inner + column;
        if (!wide) {
            ((float *)call->out[0])[i] =
                ont_simd()->dot((const float *)call->in[0] + a, (const float *)call->in[2] + b, p->width);
            continue;
        }
        const double *x = (const double *)call->in[0] + a, *y = (const double *)call->in[2] + b;
        double sum = 0;
        for (int64_t k = 0; k < p->width; k++) sum += x[k] * y[k];
        ((double *)call->out[0])[i] = sum;
    }
}

static ont_status run_sampled(const ont_call *call)
{
    const product *p = call->state;
    ONT_TRY(ont_gather_check(&p->from, ont_node_in(call->node, 1), call->in[1]));
    ONT_TRY(ont_gather_check(&p->to, ont_node_in(call->node, 3), call->in[3]));
    ont_parallel(p->to.count * p->heads, 32768 / (p->width + 1) + 1, multiply_entries, (void *)call);
    return ONT_OK;
}

static const ont_kernel kernels[] = {
    {.name = "sparse_matmul", .accept = accept, .prepare = prepare, .run = run, .inplace = 16},
};
const ont_op ont_op_SparseMatMul = {.domain = ONT_DOMAIN, .name = "SparseMatMul", .since = 1, .min_inputs = 3,
                                    .max_inputs = 5, .attributes = "shape:I from_end:i",
                                    .infer = ont_infer_shape_attr, ONT_KERNELS(kernels)};

static const ont_kernel sampled_kernels[] = {
    {.name = "sampled_matmul", .accept = accept_floats, .prepare = prepare_sampled, .run = run_sampled},
};
const ont_op ont_op_SampledMatMul = {.domain = ONT_DOMAIN, .name = "SampledMatMul", .since = 1, .min_inputs = 4,
                                     .max_inputs = 4, .attributes = "shape:I from_end:i",
                                     .infer = ont_infer_shape_attr, ONT_KERNELS(sampled_kernels)};
