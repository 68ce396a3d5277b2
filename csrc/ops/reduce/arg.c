/*
 * ArgMax, ArgMin and TopK: positions of the largest or smallest elements along an axis. As in PyTorch, NaN counts as
 * the largest and as the smallest element; among equals the lower position comes first. TorchTopK is TopK with
 * PyTorch's choice among equals.
 */
#include <inttypes.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/reduce/introselect.h"
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
    /* when sorting by size, NaN is above all numbers */ \
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
        : "dtype is not one of float, double, int32, int64, uint64";
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
    int64_t n, inner, lines, k, parts; /* n: elements of a line; parts: ranges of lines */
    better_fn better;
    bool last, descending;
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
    s->better = better_of(x->dtype, ONT_IS(node, ArgMax) ? LARGER : SMALLER);
    s->last = ont_attr_int(node, "select_last_index", 0);
    out->state = s;
    return ONT_OK;
}

/* float32: the extremum of n numbers with stride `stride`, without a call for each element. */
static int64_t arg_row_f32(const float *x, int64_t stride, int64_t n, bool largest, bool last)
{
    int64_t best = 0;
    float extremum = x[0];
    for (int64_t i = 1; i < n; i++) {
        float v = x[i * stride];
        bool better = largest ? v > extremum : v < extremum, nan = v != v;
        if (better || nan || (last && v == extremum)) {
            if (extremum != extremum && !(nan && last)) continue;
            extremum = v;
            best = i;
        }
    }
    return best;
}

enum { STRIP = 256, NARROW = 8, FOLD = 32 }; /* STRIP: columns; FOLD: rows of a long line that are read as one */

/* float32, another axis than the last: lines [first, last) of one outer index, strips of neighbouring lines, row by
 * row. */
static void arg_columns_f32(const float *x, const line_state *s, bool largest, int64_t first, int64_t last,
                            int64_t *out)
{
    float extremum[STRIP];
    int32_t best[STRIP];
    for (int64_t j = first; s->inner < NARROW && j < last; j++)
        out[j] = arg_row_f32(x + j, s->inner, s->n, largest, s->last);
    for (int64_t from = first; s->inner >= NARROW && from < last; from += STRIP) {
        int64_t w = last - from < STRIP ? last - from : STRIP;
        memcpy(extremum, x + from, (size_t)w * sizeof *extremum);
        memset(best, 0, sizeof best);
        for (int64_t k = 1; k < s->n; k++) {
            const float *row = x + k * s->inner + from;
            const float sign = largest ? 1 : -1;
            const int32_t take_equal = s->last ? -1 : 0, here = (int32_t)k;
            for (int64_t j = 0; j < w; j++) {
                float v = row[j], m = extremum[j];
                int32_t nan = -(v != v), old_nan = -(m != m), equal = (-(v == m) | (nan & old_nan)) & take_equal;
                int32_t better = (-(v * sign > m * sign) | (nan & ~old_nan) | equal);
                best[j] = (better & here) | (~better & best[j]);
                extremum[j] = better ? v : m;
            }
        }
        for (int64_t j = 0; j < w; j++) out[from + j] = best[j];
    }
}

/* Whether v at row i of a line comes before `extremum` at row `best`. */
static bool precedes(float v, int64_t i, float extremum, int64_t best, const line_state *s, bool largest)
{
    if (v == extremum || (v != v && extremum != extremum)) return s->last ? i > best : i < best;
    return v != v || (largest ? v > extremum : v < extremum);
}

/* float32, long lines of few columns: FOLD rows are read as one, so that there are many columns. Then the extremum of
 * each line is found among its FOLD positions and the remaining rows. */
static void arg_folded_f32(const float *x, const line_state *s, bool largest, int64_t *out)
{
    int64_t found[FOLD * NARROW], rows = s->n / FOLD;
    line_state wide = *s;
    wide.inner *= FOLD;
    wide.n = rows;
    arg_columns_f32(x, &wide, largest, 0, wide.inner, found);
    for (int64_t j = 0; j < s->inner; j++) {
        int64_t best = found[j] * FOLD;
        float extremum = x[best * s->inner + j];
        for (int64_t g = 1; g < FOLD + s->n % FOLD; g++) {
            int64_t i = g < FOLD ? found[g * s->inner + j] * FOLD + g : (rows - 1) * FOLD + g;
            float v = x[i * s->inner + j];
            if (precedes(v, i, extremum, best, s, largest)) extremum = v, best = i;
        }
        out[j] = best;
    }
}

static bool folds(const line_state *s, ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 && s->inner < NARROW && s->n >= 4 * FOLD && s->n <= INT32_MAX;
}

static void arg_outer(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const line_state *s = call->state;
    bool largest = s->better == better_of(ONT_FLOAT32, LARGER);
    for (int64_t outer = first; outer < last; outer++)
        arg_folded_f32((const float *)call->in[0] + outer * s->n * s->inner, s, largest,
                       (int64_t *)call->out[0] + outer * s->inner);
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
    if (folds(s, ont_node_in(call->node, 0)->dtype))
        ont_parallel(s->lines / s->inner, 8192 / (s->n * s->inner) + 1, arg_outer, (void *)call);
    else
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

/* Before opset 10, k is an attribute, then input 1. */
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

/* heap[0] is the last of the kept elements in the order. */
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
        for (int64_t n = s->k - 1; n > 0; n--) { /* heapsort, from the end */
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

/* ---- TopK of 32-bit numbers: a 64-bit key for each, its order above its position ---- */

enum { FEW = 48, DIGITS = 4, VALUES = 256 }; /* lengths up to FEW are sorted by insertion; digits and their values in
                                              * a radix sort */

static const char *accept_keys(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    int axis;
    int64_t k;
    if (x->dtype != ONT_FLOAT32 && x->dtype != ONT_INT32) return "dtype is not one of float, int32";
    if (topk_config(node, &axis, &k) != ONT_OK) return "k";
    return x->shape.dims[axis] <= INT32_MAX ? NULL : "a long line";
}

static ont_status keys_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(topk_prepare(node, arena, out));
    line_state *s = out->state;
    s->descending = ont_attr_int(node, "largest", 1) != 0;
    s->parts = s->lines < ont_parallel_threads() ? s->lines : ont_parallel_threads();
    out->work_bytes = (size_t)(2 * s->n * s->parts) * sizeof(uint64_t);
    return ONT_OK;
}

/* Keys of equal order for zeros of both signs, and for all NaN, which are above all numbers. */
static void read_keys(const line_state *s, ont_dtype dtype, const void *x, uint64_t *keys)
{
    const uint32_t sign = 0x80000000u, flip = s->descending ? UINT32_MAX : 0;
    for (int64_t i = 0; i < s->n; i++) {
        uint32_t bits;
        memcpy(&bits, (const char *)x + (size_t)(i * s->inner) * sizeof bits, sizeof bits);
        if (dtype == ONT_FLOAT32) {
            uint32_t magnitude = bits & ~sign;
            bits = magnitude > 0x7f800000 ? ~sign : magnitude ? bits : 0;
            bits ^= bits & sign ? ~sign : 0;
        }
        keys[i] = (uint64_t)(bits ^ sign ^ flip) << 32 | (uint64_t)i;
    }
}

static void insertion_sort(uint64_t *keys, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        uint64_t key = keys[i];
        int64_t at = i;
        for (; at && keys[at - 1] > key; at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
}

/* Stable radix sort by the upper halves, from the lowest digit. Returns the array that holds the result. */
static uint64_t *radix_sort(uint64_t *keys, uint64_t *other, int64_t n)
{
    uint32_t count[DIGITS][VALUES] = {{0}};
    for (int64_t i = 0; i < n; i++)
        for (int d = 0; d < DIGITS; d++) count[d][keys[i] >> (32 + 8 * d) & (VALUES - 1)]++;
    for (int d = 0; d < DIGITS; d++) {
        int shift = 32 + 8 * d;
        if (count[d][keys[0] >> shift & (VALUES - 1)] == n) continue;
        uint32_t sum = 0;
        for (int v = 0; v < VALUES; v++) {
            uint32_t here = count[d][v];
            count[d][v] = sum;
            sum += here;
        }
        for (int64_t i = 0; i < n; i++) other[count[d][keys[i] >> shift & (VALUES - 1)]++] = keys[i];
        uint64_t *swap = keys;
        keys = other;
        other = swap;
    }
    return keys;
}

static void key_down(uint64_t *heap, int64_t n, int64_t at, uint64_t key)
{
    for (int64_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        child += child + 1 < n && heap[child + 1] > heap[child];
        if (heap[child] <= key) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = key;
}

/* The first k, sorted, by a heap whose root is the last of those kept. */
static void select_first(uint64_t *keys, int64_t n, int64_t k)
{
    for (int64_t at = k / 2 - 1; at >= 0; at--) key_down(keys, k, at, keys[at]);
    for (int64_t i = k; i < n; i++)
        if (keys[i] < keys[0]) key_down(keys, k, 0, keys[i]);
    for (int64_t end = k - 1; end > 0; end--) {
        uint64_t last = keys[end];
        keys[end] = keys[0];
        key_down(keys, end, 0, last);
    }
}

static void keys_lines(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const line_state *s = call->state;
    ont_dtype dtype = ont_node_in(call->node, 0)->dtype;
    for (int64_t part = first; part < last; part++) {
        uint64_t *keys = (uint64_t *)call->work + 2 * s->n * part;
        for (int64_t line = s->lines * part / s->parts; line < s->lines * (part + 1) / s->parts; line++) {
            int64_t outer = line / s->inner, column = line % s->inner, to = outer * s->k * s->inner + column;
            const char *x = (const char *)call->in[0] + (size_t)(outer * s->n * s->inner + column) * s->size;
            uint64_t *sorted = keys;
            read_keys(s, dtype, x, keys);
            if (s->n <= FEW)
                insertion_sort(keys, s->n);
            else if (s->k <= FEW || s->k <= s->n / 64)
                select_first(keys, s->n, s->k);
            else
                sorted = radix_sort(keys, keys + s->n, s->n);
            for (int64_t i = 0; i < s->k; i++, to += s->inner) {
                int64_t position = (int64_t)(sorted[i] & UINT32_MAX);
                if (call->out[0])
                    memcpy((char *)call->out[0] + (size_t)to * s->size,
                           x + (size_t)(position * s->inner) * s->size, s->size);
                if (call->node->n_outputs > 1 && call->out[1]) ((int64_t *)call->out[1])[to] = position;
            }
        }
    }
}

static ont_status keys_run(const ont_call *call)
{
    const line_state *s = call->state;
    if (s->k && s->lines) ont_parallel(s->parts, s->parts * 2048 / (s->n * s->lines) + 1, keys_lines, (void *)call);
    return ONT_OK;
}

static void topk_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *positions = NULL, *zeros = ont_build_full(b, I(0)->dtype, &I(0)->shape, 0), *dy = GO(0);
    if (b->status == ONT_OK) b->status = ont_node_ensure_output(b->graph, g->node, 1, &positions);
    if (b->status != ONT_OK) return;
    if (!positions->has_shape && (b->status = ont_infer_out(g->node, 1, ONT_INT64, &O(0)->shape)) != ONT_OK) return;
    ont_node *node = ont_build_node(b, "", "ScatterElements", (ont_value *[]){zeros, positions, dy}, 3, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", ont_attr_int(g->node, "axis", -1));
    GI(0, ont_build_done(b, node));
}

static const ont_kernel topk_kernels[] = {{.name = "topk_keys", .accept = accept_keys, .prepare = keys_prepare,
                                           .run = keys_run},
                                          {.name = "topk_ref", .accept = accept, .prepare = topk_prepare,
                                           .run = topk_run}};
const ont_op ont_op_TopK = {.domain = "", .name = "TopK", .since = 1, .min_inputs = 1, .max_inputs = 2,
                            .nondiff_inputs = 2, .nondiff_outputs = 2, .attributes = "axis:i k:i largest:i sorted:i",
                            .infer = topk_infer, .grad = topk_grad, ONT_KERNELS(topk_kernels)};

/* ---- TorchTopK ---- */

typedef struct pick_state {
    line_state lines;
    int parts; /* ranges of lines, each with a row of its own in scratch */
    bool largest, sorted;
} pick_state;

static ont_status pick_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    pick_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(topk_prepare(node, arena, out));
    s->lines = *(line_state *)out->state;
    s->sorted = ont_attr_int(node, "sorted", 1);
    s->largest = ont_attr_int(node, "largest", 1);
    double limit = (double)s->lines.lines * (double)s->lines.n / 2048 + 1;
    s->parts = ont_parallel_threads();
    if (s->parts > limit) s->parts = (int)limit;
    out->state = s;
    out->work_bytes = (size_t)s->parts * (size_t)s->lines.n * sizeof(ont_ranked);
    return ONT_OK;
}

/* A key that is lower for elements that come first; NaN is above all numbers. */
static int64_t rank_of_float(double v, bool largest)
{
    int64_t bits;
    if (v != v) return largest ? INT64_MIN : INT64_MAX;
    if (v == 0) v = 0; /* -0.0 becomes 0.0 */
    memcpy(&bits, &v, sizeof bits);
    bits ^= (bits >> 63) & INT64_MAX;
    return largest ? ~bits : bits;
}

static int64_t rank_of_int(int64_t v, bool largest) { return largest ? ~v : v; }

static void rank_line(ont_dtype dtype, const void *data, int64_t stride, int64_t n, bool largest, ont_ranked *to)
{
#define RANK(name, type, kind, convert) \
    case ONT_##name: \
        for (int64_t i = 0; i < n; i++) \
            to[i] = (ont_ranked){rank_of_##kind(convert(((const type *)data)[i * stride]), largest), i}; \
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
            ont_lowest_first(row, l->n, l->k, s->sorted);
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
                                 .max_inputs = 2, .flags = ONT_OP_PUBLIC, .nondiff_inputs = 2, .nondiff_outputs = 2,
                                 .attributes = "axis:i largest:i sorted:i", .infer = topk_infer, .grad = topk_grad,
                                 ONT_KERNELS(pick_kernels)};
