/*
 * Col2Im adds columns, each the cells of one window, to an image; Im2Col reads such columns. Each is the gradient of
 * the other.
 */
#include <inttypes.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/conv/columns.h"
#include "ops/support/compose.h"

static ont_status read_list(const ont_node *node, int index, const char *name, int64_t minimum, int n,
                            int64_t otherwise, int64_t *out)
{
    int given;
    int64_t values[2 * ONT_WINDOW_RANK];
    ONT_TRY(ont_const_ints(node, index, name, values, 2 * ONT_WINDOW_RANK, &given));
    if (given >= 0 && given != n) return ont_fail(ONT_EINVAL, "%s has %d entries, expected %d", name, given, n);
    for (int i = 0; i < n; i++) {
        out[i] = given < 0 ? otherwise : values[i];
        if (out[i] < minimum || out[i] > INT32_MAX) return ont_fail(ONT_EINVAL, "%s[%d] is %" PRId64, name, i, out[i]);
    }
    return ONT_OK;
}

/* Image and block sizes are inputs of Col2Im and attributes of Im2Col. */
static ont_status read_window(const ont_node *node, ont_window *w)
{
    int64_t pads[2 * ONT_WINDOW_RANK], image[2 * ONT_WINDOW_RANK];
    bool inputs = !*node->op->domain;
    *w = (ont_window){0};
    ONT_TRY(ont_const_ints(node, inputs ? 1 : -1, "image_shape", image, 2 * ONT_WINDOW_RANK, &w->rank));
    if (w->rank < 1 || w->rank > ONT_WINDOW_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "an image of %d dims, 1 to %d are supported", w->rank, ONT_WINDOW_RANK);
    ONT_TRY(read_list(node, inputs ? 1 : -1, "image_shape", 0, w->rank, 0, w->in));
    ONT_TRY(read_list(node, inputs ? 2 : -1, "block_shape", 1, w->rank, 0, w->kernel));
    ONT_TRY(read_list(node, -1, "strides", 1, w->rank, 1, w->stride));
    ONT_TRY(read_list(node, -1, "dilations", 1, w->rank, 1, w->dilation));
    ONT_TRY(read_list(node, -1, "pads", 0, 2 * w->rank, 0, pads));
    for (int d = 0; d < w->rank; d++) {
        w->begin[d] = pads[d];
        w->end[d] = pads[w->rank + d];
        int64_t span = w->in[d] + w->begin[d] + w->end[d] - (w->kernel[d] - 1) * w->dilation[d] - 1;
        if (span < 0) return ont_fail(ONT_EINVAL, "the block does not fit in dim %d of the image", d);
        w->out[d] = span / w->stride[d] + 1;
    }
    return ont_window_count(w);
}

static ont_status col2im_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ont_window w;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(read_window(node, &w));
    if (x->shape.rank != 3 || x->shape.dims[1] % w.kernel_count || x->shape.dims[2] != w.out_count)
        return ont_fail(ONT_EINVAL, "the input is not (batch, channels * %" PRId64 ", %" PRId64 ")", w.kernel_count,
                        w.out_count);
    ont_shape shape = {.rank = w.rank + 2, .dims = {x->shape.dims[0], x->shape.dims[1] / w.kernel_count}};
    for (int d = 0; d < w.rank; d++) shape.dims[d + 2] = w.in[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_status im2col_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ont_window w;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(read_window(node, &w));
    bool fits = x->shape.rank == w.rank + 2;
    for (int d = 0; fits && d < w.rank; d++) fits = x->shape.dims[d + 2] == w.in[d];
    if (!fits) return ont_fail(ONT_EINVAL, "the input is not (batch, channels, image)");
    ont_shape shape = {.rank = 3, .dims = {x->shape.dims[0], 0, w.out_count}};
    if (__builtin_mul_overflow(x->shape.dims[1], w.kernel_count, &shape.dims[1]))
        return ont_fail(ONT_EINVAL, "%" PRId64 " channels of %" PRId64 " cells are beyond 64 bits", x->shape.dims[1],
                        w.kernel_count);
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static const char *accept_number(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    bool taken = dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 || dtype == ONT_INT32 || dtype == ONT_INT64 ||
                 dtype == ONT_UINT64;
    return taken ? NULL : "dtype";
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_columns *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_window(node, &s->w));
    const ont_shape *image = *node->op->domain ? &ont_node_in(node, 0)->shape : &node->outputs[0]->shape;
    s->planes = image->dims[0] * image->dims[1];
    out->state = s;
    return ONT_OK;
}

/* A row of windows, whose cells k are in one row of the image: windows [low, high) are inside it, cell k of window o at
 * offset `at` + o * stride. */
typedef struct span {
    int64_t at, low, high, stride;
} span;

static span span_of(const ont_window *w, int64_t k, int64_t o)
{
    int last = w->rank - 1;
    int64_t at = 0, step = w->in[last], stride = w->stride[last], n = w->out[last];
    int64_t shift = k % w->kernel[last] * w->dilation[last] - w->begin[last];
    int64_t low = shift < 0 ? (stride - 1 - shift) / stride : 0, beyond = w->in[last] - shift;
    int64_t high = beyond <= 0 ? 0 : (beyond - 1) / stride + 1;
    k /= w->kernel[last];
    for (int d = last - 1; d >= 0; d--) {
        int64_t i = o % w->out[d] * w->stride[d] + k % w->kernel[d] * w->dilation[d] - w->begin[d];
        if (i < 0 || i >= w->in[d]) return (span){0};
        at += i * step;
        step *= w->in[d];
        o /= w->out[d];
        k /= w->kernel[d];
    }
    if (high > n) high = n;
    return low < high ? (span){at + shift, low, high, stride} : (span){0};
}

#define COLUMNS(suffix, type) \
    static void col2im_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_columns *s = call->state; \
        const ont_window *w = &s->w; \
        const int64_t n = w->out[w->rank - 1]; \
        for (int64_t p = first; p < last; p++) { \
            const type *x = (const type *)call->in[0] + p * w->kernel_count * w->out_count; \
            type *y = (type *)call->out[0] + p * w->in_count; \
            memset(y, 0, (size_t)w->in_count * sizeof *y); \
            for (int64_t k = 0; k < w->kernel_count; k++) \
                for (int64_t o = 0; o < w->out_count; o += n, x += n) { \
                    const span r = span_of(w, k, o / n); \
                    if (r.stride == 1) \
                        for (int64_t i = r.low; i < r.high; i++) y[r.at + i] += x[i]; \
                    else \
                        for (int64_t i = r.low; i < r.high; i++) y[r.at + i * r.stride] += x[i]; \
                } \
        } \
    } \
    static void im2col_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_columns *s = call->state; \
        const ont_window *w = &s->w; \
        const int64_t n = w->out[w->rank - 1]; \
        for (int64_t p = first; p < last; p++) { \
            const type *x = (const type *)call->in[0] + p * w->in_count; \
            type *y = (type *)call->out[0] + p * w->kernel_count * w->out_count; \
            for (int64_t k = 0; k < w->kernel_count; k++) \
                for (int64_t o = 0; o < w->out_count; o += n, y += n) { \
                    const span r = span_of(w, k, o / n); \
                    memset(y, 0, (size_t)n * sizeof *y); \
                    for (int64_t i = r.low; i < r.high; i++) y[i] = x[r.at + i * r.stride]; \
                } \
        } \
    }
COLUMNS(f32, float)
COLUMNS(f64, double)
COLUMNS(i32, uint32_t)
COLUMNS(i64, uint64_t)

static int64_t grain(const ont_columns *s)
{
    return 4096 / (s->w.kernel_count * s->w.out_count + 1) + 1;
}

static ont_status col2im_run(const ont_call *call)
{
    const ont_columns *s = call->state;
    ont_dtype dtype = call->node->outputs[0]->dtype;
    ont_range_fn body = dtype == ONT_FLOAT32   ? col2im_f32
                        : dtype == ONT_FLOAT64 ? col2im_f64
                        : dtype == ONT_INT32   ? col2im_i32
                                               : col2im_i64;
    ont_parallel(s->planes, grain(s), body, (void *)call);
    return ONT_OK;
}

static ont_status im2col_run(const ont_call *call)
{
    const ont_columns *s = call->state;
    ont_dtype dtype = call->node->outputs[0]->dtype;
    ont_range_fn body = dtype == ONT_FLOAT32   ? im2col_f32
                        : dtype == ONT_FLOAT64 ? im2col_f64
                        : dtype == ONT_INT32   ? im2col_i32
                                               : im2col_i64;
    ont_parallel(s->planes, grain(s), body, (void *)call);
    return ONT_OK;
}

static void col2im_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_window w;
    ont_value *dy = GO(0);
    if (b->status == ONT_OK) b->status = read_window(g->node, &w);
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "Im2Col", &dy, 1, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, node, "image_shape", w.in, (size_t)w.rank);
    if (b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, node, "block_shape", w.kernel, (size_t)w.rank);
    GI(0, ont_build_done(b, node));
}

static const ont_kernel col2im_kernels[] = {
    {.name = "col2im_ref", .accept = accept_number, .prepare = prepare, .run = col2im_run},
};
static const ont_kernel im2col_kernels[] = {
    {.name = "im2col_ref", .accept = accept_number, .prepare = prepare, .run = im2col_run},
};
const ont_op ont_op_Col2Im = {.domain = "", .name = "Col2Im", .since = 18, .min_inputs = 3, .max_inputs = 3,
                              .nondiff_inputs = 6, .attributes = "dilations:I pads:I strides:I", .infer = col2im_infer,
                              .grad = col2im_grad, ONT_KERNELS(col2im_kernels)};
const ont_op ont_op_Im2Col = {.domain = ONT_DOMAIN, .name = "Im2Col", .since = 1, .min_inputs = 1, .max_inputs = 1,
                              .flags = ONT_OP_PUBLIC,
                              .attributes = "block_shape:I dilations:I image_shape:I pads:I strides:I",
                              .infer = im2col_infer,
                              ONT_KERNELS(im2col_kernels)};
