/*
 * Pad in all modes, negative pads included, and ReverseSequence. The pads of a dim become a table: for each position of
 * the output, the position of the input that is copied there, or none. The gradient adds through the same tables.
 */
#include <inttypes.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/index/indexed.h"
#include "ops/layout/pad.h"

/* ---- Pad ---- */

typedef enum pad_mode { CONSTANT, REFLECT, EDGE, WRAP } pad_mode;

static ont_status pad_mode_of(const ont_node *node, pad_mode *mode)
{
    static const char *const names[] = {"constant", "reflect", "edge", "wrap"};
    const char *name = ont_attr_string(node, "mode", "constant");
    for (int i = 0; i < 4; i++)
        if (!strcmp(name, names[i])) {
            *mode = (pad_mode)i;
            return ONT_OK;
        }
    return ont_fail(ONT_EUNSUPPORTED, "attribute mode is '%s', expected constant, reflect, edge or wrap", name);
}

/* Reads the pads of every dim: from opset 11 on input 1, from 2 on attribute pads, before attribute paddings. PadGrad
 * has the attribute. */
static ont_status pads_of(const ont_node *node, int rank, int64_t *low, int64_t *high)
{
    int64_t pads[2 * ONT_MAX_RANK], axes[ONT_MAX_RANK];
    int n, n_axes;
    bool as_input = !*node->op->domain && node->version >= 11;
    const char *attr = node->version == 1 && !*node->op->domain ? "paddings" : "pads";
    ONT_TRY(ont_const_ints(node, as_input ? 1 : -1, attr, pads, 2 * ONT_MAX_RANK, &n));
    ONT_TRY(ont_const_ints(node, as_input ? 3 : -1, NULL, axes, ONT_MAX_RANK, &n_axes));
    int padded = n_axes < 0 ? rank : n_axes;
    if (n != 2 * padded) return ont_fail(ONT_EINVAL, "%d pads, two for each of %d axes are expected", n, padded);
    for (int d = 0; d < rank; d++) low[d] = high[d] = 0;
    bool seen[ONT_MAX_RANK] = {false};
    for (int i = 0; i < padded; i++) {
        int d = i;
        if (n_axes >= 0) ONT_TRY(ont_shape_axis(axes[i], rank, &d));
        if (seen[d]) return ont_fail(ONT_EINVAL, "axis %d is given twice", d);
        seen[d] = true;
        low[d] = pads[i];
        high[d] = pads[padded + i];
    }
    return ONT_OK;
}

static ont_status pad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *fill = node->version >= 11 ? ont_node_in(node, 2) : NULL;
    int64_t low[ONT_MAX_RANK], high[ONT_MAX_RANK];
    pad_mode mode;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(pad_mode_of(node, &mode));
    ONT_TRY(pads_of(node, x->shape.rank, low, high));
    if (fill && (fill->dtype != x->dtype || ont_shape_count(&fill->shape) != 1))
        return ont_fail(ONT_EINVAL, "constant_value must be one %s", ont_dtype_name(x->dtype));
    ont_shape shape = x->shape;
    for (int d = 0; d < shape.rank; d++) {
        shape.dims[d] += low[d] + high[d];
        if (shape.dims[d] < 0)
            return ont_fail(ONT_EINVAL,
                            "pads %" PRId64 " and %" PRId64 " take more than the %" PRId64 " entries of axis %d",
                            low[d], high[d], x->shape.dims[d], d);
        if (mode != CONSTANT && !x->shape.dims[d] && shape.dims[d])
            return ont_fail(ONT_EINVAL, "axis %d is empty, so this mode has no entries to pad it with", d);
    }
    return ont_infer_out(node, 0, x->dtype, &shape);
}

/* Position among n entries that mode `mode` copies to position i, counted from the first entry; -1: none. */
static int64_t source(pad_mode mode, int64_t i, int64_t n)
{
    if (i >= 0 && i < n) return i;
    switch (mode) {
    case EDGE: return i < 0 ? 0 : n - 1;
    case WRAP: return (i % n + n) % n;
    case REFLECT: {
        int64_t period = n > 1 ? 2 * (n - 1) : 1, at = (i % period + period) % period;
        return at < n ? at : period - at;
    }
    default: return -1;
    }
}

typedef struct pad_state {
    int rank;
    int64_t wide[ONT_MAX_RANK];  /* dims of the padded tensor */
    int64_t *table[ONT_MAX_RANK];
    int64_t strides[ONT_MAX_RANK]; /* strides of the unpadded tensor, in elements */
    int64_t rows, first, run;    /* of the last dim: table[first] to table[first + run - 1] are consecutive positions */
    bool once;                   /* no element of the unpadded tensor is copied twice */
    bool all;                    /* each element of the unpadded tensor is copied */
    size_t size;
} pad_state;

ont_status ont_pad_read(const ont_node *node, const ont_shape *x, const ont_shape *wide, ont_pad *p)
{
    int64_t low[ONT_MAX_RANK], high[ONT_MAX_RANK];
    pad_mode mode;
    ONT_TRY(pad_mode_of(node, &mode));
    ONT_TRY(pads_of(node, x->rank, low, high));
    *p = (ont_pad){.mode = (int)mode};
    for (int d = 0; d < x->rank; d++) {
        int64_t n = x->dims[d];
        if (p->rank && mode == CONSTANT && !low[d] && !high[d]) {
            int last = p->rank - 1;
            p->narrow[last] *= n;
            p->low[last] *= n;
            p->high[last] *= n;
            p->wide[last] *= n;
            continue;
        }
        p->low[p->rank] = low[d];
        p->high[p->rank] = high[d];
        p->wide[p->rank] = wide->dims[d];
        p->narrow[p->rank++] = n;
    }
    return ONT_OK;
}

/* As for ont_pad_read(). */
static ont_status pad_tables(const ont_node *node, const ont_shape *x, const ont_shape *wide, ont_arena *arena,
                             pad_state **out)
{
    ont_pad p;
    pad_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_pad_read(node, x, wide, &p));
    pad_mode mode = (pad_mode)p.mode;
    int64_t *low = p.low, *high = p.high;
    s->rows = 1;
    s->once = mode == CONSTANT;
    s->all = true;
    ont_shape merged = ont_shape_of(p.rank, p.narrow);
    memcpy(s->wide, p.wide, sizeof s->wide);
    x = &merged;
    s->rank = x->rank;
    ont_shape_strides(x, s->strides);
    for (int d = 0; d < s->rank; d++) {
        s->table[d] = ont_arena_array(arena, (size_t)s->wide[d] + 1, sizeof *s->table[d]);
        if (!s->table[d]) return ONT_ENOMEM;
        for (int64_t i = 0; i < s->wide[d]; i++) s->table[d][i] = source(mode, i - low[d], x->dims[d]);
        if (low[d] < 0 || high[d] < 0) s->all = false;
        if (d < s->rank - 1) s->rows *= s->wide[d];
    }
    if (s->rank) { /* the run of positions that copy the input in order */
        int last = s->rank - 1;
        int64_t end = low[last] + x->dims[last];
        s->first = low[last] > 0 ? low[last] : 0;
        if (end > s->wide[last]) end = s->wide[last];
        s->run = end > s->first ? end - s->first : 0;
        if (!s->run) s->first = 0;
    }
    *out = s;
    return ONT_OK;
}

static ont_status pad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    pad_state *s;
    ONT_TRY(pad_tables(node, &x->shape, &node->outputs[0]->shape, arena, &s));
    s->size = ont_dtype_size(x->dtype);
    out->state = s;
    return ONT_OK;
}

/* Offset of the unpadded row that padded row `row` copies from, or -1. */
static int64_t row_source(const pad_state *s, int64_t row)
{
    int64_t at = 0;
    for (int d = s->rank - 2; d >= 0; d--) {
        int64_t index = s->table[d][d ? row % s->wide[d] : row];
        row /= s->wide[d];
        if (index < 0) return -1;
        at += index * s->strides[d];
    }
    return at;
}

static void fill_with(char *to, const void *value, size_t size, int64_t n)
{
    if (!value)
        memset(to, 0, (size_t)n * size);
    else
        for (int64_t i = 0; i < n; i++) memcpy(to + (size_t)i * size, value, size);
}

typedef struct pad_job {
    const ont_call *call;
    const void *value; /* one element, or NULL for zero */
} pad_job;

/* Elements [first, last) of a row. */
static void show(const int64_t *table, const char *from, const void *value, char *to, size_t size, int64_t first,
                 int64_t last)
{
    static const uint64_t zero[2];
    if (!value) value = zero;
    switch (size) {
#define SHOW(type) \
    case sizeof(type): { \
        type fill = *(const type *)value; \
        for (int64_t i = first; i < last; i++) ((type *)to)[i] = table[i] < 0 ? fill : ((const type *)from)[table[i]]; \
        break; \
    }
        SHOW(uint8_t)
        SHOW(uint16_t)
        SHOW(uint32_t)
        SHOW(uint64_t)
#undef SHOW
    default:
        for (int64_t i = first; i < last; i++)
            memcpy(to + (size_t)i * size, table[i] < 0 ? value : from + (size_t)table[i] * size, size);
    }
}

static void pad_rows(void *context, int64_t first, int64_t last)
{
    const pad_job *job = context;
    const pad_state *s = job->call->state;
    int64_t n = s->wide[s->rank - 1];
    const int64_t *table = s->table[s->rank - 1];
    for (int64_t row = first; row < last; row++) {
        char *to = (char *)job->call->out[0] + (size_t)(row * n) * s->size;
        int64_t at = row_source(s, row), behind = s->first + s->run;
        if (at < 0) {
            fill_with(to, job->value, s->size, n);
            continue;
        }
        const char *from = (const char *)job->call->in[0] + (size_t)at * s->size;
        show(table, from, job->value, to, s->size, 0, s->first);
        if (s->run)
            memcpy(to + (size_t)s->first * s->size, from + (size_t)table[s->first] * s->size, (size_t)s->run * s->size);
        show(table, from, job->value, to, s->size, behind, n);
    }
}

static ont_status pad_run(const ont_call *call)
{
    const pad_state *s = call->state;
    uint64_t fill = 0;
    ont_dtype dtype = call->node->outputs[0]->dtype;
    pad_job job = {call, NULL};
    if (call->node->version >= 11) {
        job.value = call->node->n_inputs > 2 ? call->in[2] : NULL;
    } else {
        double value = ont_attr_float(call->node, "value", 0);
        float narrow = (float)value;
        memcpy(&fill, dtype == ONT_FLOAT64 ? (const void *)&value : (const void *)&narrow, s->size);
        job.value = &fill;
    }
    if (!s->rank)
        memcpy(call->out[0], call->in[0], s->size);
    else if (s->wide[s->rank - 1])
        ont_parallel(s->rows, 16384 / s->wide[s->rank - 1] + 1, pad_rows, &job);
    return ONT_OK;
}

static const char *accept_pad(const ont_node *node)
{
    bool old = node->version < 11, floats = !ont_accept_float(node);
    return old && !floats && ont_attr_float(node, "value", 0) != 0
        ? "attribute value of another dtype than float and double"
                                                                    : NULL;
}

/* ---- gradient ---- */

static ont_value *pad_grad_node(ont_grad *g, ont_value *dy)
{
    ont_builder *b = &g->b;
    int64_t pads[2 * ONT_MAX_RANK];
    int rank = I(0)->shape.rank;
    if ((b->status = pads_of(g->node, rank, pads, pads + rank)) != ONT_OK || !dy) return NULL;
    const char *mode = ont_attr_string(g->node, "mode", "constant");
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "PadGrad", &dy, 1, 1);
    if (node) b->status = ont_attr_set_ints(b->graph, node, "pads", pads, 2 * (size_t)rank);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_string(b->graph, node, "mode", mode, strlen(mode));
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_ints(b->graph, node, "shape", I(0)->shape.dims, (size_t)rank);
    return ont_build_done(b, node);
}

/* The gradient of the constant is the sum of dy over the padding: the mask is ones, padded with zeros. */
static void pad_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    if (WANTS(0)) GI(0, pad_grad_node(g, GO(0)));
    if (!WANTS(2) || b->status != ONT_OK) return;
    ont_shape flat = {0};
    if (strcmp(ont_attr_string(g->node, "mode", "constant"), "constant")) {
        GI(2, ont_build_full(b, I(2)->dtype, &I(2)->shape, 0));
        return;
    }
    ont_value *zeros = ont_build_full(b, I(0)->dtype, &I(0)->shape, 0), *one = ont_build_scalar(b, I(0)->dtype, 1);
    if (b->status != ONT_OK) return;
    ont_node *mask = ont_build_node(b, "", "Pad", (ont_value *[]){zeros, I(1), one, I(3)}, I(3) ? 4 : 3, 1);
    if (mask) mask->version = g->node->version;
    ont_value *shown = ont_build2(b, "Mul", GO(0), ont_build_done(b, mask));
    GI(2, ont_build_reshape(b, ont_build_sum_to(b, shown, &flat), &I(2)->shape));
}

static ont_status pad_grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    size_t n;
    const int64_t *dims = ont_attr_ints(node, "shape", &n);
    ont_shape shape = ont_shape_of((int)n, dims);
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

static ont_status pad_grad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    pad_state *s;
    ONT_TRY(pad_tables(node, &node->outputs[0]->shape, &ont_node_in(node, 0)->shape, arena, &s));
    s->size = ont_dtype_size(node->outputs[0]->dtype);
    out->state = s;
    return ONT_OK;
}

#define ADD_ROW(suffix, type) \
    static void add_row_##suffix(const int64_t *table, const type *dy, type *dx, int64_t n) \
    { \
        for (int64_t i = 0; i < n; i++) \
            if (table[i] >= 0) dx[table[i]] += dy[i]; \
    }
ADD_ROW(f32, float)
ADD_ROW(f64, double)

/* Where no element is copied twice, each row of dx is a part of a row of dy. */
static void cut_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const pad_state *s = call->state;
    int64_t n = s->wide[s->rank - 1];
    for (int64_t row = first; row < last; row++) {
        int64_t at = row_source(s, row);
        if (at < 0) continue;
        at += s->table[s->rank - 1][s->first];
        memcpy((char *)call->out[0] + (size_t)at * s->size,
               (const char *)call->in[0] + (size_t)(row * n + s->first) * s->size, (size_t)s->run * s->size);
    }
}

/* On one thread where several rows of dy add to one row of dx. */
static ont_status pad_grad_run(const ont_call *call)
{
    const pad_state *s = call->state;
    const ont_value *dx = call->node->outputs[0];
    if (!s->once || !s->all) memset(call->out[0], 0, (size_t)ont_shape_count(&dx->shape) * s->size);
    if (!s->rank) {
        memcpy(call->out[0], call->in[0], s->size);
        return ONT_OK;
    }
    int64_t n = s->wide[s->rank - 1];
    if (s->once) {
        if (s->run) ont_parallel(s->rows, 16384 / s->run + 1, cut_rows, (void *)call);
        return ONT_OK;
    }
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t at = row_source(s, row);
        if (at < 0) continue;
        if (dx->dtype == ONT_FLOAT32)
            add_row_f32(s->table[s->rank - 1], (const float *)call->in[0] + row * n, (float *)call->out[0] + at, n);
        else
            add_row_f64(s->table[s->rank - 1], (const double *)call->in[0] + row * n, (double *)call->out[0] + at, n);
    }
    return ONT_OK;
}

static const ont_kernel pad_kernels[] = {{.name = "pad_ref", .accept = accept_pad, .prepare = pad_prepare,
                                          .run = pad_run}};
static const ont_kernel pad_grad_kernels[] = {
    {.name = "pad_grad_ref", .accept = ont_accept_float, .prepare = pad_grad_prepare, .run = pad_grad_run},
};
const ont_op ont_op_Pad = {.domain = "", .name = "Pad", .since = 1, .min_inputs = 1, .max_inputs = 4,
                           .nondiff_inputs = 10, .attributes = "mode:s pads:I paddings:I value:f", .infer = pad_infer,
                           .grad = pad_grad, ONT_KERNELS(pad_kernels)};
const ont_op ont_op_PadGrad = {.domain = ONT_DOMAIN, .name = "PadGrad", .since = 1, .min_inputs = 1, .max_inputs = 1,
                               .attributes = "mode:s pads:I shape:I", .infer = pad_grad_infer,
                               ONT_KERNELS(pad_grad_kernels)};

/* ---- ReverseSequence ---- */

static ont_status reverse_axes(const ont_node *node, int *batch, int *time)
{
    int rank = ont_node_in(node, 0)->shape.rank;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "batch_axis", 1), rank, batch));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "time_axis", 0), rank, time));
    return *batch == *time ? ont_fail(ONT_EINVAL, "batch_axis and time_axis are both %d", *batch) : ONT_OK;
}

static ont_status reverse_infer(ont_graph *g, ont_node *node)
{
    ont_value *x, *lengths;
    int batch, time;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &lengths));
    ONT_TRY(reverse_axes(node, &batch, &time));
    ONT_TRY(ont_index_dtype(lengths));
    if (lengths->shape.rank != 1 || lengths->shape.dims[0] != x->shape.dims[batch])
        return ont_fail(ONT_EINVAL, "sequence_lens must have one length for each of %" PRId64 " batch entries",
                        x->shape.dims[batch]);
    return ont_infer_same(g, node);
}

static ont_status reverse_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0), *lengths = ont_node_in(call->node, 1);
    int batch, time;
    ONT_TRY(reverse_axes(call->node, &batch, &time));
    int inner_axis = batch > time ? batch : time;
    int64_t strides[ONT_MAX_RANK], inner = ont_shape_count_range(&x->shape, inner_axis + 1, x->shape.rank);
    int64_t outer = ont_shape_count_range(&x->shape, 0, inner_axis + 1), steps = x->shape.dims[time];
    bool wide = lengths->dtype == ONT_INT64;
    size_t bytes = (size_t)inner * ont_dtype_size(x->dtype);
    ont_shape_strides(&x->shape, strides);
    for (int64_t i = 0; i < x->shape.dims[batch]; i++) {
        int64_t n = ont_index_at(call->in[1], wide, i);
        if (n < 0 || n > steps)
            return ont_fail(ONT_EINDEX,
                            "length %" PRId64 " at position %" PRId64 " of '%s', the time axis has %" PRId64, n, i,
                            lengths->name, steps);
    }
    for (int64_t o = 0; inner && o < outer; o++) {
        int64_t at = o * inner, b = at / strides[batch] % x->shape.dims[batch], t = at / strides[time] % steps;
        int64_t n = ont_index_at(call->in[1], wide, b), from = t < n ? at + (n - 1 - 2 * t) * strides[time] : at;
        memcpy((char *)call->out[0] + (size_t)o * bytes,
               (const char *)call->in[0] + (size_t)from * ont_dtype_size(x->dtype), bytes);
    }
    return ONT_OK;
}

/* ReverseSequence is its own inverse, so the gradient is a ReverseSequence of dy. */
static void reverse_grad(ont_grad *g)
{
    ont_node *node = ont_build_node(&g->b, "", "ReverseSequence", (ont_value *[]){GO(0), I(1)}, 2, 1);
    if (node) g->b.status = ont_attr_copy_all(g->b.graph, node, g->node);
    GI(0, ont_build_done(&g->b, node));
}

static const ont_kernel reverse_kernels[] = {{.name = "reverse_sequence_ref", .accept = ont_accept_any,
                                              .run = reverse_run}};
const ont_op ont_op_ReverseSequence = {.domain = "", .name = "ReverseSequence", .since = 10, .min_inputs = 2,
                                       .max_inputs = 2, .nondiff_inputs = 2, .attributes = "batch_axis:i time_axis:i",
                                       .infer = reverse_infer, .grad = reverse_grad, ONT_KERNELS(reverse_kernels)};
