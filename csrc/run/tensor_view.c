/*
 * Strided tensors from DLPack: contiguity check and contiguous copy.
 */
#include <string.h>

#include "ops/support/strided.h"
#include "run/run.h"

bool ont_tensor_view_is_contiguous(const ont_tensor_view *view)
{
    if (!view->strides) return true;
    int64_t stride = 1;
    for (int i = 0; i < view->rank; i++)
        if (view->dims[i] == 0) return true;
    for (int i = view->rank - 1; i >= 0; i--) {
        if (view->dims[i] == 1) continue;
        if (view->strides[i] != stride) return false;
        stride *= view->dims[i];
    }
    return true;
}

void ont_tensor_view_copy(const ont_tensor_view *view, void *to)
{
    ont_shape shape = ont_shape_of(view->rank, view->dims);
    size_t size = ont_dtype_size(view->dtype), bytes = (size_t)ont_shape_count(&shape) * size;
    if (!bytes) return;
    if (ont_tensor_view_is_contiguous(view)) {
        memcpy(to, view->data, bytes);
        return;
    }
    int64_t dense[ONT_MAX_RANK];
    ont_strided copy;
    ont_shape_strides(&shape, dense);
    ont_strided_init(&copy, &shape, view->strides, 0, dense, 0, size);
    ont_strided_copy(&copy, view->data, to);
}
