/*
 * Strided tensors from DLPack: contiguity check and contiguous copy.
 */
#include <string.h>

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

/* Copies an innermost row of `n` elements, `stride` elements apart. */
static void copy_row(char *to, const char *from, int64_t n, int64_t stride, size_t size)
{
    if (stride == 1) {
        memcpy(to, from, (size_t)n * size);
        return;
    }
    switch (size) {
#define ROW(bytes, type) \
    case bytes: \
        for (int64_t i = 0; i < n; i++) memcpy(to + i * bytes, from + i * stride * bytes, bytes); \
        break;
        ROW(1, uint8_t)
        ROW(2, uint16_t)
        ROW(4, uint32_t)
        ROW(8, uint64_t)
#undef ROW
    default:
        for (int64_t i = 0; i < n; i++) memcpy(to + (size_t)i * size, from + i * stride * (int64_t)size, size);
    }
}

void ont_tensor_view_copy(const ont_tensor_view *view, void *to)
{
    size_t size = ont_dtype_size(view->dtype);
    ont_shape shape = ont_shape_of(view->rank, view->dims);
    int64_t count = ont_shape_count(&shape), index[ONT_MAX_RANK] = {0};
    if (ont_tensor_view_is_contiguous(view)) {
        if (count) memcpy(to, view->data, (size_t)count * size);
        return;
    }
    if (!count) return;
    int inner = view->rank - 1;
    const char *from = view->data;
    char *out = to;
    for (int64_t rows = count / view->dims[inner]; rows > 0; rows--) {
        int64_t offset = 0;
        for (int i = 0; i < inner; i++) offset += index[i] * view->strides[i];
        copy_row(out, from + offset * (int64_t)size, view->dims[inner], view->strides[inner], size);
        out += (size_t)view->dims[inner] * size;
        for (int i = inner - 1; i >= 0 && ++index[i] == view->dims[i]; i--) index[i] = 0;
    }
}
