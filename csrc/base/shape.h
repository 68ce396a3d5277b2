/*
 * Shapes: a rank and up to ONT_MAX_RANK dims, stored by value.
 *
 * A dim is a size (>= 0), ONT_DIM_UNKNOWN, or a symbol: ONT_DIM_SYMBOL(k) refers to entry k of the graph's symbols.
 * Loaded graphs have symbols; specialised graphs have only sizes.
 */
#ifndef ONT_BASE_SHAPE_H
#define ONT_BASE_SHAPE_H

#include "base/dtype.h"

enum { ONT_MAX_RANK = 12 };

#define ONT_DIM_UNKNOWN ((int64_t)-1)
#define ONT_DIM_SYMBOL(k) (-2 - (int64_t)(k))
#define ONT_DIM_SYMBOL_INDEX(dim) ((int)(-2 - (dim)))

typedef struct ont_shape {
    int32_t rank;
    int64_t dims[ONT_MAX_RANK];
} ont_shape;

typedef struct ont_tensor { /* elements of a constant on the host: row-major, owned by its creator (an arena) */
    ont_dtype dtype;
    ont_shape shape;
    size_t bytes;
    void *data;
} ont_tensor;

bool ont_shape_is_static(const ont_shape *shape);
bool ont_shape_equal(const ont_shape *a, const ont_shape *b);
int64_t ont_shape_count(const ont_shape *shape); /* elements of a static shape; 1 for a scalar */
int64_t ont_shape_count_range(const ont_shape *shape, int first, int last); /* product of dims [first, last) */
/* ONT_EINVAL when a dim is negative or the byte size overflows. */
ont_status ont_shape_bytes(const ont_shape *shape, ont_dtype dtype, size_t *bytes) ONT_MUST_USE;
void ont_shape_strides(const ont_shape *shape, int64_t *strides); /* row-major, in elements */
/* Multidirectional broadcast as in ONNX and NumPy; ONT_EINVAL names both shapes. `out` may alias an operand. */
ont_status ont_shape_broadcast(const ont_shape *a, const ont_shape *b, ont_shape *out) ONT_MUST_USE;
/* Strides of an operand seen through the broadcast shape `to`: 0 along broadcast dims. */
void ont_shape_broadcast_strides(const ont_shape *from, const ont_shape *to, int64_t *strides);
/* Resolves a possibly negative axis in [-rank, rank); ONT_EINVAL otherwise. */
ont_status ont_shape_axis(int64_t axis, int rank, int *out) ONT_MUST_USE;
/* "[2, 3]" into a caller's buffer of at least ONT_SHAPE_TEXT bytes; returns it. */
enum { ONT_SHAPE_TEXT = 280 };
const char *ont_shape_text(const ont_shape *shape, char *buffer);
ont_shape ont_shape_of(int rank, const int64_t *dims); /* rank <= ONT_MAX_RANK */

#endif
