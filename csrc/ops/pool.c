/*
 * MaxPool, AveragePool and their global forms. A maximum's gradient goes to the first largest cell of a window, as in
 * torch; forward remembers which that was (output Indices) where a gradient is wanted.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/window.h"

/* One spatial dim, right-aligned to three, with what is known of every output position in it. */
typedef struct pool_axis {
    int64_t in, out, step;   /* step: dilation */
    const int64_t *lo, *hi;  /* cells [lo, hi) inside the input, `step` apart */
    const int64_t *count;    /* how many of them a mean divides by */
} pool_axis;

typedef struct pool_state {
    ont_window w;
    int64_t planes;
    bool maximum, include_pad;
    pool_axis axes[ONT_WINDOW_RANK];
} pool_state;

static ont_status read_state(const ont_node *node, const ont_shape *x, pool_state *s)
{
    ONT_TRY(ont_window_init(node, x, NULL, &s->w));
    s->planes = x->dims[0] * x->dims[1];
    s->maximum = strstr(node->op->name, "Max") != NULL;
    s->include_pad = ont_attr_int(node, "count_include_pad", 0);
    return ONT_OK;
}

/*
 * storage_order is the order of Indices: where the model does not ask for them it changes nothing, and is put back to
 * row-major, which is what the gradient reads.
 */
static ont_status settle_order(ont_graph *g, ont_node *node)
{
    int64_t order = ont_attr_int(node, "storage_order", 0);
    if (order != 0 && order != 1) return ont_fail(ONT_EINVAL, "attribute storage_order is %" PRId64 ", expected 0 or 1", order);
    if (order && ont_node_out(node, 1))
        return ont_fail(ONT_EUNSUPPORTED, "attribute storage_order is 1 (column-major) and Indices are asked for");
    return order ? ont_attr_set_int(g, node, "storage_order", 0) : ONT_OK;
}

/* outputs: y, and for maxima the index of the largest cell in the whole input, -1 for a window without a cell */
static ont_status pool_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    pool_state s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(read_state(node, &x->shape, &s));
    ONT_TRY(settle_order(g, node));
    for (int d = 0; d < s.w.rank; d++)
        if (s.maximum && s.w.begin[d] >= (s.w.kernel[d] - 1) * s.w.dilation[d] + 1)
            return ont_fail(ONT_EINVAL, "padding of spatial dim %d leaves windows without a cell", d);
    ont_shape shape = {.rank = x->shape.rank, .dims = {x->shape.dims[0], x->shape.dims[1]}};
    for (int d = 0; d < s.w.rank; d++) shape.dims[d + 2] = s.w.out[d];
    if (ont_node_out(node, 1) && !s.maximum) return ont_fail(ONT_EINVAL, "a second output");
    ONT_TRY(ont_infer_out(node, 1, ONT_INT64, &shape));
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static const char *accept_float(const ont_node *node)
{
    ont_dtype dtype = node->outputs[0]->dtype;
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "dtype";
}

static bool is_grad(const ont_node *node)
{
    return *node->op->domain != '\0';
}

/* x itself, or what a gradient node is to return. */
static const ont_shape *input_shape(const ont_node *node)
{
    return is_grad(node) ? &node->outputs[0]->shape : &ont_node_in(node, 0)->shape;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    pool_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    out->state = s;
    return read_state(node, input_shape(node), s);
}

static void *result(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

/* ---- reference ---- */

/* Cells of a window: first and end per dim after clipping, and how many cells count for a mean. */
static int64_t clip_window(const pool_state *s, int64_t output, int64_t (*range)[2])
{
    const ont_window *w = &s->w;
    int64_t padded = 1, inside = 1;
    for (int d = w->rank - 1; d >= 0; d--) {
        int64_t start = output % w->out[d] * w->stride[d] - w->begin[d], step = w->dilation[d];
        int64_t end = start + (w->kernel[d] - 1) * step + 1, limit = w->in[d] + w->end[d];
        output /= w->out[d];
        /* With padding counted, a window that hangs over the far padding (ceil_mode) counts up to its end only. */
        padded *= (end < limit ? end - start + step - 1 : limit - start + step - 1) / step;
        if (start < 0) start += (-start + step - 1) / step * step;
        range[d][0] = start;
        range[d][1] = end < w->in[d] ? end : w->in[d];
        inside *= range[d][1] > start ? (range[d][1] - start + step - 1) / step : 0;
    }
    return s->include_pad ? padded : inside;
}

/* Visits the cells of a window in order; the body, which comes last, sees `at`. Dims beyond the rank have one cell. */
#define EACH_CELL(w, range, ...) \
    do { \
        int64_t lo_[3] = {0, 0, 0}, hi_[3] = {1, 1, 1}, step_[3] = {1, 1, 1}, size_[3] = {1, 1, 1}; \
        for (int d_ = 0; d_ < (w)->rank; d_++) { \
            int e_ = 3 - (w)->rank + d_; \
            lo_[e_] = range[d_][0], hi_[e_] = range[d_][1], step_[e_] = (w)->dilation[d_], size_[e_] = (w)->in[d_]; \
        } \
        for (int64_t a_ = lo_[0]; a_ < hi_[0]; a_ += step_[0]) \
            for (int64_t b_ = lo_[1]; b_ < hi_[1]; b_ += step_[1]) \
                for (int64_t c_ = lo_[2]; c_ < hi_[2]; c_ += step_[2]) { \
                    int64_t at = (a_ * size_[1] + b_) * size_[2] + c_; \
                    __VA_ARGS__; \
                } \
    } while (0)

#define REFERENCE(suffix, type) \
    static void forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const pool_state *s = call->state; \
        int64_t range[ONT_WINDOW_RANK][2], *indices = result(call, 1); \
        for (int64_t p = first; p < last; p++) \
            for (int64_t o = 0; o < s->w.out_count; o++) { \
                const type *x = (const type *)call->in[0] + p * s->w.in_count; \
                type sum = 0, most = -(type)INFINITY; \
                int64_t count = clip_window(s, o, range), winner = -1; \
                EACH_CELL(&s->w, range, { \
                    sum += x[at]; \
                    if (winner < 0 || x[at] > most || isnan(x[at])) most = x[at], winner = at; \
                }); \
                ((type *)call->out[0])[p * s->w.out_count + o] = s->maximum ? most : sum / (type)(count ? count : 1); \
                if (indices) indices[p * s->w.out_count + o] = winner < 0 ? -1 : p * s->w.in_count + winner; \
            } \
    } \
    static void average_grad_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const pool_state *s = call->state; \
        int64_t range[ONT_WINDOW_RANK][2]; \
        for (int64_t p = first; p < last; p++) { \
            type *dx = (type *)call->out[0] + p * s->w.in_count; \
            memset(dx, 0, (size_t)s->w.in_count * sizeof *dx); \
            for (int64_t o = 0; o < s->w.out_count; o++) { \
                int64_t count = clip_window(s, o, range); \
                type dy = ((const type *)call->in[0])[p * s->w.out_count + o] / (type)(count ? count : 1); \
                EACH_CELL(&s->w, range, dx[at] += dy); \
            } \
        } \
    }
REFERENCE(f32, float)
REFERENCE(f64, double)

static int64_t grain(const pool_state *s)
{
    return 4096 / (s->w.out_count * s->w.kernel_count + 1) + 1;
}

static ont_status run_planes(const ont_call *call, ont_range_fn f32, ont_range_fn f64)
{
    const pool_state *s = call->state;
    ont_parallel(s->planes, grain(s), call->node->outputs[0]->dtype == ONT_FLOAT32 ? f32 : f64, (void *)call);
    return ONT_OK;
}

static ont_status forward_ref(const ont_call *call)
{
    return run_planes(call, forward_f32, forward_f64);
}

static ont_status average_grad_ref(const ont_call *call)
{
    return run_planes(call, average_grad_f32, average_grad_f64);
}

/* ---- with window bounds from tables ---- */

static ont_status fill_axis(const pool_state *s, int d, ont_arena *arena, pool_axis *axis)
{
    const ont_window *w = &s->w;
    int64_t *lo = ont_arena_array(arena, (size_t)w->out[d] * 3 + 1, sizeof *lo), *hi = lo + w->out[d], *count = hi + w->out[d];
    if (!lo) return ONT_ENOMEM;
    for (int64_t o = 0; o < w->out[d]; o++) {
        int64_t step = w->dilation[d], start = o * w->stride[d] - w->begin[d], end = start + (w->kernel[d] - 1) * step + 1;
        int64_t limit = w->in[d] + w->end[d], padded = ((end < limit ? end : limit) - start + step - 1) / step;
        lo[o] = start < 0 ? start + (-start + step - 1) / step * step : start;
        hi[o] = end < w->in[d] ? end : w->in[d];
        int64_t cells = hi[o] > lo[o] ? (hi[o] - lo[o] + step - 1) / step : 0;
        count[o] = s->include_pad ? padded : cells;
    }
    *axis = (pool_axis){.in = w->in[d], .out = w->out[d], .step = w->dilation[d], .lo = lo, .hi = hi, .count = count};
    return ONT_OK;
}

static ont_status prepare_tables(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    static const int64_t zero = 0, one = 1;
    ONT_TRY(prepare(node, arena, out));
    pool_state *s = out->state;
    int lead = ONT_WINDOW_RANK - s->w.rank;
    for (int d = 0; d < lead; d++) s->axes[d] = (pool_axis){1, 1, 1, &zero, &one, &one};
    for (int d = 0; d < s->w.rank; d++) ONT_TRY(fill_axis(s, d, arena, &s->axes[lead + d]));
    return ONT_OK;
}

/* Visits every window of a plane; `o` counts them, and i, j, k are its output position. */
#define EACH_WINDOW(s, ...) \
    do { \
        const pool_axis *A = &(s)->axes[0], *B = &(s)->axes[1], *C = &(s)->axes[2]; \
        int64_t o = 0; \
        for (int64_t i = 0; i < A->out; i++) \
            for (int64_t j = 0; j < B->out; j++) \
                for (int64_t k = 0; k < C->out; k++, o++) __VA_ARGS__ \
    } while (0)

/* Visits the cells of the window at (i, j, k). */
#define EACH_CELL_AT(body) \
    for (int64_t a = A->lo[i]; a < A->hi[i]; a += A->step) \
        for (int64_t b = B->lo[j]; b < B->hi[j]; b += B->step) \
            for (int64_t row = (a * B->in + b) * C->in, at = row + C->lo[k]; at < row + C->hi[k]; at += C->step) body

#define TABLES(suffix, type) \
    static void max_tables_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const pool_state *s = call->state; \
        for (int64_t p = first; p < last; p++) { \
            const type *x = (const type *)call->in[0] + p * s->w.in_count; \
            type *y = (type *)call->out[0] + p * s->w.out_count; \
            int64_t *indices = result(call, 1), base = p * s->w.in_count; \
            if (indices) indices += p * s->w.out_count; \
            EACH_WINDOW(s, { \
                bool empty = A->lo[i] >= A->hi[i] || B->lo[j] >= B->hi[j] || C->lo[k] >= C->hi[k]; \
                int64_t winner = (A->lo[i] * B->in + B->lo[j]) * C->in + C->lo[k]; \
                type most = -(type)INFINITY; \
                EACH_CELL_AT({ \
                    bool larger = (x[at] > most) | (x[at] != x[at]); \
                    most = larger ? x[at] : most; \
                    winner = larger ? at : winner; \
                }) \
                y[o] = most; \
                if (indices) indices[o] = empty ? -1 : base + winner; \
            }); \
        } \
    } \
    static void average_tables_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const pool_state *s = call->state; \
        for (int64_t p = first; p < last; p++) { \
            const type *x = (const type *)call->in[0] + p * s->w.in_count; \
            type *y = (type *)call->out[0] + p * s->w.out_count; \
            EACH_WINDOW(s, { \
                int64_t count = A->count[i] * B->count[j] * C->count[k]; \
                type sum = 0; \
                EACH_CELL_AT(sum += x[at];) \
                y[o] = sum / (type)(count ? count : 1); \
            }); \
        } \
    } \
    /* (indices, dy) -> dx: a plane's windows see that plane's cells only */ \
    static void max_grad_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const pool_state *s = call->state; \
        const int64_t *indices = call->in[0]; \
        const type *dy = call->in[1]; \
        type *dx = call->out[0]; \
        memset(dx + first * s->w.in_count, 0, (size_t)((last - first) * s->w.in_count) * sizeof *dx); \
        for (int64_t o = first * s->w.out_count; o < last * s->w.out_count; o++) \
            if (indices[o] >= 0) dx[indices[o]] += dy[o]; \
    } \
    static void average_grad_tables_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const pool_state *s = call->state; \
        for (int64_t p = first; p < last; p++) { \
            const type *dy = (const type *)call->in[0] + p * s->w.out_count; \
            type *dx = (type *)call->out[0] + p * s->w.in_count; \
            memset(dx, 0, (size_t)s->w.in_count * sizeof *dx); \
            EACH_WINDOW(s, { \
                int64_t count = A->count[i] * B->count[j] * C->count[k]; \
                type share = dy[o] / (type)(count ? count : 1); \
                EACH_CELL_AT(dx[at] += share;) \
            }); \
        } \
    }
TABLES(f32, float)
TABLES(f64, double)

static ont_status forward_tables(const ont_call *call)
{
    const pool_state *s = call->state;
    return s->maximum ? run_planes(call, max_tables_f32, max_tables_f64) : run_planes(call, average_tables_f32, average_tables_f64);
}

static ont_status average_grad_tables(const ont_call *call)
{
    return run_planes(call, average_grad_tables_f32, average_grad_tables_f64);
}

static ont_status max_grad_run(const ont_call *call)
{
    return run_planes(call, max_grad_f32, max_grad_f64);
}

/* ---- gradients: (indices, dy) or (dy), with the shape of x as an attribute ---- */

static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    size_t n;
    const int64_t *dims = ont_attr_ints(node, "shape", &n);
    const ont_value *dy = ont_node_in(node, node->n_inputs - 1);
    pool_state s;
    if (!dims || n != (size_t)dy->shape.rank) return ont_fail(ONT_EINVAL, "attribute shape does not fit the input");
    ont_shape shape = ont_shape_of((int)n, dims);
    ONT_TRY(read_state(node, &shape, &s));
    bool fits = shape.dims[0] == dy->shape.dims[0] && shape.dims[1] == dy->shape.dims[1];
    for (int d = 0; d < s.w.rank; d++) fits &= s.w.out[d] == dy->shape.dims[d + 2];
    if (!fits) return ont_fail(ONT_EINVAL, "attribute shape does not fit the input");
    return ont_infer_out(node, 0, dy->dtype, &shape);
}

static void grad_node(ont_grad *g, const char *op_type, bool maximum)
{
    ont_builder *b = &g->b;
    ont_value *indices = NULL, *dy = GO(0);
    if (b->status == ONT_OK && maximum) b->status = ont_node_want_output(b->graph, g->node, 1, &indices);
    if (b->status == ONT_OK && maximum) b->status = pool_infer(b->graph, g->node);
    if (b->status != ONT_OK) return;
    ont_value *operands[] = {maximum ? indices : dy, dy};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, op_type, operands, maximum ? 2 : 1, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_ints(b->graph, node, "shape", I(0)->shape.dims, (size_t)I(0)->shape.rank);
    GI(0, ont_build_done(b, node));
}

static void max_grad(ont_grad *g) { grad_node(g, "MaxPoolGrad", true); }
static void average_grad(ont_grad *g) { grad_node(g, "AveragePoolGrad", false); }
static void global_max_grad(ont_grad *g) { grad_node(g, "GlobalMaxPoolGrad", true); }
static void global_average_grad(ont_grad *g) { grad_node(g, "GlobalAveragePoolGrad", false); }

static const ont_kernel forward_kernels[] = {
    {.name = "pool_tables", .accept = accept_float, .prepare = prepare_tables, .run = forward_tables},
    {.name = "pool_ref", .accept = accept_float, .prepare = prepare, .run = forward_ref},
};
static const ont_kernel max_grad_kernels[] = {
    {.name = "max_pool_grad_ref", .accept = accept_float, .prepare = prepare, .run = max_grad_run},
};
static const ont_kernel average_grad_kernels[] = {
    {.name = "average_pool_grad_tables", .accept = accept_float, .prepare = prepare_tables, .run = average_grad_tables},
    {.name = "average_pool_grad_ref", .accept = accept_float, .prepare = prepare, .run = average_grad_ref},
};

/* A gradient node's operands, as many as grad_node() gives it. */
#define POOL_OP(name_, grad_, operands, kernels_, attributes_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 1, .min_inputs = 1, .max_inputs = 1, \
                                   .attributes = attributes_, .infer = pool_infer, .grad = grad_, \
                                   ONT_KERNELS(forward_kernels)}; \
    const ont_op ont_op_##name_##Grad = {.domain = ONT_DOMAIN, .name = #name_ "Grad", .since = 1, .min_inputs = operands, \
                                         .max_inputs = operands, .attributes = attributes_ " shape:I", \
                                         .infer = grad_infer, ONT_KERNELS(kernels_)}
#define WINDOW_ATTRIBUTES "auto_pad:s ceil_mode:i dilations:I kernel_shape:I pads:I strides:I"
POOL_OP(MaxPool, max_grad, 2, max_grad_kernels, WINDOW_ATTRIBUTES " storage_order:i");
POOL_OP(AveragePool, average_grad, 1, average_grad_kernels, WINDOW_ATTRIBUTES " count_include_pad:i");
POOL_OP(GlobalMaxPool, global_max_grad, 2, max_grad_kernels, "");
POOL_OP(GlobalAveragePool, global_average_grad, 1, average_grad_kernels, "");
