/*
 * Builders of common subgraphs. See compose.h.
 */
#include "ops/support/compose.h"

#include <inttypes.h>

ont_value *ont_build_op(ont_builder *b, const char *op_type, ont_value *const *inputs, uint32_t n_inputs)
{
    if (b->status != ONT_OK) return NULL;
    return ont_build_done(b, ont_build_node(b, "", op_type, inputs, n_inputs, 1));
}

ont_value *ont_build_slice(ont_builder *b, ont_value *x, int axis, int64_t start, int64_t end, int64_t step)
{
    if (b->status == ONT_OK && x && start == 0 && step == 1 && end >= x->shape.dims[axis]) return x;
    int64_t axis64 = axis;
    ont_value *inputs[] = {x, ont_build_const_ints(b, &start, 1), ont_build_const_ints(b, &end, 1),
                           ont_build_const_ints(b, &axis64, 1), ont_build_const_ints(b, &step, 1)};
    return x ? ont_build_op(b, "Slice", inputs, step == 1 ? 4 : 5) : NULL;
}

void ont_build_split(ont_builder *b, ont_value *x, int axis, const int64_t *sizes, uint32_t n, ont_value **pieces)
{
    for (uint32_t i = 0; i < n; i++) pieces[i] = NULL;
    ont_value *inputs[] = {x, ont_build_const_ints(b, sizes, n)};
    if (b->status != ONT_OK || !x) return;
    if (n == 1) {
        pieces[0] = x;
        return;
    }
    ont_node *node = ont_build_node(b, "", "Split", inputs, 2, n);
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", axis);
    if (!ont_build_done(b, node)) return;
    for (uint32_t i = 0; i < n; i++) pieces[i] = node->outputs[i];
}

void ont_build_split_even(ont_builder *b, ont_value *x, int axis, uint32_t n, ont_value **pieces)
{
    int64_t *sizes = ont_arena_array(&b->graph->arena, n + 1, sizeof *sizes);
    if (!sizes && b->status == ONT_OK) b->status = ONT_ENOMEM;
    for (uint32_t i = 0; sizes && i < n; i++) sizes[i] = x ? x->shape.dims[axis] / n : 0;
    ont_build_split(b, sizes ? x : NULL, axis, sizes, sizes ? n : 0, pieces);
}

ont_value *ont_build_concat(ont_builder *b, ont_value *const *pieces, uint32_t n, int axis)
{
    for (uint32_t i = 0; i < n; i++)
        if (!pieces[i]) ont_build_fail(b, ONT_EINTERNAL, "building Concat: piece %u is missing", i);
    if (b->status != ONT_OK) return NULL;
    if (n == 1) return pieces[0];
    ont_node *node = ont_build_node(b, "", "Concat", pieces, n, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "axis", axis);
    return ont_build_done(b, node);
}

ont_value *ont_build_matmul(ont_builder *b, ont_value *x, bool trans_x, ont_value *y, bool trans_y, double alpha)
{
    if (b->status != ONT_OK || !x || !y) return NULL;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "FusedMatMul", (ont_value *[]){x, y}, 2, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "transA", trans_x);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "transB", trans_y);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_float(b->graph, node, "alpha", alpha);
    return ont_build_done(b, node);
}

ont_value *ont_build_linear(ont_builder *b, ont_value *x, ont_value *y, ont_value *c)
{
    if (b->status != ONT_OK || !x || !y) return NULL;
    ont_node *node = ont_build_node(b, "", "Gemm", (ont_value *[]){x, y, c}, 3, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "transB", 1);
    return ont_build_done(b, node);
}

ont_value *ont_build_unsqueeze(ont_builder *b, ont_value *x, int axis)
{
    if (b->status != ONT_OK || !x) return NULL;
    if (x->shape.rank >= ONT_MAX_RANK) {
        ont_build_fail(b, ONT_EUNSUPPORTED, "rank %d, at most %d", x->shape.rank + 1, ONT_MAX_RANK);
        return NULL;
    }
    ont_shape shape = x->shape;
    for (int i = shape.rank++; i > axis; i--) shape.dims[i] = shape.dims[i - 1];
    shape.dims[axis] = 1;
    return ont_build_reshape(b, x, &shape);
}

ont_value *ont_build_squeeze(ont_builder *b, ont_value *x, int axis)
{
    if (b->status != ONT_OK || !x) return NULL;
    if (x->shape.dims[axis] != 1)
        ont_build_fail(b, ONT_EINTERNAL, "dim %d is %" PRId64 ", not 1", axis, x->shape.dims[axis]);
    ont_shape shape = x->shape;
    for (int i = axis; i + 1 < shape.rank; i++) shape.dims[i] = shape.dims[i + 1];
    shape.rank--;
    return ont_build_reshape(b, x, &shape);
}

ont_value *ont_build_expand_to(ont_builder *b, ont_value *x, const ont_shape *shape)
{
    if (b->status == ONT_OK && x && ont_shape_equal(&x->shape, shape)) return x;
    return ont_build2(b, "Expand", x, ont_build_const_ints(b, shape->dims, (size_t)shape->rank));
}

ont_value *ont_build_scale(ont_builder *b, ont_value *x, double factor)
{
    return factor == 1 || !x ? x : ont_build2(b, "Mul", x, ont_build_scalar(b, x->dtype, factor));
}

ont_value *ont_build_shift(ont_builder *b, ont_value *x, double term)
{
    return term == 0 || !x ? x : ont_build2(b, "Add", x, ont_build_scalar(b, x->dtype, term));
}

ont_value *ont_build_numbers(ont_builder *b, ont_dtype dtype, const ont_shape *shape, const double *values)
{
    size_t bytes = (size_t)ont_shape_count(shape) * sizeof(double);
    ont_tensor wide = {ONT_FLOAT64, *shape, bytes, (void *)values};
    ont_value *v = NULL;
    if (b->status == ONT_OK) b->status = ont_graph_add_constant(b->graph, NULL, &wide, &v);
    return b->status == ONT_OK ? ont_build_cast(b, v, dtype) : NULL; /* constant folding removes the Cast */
}

ont_value *ont_build_attr_float(ont_builder *b, const char *op_type, ont_value *x, const char *attr, double value)
{
    if (b->status != ONT_OK || !x) return NULL;
    ont_node *node = ont_build_node(b, "", op_type, &x, 1, 1);
    if (node) b->status = ont_attr_set_float(b->graph, node, attr, value);
    return ont_build_done(b, node);
}
