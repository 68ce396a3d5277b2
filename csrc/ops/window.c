/*
 * Attributes of sliding windows. See window.h.
 */
#include "ops/window.h"

#include <inttypes.h>
#include <string.h>

/* Larger values cannot come from a sensible model; below it, sums and products of three fit in 64 bits. */
static const int64_t MOST = INT32_MAX;

ont_status ont_window_attr(const ont_node *node, const char *name, int spatial, int64_t least, int64_t otherwise,
                           int64_t *values)
{
    const ont_attr *list = ont_attr_find(node, name, ONT_ATTR_INTS);
    for (int i = 0; i < spatial; i++) values[i] = otherwise;
    if (!list) return ONT_OK;
    if (list->count != (size_t)spatial)
        return ont_fail(ONT_EINVAL, "attribute %s has %zu entries, %d spatial dims", name, list->count, spatial);
    for (int i = 0; i < spatial; i++) {
        if (list->ints[i] < least || list->ints[i] > MOST)
            return ont_fail(ONT_EINVAL, "attribute %s[%d] is %" PRId64 ", at least %" PRId64 " is expected", name, i,
                            list->ints[i], least);
        values[i] = list->ints[i];
    }
    return ONT_OK;
}

static ont_status read_pads(const ont_node *node, ont_window *w)
{
    const ont_attr *list = ont_attr_find(node, "pads", ONT_ATTR_INTS);
    for (int i = 0; i < w->spatial; i++) w->pad[i] = w->pad_end[i] = 0;
    if (!list) return ONT_OK;
    if (list->count != 2 * (size_t)w->spatial)
        return ont_fail(ONT_EINVAL, "attribute pads has %zu entries, %d are expected", list->count, 2 * w->spatial);
    for (int i = 0; i < 2 * w->spatial; i++) {
        if (list->ints[i] < 0 || list->ints[i] > MOST)
            return ont_fail(ONT_EUNSUPPORTED, "attribute pads[%d] is %" PRId64, i, list->ints[i]);
        *(i < w->spatial ? &w->pad[i] : &w->pad_end[i - w->spatial]) = list->ints[i];
    }
    return ONT_OK;
}

/* SAME: as many windows as strides fit, an odd pad goes where the name says. */
static void same_pads(ont_window *w, int i, bool upper)
{
    int64_t reach = (w->kernel[i] - 1) * w->dilation[i] + 1;
    w->out[i] = (w->in[i] + w->stride[i] - 1) / w->stride[i];
    int64_t total = (w->out[i] - 1) * w->stride[i] + reach - w->in[i];
    if (total < 0) total = 0;
    w->pad[i] = upper ? total / 2 : total - total / 2;
    w->pad_end[i] = total - w->pad[i];
}

static ont_status window_size(ont_window *w, int i, bool ceil_mode)
{
    int64_t reach = (w->kernel[i] - 1) * w->dilation[i] + 1, room = w->in[i] + w->pad[i] + w->pad_end[i] - reach;
    if (room < 0)
        return ont_fail(ONT_EINVAL, "the window spans %" PRId64 " in spatial dim %d, the padded input has %" PRId64, reach, i,
                        w->in[i] + w->pad[i] + w->pad_end[i]);
    w->out[i] = (room + (ceil_mode ? w->stride[i] - 1 : 0)) / w->stride[i] + 1;
    if (ceil_mode && (w->out[i] - 1) * w->stride[i] >= w->in[i] + w->pad[i]) w->out[i]--;
    return ONT_OK;
}

ont_status ont_window_read(const ont_node *node, ont_window *w, bool ceil_mode)
{
    const char *mode = ont_attr_string(node, "auto_pad", "NOTSET");
    bool upper = !strcmp(mode, "SAME_UPPER"), same = upper || !strcmp(mode, "SAME_LOWER");
    bool valid = !strcmp(mode, "VALID"), notset = !strcmp(mode, "NOTSET") || !*mode;
    if (!same && !valid && !notset) return ont_fail(ONT_EINVAL, "attribute auto_pad is '%s'", mode);
    ONT_TRY(ont_window_attr(node, "strides", w->spatial, 1, 1, w->stride));
    ONT_TRY(ont_window_attr(node, "dilations", w->spatial, 1, 1, w->dilation));
    ONT_TRY(read_pads(node, w));
    for (int i = 0; i < w->spatial; i++) {
        int64_t span;
        if (w->kernel[i] < 1) return ont_fail(ONT_EINVAL, "the window has size %" PRId64 " in spatial dim %d", w->kernel[i], i);
        if (w->kernel[i] > MOST || w->in[i] > MOST * 16 || __builtin_mul_overflow(w->kernel[i], w->dilation[i], &span))
            return ont_fail(ONT_EUNSUPPORTED, "sizes of spatial dim %d are too large", i);
        if (!notset) w->pad[i] = w->pad_end[i] = 0;
        if (same)
            same_pads(w, i, upper);
        else
            ONT_TRY(window_size(w, i, ceil_mode));
    }
    return ONT_OK;
}
