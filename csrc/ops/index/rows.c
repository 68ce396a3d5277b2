/*
 * Operators on sets of rows (ops/index/rows.h): marking, counting, selecting, packing and unpacking rows. Passes build
 * them, over operands that they have checked. Dropout of packed rows is in ops/random/dropout.c.
 */
#include "ops/index/rows.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/attention/fused_attention.h"
#include "simd/simd.h"

int64_t ont_rows_bucket(int64_t count, int64_t n)
{
    int64_t step = (n + ONT_ROW_BUCKETS - 1) / ONT_ROW_BUCKETS, bucket = step ? (count + step - 1) / step * step : 0;
    if (bucket < 1) bucket = 1;
    return 10 * bucket >= 9 * n ? n : bucket;
}

static const char *accept_int64(const ont_node *node)
{
    return ont_node_in(node, 0)->dtype == ONT_INT64 ? NULL : "dtype";
}

static const char *accept_bool(const ont_node *node)
{
    return ont_node_in(node, 0)->dtype == ONT_BOOL ? NULL : "dtype";
}

/* ---- MarkRows(numbers (m), optional marks (m); n) -> marks (n): the rows with these numbers, if marked ---- */

static ont_status mark_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    int64_t n = ont_attr_int(node, "n", 0);
    return ont_infer_out(node, 0, ONT_BOOL, &(ont_shape){1, {n}});
}

static ont_status mark_run(const ont_call *call)
{
    const int64_t *numbers = call->in[0];
    const uint8_t *marks = call->node->n_inputs > 1 ? call->in[1] : NULL;
    int64_t n = call->node->outputs[0]->shape.dims[0], m = ont_shape_count(&ont_node_in(call->node, 0)->shape);
    uint8_t *out = call->out[0];
    memset(out, 0, (size_t)n);
    for (int64_t i = 0; i < m; i++) {
        if (marks && !marks[i]) continue;
        if (numbers[i] < 0 || numbers[i] >= n)
            return ont_fail(ONT_EINDEX, "row %" PRId64 " is out of range for %" PRId64 " rows", numbers[i], n);
        out[numbers[i]] = 1;
    }
    return ONT_OK;
}

static const ont_kernel mark_kernels[] = {{.name = "mark_rows_ref", .accept = accept_int64, .run = mark_run}};
const ont_op ont_op_MarkRows = {.domain = ONT_DOMAIN, .name = "MarkRows", .since = 1, .min_inputs = 1,
                                .max_inputs = 2, .flags = ONT_OP_NO_GRAD, .attributes = "n:i", .infer = mark_infer,
                                ONT_KERNELS(mark_kernels)};

/* ---- VisibleKeys(-, -, -, bias, mask, masked_rows; as FusedAttention, inner, n) -> marks (n) of keys ---- */

/*
 * Marks the rows of K's tensor, of `inner` elements each, that some query attends to. A score below FAR has the
 * probability 0 in a row with a larger one. A row whose scores are all below FAR attends to all its keys, unless it
 * counts as masked.
 */
#define FAR (-1e30)

static ont_status visible_infer(ont_graph *g, ont_node *node)
{
    ont_attention a;
    ONT_TRY(ont_attention_read(node, &a));
    return mark_infer(g, node);
}

typedef struct visible_row {
    const ont_attention *a;
    const void *bias;
    const uint8_t *mask, *masked;
    ont_dtype dtype; /* of the bias */
    int64_t bias_at, mask_at, keys;
} visible_row;

static double bias_at(const visible_row *r, int64_t i)
{
    float bias;
    if (r->dtype == ONT_FLOAT64) return ((const double *)r->bias)[i];
    if (r->dtype == ONT_FLOAT32) return (double)((const float *)r->bias)[i];
    const uint16_t *half = (const uint16_t *)r->bias + i;
    (r->dtype == ONT_BFLOAT16 ? ont_simd()->bfloat_to_float : ont_simd()->half_to_float)(half, &bias, 1);
    return (double)bias;
}

static bool is_visible(const visible_row *r, int64_t j, bool *finite)
{
    double score = 0;
    if (r->bias) {
        int64_t at = r->bias_at + j * r->a->layout[ONT_ATTENTION_BIAS].col_stride;
        score = bias_at(r, at);
    }
    if (r->mask && (r->mask[r->mask_at + j * r->a->layout[ONT_ATTENTION_MASK].col_stride] != 0) != r->a->mask_polarity)
        score = r->a->mask_value;
    *finite |= score > -INFINITY;
    return !(score < FAR); /* NaN is visible */
}

/* Marks the keys of one query; `row` is the number of key 0, and keys are `stride` rows apart. */
static void mark_keys(const visible_row *r, uint8_t *out, int64_t row, int64_t stride)
{
    bool any = false, finite = false;
    for (int64_t j = 0; j < r->keys; j++) any |= is_visible(r, j, &finite);
    if (!any && r->a->zero_nan && !finite) return;
    for (int64_t j = 0; j < r->keys; j++)
        if (!any || is_visible(r, j, &finite)) __atomic_store_n(&out[row + j * stride], 1, __ATOMIC_RELAXED);
}

/* Whether an earlier bh reads the same keys, bias and masks, so that this one can be skipped. */
static bool is_repeated(const ont_attention *a, const ont_call *call, int64_t inner, int64_t bh)
{
    for (int d = a->n_batch_dims - 1; d >= 0; d--) {
        int64_t at = bh % a->batch_dims[d];
        bool varies = a->layout[ONT_ATTENTION_K].batch_stride[d] >= inner;
        for (int i = ONT_ATTENTION_BIAS; i <= ONT_ATTENTION_MASKED_ROWS; i++)
            varies |= ont_node_in(call->node, (uint32_t)i) && a->layout[i].batch_stride[d];
        if (at && !varies) return true;
        bh /= a->batch_dims[d];
    }
    return false;
}

typedef struct visible_work {
    const ont_call *call;
    const ont_attention *a;
    int64_t inner, n_q; /* n_q: 1 where all queries of a sequence see the same keys */
} visible_work;

static const void *operand(const ont_call *call, uint32_t i)
{
    return ont_node_in(call->node, i) ? call->in[i] : NULL;
}

/* Units: query q of bh, bh * n_q + q. Several of them may mark the same key. */
static void visible_range(void *context, int64_t first, int64_t last)
{
    const visible_work *w = context;
    const ont_attention *a = w->a;
    const void *bias = operand(w->call, ONT_ATTENTION_BIAS);
    const uint8_t *rows = operand(w->call, ONT_ATTENTION_MASKED_ROWS);
    const ont_matrix_layout *masked = &a->layout[ONT_ATTENTION_MASKED_ROWS];
    visible_row r = {.a = a, .bias = bias, .mask = operand(w->call, ONT_ATTENTION_MASK)};
    if (bias) r.dtype = ont_node_in(w->call->node, ONT_ATTENTION_BIAS)->dtype;
    int64_t stride = a->layout[ONT_ATTENTION_K].row_stride / w->inner, known = -1;
    for (int64_t i = first; i < last; i++) {
        int64_t bh = i / w->n_q, q = i % w->n_q;
        if (bh == known) continue;
        if (is_repeated(a, w->call, w->inner, bh)) {
            known = bh;
            continue;
        }
        if (rows && rows[ont_attention_offset(a, ONT_ATTENTION_MASKED_ROWS, bh) + q * masked->row_stride]) continue;
        if (r.bias)
            r.bias_at = ont_attention_offset(a, ONT_ATTENTION_BIAS, bh) + q * a->layout[ONT_ATTENTION_BIAS].row_stride;
        if (r.mask)
            r.mask_at = ont_attention_offset(a, ONT_ATTENTION_MASK, bh) + q * a->layout[ONT_ATTENTION_MASK].row_stride;
        r.keys = ont_attention_visible_keys(a, q);
        mark_keys(&r, w->call->out[0], ont_attention_offset(a, ONT_ATTENTION_K, bh) / w->inner, stride);
    }
}

static ont_status visible_run(const ont_call *call)
{
    ont_attention a;
    ONT_TRY(ont_attention_read(call->node, &a));
    visible_work w = {call, &a, ont_attr_int(call->node, "inner", 1), a.causal ? a.seqlen_q : 1};
    for (int i = ONT_ATTENTION_BIAS; i <= ONT_ATTENTION_MASKED_ROWS; i++)
        if (ont_node_in(call->node, (uint32_t)i) && a.layout[i].row_stride) w.n_q = a.seqlen_q;
    if (a.seqlen_q < 1) w.n_q = 0;
    memset(call->out[0], 0, (size_t)call->node->outputs[0]->shape.dims[0]);
    ont_parallel(a.n_bh * w.n_q, 1 + 16384 / (1 + a.seqlen_k), visible_range, &w);
    return ONT_OK;
}

static const ont_kernel visible_kernels[] = {{.name = "visible_keys_ref", .accept = ont_accept_any,
                                              .run = visible_run}};
const ont_op ont_op_VisibleKeys = {.domain = ONT_DOMAIN, .name = "VisibleKeys", .since = 1, .min_inputs = 0,
                                   .max_inputs = ONT_ATTENTION_INPUTS, .flags = ONT_OP_NO_GRAD | ONT_OP_NO_FOLD,
                                   .attributes = ONT_ATTENTION_ATTRIBUTES " inner:i n:i",
                                   .infer = visible_infer, ONT_KERNELS(visible_kernels)};

/* ---- CountRows(marks (n)) -> the bucket of their count, int64 ---- */

static ont_status count_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    return ont_infer_out(node, 0, ONT_INT64, &(ont_shape){0});
}

static ont_status count_run(const ont_call *call)
{
    int64_t n = ont_shape_count(&ont_node_in(call->node, 0)->shape), count = 0;
    const uint8_t *marks = call->in[0];
    for (int64_t i = 0; i < n; i++) count += marks[i];
    *(int64_t *)call->out[0] = ont_rows_bucket(count, n);
    return ONT_OK;
}

static const ont_kernel count_kernels[] = {{.name = "count_rows_ref", .accept = accept_bool, .run = count_run}};
const ont_op ont_op_CountRows = {.domain = ONT_DOMAIN, .name = "CountRows", .since = 1, .min_inputs = 1,
                                 .max_inputs = 1, .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = count_infer,
                                 ONT_KERNELS(count_kernels)};

/* ---- SelectRows(marks (n); count) -> rows (count), inverse (n) ---- */

static ont_status select_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *marks;
    ONT_TRY(ont_need_input(node, 0, &marks));
    ONT_TRY(ont_infer_out(node, 1, ONT_INT64, &marks->shape));
    return ont_infer_out(node, 0, ONT_INT64, &(ont_shape){1, {ont_attr_int(node, "count", 1)}});
}

static ont_status select_run(const ont_call *call)
{
    const uint8_t *marks = call->in[0];
    int64_t n = ont_shape_count(&ont_node_in(call->node, 0)->shape), found = 0;
    int64_t count = call->node->outputs[0]->shape.dims[0], *rows = call->out[0];
    int64_t *inverse = call->node->n_outputs > 1 ? call->out[1] : NULL;
    for (int64_t i = 0; i < n; i++) {
        if (inverse) inverse[i] = marks[i] ? found : -1;
        if (!marks[i]) continue;
        if (found == count) return ont_fail(ONT_EINTERNAL, "more than %" PRId64 " rows are marked", count);
        rows[found++] = i;
    }
    for (int64_t i = found; i < count; i++) rows[i] = found ? rows[0] : 0;
    return ONT_OK;
}

static const ont_kernel select_kernels[] = {{.name = "select_rows_ref", .accept = accept_bool, .run = select_run}};
const ont_op ont_op_SelectRows = {.domain = ONT_DOMAIN, .name = "SelectRows", .since = 1, .min_inputs = 1,
                                  .max_inputs = 1, .flags = ONT_OP_NO_GRAD, .attributes = "count:i",
                                  .infer = select_infer, ONT_KERNELS(select_kernels)};

/*
 * ---- RowsWithin(rows, inverse of a set, rows, inverse of a subset) -> rows (those of the subset), inverse (of the
 * set) ----
 *
 * The subset's rows as rows of the packed set. Spare rows of the set are no rows of the subset.
 */

static ont_status within_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ONT_TRY(ont_infer_out(node, 1, ONT_INT64, &ont_node_in(node, 0)->shape));
    return ont_infer_out(node, 0, ONT_INT64, &ont_node_in(node, 2)->shape);
}

static ont_status within_run(const ont_call *call)
{
    const int64_t *rows = call->in[0], *inverse = call->in[1], *sub_rows = call->in[2], *sub_inverse = call->in[3];
    int64_t n = ont_node_in(call->node, 0)->shape.dims[0], m = ont_node_in(call->node, 2)->shape.dims[0];
    int64_t *out_rows = call->out[0], *out_inverse = call->node->n_outputs > 1 ? call->out[1] : NULL;
    for (int64_t i = 0; i < m; i++) out_rows[i] = inverse[sub_rows[i]] < 0 ? 0 : inverse[sub_rows[i]];
    for (int64_t i = 0; out_inverse && i < n; i++) out_inverse[i] = inverse[rows[i]] == i ? sub_inverse[rows[i]] : -1;
    return ONT_OK;
}

static const ont_kernel within_kernels[] = {{.name = "rows_within_ref", .accept = accept_int64, .run = within_run}};
const ont_op ont_op_RowsWithin = {.domain = ONT_DOMAIN, .name = "RowsWithin", .since = 1, .min_inputs = 4,
                                  .max_inputs = 4, .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = within_infer,
                                  ONT_KERNELS(within_kernels)};

/*
 * ---- PackRows(x (n, ...), rows (r), inverse (n); shape, fill) -> (r, ...) and UnpackRows(x (r, ...), rows, inverse;
 * shape, zero) -> (n, ...) ----
 *
 * Without `fill` the spare rows are copies too. UnpackRows makes missing rows copies of packed row 0, which
 * are finite if the packed rows are, or zeros with `zero`.
 */

static ont_value *build_rows(ont_grad *g, const char *op_type, const char *attribute)
{
    ont_value *inputs[] = {GO(0), I(1), I(2)};
    const ont_shape *shape = &I(0)->shape;
    ont_node *node = ont_build_node(&g->b, ONT_DOMAIN, op_type, inputs, 3, 1);
    if (node) g->b.status = ont_attr_set_ints(g->b.graph, node, "shape", shape->dims, (size_t)shape->rank);
    if (node && g->b.status == ONT_OK) g->b.status = ont_attr_set_int(g->b.graph, node, attribute,
                                                                      !strcmp(attribute, "zero"));
    return ont_build_done(&g->b, node);
}

static void pack_grad(ont_grad *g)
{
    GI(0, build_rows(g, "UnpackRows", "zero"));
}

static void unpack_grad(ont_grad *g)
{
    GI(0, build_rows(g, "PackRows", "fill"));
}

typedef struct pack_state {
    size_t row; /* bytes */
    bool fills;
    uint8_t fill[8];
    size_t size;
} pack_state;

static ont_status pack_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    pack_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    const ont_value *x = ont_node_in(node, 0), *y = node->outputs[0];
    bool packs = ONT_IS(node, PackRows);
    int64_t rows = ont_node_in(node, packs ? 1 : 2)->shape.dims[0];
    const ont_attr *fill = ont_attr_find(node, "fill", ONT_ATTR_INT);
    s->size = ont_dtype_size(x->dtype);
    s->row = rows ? (size_t)(ont_shape_count(&y->shape) / rows) * s->size : 0;
    s->fills = fill != NULL;
    if (fill && x->dtype == ONT_INT64)
        memcpy(s->fill, &fill->i, 8);
    else if (fill && x->dtype == ONT_INT32)
        memcpy(s->fill, &(int32_t){(int32_t)fill->i}, 4);
    out->state = s;
    return ONT_OK;
}

/* Numbers other than 0 are for int32 and int64 alone. */
static const char *accept_pack(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    bool is_int = dtype == ONT_INT32 || dtype == ONT_INT64;
    if (!ont_dtype_size(dtype) || ont_dtype_size(dtype) > 8) return "dtype";
    return ont_attr_int(node, "fill", 0) && !is_int ? "fill" : NULL;
}

static void pack_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const pack_state *s = call->state;
    const int64_t *rows = call->in[1], *inverse = call->in[2];
    for (int64_t i = first; i < last; i++) {
        char *y = (char *)call->out[0] + (size_t)i * s->row;
        if (s->fills && inverse[rows[i]] != i) {
            for (size_t at = 0; at < s->row; at += s->size) memcpy(y + at, s->fill, s->size);
        } else {
            memcpy(y, (const char *)call->in[0] + (size_t)rows[i] * s->row, s->row);
        }
    }
}

static void unpack_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const pack_state *s = call->state;
    const int64_t *inverse = call->in[2];
    bool zero = ont_attr_int(call->node, "zero", 0);
    for (int64_t i = first; i < last; i++) {
        char *y = (char *)call->out[0] + (size_t)i * s->row;
        int64_t from = inverse[i] < 0 ? 0 : inverse[i];
        if (zero && inverse[i] < 0)
            memset(y, 0, s->row);
        else
            memcpy(y, (const char *)call->in[0] + (size_t)from * s->row, s->row);
    }
}

static ont_status pack_run(const ont_call *call)
{
    const pack_state *s = call->state;
    bool packs = ONT_IS(call->node, PackRows);
    int64_t n = ont_node_in(call->node, packs ? 1 : 2)->shape.dims[0];
    ont_parallel(n, (int64_t)(65536 / (s->row + 1)) + 1, packs ? pack_range : unpack_range, (void *)call);
    return ONT_OK;
}

static const ont_kernel pack_kernels[] = {{.name = "pack_rows_ref", .accept = accept_pack, .prepare = pack_prepare,
                                           .run = pack_run}};
static const ont_kernel unpack_kernels[] = {{.name = "unpack_rows_ref", .accept = accept_pack,
                                             .prepare = pack_prepare, .run = pack_run}};
const ont_op ont_op_PackRows = {.domain = ONT_DOMAIN, .name = "PackRows", .since = 1, .min_inputs = 3,
                                .max_inputs = 3, .flags = ONT_OP_MEMORY_BOUND, .nondiff_inputs = 6,
                                .attributes = "shape:I fill:i", .infer = ont_infer_shape_attr, .grad = pack_grad,
                                ONT_KERNELS(pack_kernels)};
const ont_op ont_op_UnpackRows = {.domain = ONT_DOMAIN, .name = "UnpackRows", .since = 1, .min_inputs = 3,
                                  .max_inputs = 3, .flags = ONT_OP_MEMORY_BOUND, .nondiff_inputs = 6,
                                  .attributes = "shape:I zero:i", .infer = ont_infer_shape_attr, .grad = unpack_grad,
                                  ONT_KERNELS(unpack_kernels)};
