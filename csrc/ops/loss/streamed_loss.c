/*
 * Fused linear cross-entropy: the scores h W + row of many classes are never stored as a whole; one tile of rows and
 * classes exists at a time. StreamedCrossEntropy (h, W, labels, optional row) gives the loss and, for the gradient, two
 * numbers for each row: the largest score and the logarithm of the sum of exponentials. StreamedCrossEntropyGrad
 * recomputes each tile, overwrites it with the gradient of the scores, and adds its part to the gradients of h, W and
 * row. Float32 only; built by passes/stream_loss.c.
 *
 * Tiles of classes are the inner loop: a chunk of rows writes dW once, and its tiles add to the smaller dh. Rows with
 * an ignored label are left out of every GEMM: their gradient is zero whatever h holds.
 *
 * With attribute "rows", StreamedCrossEntropy computes the gradients itself, in forward: outputs 2 to 4 are dh, dW and
 * drow of a loss whose own gradient is 1. A tile is then that many rows of all classes, so that the scores are computed
 * once: three matmuls instead of four. ScaleGradient multiplies them by the gradient of the loss in backward, in place,
 * and leaves them alone where that is 1.
 *
 * Source of the sum over tiles: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "device/gemm.h"
#include "ops/loss/loss.h"
#include "simd/simd.h"

enum {
    TILE = 2 << 20,   /* elements of a tile: 8 MiB; with few scores 1 / SHARE of them, and at least LEAST */
    SHARE = 8,
    LEAST = 1 << 17,
    ROWS = 2048,      /* rows of a chunk, at most: more rows would make tiles too narrow for an efficient GEMM */
    WIDE = 2 << 20,   /* elements of a chunk of h, unless that is fewer than 128 rows */
    COLUMNS = 256,    /* of drow, summed at a time */
    IN_H = 0, IN_W, IN_LABELS, IN_ROW, IN_DLOSS, IN_STATS,
    OUT_H = 0, OUT_W, OUT_ROW,
    EARLY = 2, /* StreamedCrossEntropy's first output of these */
};

typedef struct stream_state {
    int64_t width, chunk, block; /* width: columns of h; chunk and block: rows and classes of a tile */
    bool trans_w;                /* W is (classes, width) */
    ont_labels labels;
    const ont_gemm_backend *to_scores, *to_h, *to_w;
} stream_state;

/* Loops over chunks of rows, and over the tiles of a chunk. */
typedef struct stream_job {
    const ont_call *call;
    const stream_state *s;
    int64_t first, last;  /* rows of the chunk: [first, last) */
    int64_t n, *at;       /* number of its rows without an ignored label, and their indices (n) */
    const float *rows;    /* (n, width): h of these rows */
    int64_t from, size;   /* classes of the tile: [from, from + size) */
    float *tile;          /* (n, size): scores, or their gradient */
    float *gathered;      /* (chunk, width): rows of h, where some labels are ignored */
    float *row_max, *score; /* (n): the largest score, and the score of the label */
    double *row_sum;      /* (n): sum of exp(score - row_max) */
    double norm;          /* number of labels that are not ignored */
    bool accumulates;     /* a chunk was written to dW and drow: later ones are added */
    float *dh, *dw, *drow; /* NULL: not needed */
} stream_job;

/* ---- shapes ---- */

static bool is_transposed(const ont_node *node)
{
    return ont_attr_int(node, "transB", 0) != 0;
}

static ont_status read_state(const ont_node *node, stream_state *s)
{
    const ont_value *w = ont_node_in(node, IN_W);
    s->trans_w = is_transposed(node);
    s->width = w->shape.dims[s->trans_w];
    return ont_labels_read(node, ont_node_in(node, IN_LABELS), w->shape.dims[!s->trans_w], &s->labels);
}

static ont_status check_operands(const ont_node *node, const ont_value *h, const ont_value *w, const ont_value *labels)
{
    char th[ONT_SHAPE_TEXT], tw[ONT_SHAPE_TEXT];
    const ont_value *row = ont_node_in(node, IN_ROW);
    if (h->dtype != ONT_FLOAT32 || w->dtype != ONT_FLOAT32 || (row && row->dtype != ONT_FLOAT32))
        return ont_fail(ONT_EUNSUPPORTED, "operands must be float, got %s and %s", ont_dtype_name(h->dtype),
                        ont_dtype_name(w->dtype));
    int last = h->shape.rank - 1;
    if (last < 0 || w->shape.rank != 2 || h->shape.dims[last] != w->shape.dims[is_transposed(node)])
        return ont_fail(ONT_EINVAL, "h is %s and W %s, expected rows times a matrix", ont_shape_text(&h->shape, th),
                        ont_shape_text(&w->shape, tw));
    if (labels->dtype != ONT_INT64 && labels->dtype != ONT_INT32)
        return ont_fail(ONT_ETYPE, "labels are %s, expected int32 or int64", ont_dtype_name(labels->dtype));
    if (ont_shape_count(&labels->shape) != ont_shape_count_range(&h->shape, 0, last) ||
        labels->shape.rank >= ONT_MAX_RANK)
        return ont_fail(ONT_EINVAL, "labels are %s, expected one for each row of h, %s",
                        ont_shape_text(&labels->shape, tw), ont_shape_text(&h->shape, th));
    int64_t classes = w->shape.dims[!is_transposed(node)];
    bool fits = !row || (row->shape.rank && ont_shape_count(&row->shape) == classes &&
                         row->shape.dims[row->shape.rank - 1] == classes);
    if (!fits)
        return ont_fail(ONT_EINVAL, "the row added is %s: it must have %" PRId64 " entries of one row",
                        ont_shape_text(&row->shape, tw), classes);
    return ONT_OK;
}

/* Types of dh, dW and drow, which are outputs `first` and later. */
static ont_status infer_gradients(ont_node *node, uint32_t first)
{
    for (uint32_t i = 0; i <= OUT_ROW; i++) {
        static const int like[] = {IN_H, IN_W, IN_ROW};
        const ont_value *x = ont_node_in(node, (uint32_t)like[i]);
        if (x) ONT_TRY(ont_infer_out(node, first + i, x->dtype, &x->shape));
    }
    return ONT_OK;
}

static ont_status stream_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *h, *w, *labels;
    ONT_TRY(ont_need_input(node, IN_H, &h));
    ONT_TRY(ont_need_input(node, IN_W, &w));
    ONT_TRY(ont_need_input(node, IN_LABELS, &labels));
    ONT_TRY(check_operands(node, h, w, labels));
    stream_state s;
    ONT_TRY(read_state(node, &s));
    ont_shape stats = labels->shape;
    stats.dims[stats.rank++] = 2;
    ONT_TRY(ont_infer_out(node, 1, ONT_FLOAT32, &stats));
    bool each = s.labels.reduction == ONT_REDUCE_NONE;
    ONT_TRY(ont_infer_out(node, 0, ONT_FLOAT32, each ? &labels->shape : &(ont_shape){0}));
    if (ont_attr_int(node, "rows", 0) && (each || ont_node_out(node, 1)))
        return ont_fail(ONT_EINVAL, "with gradients in forward, the loss is one number, and there are no statistics");
    return infer_gradients(node, EARLY);
}

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    return infer_gradients(node, 0);
}

/* ---- tiles ---- */

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Hands out `bytes` of scratch. With *base NULL it only adds them up. */
static void *reserve(char **base, size_t *used, size_t bytes)
{
    void *at = *base ? *base + *used : NULL;
    *used += aligned(bytes);
    return at;
}

static size_t layout_scratch(const stream_state *s, char *work, stream_job *j)
{
    size_t used = 0, rows = (size_t)s->chunk;
    j->tile = reserve(&work, &used, rows * (size_t)s->block * sizeof(float));
    j->gathered = reserve(&work, &used, s->labels.ignores ? rows * (size_t)s->width * sizeof(float) : 0);
    j->at = reserve(&work, &used, rows * sizeof(int64_t));
    j->row_sum = reserve(&work, &used, rows * sizeof(double));
    j->row_max = reserve(&work, &used, rows * sizeof(float));
    j->score = reserve(&work, &used, rows * sizeof(float));
    return used;
}

/* Size of equal parts of n, at most `longest`. */
static int64_t even_parts(int64_t n, int64_t longest)
{
    int64_t parts = longest > 0 ? (n + longest - 1) / longest : 0;
    return parts ? (n + parts - 1) / parts : 1;
}

static int64_t max_i64(int64_t a, int64_t b)
{
    return b > a ? b : a;
}

/* Elements of a tile. */
static int64_t tile_of(const stream_state *s)
{
    int64_t columns = s->labels.classes / SHARE, rows = max_i64(1, s->labels.count);
    return columns >= TILE / rows ? TILE : max_i64(LEAST, columns * rows);
}

static const ont_gemm_backend *provider(bool plain, int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b)
{
    ont_gemm gemm = {.dtype = ONT_FLOAT32, .trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k,
                     .lda = trans_a ? m : k, .ldb = trans_b ? k : n, .ldc = n, .alpha = 1};
    return plain || !(m && n && k) ? ont_gemm_reference() : ont_gemm_choose(&gemm, 0, NULL);
}

static ont_status prepare_with(bool plain, const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    stream_job j;
    stream_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_state(node, s));
    int64_t classes = s->labels.classes, chunk = max_i64(128, WIDE / max_i64(1, s->width));
    s->chunk = even_parts(s->labels.count, plain ? 2 : chunk < ROWS ? chunk : ROWS);
    s->block = even_parts(classes, plain ? 3 : max_i64(64, tile_of(s) / s->chunk));
    if (!plain && s->block < classes) s->block = (s->block + 15) / 16 * 16; /* a multiple of whole vectors */
    int64_t rows = ont_attr_int(node, "rows", 0);
    if (rows > 0) {
        s->chunk = rows < s->labels.count ? rows : max_i64(1, s->labels.count);
        s->block = max_i64(1, classes);
    }
    s->to_scores = provider(plain, s->chunk, s->block, s->width, false, s->trans_w);
    s->to_h = provider(plain, s->chunk, s->width, s->block, false, !s->trans_w);
    s->to_w = s->trans_w ? provider(plain, s->block, s->width, s->chunk, true, false)
                         : provider(plain, s->width, s->block, s->chunk, true, false);
    out->work_bytes = layout_scratch(s, NULL, &j);
    out->state = s;
    return ONT_OK;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_with(false, node, arena, out);
}

/* The reference: small tiles and the scalar loops. */
static ont_status prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_with(true, node, arena, out);
}

static stream_job begin(const ont_call *call)
{
    stream_job j = {.call = call, .s = call->state};
    layout_scratch(j.s, call->work, &j);
    return j;
}

/* Sets the next chunk and gathers h of its rows that are not ignored. Returns false after the last chunk. */
static bool next_chunk(stream_job *j)
{
    const stream_state *s = j->s;
    const ont_labels *l = &s->labels;
    const float *h = j->call->in[IN_H];
    j->first = j->last;
    const void *labels = j->call->in[IN_LABELS];
    for (j->n = 0; j->last < l->count && j->n < s->chunk; j->last++)
        if (l->classes && ont_label_counts(l, ont_label_at(l, labels, j->last))) j->at[j->n++] = j->last;
    bool whole = j->n == j->last - j->first;
    j->rows = whole ? h + j->first * s->width : j->gathered;
    for (int64_t i = 0; !whole && i < j->n; i++)
        memcpy(j->gathered + i * s->width, h + j->at[i] * s->width, (size_t)s->width * sizeof *h);
    return j->first < j->last;
}

static int64_t ld_of_w(const stream_state *s)
{
    return s->trans_w ? s->width : s->labels.classes;
}

/* Offset of the tile's first class in W and dW. */
static int64_t in_w(const stream_job *j)
{
    return j->s->trans_w ? j->from * j->s->width : j->from;
}

/* Computes the scores of the chunk's next tile, without the row. Returns false after the last tile. */
static bool next_tile(stream_job *j)
{
    const stream_state *s = j->s;
    j->from += j->size;
    j->size = s->labels.classes - j->from < s->block ? s->labels.classes - j->from : s->block;
    if (!j->n || j->size <= 0) return false;
    ont_gemm gemm = {.dtype = ONT_FLOAT32, .trans_b = s->trans_w, .m = j->n, .n = j->size, .k = s->width,
                     .lda = s->width, .ldb = ld_of_w(s), .ldc = j->size, .alpha = 1};
    s->to_scores->run(&gemm, j->rows, (const float *)j->call->in[IN_W] + in_w(j), j->tile);
    return true;
}

/* Scores of row i of the tile, after the row is added. */
static float *finish_row(const stream_job *j, int64_t i)
{
    float *x = j->tile + i * j->size;
    const float *row = j->call->node->n_inputs > IN_ROW ? j->call->in[IN_ROW] : NULL;
    if (row) ont_simd()->add_to(x, row + j->from, j->size);
    return x;
}

static int64_t label_of(const stream_job *j, int64_t i)
{
    return ont_label_at(&j->s->labels, j->call->in[IN_LABELS], j->at[i]);
}

/* Number of rows that is worth a thread. */
static int64_t grain(const stream_job *j)
{
    return 4096 / (j->size + 1) + 1;
}

/* ---- forward ---- */

static void sum_rows(void *context, int64_t first, int64_t last)
{
    const stream_job *j = context;
    for (int64_t i = first; i < last; i++) {
        const float *x = finish_row(j, i);
        float largest, log_sum, row_max = j->row_max[i];
        double sum = j->row_sum[i];
        ont_simd()->log_sum_exp(x, j->size, &largest, &log_sum);
        if (largest > row_max || isnan(largest)) {
            sum = sum > 0 ? sum * exp((double)row_max - (double)largest) : sum;
            row_max = largest;
        }
        sum += largest == -INFINITY ? 0 : exp((double)log_sum + ((double)largest - (double)row_max));
        j->row_sum[i] = sum;
        j->row_max[i] = row_max;
        int64_t label = label_of(j, i) - j->from;
        if (label >= 0 && label < j->size) j->score[i] = x[label];
    }
}

static void clear_rows(float *x, int64_t first, int64_t last, int64_t width)
{
    memset(x + first * width, 0, (size_t)((last - first) * width) * sizeof *x);
}

/* Losses and statistics of the rows of a chunk; adds to *total. */
static void finish_losses(const stream_job *j, double *total)
{
    bool each = j->s->labels.reduction == ONT_REDUCE_NONE;
    float *losses = j->call->out[0], *stats = j->call->node->n_outputs > 1 ? j->call->out[1] : NULL;
    if (each) clear_rows(losses, j->first, j->last, 1);
    if (stats) clear_rows(stats, j->first, j->last, 2);
    for (int64_t i = 0; i < j->n; i++) {
        float log_sum = (float)log(j->row_sum[i]), loss = -((j->score[i] - j->row_max[i]) - log_sum);
        if (stats) stats[2 * j->at[i]] = j->row_max[i], stats[2 * j->at[i] + 1] = log_sum;
        if (each) losses[j->at[i]] = loss;
        *total += (double)loss;
    }
}

/* ---- backward ---- */

/* The gradient of the scores, over the scores of the tile. */
static void grad_rows(void *context, int64_t first, int64_t last)
{
    const stream_job *j = context;
    const float *stats = j->call->in[IN_STATS], *dloss = j->call->in[IN_DLOSS];
    ont_reduction reduction = j->s->labels.reduction;
    for (int64_t i = first; i < last; i++) {
        float *x = finish_row(j, i), scale = dloss[reduction == ONT_REDUCE_NONE ? j->at[i] : 0];
        if (reduction == ONT_REDUCE_MEAN) scale = (float)((double)scale / j->norm);
        ont_simd()->scaled_softmax(x, stats[2 * j->at[i]], stats[2 * j->at[i] + 1], scale, x, j->size);
        int64_t label = label_of(j, i) - j->from;
        if (label >= 0 && label < j->size) x[label] -= scale;
    }
}

/* Adds columns [first, last) of the tile to drow. */
static void sum_columns(void *context, int64_t first, int64_t last)
{
    const stream_job *j = context;
    float *row = j->drow + j->from;
    for (int64_t at = first; at < last; at += COLUMNS) {
        int64_t n = last - at < COLUMNS ? last - at : COLUMNS;
        double sums[COLUMNS] = {0};
        for (int64_t i = 0; i < j->n; i++)
            for (int64_t c = 0; c < n; c++) sums[c] += (double)j->tile[i * j->size + at + c];
        for (int64_t c = 0; c < n; c++) row[at + c] = (float)(sums[c] + (j->accumulates ? (double)row[at + c] : 0));
    }
}

/* Adds the tile's part of dh. The i-th row that is not ignored is summed at row i of the chunk for now. */
static void add_to_h(const stream_job *j, float *dh)
{
    const stream_state *s = j->s;
    ont_gemm gemm = {.dtype = ONT_FLOAT32, .trans_b = !s->trans_w, .m = j->n, .n = s->width, .k = j->size,
                     .lda = j->size, .ldb = ld_of_w(s), .ldc = s->width, .alpha = 1, .beta = j->from > 0};
    s->to_h->run(&gemm, j->tile, (const float *)j->call->in[IN_W] + in_w(j), dh + j->first * s->width);
}

static void add_to_w(const stream_job *j, float *dw)
{
    const stream_state *s = j->s;
    ont_gemm gemm = {.dtype = ONT_FLOAT32, .trans_a = true, .k = j->n, .ldc = ld_of_w(s), .alpha = 1,
                     .beta = j->accumulates};
    gemm.m = gemm.lda = s->trans_w ? j->size : s->width;
    gemm.n = gemm.ldb = s->trans_w ? s->width : j->size;
    s->to_w->run(&gemm, s->trans_w ? j->tile : j->rows, s->trans_w ? j->rows : j->tile, dw + in_w(j));
}

/* Moves the rows of dh to their own places, from the last one on, and zeroes the ignored rows. */
static void spread_rows(const stream_job *j, float *dh)
{
    int64_t width = j->s->width, i = j->n;
    for (int64_t row = j->last - 1; row >= j->first; row--) {
        if (!i || j->at[i - 1] != row)
            clear_rows(dh, row, row + 1, width);
        else if (j->first + --i < row)
            memcpy(dh + row * width, dh + (j->first + i) * width, (size_t)width * sizeof *dh);
    }
}

static void *output(const ont_call *call, uint32_t i)
{
    return i < call->node->n_outputs ? call->out[i] : NULL;
}

/* Adds the tile, which holds the gradient of its scores, to the gradients that are needed. */
static void add_tile(stream_job *j)
{
    if (j->dh) add_to_h(j, j->dh);
    if (j->dw) add_to_w(j, j->dw);
    if (j->drow) ont_parallel(j->size, COLUMNS, sum_columns, j);
}

/* Finds the gradients, which are outputs `first` and later, and counts the labels. */
static void begin_gradients(stream_job *j, uint32_t first)
{
    const ont_labels *l = &j->s->labels;
    j->dh = output(j->call, first + OUT_H), j->dw = output(j->call, first + OUT_W);
    j->drow = output(j->call, first + OUT_ROW);
    for (int64_t i = 0; i < l->count; i++) j->norm += ont_label_counts(l, ont_label_at(l, j->call->in[IN_LABELS], i));
}

static void end_chunk(stream_job *j)
{
    if (j->dh) spread_rows(j, j->dh);
    j->accumulates |= j->n > 0;
}

/* Without any label that counts, nothing was written. */
static void end_gradients(const stream_job *j)
{
    if (!j->accumulates && j->dw) clear_rows(j->dw, 0, j->s->labels.classes, j->s->width);
    if (!j->accumulates && j->drow) clear_rows(j->drow, 0, 1, j->s->labels.classes);
}

static ont_status grad_run(const ont_call *call)
{
    stream_job j = begin(call);
    begin_gradients(&j, 0);
    while (next_chunk(&j)) {
        for (j.from = j.size = 0; next_tile(&j);) {
            ont_parallel(j.n, grain(&j), grad_rows, &j);
            add_tile(&j);
        }
        end_chunk(&j);
    }
    end_gradients(&j);
    return ONT_OK;
}

/* ---- forward with gradients ---- */

/* Scores of whole rows: their losses, and their gradient where the loss's own is 1 over them. */
static void early_rows(void *context, int64_t first, int64_t last)
{
    const stream_job *j = context;
    float scale = j->s->labels.reduction == ONT_REDUCE_MEAN ? (float)(1 / j->norm) : 1;
    for (int64_t i = first; i < last; i++) {
        float *x = finish_row(j, i), largest, log_sum;
        int64_t label = label_of(j, i);
        ont_simd()->log_sum_exp(x, j->size, &largest, &log_sum);
        j->score[i] = -((x[label] - largest) - log_sum);
        ont_simd()->scaled_softmax(x, largest, log_sum, scale, x, j->size);
        x[label] -= scale;
    }
}

static ont_status early_run(stream_job *j)
{
    double total = 0;
    begin_gradients(j, EARLY);
    while (next_chunk(j)) {
        for (j->from = j->size = 0; next_tile(j);) {
            ont_parallel(j->n, grain(j), early_rows, j);
            for (int64_t i = 0; i < j->n; i++) total += (double)j->score[i];
            add_tile(j);
        }
        end_chunk(j);
    }
    end_gradients(j);
    bool mean = j->s->labels.reduction == ONT_REDUCE_MEAN;
    *(float *)j->call->out[0] = (float)(mean ? total / j->norm : total);
    return ONT_OK;
}

static ont_status stream_run(const ont_call *call)
{
    stream_job j = begin(call);
    const ont_labels *l = &j.s->labels;
    double total = 0, norm = 0;
    ONT_TRY(ont_labels_check(l, ont_node_in(call->node, IN_LABELS), call->in[IN_LABELS]));
    if (ont_attr_int(call->node, "rows", 0)) return early_run(&j);
    while (next_chunk(&j)) {
        for (int64_t i = 0; i < j.n; i++) j.row_max[i] = -INFINITY, j.row_sum[i] = 0, j.score[i] = 0;
        for (j.from = j.size = 0; next_tile(&j);) ont_parallel(j.n, grain(&j), sum_rows, &j);
        finish_losses(&j, &total);
        norm += (double)j.n;
    }
    if (l->reduction == ONT_REDUCE_SUM) *(float *)call->out[0] = (float)total;
    if (l->reduction == ONT_REDUCE_MEAN) *(float *)call->out[0] = (float)(total / norm);
    return ONT_OK;
}

static void stream_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *stats = NULL;
    b->status = ont_node_ensure_output(b->graph, g->node, 1, &stats);
    if (b->status == ONT_OK) b->status = stream_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {I(IN_H), I(IN_W), I(IN_LABELS), I(IN_ROW), GO(0), stats};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "StreamedCrossEntropyGrad", operands, 6, 3);
    if (!node) return;
    static const uint32_t of[] = {IN_H, IN_W, IN_ROW};
    for (uint32_t i = 0; i <= OUT_ROW; i++)
        if (!WANTS(of[i])) node->outputs[i] = NULL;
    b->status = ont_attr_copy_all(b->graph, node, g->node);
    ont_build_done(b, node);
    for (uint32_t i = 0; i <= OUT_ROW; i++)
        if (node->outputs[i]) GI(of[i], node->outputs[i]);
}

/* ---- the gradient of the loss ---- */

typedef struct scale_job {
    const float *x;
    float *y, scale;
} scale_job;

static void scale_range(void *context, int64_t first, int64_t last)
{
    const scale_job *j = context;
    for (int64_t i = first; i < last; i++) j->y[i] = j->x[i] * j->scale;
}

static ont_status scale_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0);
    int64_t n = ont_shape_count(&x->shape);
    scale_job j = {call->in[0], call->out[0], *(const float *)call->in[1]};
    if (j.x != j.y || j.scale != 1) ont_parallel(n, 1 << 14, scale_range, &j);
    return ONT_OK;
}

static const ont_kernel scale_kernels[] = {
    {.name = "scale_gradient", .accept = ont_accept_any, .run = scale_run, .inplace = 1},
};
static const ont_kernel stream_kernels[] = {
    {.name = "streamed_cross_entropy", .accept = ont_accept_any, .prepare = prepare, .run = stream_run},
    {.name = "streamed_cross_entropy_ref", .accept = ont_accept_any, .prepare = prepare_ref, .run = stream_run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "streamed_cross_entropy_grad", .accept = ont_accept_any, .prepare = prepare, .run = grad_run},
    {.name = "streamed_cross_entropy_grad_ref", .accept = ont_accept_any, .prepare = prepare_ref, .run = grad_run},
};

const ont_op ont_op_StreamedCrossEntropy = {
    .domain = ONT_DOMAIN, .name = "StreamedCrossEntropy", .since = 1, .min_inputs = 3, .max_inputs = 4,
    .flags = ONT_OP_PUBLIC, .nondiff_inputs = 1 << IN_LABELS, .nondiff_outputs = 30,
    .attributes = "ignore_index:i reduction:s transB:i rows:i", .infer = stream_infer, .grad = stream_grad,
    .cost = ONT_COST_STREAMED_LOSS, .early_gradients = ~UINT64_C(3), ONT_KERNELS(stream_kernels)};
const ont_op ont_op_StreamedCrossEntropyGrad = {
    .domain = ONT_DOMAIN, .name = "StreamedCrossEntropyGrad", .since = 1, .min_inputs = 6, .max_inputs = 6,
    .attributes = "ignore_index:i reduction:s transB:i", .infer = grad_infer, .cost = ONT_COST_STREAMED_LOSS,
    ONT_KERNELS(grad_kernels)};
const ont_op ont_op_ScaleGradient = {
    .domain = ONT_DOMAIN, .name = "ScaleGradient", .since = 1, .min_inputs = 2, .max_inputs = 2, .attributes = "",
    .infer = ont_infer_same, .early_gradients = 1, ONT_KERNELS(scale_kernels)};
