/*
 * Reads a reduction: its kind, axes and geometry. Adjacent dims of the input that are both kept, or both reduced, are
 * merged. It knows no kernel.
 */
#include "ops/reduce/reduce.h"

ont_reduce_kind ont_reduce_kind_of(const ont_node *node)
{
    static const struct {
        const ont_op *op;
        ont_reduce_kind kind;
    } kinds[] = {{&ont_op_ReduceSum, ONT_REDUCE_SUM}, {&ont_op_SumTo, ONT_REDUCE_SUM},
                 {&ont_op_ReduceMean, ONT_REDUCE_MEAN}, {&ont_op_ReduceMax, ONT_REDUCE_MAX},
                 {&ont_op_ReduceMin, ONT_REDUCE_MIN}, {&ont_op_ReduceProd, ONT_REDUCE_PROD},
                 {&ont_op_ReduceL1, ONT_REDUCE_L1}, {&ont_op_ReduceL2, ONT_REDUCE_L2},
                 {&ont_op_ReduceSumSquare, ONT_REDUCE_SUM_SQUARE}, {&ont_op_ReduceLogSum, ONT_REDUCE_LOG_SUM},
                 {&ont_op_ReduceLogSumExp, ONT_REDUCE_LOG_SUM_EXP}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].op == node->op) return kinds[i].kind;
    return ONT_REDUCE_SUM;
}

ont_status ont_reduce_axes(const ont_node *node, const ont_shape *x, bool *reduce)
{
    int64_t axes[ONT_MAX_RANK];
    int n;
    ONT_TRY(ont_const_ints(node, 1, "axes", axes, ONT_MAX_RANK, &n));
    bool all = n <= 0 && !ont_attr_int(node, "noop_with_empty_axes", 0);
    for (int d = 0; d < x->rank; d++) reduce[d] = all;
    for (int i = 0; i < n; i++) {
        int axis;
        ONT_TRY(ont_shape_axis(axes[i], x->rank, &axis));
        reduce[axis] = true;
    }
    return ONT_OK;
}

ont_status ont_reduce_sum_to_axes(const ont_shape *x, const ont_shape *to, bool *reduce)
{
    int lead = x->rank - to->rank;
    bool fits = lead >= 0;
    for (int d = 0; fits && d < x->rank; d++) {
        int64_t target = d < lead ? 1 : to->dims[d - lead];
        reduce[d] = d < lead || (target == 1 && x->dims[d] != 1);
        fits = reduce[d] || target == x->dims[d];
    }
    char from[ONT_SHAPE_TEXT], wanted[ONT_SHAPE_TEXT];
    return fits ? ONT_OK
                : ont_fail(ONT_EINVAL, "attribute 'shape' is %s, but the input %s cannot be summed to it",
                           ont_shape_text(to, wanted), ont_shape_text(x, from));
}

/* Appends a dim to a list, merged with the previous one where the two are one run in memory. */
static void push(int64_t *dims, int64_t *strides, int *n, int64_t dim, int64_t stride, bool adjacent)
{
    if (dim == 1) return;
    if (*n && adjacent && strides[*n - 1] == stride * dim) {
        dims[*n - 1] *= dim;
        strides[*n - 1] = stride;
        return;
    }
    dims[*n] = dim;
    strides[(*n)++] = stride;
}

ont_status ont_reduce_read(const ont_node *node, ont_reduce *s)
{
    const ont_shape *x = &ont_node_in(node, 0)->shape;
    bool reduce[ONT_MAX_RANK];
    int64_t strides[ONT_MAX_RANK];
    *s = (ont_reduce){0};
    if (ONT_IS(node, SumTo))
        ONT_TRY(ont_reduce_sum_to_axes(x, &node->outputs[0]->shape, reduce));
    else
        ONT_TRY(ont_reduce_axes(node, x, reduce));
    s->kind = ont_reduce_kind_of(node);
    s->simd = ont_simd();
    s->outputs = s->each = 1;
    ont_shape_strides(x, strides);
    for (int d = 0; d < x->rank; d++) {
        if (reduce[d])
            push(s->reduced, s->reduced_stride, &s->n_reduced, x->dims[d], strides[d], true);
        else
            push(s->kept, s->kept_stride, &s->n_kept, x->dims[d], strides[d], true);
        *(reduce[d] ? &s->each : &s->outputs) *= x->dims[d];
    }
    s->n = -1;
    if (s->n_reduced == 1 && s->outputs && s->each) {
        s->n = s->reduced[0];
        s->tail = s->reduced_stride[0];
        s->lead = s->outputs / s->tail;
    }
    return ONT_OK;
}
