/*
 * Regions of interest: RoiAlign, which samples between cells, and MaxRoiPool, which takes whole cells. Gradients go to
 * the features alone, as in torchvision. Sources: He et al., Mask R-CNN, 2017; Girshick, Fast R-CNN, 2015.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/vision/vision.h"

static ont_status read_align(const ont_node *node, ont_rois *s)
{
    const char *mode = ont_attr_string(node, "mode", "avg");
    /* Before opset 16, coordinates were not shifted by half a cell. */
    int64_t version = ont_attr_int(node, "version", node->version);
    const char *coordinates = ont_attr_string(node, "coordinate_transformation_mode",
                                              version < 16 ? "output_half_pixel" : "half_pixel");
    s->align = true;
    s->maximum = !strcmp(mode, "max");
    s->half_pixel = !strcmp(coordinates, "half_pixel");
    s->out_h = ont_attr_int(node, "output_height", 1);
    s->out_w = ont_attr_int(node, "output_width", 1);
    s->sampling = ont_attr_int(node, "sampling_ratio", 0);
    if (!s->maximum && strcmp(mode, "avg")) return ont_fail(ONT_EINVAL, "mode is '%s', expected avg or max", mode);
    if (!s->half_pixel && strcmp(coordinates, "output_half_pixel"))
        return ont_fail(ONT_EINVAL, "coordinate_transformation_mode is '%s', expected half_pixel or output_half_pixel",
                        coordinates);
    if (s->sampling < 0 || s->sampling > ONT_ROI_SAMPLES)
        return ont_fail(ONT_EINVAL, "sampling_ratio is %" PRId64 ", expected 0 to %d", s->sampling, ONT_ROI_SAMPLES);
    return ONT_OK;
}

static ont_status read_node(const ont_node *node, ont_rois *s)
{
    ont_value *x, *rois, *batch;
    bool align = ONT_IS(node, RoiAlign) || ONT_IS(node, RoiAlignGrad);
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &rois));
    if (x->shape.rank != 4) return ont_fail(ONT_EINVAL, "the input has rank %d, expected 4", x->shape.rank);
    const int64_t *d = x->shape.dims;
    *s = (ont_rois){.n = d[0], .c = d[1], .height = d[2], .width = d[3],
                       .scale = ont_attr_float(node, "spatial_scale", 1)};
    if (align) {
        ONT_TRY(read_align(node, s));
        ONT_TRY(ont_need_input(node, 2, &batch));
        if (batch->dtype != ONT_INT64)
            return ont_fail(ONT_ETYPE, "batch_indices are %s, expected int64", ont_dtype_name(batch->dtype));
        if (batch->shape.rank != 1 || rois->shape.rank != 2 || batch->shape.dims[0] != rois->shape.dims[0])
            return ont_fail(ONT_EINVAL,
                            "rois must be a matrix and batch_indices a vector of as many entries as rois has rows");
    } else {
        int64_t pooled[ONT_MAX_RANK];
        int n;
        ONT_TRY(ont_const_ints(node, -1, "pooled_shape", pooled, ONT_MAX_RANK, &n));
        if (n != 2) return ont_fail(ONT_EINVAL, "pooled_shape has %d entries, expected 2", n < 0 ? 0 : n);
        s->out_h = pooled[0];
        s->out_w = pooled[1];
    }
    if (rois->shape.rank != 2 || rois->shape.dims[1] != (align ? 4 : 5))
        return ont_fail(ONT_EINVAL, "rois must have %d columns", align ? 4 : 5);
    if (rois->dtype != x->dtype)
        return ont_fail(ONT_ETYPE, "rois are %s, the input %s", ont_dtype_name(rois->dtype), ont_dtype_name(x->dtype));
    if (s->out_h < 1 || s->out_w < 1 || s->out_h > INT32_MAX || s->out_w > INT32_MAX)
        return ont_fail(ONT_EINVAL, "the output would have (%" PRId64 ", %" PRId64 ") bins, expected 1 to %d each",
                        s->out_h, s->out_w, INT32_MAX);
    s->rois = rois->shape.dims[0];
    if (s->rois && (!s->height || !s->width)) return ont_fail(ONT_EINVAL, "the planes of the input are empty");
    return ONT_OK;
}

static ont_status infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_rois s;
    ONT_TRY(read_node(node, &s));
    ont_shape shape = {.rank = 4, .dims = {s.rois, s.c, s.out_h, s.out_w}};
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

/* (x, rois, optional batch_indices, dy) -> dx */
static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &ont_node_in(node, 0)->shape);
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_rois *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_node(node, s));
    out->state = s;
    return ONT_OK;
}

/* ---- one region ---- */

typedef struct region {
    int64_t image;
    double top, left, bin_h, bin_w;
    int64_t grid_h, grid_w; /* RoiAlign: samples along the sides of a bin */

} region;

static double number(const ont_call *call, uint32_t input, int64_t at)
{
    const void *data = call->in[input];
    return ont_node_in(call->node, input)->dtype == ONT_FLOAT32 ? (double)((const float *)data)[at]
                                                                : ((const double *)data)[at];
}

static ont_status read_region(const ont_call *call, int64_t r, region *out)
{
    const ont_rois *s = call->state;
    double box[4];
    int64_t columns = s->align ? 4 : 5;
    double image = s->align ? (double)((const int64_t *)call->in[2])[r] : number(call, 1, r * columns);
    if (!(image >= 0 && image < (double)s->n))
        return ont_fail(ONT_EINDEX, "region %" PRId64 " is in image %g, but there are %" PRId64 " images", r, image,
                        s->n);
    for (int i = 0; i < 4; i++) {
        box[i] = number(call, 1, r * columns + columns - 4 + i) * s->scale;
        if (!(fabs(box[i]) < 1e9))
            return ont_fail(ONT_EINVAL, "region %" PRId64 " has an edge at %g, expected less than 1e9", r, box[i]);
        box[i] = s->align ? box[i] - (s->half_pixel ? 0.5 : 0) : round(box[i]);
    }
    double width = box[2] - box[0], height = box[3] - box[1];
    *out = (region){.image = (int64_t)image, .top = box[1], .left = box[0]};
    if (!s->align) {
        width = fmax(width + 1, 1);
        height = fmax(height + 1, 1);
    } else if (!s->half_pixel) {
        width = fmax(width, 1);
        height = fmax(height, 1);
    }
    out->bin_h = height / (double)s->out_h;
    out->bin_w = width / (double)s->out_w;
    if (!s->align) return ONT_OK;
    out->grid_h = s->sampling ? s->sampling : (int64_t)fmax(ceil(out->bin_h), 0);
    out->grid_w = s->sampling ? s->sampling : (int64_t)fmax(ceil(out->bin_w), 0);
    if (out->grid_h > ONT_ROI_SAMPLES || out->grid_w > ONT_ROI_SAMPLES)
        return ont_fail(ONT_EINVAL, "region %" PRId64 " has %g x %g cells, which is too many", r, height, width);
    return ONT_OK;
}

/* The four cells around a sample; false where it is outside, and reads as zero. */
static bool sample_at(const ont_rois *s, double y, double x, int64_t *cell, double *weight)
{
    if (y < -1 || y > (double)s->height || x < -1 || x > (double)s->width) return false;
    y = fmax(y, 0);
    x = fmax(x, 0);
    int64_t top = (int64_t)y, left = (int64_t)x, bottom = top + 1, right = left + 1;
    if (top >= s->height - 1) bottom = top = s->height - 1, y = (double)top;
    if (left >= s->width - 1) right = left = s->width - 1, x = (double)left;
    double fy = y - (double)top, fx = x - (double)left;
    cell[0] = top * s->width + left, weight[0] = (1 - fy) * (1 - fx);
    cell[1] = top * s->width + right, weight[1] = (1 - fy) * fx;
    cell[2] = bottom * s->width + left, weight[2] = fy * (1 - fx);
    cell[3] = bottom * s->width + right, weight[3] = fy * fx;
    return true;
}

/* The whole cells of bin (i, j), clipped to the image. */
static void cells_of(const ont_rois *s, const region *r, int64_t i, int64_t j, int64_t *rows, int64_t *columns)
{
    double top = floor((double)i * r->bin_h) + r->top, bottom = ceil((double)(i + 1) * r->bin_h) + r->top;
    double left = floor((double)j * r->bin_w) + r->left, right = ceil((double)(j + 1) * r->bin_w) + r->left;
    rows[0] = (int64_t)fmin(fmax(top, 0), (double)s->height),
    rows[1] = (int64_t)fmin(fmax(bottom, 0), (double)s->height);
    columns[0] = (int64_t)fmin(fmax(left, 0), (double)s->width),
    columns[1] = (int64_t)fmin(fmax(right, 0), (double)s->width);
}

/*
 * One bin of one channel: returns its value or, with dx, adds the gradient dy to its cells. As in the ONNX reference, a
 * maximum is over weighted cells; the first of equals wins.
 */
#define BIN(suffix, type) \
    static double align_##suffix(const ont_rois *s, const region *r, int64_t i, int64_t j, const type *x, type *dx, \
                                 double dy) \
    { \
        double value = 0, weight[4], count = fmax((double)(r->grid_h * r->grid_w), 1), best_weight = 0; \
        int64_t cell[4], best = -1; \
        bool any = false; \
        for (int64_t a = 0; a < r->grid_h; a++) \
            for (int64_t b = 0; b < r->grid_w; b++) { \
                double py = r->top + ((double)i + ((double)a + 0.5) / (double)r->grid_h) * r->bin_h; \
                double px = r->left + ((double)j + ((double)b + 0.5) / (double)r->grid_w) * r->bin_w; \
                bool inside = sample_at(s, py, px, cell, weight); \
                for (int t = 0; t < 4; t++) { \
                    double w = inside ? weight[t] : 0, v = inside ? w * (double)x[cell[t]] : 0; \
                    if (!s->maximum && !dx) value += v; \
                    if (!s->maximum && dx && inside) dx[cell[t]] += (type)(dy * w / count); \
                    if (s->maximum && (!any || v > value)) \
                        value = v, best = inside ? cell[t] : -1, best_weight = w, any = true; \
                } \
            } \
        if (s->maximum && dx && best >= 0) dx[best] += (type)(dy * best_weight); \
        return s->maximum ? value : value / count; \
    } \
    static double cells_##suffix(const ont_rois *s, const region *r, int64_t i, int64_t j, const type *x, type *dx, \
                                 double dy) \
    { \
        int64_t rows[2], columns[2], best = -1; \
        cells_of(s, r, i, j, rows, columns); \
        for (int64_t a = rows[0]; a < rows[1]; a++) \
            for (int64_t b = columns[0]; b < columns[1]; b++) \
                if (best < 0 || x[a * s->width + b] > x[best]) best = a * s->width + b; \
        if (dx && best >= 0) dx[best] += (type)dy; \
        return best < 0 ? 0 : (double)x[best]; \
    } \
    /* Channels [first, last) of every region. */ \
    static void channels_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_rois *s = call->state; \
        bool backward = *call->node->op->domain != '\0'; \
        int64_t plane = s->height * s->width, bins = s->out_h * s->out_w; \
        for (int64_t n = 0; backward && n < s->n; n++) \
            memset((type *)call->out[0] + (n * s->c + first) * plane, 0, (size_t)((last - first) * plane) * \
                   sizeof(type)); \
        for (int64_t r = 0; r < s->rois; r++) { \
            region box; \
            if (read_region(call, r, &box) != ONT_OK) return; /* forward has checked it */ \
            for (int64_t c = first; c < last; c++) { \
                const type *x = (const type *)call->in[0] + (box.image * s->c + c) * plane; \
                type *dx = backward ? (type *)call->out[0] + (box.image * s->c + c) * plane : NULL; \
                for (int64_t k = 0; k < bins; k++) { \
                    int64_t at = (r * s->c + c) * bins + k; \
                    double dy = backward ? (double)((const type *)call->in[3])[at] : 0; \
                    double y = (s->align ? align_##suffix : cells_##suffix)(s, &box, k / s->out_w, k % s->out_w, x, \
                                                                            dx, dy); \
                    if (!backward) ((type *)call->out[0])[at] = (type)y; \
                } \
            } \
        } \
    }
BIN(f32, float)
BIN(f64, double)

static ont_status run(const ont_call *call)
{
    const ont_rois *s = call->state;
    region box;
    for (int64_t r = 0; r < s->rois; r++) ONT_TRY(read_region(call, r, &box));
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ont_parallel(s->c, 4096 / (s->rois * s->out_h * s->out_w + 1) + 1, f32 ? channels_f32 : channels_f64, (void *)call);
    return ONT_OK;
}

static void grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *operands[] = {I(0), I(1), I(2), GO(0)};
    if (b->status != ONT_OK) return;
    bool align = ONT_IS(g->node, RoiAlign);
    ont_node *node = ont_build_node(b, ONT_DOMAIN, align ? "RoiAlignGrad" : "MaxRoiPoolGrad", operands, 4, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (align && b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "version", g->node->version);
    GI(0, ont_build_done(b, node));
}

#define ALIGN_ATTRIBUTES \
    "coordinate_transformation_mode:s mode:s output_height:i output_width:i sampling_ratio:i spatial_scale:f"
#define POOL_ATTRIBUTES "pooled_shape:I spatial_scale:f"
static const ont_kernel kernels[] = {{.name = "roi_ref", .accept = ont_accept_float, .prepare = prepare, .run = run}};
static const ont_kernel grad_kernels[] = {{.name = "roi_grad_ref", .accept = ont_accept_float, .prepare = prepare,
                                           .run = run}};
const ont_op ont_op_RoiAlign = {.domain = "", .name = "RoiAlign", .since = 10, .min_inputs = 3, .max_inputs = 3,
                                .nondiff_inputs = 6, .attributes = ALIGN_ATTRIBUTES, .infer = infer, .grad = grad,
                                ONT_KERNELS(kernels)};
const ont_op ont_op_RoiAlignGrad = {.domain = ONT_DOMAIN, .name = "RoiAlignGrad", .since = 1, .min_inputs = 4,
                                    .max_inputs = 4, .attributes = ALIGN_ATTRIBUTES " version:i", .infer = grad_infer,
                                    ONT_KERNELS(grad_kernels)};
const ont_op ont_op_MaxRoiPool = {.domain = "", .name = "MaxRoiPool", .since = 1, .min_inputs = 2, .max_inputs = 2,
                                  .nondiff_inputs = 2, .attributes = POOL_ATTRIBUTES, .infer = infer, .grad = grad,
                                  ONT_KERNELS(kernels)};
const ont_op ont_op_MaxRoiPoolGrad = {.domain = ONT_DOMAIN, .name = "MaxRoiPoolGrad", .since = 1, .min_inputs = 4,
                                      .max_inputs = 4, .attributes = POOL_ATTRIBUTES, .infer = grad_infer,
                                      ONT_KERNELS(grad_kernels)};
