/*
 * Shape arithmetic. See shape.h.
 */
#include "base/shape.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

bool ont_shape_is_static(const ont_shape *shape)
{
    ONT_ASSERT(shape->rank >= 0 && shape->rank <= ONT_MAX_RANK);
    for (int i = 0; i < shape->rank; i++)
        if (shape->dims[i] < 0) return false;
    return true;
}

bool ont_shape_equal(const ont_shape *a, const ont_shape *b)
{
    return a->rank == b->rank && !memcmp(a->dims, b->dims, (size_t)a->rank * sizeof a->dims[0]);
}

int64_t ont_shape_count_range(const ont_shape *shape, int first, int last)
{
    ONT_ASSERT(0 <= first && last <= shape->rank);
    int64_t count = 1;
    for (int i = first; i < last; i++) count *= shape->dims[i];
    return count;
}

int64_t ont_shape_count(const ont_shape *shape)
{
    return ont_shape_count_range(shape, 0, shape->rank);
}

ont_status ont_shape_bytes(const ont_shape *shape, ont_dtype dtype, size_t *bytes)
{
    char text[ONT_SHAPE_TEXT];
    size_t total = ont_dtype_size(dtype);
    if (!total) return ont_fail(ONT_ETYPE, "dtype %s has no fixed element size", ont_dtype_name(dtype));
    /*
     * Overflow is checked with zeros replaced by ones, so that [0, huge, huge] is refused too: its strides would
     * overflow.
     */
    bool empty = false;
    for (int i = 0; i < shape->rank; i++) {
        if (shape->dims[i] < 0)
            return ont_fail(ONT_EINVAL, "shape %s has a negative or unknown dim", ont_shape_text(shape, text));
        if (shape->dims[i] == 0)
            empty = true;
        else if (__builtin_mul_overflow(total, (size_t)shape->dims[i], &total) || total > (size_t)INT64_MAX / 2)
            return ont_fail(ONT_EINVAL, "shape %s of %s overflows the address space", ont_shape_text(shape, text),
                            ont_dtype_name(dtype));
    }
    *bytes = empty ? 0 : total;
    return ONT_OK;
}

void ont_shape_strides(const ont_shape *shape, int64_t *strides)
{
    ONT_ASSERT(shape->rank >= 0 && shape->rank <= ONT_MAX_RANK);
    int64_t stride = 1;
    for (int i = shape->rank - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= shape->dims[i];
    }
}

ont_status ont_shape_broadcast(const ont_shape *a, const ont_shape *b, ont_shape *out)
{
    ONT_ASSERT(a->rank <= ONT_MAX_RANK && b->rank <= ONT_MAX_RANK);
    ont_shape result = {.rank = a->rank > b->rank ? a->rank : b->rank};
    for (int i = 1; i <= result.rank; i++) {
        int64_t x = i <= a->rank ? a->dims[a->rank - i] : 1;
        int64_t y = i <= b->rank ? b->dims[b->rank - i] : 1;
        if (x != y && x != 1 && y != 1) {
            char left[ONT_SHAPE_TEXT], right[ONT_SHAPE_TEXT];
            return ont_fail(ONT_EINVAL, "shapes %s and %s do not broadcast", ont_shape_text(a, left),
                            ont_shape_text(b, right));
        }
        result.dims[result.rank - i] = x == 1 ? y : x;
    }
    *out = result;
    return ONT_OK;
}

void ont_shape_broadcast_strides(const ont_shape *from, const ont_shape *to, int64_t *strides)
{
    ONT_ASSERT(from->rank <= to->rank);
    int64_t own[ONT_MAX_RANK];
    ont_shape_strides(from, own);
    int lead = to->rank - from->rank;
    for (int i = 0; i < to->rank; i++)
        strides[i] = i < lead || from->dims[i - lead] == 1 ? 0 : own[i - lead];
}

ont_status ont_shape_axis(int64_t axis, int rank, int *out)
{
    if (axis < -(int64_t)rank || axis >= rank)
        return ont_fail(ONT_EINVAL, "axis %" PRId64 " is out of range for rank %d", axis, rank);
    *out = (int)(axis < 0 ? axis + rank : axis);
    return ONT_OK;
}

const char *ont_shape_text(const ont_shape *shape, char *buffer)
{
    size_t used = 0;
    buffer[used++] = '[';
    for (int i = 0; i < shape->rank; i++) {
        const char *comma = i ? ", " : "";
        int64_t dim = shape->dims[i];
        int n = dim >= 0 ? snprintf(buffer + used, ONT_SHAPE_TEXT - used, "%s%" PRId64, comma, dim)
                         : snprintf(buffer + used, ONT_SHAPE_TEXT - used, "%s?", comma);
        used += (size_t)n;
    }
    buffer[used++] = ']';
    buffer[used] = '\0';
    return buffer;
}

ont_shape ont_shape_of(int rank, const int64_t *dims)
{
    ONT_ASSERT(rank >= 0 && rank <= ONT_MAX_RANK);
    ont_shape shape = {.rank = rank};
    if (rank) memcpy(shape.dims, dims, (size_t)rank * sizeof *dims);
    return shape;
}
