/*
 * Gather along an axis, and InRange, which checks indices alone. The kernels of the gradient are in gather_grad.c.
 */
#include "ops/index/gather.h"

#include <string.h>

#include "base/parallel.h"
#include "simd/simd.h"

ont_status ont_gather_check(const ont_gather *s, const ont_value *value, const void *indices)
{
    int64_t lowest, highest;
    ont_simd()->index_bounds(indices, s->wide, s->count, &lowest, &highest);
    if (lowest >= (s->from_end ? -s->table : 0) && highest < s->table) return ONT_OK;
    for (int64_t i = 0; i < s->count; i++) {
        int64_t v = ont_index_at(indices, s->wide, i), row = v;
        if (!ont_index_wrap(&row, s->table) || (v < 0 && !s->from_end)) return ont_index_fail(value, v, i, s->table);
    }
    return ONT_OK;
}

static ont_status gather_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *index;
    int axis;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &index));
    ONT_TRY(ont_index_dtype(index));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis));
    ont_shape shape = {.rank = x->shape.rank - 1 + index->shape.rank};
    if (shape.rank > ONT_MAX_RANK) return ont_fail(ONT_EUNSUPPORTED, "rank %d, at most %d", shape.rank, ONT_MAX_RANK);
    int at = 0;
    for (int d = 0; d < axis; d++) shape.dims[at++] = x->shape.dims[d];
    for (int d = 0; d < index->shape.rank; d++) shape.dims[at++] = index->shape.dims[d];
    for (int d = axis + 1; d < x->shape.rank; d++) shape.dims[at++] = x->shape.dims[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

ont_status ont_gather_prepare(const ont_node *node, const ont_value *table, const ont_value *index, ont_arena *arena,
                              ont_prepared *out)
{
    ont_gather *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), table->shape.rank, &axis));
    *s = (ont_gather){.outer = ont_shape_count_range(&table->shape, 0, axis), .table = table->shape.dims[axis],
                      .inner = ont_shape_count_range(&table->shape, axis + 1, table->shape.rank),
                      .count = ont_shape_count(&index->shape), .size = ont_dtype_size(table->dtype),
                      .wide = index->dtype == ONT_INT64, .from_end = true};
    out->state = s;
    return ONT_OK;
}

static ont_status gather_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(ont_gather_prepare(node, ont_node_in(node, 0), ont_node_in(node, 1), arena, out));
    ((ont_gather *)out->state)->from_end = ont_index_from_end(node);
    return ONT_OK;
}

/* Rows of one element: results [first, last), without a call to copy each. */
static void gather_numbers(const ont_call *call, int64_t first, int64_t last)
{
    const ont_gather *s = call->state;
    for (int64_t at = first, n; at < last; at += n) {
        int64_t start = at % s->count;
        n = s->count - start < last - at ? s->count - start : last - at;
        const char *x = (const char *)call->in[0] + (size_t)(at / s->count * s->table) * s->size;
        switch (s->size) {
#define TAKE(bytes, type) \
    case bytes: { \
        type *y = (type *)call->out[0] + at; \
        for (int64_t i = 0; i < n; i++) y[i] = ((const type *)x)[ont_gather_index(s, call->in[1], start + i)]; \
        break; \
    }
            TAKE(1, uint8_t)
            TAKE(2, uint16_t)
            TAKE(4, uint32_t)
            TAKE(8, uint64_t)
#undef TAKE
        }
    }
}

/* Elements [first, last) of the result, since rows may be few and long. */
static void gather_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_gather *s = call->state;
    if (s->inner == 1 && (s->size == 1 || s->size == 2 || s->size == 4 || s->size == 8)) {
        gather_numbers(call, first, last);
        return;
    }
    for (int64_t at = first, n; at < last; at += n) {
        int64_t row = at / s->inner, column = at % s->inner;
        n = s->inner - column < last - at ? s->inner - column : last - at;
        int64_t entry = ont_gather_index(s, call->in[1], row % s->count);
        int64_t from = (row / s->count * s->table + entry) * s->inner + column;
        memcpy((char *)call->out[0] + (size_t)at * s->size, (const char *)call->in[0] + (size_t)from * s->size,
               (size_t)n * s->size);
    }
}

static ont_status gather_run(const ont_call *call)
{
    const ont_gather *s = call->state;
    ONT_TRY(ont_gather_check(s, ont_node_in(call->node, 1), call->in[1]));
    ont_parallel(s->outer * s->count * s->inner, 16384, gather_range, (void *)call);
    return ONT_OK;
}

/* GatherGrad(dy, indices, optional base; axis, shape): the base or zeros, with each row of dy added where it was
 * read. */
static void gather_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "GatherGrad", (ont_value *[]){GO(0), I(1)}, 2, 1);
    if (node) b->status = ont_attr_set_ints(b->graph, node, "shape", I(0)->shape.dims, (size_t)I(0)->shape.rank);
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_int(b->graph, node, "axis", ont_attr_int(g->node, "axis", 0));
    GI(0, ont_build_done(b, node));
}

static const ont_kernel gather_kernels[] = {
    {.name = "gather_ref", .accept = ont_accept_any, .prepare = gather_prepare, .run = gather_run},
};
#define GATHER(name_, domain_, flags_) \
    const ont_op ont_op_##name_ = {.domain = domain_, .name = #name_, .since = 1, .min_inputs = 2, \
                                     .max_inputs = 2, .flags = flags_, .nondiff_inputs = 2, .attributes = "axis:i", \
                                     .infer = gather_infer, .grad = gather_grad, .rows = ONT_ROWS_GATHER, \
                                     ONT_KERNELS(gather_kernels)}
GATHER(Gather, "", 0);
GATHER(TorchGather, ONT_DOMAIN, ONT_OP_PUBLIC);

/* ---- InRange(indices, limit) -> indices ---- */

/* An index below 0 is an error, and with limit >= 0 one that is not below limit. */
static ont_status in_range_infer(ont_graph *g, ont_node *node)
{
    ont_value *index, *limit;
    ONT_TRY(ont_need_input(node, 0, &index));
    ONT_TRY(ont_need_input(node, 1, &limit));
    ONT_TRY(ont_index_dtype(index));
    if (limit->dtype != ONT_INT64 || ont_shape_count(&limit->shape) != 1)
        return ont_fail(ONT_EINVAL, "the limit must be one int64");
    return ont_infer_same(g, node);
}

static ont_status in_range_run(const ont_call *call)
{
    const ont_value *index = ont_node_in(call->node, 0);
    int64_t limit = *(const int64_t *)call->in[1], n = ont_shape_count(&index->shape);
    bool wide = index->dtype == ONT_INT64;
    for (int64_t i = 0; i < n; i++) {
        int64_t v = ont_index_at(call->in[0], wide, i);
        if (v < 0 || (limit >= 0 && v >= limit)) return ont_index_fail(index, v, i, limit);
    }
    if (n && call->out[0] != call->in[0]) memcpy(call->out[0], call->in[0], (size_t)n * ont_dtype_size(index->dtype));
    return ONT_OK;
}

static const ont_kernel in_range_kernels[] = {
    {.name = "in_range_ref", .accept = ont_accept_any, .run = in_range_run, .inplace = 1},
};
const ont_op ont_op_InRange = {.domain = ONT_DOMAIN, .name = "InRange", .since = 1, .min_inputs = 2, .max_inputs = 2,
                               .flags = ONT_OP_NO_GRAD | ONT_OP_PUBLIC, .attributes = "", .infer = in_range_infer,
                               ONT_KERNELS(in_range_kernels)};
