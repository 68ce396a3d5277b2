/*
 * StreamedCrossEntropy of bfloat16 operands, where the processor multiplies them: products of tiles, by the native GEMM
 * or oneDNN's primitive, as for other bfloat16 matmuls, and the loops over their rows. streamed_loss.c calls this.
 *
 * Values are rounded where those of stored scores are (ops/loss/loss.c): scores if the product writes bfloat16, and
 * their gradient, which products read. It is written over the scores, at the start of each row. Gradients of h, W and
 * row are float32.
 *
 * A primitive has one shape, so that every chunk has as many rows: zeros are added, to the gradient of scores too.
 */
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "device/half_product.h"
#include "ops/loss/streamed_loss.h"
#include "simd/simd.h"

enum { COLUMNS = 256 }; /* of drow, summed at a time */

typedef struct ont_stream_half {
    ont_half_product whole[ONT_STREAM_PRODUCTS], rest[ONT_STREAM_PRODUCTS]; /* rest: of the last, narrower tile */
} ont_stream_half;

/* ---- products ---- */

const char *ont_stream_half_refuses(const ont_stream_state *s)
{
    const char *refusal = ont_half_product_refuses(s->operand);
    if (refusal) return refusal;
    return s->width && s->labels.classes && s->labels.count ? NULL : "a dim is 0";
}

/* Elements between rows of the gradient of scores, which begin where those of the scores do. */
static int64_t ld_of_gradient(const ont_stream_state *s, int64_t size)
{
    return size * (int64_t)(ont_dtype_size(s->scores) / sizeof(uint16_t));
}

/* A product of a tile of `size` classes. */
static ont_gemm gemm_of(const ont_stream_state *s, int product, int64_t size)
{
    int64_t ld_w = ont_stream_ld_of_w(s), ld_tile = ld_of_gradient(s, size);
    ont_gemm g = {.dtype = s->operand, .m = s->chunk, .n = size, .k = s->width, .lda = s->width, .ldb = ld_w,
                  .ldc = size, .alpha = 1, .trans_b = s->trans_w};
    if (product == ONT_STREAM_TO_SCORES) return g;
    if (product == ONT_STREAM_TO_H) {
        g.n = g.ldc = s->width, g.k = size, g.lda = ld_tile;
        g.trans_b = !s->trans_w;
        return g;
    }
    g.k = s->chunk, g.ldc = ld_w;
    g.trans_a = true, g.trans_b = false;
    g.m = s->trans_w ? size : s->width, g.lda = s->trans_w ? ld_tile : s->width;
    g.n = s->trans_w ? s->width : size, g.ldb = s->trans_w ? s->width : ld_tile;
    return g;
}

static ont_status prepare_products(const ont_stream_state *s, ont_half_product *products, int64_t size, bool bias)
{
    for (int i = 0; i < ONT_STREAM_PRODUCTS; i++) {
        bool scores = i == ONT_STREAM_TO_SCORES;
        ont_gemm g = gemm_of(s, i, size);
        ONT_TRY(ont_half_product_prepare(&products[i], &g, scores ? s->scores : s->dtype, scores && bias));
    }
    return ONT_OK;
}

ont_status ont_stream_half_prepare(ont_stream_state *s, bool bias, ont_arena *arena)
{
    int64_t rest = s->labels.classes % s->block;
    s->half = ont_arena_alloc(arena, sizeof *s->half);
    if (!s->half) return ONT_ENOMEM;
    s->parts = &ont_stream_half_parts;
    *s->half = (ont_stream_half){0};
    ont_status status = prepare_products(s, s->half->whole, s->block, bias);
    if (status == ONT_OK && rest) status = prepare_products(s, s->half->rest, rest, bias);
    if (status != ONT_OK) ont_stream_half_release(s);
    return status;
}

static void release_products(ont_half_product *products)
{
    for (int i = 0; i < ONT_STREAM_PRODUCTS; i++) ont_half_product_release(&products[i]);
}

void ont_stream_half_release(ont_stream_state *s)
{
    release_products(s->half->whole);
    release_products(s->half->rest);
}

/* The most that one of them needs, after `least`. */
static size_t work_bytes(const ont_half_product *products, size_t least)
{
    for (int i = 0; i < ONT_STREAM_PRODUCTS; i++) {
        size_t bytes = ont_half_product_work_bytes(&products[i]);
        least = bytes > least ? bytes : least;
    }
    return least;
}

size_t ont_stream_half_work_bytes(const ont_stream_state *s)
{
    return work_bytes(s->half->rest, work_bytes(s->half->whole, 0));
}

/* c = a b + row, which may be NULL; or c += a b. Does nothing after a failure. */
static void multiply(ont_stream_job *j, int product, const void *a, const void *b, const void *row, void *c, bool adds)
{
    const ont_stream_half *half = j->s->half;
    bool whole = j->size == j->s->block;
    const ont_half_product *p = &(whole ? half->whole : half->rest)[product];
    ONT_ASSERT(whole || j->size == j->s->labels.classes % j->s->block); /* the sizes that have products */
    if (j->status == ONT_OK) j->status = ont_half_product_run(p, a, b, row, c, adds, j->work);
}

/* ---- operands ---- */

static const uint16_t *half_at(const void *array, int64_t i)
{
    return (const uint16_t *)array + i;
}

/* Products have one number of rows: zeros fill up the chunk. */
static void gather(ont_stream_job *j)
{
    const ont_stream_state *s = j->s;
    const void *h = j->call->in[0];
    uint16_t *to = j->gathered;
    size_t width = (size_t)s->width * sizeof *to;
    bool whole = j->n == s->chunk && j->n == j->last - j->first;
    j->rows = whole ? half_at(h, j->first * s->width) : to;
    if (whole) return;
    for (int64_t i = 0; i < j->n; i++) memcpy(to + i * s->width, half_at(h, j->at[i] * s->width), width);
    memset(to + j->n * s->width, 0, (size_t)(s->chunk - j->n) * width);
}

/* With the row. */
static void scores(ont_stream_job *j)
{
    const void *row = j->row ? half_at(j->row, j->from) : NULL;
    size_t bytes = (size_t)j->size * ont_dtype_size(j->s->scores);
    multiply(j, ONT_STREAM_TO_SCORES, j->rows, half_at(j->w, ont_stream_in_w(j)), row, j->tile, false);
    memset((char *)j->tile + (size_t)j->n * bytes, 0, (size_t)(j->s->chunk - j->n) * bytes);
}

static void add_to_h(ont_stream_job *j)
{
    multiply(j, ONT_STREAM_TO_H, j->tile, half_at(j->w, ont_stream_in_w(j)), NULL, j->part, j->from > 0);
}

static void add_to_w(ont_stream_job *j)
{
    bool trans = j->s->trans_w;
    float *dw = (float *)j->dw + ont_stream_in_w(j);
    multiply(j, ONT_STREAM_TO_W, trans ? j->tile : j->rows, trans ? j->rows : j->tile, NULL, dw, j->accumulates);
}

static void spread(const ont_stream_job *j)
{
    int64_t width = j->s->width, i = 0;
    const float *part = j->part;
    for (int64_t row = j->first; row < j->last; row++) {
        float *to = (float *)j->dh + row * width;
        bool counts = i < j->n && j->at[i] == row;
        if (counts) memcpy(to, part + i++ * width, (size_t)width * sizeof *to);
        else memset(to, 0, (size_t)width * sizeof *to);
    }
}

/* ---- rows and columns of a tile ---- */

static ont_score_row row_of(const ont_stream_job *j, int64_t i)
{
    int64_t row_bytes = j->size * (int64_t)ont_dtype_size(j->s->scores);
    return (ont_score_row){(const char *)j->tile + i * row_bytes, j->s->scores, j->size};
}

/* The gradient of row i, over its scores. */
static uint16_t *gradient_of(const ont_stream_job *j, int64_t i)
{
    return (uint16_t *)j->tile + i * ld_of_gradient(j->s, j->size);
}

static float score_at(const ont_score_row *row, int64_t at)
{
    float score;
    if (row->dtype == ONT_FLOAT32) return ((const float *)row->x)[at];
    ont_simd()->bfloat_to_float(half_at(row->x, at), &score, 1);
    return score;
}

static void sum_rows(void *context, int64_t first, int64_t last)
{
    const ont_stream_job *j = context;
    for (int64_t i = first; i < last; i++) {
        ont_score_row row = row_of(j, i);
        int64_t label = ont_stream_label(j, i) - j->from;
        ont_scores_add(&row, &j->row_max[i], &j->row_sum[i]);
        if (label >= 0 && label < j->size) j->score[i] = (double)score_at(&row, label);
    }
}

static void grad_rows(void *context, int64_t first, int64_t last)
{
    const ont_stream_job *j = context;
    const float *stats = j->stats, *dloss = j->dloss;
    ont_reduction reduction = j->s->labels.reduction;
    for (int64_t i = first; i < last; i++) {
        ont_score_row row = row_of(j, i);
        float scale = dloss[reduction == ONT_REDUCE_NONE ? j->at[i] : 0];
        if (reduction == ONT_REDUCE_MEAN) scale = (float)((double)scale / j->norm);
        ont_scores_grad(&row, stats + 2 * j->at[i], scale, ont_stream_label(j, i) - j->from, j->s->operand,
                        gradient_of(j, i));
    }
}

static void early_rows(void *context, int64_t first, int64_t last)
{
    const ont_stream_job *j = context;
    float scale = j->s->labels.reduction == ONT_REDUCE_MEAN ? (float)(1 / j->norm) : 1;
    for (int64_t i = first; i < last; i++) {
        ont_score_row row = row_of(j, i);
        int64_t label = ont_stream_label(j, i);
        double row_max = -INFINITY, sum = 0;
        ont_scores_add(&row, &row_max, &sum);
        float stats[] = {(float)row_max, (float)log(sum)};
        j->score[i] = -(double)((score_at(&row, label) - stats[0]) - stats[1]);
        ont_scores_grad(&row, stats, scale, label, j->s->operand, gradient_of(j, i));
    }
}

static void sum_columns(void *context, int64_t first, int64_t last)
{
    const ont_stream_job *j = context;
    float *drow = (float *)j->drow + j->from, piece[COLUMNS];
    for (int64_t at = first; at < last; at += COLUMNS) {
        int64_t n = last - at < COLUMNS ? last - at : COLUMNS;
        double sums[COLUMNS] = {0};
        for (int64_t i = 0; i < j->n; i++) {
            ont_simd()->bfloat_to_float(gradient_of(j, i) + at, piece, n);
            for (int64_t c = 0; c < n; c++) sums[c] += (double)piece[c];
        }
        for (int64_t c = 0; c < n; c++)
            drow[at + c] = (float)(sums[c] + (j->accumulates ? (double)drow[at + c] : 0));
    }
}

const ont_stream_parts ont_stream_half_parts = {gather, scores, add_to_h, add_to_w, spread,
                                                sum_rows, grad_rows, early_rows, sum_columns};
