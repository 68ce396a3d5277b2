/*
 * NonMaxSuppression: for each batch and class, boxes by falling score; a box is dropped that overlaps a kept one too
 * much. NmsFull writes as many rows as there can be, and their number; a Slice by that number follows.
 */
#include <string.h>

#include "ops/support/compose.h"
#include "ops/vision/boxes.h"

/* NmsFull(boxes, scores, max_boxes, iou, score) -> (rows, 3) and the number of valid rows (1); the limits are run-time
 * values. */
static ont_status nms_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *boxes = ont_node_in(node, 0), *scores = ont_node_in(node, 1);
    if (boxes->dtype != ONT_FLOAT32 || scores->dtype != ONT_FLOAT32)
        return ont_fail(ONT_ETYPE, "boxes are %s and scores %s, float is expected", ont_dtype_name(boxes->dtype),
                        ont_dtype_name(scores->dtype));
    if (boxes->shape.rank != 3 || scores->shape.rank != 3 || boxes->shape.dims[2] != 4 ||
        boxes->shape.dims[0] != scores->shape.dims[0] || boxes->shape.dims[1] != scores->shape.dims[2]) {
        char a[ONT_SHAPE_TEXT], b[ONT_SHAPE_TEXT];
        return ont_fail(ONT_EINVAL, "boxes are %s and scores %s, expected [batch, n, 4] and [batch, classes, n]",
                        ont_shape_text(&boxes->shape, a), ont_shape_text(&scores->shape, b));
    }
    for (uint32_t i = 2; i < 5; i++) {
        const ont_value *limit = ont_node_in(node, i);
        if (!limit) continue;
        if (limit->dtype != (i == 2 ? ONT_INT64 : ONT_FLOAT32) || ont_shape_count(&limit->shape) != 1)
            return ont_fail(ONT_EINVAL, "input %u is %s of %lld entries", i, ont_dtype_name(limit->dtype),
                            (long long)ont_shape_count(&limit->shape));
    }
    ONT_TRY(ont_infer_out(node, 0, ONT_INT64, &(ont_shape){2, {ont_shape_count(&scores->shape), 3}}));
    return ont_infer_out(node, 1, ONT_INT64, &(ont_shape){1, {1}});
}

/* Candidates by falling score, equal scores by index, NaN last: a bottom-up merge sort. */
static bool is_before(float left, float right) { return left >= right || right != right; }

static int64_t *by_score(const float *scores, int64_t *a, int64_t *b, int64_t n)
{
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t first = 0; first < n; first += 2 * width) {
            int64_t middle = first + width < n ? first + width : n, last = middle + width < n ? middle + width : n;
            for (int64_t left = first, right = middle, at = first; at < last; at++)
                b[at] = left < middle && (right >= last || is_before(scores[a[left]], scores[a[right]])) ? a[left++]
                                                                                                : a[right++];
        }
        int64_t *swap = a;
        a = b;
        b = swap;
    }
    return a;
}

typedef struct nms_limits {
    int64_t max_boxes;
    double iou, score;
    bool has_score, centre;
} nms_limits;

/* One batch and class: writes the chosen boxes to `kept`. Returns their number. */
static int64_t suppress(const float *boxes, const float *scores, int64_t n, const nms_limits *limits, int64_t *work,
                        int64_t *kept)
{
    int64_t candidates = 0, count = 0;
    for (int64_t i = 0; i < n; i++)
        if (!limits->has_score || (double)scores[i] > limits->score) work[candidates++] = i;
    const int64_t *order = by_score(scores, work, work + n, candidates);
    for (int64_t c = 0; c < candidates && count < limits->max_boxes; c++) {
        bool keep = true;
        for (int64_t k = 0; k < count && keep; k++)
            keep = ont_box_overlap(boxes + 4 * order[c], boxes + 4 * kept[k], limits->centre) <= limits->iou;
        if (keep) kept[count++] = order[c];
    }
    return count;
}

static ont_status nms_run(const ont_call *call)
{
    const ont_shape *shape = &call->node->inputs[1].value->shape;
    int64_t batches = shape->dims[0], classes = shape->dims[1], n = shape->dims[2], row = 0;
    uint32_t given = call->node->n_inputs;
    nms_limits limits = {.max_boxes = given > 2 && call->in[2] ? *(const int64_t *)call->in[2] : 0,
                         .iou = given > 3 && call->in[3] ? (double)*(const float *)call->in[3] : 0,
                         .has_score = given > 4 && call->in[4],
                         .centre = ont_attr_int(call->node, "center_point_box", 0)};
    if (limits.has_score) limits.score = (double)*(const float *)call->in[4];
    int64_t *out = call->out[0], *work = call->work, *kept = work + 2 * n;
    for (int64_t b = 0; b < batches; b++)
        for (int64_t c = 0; c < classes; c++) {
            const float *boxes = (const float *)call->in[0] + 4 * n * b;
            const float *scores = (const float *)call->in[1] + n * (b * classes + c);
            int64_t count = suppress(boxes, scores, n, &limits, work, kept);
            for (int64_t k = 0; k < count; k++, row++)
                memcpy(out + 3 * row, (int64_t[]){b, c, kept[k]}, 3 * sizeof *out);
        }
    if (call->out[1]) *(int64_t *)call->out[1] = row; /* absent where it has no user left */
    memset(out + 3 * row, 0, (size_t)(batches * classes * n - row) * 3 * sizeof *out);
    return ONT_OK;
}

static ont_status nms_prepare(const ont_node *node, ont_arena *arena, ont_prepared *prepared)
{
    (void)arena;
    prepared->work_bytes = (size_t)node->inputs[1].value->shape.dims[2] * 3 * sizeof(int64_t);
    return ONT_OK;
}

static void nms_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *inputs[5];
    for (uint32_t i = 0; i < 5; i++) inputs[i] = ont_node_in(node, i);
    ont_node *full = ont_build_node(b, ONT_DOMAIN, "NmsFull", inputs, node->n_inputs, 2);
    if (full) b->status = ont_attr_copy_all(b->graph, full, node);
    if (!ont_build_done(b, full)) return;
    b->deferred = true;
    int64_t zero = 0;
    outputs[0] = ont_build3(b, "Slice", full->outputs[0], ont_build_const_ints(b, &zero, 1), full->outputs[1]);
}

static const ont_kernel nms_kernels[] = {
    {.name = "nms_ref", .accept = ont_accept_any, .prepare = nms_prepare, .run = nms_run}};
const ont_op ont_op_NonMaxSuppression = {.domain = "", .name = "NonMaxSuppression", .since = 10, .min_inputs = 2,
                                         .max_inputs = 5, .flags = ONT_OP_NO_GRAD, .attributes = "center_point_box:i",
                                         .expand = nms_expand};
const ont_op ont_op_NmsFull = {.domain = ONT_DOMAIN, .name = "NmsFull", .since = 1, .min_inputs = 2, .max_inputs = 5,
                               .flags = ONT_OP_NO_GRAD, .attributes = "center_point_box:i", .infer = nms_infer,
                               ONT_KERNELS(nms_kernels)};
