/*
 * GatherElements, ScatterElements and Scatter, its old name: an index for each element, along an axis, with every
 * reduction. Threads have disjoint lines along the axis, so results do not depend on the number of threads. Gradients
 * of the reductions are those of torch.scatter_reduce.
 */
#include <stdatomic.h>
#include <string.h>

#include "base/number.h"
#include "base/parallel.h"
#include "ops/index/indexed.h"
#include "ops/index/scatter.h"
#include "simd/simd.h"

typedef struct lines {
    int rank, axis;
    int64_t count;        /* number of lines: product of the dims of the indices but the axis */
    int64_t n, size;      /* sizes of the indices and of the data along the axis */
    int64_t inner;        /* number of neighbouring lines that are contiguous in both tensors */
    int64_t index_dims[ONT_MAX_RANK], index_strides[ONT_MAX_RANK], data_strides[ONT_MAX_RANK];
    size_t element;
    bool wide, from_end;
    bool dense;           /* the axis is the last one, and lines are contiguous in both tensors */
    ont_dtype dtype;
    ont_scatter reduction;
} lines;

static ont_status elements_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *index, *updates = NULL;
    int axis;
    ont_scatter reduction;
    bool scatter = node->op->max_inputs > 2;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &index));
    if (scatter) ONT_TRY(ont_need_input(node, 2, &updates));
    ONT_TRY(ont_index_dtype(index));
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &axis));
    ONT_TRY(ont_scatter_reduction(node, &reduction));
    char a[ONT_SHAPE_TEXT], b[ONT_SHAPE_TEXT];
    bool fits = index->shape.rank == x->shape.rank;
    for (int d = 0; fits && d < x->shape.rank; d++) fits = d == axis || index->shape.dims[d] <= x->shape.dims[d];
    if (!fits)
        return ont_fail(ONT_EINVAL, "indices of shape %s do not fit data of shape %s along axis %d",
                        ont_shape_text(&index->shape, a), ont_shape_text(&x->shape, b), axis);
    if (updates && (updates->dtype != x->dtype || !ont_shape_equal(&updates->shape, &index->shape)))
        return ont_fail(ONT_EINVAL, "updates are %s%s, the data %s and the indices of shape %s",
                        ont_dtype_name(updates->dtype), ont_shape_text(&updates->shape, a), ont_dtype_name(x->dtype),
                        ont_shape_text(&index->shape, b));
    return ont_infer_out(node, 0, x->dtype, scatter ? &x->shape : &index->shape);
}

static ont_status elements_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *index = ont_node_in(node, 1);
    lines *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), x->shape.rank, &s->axis));
    ONT_TRY(ont_scatter_reduction(node, &s->reduction));
    s->rank = x->shape.rank;
    s->n = index->shape.dims[s->axis];
    s->size = x->shape.dims[s->axis];
    s->count = s->inner = 1;
    for (int d = 0; d < s->rank; d++) {
        s->index_dims[d] = index->shape.dims[d];
        if (d != s->axis) s->count *= index->shape.dims[d];
    }
    for (int d = s->rank - 1; d > s->axis; d--) {
        s->inner *= s->index_dims[d];
        if (s->index_dims[d] != x->shape.dims[d]) break;
    }
    ont_shape_strides(&index->shape, s->index_strides);
    ont_shape_strides(&x->shape, s->data_strides);
    s->dense = s->axis == s->rank - 1;
    for (int d = 1; d < s->axis; d++) s->dense = s->dense && s->index_dims[d] == x->shape.dims[d];
    s->element = ont_dtype_size(x->dtype);
    s->dtype = x->dtype;
    s->wide = index->dtype == ONT_INT64;
    s->from_end = ont_index_from_end(node);
    out->state = s;
    return ONT_OK;
}

/* Offsets of line `line` in the indices and in the data. */
static void line_start(const lines *s, int64_t line, int64_t *in_index, int64_t *in_data)
{
    *in_index = *in_data = 0;
    for (int d = s->rank - 1; d >= 0; d--) {
        if (d == s->axis) continue;
        int64_t at = line % s->index_dims[d];
        line /= s->index_dims[d];
        *in_index += at * s->index_strides[d];
        *in_data += at * s->data_strides[d];
    }
}

/* Reports the first index that is out of range. */
static ont_status find_outside(const lines *s, const ont_call *call)
{
    int64_t n = s->count * s->n;
    for (int64_t i = 0; i < n; i++) {
        int64_t given = ont_index_at(call->in[1], s->wide, i), index = given;
        if (!ont_index_wrap(&index, s->size) || (given < 0 && !s->from_end))
            return ont_index_fail(ont_node_in(call->node, 1), given, i, s->size);
    }
    return ONT_OK;
}

static void combine_one(const lines *s, void *data, int64_t at, const void *updates, int64_t from)
{
    char *to = (char *)data + (size_t)at * s->element;
    const char *v = (const char *)updates + (size_t)from * s->element;
    if (s->reduction == ONT_SCATTER_NONE)
        memcpy(to, v, s->element);
    else
        ont_scatter_combine(s->dtype, s->reduction, to, v, 1);
}

/*
 * Range of work: n indices, index_stride apart in their tensor, from offset `index` on. Where they are of neighbouring
 * lines, the data advances too. Then `more` further ranges, contiguous in both tensors, of n indices and `size`
 * data elements.
 */
typedef struct row {
    int64_t n, index, index_stride; /* elements */
    int64_t data, data_stride;
    int64_t more;
} row;

typedef struct job {
    const ont_call *call;
    bool scatter;
    _Atomic bool outside; /* set where an index is out of range; its row is skipped */
} job;

/* Runs body for each element: `from` is its offset in the tensor of indices, `at` its offset in the data. */
#define EACH_INDEX(index_type, body) \
    do { \
        const index_type *given_ = call->in[1]; \
        for (int64_t row_ = 0, from_ = r->index, data_ = r->data; row_ <= r->more; row_++, from_ += n, data_ += size) \
            for (int64_t i = 0; i < n; i++) { \
                int64_t from = from_ + i * index_stride, k_ = given_[from], at = data_ + i * data_stride; \
                at += (wraps && k_ < 0 ? k_ + size : k_) * axis_stride; \
                body; \
            } \
    } while (0)
#define BY_INDEX(body) \
    do { \
        if (s->wide) \
            EACH_INDEX(int64_t, body); \
        else \
            EACH_INDEX(int32_t, body); \
    } while (0)
/* Calls `body` with constants for dense rows without a negative index, so that the compiler specialises it. */
#define BY_STRIDES(body) \
    do { \
        bool dense = r->index_stride == 1 && r->data_stride == 0 && s->data_strides[s->axis] == 1; \
        if (dense && !wraps) \
            body(s, call, r, false, 1, 0, 1); \
        else if (dense) \
            body(s, call, r, true, 1, 0, 1); \
        else \
            body(s, call, r, true, r->index_stride, r->data_stride, s->data_strides[s->axis]); \
    } while (0)
#define ROW const int64_t n = r->n, size = s->size
#define INLINE static inline __attribute__((always_inline))

/* The smallest and the largest index of a range. */
static void bounds(const lines *s, const ont_call *call, const row *r, int64_t *lowest, int64_t *highest)
{
    int64_t n = r->n * (r->more + 1);
    const char *indices = (const char *)call->in[1] + (size_t)r->index * (s->wide ? 8 : 4);
    if (r->index_stride == 1) {
        ont_simd()->index_bounds(indices, s->wide, n, lowest, highest);
        return;
    }
    *lowest = INT64_MAX, *highest = INT64_MIN;
    for (int64_t i = 0; i < n; i++) {
        int64_t v = ont_index_at(indices, s->wide, i * r->index_stride);
        *lowest = v < *lowest ? v : *lowest;
        *highest = v > *highest ? v : *highest;
    }
}

INLINE void gather_with(const lines *s, const ont_call *call, const row *r, bool wraps, int64_t index_stride,
                        int64_t data_stride, int64_t axis_stride)
{
    ROW;
    switch (s->element) {
#define COPY(bytes, type) \
    case bytes: BY_INDEX(((type *)call->out[0])[from] = ((const type *)call->in[0])[at]); break;
        COPY(1, uint8_t)
        COPY(2, uint16_t)
        COPY(4, uint32_t)
        COPY(8, uint64_t)
#undef COPY
    default:
        BY_INDEX(memcpy((char *)call->out[0] + (size_t)from * s->element,
                        (const char *)call->in[0] + (size_t)at * s->element, s->element));
    }
}

static void gather_row(const lines *s, const ont_call *call, const row *r, bool wraps) { BY_STRIDES(gather_with); }

INLINE void scatter_with(const lines *s, const ont_call *call, const row *r, bool wraps, int64_t index_stride,
                         int64_t data_stride, int64_t axis_stride)
{
    ROW;
    bool add = s->reduction == ONT_SCATTER_ADD, put = s->reduction == ONT_SCATTER_NONE;
    if (add && s->dtype == ONT_FLOAT32)
        BY_INDEX(((float *)call->out[0])[at] += ((const float *)call->in[2])[from]);
    else if (add && s->dtype == ONT_FLOAT64)
        BY_INDEX(((double *)call->out[0])[at] += ((const double *)call->in[2])[from]);
    else if (put && s->element == 4)
        BY_INDEX(((uint32_t *)call->out[0])[at] = ((const uint32_t *)call->in[2])[from]);
    else if (put && s->element == 8)
        BY_INDEX(((uint64_t *)call->out[0])[at] = ((const uint64_t *)call->in[2])[from]);
    else
        BY_INDEX(combine_one(s, call->out[0], at, call->in[2], from));
}

static void scatter_row(const lines *s, const ont_call *call, const row *r, bool wraps) { BY_STRIDES(scatter_with); }

static void one_row(job *j, const row *r)
{
    const lines *s = j->call->state;
    int64_t lowest, highest;
    bounds(s, j->call, r, &lowest, &highest);
    if (lowest < (s->from_end ? -s->size : 0) || highest >= s->size)
        j->outside = true;
    else if (j->scatter)
        scatter_row(s, j->call, r, lowest < 0);
    else
        gather_row(s, j->call, r, lowest < 0);
}

/*
 * Lines [first, last): many neighbouring lines advance along the axis together, so that memory is read in rows; few
 * lines go one after the other. Either way, an element is updated in the order of the indices.
 */
static void each_run(void *context, int64_t first, int64_t last)
{
    job *j = context;
    const lines *s = j->call->state;
    int64_t together = 2048 / s->n + 1; /* lines that are taken together where rows are short */
    for (int64_t line = first; s->dense && line < last; line += together) {
        int64_t rows = last - line < together ? last - line : together;
        one_row(j, &(row){.n = s->n, .index = line * s->n, .index_stride = 1, .data = line * s->size,
                          .more = rows - 1});
    }
    for (int64_t line = first; !s->dense && line < last;) {
        int64_t run = s->inner - line % s->inner, index, data;
        if (run > last - line) run = last - line;
        line_start(s, line, &index, &data);
        if (run >= 8 || run >= s->n)
            for (int64_t k = 0; k < s->n; k++)
                one_row(j, &(row){.n = run, .index = index + k * s->index_strides[s->axis], .index_stride = 1,
                                  .data = data, .data_stride = 1});
        else
            for (int64_t i = 0; i < run; i++)
                one_row(j, &(row){.n = s->n, .index = index + i, .index_stride = s->index_strides[s->axis],
                                  .data = data + i});
        line += run;
    }
}

static ont_status each_line(const ont_call *call, bool scatter)
{
    const lines *s = call->state;
    job j = {.call = call, .scatter = scatter};
    if (s->n) ont_parallel(s->count, 4096 / s->n + 1, each_run, &j);
    return j.outside ? find_outside(s, call) : ONT_OK;
}

static ont_status gather_run(const ont_call *call) { return each_line(call, false); }

static ont_status scatter_run(const ont_call *call)
{
    const lines *s = call->state;
    size_t bytes = (size_t)ont_shape_count(&call->node->outputs[0]->shape) * s->element;
    if (bytes && call->out[0] != call->in[0]) memcpy(call->out[0], call->in[0], bytes);
    return each_line(call, true);
}

/* ---- gradients ---- */

static ont_value *along(ont_grad *g, const char *op, ont_value *x, ont_value *index, ont_value *updates,
                        const char *reduction)
{
    ont_builder *b = &g->b;
    if (b->status != ONT_OK || !x || !index || (reduction && !updates)) return NULL;
    ont_node *node = ont_build_node(b, "", op, (ont_value *[]){x, index, updates}, reduction ? 3 : 2, 1);
    if (node && ont_attr_find(g->node, "axis", ONT_ATTR_INT))
        b->status = ont_attr_set_int(b->graph, node, "axis", ont_attr_int(g->node, "axis", 0));
    if (node && reduction && b->status == ONT_OK)
        b->status = ont_attr_set_string(b->graph, node, "reduction", reduction, strlen(reduction));
    return ont_build_done(b, node);
}

static ont_value *gather_like(ont_grad *g, ont_value *x)
{
    return along(g, ONT_IS(g->node, ScatterND) ? "GatherND" : "GatherElements", x, I(1), NULL, NULL);
}

static ont_value *scatter_like(ont_grad *g, ont_value *x, ont_value *updates, const char *reduction)
{
    return along(g, ONT_IS(g->node, ScatterND) ? "ScatterND" : "ScatterElements", x, I(1), updates,
                 reduction);
}

static void gather_grad(ont_grad *g)
{
    ont_value *zeros = ont_build_full(&g->b, I(0)->dtype, &I(0)->shape, 0);
    GI(0, along(g, "ScatterElements", zeros, I(1), GO(0), "add"));
}

#define B(op, x, y) ont_build2(&g->b, op, (x), (y))
#define WHERE(c, x, y) ont_build3(&g->b, "Where", (c), (x), (y))
#define SCALAR(value) ont_build_scalar(&g->b, I(0)->dtype, (value))
#define FULL(like, value) ont_build_full(&g->b, (like)->dtype, &(like)->shape, (value))

/* The gradient is divided evenly among the data and the updates that equal the extremum. */
static void extremum_grad(ont_grad *g)
{
    ont_value *own = ont_build_cast(&g->b, B("Equal", I(0), O(0)), I(0)->dtype);
    ont_value *theirs = ont_build_cast(&g->b, B("Equal", I(2), gather_like(g, O(0))), I(0)->dtype);
    ont_value *ties = scatter_like(g, own, theirs, "add");
    ont_value *share = B("Div", GO(0), ties);
    if (WANTS(0)) GI(0, B("Mul", own, share));
    if (WANTS(2)) GI(2, B("Mul", theirs, gather_like(g, share)));
}

/*
 * The gradient of a product with respect to a factor is the product of the other factors. Where one factor is zero, it
 * alone has a nonzero gradient, the product without it. With two zeros, all gradients are zero.
 */
static void product_grad(ont_grad *g)
{
    ont_value *zero = SCALAR(0), *one = SCALAR(1), *x = I(0), *u = I(2);
    ont_value *x_zero = B("Equal", x, zero), *u_zero = B("Equal", u, zero);
    ont_value *full = WHERE(x_zero, one, x), *others = scatter_like(g, full, u, "mul");
    if (WANTS(0)) GI(0, B("Mul", GO(0), B("Div", others, full)));
    if (!WANTS(2)) return;
    ont_value *zeros = scatter_like(g, FULL(x, 0), ont_build_cast(&g->b, u_zero, u->dtype), "add");
    ont_value *single = B("And", u_zero, B("Equal", gather_like(g, zeros), one));
    ont_value *without = scatter_like(g, x, WHERE(single, one, u), "mul");
    ont_value *usual = B("Div", gather_like(g, B("Mul", GO(0), O(0))), WHERE(u_zero, one, u));
    GI(2, WHERE(single, gather_like(g, B("Mul", GO(0), without)), usual));
}

void ont_scatter_grad(ont_grad *g)
{
    ont_scatter reduction;
    if ((g->b.status = ont_scatter_reduction(g->node, &reduction)) != ONT_OK) return;
    if (reduction == ONT_SCATTER_MUL) {
        product_grad(g);
    } else if (reduction == ONT_SCATTER_MAX || reduction == ONT_SCATTER_MIN) {
        extremum_grad(g);
    } else {
        if (WANTS(0)) GI(0, reduction == ONT_SCATTER_ADD ? GO(0) : scatter_like(g, GO(0), FULL(I(2), 0), "none"));
        if (WANTS(2)) GI(2, gather_like(g, GO(0)));
    }
}

static const ont_kernel gather_kernels[] = {
    {.name = "gather_elements_ref", .accept = ont_accept_any, .prepare = elements_prepare, .run = gather_run},
};
static const ont_kernel scatter_kernels[] = {
    {.name = "scatter_elements_ref", .accept = ont_scatter_accept, .prepare = elements_prepare, .run = scatter_run,
     .inplace = 1},
};
#define GATHER_ELEMENTS(name_, domain_, since_, flags_) \
    const ont_op ont_op_##name_ = {.domain = domain_, .name = #name_, .since = since_, \
                                               .min_inputs = 2, .max_inputs = 2, .flags = flags_, .nondiff_inputs = 2, \
                                               .attributes = "axis:i", .infer = elements_infer, .grad = gather_grad, \
                                               ONT_KERNELS(gather_kernels)}
#define SCATTER_ELEMENTS(name_, domain_, since_, flags_) \
    const ont_op ont_op_##name_ = {.domain = domain_, .name = #name_, .since = since_, \
                                               .min_inputs = 3, .max_inputs = 3, .flags = flags_, .nondiff_inputs = 2, \
                                               .attributes = "axis:i reduction:s", .infer = elements_infer, \
                                               .grad = ont_scatter_grad, ONT_KERNELS(scatter_kernels)}
GATHER_ELEMENTS(GatherElements, "", 11, 0);
GATHER_ELEMENTS(TorchGatherElements, ONT_DOMAIN, 1, ONT_OP_PUBLIC);
SCATTER_ELEMENTS(ScatterElements, "", 11, 0);
SCATTER_ELEMENTS(TorchScatterElements, ONT_DOMAIN, 1, ONT_OP_PUBLIC);
const ont_op ont_op_Scatter = {.domain = "", .name = "Scatter", .since = 9, .min_inputs = 3, .max_inputs = 3,
                               .nondiff_inputs = 2, .attributes = "axis:i", .infer = elements_infer,
                               .grad = ont_scatter_grad, ONT_KERNELS(scatter_kernels)};
