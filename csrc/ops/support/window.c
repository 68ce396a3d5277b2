/*
 * Sliding windows. See window.h.
 */
#include "ops/support/window.h"

#include <inttypes.h>
#include <string.h>

static ont_status read_list(const ont_node *node, const char *name, int64_t otherwise, int n, int64_t min,
                            int64_t *out)
{
    int given;
    int64_t values[2 * ONT_WINDOW_RANK];
    ONT_TRY(ont_const_ints(node, -1, name, values, 2 * ONT_WINDOW_RANK, &given));
    if (given >= 0 && given != n) return ont_fail(ONT_EINVAL, "%s has %d entries, expected %d", name, given, n);
    for (int i = 0; i < n; i++) {
        out[i] = given < 0 ? otherwise : values[i];
        if (out[i] < min || out[i] > INT32_MAX) return ont_fail(ONT_EINVAL, "%s[%d] is %" PRId64, name, i, out[i]);
    }
    return ONT_OK;
}

/* SAME_*: ceil(in / stride) outputs; the odd cell of padding is at the end (upper) or at the beginning. */
static void pad_same(ont_window *w, int d, int64_t extent, bool upper)
{
    int64_t outputs = (w->in[d] + w->stride[d] - 1) / w->stride[d];
    int64_t total = (outputs - 1) * w->stride[d] + extent - w->in[d];
    if (total < 0) total = 0;
    w->begin[d] = upper ? total / 2 : total - total / 2;
    w->end[d] = total - w->begin[d];
}

static ont_status set_output(const ont_node *node, ont_window *w, int d, const char *auto_pad)
{
    int64_t extent = (w->kernel[d] - 1) * w->dilation[d] + 1;
    if (!strncmp(auto_pad, "SAME", 4)) pad_same(w, d, extent, !strcmp(auto_pad, "SAME_UPPER"));
    int64_t span = w->in[d] + w->begin[d] + w->end[d] - extent;
    if (span < 0)
        return ont_fail(ONT_EINVAL,
                        "a window of %" PRId64 " does not fit in %" PRId64 " padded cells of spatial dim %d", extent,
                        w->in[d] + w->begin[d] + w->end[d], d);
    bool ceil_mode = ont_attr_int(node, "ceil_mode", 0);
    w->out[d] = (span + (ceil_mode ? w->stride[d] - 1 : 0)) / w->stride[d] + 1;
    /* As in PyTorch, a window must begin inside the input or its leading padding. */
    if (ceil_mode && (w->out[d] - 1) * w->stride[d] >= w->in[d] + w->begin[d]) w->out[d]--;
    return ONT_OK;
}

/* The product of the dims. Zeros count as ones in the overflow check, so that the order of the dims does not matter. */
static ont_status count(const char *what, const int64_t *dims, int rank, int64_t *result)
{
    int64_t product = 1;
    bool empty = false;
    for (int d = 0; d < rank; d++) {
        empty |= !dims[d];
        if (__builtin_mul_overflow(product, dims[d] ? dims[d] : 1, &product))
            return ont_fail(ONT_EINVAL, "the number of cells of the %s is beyond 64 bits", what);
    }
    *result = empty ? 0 : product;
    return ONT_OK;
}

ont_status ont_window_count(ont_window *w)
{
    ONT_TRY(count("image", w->in, w->rank, &w->in_count));
    ONT_TRY(count("result", w->out, w->rank, &w->out_count));
    return count("window", w->kernel, w->rank, &w->kernel_count);
}

ont_status ont_window_init(const ont_node *node, const ont_shape *x, const int64_t *kernel, ont_window *w)
{
    *w = (ont_window){.rank = x->rank - 2};
    if (w->rank < 1 || w->rank > ONT_WINDOW_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "%d spatial dims, 1 to %d are supported", w->rank, ONT_WINDOW_RANK);
    int64_t pads[2 * ONT_WINDOW_RANK];
    bool global = node->op->flags & ONT_OP_GLOBAL;
    if (kernel)
        memcpy(w->kernel, kernel, (size_t)w->rank * sizeof *kernel);
    else if (global)
        memcpy(w->kernel, x->dims + 2, (size_t)w->rank * sizeof *kernel);
    else
        ONT_TRY(read_list(node, "kernel_shape", 0, w->rank, 1, w->kernel));
    ONT_TRY(read_list(node, "strides", 1, w->rank, 1, w->stride));
    ONT_TRY(read_list(node, "dilations", 1, w->rank, 1, w->dilation));
    ONT_TRY(read_list(node, "pads", 0, 2 * w->rank, 0, pads));
    const char *auto_pad = ont_attr_string(node, "auto_pad", "NOTSET");
    if (strcmp(auto_pad, "NOTSET") && strcmp(auto_pad, "VALID") && strcmp(auto_pad, "SAME_UPPER") &&
        strcmp(auto_pad, "SAME_LOWER"))
        return ont_fail(ONT_EINVAL, "auto_pad is '%s', expected NOTSET, VALID, SAME_UPPER or SAME_LOWER", auto_pad);
    bool explicit_pads = !strcmp(auto_pad, "NOTSET");
    for (int d = 0; d < w->rank; d++) {
        w->in[d] = x->dims[d + 2];
        w->begin[d] = explicit_pads ? pads[d] : 0;
        w->end[d] = explicit_pads ? pads[w->rank + d] : 0;
        if (w->kernel[d] < 1 || w->kernel[d] > INT32_MAX)
            return ont_fail(ONT_EINVAL, "kernel dim %d is %" PRId64 ", expected 1 to %d", d, w->kernel[d], INT32_MAX);
        ONT_TRY(set_output(node, w, d, auto_pad));
    }
    return ont_window_count(w);
}
