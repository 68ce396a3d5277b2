/*
 * Gather along an axis and its gradient: rows added into zeros, each thread owning a range of the table's rows, so the
 * result does not depend on the number of threads.
 */
#include <inttypes.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"
#include "simd/simd.h"

typedef struct gather_state {
    int64_t outer, table, inner; /* data is (outer, table, inner) */
    int64_t count;               /* indices */
    size_t size;
    bool wide;                   /* int64 indices */
} gather_state;

static int64_t index_at(const gather_state *s, const void *indices, int64_t i)
{
    int64_t v = s->wide ? ((const int64_t *)indices)[i] : ((const int32_t *)indices)[i];
    return v < 0 ? v + s->table : v;
}

static ont_status check_indices(const gather_state *s, const ont_value *value, const void *indices)
{
    for (int64_t i = 0; i < s->count; i++) {
        int64_t v = index_at(s, indices, i);
        if (v < 0 || v >= s->table)
            return ont_fail(ONT_EINDEX,
                            "index %" PRId64 " at position %" PRId64 " of '%s' is out of range for %" PRId64 " entries",
                            v < 0 ? v - s->table : v, i, value->name, s->table);
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
    if (index->dtype != ONT_INT64 && index->dtype != ONT_INT32)
        return ont_fail(ONT_ETYPE, "indices are %s, expected int32 or int64", ont_dtype_name(index->dtype));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis));
    ont_shape shape = {.rank = x->shape.rank - 1 + index->shape.rank};
    if (shape.rank > ONT_MAX_RANK) return ont_fail(ONT_EUNSUPPORTED, "rank %d, at most %d", shape.rank, ONT_MAX_RANK);
    int at = 0;
    for (int d = 0; d < axis; d++) shape.dims[at++] = x->shape.dims[d];
    for (int d = 0; d < index->shape.rank; d++) shape.dims[at++] = index->shape.dims[d];
    for (int d = axis + 1; d < x->shape.rank; d++) shape.dims[at++] = x->shape.dims[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_status prepare_for(const ont_node *node, const ont_value *table, const ont_value *index, ont_arena *arena,
                              ont_prepared *out)
{
    gather_state *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), table->shape.rank, &axis));
    *s = (gather_state){.outer = ont_shape_count_range(&table->shape, 0, axis), .table = table->shape.dims[axis],
                        .inner = ont_shape_count_range(&table->shape, axis + 1, table->shape.rank),
                        .count = ont_shape_count(&index->shape), .size = ont_dtype_size(table->dtype),
                        .wide = index->dtype == ONT_INT64};
    out->state = s;
    return ONT_OK;
}

static ont_status gather_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_for(node, ont_node_in(node, 0), ont_node_in(node, 1), arena, out);
}

/* Elements [first, last) of the result: rows may be few and long. */
static void gather_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const gather_state *s = call->state;
    for (int64_t at = first, n; at < last; at += n) {
        int64_t row = at / s->inner, column = at % s->inner;
        n = s->inner - column < last - at ? s->inner - column : last - at;
        int64_t from = (row / s->count * s->table + index_at(s, call->in[1], row % s->count)) * s->inner + column;
        memcpy((char *)call->out[0] + (size_t)at * s->size, (const char *)call->in[0] + (size_t)from * s->size,
               (size_t)n * s->size);
    }
}

static ont_status gather_run(const ont_call *call)
{
    const gather_state *s = call->state;
    ONT_TRY(check_indices(s, ont_node_in(call->node, 1), call->in[1]));
    ont_parallel(s->outer * s->count * s->inner, 16384, gather_range, (void *)call);
    return ONT_OK;
}

/* GatherGrad(dy, indices, base or nothing; axis, shape): the base, else zeros, and the rows of dy added where they were
 * read */
static void gather_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "GatherGrad", (ont_value *[]){GO(0), I(1)}, 2, 1);
    if (node) b->status = ont_attr_set_ints(b->graph, node, "shape", I(0)->shape.dims, (size_t)I(0)->shape.rank);
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_int(b->graph, node, "axis", ont_attr_int(g->node, "axis", 0));
    GI(0, ont_build_done(b, node));
}

static ont_status grad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_for(node, node->outputs[0], ont_node_in(node, 1), arena, out);
}

static void add_row(const gather_state *s, void *to, const void *from, int64_t count)
{
    if (s->size == sizeof(float))
        ont_simd()->add_to(to, from, count);
    else
        for (int64_t k = 0; k < count; k++) ((double *)to)[k] += ((const double *)from)[k];
}

/* One row of 16-bit floats, rounded once: no other is added to it. */
static void add_half_row(const ont_call *call, void *to, const void *from, int64_t count)
{
    enum { PIECE = 512 };
    const ont_simd_table *simd = ont_simd();
    bool brain = call->node->outputs[0]->dtype == ONT_BFLOAT16;
    float sum[PIECE], more[PIECE];
    for (int64_t at = 0; at < count; at += PIECE) {
        int64_t n = count - at < PIECE ? count - at : PIECE;
        uint16_t *y = (uint16_t *)to + at;
        const uint16_t *x = (const uint16_t *)from + at;
        (brain ? simd->bfloat_to_float : simd->half_to_float)(y, sum, n);
        (brain ? simd->bfloat_to_float : simd->half_to_float)(x, more, n);
        simd->add_to(sum, more, n);
        (brain ? simd->float_to_bfloat : simd->float_to_half)(sum, y, n);
    }
}

/* Rows [first, last) of the flattened (outer, table): zeros, or those of the third input, to which every index that
 * falls into them is added in order. */
static void scatter_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const gather_state *s = call->state;
    size_t row = (size_t)s->inner * s->size;
    char *out = call->out[0];
    const char *base = call->node->n_inputs > 2 ? call->in[2] : NULL;
    if (!base)
        memset(out + (size_t)first * row, 0, (size_t)(last - first) * row);
    else if (base != out)
        memcpy(out + (size_t)first * row, base + (size_t)first * row, (size_t)(last - first) * row);
    for (int64_t o = first / s->table; o < s->outer && o * s->table < last; o++)
        for (int64_t i = 0; i < s->count; i++) {
            int64_t at = o * s->table + index_at(s, call->in[1], i);
            if (at < first || at >= last) continue;
            const char *from = (const char *)call->in[0] + (size_t)(o * s->count + i) * row;
            add_row(s, out + (size_t)at * row, from, s->inner);
        }
}

/*
 * The same for one index, in place or not: elements [first, last) of the result, or in place of the rows that are
 * added, since a row may be most of it. Nothing meets in it.
 */
static void scatter_one(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const gather_state *s = call->state;
    const char *dy = call->in[0], *base = call->node->n_inputs > 2 ? call->in[2] : NULL;
    char *out = call->out[0];
    bool inplace = base == out;
    int64_t index = index_at(s, call->in[1], 0);
    for (int64_t at = first, n; at < last; at += n) {
        int64_t row = at / s->inner, column = at % s->inner;
        n = s->inner - column < last - at ? s->inner - column : last - at;
        if (inplace) row = row * s->table + index;
        size_t place = (size_t)(row * s->inner + column) * s->size;
        const char *from = dy + (size_t)(row / s->table * s->inner + column) * s->size;
        bool hit = row % s->table == index;
        if (base && !inplace) memcpy(out + place, base + place, (size_t)n * s->size);
        if (!base && hit)
            memcpy(out + place, from, (size_t)n * s->size);
        else if (!base)
            memset(out + place, 0, (size_t)n * s->size);
        else if (hit && s->size == 2)
            add_half_row(call, out + place, from, n);
        else if (hit)
            add_row(s, out + place, from, n);
    }
}

static ont_status grad_run(const ont_call *call)
{
    const gather_state *s = call->state;
    ONT_TRY(check_indices(s, ont_node_in(call->node, 1), call->in[1]));
    bool inplace = call->node->n_inputs > 2 && call->in[2] == call->out[0];
    if (s->count == 1)
        ont_parallel(s->outer * (inplace ? 1 : s->table) * s->inner, 32768, scatter_one, (void *)call);
    else if (s->table)
        ont_parallel(s->outer * s->table, 65536 / (s->inner + 1) + 1, scatter_rows, (void *)call);
    return ONT_OK;
}

/* 16-bit rows that meet would be rounded each: with one index none do. */
static const char *grad_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (dtype != ONT_BFLOAT16 && dtype != ONT_FLOAT16) return ont_accept_float(node);
    return ont_shape_count(&ont_node_in(node, 1)->shape) == 1 ? NULL : "16-bit rows may meet";
}

static const ont_kernel gather_kernels[] = {
    {.name = "gather_ref", .accept = ont_accept_any, .prepare = gather_prepare, .run = gather_run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "gather_grad_ref", .accept = grad_accept, .prepare = grad_prepare, .run = grad_run, .inplace = 4},
};
const ont_op ont_op_Gather = {.domain = "", .name = "Gather", .since = 1, .min_inputs = 2, .max_inputs = 2,
                              .nondiff_inputs = 2, .attributes = "axis:i", .infer = gather_infer, .grad = gather_grad,
                              ONT_KERNELS(gather_kernels)};
const ont_op ont_op_GatherGrad = {.domain = ONT_DOMAIN, .name = "GatherGrad", .since = 1, .min_inputs = 2,
                                  .max_inputs = 3, .attributes = "axis:i shape:I", .infer = ont_infer_stated,
                                  ONT_KERNELS(grad_kernels)};
