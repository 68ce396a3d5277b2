/*
 * FusedReduce. See fused_reduce.h. The order of summation is that of sums.h: a block that a tile boundary divides
 * is buffered until it is complete.
 */
#include "ops/reduce/fused_reduce.h"

#include <string.h>

#include "base/parallel.h"
#include "ops/support/broadcast.h"
#include "ops/support/sums.h"

enum {
    SHORT = 64,         /* columns, or elements of a row; with fewer, calls cost more than memory accesses */
    LONG = 1 << 16,     /* elements of a row; with more, too few threads would share the rows */
    WIDE = 1 << 20,     /* columns, at most */
    FEW = 32,           /* rows of a column sum, at least */
    UNIT = 16384,       /* elements of a unit without column sums */
    INTS_PER_SINK = 4,  /* kind, form, n, tail; rank and dims follow */
};

/* ---- layout ---- */

bool ont_sink_of(const ont_node *node, ont_sink *sink)
{
    ont_reduce s;
    bool named = ONT_IS(node, SumTo) || ONT_IS(node, ReduceSum) || ONT_IS(node, ReduceMean) ||
                 ONT_IS(node, ReduceMax) || ONT_IS(node, ReduceSumSquare);
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

static int64_t least_common_multiple(int64_t a, int64_t b)
{
    int64_t x = a, y = b;
    while (y) {
        int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

/* Column sums determine the length of a unit, which holds whole rows. */
int64_t ont_sink_unit(const ont_sink *sinks, int n, int64_t count)
{
    int64_t columns = 0, piece = 1;
    for (int k = 0; k < n; k++) {
        const ont_sink *s = &sinks[k];
        if (s->form == ONT_SINK_COLUMNS) {
            int64_t unit = ont_sum_unit(s->n, s->tail) * s->tail;
            if (columns && columns != unit) return 0;
            columns = unit;
        } else if (s->form == ONT_SINK_ROWS) {
            piece = least_common_multiple(piece, s->n);
            if (piece > LONG) return 0;
        }
    }
    if (columns) return columns % piece && columns < count ? 0 : columns;
    return (UNIT + piece - 1) / piece * piece;
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

/* Reads the sinks of a node over `count` elements, and checks that they suit each other and the program. */
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
    size_t work[ONT_TILE_SINKS]; /* offset in the scratch of the sums of units, or of blocks */
    size_t cut[ONT_TILE_SINKS];  /* whole tensor: offset of each unit's first block, if the boundary divides it */
    ont_bcast walk;
    int64_t count, unit, units, tile;
    const ont_simd_table *simd;
} fused_reduce;

static size_t sum_size(const ont_sink *s)
{
    return s->form != ONT_SINK_COLUMNS || s->dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float);
}

static int64_t blocks_of(int64_t count)
{
    return (count + ONT_SUM_BLOCK - 1) / ONT_SUM_BLOCK;
}

static size_t whole_lines(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
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
    int64_t row = 1; /* the longest row that fits in a tile */
    for (int k = 0; k < s->program.n_sinks; k++) {
        const ont_sink *sink = &s->sinks[k];
        if (sink->form == ONT_SINK_ROWS && sink->n <= ONT_TILE && sink->n > row) row = sink->n;
        s->work[k] = out->work_bytes;
        int64_t sums = sink->form == ONT_SINK_ROWS ? 0 : sink->form == ONT_SINK_WHOLE ? blocks_of(s->count)
                                                                                      : s->units * sink->tail;
        s->cut[k] = out->work_bytes += whole_lines((size_t)sums * sum_size(sink));
        if (sink->form == ONT_SINK_WHOLE && s->unit % ONT_SUM_BLOCK)
            out->work_bytes += (size_t)s->units * ONT_SUM_BLOCK * ont_dtype_size(sink->dtype);
    }
    s->tile = row < ONT_TILE_DEFAULT ? ONT_TILE_DEFAULT / row * row : row;
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

/* Only the last step's result may share an operand's storage: others are written before all operands are read. */
static const char *accept_inplace(const ont_node *node)
{
    ont_tile_program p;
    if (ont_tile_read(node, &p) != ONT_OK) return "steps";
    return p.n_results && p.result[0] == p.n_steps - 1 ? NULL : "the last step's result is not stored";
}

/* ---- run ---- */

typedef union block {
    float f32[ONT_SUM_BLOCK];
    double f64[ONT_SUM_BLOCK];
} block;

/* Whole tensor: the block that the start of this unit divides. The previous unit writes its first elements. */
static char *cut_block(const ont_call *call, int k, int64_t unit)
{
    const fused_reduce *s = call->state;
    size_t bytes = ONT_SUM_BLOCK * ont_dtype_size(s->sinks[k].dtype);
    return (char *)call->work + s->cut[k] + (size_t)unit * bytes;
}

typedef struct walker {
    const ont_call *call;
    const fused_reduce *s;
    int64_t unit, from;
    int64_t at;                   /* index of the first element of the next tile */
    int64_t row[ONT_TILE_SINKS];  /* of each sink: the current row; whole tensor: the current block */
    int64_t left[ONT_TILE_SINKS]; /* elements that remain of it */
    int64_t held[ONT_TILE_SINKS]; /* elements of an incomplete block, which are buffered in: */
    void *block[ONT_TILE_SINKS];  /* `own`, or cut_block() of this unit */
    block *own;
    double sum[ONT_TILE_SINKS];
    bool started[ONT_TILE_SINKS];
} walker;

static void put(const ont_sink *sink, void *out, int64_t at, double sum)
{
    if (sink->kind == ONT_REDUCE_MEAN) sum /= (double)sink->n;
    if (sink->dtype == ONT_FLOAT64)
        ((double *)out)[at] = sum;
    else
        ((float *)out)[at] = (float)sum;
}

static void put_block(const ont_call *call, int k, int64_t block, const void *x)
{
    const fused_reduce *s = call->state;
    const ont_sink *sink = &s->sinks[k];
    int64_t rest = s->count - block * ONT_SUM_BLOCK, n = rest < ONT_SUM_BLOCK ? rest : ONT_SUM_BLOCK;
    ((double *)((char *)call->work + s->work[k]))[block] = ont_sum_block(s->simd, sink->kind, sink->dtype, x, n);
}

/* A complete block: stores its sum (whole tensor), or adds it to the row's, which is stored at the end of the row. */
static void drain_block(walker *w, int k, const void *x, int64_t n)
{
    const ont_sink *sink = &w->s->sinks[k];
    if (sink->form == ONT_SINK_WHOLE) {
        int64_t block = w->row[k]++;
        if (block * ONT_SUM_BLOCK >= w->from)
            put_block(w->call, k, block, x);
        else
            w->block[k] = &w->own[k];
        return;
    }
    double more = ont_sum_block(w->s->simd, sink->kind, sink->dtype, x, n);
    w->sum[k] = ont_sum_join(sink->kind, w->started[k], w->sum[k], more);
    w->started[k] = true;
    if (w->left[k]) return;
    put(sink, w->call->out[w->s->program.n_results + k], w->row[k]++, w->sum[k]);
    w->left[k] = sink->n;
    w->sum[k] = 0;
    w->started[k] = false;
}

static void drain_rows(walker *w, int k, const char *x, int64_t n)
{
    size_t size = ont_dtype_size(w->s->sinks[k].dtype);
    for (int64_t m; n; x += (size_t)m * size, n -= m) {
        int64_t held = w->held[k], most = ONT_SUM_BLOCK - held, rest = w->left[k] < most ? w->left[k] : most;
        m = rest < n ? rest : n;
        w->left[k] -= m;
        if (m == rest && !held) {
            drain_block(w, k, x, m);
            continue;
        }
        memcpy((char *)w->block[k] + (size_t)held * size, x, (size_t)m * size);
        w->held[k] = m < rest ? held + m : 0;
        if (m == rest) drain_block(w, k, w->block[k], held + m);
    }
}

static void drain_columns(walker *w, int k, const char *x, int64_t n)
{
    const ont_sink *sink = &w->s->sinks[k];
    size_t size = ont_dtype_size(sink->dtype);
    char *sums = (char *)w->call->work + w->s->work[k] + (size_t)(w->unit * sink->tail) * sum_size(sink);
    for (int64_t m; n; x += (size_t)m * size, n -= m) {
        char *to = sums + (size_t)(sink->tail - w->left[k]) * sum_size(sink);
        m = w->left[k] < n ? w->left[k] : n;
        w->left[k] = w->left[k] == m ? sink->tail : w->left[k] - m;
        ont_sum_rows(w->s->simd, sink->dtype, to, x, 1, m, m);
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

/* Initialises sink k at the first element of a unit. */
static void begin(walker *w, int k)
{
    const fused_reduce *s = w->s;
    const ont_sink *sink = &s->sinks[k];
    size_t bytes = (size_t)sink->tail * sum_size(sink);
    w->block[k] = &w->own[k];
    switch (sink->form) {
    case ONT_SINK_ROWS:
        w->row[k] = w->from / sink->n;
        w->left[k] = sink->n;
        return;
    case ONT_SINK_COLUMNS:
        w->left[k] = sink->tail;
        memset((char *)w->call->work + s->work[k] + bytes * (size_t)w->unit, 0, bytes);
        return;
    case ONT_SINK_WHOLE:
        w->row[k] = w->from / ONT_SUM_BLOCK;
        w->left[k] = s->count - w->from;
        w->held[k] = w->from % ONT_SUM_BLOCK;
        if (w->held[k]) w->block[k] = cut_block(w->call, k, w->unit);
    }
}

static void run_units(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const fused_reduce *s = call->state;
    char *base[ONT_BCAST_MAX] = {call->work ? call->work : call->out[0]}; /* operand 0 has stride 0: any address does */
    for (int i = 0; i < s->program.n_operands; i++) base[i + 1] = (char *)(uintptr_t)call->in[i];
    for (int64_t unit = first; unit < last; unit++) {
        int64_t from = unit * s->unit, to = s->count - from < s->unit ? s->count : from + s->unit;
        block own[ONT_TILE_SINKS];
        walker w = {.call = call, .s = s, .unit = unit, .from = from, .at = from, .own = own}, *at = &w;
        for (int k = 0; k < s->program.n_sinks; k++) begin(&w, k);
        ont_bcast_range(&s->walk, base, row, &at, from, to);
        for (int k = 0; k < s->program.n_sinks; k++)
            if (w.held[k])
                memcpy(cut_block(call, k, unit + 1), w.block[k],
                       (size_t)w.held[k] * ont_dtype_size(s->sinks[k].dtype));
    }
}

static void join_whole(const ont_call *call, int k)
{
    const fused_reduce *s = call->state;
    const double *sums = (const double *)((const char *)call->work + s->work[k]);
    double sum = 0;
    for (int64_t unit = 1; unit < s->units && s->unit % ONT_SUM_BLOCK; unit++) {
        int64_t from = unit * s->unit;
        if (from % ONT_SUM_BLOCK) put_block(call, k, from / ONT_SUM_BLOCK, cut_block(call, k, unit));
    }
    for (int64_t i = 0; i < blocks_of(s->count); i++) sum = ont_sum_join(s->sinks[k].kind, i, sum, sums[i]);
    put(&s->sinks[k], call->out[s->program.n_results + k], 0, sum);
}

typedef struct joining {
    const ont_call *call;
    int k;
} joining;

/* Columns [first, last): adds the sums of all units, in order, to those of the first. */
static void join_columns(void *context, int64_t first, int64_t last)
{
    const joining *j = context;
    const fused_reduce *s = j->call->state;
    const ont_sink *sink = &s->sinks[j->k];
    size_t size = sum_size(sink), line = (size_t)sink->tail * size;
    char *total = (char *)j->call->work + s->work[j->k] + (size_t)first * size;
    char *out = (char *)j->call->out[s->program.n_results + j->k] + (size_t)first * ont_dtype_size(sink->dtype);
    ont_sum_rows(s->simd, size == sizeof(double) ? ONT_FLOAT64 : ONT_FLOAT32, total, total + line, s->units - 1,
                 sink->tail, last - first);
    ont_sum_put(s->simd, sink->kind, sink->dtype, total, sink->n, out, last - first);
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
