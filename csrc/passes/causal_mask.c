/*
 * Recognises causal masks from the nodes that compute them: Trilu, Where, comparisons of ranges, and layout operators
 * in between. Masks of many rows are not folded (infer.c), so their elements are unknown; constant masks are scanned.
 * Used by fuse_attention.c, since a causal mask need not be read at run time.
 */
#include "passes/causal_mask.h"

#include <string.h>

#include "base/number.h"
#include "ir/attr.h"
#include "ops/op.h"

enum { MAX_NODES = 64 };

typedef struct walk {
    int64_t rows, columns;
    int nodes; /* visited so far */
} walk;

/* A causal mask or a constant (`step`); or, if `linear`, integers base + i * row_slope + j * column_slope. */
typedef struct pattern {
    bool linear;
    ont_causal_mask step;
    double base, row_slope, column_slope;
} pattern;

static pattern uniform(double value)
{
    return (pattern){.step = {.lower = value, .upper = value}};
}

static bool is_uniform(const pattern *f)
{
    return !f->linear && f->step.lower == f->step.upper;
}

static double element_at(const ont_value *v, int64_t i)
{
    return ont_number_at(v->data->data, v->dtype, i);
}

/* ---- constants ---- */

/* Whether the n elements are base + i * step. */
static bool is_arithmetic(const ont_value *v, int64_t n, double *base, double *step)
{
    *base = element_at(v, 0);
    *step = n > 1 ? element_at(v, 1) - *base : 0;
    for (int64_t i = 1; i < n; i++)
        if (element_at(v, i) != *base + (double)i * *step) return false;
    return true;
}

/* Whether every row is the previous one shifted right by one, with element 0 repeated. */
static bool constant_matrix(const walk *w, const ont_value *v, pattern *f)
{
    int64_t z = (int64_t)ont_dtype_size(v->dtype), run_length = 1;
    const char *data = v->data->data;
    double first = element_at(v, 0);
    while (run_length < w->columns && element_at(v, run_length) == first) run_length++;
    f->step = (ont_causal_mask){first, run_length < w->columns ? element_at(v, run_length) : first, run_length - 1};
    for (int64_t j = run_length; j < w->columns; j++)
        if (element_at(v, j) != f->step.upper) return false;
    for (int64_t i = 1; i < w->rows; i++) {
        const char *above = data + (i - 1) * w->columns * z, *row = above + w->columns * z;
        if (memcmp(row, data, (size_t)z) || memcmp(row + z, above, (size_t)((w->columns - 1) * z))) return false;
    }
    return true;
}

static bool of_constant(const walk *w, const ont_value *v, pattern *f)
{
    int64_t count = ont_shape_count(&v->shape);
    int rank = v->shape.rank;
    int64_t last = rank > 0 ? v->shape.dims[rank - 1] : 1, before = rank > 1 ? v->shape.dims[rank - 2] : 1;
    *f = (pattern){0};
    if (!v->data || !count) return false;
    if (count == 1) {
        *f = uniform(element_at(v, 0));
        return true;
    }
    if (count == w->rows * w->columns && last == w->columns && before == w->rows) return constant_matrix(w, v, f);
    f->linear = ont_dtype_is_int(v->dtype);
    if (count == last && last == w->columns) return f->linear && is_arithmetic(v, count, &f->base, &f->column_slope);
    if (count == before && before == w->rows) return f->linear && is_arithmetic(v, count, &f->base, &f->row_slope);
    return false;
}

/* ---- nodes ---- */

static bool pattern_of(walk *w, const ont_value *v, pattern *f);

/* Layout operators; they must keep the last two dims in place. */
static bool of_view(walk *w, const ont_node *node, pattern *f)
{
    const ont_value *x = ont_node_in(node, 0);
    const ont_shape *a = &x->shape, *b = &node->outputs[0]->shape;
    if (!pattern_of(w, x, f)) return false;
    if (is_uniform(f) || ONT_IS(node, Expand) || ONT_IS(node, Identity)) return true;
    return a->rank >= 2 && b->rank >= 2 && a->dims[a->rank - 1] == b->dims[b->rank - 1] &&
           a->dims[a->rank - 2] == b->dims[b->rank - 2];
}

static bool of_trilu(walk *w, const ont_node *node, pattern *f)
{
    const ont_shape *shape = &node->outputs[0]->shape;
    double k = 0;
    if (shape->rank < 2 || shape->dims[shape->rank - 1] != w->columns || shape->dims[shape->rank - 2] != w->rows)
        return false;
    if (ont_node_in(node, 1) && ont_const_scalar(node, 1, &k) != ONT_OK) return false;
    if (!pattern_of(w, ont_node_in(node, 0), f) || !is_uniform(f)) return false;
    bool upper = ont_attr_int(node, "upper", 1) != 0;
    if (upper) k -= 1; /* last diagonal that is set to zero */
    k = k < -(double)w->rows ? -(double)w->rows : k > (double)w->columns ? (double)w->columns : k;
    f->step.diagonal = (int64_t)k;
    *(upper ? &f->step.lower : &f->step.upper) = 0;
    return true;
}

/* The common diagonal of the non-constant patterns; false if they differ. */
static bool common_causal_offset(const pattern *forms, int n, int64_t *diagonal)
{
    const pattern *first = NULL;
    for (int i = 0; i < n; i++) {
        if (forms[i].linear) return false;
        if (is_uniform(&forms[i])) continue;
        if (first && first->step.diagonal != forms[i].step.diagonal) return false;
        first = &forms[i];
    }
    *diagonal = first ? first->step.diagonal : 0;
    return true;
}

static bool of_where(walk *w, const ont_node *node, pattern *f)
{
    pattern in[3];
    *f = (pattern){0};
    for (uint32_t i = 0; i < 3; i++)
        if (!pattern_of(w, ont_node_in(node, i), &in[i])) return false;
    f->step.lower = in[in[0].step.lower != 0 ? 1 : 2].step.lower;
    f->step.upper = in[in[0].step.upper != 0 ? 1 : 2].step.upper;
    return common_causal_offset(in, 3, &f->step.diagonal);
}

static double combine(const ont_node *node, double a, double b)
{
    return ONT_IS(node, And)  ? a != 0 && b != 0
           : ONT_IS(node, Or) ? a != 0 || b != 0
           : ONT_IS(node, Mul) ? a * b
           : ONT_IS(node, Sub) ? a - b
                                : a + b;
}

static bool of_binary(walk *w, const ont_node *node, pattern *f)
{
    pattern in[2];
    *f = (pattern){0};
    if (!pattern_of(w, ont_node_in(node, 0), &in[0]) || !pattern_of(w, ont_node_in(node, 1), &in[1])) return false;
    f->step.lower = combine(node, in[0].step.lower, in[1].step.lower);
    f->step.upper = combine(node, in[0].step.upper, in[1].step.upper);
    return common_causal_offset(in, 2, &f->step.diagonal);
}

/* Compares a range along columns with one along rows: a - b is column - row plus a constant, or its negation. */
static bool of_comparison(walk *w, const ont_node *node, pattern *f)
{
    pattern a, b;
    if (!pattern_of(w, ont_node_in(node, 0), &a) || !pattern_of(w, ont_node_in(node, 1), &b) || !(a.linear && b.linear))
        return false;
    double slope = a.column_slope - b.column_slope, base = a.base - b.base;
    bool less = ONT_IS(node, Less) || ONT_IS(node, LessOrEqual),
         equal = ONT_IS(node, LessOrEqual) || ONT_IS(node, GreaterOrEqual);
    if (a.row_slope - b.row_slope != -slope || (slope != 1 && slope != -1) || !(base >= -1e9 && base <= 1e9))
        return false;
    if (slope < 0) base = -base, less = !less;
    bool on_diagonal = less == equal; /* the diagonal column - row = -base belongs to the lower part */
    *f = (pattern){.step = {.lower = less, .upper = !less, .diagonal = -(int64_t)base - !on_diagonal}};
    return true;
}

static bool of_unary(walk *w, const ont_node *node, pattern *f)
{
    if (!pattern_of(w, ont_node_in(node, 0), f) || f->linear) return false;
    bool boolean = node->outputs[0]->dtype == ONT_BOOL, flip = ONT_IS(node, Not);
    if (!boolean && !ont_dtype_is_float(node->outputs[0]->dtype))
        return false; /* the integer value of -inf is undefined */
    if (boolean) {
        f->step.lower = (f->step.lower != 0) != flip;
        f->step.upper = (f->step.upper != 0) != flip;
    }
    return true;
}

/* The patterns of the operators that are understood. */
static const struct {
    const ont_op *op;
    bool (*pattern)(walk *w, const ont_node *node, pattern *f);
} rules[] = {
    {&ont_op_Expand, of_view},         {&ont_op_Identity, of_view},      {&ont_op_Reshape, of_view},
    {&ont_op_Unsqueeze, of_view},      {&ont_op_Squeeze, of_view},       {&ont_op_Cast, of_unary},
    {&ont_op_Not, of_unary},           {&ont_op_And, of_binary},         {&ont_op_Or, of_binary},
    {&ont_op_Mul, of_binary},          {&ont_op_Sub, of_binary},         {&ont_op_Add, of_binary},
    {&ont_op_Less, of_comparison},     {&ont_op_LessOrEqual, of_comparison},
    {&ont_op_Greater, of_comparison},  {&ont_op_GreaterOrEqual, of_comparison},
    {&ont_op_Trilu, of_trilu},         {&ont_op_Where, of_where},
};

static bool pattern_of(walk *w, const ont_value *v, pattern *f)
{
    *f = (pattern){0};
    if (!v || ++w->nodes > MAX_NODES) return false;
    if (v->data) return of_constant(w, v, f);
    const ont_node *node = v->kind == ONT_VALUE_NODE ? v->def : NULL;
    if (!node || node->n_outputs != 1 || !v->has_shape) return false;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (node->op == rules[i].op) return rules[i].pattern(w, node, f);
    return false;
}

bool ont_causal_mask_of(const ont_value *v, int64_t rows, int64_t columns, ont_causal_mask *mask)
{
    pattern f;
    walk w = {.rows = rows, .columns = columns};
    if (!pattern_of(&w, v, &f) || f.linear) return false;
    *mask = f.step;
    int64_t d = mask->lower == mask->upper ? columns - 1 : mask->diagonal;
    mask->diagonal = d < -rows ? -rows : d > columns ? columns : d;
    return true;
}
