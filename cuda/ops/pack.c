/*
 * Sets of rows on a device (csrc/ops/index/rows.h): marking, counting, selecting, packing and unpacking rows, and
 * dropout of packed ones. VisibleKeys is in attention.c.
 */
#include <string.h>

#include "ops/index/rows.h"

#include "ops_common.h"

static int64_t count_of(const ont_value *v) { return ont_shape_count(&v->shape); }

/* ---- MarkRows ---- */

static const char *numbers_accept(const ont_node *node)
{
    return ont_node_in(node, 0)->dtype == ONT_INT64 ? NULL : "dtype";
}

static ont_status mark_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    (void)arena;
    out->work_bytes = (size_t)count_of(node->outputs[0]) * sizeof(int32_t);
    return ONT_OK;
}

static ont_status mark_run(const ont_call *call)
{
    const int64_t n = count_of(call->node->outputs[0]), m = count_of(ont_node_in(call->node, 0));
    if (!n) return ONT_OK;
    ONT_TRY(call->device->ops->clear(call->device, call->work, (size_t)n * sizeof(int32_t), call->stream));
    return ont_launched(ont_launch_mark_rows(m, call->in[0], ont_operand(call, 1), n, call->work, call->out[0],
                                             call->stream));
}

/* ---- CountRows and SelectRows ---- */

static const char *marks_accept(const ont_node *node)
{
    const ont_value *marks = ont_node_in(node, 0);
    return marks->dtype != ONT_BOOL ? "dtype" : ont_is_long(marks) ? "2^31 rows or more" : NULL;
}

static ont_status marks_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_nonzero *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_nonzero){.n = count_of(ont_node_in(node, 0)), .found = count_of(node->outputs[0]), .mask = UINT64_MAX,
                       .size = 1, .rank = 1};
    out->work_bytes = ont_nonzero_work(s);
    out->state = s;
    return ONT_OK;
}

static ont_status count_run(const ont_call *call)
{
    const ont_nonzero *s = call->state;
    const int64_t step = (s->n + ONT_ROW_BUCKETS - 1) / ONT_ROW_BUCKETS;
    return ont_launched(ont_launch_count_rows(s, step ? step : 1, call->in[0], call->out[0], call->work,
                                              call->stream));
}

static ont_status select_run(const ont_call *call)
{
    ont_nonzero s = *(const ont_nonzero *)call->state;
    s.fault = call->fault;
    s.step = call->step;
    return ont_launched(ont_launch_select_rows(&s, call->in[0], call->out[0], ont_result(call, 1), call->work,
                                               call->stream));
}

/* ---- RowsWithin ---- */

static ont_status within_run(const ont_call *call)
{
    const int64_t *in[4];
    for (int i = 0; i < 4; i++) in[i] = call->in[i];
    return ont_launched(ont_launch_rows_within(count_of(ont_node_in(call->node, 0)),
                                               count_of(ont_node_in(call->node, 2)), in, call->out[0],
                                               ont_result(call, 1), call->stream));
}

/* ---- PackRows and UnpackRows ---- */

/* Numbers other than 0 are for int32 and int64 alone, as on the CPU. */
static const char *copy_accept(const ont_node *node)
{
    const ont_dtype dtype = ont_node_in(node, 0)->dtype;
    const bool is_int = dtype == ONT_INT32 || dtype == ONT_INT64;
    const size_t size = ont_dtype_size(dtype);
    if (!size || size > 8 || (size & (size - 1))) return "dtype";
    return ont_attr_int(node, "fill", 0) && !is_int ? "fill" : NULL;
}

static ont_status copy_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    const bool unpacks = !strcmp(node->op->name, "UnpackRows");
    const ont_attr *fill = ont_attr_find(node, unpacks ? "zero" : "fill", ONT_ATTR_INT);
    ont_row_copy *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_row_copy){.rows = count_of(ont_node_in(node, unpacks ? 2 : 1)), .size = (int32_t)ont_dtype_size(x->dtype),
                        .unpacks = unpacks, .fills = unpacks ? fill && fill->i : fill != NULL};
    s->width = s->rows ? count_of(node->outputs[0]) / s->rows : 0;
    if (!unpacks && fill) s->fill = (uint64_t)fill->i;
    out->state = s;
    return ONT_OK;
}

static ont_status copy_run(const ont_call *call)
{
    return ont_launched(ont_launch_copy_rows(call->state, call->in[0], call->in[1], call->in[2], call->out[0],
                                             call->stream));
}

/* ---- RowDropout ---- */

static ont_status dropout_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    const ont_dropout_rule rule = ont_dropout_rule_of(node, ont_attr_float(node, "ratio", 0.5));
    ont_row_dropout *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_row_dropout){.rows = count_of(ont_node_in(node, 1)), .stream = ont_dropout_stream(node),
                           .scale = rule.scale, .threshold = rule.threshold, .dtype = x->dtype};
    s->width = s->rows ? count_of(x) / s->rows : 0;
    out->state = s;
    return ONT_OK;
}

static ont_status dropout_run(const ont_call *call)
{
    return ont_launched(ont_launch_row_dropout(call->state, call->seed_at, call->in[0], call->in[1], call->out[0],
                                               call->stream));
}

const ont_kernel ont_cuda_pack_kernels[6] = {
    {.name = "cuda_mark_rows", .accept = numbers_accept, .prepare = mark_prepare, .run = mark_run},
    {.name = "cuda_count_rows", .accept = marks_accept, .prepare = marks_prepare, .run = count_run},
    {.name = "cuda_select_rows", .accept = marks_accept, .prepare = marks_prepare, .run = select_run},
    {.name = "cuda_rows_within", .accept = numbers_accept, .run = within_run},
    {.name = "cuda_copy_rows", .accept = copy_accept, .prepare = copy_prepare, .run = copy_run},
    {.name = "cuda_row_dropout", .accept = ont_cuda_accept_floats, .prepare = dropout_prepare, .run = dropout_run,
     .inplace = 1},
};
