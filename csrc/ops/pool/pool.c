/*
 * MaxPool, AveragePool, their global forms and our AdaptiveAveragePool (x, output sizes), and the kernels of all
 * pooling operators. As in PyTorch, the gradient of a maximum goes to the first largest cell of a window, or to the
 * last NaN; the backward pass finds it again in the input.
 */
#include "ops/pool/pool.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/support/window.h"
#include "simd/simd.h"

typedef struct pool_state {
    ont_pool p;
    const ont_pool_loops *loops;
    int parts;      /* ranges of planes, each with scratch of its own */
    size_t scratch; /* bytes of scratch for each part */
    size_t size;
    bool small; /* small planes: several at once, each in a vector lane */
    bool whole; /* is_whole() */
} pool_state;

/* ---- geometry ---- */

static ont_status read_window(const ont_node *node, const ont_shape *x, ont_pool *p)
{
    ont_window w;
    ONT_TRY(ont_window_init(node, x, NULL, &w));
    for (int d = 0; d < w.rank; d++) {
        int e = 3 - w.rank + d;
        p->in[e] = w.in[d];
        p->out[e] = w.out[d];
        p->kernel[e] = w.kernel[d];
        p->stride[e] = w.stride[d];
        p->dilation[e] = w.dilation[d];
        p->begin[e] = w.begin[d];
        p->limit[e] = w.in[d] + w.end[d];
    }
    return ONT_OK;
}

/* The window covers the plane, whatever its rank. */
static ont_status read_global(const ont_shape *x, ont_pool *p)
{
    int64_t count = ont_shape_count_range(x, 2, x->rank);
    if (count < 1) return ont_fail(ONT_EINVAL, "planes of the input are empty");
    for (int d = 0; d < 3; d++) p->in[d] = p->kernel[d] = p->limit[d] = d < 2 ? 1 : count;
    return ONT_OK;
}

/* Where the output size divides the input size, all windows have one length, as in AveragePool. */
static ont_status read_adaptive(const ont_node *node, const ont_shape *x, ont_pool *p)
{
    const ont_value *dy = ONT_IS(node, AdaptiveAveragePoolGrad) ? ont_node_in(node, 1) : NULL;
    int64_t sizes[3];
    int rank = x->rank - 2, n = rank;
    if (rank < 1 || rank > 3) return ont_fail(ONT_EUNSUPPORTED, "%d spatial dims, 1 to 3 are supported", rank);
    if (dy)
        memcpy(sizes, dy->shape.dims + (ont_attr_int(node, "channels_last", 0) ? 1 : 2), (size_t)rank * sizeof *sizes);
    else
        ONT_TRY(ont_const_ints(node, 1, NULL, sizes, 3, &n));
    if (n != rank) return ont_fail(ONT_EINVAL, "%d output sizes for %d spatial dims", n, rank);
    for (int d = 0; d < rank; d++) {
        int e = 3 - rank + d;
        if (sizes[d] < 0 || x->dims[2 + d] < 1)
            return ont_fail(ONT_EINVAL, "output size %" PRId64 " is not possible for a dim of %" PRId64, sizes[d],
                            x->dims[2 + d]);
        p->in[e] = p->limit[e] = x->dims[2 + d];
        p->out[e] = sizes[d];
        if (p->out[e] && p->in[e] % p->out[e]) p->adaptive = true;
    }
    for (int e = 0; e < 3; e++) {
        p->stride[e] = p->adaptive || !p->out[e] ? 0 : p->in[e] / p->out[e];
        if (!p->adaptive && p->out[e]) p->kernel[e] = p->stride[e];
    }
    return ONT_OK;
}

/* One window that covers the plane, as in the global forms. */
static bool covers_plane(const ont_pool *p)
{
    for (int d = 0; d < 3; d++)
        if (p->out[d] != 1 || p->begin[d] || p->limit[d] != p->in[d] || p->kernel[d] != p->in[d] || p->dilation[d] != 1)
            return false;
    return !p->column_major;
}

static ont_status read_norm(const ont_node *node, ont_pool *p)
{
    const ont_attr *f = ont_attr_find(node, "p", ONT_ATTR_FLOAT); /* an integer attribute from opset 2 on */
    p->p = f ? f->f : (double)ont_attr_int(node, "p", 2);
    if (!(p->p >= 1)) return ont_fail(ONT_EUNSUPPORTED, "p is %g, at least 1 is supported", p->p);
    return ONT_OK;
}

static int kind_of(const ont_op *op)
{
    if (op == &ont_op_MaxPool || op == &ont_op_MaxPoolGrad || op == &ont_op_GlobalMaxPool ||
        op == &ont_op_GlobalMaxPoolGrad || op == &ont_op_MaxUnpool || op == &ont_op_MaxUnpoolGrad)
        return ONT_POOL_MAX;
    bool norm = op == &ont_op_LpPool || op == &ont_op_LpPoolGrad || op == &ont_op_GlobalLpPool ||
                op == &ont_op_GlobalLpPoolGrad;
    return norm ? ONT_POOL_LP : ONT_POOL_MEAN;
}

ont_status ont_pool_read(const ont_node *node, const ont_shape *x, ont_pool *p)
{
    const ont_op *op = node->op;
    *p = (ont_pool){.in = {1, 1, 1}, .out = {1, 1, 1}, .kernel = {1, 1, 1}, .stride = {1, 1, 1}, .dilation = {1, 1, 1},
                    .limit = {1, 1, 1}, .p = 2};
    if (x->rank < 2) return ont_fail(ONT_EINVAL, "the input has rank %d, expected (batch, channels, ...)", x->rank);
    if (op == &ont_op_AdaptiveAveragePool || op == &ont_op_AdaptiveAveragePoolGrad)
        ONT_TRY(read_adaptive(node, x, p));
    else if (op->flags & ONT_OP_GLOBAL)
        ONT_TRY(read_global(x, p));
    else
        ONT_TRY(read_window(node, x, p));
    p->planes = x->dims[0] * x->dims[1];
    p->kind = kind_of(op);
    p->include_pad = ont_attr_int(node, "count_include_pad", 0);
    int64_t order = ont_attr_int(node, "storage_order", 0);
    if (order != 0 && order != 1) return ont_fail(ONT_EINVAL, "storage_order is %" PRId64 ", expected 0 or 1", order);
    p->column_major = order;
    p->in_count = p->in[0] * p->in[1] * p->in[2];
    p->out_count = p->out[0] * p->out[1] * p->out[2];
    if (covers_plane(p)) ONT_TRY(read_global(x, p));
    return p->kind == ONT_POOL_LP ? read_norm(node, p) : ONT_OK;
}

ont_status ont_pool_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ont_pool p;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_pool_read(node, &x->shape, &p));
    ont_shape shape = x->shape;
    int window = node->op->flags & ONT_OP_GLOBAL ? 0 : shape.rank - 2;
    for (int d = 2; d < shape.rank; d++) shape.dims[d] = window ? p.out[3 - window + d - 2] : 1;
    if (ONT_IS(node, MaxPool)) ONT_TRY(ont_infer_out(node, 1, ONT_INT64, &shape));
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static const char *accept_number(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (!ONT_IS(node, MaxPool)) return ont_accept_float(node);
    return dtype == ONT_INT8 || dtype == ONT_UINT8 ? NULL : ont_accept_float(node);
}

/* The winner of a window is a 32-bit offset from the window's first cell, which may be in the padding: this bounds the
 * window itself. In double, since each factor may be as large as an int32. */
static const char *accept_rows(const ont_node *node, const char *(*dtype)(const ont_node *node))
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    ont_pool p;
    if (ont_shape_count_range(x, 2, x->rank) > INT32_MAX / 2) return "the planes are too large";
    if (ont_pool_read(node, x, &p)) return "no window";
    double rows = (double)p.kernel[0] * (double)(p.dilation[0] * p.in[1]) + (double)p.kernel[1] * (double)p.dilation[1];
    double cells = rows * (double)p.in[2] + (double)p.kernel[2] * (double)p.dilation[2];
    return cells > INT32_MAX / 2 ? "the windows are too large" : dtype(node);
}

static const char *accept_number_rows(const ont_node *node) { return accept_rows(node, accept_number); }
static const char *accept_float_rows(const ont_node *node) { return accept_rows(node, ont_accept_float); }

/* Whether this is GlobalMaxPool of float32: the one window covers the plane. */
static bool is_whole(const ont_pool *p, ont_dtype dtype)
{
    bool whole = dtype == ONT_FLOAT32 && p->kind == ONT_POOL_MAX && p->in_count && p->out_count == 1 &&
                 !p->column_major;
    for (int d = 0; d < 3; d++)
        whole &= p->adaptive || (p->kernel[d] == p->in[d] && p->dilation[d] == 1 && p->begin[d] == 0);
    return whole;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    pool_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_pool_read(node, &x->shape, &s->p));
    s->loops = ont_simd_pool(x->dtype);
    s->size = ont_dtype_size(x->dtype);
    s->parts = ont_parallel_threads();
    s->whole = is_whole(&s->p, x->dtype);
    s->small = ont_pool_small(&s->p);
    s->scratch = s->small ? ont_pool_small_scratch(&s->p) : 0;
    if (s->scratch < ont_pool_scratch(&s->p)) s->scratch = ont_pool_scratch(&s->p);
    s->scratch = (s->scratch + 63) / 64 * 64;
    double cells = (double)s->p.kernel[0] * (double)s->p.kernel[1] * (double)s->p.kernel[2] * (double)s->p.out_count;
    double limit = (double)s->p.planes * (s->p.adaptive ? (double)s->p.in_count : cells) / 32768 + 1;
    if (s->parts > limit) s->parts = (int)limit;
    out->state = s;
    out->work_bytes = s->scratch * (size_t)s->parts;
    return ONT_OK;
}

/* ---- one window that covers the plane ---- */

typedef struct pool_job {
    const ont_call *call;
    const pool_state *s;
} pool_job;

/* Index of the first largest of n elements, or of the last NaN. */
static int64_t largest_at(const float *x, int64_t n)
{
    enum { BLOCK = 64 };
    float max_value = ont_simd()->max(x, n);
    if (max_value != max_value) {
        int64_t at = n - 1;
        while (x[at] == x[at]) at--;
        return at;
    }
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t end = at + BLOCK < n ? at + BLOCK : n;
        bool here = false;
        for (int64_t i = at; i < end; i++) here |= x[i] == max_value;
        for (int64_t i = at; here && i < end; i++)
            if (x[i] == max_value) return i;
    }
    return 0;
}

/* Part `part` of the planes. */
static void part_planes(const pool_state *s, int64_t part, int64_t *first, int64_t *last)
{
    *first = s->p.planes * part / s->parts;
    *last = s->p.planes * (part + 1) / s->parts;
}

static void forward_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const pool_state *s = call->state;
    int64_t *indices = call->node->n_outputs > 1 ? call->out[1] : NULL, begin, end;
    for (int64_t part = first; part < last; part++) {
        part_planes(s, part, &begin, &end);
        if (s->whole) {
            for (int64_t i = begin; i < end; i++) {
                const float *x = (const float *)call->in[0] + i * s->p.in_count;
                int64_t at = indices ? largest_at(x, s->p.in_count) : 0;
                if (indices) indices[i] = i * s->p.in_count + at;
                ((float *)call->out[0])[i] = indices ? x[at] : ont_simd()->max(x, s->p.in_count);
            }
            continue;
        }
        if (s->small && !indices) {
            s->loops->small(&s->p, (const char *)call->in[0] + (size_t)(begin * s->p.in_count) * s->size,
                            (char *)call->out[0] + (size_t)(begin * s->p.out_count) * s->size, end - begin,
                            (char *)call->work + (size_t)part * s->scratch);
            continue;
        }
        for (int64_t i = begin; i < end; i++) {
            const char *x = (const char *)call->in[0] + (size_t)(i * s->p.in_count) * s->size;
            char *y = (char *)call->out[0] + (size_t)(i * s->p.out_count) * s->size;
            char *scratch = (char *)call->work + (size_t)part * s->scratch;
            if (s->p.kind == ONT_POOL_MAX)
                s->loops->max(&s->p, x, y, indices ? indices + i * s->p.out_count : NULL, i * s->p.in_count, scratch);
            else
                s->loops->sum(&s->p, x, y, scratch);
        }
    }
}

/* (x, dy[, y]) -> dx */
static void backward_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const pool_state *s = call->state;
    int64_t begin, end;
    for (int64_t part = first; part < last; part++) {
        part_planes(s, part, &begin, &end);
        if (s->whole) {
            for (int64_t i = begin; i < end; i++) {
                float *dx = (float *)call->out[0] + i * s->p.in_count;
                memset(dx, 0, (size_t)s->p.in_count * sizeof *dx);
                dx[largest_at((const float *)call->in[0] + i * s->p.in_count, s->p.in_count)] =
                    ((const float *)call->in[1])[i];
            }
            continue;
        }
        if (s->small) {
            size_t in_at = (size_t)(begin * s->p.in_count) * s->size;
            s->loops->small_grad(&s->p, (const char *)call->in[0] + in_at,
                                 (const char *)call->in[1] + (size_t)(begin * s->p.out_count) * s->size,
                                 (char *)call->out[0] + in_at, end - begin,
                                 (char *)call->work + (size_t)part * s->scratch);
            continue;
        }
        for (int64_t i = begin; i < end; i++) {
            size_t in_at = (size_t)(i * s->p.in_count) * s->size, out_at = (size_t)(i * s->p.out_count) * s->size;
            const char *x = (const char *)call->in[0] + in_at, *dy = (const char *)call->in[1] + out_at;
            const char *y = call->node->n_inputs > 2 ? (const char *)call->in[2] + out_at : NULL;
            char *dx = (char *)call->out[0] + in_at, *scratch = (char *)call->work + (size_t)part * s->scratch;
            if (s->p.kind == ONT_POOL_MAX)
                s->loops->max_grad(&s->p, x, dy, dx, scratch);
            else
                s->loops->sum_grad(&s->p, x, y, dy, dx, scratch);
        }
    }
}

static ont_status forward_run(const ont_call *call)
{
    ont_parallel(((const pool_state *)call->state)->parts, 1, forward_rows, (void *)call);
    return ONT_OK;
}

static ont_status backward_run(const ont_call *call)
{
    ont_parallel(((const pool_state *)call->state)->parts, 1, backward_rows, (void *)call);
    return ONT_OK;
}

/* ---- reference: one cell at a time ---- */

/* Runs body for each cell of output `o`, at offset `at`; `padded` counts the cells that the mean divides by. */
#define EACH_CELL(p, o, body) \
    do { \
        int64_t at_[3] = {(o) / (p)->out[2] / (p)->out[1], (o) / (p)->out[2] % (p)->out[1], (o) % (p)->out[2]}; \
        int64_t lo_[3], hi_[3], counted_[3]; \
        for (int d_ = 0; d_ < 3; d_++) { \
            ont_pool_span(p, d_, at_[d_], &lo_[d_], &hi_[d_], &counted_[d_]); \
            at_[d_] = at_[d_] * (p)->stride[d_] - (p)->begin[d_]; \
        } \
        int64_t padded = counted_[0] * counted_[1] * counted_[2]; \
        (void)padded; \
        for (int64_t a_ = lo_[0]; a_ < hi_[0]; a_++) \
            for (int64_t b_ = lo_[1]; b_ < hi_[1]; b_++) \
                for (int64_t c_ = lo_[2]; c_ < hi_[2]; c_++) { \
                    int64_t at = ((at_[0] + a_ * (p)->dilation[0]) * (p)->in[1] + at_[1] + b_ * (p)->dilation[1]) * \
                                                              (p)->in[2] + \
                                 at_[2] + c_ * (p)->dilation[2]; \
                    body; \
                } \
    } while (0)

static int64_t stored_index(const ont_pool *p, int64_t at)
{
    int64_t w = at % p->in[2], h = at / p->in[2] % p->in[1], d = at / p->in[2] / p->in[1];
    return p->column_major ? d + p->in[0] * (h + p->in[1] * w) : at;
}

#define MAX_REF(suffix, type, lowest) \
    static void max_##suffix(const ont_call *call, const ont_pool *p, int64_t plane) \
    { \
        const type *x = (const type *)call->in[0] + plane * p->in_count; \
        int64_t *indices = call->node->n_outputs > 1 ? call->out[1] : NULL; \
        for (int64_t o = 0; o < p->out_count; o++) { \
            int64_t winner = -1; \
            EACH_CELL(p, o, if (winner < 0 || x[at] > x[winner] || x[at] != x[at]) winner = at); \
            ((type *)call->out[0])[plane * p->out_count + o] = winner < 0 ? (type)(lowest) : x[winner]; \
            if (indices) \
                indices[plane * p->out_count + o] = winner < 0 ? -1 : plane * p->in_count + stored_index(p, winner); \
        } \
    }
MAX_REF(f32, float, -INFINITY)
MAX_REF(f64, double, -INFINITY)
MAX_REF(i8, int8_t, INT8_MIN)
MAX_REF(u8, uint8_t, 0)

#define POOL_REF(suffix, type) \
    static void sum_##suffix(const ont_call *call, const ont_pool *p, int64_t plane) \
    { \
        const type *x = (const type *)call->in[0] + plane * p->in_count; \
        for (int64_t o = 0; o < p->out_count; o++) { \
            double sum = 0; \
            int64_t count = 0, padded_count = 0; \
            EACH_CELL(p, o, { \
                sum += p->kind == ONT_POOL_LP ? pow(fabs((double)x[at]), p->p) : (double)x[at]; \
                count++; \
                padded_count = padded; \
            }); \
            double y = p->kind == ONT_POOL_LP ? pow(sum, 1 / p->p) \
                                                    : sum / (double)(p->include_pad ? padded_count : count); \
            ((type *)call->out[0])[plane * p->out_count + o] = (type)y; \
        } \
    } \
    /* (x, dy[, y]) -> dx */ \
    static void grad_##suffix(const ont_call *call, const ont_pool *p, int64_t plane) \
    { \
        const type *x = (const type *)call->in[0] + plane * p->in_count; \
        type *dx = (type *)call->out[0] + plane * p->in_count; \
        memset(dx, 0, (size_t)p->in_count * sizeof *dx); \
        for (int64_t o = 0; o < p->out_count; o++) { \
            int64_t from = plane * p->out_count + o, winner = -1, count = 0, padded_count = 0; \
            double dy = ((const type *)call->in[1])[from]; \
            double y = call->node->n_inputs > 2 ? ((const type *)call->in[2])[from] : 1; \
            EACH_CELL(p, o, { \
                if (winner < 0 || x[at] > x[winner] || x[at] != x[at]) winner = at; \
                count++; \
                padded_count = padded; \
            }); \
            if (p->kind == ONT_POOL_MAX) { \
                if (winner >= 0) dx[winner] += (type)dy; \
                continue; \
            } \
            if (p->kind == ONT_POOL_MEAN) dy /= (double)(p->include_pad ? padded_count : count); \
            EACH_CELL(p, o, { \
                double sign = (double)((x[at] > 0) - (x[at] < 0)); \
                if (p->kind == ONT_POOL_MEAN) \
                    dx[at] += (type)dy; \
                else if (y != 0) \
                    dx[at] += (type)(dy * sign * pow(fabs((double)x[at]) / y, p->p - 1)); \
            }); \
        } \
    }
POOL_REF(f32, float)
POOL_REF(f64, double)

static ont_status forward_ref(const ont_call *call)
{
    const ont_pool *p = &((const pool_state *)call->state)->p;
    void (*plane)(const ont_call *, const ont_pool *, int64_t);
    switch (ont_node_in(call->node, 0)->dtype) {
    case ONT_INT8: plane = max_i8; break;
    case ONT_UINT8: plane = max_u8; break;
    case ONT_FLOAT32: plane = p->kind == ONT_POOL_MAX ? max_f32 : sum_f32; break;
    default: plane = p->kind == ONT_POOL_MAX ? max_f64 : sum_f64; break;
    }
    for (int64_t i = 0; i < p->planes; i++) plane(call, p, i);
    return ONT_OK;
}

static ont_status backward_ref(const ont_call *call)
{
    const ont_pool *p = &((const pool_state *)call->state)->p;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    for (int64_t i = 0; i < p->planes; i++) (f32 ? grad_f32 : grad_f64)(call, p, i);
    return ONT_OK;
}

const ont_kernel ont_pool_kernels[2] = {
    {.name = "pool_rows", .accept = accept_number_rows, .prepare = prepare, .run = forward_run},
    {.name = "pool_ref", .accept = accept_number, .prepare = prepare, .run = forward_ref},
};
const ont_kernel ont_pool_grad_kernels[2] = {
    {.name = "pool_grad_rows", .accept = accept_float_rows, .prepare = prepare, .run = backward_run},
    {.name = "pool_grad_ref", .accept = ont_accept_float, .prepare = prepare, .run = backward_ref},
};

/* ---- gradients and descriptors ---- */

void ont_pool_grad_as(ont_grad *g, const char *op_type, bool with_output)
{
    ont_builder *b = &g->b;
    ont_value *dy = GO(0);
    if (b->status != ONT_OK) return;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, op_type, (ont_value *[]){I(0), dy, O(0)}, with_output ? 3 : 2, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    GI(0, ont_build_done(b, node));
}

static void max_grad(ont_grad *g) { ont_pool_grad_as(g, "MaxPoolGrad", false); }
static void average_grad(ont_grad *g) { ont_pool_grad_as(g, "AveragePoolGrad", false); }
static void global_max_grad(ont_grad *g) { ont_pool_grad_as(g, "GlobalMaxPoolGrad", false); }
static void global_average_grad(ont_grad *g) { ont_pool_grad_as(g, "GlobalAveragePoolGrad", false); }
static void adaptive_grad(ont_grad *g) { ont_pool_grad_as(g, "AdaptiveAveragePoolGrad", false); }

#define POOL_OP(name_, domain_, inputs_, flags_, grad_, attributes_) \
    const ont_op ont_op_##name_ = {.domain = domain_, .name = #name_, .since = 1, .min_inputs = inputs_, \
                                   .max_inputs = inputs_, .flags = flags_, .attributes = attributes_, \
                                   .nondiff_inputs = 2, .nondiff_outputs = 2, .infer = ont_pool_infer, \
                                   .grad = grad_, ONT_KERNELS(ont_pool_kernels)}; \
    const ont_op ont_op_##name_##Grad = {.domain = ONT_DOMAIN, .name = #name_ "Grad", .since = 1, .min_inputs = 2, \
                                         .max_inputs = 2, .flags = (flags_) & ONT_OP_GLOBAL, \
                                         .attributes = attributes_ " shape:I", \
                                         .infer = ont_infer_same, \
                                         ONT_KERNELS(ont_pool_grad_kernels)}
#define WINDOW_ATTRIBUTES "auto_pad:s ceil_mode:i dilations:I kernel_shape:I pads:I strides:I"
POOL_OP(MaxPool, "", 1, 0, max_grad, WINDOW_ATTRIBUTES " storage_order:i");
POOL_OP(AveragePool, "", 1, 0, average_grad, WINDOW_ATTRIBUTES " count_include_pad:i");
POOL_OP(GlobalMaxPool, "", 1, ONT_OP_GLOBAL, global_max_grad, "");
POOL_OP(GlobalAveragePool, "", 1, ONT_OP_GLOBAL, global_average_grad, "");
POOL_OP(AdaptiveAveragePool, ONT_DOMAIN, 2, ONT_OP_PUBLIC, adaptive_grad, "");
