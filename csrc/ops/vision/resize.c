/*
 * Resize and Upsample, one axis after the other: every output along an axis is a weighted sum of a few cells
 * (resize.h). The gradient applies the transposed lists. A plane, which is the part of the tensor from the first
 * resized axis on, goes through all axes while it is in the cache.
 */
#include "ops/vision/resize.h"

#include <string.h>

#include "base/parallel.h"

typedef struct resize_pass {
    ont_taps taps;
    int64_t outer, inner; /* dims of the plane before and after the axis, when this axis is resized */
} resize_pass;

typedef struct resize_state {
    resize_pass passes[ONT_MAX_RANK];
    int n_passes, parts;
    int64_t planes, in_count, out_count,
        row; /* of a plane; row: elements after the last resized axis, which are copied together */
    size_t size, scratch;                     /* bytes of an element, and of each of the two buffers of a part */
    bool extrapolates;
    double extrapolation;
    ont_shape out;
    int first_axis;
    const bool *outside[ONT_MAX_RANK];
} resize_state;

static ont_status infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ont_resize r;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_resize_read(node, &x->shape, &r));
    return ont_infer_out(node, 0, x->dtype, &r.out);
}

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    size_t n;
    const int64_t *dims = ont_attr_ints(node, "shape", &n);
    ont_shape shape = ont_shape_of((int)n, dims);
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

/* ---- kernels ---- */

static const char *accept_copy(const ont_node *node)
{
    if (strcmp(ont_attr_string(node, "mode", "nearest"), "nearest")) return "not mode 'nearest'";
    if (!strcmp(ont_attr_string(node, "coordinate_transformation_mode", ""), "tf_crop_and_resize"))
        return "tf_crop_and_resize may leave cells to the extrapolation value";
    return ont_dtype_size(ont_node_in(node, 0)->dtype) ? NULL : "dtype";
}

/* The axes that change size, those that shrink most first. */
static int order_axes(const ont_taps *taps, int rank, int *axes)
{
    int n = 0;
    for (int d = 0; d < rank; d++) {
        if (ont_taps_identity(&taps[d])) continue;
        int at = n++;
        double growth = (double)taps[d].out / (double)(taps[d].in + 1);
        while (at && growth < (double)taps[axes[at - 1]].out / (double)(taps[axes[at - 1]].in + 1))
            axes[at] = axes[at - 1], at--;
        axes[at] = d;
    }
    return n;
}

static ont_status plan(resize_state *s, const ont_resize *r, bool backward, ont_arena *arena)
{
    ont_taps taps[ONT_MAX_RANK];
    int axes[ONT_MAX_RANK];
    ont_shape dims = backward ? r->out : r->in, to = backward ? r->in : r->out;
    for (int d = 0; d < dims.rank; d++) {
        ont_taps own;
        ONT_TRY(ont_resize_taps(r, d, arena, &own));
        if (own.outside && !backward) s->outside[d] = own.outside, s->extrapolates = true;
        if (backward)
            ONT_TRY(ont_taps_transpose(&own, arena, &taps[d]));
        else
            taps[d] = own;
    }
    s->out = to;
    s->n_passes = order_axes(taps, dims.rank, axes);
    int first = dims.rank;
    for (int i = 0; i < s->n_passes; i++) first = axes[i] < first ? axes[i] : first;
    s->first_axis = first;
    s->planes = ont_shape_count_range(&to, 0, first);
    s->in_count = ont_shape_count_range(&dims, first, dims.rank);
    s->out_count = ont_shape_count_range(&to, first, to.rank);
    int64_t most = 0;
    for (int i = 0; i < s->n_passes; i++) {
        resize_pass *pass = &s->passes[i];
        pass->taps = taps[axes[i]];
        pass->outer = ont_shape_count_range(&dims, first, axes[i]);
        pass->inner = ont_shape_count_range(&dims, axes[i] + 1, dims.rank);
        dims.dims[axes[i]] = pass->taps.out;
        int64_t count = ont_shape_count_range(&dims, first, dims.rank);
        if (i + 1 < s->n_passes && count > most) most = count;
    }
    s->scratch = ((size_t)most * s->size + 63) / 64 * 64;
    return ONT_OK;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    bool backward = *node->op->domain != '\0';
    resize_state *s = ont_arena_alloc(arena, sizeof *s);
    ont_resize r;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_resize_read(node, backward ? &node->outputs[0]->shape : &ont_node_in(node, 0)->shape, &r));
    s->size = ont_dtype_size(ont_node_in(node, 0)->dtype);
    s->extrapolation = r.extrapolation;
    ONT_TRY(plan(s, &r, backward, arena));
    s->parts = ont_parallel_threads();
    int64_t work = s->planes * (s->in_count + s->out_count) / 16384 + 1;
    if (s->parts > s->planes) s->parts = (int)s->planes;
    if (s->parts > work) s->parts = (int)work;
    if (s->parts < 1) s->parts = 1;
    out->state = s;
    out->work_bytes = 2 * s->scratch * (size_t)s->parts;
    return ONT_OK;
}

/* x (outer, in, inner) -> y (outer, out, inner). Rows of `inner` elements are added; at the last axis, single cells. */
#define PASS(suffix, type) \
    static void row_##suffix(const ont_taps *t, int64_t o, const type *x, type *restrict y, int64_t inner) \
    { \
        int64_t i = t->first[o], n = t->first[o + 1] - i; \
        const type *a = x + t->index[i] * inner, *b = n > 1 ? x + t->index[i + 1] * inner : a; \
        type u = (type)t->weight[i], v = n > 1 ? (type)t->weight[i + 1] : 0; \
        if (n == 0) \
            for (int64_t k = 0; k < inner; k++) y[k] = 0; \
        else if (n == 1) \
            for (int64_t k = 0; k < inner; k++) y[k] = u * a[k]; \
        else \
            for (int64_t k = 0; k < inner; k++) y[k] = u * a[k] + v * b[k]; \
        for (i += 2; i < t->first[o + 1]; i++) { \
            a = x + t->index[i] * inner; \
            u = (type)t->weight[i]; \
            for (int64_t k = 0; k < inner; k++) y[k] += u * a[k]; \
        } \
    } \
    static void pass_##suffix(const resize_pass *p, const void *from, void *to) \
    { \
        const ont_taps *t = &p->taps; \
        const type *x = from; \
        type *y = to; \
        for (int64_t r = 0; r < p->outer; r++, x += t->in * p->inner) \
            for (int64_t o = 0; o < t->out; o++, y += p->inner) { \
                if (p->inner != 1) { \
                    row_##suffix(t, o, x, y, p->inner); \
                    continue; \
                } \
                type sum = 0; \
                for (int64_t i = t->first[o]; i < t->first[o + 1]; i++) sum += (type)t->weight[i] * x[t->index[i]]; \
                *y = sum; \
            } \
    } \
    static void extrapolate_##suffix(const resize_state *s, void *to) \
    { \
        type *y = to; \
        for (int64_t i = 0, rest = 0; i < s->out_count; i++) { \
            rest = i; \
            bool outside = false; \
            for (int d = s->out.rank - 1; d >= s->first_axis; d--) { \
                outside |= s->outside[d] && s->outside[d][rest % s->out.dims[d]]; \
                rest /= s->out.dims[d]; \
            } \
            if (outside) y[i] = (type)s->extrapolation; \
        } \
    }
PASS(f32, float)
PASS(f64, double)

static void planes_run(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const resize_state *s = call->state;
    bool f32 = s->size == sizeof(float);
    for (int64_t part = first; part < last; part++)
        for (int64_t plane = s->planes * part / s->parts; plane < s->planes * (part + 1) / s->parts; plane++) {
            char *work = (char *)call->work + 2 * s->scratch * (size_t)part;
            const void *x = (const char *)call->in[0] + (size_t)(plane * s->in_count) * s->size;
            char *y = (char *)call->out[0] + (size_t)(plane * s->out_count) * s->size;
            if (!s->n_passes) memcpy(y, x, (size_t)s->out_count * s->size);
            for (int i = 0; i < s->n_passes; i++) {
                void *to = i + 1 == s->n_passes ? y : work + (size_t)(i % 2) * s->scratch;
                (f32 ? pass_f32 : pass_f64)(&s->passes[i], x, to);
                x = to;
            }
            if (s->extrapolates) (f32 ? extrapolate_f32 : extrapolate_f64)(s, y);
        }
}

static ont_status run(const ont_call *call)
{
    ont_parallel(((const resize_state *)call->state)->parts, 1, planes_run, (void *)call);
    return ONT_OK;
}

/* ---- mode 'nearest' for any dtype: cells are copied ---- */

static ont_status copy_run(const ont_call *call)
{
    const resize_state *s = call->state;
    for (int64_t plane = 0; plane < s->planes; plane++) {
        char *work = call->work;
        const char *x = (const char *)call->in[0] + (size_t)(plane * s->in_count) * s->size;
        char *y = (char *)call->out[0] + (size_t)(plane * s->out_count) * s->size;
        if (!s->n_passes) memcpy(y, x, (size_t)s->out_count * s->size);
        for (int i = 0; i < s->n_passes; i++) {
            const resize_pass *p = &s->passes[i];
            size_t row = (size_t)p->inner * s->size;
            char *to = i + 1 == s->n_passes ? y : work + (size_t)(i % 2) * s->scratch;
            for (int64_t r = 0; r < p->outer; r++)
                for (int64_t o = 0; o < p->taps.out; o++)
                    memcpy(to + (size_t)(r * p->taps.out + o) * row,
                           x + (size_t)(r * p->taps.in + p->taps.index[o]) * row, row);
            x = to;
        }
    }
    return ONT_OK;
}

/* ---- reference: every output is a sum over the product of the lists of all axes ---- */

typedef struct resize_lists {
    ont_taps taps[ONT_MAX_RANK];
    ont_shape in, out;
    double extrapolation;
    bool backward;
} resize_lists;

static ont_status prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    resize_lists *s = ont_arena_alloc(arena, sizeof *s);
    ont_resize r;
    if (!s) return ONT_ENOMEM;
    s->backward = *node->op->domain != '\0';
    ONT_TRY(ont_resize_read(node, s->backward ? &node->outputs[0]->shape : &ont_node_in(node, 0)->shape, &r));
    for (int d = 0; d < r.in.rank; d++) ONT_TRY(ont_resize_taps(&r, d, arena, &s->taps[d]));
    s->in = r.in;
    s->out = r.out;
    s->extrapolation = r.extrapolation;
    out->state = s;
    return ONT_OK;
}

/* Adds the terms of axis d and the following axes; `at` and `weight` are offset and weight from the axes before. */
static double product(const resize_lists *s, const int64_t *position, int d, int64_t at, double weight,
                      const ont_call *call, double dy)
{
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    if (d == s->in.rank) {
        if (!s->backward)
            return weight * (f32 ? (double)((const float *)call->in[0])[at] : ((const double *)call->in[0])[at]);
        if (f32)
            ((float *)call->out[0])[at] += (float)(weight * dy);
        else
            ((double *)call->out[0])[at] += weight * dy;
        return 0;
    }
    const ont_taps *t = &s->taps[d];
    double sum = 0;
    for (int64_t i = t->first[position[d]]; i < t->first[position[d] + 1]; i++)
        sum += product(s, position, d + 1, at * t->in + t->index[i], weight * t->weight[i], call, dy);
    return sum;
}

static ont_status run_ref(const ont_call *call)
{
    const resize_lists *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    int64_t position[ONT_MAX_RANK] = {0};
    if (s->backward) memset(call->out[0], 0, (size_t)ont_shape_count(&s->in) * (f32 ? 4 : 8));
    for (int64_t o = 0; o < ont_shape_count(&s->out); o++) {
        bool outside = false;
        for (int64_t d = s->out.rank - 1, rest = o; d >= 0; rest /= s->out.dims[d--]) {
            position[d] = rest % s->out.dims[d];
            outside |= s->taps[d].outside && s->taps[d].outside[position[d]];
        }
        const void *in = call->in[0];
        double dy = !s->backward ? 0 : f32 ? (double)((const float *)in)[o] : ((const double *)in)[o];
        double y = product(s, position, 0, 0, 1, call, dy);
        if (outside) y = s->extrapolation;
        if (!s->backward && f32) ((float *)call->out[0])[o] = (float)y;
        if (!s->backward && !f32) ((double *)call->out[0])[o] = y;
    }
    return ONT_OK;
}

/* ---- gradient and descriptors ---- */

static void grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *operands[4] = {GO(0), I(1), I(2), I(3)};
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "ResizeGrad", operands, g->node->n_inputs, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (b->status == ONT_OK)
        b->status = ont_attr_set_ints(b->graph, node, "shape", I(0)->shape.dims, (size_t)I(0)->shape.rank);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "version", g->node->version);
    if (b->status == ONT_OK)
        b->status = ont_attr_set_int(b->graph, node, "upsample", ONT_IS(g->node, Upsample));
    GI(0, ont_build_done(b, node));
}

static const ont_kernel kernels[] = {
    {.name = "resize_rows", .accept = ont_accept_float, .prepare = prepare, .run = run},
    {.name = "resize_copy", .accept = accept_copy, .prepare = prepare, .run = copy_run},
    {.name = "resize_ref", .accept = ont_accept_float, .prepare = prepare_ref, .run = run_ref},
};
static const ont_kernel grad_kernels[] = {
    {.name = "resize_grad_rows", .accept = ont_accept_float, .prepare = prepare, .run = run},
    {.name = "resize_grad_ref", .accept = ont_accept_float, .prepare = prepare_ref, .run = run_ref},
};
#define RESIZE_ATTRIBUTES \
    "antialias:i axes:I coordinate_transformation_mode:s cubic_coeff_a:f exclude_outside:i extrapolation_value:f " \
    "keep_aspect_ratio_policy:s mode:s nearest_mode:s"
#define UPSAMPLE_ATTRIBUTES "height_scale:f scales:F width_scale:f"
const ont_op ont_op_Resize = {.domain = "", .name = "Resize", .since = 10, .min_inputs = 1, .max_inputs = 4,
                              .nondiff_inputs = ~1ull, .attributes = RESIZE_ATTRIBUTES, .infer = infer, .grad = grad,
                              ONT_KERNELS(kernels)};
const ont_op ont_op_Upsample = {.domain = "", .name = "Upsample", .since = 1, .min_inputs = 1, .max_inputs = 2,
                                .nondiff_inputs = ~1ull, .attributes = UPSAMPLE_ATTRIBUTES " mode:s", .infer = infer,
                                .grad = grad, ONT_KERNELS(kernels)};
const ont_op ont_op_ResizeGrad = {.domain = ONT_DOMAIN, .name = "ResizeGrad", .since = 1, .min_inputs = 1,
                                  .max_inputs = 4,
                                  .attributes = RESIZE_ATTRIBUTES " " UPSAMPLE_ATTRIBUTES " shape:I upsample:i "
                                                "version:i",
                                  .infer = grad_infer, ONT_KERNELS(grad_kernels)};
