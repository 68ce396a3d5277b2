/*
 * Fused linear cross-entropy: the scores h W + row of many classes are never stored as a whole; one tile of rows and
 * classes exists at a time. StreamedCrossEntropy (h, W, labels, optional row) gives the loss and, for the gradient, two
 * numbers for each row: the largest score and the logarithm of the sum of exponentials. StreamedCrossEntropyGrad
 * recomputes each tile, overwrites it with the gradient of the scores, and adds its part to the gradients of h, W and
 * row. Built by passes/stream_loss.c.
 *
 * Tiles of classes are the inner loop: a chunk of rows writes dW once, and its tiles add to the smaller dh. Rows with
 * an ignored label are left out of every GEMM: their gradient is zero whatever h holds.
 *
 * With attribute "rows", StreamedCrossEntropy computes the gradients itself, in forward: outputs 2 to 4 are dh, dW and
 * drow of a loss whose own gradient is 1. A tile is then that many rows of all classes, so that the scores are computed
 * once: three matmuls instead of four. ScaleGradient multiplies dh, dW and drow by the gradient of the loss in
 * backward, in place, and leaves them alone where that is 1.
 *
 * With 16-bit operands, loss, statistics and gradients are float32, and scores have the type of the operands or are
 * float32, by attribute "to". streamed_half.c has bfloat16. Only devices have kernels for float16 and for attribute
 * "classes": the first so many columns of W are classes, as in loss.c.
 *
 * Source of the sum over tiles: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "ops/loss/streamed_loss.h"
#include "simd/simd.h"

enum {
    TILE = 2 << 20,   /* elements of a tile: 8 MiB, but at most 1 / SHARE of all scores, and at least MIN_TILE */
    SHARE = 8,
    MIN_TILE = 1 << 17,
    ROWS = 2048,      /* rows of a chunk, at most: more rows would make tiles too narrow for an efficient GEMM */
    WIDE = 2 << 20,   /* elements of a chunk of h, unless that is fewer than 128 rows */
    COLUMNS = 256,    /* of drow, summed at a time */
    IN_H = 0, IN_W, IN_LABELS, IN_ROW, IN_DLOSS, IN_STATS,
    OUT_H = 0, OUT_W, OUT_ROW,
    EARLY = 2, /* StreamedCrossEntropy's first output of these */
};

/* ---- shapes ---- */

static bool is_transposed(const ont_node *node)
{
    return ont_attr_int(node, "transB", 0) != 0;
}

static ont_status read_state(const ont_node *node, ont_stream_state *s)
{
    *s = (ont_stream_state){0};
    const ont_value *w = ont_node_in(node, IN_W);
    s->trans_w = is_transposed(node);
    s->operand = w->dtype;
    s->dtype = ont_dtype_is_half(w->dtype) ? ONT_FLOAT32 : w->dtype;
    s->scores = ont_dtype_is_half(w->dtype) ? (ont_dtype)ont_attr_int(node, "to", w->dtype) : w->dtype;
    s->size = ont_dtype_size(s->dtype);
    s->width = w->shape.dims[s->trans_w];
    return ont_labels_read(node, ont_node_in(node, IN_LABELS), w->shape.dims[!s->trans_w], &s->labels);
}

static ont_status check_operands(const ont_node *node, const ont_value *h, const ont_value *w, const ont_value *labels)
{
    char th[ONT_SHAPE_TEXT], tw[ONT_SHAPE_TEXT];
    const ont_value *row = ont_node_in(node, IN_ROW);
    if (!ont_dtype_is_float(h->dtype) || w->dtype != h->dtype || (row && row->dtype != h->dtype))
        return ont_fail(ONT_EUNSUPPORTED, "operands must be of one floating-point type, got %s and %s",
                        ont_dtype_name(h->dtype), ont_dtype_name(w->dtype));
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
        if (!x) continue;
        ont_dtype dtype = ont_dtype_is_half(x->dtype) ? ONT_FLOAT32 : x->dtype;
        ONT_TRY(ont_infer_out(node, first + i, dtype, &x->shape));
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
    ont_stream_state s;
    ONT_TRY(read_state(node, &s));
    if (s.scores != s.operand && s.scores != ONT_FLOAT32)
        return ont_fail(ONT_EUNSUPPORTED, "scores of %s as type %d", ont_dtype_name(s.operand), (int)s.scores);
    int64_t columns = s.labels.classes, classes = ont_attr_int(node, "classes", columns);
    if (classes < 0 || classes > columns)
        return ont_fail(ONT_EINVAL, "classes is %" PRId64 ", and W has %" PRId64 " columns", classes, columns);
    ont_shape stats = labels->shape;
    stats.dims[stats.rank++] = 2;
    ONT_TRY(ont_infer_out(node, 1, s.dtype, &stats));
    bool each = s.labels.reduction == ONT_REDUCE_NONE;
    ONT_TRY(ont_infer_out(node, 0, s.dtype, each ? &labels->shape : &(ont_shape){0}));
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

static size_t layout_scratch(const ont_stream_state *s, char *work, ont_stream_job *j)
{
    size_t used = 0, rows = (size_t)s->chunk, h = rows * (size_t)s->width;
    j->tile = reserve(&work, &used, rows * (size_t)s->block * ont_dtype_size(s->scores));
    j->gathered = reserve(&work, &used, s->labels.ignores || s->half ? h * ont_dtype_size(s->operand) : 0);
    j->part = reserve(&work, &used, s->half ? h * s->size : 0);
    j->work = reserve(&work, &used, s->half ? ont_stream_half_work_bytes(s) : 0);
    j->at = reserve(&work, &used, rows * sizeof(int64_t));
    j->row_sum = reserve(&work, &used, rows * sizeof(double));
    j->row_max = reserve(&work, &used, rows * sizeof(double));
    j->score = reserve(&work, &used, rows * sizeof(double));
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
static int64_t tile_of(const ont_stream_state *s)
{
    int64_t columns = s->labels.classes / SHARE, rows = max_i64(1, s->labels.count);
    return columns >= TILE / rows ? TILE : max_i64(MIN_TILE, columns * rows);
}

static const ont_gemm_backend *provider(bool plain, ont_dtype dtype, int64_t m, int64_t n, int64_t k, bool trans_a,
                                        bool trans_b)
{
    ont_gemm gemm = {.dtype = dtype, .trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k,
                     .lda = trans_a ? m : k, .ldb = trans_b ? k : n, .ldc = n, .alpha = 1};
    return plain || !(m && n && k) ? ont_gemm_reference() : ont_gemm_choose(&gemm);
}

/* Sizes of chunks and tiles. */
static void divide(ont_stream_state *s, bool plain, int64_t rows)
{
    int64_t classes = s->labels.classes, chunk = max_i64(128, WIDE / max_i64(1, s->width));
    s->chunk = even_parts(s->labels.count, plain ? 2 : chunk < ROWS ? chunk : ROWS);
    s->block = even_parts(classes, plain ? 3 : max_i64(64, tile_of(s) / s->chunk));
    if (!plain && s->block < classes) s->block = (s->block + 15) / 16 * 16; /* a multiple of whole vectors */
    if (rows > 0) {
        s->chunk = rows < s->labels.count ? rows : max_i64(1, s->labels.count);
        s->block = max_i64(1, classes);
    }
}

/* ---- operands ---- */

/* Element i of an array of the state's dtype. */
static void *element(const ont_stream_state *s, const void *array, int64_t i)
{
    return (char *)(uintptr_t)array + i * (int64_t)s->size;
}

static void set_number(const ont_stream_state *s, void *array, int64_t i, double value)
{
    if (s->dtype == ONT_FLOAT64)
        ((double *)array)[i] = value;
    else
        ((float *)array)[i] = (float)value;
}

static void clear_rows(const ont_stream_state *s, void *x, int64_t first, int64_t last, int64_t width)
{
    memset(element(s, x, first * width), 0, (size_t)((last - first) * width) * s->size);
}

static ont_stream_job begin(const ont_call *call)
{
    const ont_stream_state *s = call->state;
    ont_stream_job j = {.call = call, .s = s, .w = call->in[IN_W]};
    if (ont_node_in(call->node, IN_ROW)) j.row = call->in[IN_ROW];
    if (call->node->n_inputs > IN_STATS) j.dloss = call->in[IN_DLOSS], j.stats = call->in[IN_STATS];
    layout_scratch(s, call->work, &j);
    return j;
}

/* Sets the next chunk and gathers h of its rows that are not ignored. Returns false after the last chunk. */
static bool next_chunk(ont_stream_job *j)
{
    const ont_stream_state *s = j->s;
    const ont_labels *l = &s->labels;
    j->first = j->last;
    const void *labels = j->call->in[IN_LABELS];
    for (j->n = 0; j->last < l->count && j->n < s->chunk; j->last++)
        if (l->classes && ont_label_counts(l, ont_label_at(l, labels, j->last))) j->at[j->n++] = j->last;
    s->parts->gather(j);
    return j->first < j->last;
}

/* Computes the scores of the chunk's next tile. Returns false after the last tile, or a failure. */
static bool next_tile(ont_stream_job *j)
{
    const ont_stream_state *s = j->s;
    j->from += j->size;
    j->size = s->labels.classes - j->from < s->block ? s->labels.classes - j->from : s->block;
    if (!j->n || j->size <= 0) return false;
    ONT_ASSERT(j->n <= s->chunk && j->size <= s->block); /* what the scratch has room for */
    s->parts->scores(j);
    return j->status == ONT_OK;
}

/* The row that is added to scores, from the tile's first class on; NULL: none. */
static const void *added_row(const ont_stream_job *j)
{
    return j->row ? element(j->s, j->row, j->from) : NULL;
}

/* Number of rows that is worth a thread. */
static int64_t grain(const ont_stream_job *j)
{
    return 4096 / (j->size + 1) + 1;
}

/* ---- chunks and tiles of float32 and float64 ---- */

static void gather(ont_stream_job *j)
{
    const ont_stream_state *s = j->s;
    const void *h = j->call->in[IN_H];
    bool whole = j->n == j->last - j->first;
    j->rows = whole ? element(s, h, j->first * s->width) : j->gathered;
    for (int64_t i = 0; !whole && i < j->n; i++)
        memcpy(element(s, j->gathered, i * s->width), element(s, h, j->at[i] * s->width), (size_t)s->width * s->size);
}

/* Without the row, which the loops add. */
static void scores(ont_stream_job *j)
{
    const ont_stream_state *s = j->s;
    ont_gemm gemm = {.dtype = s->dtype, .trans_b = s->trans_w, .m = j->n, .n = j->size, .k = s->width,
                     .lda = s->width, .ldb = ont_stream_ld_of_w(s), .ldc = j->size, .alpha = 1};
    s->backends[ONT_STREAM_TO_SCORES]->run(&gemm, j->rows, element(s, j->w, ont_stream_in_w(j)), j->tile);
}

static void add_to_h(ont_stream_job *j)
{
    const ont_stream_state *s = j->s;
    ont_gemm gemm = {.dtype = s->dtype, .trans_b = !s->trans_w, .m = j->n, .n = s->width, .k = j->size,
                     .lda = j->size, .ldb = ont_stream_ld_of_w(s), .ldc = s->width, .alpha = 1, .beta = j->from > 0};
    void *dh = element(s, j->dh, j->first * s->width);
    s->backends[ONT_STREAM_TO_H]->run(&gemm, j->tile, element(s, j->w, ont_stream_in_w(j)), dh);
}

static void add_to_w(ont_stream_job *j)
{
    const ont_stream_state *s = j->s;
    ont_gemm gemm = {.dtype = s->dtype, .trans_a = true, .k = j->n, .ldc = ont_stream_ld_of_w(s), .alpha = 1,
                     .beta = j->accumulates};
    gemm.m = gemm.lda = s->trans_w ? j->size : s->width;
    gemm.n = gemm.ldb = s->trans_w ? s->width : j->size;
    const void *a = s->trans_w ? j->tile : j->rows, *b = s->trans_w ? j->rows : j->tile;
    s->backends[ONT_STREAM_TO_W]->run(&gemm, a, b, element(s, j->dw, ont_stream_in_w(j)));
}

/* Backwards, because rows move to higher indices. */
static void spread(const ont_stream_job *j)
{
    const ont_stream_state *s = j->s;
    int64_t width = s->width, i = j->n;
    for (int64_t row = j->last - 1; row >= j->first; row--) {
        if (!i || j->at[i - 1] != row)
            clear_rows(s, j->dh, row, row + 1, width);
        else if (j->first + --i < row)
            memcpy(element(s, j->dh, row * width), element(s, j->dh, (j->first + i) * width), (size_t)width * s->size);
    }
}

/* ---- their rows and columns ---- */

static void add_to_f32(float *x, const float *row, int64_t n)
{
    ont_simd()->add_to(x, row, n);
}

static void log_sum_exp_f32(const float *x, int64_t n, float *row_max, float *log_sum)
{
    ont_simd()->log_sum_exp(x, n, row_max, log_sum);
}

static void scaled_softmax_f32(float *x, float row_max, float log_sum, float scale, int64_t n)
{
    ont_simd()->scaled_softmax(x, row_max, log_sum, scale, x, n);
}

static void add_to_f64(double *x, const double *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] += row[i];
}

static void log_sum_exp_f64(const double *x, int64_t n, double *row_max, double *log_sum)
{
    double largest = x[0], sum = 0;
    for (int64_t i = 1; i < n; i++) largest = x[i] > largest || isnan(x[i]) ? x[i] : largest;
    for (int64_t i = 0; i < n; i++) sum += exp(x[i] - largest);
    *row_max = largest;
    *log_sum = log(sum);
}

static void scaled_softmax_f64(double *x, double row_max, double log_sum, double scale, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = scale * exp((x[i] - row_max) - log_sum);
}

#define TILE_LOOPS(suffix, type) \
    /* Scores of row i of the tile, after the row is added. */ \
    static type *finish_row_##suffix(const ont_stream_job *j, int64_t i) \
    { \
        type *x = (type *)j->tile + i * j->size; \
        const type *row = added_row(j); \
        if (row) add_to_##suffix(x, row, j->size); \
        return x; \
    } \
    static void sum_rows_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_stream_job *j = context; \
        for (int64_t i = first; i < last; i++) { \
            const type *x = finish_row_##suffix(j, i); \
            type largest, log_sum; \
            double sum = j->row_sum[i], row_max = j->row_max[i]; \
            log_sum_exp_##suffix(x, j->size, &largest, &log_sum); \
            if ((double)largest > row_max || isnan(largest)) { \
                sum = sum > 0 ? sum * exp(row_max - (double)largest) : sum; \
                row_max = (double)largest; \
            } \
            sum += largest == (type)-INFINITY ? 0 : exp((double)log_sum + ((double)largest - row_max)); \
            j->row_sum[i] = sum; \
            j->row_max[i] = row_max; \
            int64_t label = ont_stream_label(j, i) - j->from; \
            if (label >= 0 && label < j->size) j->score[i] = (double)x[label]; \
        } \
    } \
    static void grad_rows_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_stream_job *j = context; \
        const type *stats = j->stats, *dloss = j->dloss; \
        ont_reduction reduction = j->s->labels.reduction; \
        for (int64_t i = first; i < last; i++) { \
            type *x = finish_row_##suffix(j, i), scale = dloss[reduction == ONT_REDUCE_NONE ? j->at[i] : 0]; \
            if (reduction == ONT_REDUCE_MEAN) scale = (type)((double)scale / j->norm); \
            scaled_softmax_##suffix(x, stats[2 * j->at[i]], stats[2 * j->at[i] + 1], scale, j->size); \
            int64_t label = ont_stream_label(j, i) - j->from; \
            if (label >= 0 && label < j->size) x[label] -= scale; \
        } \
    } \
    static void early_rows_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_stream_job *j = context; \
        type scale = j->s->labels.reduction == ONT_REDUCE_MEAN ? (type)(1 / j->norm) : 1; \
        for (int64_t i = first; i < last; i++) { \
            type *x = finish_row_##suffix(j, i), largest, log_sum; \
            int64_t label = ont_stream_label(j, i); \
            log_sum_exp_##suffix(x, j->size, &largest, &log_sum); \
            j->score[i] = -(double)((x[label] - largest) - log_sum); \
            scaled_softmax_##suffix(x, largest, log_sum, scale, j->size); \
            x[label] -= scale; \
        } \
    } \
    static void sum_columns_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_stream_job *j = context; \
        type *row = (type *)j->drow + j->from; \
        for (int64_t at = first; at < last; at += COLUMNS) { \
            int64_t n = last - at < COLUMNS ? last - at : COLUMNS; \
            double sums[COLUMNS] = {0}; \
            for (int64_t i = 0; i < j->n; i++) \
                for (int64_t c = 0; c < n; c++) sums[c] += (double)((const type *)j->tile)[i * j->size + at + c]; \
            for (int64_t c = 0; c < n; c++) \
                row[at + c] = (type)(sums[c] + (j->accumulates ? (double)row[at + c] : 0)); \
        } \
    }
TILE_LOOPS(f32, float)
TILE_LOOPS(f64, double)

static const ont_stream_parts f32_parts = {gather, scores, add_to_h, add_to_w, spread,
                                           sum_rows_f32, grad_rows_f32, early_rows_f32, sum_columns_f32};
static const ont_stream_parts f64_parts = {gather, scores, add_to_h, add_to_w, spread,
                                           sum_rows_f64, grad_rows_f64, early_rows_f64, sum_columns_f64};

/* ---- prepare ---- */

static ont_status prepare_with(bool plain, const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_stream_job j;
    ont_stream_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_state(node, s));
    divide(s, plain, ont_attr_int(node, "rows", 0));
    s->parts = s->dtype == ONT_FLOAT64 ? &f64_parts : &f32_parts;
    s->backends[ONT_STREAM_TO_SCORES] = provider(plain, s->dtype, s->chunk, s->block, s->width, false, s->trans_w);
    s->backends[ONT_STREAM_TO_H] = provider(plain, s->dtype, s->chunk, s->width, s->block, false, !s->trans_w);
    s->backends[ONT_STREAM_TO_W] = s->trans_w ? provider(plain, s->dtype, s->block, s->width, s->chunk, true, false)
                                   : provider(plain, s->dtype, s->width, s->block, s->chunk, true, false);
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

static ont_status prepare_half(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_stream_job j;
    ont_stream_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_state(node, s));
    int64_t rows = ont_attr_int(node, "rows", 0);
    divide(s, false, rows ? even_parts(s->labels.count, rows) : 0);
    ONT_TRY(ont_stream_half_prepare(s, ont_node_in(node, IN_ROW) != NULL, arena));
    out->work_bytes = layout_scratch(s, NULL, &j);
    out->state = s;
    return ONT_OK;
}

static void release_half(void *state)
{
    ont_stream_half_release(state);
}

/* Whether some columns of W are no classes. */
static bool has_more_columns(const ont_node *node)
{
    int64_t columns = ont_node_in(node, IN_W)->shape.dims[!is_transposed(node)];
    return ont_attr_int(node, "classes", columns) != columns;
}

static const char *accept_half(const ont_node *node)
{
    ont_stream_state s;
    if (has_more_columns(node)) return "W has more columns than classes";
    if (ont_node_in(node, IN_W)->dtype != ONT_BFLOAT16) return "dtype";
    return read_state(node, &s) == ONT_OK ? ont_stream_half_refuses(&s) : "operands";
}

static const char *accept_wide(const ont_node *node)
{
    if (has_more_columns(node)) return "W has more columns than classes";
    return ont_dtype_is_half(ont_node_in(node, IN_W)->dtype) ? "dtype" : NULL;
}

/* ---- forward ---- */

/* Losses and statistics of the rows of a chunk; adds to *total. */
static void finish_losses(const ont_stream_job *j, double *total)
{
    const ont_stream_state *s = j->s;
    bool each = s->labels.reduction == ONT_REDUCE_NONE;
    void *losses = j->call->out[0], *stats = j->call->node->n_outputs > 1 ? j->call->out[1] : NULL;
    if (each) clear_rows(s, losses, j->first, j->last, 1);
    if (stats) clear_rows(s, stats, j->first, j->last, 2);
    for (int64_t i = 0; i < j->n; i++) {
        double log_sum = log(j->row_sum[i]), loss = -((j->score[i] - j->row_max[i]) - log_sum);
        if (stats) set_number(s, stats, 2 * j->at[i], j->row_max[i]), set_number(s, stats, 2 * j->at[i] + 1, log_sum);
        if (each) set_number(s, losses, j->at[i], loss);
        *total += loss;
    }
}

/* ---- backward ---- */

static void *output(const ont_call *call, uint32_t i)
{
    return i < call->node->n_outputs ? call->out[i] : NULL;
}

/* Adds the tile, which holds the gradient of its scores, to the gradients that are needed. */
static void add_tile(ont_stream_job *j)
{
    const ont_stream_parts *parts = j->s->parts;
    if (j->dh) parts->add_to_h(j);
    if (j->dw) parts->add_to_w(j);
    if (j->drow) ont_parallel(j->size, COLUMNS, parts->sum_columns, j);
}

/* Finds the gradients, which are outputs `first` and later, and counts the labels. */
static void begin_gradients(ont_stream_job *j, uint32_t first)
{
    const ont_labels *l = &j->s->labels;
    j->dh = output(j->call, first + OUT_H), j->dw = output(j->call, first + OUT_W);
    j->drow = output(j->call, first + OUT_ROW);
    for (int64_t i = 0; i < l->count; i++) j->norm += ont_label_counts(l, ont_label_at(l, j->call->in[IN_LABELS], i));
}

static void end_chunk(ont_stream_job *j)
{
    if (j->dh) j->s->parts->spread(j);
    j->accumulates |= j->n > 0;
}

/* Without any label that counts, nothing was written. */
static void end_gradients(const ont_stream_job *j)
{
    if (!j->accumulates && j->dw) clear_rows(j->s, j->dw, 0, j->s->labels.classes, j->s->width);
    if (!j->accumulates && j->drow) clear_rows(j->s, j->drow, 0, 1, j->s->labels.classes);
}

static ont_status grad_run(const ont_call *call)
{
    ont_stream_job j = begin(call);
    begin_gradients(&j, 0);
    while (next_chunk(&j)) {
        for (j.from = j.size = 0; next_tile(&j);) {
            ont_parallel(j.n, grain(&j), j.s->parts->grad_rows, &j);
            add_tile(&j);
        }
        end_chunk(&j);
    }
    end_gradients(&j);
    return j.status;
}

/* ---- forward with gradients ---- */

static ont_status early_run(ont_stream_job *j)
{
    double total = 0;
    begin_gradients(j, EARLY);
    while (next_chunk(j)) {
        for (j->from = j->size = 0; next_tile(j);) {
            ont_parallel(j->n, grain(j), j->s->parts->early_rows, j);
            for (int64_t i = 0; i < j->n; i++) total += j->score[i];
            add_tile(j);
        }
        end_chunk(j);
    }
    end_gradients(j);
    bool mean = j->s->labels.reduction == ONT_REDUCE_MEAN;
    set_number(j->s, j->call->out[0], 0, mean ? total / j->norm : total);
    return j->status;
}

static ont_status stream_run(const ont_call *call)
{
    ont_stream_job j = begin(call);
    const ont_labels *l = &j.s->labels;
    double total = 0, norm = 0;
    ONT_TRY(ont_labels_check(l, ont_node_in(call->node, IN_LABELS), call->in[IN_LABELS]));
    if (ont_attr_int(call->node, "rows", 0)) return early_run(&j);
    while (next_chunk(&j)) {
        for (int64_t i = 0; i < j.n; i++) j.row_max[i] = -INFINITY, j.row_sum[i] = 0, j.score[i] = 0;
        for (j.from = j.size = 0; next_tile(&j);) ont_parallel(j.n, grain(&j), j.s->parts->sum_rows, &j);
        finish_losses(&j, &total);
        norm += (double)j.n;
    }
    if (l->reduction == ONT_REDUCE_SUM) set_number(j.s, call->out[0], 0, total);
    if (l->reduction == ONT_REDUCE_MEAN) set_number(j.s, call->out[0], 0, total / norm);
    return j.status;
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
        if (node->outputs[i]) GI(of[i], ont_build_cast(b, node->outputs[i], I(of[i])->dtype));
}

/* ---- the gradient of the loss ---- */

typedef struct scale_job {
    const void *x;
    void *y;
    double scale;
} scale_job;

#define SCALE(suffix, type) \
    static void scale_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const scale_job *j = context; \
        const type *x = j->x, scale = (type)j->scale; \
        type *y = j->y; \
        for (int64_t i = first; i < last; i++) y[i] = x[i] * scale; \
    }
SCALE(f32, float)
SCALE(f64, double)

static ont_status scale_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0);
    bool wide = x->dtype == ONT_FLOAT64;
    double scale = wide ? *(const double *)call->in[1] : (double)*(const float *)call->in[1];
    scale_job j = {call->in[0], call->out[0], scale};
    if (j.x != j.y || j.scale != 1) ont_parallel(ont_shape_count(&x->shape), 1 << 14, wide ? scale_f64 : scale_f32, &j);
    return ONT_OK;
}

static const ont_kernel scale_kernels[] = {
    {.name = "scale_gradient", .accept = ont_accept_any, .run = scale_run, .inplace = 1},
};
static const ont_kernel stream_kernels[] = {
    {.name = "streamed_cross_entropy_half", .accept = accept_half, .prepare = prepare_half, .run = stream_run,
     .release = release_half},
    {.name = "streamed_cross_entropy", .accept = accept_wide, .prepare = prepare, .run = stream_run},
    {.name = "streamed_cross_entropy_ref", .accept = accept_wide, .prepare = prepare_ref, .run = stream_run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "streamed_cross_entropy_grad_half", .accept = accept_half, .prepare = prepare_half, .run = grad_run,
     .release = release_half},
    {.name = "streamed_cross_entropy_grad", .accept = accept_wide, .prepare = prepare, .run = grad_run},
    {.name = "streamed_cross_entropy_grad_ref", .accept = accept_wide, .prepare = prepare_ref, .run = grad_run},
};

const ont_op ont_op_StreamedCrossEntropy = {
    .domain = ONT_DOMAIN, .name = "StreamedCrossEntropy", .since = 1, .min_inputs = 3, .max_inputs = 4,
    .flags = ONT_OP_PUBLIC, .nondiff_inputs = 1 << IN_LABELS, .nondiff_outputs = 30,
    .attributes = "ignore_index:i reduction:s transB:i rows:i to:i classes:i", .infer = stream_infer,
    .grad = stream_grad, .cost = ONT_COST_STREAMED_LOSS, .early_gradients = ~UINT64_C(3), ONT_KERNELS(stream_kernels)};
const ont_op ont_op_StreamedCrossEntropyGrad = {
    .domain = ONT_DOMAIN, .name = "StreamedCrossEntropyGrad", .since = 1, .min_inputs = 6, .max_inputs = 6,
    .attributes = "ignore_index:i reduction:s transB:i to:i classes:i", .infer = grad_infer,
    .cost = ONT_COST_STREAMED_LOSS, ONT_KERNELS(grad_kernels)};
const ont_op ont_op_ScaleGradient = {
    .domain = ONT_DOMAIN, .name = "ScaleGradient", .since = 1, .min_inputs = 2, .max_inputs = 2, .attributes = "",
    .infer = ont_infer_same, .early_gradients = 1, ONT_KERNELS(scale_kernels)};
