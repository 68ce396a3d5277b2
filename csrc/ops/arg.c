/*
 * ArgMax, ArgMin and TopK: positions of the largest or smallest entries along an axis. NaN counts as the largest and as
 * the smallest alike, as in torch; among equals the lower position comes first. TorchTopK is TopK with torch's choice
 * among equals.
 */
#include <inttypes.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/introselect.h"
#include "ops/op.h"

typedef bool (*better_fn)(const void *x, int64_t a, int64_t b); /* whether element a comes before element b */

#define BETTER(suffix, type) \
    static bool larger_##suffix(const void *data, int64_t i, int64_t j) \
    { \
        type a = ((const type *)data)[i], b = ((const type *)data)[j]; \
        return a > b || (a != a && b == b); \
    } \
    static bool smaller_##suffix(const void *data, int64_t i, int64_t j) \
    { \
        type a = ((const type *)data)[i], b = ((const type *)data)[j]; \
        return a < b || (a != a && b == b); \
    } \
    /* in a sort by size NaN stands at one end: above all numbers */ \
    static bool ascending_##suffix(const void *data, int64_t i, int64_t j) \
    { \
        type a = ((const type *)data)[i], b = ((const type *)data)[j]; \
        return a < b || (b != b && a == a); \
    }
BETTER(f32, float)
BETTER(f64, double)
BETTER(i32, int32_t)
BETTER(i64, int64_t)
BETTER(u64, uint64_t)

enum { LARGER, SMALLER, ASCENDING };

static better_fn better_of(ont_dtype dtype, int kind)
{
    switch (dtype) {
#define CASE(name, suffix) \
    case ONT_##name: return kind == LARGER ? larger_##suffix : kind == SMALLER ? smaller_##suffix : ascending_##suffix;
        CASE(FLOAT32, f32)
        CASE(FLOAT64, f64)
        CASE(INT32, i32)
        CASE(INT64, i64)
        CASE(UINT64, u64)
#undef CASE
    default: return NULL;
    }
}

static const char *accept(const ont_node *node)
{
    return better_of(ont_node_in(node, 0)->dtype, LARGER) ? NULL
        : "dtype is none of float, double, int32, int64, uint64";
}

/* ---- ArgMax, ArgMin ---- */

static ont_status arg_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    int axis;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis));
    if (!x->shape.dims[axis]) return ont_fail(ONT_EINVAL, "axis %d is empty", axis);
    ont_shape shape = {0};
    bool keep = ont_attr_int(node, "keepdims", 1);
    for (int d = 0; d < x->shape.rank; d++)
        if (d != axis || keep) shape.dims[shape.rank++] = d == axis ? 1 : x->shape.dims[d];
    return ont_infer_out(node, 0, ONT_INT64, &shape);
}

typedef struct line_state {
    int64_t n, inner, lines, k;
    better_fn better;
    bool last, sorted;
    size_t size;
} line_state;

static ont_status arg_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    line_state *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis));
    s->n = x->shape.dims[axis];
    s->inner = ont_shape_count_range(&x->shape, axis + 1, x->shape.rank);
    s->lines = ont_shape_count_range(&x->shape, 0, axis) * s->inner;
    s->better = better_of(x->dtype, strcmp(node->op->name, "ArgMax") ? SMALLER : LARGER);
    s->last = ont_attr_int(node, "select_last_index", 0);
    out->state = s;
    return ONT_OK;
}

/* float32: an extremum of n numbers, `step` apart, is compared without a call per element. */
static int64_t arg_row_f32(const float *x, int64_t step, int64_t n, bool largest, bool last)
{
    int64_t best = 0;
    float most = x[0];
    for (int64_t i = 1; i < n; i++) {
        float v = x[i * step];
        bool better = largest ? v > most : v < most, nan = v != v;
        if (better || nan || (last && v == most)) {
            if (most != most && !(nan && last)) continue;
            most = v;
            best = i;
        }
    }
    return best;
}

enum { STRIP = 256, NARROW = 8 }; /* columns */

/* float32 along another axis: lines [first, last) of one outer index, strips of them side by side, row by row. */
static void arg_columns_f32(const float *x, const line_state *s, bool largest, int64_t first, int64_t last,
                            int64_t *out)
{
    float most[STRIP];
    int32_t best[STRIP];
    for (int64_t j = first; s->inner < NARROW && j < last; j++)
        out[j] = arg_row_f32(x + j, s->inner, s->n, largest, s->last);
    for (int64_t from = first; s->inner >= NARROW && from < last; from += STRIP) {
        int64_t w = last - from < STRIP ? last - from : STRIP;
        memcpy(most, x + from, (size_t)w * sizeof *most);
        memset(best, 0, sizeof best);
        for (int64_t k = 1; k < s->n; k++) {
            const float *row = x + k * s->inner + from;
            const float sign = largest ? 1 : -1;
            const int32_t take_equal = s->last ? -1 : 0, here = (int32_t)k;
            for (int64_t j = 0; j < w; j++) {
                float v = row[j], m = most[j];
                int32_t nan = -(v != v), old_nan = -(m != m), equal = (-(v == m) | (nan & old_nan)) & take_equal;
                int32_t better = (-(v * sign > m * sign) | (nan & ~old_nan) | equal);
                best[j] = (better & here) | (~better & best[j]);
                most[j] = better ? v : m;
            }
        }
        for (int64_t j = 0; j < w; j++) out[from + j] = best[j];
    }
}

static void arg_lines(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const line_state *s = call->state;
    const void *x = call->in[0];
    if (s->inner == 1 && ont_node_in(call->node, 0)->dtype == ONT_FLOAT32) {
        bool largest = s->better == better_of(ONT_FLOAT32, LARGER);
        for (int64_t line = first; line < last; line++)
            ((int64_t *)call->out[0])[line] = arg_row_f32((const float *)x + line * s->n, 1, s->n, largest, s->last);
        return;
    }
    if (ont_node_in(call->node, 0)->dtype == ONT_FLOAT32 && s->n <= INT32_MAX) {
        bool largest = s->better == better_of(ONT_FLOAT32, LARGER);
        for (int64_t line = first, end; line < last; line = end) {
            int64_t outer = line / s->inner, from = line % s->inner;
            end = last < (outer + 1) * s->inner ? last : (outer + 1) * s->inner;
            arg_columns_f32((const float *)call->in[0] + outer * s->n * s->inner, s, largest, from, from + end - line,
                            (int64_t *)call->out[0] + outer * s->inner);
        }
        return;
    }
    for (int64_t line = first; line < last; line++) {
        int64_t base = line / s->inner * s->n * s->inner + line % s->inner, best = base;
        for (int64_t i = 1; i < s->n; i++) {
            int64_t at = base + i * s->inner;
            if (s->last ? !s->better(x, best, at) : s->better(x, at, best)) best = at;
        }
        ((int64_t *)call->out[0])[line] = (best - base) / s->inner;
    }
}

static ont_status arg_run(const ont_call *call)
{
    const line_state *s = call->state;
    ont_parallel(s->lines, 8192 / s->n + 1, arg_lines, (void *)call);
    return ONT_OK;
}

static const ont_kernel arg_kernels[] = {{.name = "arg_ref", .accept = accept, .prepare = arg_prepare, .run = arg_run}};
#define ARG(name_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 1, .min_inputs = 1, .max_inputs = 1, \
                                   .flags = ONT_OP_NO_GRAD, .attributes = "axis:i keepdims:i select_last_index:i", \
                                   .infer = arg_infer, ONT_KERNELS(arg_kernels)}
ARG(ArgMax);
ARG(ArgMin);

/* ---- TopK ---- */

/* k is attribute before opset 10, then input 1. */
static ont_status topk_config(const ont_node *node, int *axis, int64_t *k)
{
    const ont_value *x = ont_node_in(node, 0);
    int n = -1;
    *k = ont_attr_int(node, "k", -1);
    if (ont_node_in(node, 1)) ONT_TRY(ont_const_ints(node, 1, NULL, k, 1, &n));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", -1), x->shape.rank, axis));
    if (n == 0 || *k < 0 || *k > x->shape.dims[*axis])
        return ont_fail(ONT_EINVAL, "k is %" PRId64 ", axis %d has %" PRId64 " entries", *k, *axis,
                        x->shape.dims[*axis]);
    return ONT_OK;
}

static ont_status topk_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    int axis;
    int64_t k;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(topk_config(node, &axis, &k));
    ont_shape shape = x->shape;
    shape.dims[axis] = k;
    ONT_TRY(ont_infer_out(node, 0, x->dtype, &shape));
    return ont_infer_out(node, 1, ONT_INT64, &shape);
}

static ont_status topk_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    line_state *s = ont_arena_alloc(arena, sizeof *s);
    int axis;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(topk_config(node, &axis, &s->k));
    s->n = x->shape.dims[axis];
    s->inner = ont_shape_count_range(&x->shape, axis + 1, x->shape.rank);
    s->lines = ont_shape_count_range(&x->shape, 0, axis) * s->inner;
    s->better = better_of(x->dtype, ont_attr_int(node, "largest", 1) ? LARGER : ASCENDING);
    s->size = ont_dtype_size(x->dtype);
    out->state = s;
    out->work_bytes = (size_t)(s->lines * s->k) * sizeof(int64_t);
    return ONT_OK;
}

/* A total order: by size, then by position. */
static bool before(const line_state *s, const void *x, int64_t a, int64_t b)
{
    if (s->better(x, a, b)) return true;
    return !s->better(x, b, a) && a < b;
}

/* heap[0] is the one that comes last among those kept. */
static void sift_down(const line_state *s, const void *x, int64_t *heap, int64_t n, int64_t at)
{
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= n) return;
        if (child + 1 < n && before(s, x, heap[child], heap[child + 1])) child++;
        if (!before(s, x, heap[at], heap[child])) return;
        int64_t swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
        at = child;
    }
}

static void topk_lines(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const line_state *s = call->state;
    const void *x = call->in[0];
    for (int64_t line = first; line < last; line++) {
        int64_t base = line / s->inner * s->n * s->inner + line % s->inner, *heap = (int64_t *)call->work + line * s->k;
        for (int64_t i = 0; i < s->k; i++) heap[i] = base + i * s->inner;
        for (int64_t i = s->k / 2 - 1; i >= 0; i--) sift_down(s, x, heap, s->k, i);
        for (int64_t i = s->k; i < s->n; i++) {
            if (!before(s, x, base + i * s->inner, heap[0])) continue;
            heap[0] = base + i * s->inner;
            sift_down(s, x, heap, s->k, 0);
        }
        for (int64_t n = s->k - 1; n > 0; n--) { /* the heap sorts itself from the end */
            int64_t swap = heap[0];
            heap[0] = heap[n];
            heap[n] = swap;
            sift_down(s, x, heap, n, 0);
        }
        int64_t to = line / s->inner * s->k * s->inner + line % s->inner;
        for (int64_t i = 0; i < s->k; i++, to += s->inner) {
            if (call->out[0])
                memcpy((char *)call->out[0] + (size_t)to * s->size, (const char *)x + (size_t)heap[i] * s->size,
                       s->size);
            if (call->node->n_outputs > 1 && call->out[1]) ((int64_t *)call->out[1])[to] = (heap[i] - base) / s->inner;
        }
    }
}

static ont_status topk_run(const ont_call *call)
{
    const line_state *s = call->state;
    if (s->k) ont_parallel(s->lines, 2048 / s->n + 1, topk_lines, (void *)call);
    return ONT_OK;
}

static void topk_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *positions = NULL, *zeros = ont_build_full(b, I(0)->dtype, &I(0)->shape, 0), *dy = GO(0);
    if (b->status == ONT_OK) b->status = ont_node_want_output(b->graph, g->node, 1, &positions);
    if (b->status != ONT_OK) return;
    if (!positions->has_shape && (b->status = ont_infer_out(g->node, 1, ONT_INT64, &O(0)->shape)) != ONT_OK) return;
    ont_node *node = ont_build_node(b, "", "ScatterElements", (ont_value *[]){zeros, positions, dy}, 3, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", ont_attr_int(g->node, "axis", -1));
    GI(0, ont_build_done(b, node));
}

static const ont_kernel topk_kernels[] = {{.name = "topk_ref", .accept = accept, .prepare = topk_prepare,
                                           .run = topk_run}};
const ont_op ont_op_TopK = {.domain = "", .name = "TopK", .since = 1, .min_inputs = 1, .max_inputs = 2,
                            .nondiff_inputs = 2, .nondiff_outputs = 2, .attributes = "axis:i k:i largest:i sorted:i",
                            .infer = topk_infer, .grad = topk_grad, ONT_KERNELS(topk_kernels)};

/* ---- TorchTopK ---- */

typedef struct pick_state {
    line_state lines;
    int parts; /* of the lines, each with a row of its own in the scratch */
    bool largest;
} pick_state;

static ont_status pick_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    pick_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(topk_prepare(node, arena, out));
    s->lines = *(line_state *)out->state;
    s->lines.sorted = ont_attr_int(node, "sorted", 1);
    s->largest = ont_attr_int(node, "largest", 1);
    double most = (double)s->lines.lines * (double)s->lines.n / 2048 + 1;
    s->parts = ont_parallel_threads();
    if (s->parts > most) s->parts = (int)most;
    out->state = s;
    out->work_bytes = (size_t)s->parts * (size_t)s->lines.n * sizeof(ont_ranked);
    return ONT_OK;
}

/* Lower for what comes first; NaN is above all numbers. */
static int64_t rank_of_float(double v, bool largest)
{
    int64_t bits;
    if (v != v) return largest ? INT64_MIN : INT64_MAX;
    if (v == 0) v = 0; /* of either sign */
    memcpy(&bits, &v, sizeof bits);
    bits ^= (bits >> 63) & INT64_MAX;
    return largest ? ~bits : bits;
}

static int64_t rank_of_int(int64_t v, bool largest) { return largest ? ~v : v; }

static void rank_line(ont_dtype dtype, const void *data, int64_t step, int64_t n, bool largest, ont_ranked *to)
{
#define RANK(name, type, kind, convert) \
    case ONT_##name: \
        for (int64_t i = 0; i < n; i++) \
            to[i] = (ont_ranked){rank_of_##kind(convert(((const type *)data)[i * step]), largest), i}; \
        break;
#define WRAPPED(v) ((int64_t)((v) ^ (uint64_t)1 << 63))
    switch (dtype) {
        RANK(FLOAT32, float, float, )
        RANK(FLOAT64, double, float, )
        RANK(INT32, int32_t, int, )
        RANK(UINT64, uint64_t, int, WRAPPED)
    default:
        RANK(INT64, int64_t, int, )
    }
#undef WRAPPED
#undef RANK
}

static void pick_part(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const pick_state *s = call->state;
    const line_state *l = &s->lines;
    ont_dtype dtype = ont_node_in(call->node, 0)->dtype;
    for (int64_t part = first; part < last; part++) {
        ont_ranked *row = (ont_ranked *)call->work + part * l->n;
        for (int64_t line = part * l->lines / s->parts; line < (part + 1) * l->lines / s->parts; line++) {
            int64_t from = line / l->inner * l->n * l->inner + line % l->inner;
            int64_t to = line / l->inner * l->k * l->inner + line % l->inner;
            const char *x = (const char *)call->in[0] + (size_t)from * l->size;
            rank_line(dtype, x, l->inner, l->n, s->largest, row);
            ont_lowest_first(row, l->n, l->k, l->sorted);
            for (int64_t i = 0; i < l->k; i++, to += l->inner) {
                if (call->out[0])
                    memcpy((char *)call->out[0] + (size_t)to * l->size, x + (size_t)(row[i].at * l->inner) * l->size,
                           l->size);
                if (call->node->n_outputs > 1 && call->out[1]) ((int64_t *)call->out[1])[to] = row[i].at;
            }
        }
    }
}

static ont_status pick_run(const ont_call *call)
{
    const pick_state *s = call->state;
    if (s->lines.k) ont_parallel(s->parts, 1, pick_part, (void *)call);
    return ONT_OK;
}

static const ont_kernel pick_kernels[] = {{.name = "torch_topk", .accept = accept, .prepare = pick_prepare,
                                           .run = pick_run}};
const ont_op ont_op_TorchTopK = {.domain = ONT_DOMAIN, .name = "TorchTopK", .since = 1, .min_inputs = 2,
                                 .max_inputs = 2, .flags = ONT_OP_MODEL, .nondiff_inputs = 2, .nondiff_outputs = 2,
                                 .attributes = "axis:i largest:i sorted:i", .infer = topk_infer, .grad = topk_grad,
                                 ONT_KERNELS(pick_kernels)};
