/*
 * GridSample: y[n, c, p] samples x[n, c] at the point grid[n, p]; AffineGrid makes such points from a matrix. The
 * gradient of the grid comes from the derivatives of the weights. Source: Jaderberg et al., Spatial Transformer
 * Networks, 2015.
 */
#include <inttypes.h>
#include <string.h>

#include "base/int_math.h"
#include "base/parallel.h"
#include "ops/support/compose.h"
#include "ops/support/sample_axis.h"
#include "ops/vision/vision.h"

enum { BLOCK = 16 }; /* points whose taps are kept while all channels use them */

typedef struct grid_block {
    int taps[BLOCK];
    int each; /* number of taps of every point, or -1 where points differ */
    int64_t index[BLOCK * ONT_SAMPLE_TAPS]; /* [point][tap], a point having ONT_SAMPLE_TAPS places */
    double weight[BLOCK * ONT_SAMPLE_TAPS];
    double slope[ONT_SAMPLE_RANK * BLOCK * ONT_SAMPLE_TAPS];
} grid_block;

static ont_status read_attributes(const ont_node *node, ont_sampler *s)
{
    const char *mode = ont_attr_string(node, "mode", "linear"),
               *padding = ont_attr_string(node, "padding_mode", "zeros");
    if (!strcmp(mode, "nearest"))
        s->mode = ONT_SAMPLE_NEAREST;
    else if (!strcmp(mode, "linear") || !strcmp(mode, "bilinear"))
        s->mode = ONT_SAMPLE_LINEAR;
    else if (!strcmp(mode, "cubic") || !strcmp(mode, "bicubic"))
        s->mode = ONT_SAMPLE_CUBIC;
    else
        return ont_fail(ONT_EINVAL, "mode is '%s', expected nearest, linear or cubic", mode);
    if (!strcmp(padding, "zeros"))
        s->padding = ONT_SAMPLE_ZEROS;
    else if (!strcmp(padding, "border"))
        s->padding = ONT_SAMPLE_BORDER;
    else if (!strcmp(padding, "reflection"))
        s->padding = ONT_SAMPLE_REFLECTION;
    else
        return ont_fail(ONT_EINVAL, "padding_mode is '%s', expected zeros, border or reflection", padding);
    s->corners = ont_attr_int(node, "align_corners", 0) != 0;
    return ONT_OK;
}

static ont_status read_node(const ont_node *node, const ont_value *x, const ont_value *grid, ont_grid *s)
{
    *s = (ont_grid){.sampler = {.rank = x->shape.rank - 2}};
    ONT_TRY(read_attributes(node, &s->sampler));
    if (s->sampler.rank < 1) return ont_fail(ONT_EINVAL, "the input has rank %d, expected 3 or more", x->shape.rank);
    if (s->sampler.rank > ONT_SAMPLE_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "%d spatial dims, 1 to 3 are supported", s->sampler.rank);
    if (grid->shape.rank != x->shape.rank || grid->shape.dims[0] != x->shape.dims[0] ||
        grid->shape.dims[grid->shape.rank - 1] != s->sampler.rank)
        return ont_fail(ONT_EINVAL, "the grid does not fit an input of %d spatial dims", s->sampler.rank);
    if (!ont_dtype_is_float(grid->dtype))
        return ont_fail(ONT_ETYPE, "the grid is %s, expected a float", ont_dtype_name(grid->dtype));
    s->n = x->shape.dims[0];
    s->c = x->shape.dims[1];
    s->cells = ont_shape_count_range(&x->shape, 2, x->shape.rank);
    s->points = ont_shape_count_range(&grid->shape, 1, grid->shape.rank - 1);
    if (!s->cells && s->points && s->n && s->c) return ont_fail(ONT_EINVAL, "the planes of the input are empty");
    s->max_taps = 1;
    for (int d = 0; d < s->sampler.rank; d++) {
        s->sampler.dims[d] = x->shape.dims[d + 2];
        s->max_taps *= s->sampler.mode == ONT_SAMPLE_CUBIC ? 4 : s->sampler.mode == ONT_SAMPLE_LINEAR ? 2 : 1;
    }
    return ONT_OK;
}

static ont_status infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *grid;
    ont_grid s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &grid));
    ONT_TRY(read_node(node, x, grid, &s));
    ont_shape shape = x->shape;
    for (int d = 0; d < s.sampler.rank; d++) shape.dims[d + 2] = grid->shape.dims[d + 1];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

/* (x, grid, dy) -> dx, dgrid */
static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *x = ont_node_in(node, 0), *grid = ont_node_in(node, 1);
    ONT_TRY(ont_infer_out(node, 0, x->dtype, &x->shape));
    return ont_infer_out(node, 1, grid->dtype, &grid->shape);
}

static const char *accept_float(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (dtype != ONT_FLOAT32 && dtype != ONT_FLOAT64) return "dtype";
    return ont_node_in(node, 1)->dtype == dtype ? NULL : "the grid has another dtype";
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_grid *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_node(node, ont_node_in(node, 0), ont_node_in(node, 1), s));
    out->state = s;
    return ONT_OK;
}

/* The grid's coordinates begin with the last dim, and are in [-1, 1]. */
static void read_block(const ont_call *call, const void *grid, int64_t first, int64_t n, bool slopes, grid_block *block)
{
    const ont_grid *s = call->state;
    const ont_sampler *sampler = &s->sampler;
    bool f32 = ont_node_in(call->node, 1)->dtype == ONT_FLOAT32;
    for (int64_t p = 0; p < n; p++) {
        double x[ONT_SAMPLE_RANK];
        for (int d = 0; d < sampler->rank; d++) {
            int64_t at = (first + p) * sampler->rank + sampler->rank - 1 - d;
            double u = f32 ? (double)((const float *)grid)[at] : ((const double *)grid)[at];
            x[d] = (u + 1) * ont_sample_unit(sampler, d) - (sampler->corners ? 0 : 0.5);
        }
        block->taps[p] = ont_sample_taps(sampler, x, block->index + p * s->max_taps, block->weight + p * s->max_taps,
                                         slopes ? block->slope + p * s->max_taps : NULL, BLOCK * ONT_SAMPLE_TAPS);
        block->each = !p || block->taps[p] == block->each ? block->taps[p] : -1;
    }
}

#define GRID_SAMPLE(suffix, type) \
    /* Adds over the taps of one point, which begin at `from` in the block's arrays. */ \
    static inline __attribute__((always_inline)) double sum_of_##suffix(const grid_block *block, const type *x, \
                                                                        int taps, int64_t from) \
    { \
        double sum = 0; \
        for (int64_t t = from; t < from + taps; t++) sum += block->weight[t] * (double)x[block->index[t]]; \
        return sum; \
    } \
    static inline __attribute__((always_inline)) void add_to_##suffix( \
        const grid_block *block, const type *x, int taps, int64_t from, double dy, double *sums) \
    { \
        for (int64_t t = from; t < from + taps; t++) sums[t] += dy * (double)x[block->index[t]]; \
    } \
    /* Points [first, last) of all images: computes y, or dgrid from dy. */ \
    static void points_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_grid *s = call->state; \
        grid_block block; \
        bool backward = call->node->n_outputs > 1; \
        int rank = s->sampler.rank; \
        for (int64_t p = first, n; p < last; p += n) { \
            int64_t image = p / s->points, at = p % s->points; \
            n = ont_min(ont_min(BLOCK, last - p), s->points - at); \
            read_block(call, call->in[1], p, n, backward, &block); \
            double sums[BLOCK * ONT_SAMPLE_TAPS]; /* sum of x * dy at each tap, over channels */ \
            for (int64_t i = 0; backward && i < n * s->max_taps; i++) sums[i] = 0; \
            for (int64_t c = 0; c < s->c; c++) { \
                const type *x = (const type *)call->in[0] + (image * s->c + c) * s->cells; \
                int64_t to = (image * s->c + c) * s->points + at; \
                type *y = backward ? NULL : (type *)call->out[0] + to; \
                const type *dy = backward ? (const type *)call->in[2] + to : NULL; \
                if (!backward && block.each == 1 && s->sampler.mode == ONT_SAMPLE_NEAREST) \
                    for (int64_t k = 0; k < n; k++) y[k] = x[block.index[k]]; \
                else if (!backward && block.each == 4 && s->max_taps == 4) \
                    for (int64_t k = 0; k < n; k++) y[k] = (type)sum_of_##suffix(&block, x, 4, k * 4); \
                else if (!backward) \
                    for (int64_t k = 0; k < n; k++) \
                        y[k] = (type)sum_of_##suffix(&block, x, block.taps[k], k * s->max_taps); \
                else if (block.each == 4 && s->max_taps == 4) \
                    for (int64_t k = 0; k < n; k++) add_to_##suffix(&block, x, 4, k * 4, (double)dy[k], sums); \
                else \
                    for (int64_t k = 0; k < n; k++) \
                        add_to_##suffix(&block, x, block.taps[k], k * s->max_taps, (double)dy[k], sums); \
            } \
            for (int64_t k = 0; backward && k < n; k++) \
                for (int d = 0; d < rank; d++) { \
                    const double *slope = block.slope + d * BLOCK * ONT_SAMPLE_TAPS + k * s->max_taps; \
                    double sum = 0; \
                    for (int t = 0; t < block.taps[k]; t++) sum += slope[t] * sums[k * s->max_taps + t]; \
                    ((type *)call->out[1])[(p + k) * rank + rank - 1 - d] = (type)(sum * \
                                                                                   ont_sample_unit(&s->sampler, d)); \
                } \
        } \
    } \
    /* Planes [first, last) of dx: every point of dy is added to its taps. */ \
    static void planes_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_grid *s = call->state; \
        grid_block block; \
        type *dx = (type *)call->out[0]; \
        memset(dx + first * s->cells, 0, (size_t)((last - first) * s->cells) * sizeof *dx); \
        for (int64_t plane = first, end; plane < last; plane = end) { \
            int64_t image = plane / s->c; \
            end = ont_min(last, (image + 1) * s->c); \
            for (int64_t p = 0, n; p < s->points; p += n) { \
                n = ont_min(BLOCK, s->points - p); \
                read_block(call, call->in[1], image * s->points + p, n, false, &block); \
                for (int64_t k = 0; k < n; k++) /* a point with a NaN coordinate gave NaN in y, and has no cell */ \
                    if (block.taps[k] && block.weight[k * s->max_taps] != block.weight[k * s->max_taps]) \
                        block.taps[k] = 0; \
                for (int64_t c = plane; c < end; c++) { \
                    const type *dy = (const type *)call->in[2] + c * s->points + p; \
                    type *to = dx + c * s->cells; \
                    for (int64_t k = 0; k < n; k++) { \
                        const int64_t *index = block.index + k * s->max_taps; \
                        const double *weight = block.weight + k * s->max_taps; \
                        int taps = block.taps[k]; \
                        if (taps == 4) \
                            for (int t = 0; t < 4; t++) to[index[t]] += (type)weight[t] * dy[k]; \
                        else \
                            for (int t = 0; t < taps; t++) to[index[t]] += (type)weight[t] * dy[k]; \
                    } \
                } \
            } \
        } \
    }
GRID_SAMPLE(f32, float)
GRID_SAMPLE(f64, double)

static ont_status run(const ont_call *call)
{
    const ont_grid *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ont_parallel(s->n * s->points, 4096 / (s->c + 1) + BLOCK, f32 ? points_f32 : points_f64, (void *)call);
    return ONT_OK;
}

static ont_status grad_run(const ont_call *call)
{
    const ont_grid *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    if (call->out[0])
        ont_parallel(s->n * s->c, 4096 / (s->points + 1) + 1, f32 ? planes_f32 : planes_f64, (void *)call);
    if (!call->out[1]) return ONT_OK;
    if (s->sampler.mode != ONT_SAMPLE_NEAREST) return run(call);
    memset(call->out[1], 0, (size_t)(s->n * s->points * s->sampler.rank) * (f32 ? sizeof(float) : sizeof(double)));
    return ONT_OK;
}

static void grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *operands[] = {I(0), I(1), GO(0)};
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "GridSampleGrad", operands, 3, 2);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (!ont_build_done(b, node)) return;
    GI(0, node->outputs[0]);
    GI(1, node->outputs[1]);
}

/* ---- AffineGrid ---- */

static ont_status affine_sizes(const ont_node *node, const ont_shape *theta, ont_shape *grid)
{
    int64_t sizes[ONT_MAX_RANK];
    int n, rank;
    ONT_TRY(ont_const_ints(node, 1, NULL, sizes, ONT_MAX_RANK, &n));
    rank = n - 2;
    if (rank != 2 && rank != 3) return ont_fail(ONT_EINVAL, "size has %d entries, expected 4 or 5", n);
    if (theta->rank != 3 || theta->dims[0] != sizes[0] || theta->dims[1] != rank || theta->dims[2] != rank + 1)
        return ont_fail(ONT_EINVAL, "theta does not have the shape (%" PRId64 ", %d, %d)", sizes[0], rank, rank + 1);
    *grid = (ont_shape){.rank = n, .dims = {sizes[0]}};
    for (int d = 0; d < rank; d++) {
        grid->dims[d + 1] = sizes[d + 2];
        if (sizes[d + 2] < 0 || sizes[d + 2] > INT32_MAX)
            return ont_fail(ONT_EINVAL, "size[%d] is %" PRId64 ", expected 0 to %d", d + 2, sizes[d + 2], INT32_MAX);
    }
    grid->dims[rank + 1] = rank;
    size_t bytes;
    return ont_shape_bytes(grid, ONT_FLOAT64, &bytes);
}

static ont_status affine_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *theta;
    ont_shape grid;
    ONT_TRY(ont_need_input(node, 0, &theta));
    if (!ont_dtype_is_float(theta->dtype))
        return ont_fail(ONT_ETYPE, "theta is %s, expected a float", ont_dtype_name(theta->dtype));
    ONT_TRY(affine_sizes(node, &theta->shape, &grid));
    return ont_infer_out(node, 0, theta->dtype, &grid);
}

/* Rows (x, y, z, 1), one for each point, times the transposed matrices. */
static void affine_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *theta = ont_node_in(node, 0);
    ont_shape grid;
    b->status = affine_sizes(node, &theta->shape, &grid);
    if (b->status != ONT_OK) return;
    bool corners = ont_attr_int(node, "align_corners", 0) != 0;
    int rank = grid.rank - 2;
    int64_t points = ont_shape_count_range(&grid, 1, rank + 1);
    double *rows = ont_arena_array(&b->graph->arena, (size_t)(points * (rank + 1)) + 1, sizeof *rows);
    if (!rows) {
        b->status = ONT_ENOMEM;
        return;
    }
    for (int64_t p = 0; p < points; p++) {
        int64_t rest = p;
        for (int d = rank - 1; d >= 0; d--) {
            int64_t size = grid.dims[d + 1], i = rest % size;
            rest /= size;
            double x = corners ? (size > 1 ? 2 * (double)i / (double)(size - 1) - 1 : 0)
                               : (double)(2 * i + 1) / (double)size - 1;
            rows[p * (rank + 1) + rank - 1 - d] = x;
        }
        rows[p * (rank + 1) + rank] = 1;
    }
    ont_value *base = ont_build_numbers(b, theta->dtype, &(ont_shape){.rank = 2, .dims = {points, rank + 1}}, rows);
    outputs[0] = ont_build_reshape(b, ont_build_matmul(b, base, false, theta, true, 1), &grid);
}

#define GRID_ATTRIBUTES "align_corners:i mode:s padding_mode:s"
static const ont_kernel kernels[] = {
    {.name = "grid_sample_ref", .accept = accept_float, .prepare = prepare, .run = run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "grid_sample_grad_ref", .accept = accept_float, .prepare = prepare, .run = grad_run},
};
const ont_op ont_op_GridSample = {.domain = "", .name = "GridSample", .since = 16, .min_inputs = 2, .max_inputs = 2,
                                  .attributes = GRID_ATTRIBUTES, .infer = infer, .grad = grad, ONT_KERNELS(kernels)};
const ont_op ont_op_GridSampleGrad = {.domain = ONT_DOMAIN, .name = "GridSampleGrad", .since = 1, .min_inputs = 3,
                                      .max_inputs = 3, .attributes = GRID_ATTRIBUTES, .infer = grad_infer,
                                      ONT_KERNELS(grad_kernels)};
const ont_op ont_op_AffineGrid = {.domain = "", .name = "AffineGrid", .since = 20, .min_inputs = 2, .max_inputs = 2,
                                  .attributes = "align_corners:i", .nondiff_inputs = 2, .infer = affine_infer,
                                  .expand = affine_expand};
