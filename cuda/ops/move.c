/*
 * Operators that move elements on a device: what ont_strided describes, Gather and its gradient, Range, Trilu, Rotate.
 * The layouts are computed by the operators' own CPU kernels, whose prepare() gives ont_strided.
 */
#include <string.h>

#include "ops_common.h"

const char *ont_cuda_accept_any(const ont_node *node)
{
    (void)node;
    return NULL;
}

const char *ont_cuda_accept_floats(const ont_node *node)
{
    return ont_dtype_is_float(ont_node_in(node, 0)->dtype) ? NULL : "dtype";
}

const char *ont_cuda_accept_wide(const ont_node *node)
{
    return ont_is_float32_or_64(ont_node_in(node, 0)->dtype) ? NULL : "dtype";
}

/* ---- strided copies ---- */

typedef struct copies {
    uint32_t n;
    ont_copy each[];
} copies;

static const char *accept_copy(const ont_node *node)
{
    size_t size = ont_dtype_size(ont_node_in(node, 0)->dtype);
    return size == 1 || size == 2 || size == 4 || size == 8 || size == 16 ? NULL : "dtype";
}

static void convert(const ont_strided *from, ont_copy *to)
{
    *to = (ont_copy){.rank = from->rank, .size = (int32_t)from->size, .count = from->count,
                      .from_offset = from->from_offset,
                     .to_offset = from->to_offset};
    for (int d = 0; d < from->rank; d++) {
        to->dims[d] = from->dims[d];
        to->from[d] = from->from[d];
        to->to[d] = from->to[d];
    }
}

static ont_status prepare_copies(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    bool split = !strcmp(node->op->name, "Split"), concat = !strcmp(node->op->name, "Concat");
    uint32_t n = split ? node->n_outputs : concat ? node->n_inputs : 1;
    ont_prepared layout = {0};
    const ont_kernel *cpu = &node->op->kernels[node->op->n_kernels - 1]; /* the reference: its state is ont_strided */
    ONT_TRY(cpu->prepare(node, arena, &layout));
    copies *s = ont_arena_alloc(arena, sizeof *s + n * sizeof s->each[0]);
    if (!s) return ONT_ENOMEM;
    s->n = n;
    for (uint32_t i = 0; i < n; i++) convert((const ont_strided *)layout.state + i, &s->each[i]);
    out->state = s;
    return ONT_OK;
}

static ont_status clear_output(const ont_call *call)
{
    const ont_value *y = call->node->outputs[0];
    size_t bytes = (size_t)ont_shape_count(&y->shape) * ont_dtype_size(y->dtype);
    return bytes ? call->device->ops->clear(call->device, call->out[0], bytes, call->stream) : ONT_OK;
}

static ont_status run_copies(const ont_call *call)
{
    const copies *s = call->state;
    bool split = !strcmp(call->node->op->name, "Split"), put = !strcmp(call->node->op->name, "PutSlice");
    if (put) ONT_TRY(clear_output(call));
    for (uint32_t i = 0; i < s->n; i++) {
        void *to = call->out[split ? i : 0];
        if (to)
            ONT_TRY(ont_launched(ont_launch_copy(&s->each[i],
                                                 call->in[split       ? 0
                                                          : s->n == 1 ? 0
                                                                      : i],
                                                 to, call->stream)));
    }
    return ONT_OK;
}

ont_status ont_copy_strided_launch(const ont_device_strided *layout, const void *from, void *to, void *stream)
{
    ont_copy c = {.rank = layout->rank, .size = (int32_t)layout->size, .count = 1};
    int64_t bytes = (int64_t)layout->size;
    for (int d = layout->rank - 1; d >= 0; d--) {
        c.dims[d] = layout->dims[d];
        c.from[d] = layout->strides[d] * (int64_t)layout->size;
        c.to[d] = bytes;
        bytes *= layout->dims[d];
        c.count *= layout->dims[d];
    }
    return ont_launched(ont_launch_copy(&c, from, to, stream));
}

/* ---- Gather ---- */

static ont_status read_gather(const ont_node *node, const ont_value *table, const ont_value *index, ont_arena *arena,
                              ont_prepared *out)
{
    ont_gather *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), table->shape.rank, &axis));
    *s = (ont_gather){.outer = ont_shape_count_range(&table->shape, 0, axis), .table = table->shape.dims[axis],
                      .inner = ont_shape_count_range(&table->shape, axis + 1, table->shape.rank),
                      .count = ont_shape_count(&index->shape), .size = (int32_t)ont_dtype_size(table->dtype),
                      .wide = index->dtype == ONT_INT64, .dtype = table->dtype,
                      .from_end = !*node->domain || !strcmp(node->op_type, "GatherGrad")};
    out->state = s;
    return ONT_OK;
}

static const char *accept_gather(const ont_node *node)
{
    size_t size = ont_dtype_size(ont_node_in(node, 0)->dtype);
    return size == 1 || size == 2 || size == 4 || size == 8 ? NULL : "dtype";
}

static ont_status gather_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return read_gather(node, ont_node_in(node, 0), ont_node_in(node, 1), arena, out);
}

static ont_gather gather_of(const ont_call *call)
{
    ont_gather g = *(const ont_gather *)call->state;
    g.fault = call->fault;
    g.step = call->step;
    return g;
}

static ont_status gather_run(const ont_call *call)
{
    ont_gather g = gather_of(call);
    return ont_launched(ont_launch_gather(&g, call->in[0], call->in[1], call->out[0], call->stream));
}

/* The sort counts positions and entries in 32 bits. */
static const char *accept_gather_grad(const ont_node *node)
{
    const ont_value *index = ont_node_in(node, 1), *table = node->outputs[0];
    int axis;
    if (!ont_dtype_is_float(table->dtype)) return "dtype";
    if (ont_shape_axis(ont_attr_int(node, "axis", 0), table->shape.rank, &axis) != ONT_OK) return "axis";
    if (ont_shape_count(&index->shape) > INT32_MAX || table->shape.dims[axis] >= INT32_MAX)
        return "more than 2^31 entries";
    return NULL;
}

static ont_status gather_grad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(read_gather(node, node->outputs[0], ont_node_in(node, 1), arena, out));
    out->work_bytes = ont_gather_grad_work(out->state);
    return ONT_OK;
}

static ont_status gather_grad_run(const ont_call *call)
{
    ont_gather g = gather_of(call);
    ONT_TRY(clear_output(call));
    return ont_launched(ont_launch_gather_grad(&g, call->in[0], call->in[1], call->out[0], call->work, call->stream));
}

/* ---- Range, Trilu ---- */

static const char *accept_range(const ont_node *node)
{
    ont_dtype d = node->outputs[0]->dtype;
    return d == ONT_FLOAT32 || d == ONT_FLOAT64 || d == ONT_INT32 || d == ONT_INT64 ? NULL : "dtype";
}

static ont_status range_run(const ont_call *call)
{
    const ont_value *y = call->node->outputs[0];
    return ont_launched(ont_launch_range((int)y->dtype, call->in[0], call->in[2], call->out[0],
                                         ont_shape_count(&y->shape), call->stream));
}

/* ConstantOfShape; one element, in scratch memory, is copied to all. Small results are folded away before. */
static ont_status fill_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *y = node->outputs[0];
    ont_copy *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    int64_t n = ont_shape_count(&y->shape);
    int32_t size = (int32_t)ont_dtype_size(y->dtype);
    *s = (ont_copy){.rank = 1, .size = size, .count = n, .dims = {n}, .to = {size}};
    out->state = s;
    out->work_bytes = sizeof(uint64_t);
    return ONT_OK;
}

static const char *accept_fill(const ont_node *node)
{
    size_t size = ont_dtype_size(node->outputs[0]->dtype);
    return size == 1 || size == 2 || size == 4 || size == 8 ? NULL : "dtype";
}

static ont_status fill_run(const ont_call *call)
{
    const ont_copy *s = call->state;
    const ont_attr *value = ont_attr_find(call->node, "value", ONT_ATTR_TENSOR);
    uint64_t word = 0;
    if (!s->count) return ONT_OK;
    if (value) memcpy(&word, value->tensor->data, (size_t)s->size);
    ONT_TRY(ont_launched(ont_launch_store(call->work, &word, 1, call->stream)));
    return ont_launched(ont_launch_copy(s, call->work, call->out[0], call->stream));
}

static const char *accept_trilu(const ont_node *node)
{
    const ont_value *k = ont_node_in(node, 1);
    if (k && !k->data) return "k is known at run time only";
    return accept_gather(node);
}

static ont_status trilu_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0);
    int rank = x->shape.rank;
    const ont_value *diagonal = ont_node_in(call->node, 1);
    int64_t k = 0;
    if (diagonal) memcpy(&k, diagonal->data->data, sizeof k);
    ont_trilu s = {.count = ont_shape_count(&x->shape), .rows = x->shape.dims[rank - 2],
                   .columns = x->shape.dims[rank - 1], .k = k, .upper = ont_attr_int(call->node, "upper", 1) != 0,
                   .size = (int32_t)ont_dtype_size(x->dtype)};
    return ont_launched(ont_launch_trilu(&s, call->in[0], call->out[0], call->stream));
}

/* ---- Rotate ---- */

static const char *accept_rotate(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    if (ont_node_in(node, 1)->dtype != (x->dtype == ONT_FLOAT64 ? ONT_FLOAT64 : ONT_FLOAT32)) return "dtype";
    return ont_shape_count(&x->shape) > INT32_MAX ? "more than 2^31 elements" : NULL;
}

static ont_status rotate_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    int64_t n = x->dims[x->rank - 1];
    ont_rotate *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_rotate){.rows = n ? ont_shape_count(x) / n : 0, .half = n / 2, .rank = x->rank - 1,
                      .dtype = ont_node_in(node, 0)->dtype, .back = ont_attr_int(node, "back", 0) != 0};
    for (int d = 0; d < s->rank; d++) s->dims[d] = x->dims[d];
    ont_shape_broadcast_strides(&ont_node_in(node, 1)->shape, x, s->cos);
    ont_shape_broadcast_strides(&ont_node_in(node, 2)->shape, x, s->sin);
    out->state = s;
    return ONT_OK;
}

static ont_status rotate_run(const ont_call *call)
{
    return ont_launched(ont_launch_rotate(call->state, call->in, call->out[0], call->stream));
}

const ont_kernel ont_cuda_move_kernels[7] = {
    {.name = "cuda_copy", .accept = accept_copy, .prepare = prepare_copies, .run = run_copies},
    {.name = "cuda_gather", .accept = accept_gather, .prepare = gather_prepare, .run = gather_run},
    {.name = "cuda_gather_grad", .accept = accept_gather_grad, .prepare = gather_grad_prepare, .run = gather_grad_run},
    {.name = "cuda_range", .accept = accept_range, .run = range_run},
    {.name = "cuda_trilu", .accept = accept_trilu, .run = trilu_run},
    {.name = "cuda_rotate", .accept = accept_rotate, .prepare = rotate_prepare, .run = rotate_run, .inplace = 1},
    {.name = "cuda_fill", .accept = accept_fill, .prepare = fill_prepare, .run = fill_run},
};
