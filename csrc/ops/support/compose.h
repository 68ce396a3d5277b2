/*
 * Builders of common subgraphs for expand() hooks and gradient rules: slices, splits, concatenations, products,
 * constants. As with the builder of op.h, the first failure is kept, and NULL is returned from then on.
 */
#ifndef ONT_OPS_COMPOSE_H
#define ONT_OPS_COMPOSE_H

#include "ops/op.h"

/* A node with one output. Inputs may be NULL where the operator allows it. */
ont_value *ont_build_op(ont_builder *b, const char *op_type, ont_value *const *inputs, uint32_t n_inputs);
/* x[start:end:step] along `axis`, as in NumPy after clipping; x itself where that is all of x. */
ont_value *ont_build_slice(ont_builder *b, ont_value *x, int axis, int64_t start, int64_t end, int64_t step);
/* Splits x into n pieces of sizes[i] along `axis`. */
void ont_build_split(ont_builder *b, ont_value *x, int axis, const int64_t *sizes, uint32_t n, ont_value **pieces);
/* Splits x into n equal pieces. */
void ont_build_split_even(ont_builder *b, ont_value *x, int axis, uint32_t n, ont_value **pieces);
/* Returns the piece itself where n is 1. */
ont_value *ont_build_concat(ont_builder *b, ont_value *const *pieces, uint32_t n, int axis);
/* alpha * op(x) op(y), with broadcast batch dims. */
ont_value *ont_build_matmul(ont_builder *b, ont_value *x, bool trans_x, ont_value *y, bool trans_y, double alpha);
/* x y^T + c for matrices; c may be NULL. */
ont_value *ont_build_linear(ont_builder *b, ont_value *x, ont_value *y, ont_value *c);
ont_value *ont_build_unsqueeze(ont_builder *b, ont_value *x, int axis); /* axis of the result */
ont_value *ont_build_squeeze(ont_builder *b, ont_value *x, int axis);
ont_value *ont_build_expand_to(ont_builder *b, ont_value *x, const ont_shape *shape);
/* x * factor, x + term; x itself where factor is 1, term is 0. */
ont_value *ont_build_scale(ont_builder *b, ont_value *x, double factor);
ont_value *ont_build_shift(ont_builder *b, ont_value *x, double term);
/* A constant of any float or integer dtype, rounded from doubles. */
ont_value *ont_build_numbers(ont_builder *b, ont_dtype dtype, const ont_shape *shape, const double *values);
ont_value *ont_build_attr_float(ont_builder *b, const char *op_type, ont_value *x, const char *attr, double value);

#endif
