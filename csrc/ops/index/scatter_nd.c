/*
 * GatherND, ScatterND and TensorScatter: slices at index tuples. A scatter takes the tuples in order, and each thread
 * has a range of the slice, so results do not depend on the number of threads.
 */
#include <string.h>

#include "base/parallel.h"
#include "ops/index/indexed.h"
#include "ops/index/scatter.h"

/* ---- GatherND, ScatterND ---- */

typedef struct tuples {
    int64_t batches, per_batch, count; /* number of batches, tuples of a batch, and all tuples */
    int depth;                         /* length of a tuple */
    int64_t dims[ONT_MAX_RANK], strides[ONT_MAX_RANK]; /* sizes of the indexed dims, and their strides in slices */
    int64_t batch_slices;              /* slices of the data in a batch */
    int64_t slice;                     /* elements of a slice */
    size_t size;
    bool wide;
    ont_dtype dtype;
    ont_scatter reduction;
} tuples;

/* Checks data and indices, and sets the shape of the slices at the tuples. */
static ont_status tuple_shapes(const ont_node *node, int *batch_dims, int *depth, ont_shape *slices)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape, *index = &ont_node_in(node, 1)->shape;
    int64_t batch = ONT_IS(node, GatherND) ? ont_attr_int(node, "batch_dims", 0) : 0;
    char a[ONT_SHAPE_TEXT], b[ONT_SHAPE_TEXT];
    if (!index->rank || !x->rank) return ont_fail(ONT_EINVAL, "data and indices must not be scalars");
    int64_t last = index->dims[index->rank - 1];
    bool fits = batch >= 0 && batch < index->rank && batch < x->rank && last >= 1 && batch + last <= x->rank;
    for (int d = 0; fits && d < batch; d++) fits = x->dims[d] == index->dims[d];
    if (!fits)
        return ont_fail(ONT_EINVAL, "indices of shape %s do not fit data of shape %s with %d batch dims",
                        ont_shape_text(index, a), ont_shape_text(x, b), (int)batch);
    *batch_dims = (int)batch;
    *depth = (int)last;
    int rank = index->rank - 1 + x->rank - (int)batch - (int)last;
    if (rank > ONT_MAX_RANK) return ont_fail(ONT_EUNSUPPORTED, "rank %d, at most %d", rank, ONT_MAX_RANK);
    *slices = (ont_shape){0};
    for (int d = 0; d < index->rank - 1; d++) slices->dims[slices->rank++] = index->dims[d];
    for (int d = (int)(batch + last); d < x->rank; d++) slices->dims[slices->rank++] = x->dims[d];
    return ONT_OK;
}

static ont_status gather_nd_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *index;
    int batch, depth;
    ont_shape slices;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &index));
    ONT_TRY(ont_index_dtype(index));
    ONT_TRY(tuple_shapes(node, &batch, &depth, &slices));
    return ont_infer_out(node, 0, x->dtype, &slices);
}

static ont_status scatter_nd_infer(ont_graph *g, ont_node *node)
{
    ont_value *x, *index, *updates;
    int batch, depth;
    ont_shape slices;
    ont_scatter reduction;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &index));
    ONT_TRY(ont_need_input(node, 2, &updates));
    ONT_TRY(ont_index_dtype(index));
    ONT_TRY(ont_scatter_reduction(node, &reduction));
    ONT_TRY(tuple_shapes(node, &batch, &depth, &slices));
    char a[ONT_SHAPE_TEXT], b[ONT_SHAPE_TEXT];
    if (updates->dtype != x->dtype || !ont_shape_equal(&updates->shape, &slices))
        return ont_fail(ONT_EINVAL, "updates are %s%s, expected %s%s", ont_dtype_name(updates->dtype),
                        ont_shape_text(&updates->shape, a), ont_dtype_name(x->dtype), ont_shape_text(&slices, b));
    return ont_infer_same(g, node);
}

static ont_status tuples_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *index = ont_node_in(node, 1);
    tuples *s = ont_arena_alloc(arena, sizeof *s);
    int batch;
    ont_shape slices;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(tuple_shapes(node, &batch, &s->depth, &slices));
    ONT_TRY(ont_scatter_reduction(node, &s->reduction));
    s->batches = ont_shape_count_range(&x->shape, 0, batch);
    s->count = ont_shape_count_range(&index->shape, 0, index->shape.rank - 1);
    s->per_batch = s->batches ? s->count / s->batches : 0;
    s->batch_slices = ont_shape_count_range(&x->shape, batch, batch + s->depth);
    s->slice = ont_shape_count_range(&x->shape, batch + s->depth, x->shape.rank);
    int64_t stride = 1;
    for (int d = s->depth - 1; d >= 0; d--) {
        s->dims[d] = x->shape.dims[batch + d];
        s->strides[d] = stride;
        stride *= s->dims[d];
    }
    s->size = ont_dtype_size(x->dtype);
    s->dtype = x->dtype;
    s->wide = index->dtype == ONT_INT64;
    out->state = s;
    return ONT_OK;
}

static ont_status check_tuples(const tuples *s, const ont_call *call)
{
    for (int64_t i = 0; i < s->count * s->depth; i++) {
        int64_t given = ont_index_at(call->in[1], s->wide, i), index = given, size = s->dims[i % s->depth];
        if (!ont_index_wrap(&index, size)) return ont_index_fail(ont_node_in(call->node, 1), given, i, size);
    }
    return ONT_OK;
}

/* Index of the slice of the data that tuple i names. */
static int64_t slice_at(const tuples *s, const void *indices, int64_t i)
{
    int64_t at = i / s->per_batch * s->batch_slices;
    for (int d = 0; d < s->depth; d++) {
        int64_t index = ont_index_at(indices, s->wide, i * s->depth + d);
        at += (index < 0 ? index + s->dims[d] : index) * s->strides[d];
    }
    return at;
}

static void gather_tuples(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const tuples *s = call->state;
    size_t bytes = (size_t)s->slice * s->size;
    for (int64_t i = first; i < last; i++)
        memcpy((char *)call->out[0] + (size_t)i * bytes,
               (const char *)call->in[0] + (size_t)slice_at(s, call->in[1], i) * bytes, bytes);
}

static ont_status gather_nd_run(const ont_call *call)
{
    const tuples *s = call->state;
    ONT_TRY(check_tuples(s, call));
    if (s->slice) ont_parallel(s->count, 16384 / s->slice + 1, gather_tuples, (void *)call);
    return ONT_OK;
}

enum { MIN_COLUMNS = 64 }; /* of a slice, for one thread: every thread goes through all tuples */

/* Columns [first, last) of every slice, in the order of the tuples. */
static void scatter_columns(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const tuples *s = call->state;
    for (int64_t i = 0; i < s->count; i++) {
        int64_t at = slice_at(s, call->in[1], i) * s->slice + first;
        char *to = (char *)call->out[0] + (size_t)at * s->size;
        const char *from = (const char *)call->in[2] + (size_t)(i * s->slice + first) * s->size;
        if (s->reduction == ONT_SCATTER_NONE)
            memcpy(to, from, (size_t)(last - first) * s->size);
        else
            ont_scatter_combine(s->dtype, s->reduction, to, from, last - first);
    }
}

static ont_status scatter_nd_run(const ont_call *call)
{
    const tuples *s = call->state;
    const ont_value *y = call->node->outputs[0];
    size_t bytes = (size_t)ont_shape_count(&y->shape) * s->size;
    ONT_TRY(check_tuples(s, call));
    if (bytes && call->out[0] != call->in[0]) memcpy(call->out[0], call->in[0], bytes);
    if (s->count) ont_parallel(s->slice, 8192 / s->count + MIN_COLUMNS, scatter_columns, (void *)call);
    return ONT_OK;
}

/* GatherNDGrad(dy, indices; shape): dy added to zeros. Its attribute batch_dims is why it is not a ScatterND. */
static void gather_nd_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "GatherNDGrad", (ont_value *[]){GO(0), I(1)}, 2, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_ints(b->graph, node, "shape", I(0)->shape.dims, (size_t)I(0)->shape.rank);
    GI(0, ont_build_done(b, node));
}

static ont_status gather_nd_grad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *dx = node->outputs[0], *index = ont_node_in(node, 1);
    tuples *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    int batch = (int)ont_attr_int(node, "batch_dims", 0);
    s->depth = (int)index->shape.dims[index->shape.rank - 1];
    s->batches = ont_shape_count_range(&dx->shape, 0, batch);
    s->count = ont_shape_count_range(&index->shape, 0, index->shape.rank - 1);
    s->per_batch = s->batches ? s->count / s->batches : 0;
    s->batch_slices = ont_shape_count_range(&dx->shape, batch, batch + s->depth);
    s->slice = ont_shape_count_range(&dx->shape, batch + s->depth, dx->shape.rank);
    int64_t stride = 1;
    for (int d = s->depth - 1; d >= 0; d--) {
        s->dims[d] = dx->shape.dims[batch + d];
        s->strides[d] = stride;
        stride *= s->dims[d];
    }
    s->size = ont_dtype_size(dx->dtype);
    s->dtype = dx->dtype;
    s->wide = index->dtype == ONT_INT64;
    s->reduction = ONT_SCATTER_ADD;
    out->state = s;
    return ONT_OK;
}

static ont_status gather_nd_grad_run(const ont_call *call)
{
    const tuples *s = call->state;
    const ont_value *dx = call->node->outputs[0];
    ONT_TRY(check_tuples(s, call));
    memset(call->out[0], 0, (size_t)ont_shape_count(&dx->shape) * s->size);
    /* runs the loop of a scatter, whose updates are input 2 */
    ont_call as_scatter = *call;
    const void *in[] = {NULL, call->in[1], call->in[0]};
    as_scatter.in = in;
    if (s->count) ont_parallel(s->slice, 8192 / s->count + MIN_COLUMNS, scatter_columns, &as_scatter);
    return ONT_OK;
}

static const ont_kernel gather_nd_kernels[] = {
    {.name = "gather_nd_ref", .accept = ont_accept_any, .prepare = tuples_prepare, .run = gather_nd_run},
};
static const ont_kernel scatter_nd_kernels[] = {
    {.name = "scatter_nd_ref", .accept = ont_scatter_accept, .prepare = tuples_prepare, .run = scatter_nd_run,
     .inplace = 1},
};
static const ont_kernel gather_nd_grad_kernels[] = {
    {.name = "gather_nd_grad_ref", .accept = ont_accept_float, .prepare = gather_nd_grad_prepare,
     .run = gather_nd_grad_run},
};
const ont_op ont_op_GatherND = {.domain = "", .name = "GatherND", .since = 11, .min_inputs = 2, .max_inputs = 2,
                                .nondiff_inputs = 2, .attributes = "batch_dims:i", .infer = gather_nd_infer,
                                .grad = gather_nd_grad, .rows = ONT_ROWS_GATHER_ND,
                                ONT_KERNELS(gather_nd_kernels)};
const ont_op ont_op_GatherNDGrad = {.domain = ONT_DOMAIN, .name = "GatherNDGrad", .since = 1, .min_inputs = 2,
                                    .max_inputs = 2, .attributes = "batch_dims:i shape:I",
                                    .infer = ont_infer_shape_attr,
                                    ONT_KERNELS(gather_nd_grad_kernels)};
const ont_op ont_op_ScatterND = {.domain = "", .name = "ScatterND", .since = 11, .min_inputs = 3, .max_inputs = 3,
                                 .nondiff_inputs = 2, .attributes = "reduction:s", .infer = scatter_nd_infer,
                                 .grad = ont_scatter_grad, ONT_KERNELS(scatter_nd_kernels)};
