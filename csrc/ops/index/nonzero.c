/*
 * Operators whose output size depends on values: NonZero, Compress, Unique. Each is expanded into a node that counts
 * (or computes as many results as there can be, and the count) and a node that has the count as an input. The program
 * depends on the count alone, so inputs with the same count share it. NonMaxSuppression is in nms.c.
 */
#include <string.h>

#include "base/number.h"
#include "ops/support/compose.h"

static const char *accept_any(const ont_node *node)
{
    return ont_dtype_size(node->inputs[0].value->dtype) ? NULL : "dtype";
}

/* ---- NonZero ---- */

typedef bool (*nonzero_fn)(const void *data, int64_t i);

static bool nonzero_f32(const void *data, int64_t i)
{
    return ((const float *)data)[i] != 0;
}

static bool nonzero_f64(const void *data, int64_t i)
{
    return ((const double *)data)[i] != 0;
}

static bool nonzero_16(const void *data, int64_t i) /* float16, bfloat16: any bit but the sign */
{
    return ((const uint16_t *)data)[i] & 0x7fff;
}

static bool nonzero_8(const void *data, int64_t i)
{
    return ((const uint8_t *)data)[i];
}

static bool nonzero_i64(const void *data, int64_t i)
{
    return ((const int64_t *)data)[i];
}

static bool nonzero_i32(const void *data, int64_t i)
{
    return ((const int32_t *)data)[i];
}

static bool nonzero_i16(const void *data, int64_t i)
{
    return ((const int16_t *)data)[i];
}

static nonzero_fn nonzero_of(ont_dtype dtype)
{
    switch (dtype) {
    case ONT_FLOAT32: return nonzero_f32;
    case ONT_FLOAT64: return nonzero_f64;
    case ONT_FLOAT16:
    case ONT_BFLOAT16: return nonzero_16;
    case ONT_INT64:
    case ONT_UINT64: return nonzero_i64;
    case ONT_INT32:
    case ONT_UINT32: return nonzero_i32;
    case ONT_INT16:
    case ONT_UINT16: return nonzero_i16;
    case ONT_BOOL:
    case ONT_INT8:
    case ONT_UINT8: return nonzero_8;
    default: return NULL;
    }
}

static const char *nonzero_accept(const ont_node *node)
{
    return nonzero_of(node->inputs[0].value->dtype) ? NULL : "dtype";
}

static void nonzero_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    b->deferred = true;
    ont_value *x = ont_node_in(node, 0), *count = ont_build1(b, "ours:CountNonZero", x);
    outputs[0] = ont_build2(b, "ours:NonZeroOf", x, count);
}

static ont_status count_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    return ont_infer_out(node, 0, ONT_INT64, &(ont_shape){0});
}

static ont_status count_run(const ont_call *call)
{
    const ont_value *x = call->node->inputs[0].value;
    nonzero_fn nonzero = nonzero_of(x->dtype);
    int64_t n = ont_shape_count(&x->shape), count = 0;
    for (int64_t i = 0; i < n; i++) count += nonzero(call->in[0], i);
    *(int64_t *)call->out[0] = count;
    return ONT_OK;
}

static ont_status indices_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    double count;
    ONT_TRY(ont_const_scalar(node, 1, &count));
    return ont_infer_out(node, 0, ONT_INT64, &(ont_shape){2, {ont_node_in(node, 0)->shape.rank, (int64_t)count}});
}

/* out (rank, count): a column holds the coordinates of an element */
static ont_status indices_run(const ont_call *call)
{
    const ont_shape *shape = &call->node->inputs[0].value->shape;
    nonzero_fn nonzero = nonzero_of(call->node->inputs[0].value->dtype);
    int64_t n = ont_shape_count(shape), count = call->node->outputs[0]->shape.dims[1], found = 0;
    int64_t at[ONT_MAX_RANK] = {0}, *out = call->out[0];
    for (int64_t i = 0; i < n; i++) {
        if (nonzero(call->in[0], i)) {
            if (found == count)
                return ont_fail(ONT_EINTERNAL, "more than the %lld entries that were counted", (long long)count);
            for (int d = 0; d < shape->rank; d++) out[d * count + found] = at[d];
            found++;
        }
        for (int d = shape->rank - 1; d >= 0 && ++at[d] == shape->dims[d]; d--) at[d] = 0;
    }
    return found == count ? ONT_OK
                          : ont_fail(ONT_EINTERNAL, "fewer than the %lld entries that were counted", (long long)count);
}

static const ont_kernel count_kernels[] = {{.name = "count_nonzero_ref", .accept = nonzero_accept, .run = count_run}};
static const ont_kernel indices_kernels[] = {{.name = "nonzero_ref", .accept = nonzero_accept, .run = indices_run}};
const ont_op ont_op_NonZero = {.domain = "", .name = "NonZero", .since = 9, .min_inputs = 1, .max_inputs = 1,
                               .flags = ONT_OP_NO_GRAD, .attributes = "", .expand = nonzero_expand};
const ont_op ont_op_CountNonZero = {.domain = ONT_DOMAIN, .name = "CountNonZero", .since = 1, .min_inputs = 1,
                                    .max_inputs = 1, .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = count_infer,
                                    ONT_KERNELS(count_kernels)};
const ont_op ont_op_NonZeroOf = {.domain = ONT_DOMAIN, .name = "NonZeroOf", .since = 1, .min_inputs = 2,
                                 .max_inputs = 2, .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = indices_infer,
                                 ONT_KERNELS(indices_kernels)};

/* ---- Compress: a Gather where the condition is true ---- */

static void compress_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *condition = ont_node_in(node, 1);
    const ont_attr *given = ont_attr_find(node, "axis", ONT_ATTR_INT);
    int axis = 0;
    if (condition->dtype != ONT_BOOL || condition->shape.rank != 1) {
        ont_build_fail(b, ONT_EINVAL, "condition is %s of rank %d, a vector of bool is expected",
                       ont_dtype_name(condition->dtype), condition->shape.rank);
        return;
    }
    if (given) b->status = ont_shape_axis(given->i, x->shape.rank, &axis);
    if (!given) x = ont_build_reshape(b, x, &(ont_shape){1, {ont_shape_count(&x->shape)}});
    b->deferred = true;
    int64_t zero = 0;
    ont_value *indices = ont_build2(b, "Squeeze", ont_build1(b, "NonZero", condition),
                                    ont_build_const_ints(b, &zero, 1));
    ont_value *inputs[] = {x, indices};
    if (b->status != ONT_OK) return;
    ont_node *gather = ont_build_node(b, "", "Gather", inputs, 2, 1);
    if (gather) b->status = ont_attr_set_int(b->graph, gather, "axis", axis);
    outputs[0] = ont_build_done(b, gather);
}

const ont_op ont_op_Compress = {.domain = "", .name = "Compress", .since = 9, .min_inputs = 2, .max_inputs = 2,
                                .nondiff_inputs = 2, .attributes = "axis:i", .expand = compress_expand};

/* ---- Unique ---- */

/*
 * UniqueIndices(x; axis, sorted) over the n items along the axis: the index of the first item of each unique value,
 * (n); the index of the unique value of each item, (n); the number of items of each unique value, (n); and the number
 * of unique values. Entries behind that number are 0.
 */
static ont_status unique_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *x = ont_node_in(node, 0);
    int axis = 0;
    const ont_attr *given = ont_attr_find(node, "axis", ONT_ATTR_INT);
    if (given) ONT_TRY(ont_shape_axis(given->i, x->shape.rank, &axis));
    ont_shape items = {1, {given ? x->shape.dims[axis] : ont_shape_count(&x->shape)}};
    for (uint32_t i = 0; i < 3; i++) ONT_TRY(ont_infer_out(node, i, ONT_INT64, &items));
    return ont_infer_out(node, 3, ONT_INT64, &(ont_shape){1, {1}});
}

typedef struct unique_job {
    const void *x;
    ont_dtype dtype;
    int64_t outer, n, inner;
} unique_job;

/* NaN sorts last and equals itself, as in NumPy. */
static int compare_elements(const unique_job *job, int64_t i, int64_t j)
{
    if (ont_dtype_is_float(job->dtype)) {
        double a = ont_number_at(job->x, job->dtype, i), b = ont_number_at(job->x, job->dtype, j);
        if (a != a || b != b) return (a != a) - (b != b);
        return (a > b) - (a < b);
    }
    int64_t a = ont_integer_at(job->x, job->dtype, i), b = ont_integer_at(job->x, job->dtype, j);
    if (job->dtype == ONT_UINT64) return ((uint64_t)a > (uint64_t)b) - ((uint64_t)a < (uint64_t)b);
    return (a > b) - (a < b);
}

static int compare_items(const unique_job *job, int64_t i, int64_t j)
{
    for (int64_t o = 0; o < job->outer; o++)
        for (int64_t k = 0; k < job->inner; k++) {
            int order = compare_elements(job, (o * job->n + i) * job->inner + k, (o * job->n + j) * job->inner + k);
            if (order) return order;
        }
    return 0;
}

/* Merges the sorted runs [first, middle) and [middle, last) of `from` into `to`; stable. */
static void merge_runs(const unique_job *job, const int64_t *from, int64_t *to, int64_t first, int64_t middle,
                       int64_t last)
{
    for (int64_t left = first, right = middle, at = first; at < last; at++) {
        bool take_left = left < middle && (right >= last || compare_items(job, from[left], from[right]) <= 0);
        to[at] = take_left ? from[left++] : from[right++];
    }
}

/* Indices of the items in sorted order; returns `a` or `b`. */
static int64_t *sort_items(const unique_job *job, int64_t *a, int64_t *b)
{
    for (int64_t i = 0; i < job->n; i++) a[i] = i;
    for (int64_t width = 1; width < job->n; width *= 2) {
        for (int64_t first = 0; first < job->n; first += 2 * width) {
            int64_t middle = first + width < job->n ? first + width : job->n;
            int64_t last = first + 2 * width < job->n ? first + 2 * width : job->n;
            merge_runs(job, a, b, first, middle, last);
        }
        int64_t *swap = a;
        a = b;
        b = swap;
    }
    return a;
}

static unique_job job_of(const ont_node *node, const void *x)
{
    const ont_value *v = node->inputs[0].value;
    const ont_attr *given = ont_attr_find(node, "axis", ONT_ATTR_INT);
    unique_job job = {x, v->dtype, 1, node->outputs[0]->shape.dims[0], 1};
    int axis = given ? (int)(given->i < 0 ? given->i + v->shape.rank : given->i) : 0;
    if (given) job.outer = ont_shape_count_range(&v->shape, 0, axis);
    if (given) job.inner = ont_shape_count_range(&v->shape, axis + 1, v->shape.rank);
    return job;
}

static ont_status unique_prepare(const ont_node *node, ont_arena *arena, ont_prepared *prepared)
{
    (void)arena;
    prepared->work_bytes = (size_t)node->outputs[0]->shape.dims[0] * 5 * sizeof(int64_t);
    return ONT_OK;
}

/* Renumbers unique values from sorted order to the order of first appearance. */
static void renumber(int64_t *first, int64_t *inverse, int64_t *counts, int64_t *rank, int64_t *old, int64_t n,
                     int64_t count)
{
    int64_t next = 0;
    for (int64_t u = 0; u < count; u++) rank[u] = -1;
    for (int64_t i = 0; i < n; i++)
        if (rank[inverse[i]] < 0) rank[inverse[i]] = next++;
    for (int64_t i = 0; i < n; i++) inverse[i] = rank[inverse[i]];
    memcpy(old, first, (size_t)count * sizeof *old);
    for (int64_t u = 0; u < count; u++) first[rank[u]] = old[u];
    memcpy(old, counts, (size_t)count * sizeof *old);
    for (int64_t u = 0; u < count; u++) counts[rank[u]] = old[u];
}

static ont_status unique_run(const ont_call *call)
{
    unique_job job = job_of(call->node, call->in[0]);
    int64_t *work = call->work, *first = call->out[0], count = 0; /* outputs without a user are absent */
    int64_t *inverse = call->out[1] ? call->out[1] : work + 3 * job.n,
            *counts = call->out[2] ? call->out[2] : work + 4 * job.n;
    int64_t *order = sort_items(&job, work, work + job.n);
    size_t bytes = (size_t)job.n * sizeof *first;
    memset(first, 0, bytes);
    memset(counts, 0, bytes);
    for (int64_t i = 0; i < job.n; i++) {
        if (!i || compare_items(&job, order[i - 1], order[i])) first[count++] = order[i];
        inverse[order[i]] = count - 1;
        counts[count - 1]++;
    }
    if (!ont_attr_int(call->node, "sorted", 1)) renumber(first, inverse, counts, work, work + 2 * job.n, job.n, count);
    if (call->out[3]) *(int64_t *)call->out[3] = count;
    return ONT_OK;
}

/* The first `count` entries. */
static ont_value *head(ont_builder *b, ont_value *x, ont_value *count)
{
    int64_t zero = 0;
    return ont_build3(b, "Slice", x, ont_build_const_ints(b, &zero, 1), count);
}

static void unique_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    const ont_attr *given = ont_attr_find(node, "axis", ONT_ATTR_INT);
    ont_node *indices = ont_build_node(b, ONT_DOMAIN, "UniqueIndices", &x, 1, 4);
    if (indices) b->status = ont_attr_copy_all(b->graph, indices, node);
    if (!ont_build_done(b, indices)) return;
    if (!given) x = ont_build_reshape(b, x, &(ont_shape){1, {ont_shape_count(&x->shape)}});
    b->deferred = true;
    ont_value *count = indices->outputs[3], *first = head(b, indices->outputs[0], count), *inputs[] = {x, first};
    if (b->status != ONT_OK) return;
    ont_node *items = ont_build_node(b, ONT_DOMAIN, "UniqueItems", inputs, 2, 1);
    if (items) b->status = ont_attr_set_int(b->graph, items, "axis", given ? given->i : 0);
    outputs[0] = ont_build_done(b, items);
    outputs[1] = first;
    outputs[2] = indices->outputs[1];
    outputs[3] = head(b, indices->outputs[2], count);
}

/* The items at indices. It has no gradient, as torch.unique() has none: zeros would be silently wrong. */
static ont_status items_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *x = ont_node_in(node, 0), *indices = ont_node_in(node, 1);
    ont_shape shape = x->shape;
    int axis;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), shape.rank, &axis));
    shape.dims[axis] = indices->shape.dims[0];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_status items_run(const ont_call *call)
{
    const ont_shape *x = &call->node->inputs[0].value->shape;
    const int64_t *indices = call->in[1];
    int64_t axis = ont_attr_int(call->node, "axis", 0), count = call->node->inputs[1].value->shape.dims[0];
    if (axis < 0) axis += x->rank;
    int64_t outer = ont_shape_count_range(x, 0, (int)axis), n = x->dims[axis];
    size_t item = (size_t)ont_shape_count_range(x, (int)axis + 1, x->rank) *
                  ont_dtype_size(call->node->outputs[0]->dtype);
    char *out = call->out[0];
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < count; i++, out += item)
            memcpy(out, (const char *)call->in[0] + (size_t)(o * n + indices[i]) * item, item);
    return ONT_OK;
}

static const ont_kernel unique_kernels[] = {
    {.name = "unique_ref", .accept = accept_any, .prepare = unique_prepare, .run = unique_run}};
const ont_op ont_op_Unique = {.domain = "", .name = "Unique", .since = 11, .min_inputs = 1, .max_inputs = 1,
                              .attributes = "axis:i sorted:i", .expand = unique_expand};
const ont_op ont_op_UniqueIndices = {.domain = ONT_DOMAIN, .name = "UniqueIndices", .since = 1, .min_inputs = 1,
                                     .max_inputs = 1, .flags = ONT_OP_NO_GRAD, .attributes = "axis:i sorted:i",
                                     .infer = unique_infer, ONT_KERNELS(unique_kernels)};
static const ont_kernel items_kernels[] = {{.name = "unique_items_ref", .accept = accept_any, .run = items_run}};
const ont_op ont_op_UniqueItems = {.domain = ONT_DOMAIN, .name = "UniqueItems", .since = 1, .min_inputs = 2,
                                   .max_inputs = 2, .nondiff_inputs = 2, .attributes = "axis:i", .infer = items_infer,
                                   ONT_KERNELS(items_kernels)};
