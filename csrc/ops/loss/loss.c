/*
 * SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss: scores (N, C, D...), labels (N, D...), optional class weights
 * (C). For the gradient of the first, a third output holds two numbers for each position: the largest score and the
 * logarithm of the sum of exponentials, in float32 where the scores have 16 bits: rounded to those, the logarithm would
 * put an error of some percent on the whole gradient. Only the scores themselves are saved besides, and their gradient
 * overwrites them.
 *
 * Attribute "classes" of our own operators: the first so many columns of scores (N, columns) are the classes. The
 * others (passes/align_products.c adds them) are not read, and their gradient is 0. Only devices have such kernels.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "base/parallel.h"
#include "ops/loss/loss.h"
#include "simd/simd.h"

typedef struct loss_state {
    int64_t rows, classes, inner; /* scores are (rows, classes, inner) */
    ont_labels labels;
    bool softmax;
    ont_dtype half; /* dtype of 16-bit scores, whose loss is float32; else ONT_UNDEFINED */
} loss_state;

ont_status ont_labels_read(const ont_node *node, const ont_value *labels, int64_t classes, ont_labels *l)
{
    const char *reduction = ont_attr_string(node, "reduction", "mean");
    const ont_attr *ignore = ont_attr_find(node, "ignore_index", ONT_ATTR_INT);
    *l = (ont_labels){.count = ont_shape_count(&labels->shape), .classes = classes, .wide = labels->dtype == ONT_INT64,
                      .ignores = ignore != NULL, .ignored = ignore ? ignore->i : 0};
    if (!strcmp(reduction, "none"))
        l->reduction = ONT_REDUCE_NONE;
    else if (!strcmp(reduction, "sum"))
        l->reduction = ONT_REDUCE_SUM;
    else if (!strcmp(reduction, "mean"))
        l->reduction = ONT_REDUCE_MEAN;
    else
        return ont_fail(ONT_EINVAL, "reduction is '%s', expected none, sum or mean", reduction);
    return ONT_OK;
}

static bool is_softmax(const ont_node *node)
{
    return ONT_IS(node, SoftmaxCrossEntropyLoss) || ONT_IS(node, SoftmaxCrossEntropyLossPairs) ||
           ONT_IS(node, SoftmaxCrossEntropyGrad);
}

static ont_status read_state(const ont_node *node, loss_state *s)
{
    const ont_value *x = ont_node_in(node, 0);
    *s = (loss_state){.rows = x->shape.dims[0], .classes = ont_attr_int(node, "classes", x->shape.dims[1]),
                      .inner = ont_shape_count_range(&x->shape, 2, x->shape.rank),
                      .half = ont_dtype_is_half(x->dtype) ? x->dtype : ONT_UNDEFINED,
                      .softmax = is_softmax(node)};
    return ont_labels_read(node, ont_node_in(node, 1), s->classes, &s->labels);
}

static bool has_other_columns(const ont_node *node)
{
    const int64_t columns = ont_node_in(node, 0)->shape.dims[1];
    return ont_attr_int(node, "classes", columns) != columns;
}

static ont_status loss_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *label;
    loss_state s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &label));
    if (x->shape.rank < 2) return ont_fail(ONT_EINVAL, "scores have rank %d, at least 2 is expected", x->shape.rank);
    if (label->dtype != ONT_INT64 && label->dtype != ONT_INT32)
        return ont_fail(ONT_ETYPE, "labels are %s, expected int32 or int64", ont_dtype_name(label->dtype));
    ont_shape expected = {.rank = x->shape.rank - 1, .dims = {x->shape.dims[0]}};
    for (int d = 1; d < expected.rank; d++) expected.dims[d] = x->shape.dims[d + 1];
    if (!ont_shape_equal(&label->shape, &expected)) {
        char got[ONT_SHAPE_TEXT], want[ONT_SHAPE_TEXT];
        return ont_fail(ONT_EINVAL, "labels are %s, expected %s", ont_shape_text(&label->shape, got),
                        ont_shape_text(&expected, want));
    }
    ONT_ASSERT(!has_other_columns(node) || (x->shape.rank == 2 && !ont_node_out(node, 1)));
    ONT_TRY(read_state(node, &s));
    ont_dtype dtype = (ont_dtype)ont_attr_int(node, "stash_type", x->dtype);
    const ont_value *weight = ont_node_in(node, 2);
    if (weight && ((weight->dtype != x->dtype && weight->dtype != dtype) ||
                   ont_shape_count(&weight->shape) != s.classes))
        return ont_fail(ONT_EINVAL, "weights must be %" PRId64 " entries of %s", s.classes, ont_dtype_name(x->dtype));
    if (dtype != x->dtype && (dtype != ONT_FLOAT32 || !ont_dtype_is_half(x->dtype)))
        return ont_fail(ONT_EUNSUPPORTED, "stash_type %d is not supported for scores in %s", (int)dtype,
                        ont_dtype_name(x->dtype));
    ONT_TRY(ont_infer_out(node, 1, x->dtype, &x->shape));
    ont_shape stats = expected;
    stats.dims[stats.rank++] = 2;
    ONT_TRY(ont_infer_out(node, 2, ont_dtype_is_half(x->dtype) ? ONT_FLOAT32 : x->dtype, &stats));
    return ont_infer_out(node, 0, dtype, s.labels.reduction == ONT_REDUCE_NONE ? &expected : &(ont_shape){0});
}

ont_status ont_labels_check(const ont_labels *l, const ont_value *value, const void *labels)
{
    for (int64_t i = 0; i < l->count; i++) {
        int64_t label = ont_label_at(l, labels, i);
        if (!ont_label_counts(l, label)) continue;
        if (label < 0 || label >= l->classes)
            return ont_fail(ONT_EINDEX,
                            "label %" PRId64 " at position %" PRId64 " of '%s' is out of range for %" PRId64 " classes",
                            label, i, value->name, l->classes);
    }
    return ONT_OK;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    loss_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_state(node, s));
    size_t positions = (size_t)ont_shape_count(&ont_node_in(node, 1)->shape);
    size_t size = s->half ? sizeof(float) : ont_dtype_size(ont_node_in(node, 0)->dtype);
    if (s->softmax && !ont_node_out(node, 2)) out->work_bytes = 2 * positions * size;
    out->state = s;
    return ONT_OK;
}

static const void *weights_of(const ont_call *call)
{
    return call->node->n_inputs > 2 ? call->in[2] : NULL;
}

/* The statistics of the positions, (rows * inner, 2): the third output, or scratch. */
static void *stats_of(const ont_call *call)
{
    return call->node->n_outputs > 2 && call->out[2] ? call->out[2] : call->work;
}

static void *log_probabilities(const ont_call *call)
{
    return call->node->n_outputs > 1 ? call->out[1] : NULL;
}

static float half_score(const ont_call *call, int64_t at)
{
    const loss_state *s = call->state;
    const uint16_t *x = (const uint16_t *)call->in[0] + at;
    float score;
    (s->half == ONT_BFLOAT16 ? ont_simd()->bfloat_to_float : ont_simd()->half_to_float)(x, &score, 1);
    return score;
}

#define LOSS(suffix, type, exp_, log_) \
    static void log_sum_exp_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const loss_state *s = call->state; \
        type *stats = stats_of(call); \
        for (int64_t i = first; i < last && s->classes; i++) { \
            int64_t at = i / s->inner * s->classes * s->inner + i % s->inner; \
            const type *x = (const type *)call->in[0] + at; \
            type row_max = x[0], sum = 0; \
            for (int64_t c = 1; c < s->classes; c++) row_max = x[c * s->inner] > row_max ? x[c * s->inner] : row_max; \
            for (int64_t c = 0; c < s->classes; c++) sum += exp_(x[c * s->inner] - row_max); \
            stats[2 * i] = row_max; \
            stats[2 * i + 1] = log_(sum); \
            type *y = log_probabilities(call); \
            for (int64_t c = 0; y && c < s->classes; c++) \
                y[at + c * s->inner] = (x[c * s->inner] - row_max) - stats[2 * i + 1]; \
        } \
    } \
    static void reduce_##suffix(const ont_call *call) \
    { \
        const loss_state *s = call->state; \
        const type *x = call->in[0], *stats = s->softmax ? stats_of(call) : NULL, *weights = weights_of(call); \
        type *loss = call->out[0]; \
        double sum = 0, norm = 0; \
        for (int64_t i = 0; i < s->rows * s->inner; i++) { \
            int64_t label = ont_label_at(&s->labels, call->in[1], i); \
            bool counts = ont_label_counts(&s->labels, label); \
            type w = !counts ? 0 : weights ? weights[label] : 1; \
            int64_t at = (i / s->inner * s->classes + label) * s->inner + i % s->inner; \
            type score = !counts ? 0 : s->half ? (type)half_score(call, at) : x[at]; \
            type term = !counts ? 0 : -w * (stats ? (score - stats[2 * i]) - stats[2 * i + 1] : score); \
            if (s->labels.reduction == ONT_REDUCE_NONE) loss[i] = term; \
            sum += (double)term; \
            norm += (double)w; \
        } \
        if (s->labels.reduction == ONT_REDUCE_SUM) *loss = (type)sum; \
        if (s->labels.reduction == ONT_REDUCE_MEAN) *loss = (type)(sum / norm); \
    } \
    typedef struct grad_job_##suffix { \
        const ont_call *call; \
        double norm; \
    } grad_job_##suffix; \
    static type grad_scale_##suffix(const grad_job_##suffix *job, int64_t i, int64_t label) \
    { \
        const loss_state *s = job->call->state; \
        const type *weights = job->call->in[2], *dy = job->call->in[3]; \
        type scale = (weights ? weights[label] : 1) * dy[s->labels.reduction == ONT_REDUCE_NONE ? i : 0]; \
        return s->labels.reduction == ONT_REDUCE_MEAN ? (type)((double)scale / job->norm) : scale; \
    } \
    static void grad_rows_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const grad_job_##suffix *job = context; \
        const ont_call *call = job->call; \
        const loss_state *s = call->state; \
        const type *stats = s->softmax ? call->in[4] : NULL; \
        for (int64_t i = first; i < last; i++) { \
            int64_t label = ont_label_at(&s->labels, call->in[1], i); \
            int64_t at = i / s->inner * s->classes * s->inner + i % s->inner; \
            bool counts = ont_label_counts(&s->labels, label); \
            const type *x = (const type *)call->in[0] + at; \
            type *dx = (type *)call->out[0] + at, scale = counts ? grad_scale_##suffix(job, i, label) : 0; \
            for (int64_t c = 0; stats && c < s->classes; c++) \
                dx[c * s->inner] = !counts ? 0 \
                                   : scale * exp_((x[c * s->inner] - stats[2 * i]) - stats[2 * i + 1]); \
            if (counts) dx[label * s->inner] -= scale; \
        } \
    } \
    static double grad_norm_##suffix(const ont_call *call) \
    { \
        const loss_state *s = call->state; \
        const type *weights = call->in[2]; \
        double norm = 0; \
        for (int64_t i = 0; i < s->rows * s->inner; i++) { \
            int64_t label = ont_label_at(&s->labels, call->in[1], i); \
            if (ont_label_counts(&s->labels, label)) norm += weights ? (double)weights[label] : 1; \
        } \
        return norm; \
    }
LOSS(f32, float, expf, logf)
LOSS(f64, double, exp, log)

static ont_status loss_ref(const ont_call *call)
{
    const loss_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ONT_TRY(ont_labels_check(&s->labels, ont_node_in(call->node, 1), call->in[1]));
    if (s->softmax) ont_parallel(s->rows * s->inner, 1, f32 ? log_sum_exp_f32 : log_sum_exp_f64, (void *)call);
    void *logp = log_probabilities(call);
    if (!s->softmax && logp) memcpy(logp, call->in[0], (size_t)(s->rows * s->classes * s->inner) * (f32 ? 4 : 8));
    (f32 ? reduce_f32 : reduce_f64)(call);
    return ONT_OK;
}

/* Number of rows that is worth a thread. */
static int64_t grain(const loss_state *s)
{
    return 4096 / (s->classes + 1) + 1;
}

enum { STRIP = 256, FEW = 8, TRANSPOSED = 8192 };

/* For w positions, whose classes are `stride` apart: the largest score and the logarithm of the sum of exponentials. */
static void column_stats(const float *x, int64_t stride, int64_t classes, int64_t w, float *row_max, float *log_sum)
{
    const ont_simd_table *simd = ont_simd();
    float t[STRIP];
    memcpy(row_max, x, (size_t)w * sizeof *row_max);
    memset(log_sum, 0, (size_t)w * sizeof *log_sum);
    for (int64_t c = 1; c < classes; c++)
        simd->binary[ONT_LOOP_Max][ONT_FLOAT32](row_max, 1, x + c * stride, 1, row_max, w, NULL);
    for (int64_t c = 0; c < classes; c++) {
        simd->binary[ONT_LOOP_Sub][ONT_FLOAT32](x + c * stride, 1, row_max, 1, t, w, NULL);
        simd->unary[ONT_LOOP_Exp][ONT_FLOAT32](t, t, w, NULL);
        simd->add_to(log_sum, t, w);
    }
    simd->unary[ONT_LOOP_Log][ONT_FLOAT32](log_sum, log_sum, w, NULL);
}

/* Rows of few classes are transposed to columns first: a call for each row would take longer than its exponentials. */
static void few_class_stats(const float *x, int64_t classes, int64_t rows, float *stats)
{
    float columns[TRANSPOSED], row_max[STRIP], log_sum[STRIP];
    int64_t strip = TRANSPOSED / classes < STRIP ? TRANSPOSED / classes : STRIP;
    for (int64_t w; rows > 0; rows -= w, x += w * classes, stats += 2 * w) {
        w = rows < strip ? rows : strip;
        for (int64_t c = 0; c < classes; c++)
            for (int64_t i = 0; i < w; i++) columns[c * strip + i] = x[i * classes + c];
        column_stats(columns, strip, classes, w, row_max, log_sum);
        for (int64_t i = 0; i < w; i++) stats[2 * i] = row_max[i], stats[2 * i + 1] = log_sum[i];
    }
}

static void loss_stats_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const loss_state *s = call->state;
    float *stats = stats_of(call), *logp = log_probabilities(call);
    bool few = s->classes <= 48;
    if (few && s->classes)
        few_class_stats((const float *)call->in[0] + first * s->classes, s->classes, last - first, stats + 2 * first);
    for (int64_t i = first; i < last && s->classes && !(few && !logp); i++) {
        const float *x = (const float *)call->in[0] + i * s->classes;
        if (!few) ont_simd()->log_sum_exp(x, s->classes, &stats[2 * i], &stats[2 * i + 1]);
        float *row = logp ? logp + i * s->classes : NULL;
        for (int64_t c = 0; row && c < s->classes; c++) row[c] = (x[c] - stats[2 * i]) - stats[2 * i + 1];
    }
}

static ont_status loss_fast(const ont_call *call)
{
    const loss_state *s = call->state;
    ONT_TRY(ont_labels_check(&s->labels, ont_node_in(call->node, 1), call->in[1]));
    ont_parallel(s->rows, grain(s), loss_stats_rows, (void *)call);
    reduce_f32(call);
    return ONT_OK;
}

/* ---- float32, positions of a class contiguous (images): strips of positions, class by class ---- */

static const char *accept_columns(const ont_node *node)
{
    loss_state s;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32) return "dtype";
    if (read_state(node, &s) != ONT_OK || !s.softmax || !s.classes) return "no softmax over classes";
    return s.inner < FEW ? "few positions lie side by side" : NULL;
}

/* Returns the offset of the first score of strip i; sets its first position and the number of its positions. */
static int64_t strip_at(const loss_state *s, int64_t i, int64_t *position, int64_t *w)
{
    int64_t strips = (s->inner + STRIP - 1) / STRIP, from = i % strips * STRIP, row = i / strips;
    *w = s->inner - from < STRIP ? s->inner - from : STRIP;
    *position = row * s->inner + from;
    return row * s->classes * s->inner + from;
}

static void for_strips(const loss_state *s, ont_range_fn body, void *context)
{
    int64_t w = s->inner < STRIP ? s->inner : STRIP;
    ont_parallel(s->rows * ((s->inner + STRIP - 1) / STRIP), 4096 / (s->classes * w) + 1, body, context);
}

static void strip_stats(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const loss_state *s = call->state;
    const ont_simd_table *simd = ont_simd();
    ont_binary_loop less = simd->binary[ONT_LOOP_Sub][ONT_FLOAT32];
    float row_max[STRIP], sum[STRIP], *logp = log_probabilities(call);
    for (int64_t i = first, position, w; i < last; i++) {
        int64_t at = strip_at(s, i, &position, &w), end = at + s->classes * s->inner;
        const float *x = call->in[0];
        float *stats = (float *)stats_of(call) + 2 * position;
        column_stats(x + at, s->inner, s->classes, w, row_max, sum);
        for (int64_t c = at; logp && c < end; c += s->inner) {
            less(x + c, 1, row_max, 1, logp + c, w, NULL);
            less(logp + c, 1, sum, 1, logp + c, w, NULL);
        }
        for (int64_t j = 0; j < w; j++) stats[2 * j] = row_max[j], stats[2 * j + 1] = sum[j];
    }
}

static ont_status loss_columns(const ont_call *call)
{
    const loss_state *s = call->state;
    ONT_TRY(ont_labels_check(&s->labels, ont_node_in(call->node, 1), call->in[1]));
    for_strips(s, strip_stats, (void *)call);
    reduce_f32(call);
    return ONT_OK;
}

static void grad_strips(void *context, int64_t first, int64_t last)
{
    const grad_job_f32 *job = context;
    const ont_call *call = job->call;
    const loss_state *s = call->state;
    const ont_simd_table *simd = ont_simd();
    ont_binary_loop less = simd->binary[ONT_LOOP_Sub][ONT_FLOAT32];
    float row_max[STRIP], log_sum[STRIP], scale[STRIP], *dx = call->out[0];
    int64_t labels[STRIP];
    for (int64_t i = first, position, w; i < last; i++) {
        int64_t at = strip_at(s, i, &position, &w), end = at + s->classes * s->inner;
        const float *x = call->in[0], *stats = (const float *)call->in[4] + 2 * position;
        for (int64_t j = 0; j < w; j++) {
            labels[j] = ont_label_at(&s->labels, call->in[1], position + j);
            if (!ont_label_counts(&s->labels, labels[j])) labels[j] = -1;
            scale[j] = labels[j] < 0 ? 0 : grad_scale_f32(job, position + j, labels[j]);
            row_max[j] = stats[2 * j];
            log_sum[j] = stats[2 * j + 1];
        }
        for (int64_t c = at; c < end; c += s->inner) {
            less(x + c, 1, row_max, 1, dx + c, w, NULL);
            less(dx + c, 1, log_sum, 1, dx + c, w, NULL);
            simd->unary[ONT_LOOP_Exp][ONT_FLOAT32](dx + c, dx + c, w, NULL);
            simd->binary[ONT_LOOP_Mul][ONT_FLOAT32](dx + c, 1, scale, 1, dx + c, w, NULL);
        }
        for (int64_t j = 0; j < w; j++) {
            if (labels[j] >= 0) dx[at + j + labels[j] * s->inner] -= scale[j];
            for (int64_t c = at; labels[j] < 0 && c < end; c += s->inner) dx[c + j] = 0; /* 0 * NaN is NaN */
        }
    }
}

static ont_status grad_columns(const ont_call *call)
{
    grad_job_f32 job = {call, grad_norm_f32(call)};
    for_strips(call->state, grad_strips, &job);
    return ONT_OK;
}

static const char *accept_any_rows(const ont_node *node)
{
    loss_state s;
    if (has_other_columns(node)) return "columns that are no classes";
    return read_state(node, &s) == ONT_OK && s.inner == 1 && s.softmax ? NULL : "not rows";
}

static const char *accept_rows(const ont_node *node)
{
    return ont_node_in(node, 0)->dtype == ONT_FLOAT32 ? accept_any_rows(node) : "dtype";
}

enum { PIECE = 1024 }; /* Elements of a 16-bit row that are converted to float32 at a time, so that they stay in the
                        * L1 cache. */

/* Scores [at, at + n) of the row in float32; 16 bits are converted to `piece`. */
static const float *scores_at(const ont_score_row *row, int64_t at, int64_t n, float *piece)
{
    if (row->dtype == ONT_FLOAT32) return (const float *)row->x + at;
    const uint16_t *x = (const uint16_t *)row->x + at;
    (row->dtype == ONT_BFLOAT16 ? ont_simd()->bfloat_to_float : ont_simd()->half_to_float)(x, piece, n);
    return piece;
}

void ont_scores_add(const ont_score_row *row, double *row_max, double *sum)
{
    float piece[PIECE], largest, log_sum;
    for (int64_t at = 0; at < row->n; at += PIECE) {
        int64_t n = row->n - at < PIECE ? row->n - at : PIECE;
        ont_simd()->log_sum_exp(scores_at(row, at, n, piece), n, &largest, &log_sum);
        if ((double)largest > *row_max || isnan(largest)) {
            *sum = *sum > 0 ? *sum * exp(*row_max - (double)largest) : *sum;
            *row_max = (double)largest;
        }
        *sum += largest == -INFINITY ? 0 : exp((double)log_sum + ((double)largest - *row_max));
    }
}

void ont_scores_grad(const ont_score_row *row, const float *stats, float scale, int64_t label, ont_dtype to,
                     uint16_t *dx)
{
    const ont_simd_table *simd = ont_simd();
    float piece[PIECE];
    for (int64_t at = 0; at < row->n; at += PIECE) {
        int64_t n = row->n - at < PIECE ? row->n - at : PIECE;
        simd->scaled_softmax(scores_at(row, at, n, piece), stats[0], stats[1], scale, piece, n);
        if (label >= at && label < at + n) piece[label - at] -= scale;
        (to == ONT_BFLOAT16 ? simd->float_to_bfloat : simd->float_to_half)(piece, dx + at, n);
    }
}

static void half_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const loss_state *s = call->state;
    float *stats = stats_of(call);
    for (int64_t i = first; i < last && s->classes; i++) {
        ont_score_row row = {(const uint16_t *)call->in[0] + i * s->classes, s->half, s->classes};
        double row_max = -INFINITY, sum = 0;
        ont_scores_add(&row, &row_max, &sum);
        stats[2 * i] = (float)row_max;
        stats[2 * i + 1] = (float)log(sum);
    }
}

static ont_status loss_half(const ont_call *call)
{
    const loss_state *s = call->state;
    ONT_TRY(ont_labels_check(&s->labels, ont_node_in(call->node, 1), call->in[1]));
    ont_parallel(s->rows, grain(s), half_rows, (void *)call);
    reduce_f32(call);
    return ONT_OK;
}

static const char *accept_half_rows(const ont_node *node)
{
    if (!ont_dtype_is_half(ont_node_in(node, 0)->dtype) || node->outputs[0]->dtype != ONT_FLOAT32) return "dtype";
    if (ont_node_in(node, 2)) return "class weights";
    return node->n_outputs > 1 && node->outputs[1] ? "log-probabilities" : accept_any_rows(node);
}

/* ---- gradients: inputs scores, labels, weights (optional), dloss; SoftmaxCrossEntropyGrad also the statistics ---- */

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    ont_dtype to = (ont_dtype)ont_attr_int(node, "to", x->dtype);
    if (to != x->dtype && (x->dtype != ONT_FLOAT32 || !ont_dtype_is_half(to)))
        return ont_fail(ONT_EUNSUPPORTED, "gradient of %s scores as type %d", ont_dtype_name(x->dtype), (int)to);
    return ont_infer_out(node, 0, to, &x->shape);
}

static ont_status grad_run(const ont_call *call)
{
    const loss_state *s = call->state;
    if (!s->softmax) memset(call->out[0], 0, (size_t)ont_shape_count(&call->node->outputs[0]->shape) *
                                                 ont_dtype_size(call->node->outputs[0]->dtype));
    if (ont_node_in(call->node, 0)->dtype == ONT_FLOAT32) {
        grad_job_f32 job = {call, grad_norm_f32(call)};
        ont_parallel(s->rows * s->inner, grain(s), grad_rows_f32, &job);
    } else {
        grad_job_f64 job = {call, grad_norm_f64(call)};
        ont_parallel(s->rows * s->inner, grain(s), grad_rows_f64, &job);
    }
    return ONT_OK;
}

static void grad_fast_rows(void *context, int64_t first, int64_t last)
{
    const grad_job_f32 *job = context;
    const ont_call *call = job->call;
    const loss_state *s = call->state;
    const float *stats = call->in[4];
    for (int64_t i = first; i < last; i++) {
        int64_t label = ont_label_at(&s->labels, call->in[1], i);
        float *dx = (float *)call->out[0] + i * s->classes;
        if (!ont_label_counts(&s->labels, label)) {
            memset(dx, 0, (size_t)s->classes * sizeof *dx);
            continue;
        }
        float scale = grad_scale_f32(job, i, label);
        const float *x = (const float *)call->in[0] + i * s->classes;
        ont_simd()->scaled_softmax(x, stats[2 * i], stats[2 * i + 1], scale, dx, s->classes);
        dx[label] -= scale;
    }
}

/* The same in 16 bits. */
static void grad_half_rows(void *context, int64_t first, int64_t last)
{
    const grad_job_f32 *job = context;
    const ont_call *call = job->call;
    const loss_state *s = call->state;
    const float *stats = call->in[4];
    ont_dtype dtype = ont_node_in(call->node, 0)->dtype, to = call->node->outputs[0]->dtype;
    for (int64_t i = first; i < last; i++) {
        int64_t label = ont_label_at(&s->labels, call->in[1], i), at = i * s->classes;
        uint16_t *dx = (uint16_t *)call->out[0] + at;
        if (!ont_label_counts(&s->labels, label)) {
            memset(dx, 0, (size_t)s->classes * sizeof *dx);
            continue;
        }
        ont_score_row row = {(const char *)call->in[0] + at * (int64_t)ont_dtype_size(dtype), dtype, s->classes};
        ont_scores_grad(&row, stats + 2 * i, grad_scale_f32(job, i, label), label, to, dx);
    }
}

static ont_status grad_half(const ont_call *call)
{
    const loss_state *s = call->state;
    grad_job_f32 job = {call, grad_norm_f32(call)};
    ont_parallel(s->rows, grain(s), grad_half_rows, &job);
    return ONT_OK;
}

/* Whether the gradient is written in the dtype of the scores. */
static bool same_dtype(const ont_node *node)
{
    return ont_attr_int(node, "to", ont_node_in(node, 0)->dtype) == (int64_t)ont_node_in(node, 0)->dtype;
}

static const char *accept_grad_rows(const ont_node *node)
{
    return same_dtype(node) ? accept_rows(node) : "another dtype";
}

static const char *accept_grad_half(const ont_node *node)
{
    ont_dtype x = ont_node_in(node, 0)->dtype,
              stats = ont_node_in(node, 4) ? ont_node_in(node, 4)->dtype : ONT_UNDEFINED;
    if (ont_dtype_is_half(x))
        return stats == ONT_FLOAT32 && ont_node_in(node, 3)->dtype == ONT_FLOAT32 && same_dtype(node) &&
                       !ont_node_in(node, 2)
                   ? accept_any_rows(node)
                   : "dtypes";
    return same_dtype(node) ? "the dtype of the scores" : accept_rows(node);
}

static const char *accept_ref(const ont_node *node)
{
    return has_other_columns(node) ? "columns that are no classes" : ont_accept_float(node);
}

static const char *accept_grad(const ont_node *node)
{
    return same_dtype(node) ? accept_ref(node) : "another dtype";
}

static const char *accept_grad_columns(const ont_node *node)
{
    return same_dtype(node) ? accept_columns(node) : "another dtype";
}

static ont_status grad_fast(const ont_call *call)
{
    const loss_state *s = call->state;
    grad_job_f32 job = {call, grad_norm_f32(call)};
    ont_parallel(s->rows, grain(s), grad_fast_rows, &job);
    return ONT_OK;
}

static ont_status grad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    loss_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_state(node, s));
    out->state = s;
    return ONT_OK;
}

/* Gradient of the log-probabilities output: d - softmax * (sum of d over the classes). */
static ont_value *log_prob_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *d = GO(1), *sum = ont_build_reduce(b, "ReduceSum", d, &(int64_t){1}, 1, true);
    return ont_build2(b, "Sub", d, ont_build2(b, "Mul", ont_build1(b, "Exp", O(1)), sum));
}

/* SoftmaxCrossEntropyLoss with its third output, in our own domain: the ONNX operator has two outputs. */
static ont_status want_stats(ont_grad *g, ont_value **stats)
{
    ont_node *node = g->node;
    node->op = ont_op_find(ONT_DOMAIN, "SoftmaxCrossEntropyLoss", 1);
    if (!node->op) return ont_fail(ONT_EINTERNAL, "SoftmaxCrossEntropyLoss with its third output is not in the table");
    node->domain = node->op->domain;
    node->version = node->op->since;
    ONT_TRY(ont_node_ensure_output(g->b.graph, node, 2, stats));
    return loss_infer(g->b.graph, node);
}

static void loss_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    bool softmax = is_softmax(g->node);
    bool both = softmax && g->node->n_outputs > 1 && g->out_grads[1];
    ont_value *stats = NULL;
    if (both && !g->out_grads[0]) {
        GI(0, log_prob_grad(g));
        return;
    }
    if (softmax) b->status = want_stats(g, &stats);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {I(0), I(1), I(2), GO(0), stats};
    const char *name = softmax ? "SoftmaxCrossEntropyGrad" : "NegativeLogLikelihoodGrad";
    ont_node *node = ont_build_node(b, ONT_DOMAIN, name, operands, softmax ? 5 : 4, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    ont_value *dx = ont_build_done(b, node);
    GI(0, both ? ont_build2(b, "Add", dx, log_prob_grad(g)) : dx);
}

static const ont_kernel loss_kernels[] = {
    {.name = "cross_entropy_f32_rows", .accept = accept_rows, .prepare = prepare, .run = loss_fast},
    {.name = "cross_entropy_half_rows", .accept = accept_half_rows, .prepare = prepare, .run = loss_half},
    {.name = "cross_entropy_f32_columns", .accept = accept_columns, .prepare = prepare, .run = loss_columns},
    {.name = "cross_entropy_ref", .accept = accept_ref, .prepare = prepare, .run = loss_ref},
};
static const ont_kernel grad_kernels[] = {
    {.name = "cross_entropy_grad_f32_rows", .accept = accept_grad_rows, .prepare = grad_prepare, .run = grad_fast,
     .inplace = 1},
    {.name = "cross_entropy_grad_half", .accept = accept_grad_half, .prepare = grad_prepare, .run = grad_half,
     .inplace = 1},
    {.name = "cross_entropy_grad_f32_columns", .accept = accept_grad_columns, .prepare = grad_prepare,
     .run = grad_columns, .inplace = 1},
    {.name = "cross_entropy_grad_ref", .accept = accept_grad, .prepare = grad_prepare, .run = grad_run, .inplace = 1},
};

#define LOSS_OP(domain_, name_, suffix_, since_, attributes_) \
    const ont_op ont_op_##name_##suffix_ = {.domain = domain_, .name = #name_, .since = since_, .min_inputs = 2, \
                                            .max_inputs = 3, .nondiff_inputs = 6, .attributes = attributes_, \
                                            .infer = loss_infer, .grad = loss_grad, .rows = ONT_ROWS_LOSS, \
                                            ONT_KERNELS(loss_kernels)}
#define LOSS_GRAD_OP(name_, operands) \
    const ont_op ont_op_##name_ = {.domain = ONT_DOMAIN, .name = #name_, .since = 1, .min_inputs = operands, \
                                   .max_inputs = operands, .attributes = "ignore_index:i reduction:s to:i classes:i", \
                                   .infer = grad_infer, \
                                   ONT_KERNELS(grad_kernels)}
LOSS_OP("", SoftmaxCrossEntropyLoss, , 12, "ignore_index:i reduction:s");
LOSS_OP("", NegativeLogLikelihoodLoss, , 12, "ignore_index:i reduction:s");
LOSS_OP(ONT_DOMAIN, SoftmaxCrossEntropyLoss, Pairs, 1, "ignore_index:i reduction:s stash_type:i classes:i");
LOSS_GRAD_OP(SoftmaxCrossEntropyGrad, 5);
LOSS_GRAD_OP(NegativeLogLikelihoodGrad, 4);
