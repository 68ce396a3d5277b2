/*
 * Rules of rows. See row_rules.h.
 */
#include "passes/row_rules.h"

/* ---- rows of a shape ---- */

int ont_rows_leading(const ont_shape *shape, int64_t n)
{
    int64_t product = 1;
    for (int d = 0; d < shape->rank; d++)
        if ((product *= shape->dims[d]) == n) return d + 1;
    return -1;
}

ont_shape ont_rows_packed_shape(const ont_shape *shape, int64_t n, int64_t rows)
{
    ont_shape result = *shape;
    int p = ont_rows_leading(shape, n);
    for (int d = 0; d < p; d++) result.dims[d] = d ? 1 : rows;
    return result;
}

/* ---- rules: what a node reads for n rows of its result ---- */

/* How an operand that broadcasts to `out`, whose leading p dims are rows, is read. */
static ont_row_reads broadcast_reads(const ont_shape *in, const ont_shape *out, int p)
{
    bool ones = true, same = true;
    for (int d = 0; d < p; d++) {
        int at = d - (out->rank - in->rank);
        int64_t dim = at < 0 ? 1 : in->dims[at];
        ones &= dim == 1;
        same &= dim == out->dims[d];
    }
    return same ? ONT_READS_ROWS : ones ? ONT_READS_WHOLE : ONT_READS_BROADCAST;
}

/* Whether `axes` of the node, from input 1 or the attribute, are known and behind the first p of `rank` dims. */
static bool axes_behind(const ont_node *node, int rank, int p)
{
    int64_t axes[ONT_MAX_RANK];
    int n, axis;
    if (ont_const_ints(node, 1, "axes", axes, ONT_MAX_RANK, &n) != ONT_OK || n <= 0) return false;
    for (int i = 0; i < n; i++)
        if (ont_shape_axis(axes[i], rank, &axis) != ONT_OK || axis < p) return false;
    return true;
}

static bool axis_of(const ont_node *node, int64_t otherwise, int rank, int *axis)
{
    return ont_shape_axis(ont_attr_int(node, "axis", otherwise), rank, axis) == ONT_OK;
}

/* Whether a Slice keeps the first p dims as they are: all of it does, or its axes lie behind them. */
static bool slices_behind(const ont_node *node, const ont_shape *x, const ont_shape *y, int p)
{
    int64_t steps[ONT_MAX_RANK], axes[ONT_MAX_RANK];
    int n, axis;
    if (ont_const_ints(node, 4, "steps", steps, ONT_MAX_RANK, &n) != ONT_OK) return false;
    for (int i = 0; i < n; i++)
        if (steps[i] < 0) return false;
    if (ont_shape_equal(x, y)) return true;
    if (ont_const_ints(node, 3, "axes", axes, ONT_MAX_RANK, &n) != ONT_OK || n < 0) return false;
    for (int i = 0; i < n; i++)
        if (ont_shape_axis(axes[i], x->rank, &axis) != ONT_OK || axis < p) return false;
    return true;
}

static bool is_product_of_rows(const ont_node *node, int p)
{
    const ont_value *a = ont_node_in(node, 0), *b = ont_node_in(node, 1), *c = ont_node_in(node, 2);
    if (ONT_IS(node, MatMulBnb4)) return p < a->shape.rank;
    if (a->shape.rank < 2 || b->shape.rank != 2 || ont_attr_int(node, "transA", 0) || p >= a->shape.rank) return false;
    return !c || c->shape.rank < 2 || ont_shape_count_range(&c->shape, 0, c->shape.rank - 1) == 1;
}

static bool rows_of_transpose(const ont_node *node, int p)
{
    size_t n;
    const int64_t *perm = ont_attr_ints(node, "perm", &n);
    for (int d = 0; d < p; d++)
        if (!perm || d >= (int)n || perm[d] != d) return false;
    return true;
}

bool ont_rows_apply_rule(const ont_node *node, const ont_value *out, int64_t n, ont_row_reads *read)
{
    const ont_value *x = ont_node_in(node, 0);
    int p = ont_rows_leading(&out->shape, n), axis;
    for (uint32_t i = 0; i < node->n_inputs; i++) read[i] = ONT_READS_WHOLE;
    if (p < 0 || !x) return false;
    const ont_value *index = ont_node_in(node, 1);
    switch (node->op->rows) {
    case ONT_ROWS_ELEMENTWISE:
        for (uint32_t i = 0; i < node->n_inputs; i++)
            if (node->inputs[i].value) read[i] = broadcast_reads(&node->inputs[i].value->shape, &out->shape, p);
        return true;
    case ONT_ROWS_EXPAND:
        read[0] = broadcast_reads(&x->shape, &out->shape, p);
        return x->shape.rank <= out->shape.rank;
    case ONT_ROWS_DROPOUT:
        read[0] = ONT_READS_ROWS;
        return !ont_node_out(node, 1) || (!node->outputs[1]->uses);
    case ONT_ROWS_VIEW:
        read[0] = ONT_READS_ROWS;
        return ont_rows_leading(&x->shape, n) > 0;
    case ONT_ROWS_NORM:
        read[0] = ONT_READS_ROWS;
        for (uint32_t i = 1; i < node->n_outputs; i++)
            if (node->outputs[i]) return false;
        return axis_of(node, -1, x->shape.rank, &axis) && axis >= p && ont_attr_find(node, "axis", ONT_ATTR_INT);
    case ONT_ROWS_MATMUL:
        read[0] = ONT_READS_ROWS;
        return is_product_of_rows(node, p);
    case ONT_ROWS_REDUCE:
        read[0] = ONT_READS_ROWS;
        return ont_rows_leading(&x->shape, n) == p && axes_behind(node, x->shape.rank, p);
    case ONT_ROWS_GATHER:
        if (!axis_of(node, 0, x->shape.rank, &axis)) return false;
        read[axis ? 0 : 1] = ONT_READS_ROWS;
        return axis ? p <= axis : p <= index->shape.rank;
    case ONT_ROWS_SLICE:
        read[0] = ONT_READS_ROWS;
        return slices_behind(node, &x->shape, &out->shape, p);
    case ONT_ROWS_CONCAT:
        for (uint32_t i = 0; i < node->n_inputs; i++) read[i] = ONT_READS_ROWS;
        return axis_of(node, 0, x->shape.rank, &axis) && axis >= p;
    case ONT_ROWS_SPLIT:
        read[0] = ONT_READS_ROWS;
        return axis_of(node, 0, x->shape.rank, &axis) && axis >= p;
    case ONT_ROWS_TRANSPOSE:
        read[0] = ONT_READS_ROWS;
        return rows_of_transpose(node, p);
    default: return false;
    }
}

/* ---- selections ---- */

/*
 * Whether the node selects rows of input 0. Sets *n to the rows of input 0, *m to the selected ones. Integers are not
 * worth it: they are indices.
 */
bool ont_rows_is_selection(const ont_node *node, int64_t *n, int64_t *m)
{
    const ont_value *x = ont_node_in(node, 0), *y = ont_node_out(node, 0), *index = ont_node_in(node, 1);
    if (!x || !y || !ont_dtype_is_float(x->dtype)) return false;
    int axis = -1, rank = x->shape.rank;
    if (node->op->rows == ONT_ROWS_GATHER && axis_of(node, 0, rank, &axis)) {
        *n = ont_shape_count_range(&x->shape, 0, axis + 1);
        *m = ont_shape_count_range(&x->shape, 0, axis) * ont_shape_count(&index->shape);
        return true;
    }
    if (node->op->rows == ONT_ROWS_GATHER_ND && index->shape.rank) {
        int64_t k = index->shape.dims[index->shape.rank - 1], dims = ont_attr_int(node, "batch_dims", 0) + k;
        if (dims < 1 || dims > rank || !k) return false;
        *n = ont_shape_count_range(&x->shape, 0, (int)dims);
        *m = ont_shape_count(&index->shape) / k;
        return true;
    }
    if (node->op->rows != ONT_ROWS_SLICE) return false;
    for (int d = 0; d < rank; d++)
        if (x->shape.dims[d] != y->shape.dims[d]) axis = d;
    if (axis < 0) return false;
    *n = ont_shape_count_range(&x->shape, 0, axis + 1);
    *m = ont_shape_count_range(&y->shape, 0, axis + 1);
    return true;
}

ont_shape ont_rows_of_selection(const ont_node *node, int64_t n)
{
    ont_shape shape = ont_node_in(node, 0)->shape;
    int64_t product = 1;
    int d = 0;
    while (d < shape.rank && (product *= shape.dims[d]) != n) d++;
    for (d++; d < shape.rank; d++) shape.dims[d] = 1;
    return shape;
}
