/*
 * Operators on a device that find elements by indices or positions: GatherElements, GatherND, their scatters, CumSum,
 * CumProd, ArgMax, ArgMin and TopK.
 */
#include <string.h>

#include "ops_common.h"

static bool is_named(const ont_node *node, const char *name) { return !strcmp(node->op->name, name); }

/* ---- gathers and scatters ---- */

typedef struct index_state {
    ont_index index;
    ont_gather sums;     /* of updates by place: floats that are added */
    size_t places_bytes, result_bytes;
    bool sorts, is_grad; /* sorts: `sums` is used */
} index_state;

static bool is_nd(const ont_node *node)
{
    return is_named(node, "GatherND") || is_named(node, "ScatterND") || is_named(node, "GatherNDGrad");
}

/* The tensor that the indices are of. */
static const ont_value *data_of(const ont_node *node)
{
    return is_named(node, "GatherNDGrad") ? node->outputs[0] : ont_node_in(node, 0);
}

static const char *index_accept(const ont_node *node)
{
    const ont_value *data = data_of(node), *index = ont_node_in(node, 1);
    size_t size = ont_dtype_size(data->dtype);
    ont_scatter reduction;
    if (size != 1 && size != 2 && size != 4 && size != 8) return "dtype";
    if (ont_scatter_reduction(node, &reduction) != ONT_OK) return "reduction";
    bool is_float = ont_dtype_is_float(data->dtype);
    if (is_named(node, "GatherNDGrad") && !is_float) return "dtype";
    if (reduction != ONT_SCATTER_NONE && !is_float && !ont_dtype_is_int(data->dtype)) return "dtype";
    if (reduction > ONT_SCATTER_ADD && is_float && !ont_is_float32_or_64(data->dtype)) return "dtype";
    if (ont_is_long(data) || ont_is_long(index) || ont_is_long(ont_node_in(node, 0)) || ont_is_long(node->outputs[0]))
        return "2^31 elements or more";
    return NULL;
}

static void read_tuples(const ont_node *node, const ont_shape *x, const ont_shape *index, ont_index *s)
{
    int batch = is_named(node, "ScatterND") ? 0 : (int)ont_attr_int(node, "batch_dims", 0);
    s->depth = (int32_t)index->dims[index->rank - 1];
    s->count = ont_shape_count_range(index, 0, index->rank - 1);
    s->slice = ont_shape_count_range(x, batch + s->depth, x->rank);
    s->batch_slices = 1;
    for (int d = s->depth - 1; d >= 0; d--) {
        s->sizes[d] = x->dims[batch + d];
        s->strides[d] = s->batch_slices;
        s->batch_slices *= s->sizes[d];
    }
    int64_t batches = ont_shape_count_range(x, 0, batch);
    s->per_batch = batches ? s->count / batches : 0;
    s->places = batches * s->batch_slices;
    s->from_end = true;
}

static ont_status read_elements(const ont_node *node, const ont_shape *x, const ont_shape *index, ont_index *s)
{
    int axis;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->rank, &axis));
    s->count = ont_shape_count(index);
    s->slice = 1;
    s->places = ont_shape_count(x);
    s->rank = x->rank;
    ont_shape_strides(x, s->data_strides);
    s->sizes[0] = x->dims[axis];
    s->strides[0] = s->data_strides[axis];
    s->data_strides[axis] = 0;
    for (int d = 0; d < x->rank; d++) s->index_dims[d] = index->dims[d];
    s->along = index->dims[axis];
    s->inner = ont_shape_count_range(index, axis + 1, index->rank);
    s->from_end = !*node->op->domain;
    return ONT_OK;
}

static size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

static ont_status index_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *data = data_of(node), *index = ont_node_in(node, 1);
    index_state *s = ont_arena_alloc(arena, sizeof *s);
    ont_scatter reduction;
    if (!s) return ONT_ENOMEM;
    ont_index *k = &s->index;
    ONT_TRY(ont_scatter_reduction(node, &reduction));
    *k = (ont_index){.wide = index->dtype == ONT_INT64, .size = (int32_t)ont_dtype_size(data->dtype),
                     .dtype = data->dtype, .reduction = (int32_t)reduction};
    if (is_nd(node))
        read_tuples(node, &data->shape, &index->shape, k);
    else
        ONT_TRY(read_elements(node, &data->shape, &index->shape, k));
    out->state = s;
    s->is_grad = is_named(node, "GatherNDGrad");
    if (node->n_inputs < 3 && !s->is_grad) return ONT_OK;
    s->result_bytes = (size_t)(k->places * k->slice) * (size_t)k->size;
    s->sorts = s->is_grad || (reduction == ONT_SCATTER_ADD && ont_dtype_is_float(data->dtype));
    s->places_bytes = rounded((size_t)(reduction == ONT_SCATTER_NONE && !s->is_grad ? k->places : k->count) * 4);
    out->work_bytes = s->places_bytes;
    if (!s->sorts) return ONT_OK;
    s->sums = (ont_gather){.outer = 1, .table = k->places, .inner = k->slice, .count = k->count, .dtype = k->dtype,
                           .size = k->size, .from_end = 0};
    out->work_bytes += (s->is_grad ? 0 : rounded(s->result_bytes)) + ont_gather_grad_work(&s->sums);
    return ONT_OK;
}

static ont_index index_of(const ont_call *call)
{
    ont_index k = ((const index_state *)call->state)->index;
    k.fault = call->fault;
    k.step = call->step;
    return k;
}

static ont_status clear(const ont_call *call, void *to, size_t bytes)
{
    return bytes ? call->device->ops->clear(call->device, to, bytes, call->stream) : ONT_OK;
}

static ont_status index_gather_run(const ont_call *call)
{
    ont_index k = index_of(call);
    return ont_launched(ont_launch_index_gather(&k, call->in[0], call->in[1], call->out[0], call->stream));
}

/* The sums of the updates by place, into `to`. */
static ont_status add_sorted(const ont_call *call, const ont_index *k, const void *updates, void *to, void *work)
{
    const index_state *s = call->state;
    ONT_TRY(ont_launched(ont_launch_places(k, call->in[1], call->work, call->stream)));
    ONT_TRY(clear(call, to, s->result_bytes));
    if (!k->count || !k->slice) return ONT_OK;
    return ont_launched(ont_launch_gather_grad(&s->sums, updates, call->work, to, work, call->stream));
}

static ont_status gather_nd_grad_run(const ont_call *call)
{
    ont_index k = index_of(call);
    const index_state *s = call->state;
    return add_sorted(call, &k, call->in[0], call->out[0], (char *)call->work + s->places_bytes);
}

static ont_status scatter_run(const ont_call *call)
{
    ont_index k = index_of(call);
    const index_state *s = call->state;
    char *behind = (char *)call->work + s->places_bytes;
    if (k.reduction == ONT_SCATTER_NONE) {
        ONT_TRY(clear(call, call->work, (size_t)k.places * 4));
        return ont_launched(ont_launch_put(&k, call->in, call->out[0], call->work, call->stream));
    }
    if (s->sorts) {
        ONT_TRY(add_sorted(call, &k, call->in[2], behind, behind + rounded(s->result_bytes)));
        return ont_launched(ont_launch_index_add(k.dtype, k.places * k.slice, call->in[0], behind, call->out[0],
                                                 call->stream));
    }
    if (call->out[0] != call->in[0] && s->result_bytes)
        ONT_TRY(call->device->ops->copy(call->device, call->out[0], call->in[0], s->result_bytes, call->stream));
    ONT_TRY(ont_launched(ont_launch_places(&k, call->in[1], call->work, call->stream)));
    return ont_launched(ont_launch_combine(&k, call->work, call->in[2], call->out[0], call->stream));
}

/* ---- CumSum, CumProd ---- */

static const char *scan_accept(const ont_node *node) { return ont_scan_accept(node); }

static ont_status scan_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    out->state = ont_arena_alloc(arena, sizeof(ont_scan));
    return out->state ? ont_scan_read(node, out->state) : ONT_ENOMEM;
}

static ont_status scan_run(const ont_call *call)
{
    return ont_launched(ont_launch_scan(call->state, call->in[0], call->out[0], call->stream));
}

static ont_status product_grad_run(const ont_call *call)
{
    return ont_launched(ont_launch_product_grad(call->state, call->in[0], call->in[1], call->out[0], call->stream));
}

/* ---- ArgMax, ArgMin, TopK ---- */

static bool is_topk(const ont_node *node) { return node->op->max_inputs == 2; }

static const char *select_accept(const ont_node *node)
{
    switch (ont_node_in(node, 0)->dtype) {
    case ONT_FLOAT32:
    case ONT_FLOAT64:
    case ONT_INT32:
    case ONT_INT64:
    case ONT_UINT64: return NULL;
    default: return "dtype";
    }
}

static ont_status select_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    ont_select *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", is_topk(node) ? -1 : 0), x->shape.rank, &axis));
    *s = (ont_select){.outer = ont_shape_count_range(&x->shape, 0, axis), .n = x->shape.dims[axis],
                      .inner = ont_shape_count_range(&x->shape, axis + 1, x->shape.rank), .k = 1, .dtype = x->dtype,
                      .last = ont_attr_int(node, "select_last_index", 0) != 0};
    if (is_topk(node)) {
        const ont_value *any = ont_node_out(node, 0) ? ont_node_out(node, 0) : ont_node_out(node, 1);
        s->k = any->shape.dims[axis];
        s->kind = ont_attr_int(node, "largest", 1) ? ONT_SELECT_LARGEST : ONT_SELECT_ASCENDING;
    } else {
        s->kind = is_named(node, "ArgMax") ? ONT_SELECT_LARGEST : ONT_SELECT_SMALLEST;
    }
    out->state = s;
    if (is_topk(node) && !ont_node_out(node, 1) && ont_select_needs_positions(s))
        out->work_bytes = (size_t)(s->outer * s->inner * s->k) * sizeof(int64_t);
    return ONT_OK;
}

static ont_status select_run(const ont_call *call)
{
    bool topk = is_topk(call->node);
    void *positions = ont_result(call, 1);
    if (topk && !positions && ont_select_needs_positions(call->state)) positions = call->work;
    return ont_launched(ont_launch_select(call->state, call->in[0], topk ? call->out[0] : NULL,
                                          topk ? positions : call->out[0], call->stream));
}

/* ---- ReverseSequence, SearchSorted ---- */

static const char *reverse_accept(const ont_node *node)
{
    const size_t size = ont_dtype_size(ont_node_in(node, 0)->dtype);
    return size == 1 || size == 2 || size == 4 || size == 8 ? NULL : "dtype";
}

static ont_status reverse_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    int64_t strides[ONT_MAX_RANK];
    int batch, time;
    ont_reverse *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "batch_axis", 1), x->shape.rank, &batch));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "time_axis", 0), x->shape.rank, &time));
    ont_shape_strides(&x->shape, strides);
    *s = (ont_reverse){.count = ont_shape_count(&x->shape), .batch = x->shape.dims[batch],
                       .batch_stride = strides[batch], .steps = x->shape.dims[time], .time_stride = strides[time],
                       .size = (int32_t)ont_dtype_size(x->dtype), .wide = ont_node_in(node, 1)->dtype == ONT_INT64};
    out->state = s;
    return ONT_OK;
}

static ont_status reverse_run(const ont_call *call)
{
    ont_reverse s = *(const ont_reverse *)call->state;
    s.fault = call->fault;
    s.step = call->step;
    return ont_launched(ont_launch_reverse(&s, call->in[0], call->in[1], call->out[0], call->stream));
}

static const char *search_accept(const ont_node *node)
{
    const ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return ont_is_float32_or_64(dtype) || dtype == ONT_INT32 || dtype == ONT_INT64 ? NULL : "dtype";
}

static ont_status search_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *rows = &ont_node_in(node, 0)->shape, *values = &ont_node_in(node, 1)->shape;
    ont_sorted_search *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_sorted_search){.count = ont_shape_count(values), .n = rows->dims[rows->rank - 1],
                      .width = rows->rank > 1 ? values->dims[values->rank - 1] : 0,
                      .right = ont_attr_int(node, "right", 0) != 0, .dtype = ont_node_in(node, 0)->dtype};
    out->state = s;
    return ONT_OK;
}

static ont_status search_run(const ont_call *call)
{
    return ont_launched(ont_launch_search(call->state, call->in[0], call->in[1], call->out[0], call->stream));
}

const ont_kernel ont_cuda_index_kernels[8] = {
    {.name = "cuda_index_gather", .accept = index_accept, .prepare = index_prepare, .run = index_gather_run},
    {.name = "cuda_scatter", .accept = index_accept, .prepare = index_prepare, .run = scatter_run, .inplace = 1},
    {.name = "cuda_gather_nd_grad", .accept = index_accept, .prepare = index_prepare, .run = gather_nd_grad_run},
    {.name = "cuda_scan", .accept = scan_accept, .prepare = scan_prepare, .run = scan_run},
    {.name = "cuda_product_grad", .accept = scan_accept, .prepare = scan_prepare, .run = product_grad_run},
    {.name = "cuda_select", .accept = select_accept, .prepare = select_prepare, .run = select_run},
    {.name = "cuda_reverse", .accept = reverse_accept, .prepare = reverse_prepare, .run = reverse_run},
    {.name = "cuda_search", .accept = search_accept, .prepare = search_prepare, .run = search_run},
};
