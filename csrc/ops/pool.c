/*
 * MaxPool, AveragePool and their global forms. A maximum's gradient goes to the first largest cell of a window, found
 * again from the input, as in torch.
 */
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/window.h"

typedef struct pool_state {
    ont_window w;
    int64_t planes;
    bool maximum, include_pad;
} pool_state;

static ont_status read_state(const ont_node *node, const ont_shape *x, pool_state *s)
{
    ONT_TRY(ont_window_init(node, x, NULL, &s->w));
    s->planes = x->dims[0] * x->dims[1];
    s->maximum = strstr(node->op->name, "Max") != NULL;
    s->include_pad = ont_attr_int(node, "count_include_pad", 0);
    return ONT_OK;
}

static ont_status pool_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    pool_state s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(read_state(node, &x->shape, &s));
    if (ont_node_out(node, 1)) return ont_fail(ONT_EUNSUPPORTED, "the Indices output");
    for (int d = 0; d < s.w.rank; d++)
        if (s.maximum && s.w.begin[d] >= (s.w.kernel[d] - 1) * s.w.dilation[d] + 1)
            return ont_fail(ONT_EINVAL, "padding of spatial dim %d leaves windows without a cell", d);
    ont_shape shape = {.rank = x->shape.rank, .dims = {x->shape.dims[0], x->shape.dims[1]}};
    for (int d = 0; d < s.w.rank; d++) shape.dims[d + 2] = s.w.out[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static const char *accept_float(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "dtype";
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    pool_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    out->state = s;
    return read_state(node, &ont_node_in(node, 0)->shape, s);
}

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

/* Visits the cells of a window in order; the body sees `at`. Dims beyond the rank have one cell. */
#define EACH_CELL(w, range, body) \
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
                    body; \
                } \
    } while (0)

#define POOL(suffix, type) \
    static void forward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const pool_state *s = call->state; \
        int64_t range[ONT_WINDOW_RANK][2]; \
        for (int64_t p = first; p < last; p++) \
            for (int64_t o = 0; o < s->w.out_count; o++) { \
                const type *x = (const type *)call->in[0] + p * s->w.in_count; \
                type sum = 0, most = -(type)INFINITY; \
                int64_t count = clip_window(s, o, range); \
                EACH_CELL(&s->w, range, { \
                    sum += x[at]; \
                    most = x[at] > most || isnan(x[at]) ? x[at] : most; \
                }); \
                ((type *)call->out[0])[p * s->w.out_count + o] = s->maximum ? most : sum / (type)count; \
            } \
    } \
    /* (x, dy) -> dx */ \
    static void backward_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const pool_state *s = call->state; \
        int64_t range[ONT_WINDOW_RANK][2]; \
        for (int64_t p = first; p < last; p++) { \
            const type *x = (const type *)call->in[0] + p * s->w.in_count; \
            type *dx = (type *)call->out[0] + p * s->w.in_count; \
            memset(dx, 0, (size_t)s->w.in_count * sizeof *dx); \
            for (int64_t o = 0; o < s->w.out_count; o++) { \
                type dy = ((const type *)call->in[1])[p * s->w.out_count + o], most = -(type)INFINITY; \
                int64_t count = clip_window(s, o, range), winner = -1; \
                EACH_CELL(&s->w, range, { \
                    if (!s->maximum) { \
                        dx[at] += dy / (type)count; \
                    } else if (winner < 0 || x[at] > most || isnan(x[at])) { \
                        most = x[at]; \
                        winner = at; \
                    } \
                }); \
                if (winner >= 0) dx[winner] += dy; \
            } \
        } \
    }
POOL(f32, float)
POOL(f64, double)

static int64_t grain(const pool_state *s)
{
    return 4096 / (s->w.out_count * s->w.kernel_count + 1) + 1;
}

static ont_status forward_run(const ont_call *call)
{
    const pool_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ont_parallel(s->planes, grain(s), f32 ? forward_f32 : forward_f64, (void *)call);
    return ONT_OK;
}

static ont_status backward_run(const ont_call *call)
{
    const pool_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ont_parallel(s->planes, grain(s), f32 ? backward_f32 : backward_f64, (void *)call);
    return ONT_OK;
}

static void pool_grad_as(ont_grad *g, const char *op_type)
{
    ont_builder *b = &g->b;
    ont_value *dy = GO(0);
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, op_type, (ont_value *[]){I(0), dy}, 2, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    GI(0, ont_build_done(b, node));
}

static void max_grad(ont_grad *g) { pool_grad_as(g, "MaxPoolGrad"); }
static void average_grad(ont_grad *g) { pool_grad_as(g, "AveragePoolGrad"); }
static void global_max_grad(ont_grad *g) { pool_grad_as(g, "GlobalMaxPoolGrad"); }
static void global_average_grad(ont_grad *g) { pool_grad_as(g, "GlobalAveragePoolGrad"); }

static const ont_kernel forward_kernels[] = {
    {.name = "pool_ref", .accept = accept_float, .prepare = prepare, .run = forward_run},
};
static const ont_kernel backward_kernels[] = {
    {.name = "pool_grad_ref", .accept = accept_float, .prepare = prepare, .run = backward_run},
};

#define POOL_OP(name_, since_, grad_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = since_, .min_inputs = 1, .max_inputs = 1, \
                                   .infer = pool_infer, .grad = grad_, ONT_KERNELS(forward_kernels)}; \
    const ont_op ont_op_##name_##Grad = {.domain = ONT_DOMAIN, .name = #name_ "Grad", .since = 1, .min_inputs = 2, \
                                         .max_inputs = 2, .infer = ont_infer_same, ONT_KERNELS(backward_kernels)}
POOL_OP(MaxPool, 1, max_grad);
POOL_OP(AveragePool, 1, average_grad);
POOL_OP(GlobalMaxPool, 1, global_max_grad);
POOL_OP(GlobalAveragePool, 1, global_average_grad);
