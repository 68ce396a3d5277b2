/*
 * FusedReduce. See fused_reduce.h. Row sums are those of simd/ for each tile, put together in double; columns are added
 * up row by row in float32 (float64 in float64), a unit at a time.
 */
#include "ops/fused_reduce.h"

#include <string.h>

#include "base/parallel.h"
#include "ops/broadcast.h"

enum {
    SHORT = 64,         /* columns, or elements of a row, below which the calls cost more than memory does */
    LONG = 1 << 16,     /* of a row, beyond which too few threads would share them */
    WIDE = 1 << 20,     /* columns */
    FEW = 32,           /* rows that are added up */
    UNITS = 64,         /* with columns, each of which keeps sums of its own */
    UNIT = 16384,       /* elements */
    INTS_PER_SINK = 4,  /* kind, form, n, tail; rank and dims follow */
};

/* ---- layout ---- */

bool ont_sink_of(const ont_node *node, ont_sink *sink)
{
    static const char *const names[] = {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceSumSquare"};
    ont_reduce s;
    bool named = ont_node_is(node, ONT_DOMAIN, "SumTo");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) named |= ont_node_is(node, "", names[i]);
    if (!named || ont_reduce_read(node, &s) != ONT_OK || s.n < 1) return false;
    const ont_value *x = ont_node_in(node, 0);
    *sink = (ont_sink){.kind = s.kind, .n = s.n, .tail = s.tail, .dtype = x->dtype, .shape = node->outputs[0]->shape};
    bool sum = s.kind == ONT_REDUCE_SUM || s.kind == ONT_REDUCE_MEAN, half = ont_dtype_is_half(x->dtype);
    if (!half && x->dtype != ONT_FLOAT32 && (x->dtype != ONT_FLOAT64 || !sum)) return false;
    if (s.tail > 1) {
        sink->form = ONT_SINK_COLUMNS;
        return s.lead == 1 && sum && s.tail >= SHORT && s.tail <= WIDE && s.n >= FEW;
    }
    sink->form = s.lead == 1 ? ONT_SINK_WHOLE : ONT_SINK_ROWS;
    return !half && s.n >= SHORT && (sink->form == ONT_SINK_WHOLE || s.n <= LONG);
}

int64_t ont_sink_unit(const ont_sink *sinks, int n, int64_t count)
{
    int64_t piece = 1, least = UNIT;
    bool columns = false;
    for (int k = 0; k < n; k++) {
        const ont_sink *s = &sinks[k];
        int64_t own = s->form == ONT_SINK_ROWS ? s->n : s->tail; /* a unit holds whole ones */
        columns |= s->form == ONT_SINK_COLUMNS;
        if (piece % own && own % piece) return 0;
        if (own > piece) piece = own;
    }
    if (columns && least < count / UNITS) least = count / UNITS;
    int64_t rows = piece <= 8192 ? 8 : 32; /* whose sums are small beside them */
    if (columns && least < rows * piece) least = rows * piece;
    return (least + piece - 1) / piece * piece;
}

ont_status ont_sinks_write(ont_graph *g, ont_node *node, const ont_sink *sinks, int n)
{
    int64_t text[ONT_TILE_SINKS * (INTS_PER_SINK + 2 + ONT_MAX_RANK)];
    size_t at = 0;
    for (int k = 0; k < n; k++) {
        memcpy(text + at, (int64_t[]){sinks[k].kind, sinks[k].form, sinks[k].n, sinks[k].tail},
               INTS_PER_SINK * sizeof *text);
        at += INTS_PER_SINK;
        text[at++] = sinks[k].shape.rank;
        for (int d = 0; d < sinks[k].shape.rank; d++) text[at++] = sinks[k].shape.dims[d];
    }
    return ont_attr_set_ints(g, node, "reductions", text, at);
}

/* The sinks of a node over `count` elements, checked against each other and the program. */
static ont_status read_sinks(const ont_node *node, const ont_tile_program *p, int64_t count, ont_sink *sinks)
{
    size_t n, at = 0;
    const int64_t *text = ont_attr_ints(node, "reductions", &n);
    bool sound = p->n_sinks > 0 && (int)node->n_outputs == p->n_results + p->n_sinks;
    for (int k = 0; sound && k < p->n_sinks; k++) {
        ont_sink *s = &sinks[k];
        sound = at + INTS_PER_SINK < n && text[at + 4] >= 0 && text[at + 4] <= ONT_MAX_RANK &&
                at + INTS_PER_SINK < n - (size_t)text[at + 4];
        if (!sound) break;
        *s = (ont_sink){.kind = (ont_reduce_kind)text[at], .form = (ont_sink_form)text[at + 1], .n = text[at + 2],
                        .tail = text[at + 3], .dtype = p->steps[p->sink[k]].out,
                        .shape = ont_shape_of((int)text[at + 4], text + at + 5)};
        at += INTS_PER_SINK + 1 + (size_t)text[at + 4];
        int64_t results = ont_shape_count(&s->shape);
        sound = s->n > 0 && s->tail > 0 && results > 0 && count / results == s->n && count % results == 0 &&
                (s->form == ONT_SINK_COLUMNS ? s->tail == results : s->tail == 1) &&
                (s->form != ONT_SINK_WHOLE || results == 1);
    }
    return sound && at == n && ont_sink_unit(sinks, p->n_sinks, count)
               ? ONT_OK : ont_fail(ONT_EINVAL, "the reductions do not fit the steps");
}

static ont_status shape_of(const ont_node *node, ont_shape *shape)
{
    *shape = node->inputs[0].value->shape;
    for (uint32_t i = 1; i < node->n_inputs; i++)
        ONT_TRY(ont_shape_broadcast(shape, &node->inputs[i].value->shape, shape));
    return ONT_OK;
}

static ont_status infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_tile_program p;
    ont_sink sinks[ONT_TILE_SINKS];
    ont_shape shape;
    ONT_TRY(ont_tile_read(node, &p));
    ONT_TRY(shape_of(node, &shape));
    ONT_TRY(read_sinks(node, &p, ont_shape_count(&shape), sinks));
    for (int k = 0; k < p.n_results; k++) ONT_TRY(ont_infer_out(node, (uint32_t)k, p.steps[p.result[k]].out, &shape));
    for (int k = 0; k < p.n_sinks; k++)
        ONT_TRY(ont_infer_out(node, (uint32_t)(p.n_results + k), sinks[k].dtype, &sinks[k].shape));
    return ONT_OK;
}

/* ---- preparation ---- */

typedef struct fused_reduce {
    ont_tile_program program;
    ont_sink sinks[ONT_TILE_SINKS];
    size_t work[ONT_TILE_SINKS]; /* where the units' sums begin in the scratch memory */
    ont_bcast walk;
    int64_t count, unit, units, tile;
    const ont_simd_table *simd;
} fused_reduce;

static size_t sum_size(const ont_sink *s)
{
    return s->form != ONT_SINK_COLUMNS || s->dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float);
}

static ont_status prepare_with(const ont_simd_table *simd, const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    fused_reduce *s = ont_arena_alloc(arena, sizeof *s);
    ont_shape shape;
    if (!s) return ONT_ENOMEM;
    *s = (fused_reduce){.simd = simd};
    ONT_TRY(ont_tile_read(node, &s->program));
    ONT_TRY(shape_of(node, &shape));
    s->count = ont_shape_count(&shape);
    ONT_TRY(read_sinks(node, &s->program, s->count, s->sinks));
    ont_bcast_init_over(&s->walk, node, (int)node->n_inputs, &shape);
    s->unit = ont_sink_unit(s->sinks, s->program.n_sinks, s->count);
    s->units = (s->count + s->unit - 1) / s->unit;
    int64_t row = 1; /* the longest that a tile holds whole */
    for (int k = 0; k < s->program.n_sinks; k++) {
        const ont_sink *sink = &s->sinks[k];
        if (sink->form == ONT_SINK_ROWS && sink->n <= ONT_TILE && sink->n > row) row = sink->n;
        s->work[k] = out->work_bytes;
        if (sink->form != ONT_SINK_ROWS)
            out->work_bytes += ((size_t)(s->units * sink->tail) * sum_size(sink) + 63) / 64 * 64;
    }
    s->tile = row < ONT_TILE_USUAL ? ONT_TILE_USUAL / row * row : row;
    out->state = s;
    return ONT_OK;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_with(ont_simd(), node, arena, out);
}

static ont_status prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_with(ont_simd_plain(), node, arena, out);
}

/* Only the last step's result may take an operand's place: earlier ones would be written before operands are read. */
static const char *accept_inplace(const ont_node *node)
{
    ont_tile_program p;
    if (ont_tile_read(node, &p) != ONT_OK) return "steps";
    return p.n_results && p.result[0] == p.n_steps - 1 ? NULL : "the last step's result is not stored";
}

/* ---- run ---- */

typedef struct walker {
    const ont_call *call;
    const fused_reduce *s;
    int64_t at;   /* elements before the tile that runs next, of all */
    int64_t unit;
    int64_t row[ONT_TILE_SINKS];  /* of each sink, and the elements that are left of it: tiles come in order */
    int64_t left[ONT_TILE_SINKS];
    double sum[ONT_TILE_SINKS];
    bool started[ONT_TILE_SINKS];
} walker;

static double row_of(const fused_reduce *s, const ont_sink *sink, const void *x, int64_t n)
{
    double part[8] = {0}, sum = 0;
    if (sink->dtype == ONT_FLOAT32) {
        if (sink->kind == ONT_REDUCE_MAX) return (double)s->simd->max(x, n);
        if (sink->kind == ONT_REDUCE_SUM_SQUARE) return (double)s->simd->dot(x, x, n);
        return (double)s->simd->sum(x, n);
    }
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int lane = 0; lane < 8; lane++) part[lane] += ((const double *)x)[i + lane];
    for (; i < n; i++) part[0] += ((const double *)x)[i];
    for (int lane = 0; lane < 8; lane++) sum += part[lane];
    return sum;
}

static double joined(const ont_sink *sink, bool started, double sum, double more)
{
    if (sink->kind != ONT_REDUCE_MAX) return sum + more;
    return !started || more > sum || more != more ? more : sum;
}

static void put(const ont_sink *sink, void *out, int64_t at, double sum)
{
    if (sink->kind == ONT_REDUCE_MEAN) sum /= (double)sink->n;
    if (sink->dtype == ONT_FLOAT64)
        ((double *)out)[at] = sum;
    else
        ((float *)out)[at] = (float)sum;
}

static void drain_rows(walker *w, int k, const char *x, int64_t n)
{
    const ont_sink *sink = &w->s->sinks[k];
    size_t size = ont_dtype_size(sink->dtype);
    for (int64_t m; n; x += (size_t)m * size, n -= m) {
        m = w->left[k] < n ? w->left[k] : n;
        w->sum[k] = joined(sink, w->started[k], w->sum[k], row_of(w->s, sink, x, m));
        w->started[k] = true;
        w->left[k] -= m;
        if (w->left[k]) continue;
        put(sink, w->call->out[w->s->program.n_results + k], w->row[k]++, w->sum[k]);
        w->left[k] = sink->n;
        w->sum[k] = 0;
        w->started[k] = false;
    }
}

static void drain_columns(walker *w, int k, const char *x, int64_t n)
{
    const ont_simd_table *simd = w->s->simd;
    const ont_sink *sink = &w->s->sinks[k];
    size_t size = ont_dtype_size(sink->dtype);
    char *sums = (char *)w->call->work + w->s->work[k] + (size_t)(w->unit * sink->tail) * sum_size(sink);
    for (int64_t m; n; x += (size_t)m * size, n -= m) {
        char *to = sums + (size_t)(sink->tail - w->left[k]) * sum_size(sink);
        m = w->left[k] < n ? w->left[k] : n;
        w->left[k] = w->left[k] == m ? sink->tail : w->left[k] - m;
        float wide[ONT_TILE];
        switch (sink->dtype) {
        case ONT_FLOAT32: simd->add_to((float *)to, (const float *)x, m); break;
        case ONT_BFLOAT16: simd->add_bfloat_rows((float *)to, x, 1, m, m); break;
        case ONT_FLOAT16:
            simd->half_to_float(x, wide, m);
            simd->add_to((float *)to, wide, m);
            break;
        default:
            for (int64_t i = 0; i < m; i++) ((double *)to)[i] += ((const double *)x)[i];
        }
    }
}

static void drain(void *context, int k, const void *x, int64_t n)
{
    walker *w = context;
    (w->s->sinks[k].form == ONT_SINK_COLUMNS ? drain_columns : drain_rows)(w, k, x, n);
}

static void row(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    walker *w = *(walker *const *)context;
    const fused_reduce *s = w->s;
    ont_tile_bind bind = {.first = w->at, .seed = w->call->seed, .tile = s->tile, .drain = drain, .context = w};
    ont_tile_bind_row(&bind, &s->program, w->call, b, at);
    ont_tile_run(s->simd, &s->program, &bind, n);
    w->at += n;
}

static void run_units(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const fused_reduce *s = call->state;
    char *base[ONT_BCAST_MAX] = {call->work ? call->work : call->out[0]}; /* where nothing is read or written */
    for (int i = 0; i < s->program.n_operands; i++) base[i + 1] = (char *)(uintptr_t)call->in[i];
    for (int64_t unit = first; unit < last; unit++) {
        int64_t from = unit * s->unit, to = s->count - from < s->unit ? s->count : from + s->unit;
        walker w = {.call = call, .s = s, .at = from, .unit = unit}, *at = &w;
        for (int k = 0; k < s->program.n_sinks; k++) {
            const ont_sink *sink = &s->sinks[k];
            size_t bytes = (size_t)sink->tail * sum_size(sink);
            w.row[k] = from / sink->n;
            w.left[k] = sink->form == ONT_SINK_ROWS ? sink->n : sink->form == ONT_SINK_COLUMNS ? sink->tail : INT64_MAX;
            if (sink->form != ONT_SINK_COLUMNS) continue;
            memset((char *)call->work + s->work[k] + bytes * (size_t)unit, 0, bytes);
        }
        ont_bcast_range(&s->walk, base, row, &at, from, to);
        for (int k = 0; k < s->program.n_sinks; k++)
            if (s->sinks[k].form == ONT_SINK_WHOLE) ((double *)((char *)call->work + s->work[k]))[unit] = w.sum[k];
    }
}

static void join_whole(const ont_call *call, int k)
{
    const fused_reduce *s = call->state;
    const double *sums = (const double *)((const char *)call->work + s->work[k]);
    double sum = sums[0];
    for (int64_t unit = 1; unit < s->units; unit++) sum = joined(&s->sinks[k], true, sum, sums[unit]);
    put(&s->sinks[k], call->out[s->program.n_results + k], 0, sum);
}

typedef struct joining {
    const ont_call *call;
    int k;
} joining;

/* Columns [first, last): the units' sums in order, over those of the first unit. */
static void join_columns(void *context, int64_t first, int64_t last)
{
    const joining *j = context;
    const fused_reduce *s = j->call->state;
    const ont_sink *sink = &s->sinks[j->k];
    char *sums = (char *)j->call->work + s->work[j->k], *out = j->call->out[s->program.n_results + j->k];
    int64_t n = last - first;
    if (sink->dtype == ONT_FLOAT64) {
        double *total = (double *)sums + first;
        for (int64_t unit = 1; unit < s->units; unit++)
            for (int64_t i = 0; i < n; i++) total[i] += total[unit * sink->tail + i];
        for (int64_t i = 0; i < n; i++) put(sink, out, first + i, total[i]);
        return;
    }
    float *total = (float *)sums + first;
    for (int64_t unit = 1; unit < s->units; unit++) s->simd->add_to(total, total + unit * sink->tail, n);
    for (int64_t i = 0; sink->kind == ONT_REDUCE_MEAN && i < n; i++) total[i] /= (float)sink->n;
    if (sink->dtype == ONT_FLOAT32) memcpy((float *)out + first, total, (size_t)n * sizeof *total);
    if (sink->dtype == ONT_BFLOAT16) s->simd->float_to_bfloat(total, (uint16_t *)out + first, n);
    if (sink->dtype == ONT_FLOAT16) s->simd->float_to_half(total, (uint16_t *)out + first, n);
}

static ont_status run(const ont_call *call)
{
    const fused_reduce *s = call->state;
    ont_parallel(s->units, 8192 / s->unit + 1, run_units, (void *)call);
    for (int k = 0; k < s->program.n_sinks; k++) {
        joining j = {call, k};
        if (s->sinks[k].form == ONT_SINK_WHOLE) join_whole(call, k);
        if (s->sinks[k].form == ONT_SINK_COLUMNS)
            ont_parallel(s->sinks[k].tail, 16384 / s->units + 64, join_columns, &j);
    }
    return ONT_OK;
}

static const ont_kernel kernels[] = {
    {.name = "fused_reduce_over", .accept = accept_inplace, .prepare = prepare, .run = run, .inplace = UINT32_MAX},
    {.name = "fused_reduce", .accept = ont_tile_accept, .prepare = prepare, .run = run},
    {.name = "fused_reduce_ref", .accept = ont_tile_accept, .prepare = prepare_ref, .run = run},
};

const ont_op ont_op_FusedReduce = {.domain = ONT_DOMAIN, .name = "FusedReduce", .since = 1, .min_inputs = 1,
                                   .max_inputs = ONT_TILE_OPERANDS, .flags = ONT_OP_NO_FOLD,
                                   .attributes = "formula:s parameters:F reductions:I results:I sinks:I steps:I",
                                   .infer = infer, ONT_KERNELS(kernels)};
