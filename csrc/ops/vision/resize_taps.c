/*
 * Geometry of Resize, see resize.h. Coordinates, filters and edges follow the ONNX specification. Where sizes are
 * given, coordinates are computed from the exact ratio of sizes, so that whole coordinates are exact.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "ops/vision/resize.h"

enum { MAX_TAPS = 1 << 16 };

/* ---- attributes and inputs ---- */

/* Reads the numbers of a constant input; *count is -1 where it is absent or empty. */
static ont_status const_floats(const ont_node *node, uint32_t index, double *values, int capacity, int *count)
{
    const ont_value *v = ont_node_in(node, index);
    *count = -1;
    if (!v || (v->has_shape && !ont_shape_count(&v->shape))) return ONT_OK;
    const ont_tensor *data;
    ONT_TRY(ont_need_data(node, index, &data));
    int64_t n = ont_shape_count(&data->shape);
    if (n > capacity)
        return ont_fail(ONT_EINVAL, "input %u has %" PRId64 " entries, at most %d fit", index, n, capacity);
    if (!ont_dtype_is_float(v->dtype))
        return ont_fail(ONT_ETYPE, "input %u is %s, a float is expected", index, ont_dtype_name(v->dtype));
    for (int64_t i = 0; i < n; i++) values[i] = ont_number_at(data->data, data->dtype, i);
    *count = (int)n;
    return ONT_OK;
}

static ont_status one_of(const char *attribute, const char *value, const char *const *known, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(value, known[i])) return ONT_OK;
    return ont_fail(ONT_EINVAL, "attribute %s is '%s', which ONNX does not define", attribute, value);
}
#define ONE_OF(attribute, value, ...) \
    one_of(attribute, value, (const char *const[]){__VA_ARGS__}, \
           sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

static ont_status read_mode(const ont_node *node, bool upsample, ont_resize *r)
{
    const char *mode = ont_attr_string(node, "mode", "nearest");
    if (!strcmp(mode, "nearest"))
        r->mode = RESIZE_NEAREST;
    else if (!strcmp(mode, "linear") || (upsample && !strcmp(mode, "bilinear")))
        r->mode = RESIZE_LINEAR;
    else if (!strcmp(mode, "cubic") && !upsample)
        r->mode = RESIZE_CUBIC;
    else
        return ont_fail(ONT_EINVAL, "mode is '%s', expected nearest, linear%s", mode, upsample ? "" : " or cubic");
    return ONT_OK;
}

static ont_status read_attributes(const ont_node *node, ont_resize *r)
{
    r->coordinates = ont_attr_string(node, "coordinate_transformation_mode", "half_pixel");
    r->nearest = ont_attr_string(node, "nearest_mode", "round_prefer_floor");
    r->antialias = ont_attr_int(node, "antialias", 0);
    r->exclude_outside = ont_attr_int(node, "exclude_outside", 0);
    r->cubic_a = ont_attr_float(node, "cubic_coeff_a", -0.75);
    r->extrapolation = ont_attr_float(node, "extrapolation_value", 0);
    ONT_TRY(ONE_OF("coordinate_transformation_mode", r->coordinates, "half_pixel", "half_pixel_symmetric",
                   "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn", "tf_crop_and_resize"));
    ONT_TRY(ONE_OF("nearest_mode", r->nearest, "round_prefer_floor", "round_prefer_ceil", "floor", "ceil"));
    if (r->antialias && r->mode == RESIZE_NEAREST) return ont_fail(ONT_EUNSUPPORTED, "antialias with mode 'nearest'");
    return ONT_OK;
}

/* The output size, in float32 arithmetic like the scale itself: 10 * 0.7 gives 7 cells. */
static ont_status set_scale(ont_resize *r, int axis, double scale, double extent)
{
    if (!(scale > 0) || scale > 1e9)
        return ont_fail(ONT_EINVAL, "the scale of axis %d is %g, expected more than 0 and at most 1e9", axis, scale);
    r->scale[axis] = scale;
    r->exact[axis] = false;
    double size = floor((double)(float)((double)r->in.dims[axis] * extent * scale));
    if (!(size >= 0) || size > (double)INT32_MAX)
        return ont_fail(ONT_EINVAL, "axis %d of the result would have %g cells", axis, size);
    r->out.dims[axis] = (int64_t)size;
    return ONT_OK;
}

static ont_status set_size(ont_resize *r, int axis, int64_t size)
{
    if (size < 0 || size > INT32_MAX)
        return ont_fail(ONT_EINVAL, "the size of axis %d is %" PRId64 ", expected 0 to %d", axis, size, INT32_MAX);
    r->out.dims[axis] = size;
    r->exact[axis] = true;
    r->scale[axis] = r->in.dims[axis] ? (double)size / (double)r->in.dims[axis] : 1;
    return ONT_OK;
}

/* keep_aspect_ratio_policy: the smallest or the largest of the scales of the axes, for all of them. */
static ont_status keep_aspect(const ont_node *node, const int *axes, int n, ont_resize *r)
{
    const char *policy = ont_attr_string(node, "keep_aspect_ratio_policy", "stretch");
    ONT_TRY(ONE_OF("keep_aspect_ratio_policy", policy, "stretch", "not_larger", "not_smaller"));
    if (!strcmp(policy, "stretch") || !n) return ONT_OK;
    bool larger = !strcmp(policy, "not_smaller");
    double scale = r->scale[axes[0]];
    for (int i = 1; i < n; i++)
        if (larger ? r->scale[axes[i]] > scale : r->scale[axes[i]] < scale) scale = r->scale[axes[i]];
    for (int i = 0; i < n; i++) {
        r->scale[axes[i]] = scale;
        r->out.dims[axes[i]] = (int64_t)floor(scale * (double)r->in.dims[axes[i]] + 0.5);
        r->exact[axes[i]] = false;
    }
    return ONT_OK;
}

static ont_status read_axes(const ont_node *node, int rank, int *axes, int *n)
{
    int64_t given[ONT_MAX_RANK];
    bool seen[ONT_MAX_RANK] = {false};
    int n_given;
    ONT_TRY(ont_const_ints(node, -1, "axes", given, ONT_MAX_RANK, &n_given));
    *n = n_given < 0 ? rank : n_given;
    for (int i = 0; i < *n; i++) {
        ONT_TRY(ont_shape_axis(n_given < 0 ? i : given[i], rank, &axes[i]));
        if (seen[axes[i]]) return ont_fail(ONT_EINVAL, "axes names axis %d twice", axes[i]);
        seen[axes[i]] = true;
    }
    return ONT_OK;
}

/* Opset 11 and later: (X, roi, scales, sizes). */
static ont_status read_sizes(const ont_node *node, ont_resize *r)
{
    int axes[ONT_MAX_RANK], n, n_roi, n_scales, n_sizes = -1;
    double roi[2 * ONT_MAX_RANK], scales[ONT_MAX_RANK];
    int64_t sizes[ONT_MAX_RANK];
    bool crop = !strcmp(r->coordinates, "tf_crop_and_resize");
    ONT_TRY(read_axes(node, r->in.rank, axes, &n));
    ONT_TRY(const_floats(node, 2, scales, ONT_MAX_RANK, &n_scales));
    if (ont_node_in(node, 3)) ONT_TRY(ont_const_ints(node, 3, NULL, sizes, ONT_MAX_RANK, &n_sizes));
    if (n_sizes == 0) n_sizes = n ? -1 : 0;
    if ((n_scales >= 0) == (n_sizes >= 0))
        return ont_fail(ONT_EINVAL,
                        n_sizes >= 0 ? "both scales and sizes are given" : "neither scales nor sizes are given");
    if ((n_scales >= 0 ? n_scales : n_sizes) != n)
        return ont_fail(ONT_EINVAL, "%s has %d entries for %d axes", n_scales >= 0 ? "scales" : "sizes",
                        n_scales >= 0 ? n_scales : n_sizes, n);
    if (crop) {
        ONT_TRY(const_floats(node, 1, roi, 2 * ONT_MAX_RANK, &n_roi));
        if (n_roi != 2 * n) return ont_fail(ONT_EINVAL, "roi has %d entries for %d axes", n_roi < 0 ? 0 : n_roi, n);
    }
    for (int i = 0; i < n; i++) {
        int axis = axes[i];
        if (crop) r->start[axis] = roi[i], r->end[axis] = roi[n + i];
        if (n_scales >= 0)
            ONT_TRY(set_scale(r, axis, scales[i], crop ? roi[n + i] - roi[i] : 1));
        else
            ONT_TRY(set_size(r, axis, sizes[i]));
    }
    return n_sizes >= 0 ? keep_aspect(node, axes, n, r) : ONT_OK;
}

/* Upsample, and Resize of opset 10: scales for all axes. */
static ont_status read_old(const ont_node *node, bool upsample, int64_t version, ont_resize *r)
{
    double scales[ONT_MAX_RANK];
    int n = -1;
    r->coordinates = "asymmetric";
    r->nearest = "floor";
    r->simple_nearest = !upsample;
    if (upsample && version < 7) {
        if (r->in.rank != 4) return ont_fail(ONT_EINVAL, "the input has rank %d, expected 4", r->in.rank);
        n = 4;
        scales[0] = scales[1] = 1;
        scales[2] = ont_attr_float(node, "height_scale", 0);
        scales[3] = ont_attr_float(node, "width_scale", 0);
    } else if (upsample && version < 9) {
        size_t count;
        const double *given = ont_attr_floats(node, "scales", &count);
        if (count > ONT_MAX_RANK) return ont_fail(ONT_EINVAL, "scales has %zu entries", count);
        for (size_t i = 0; i < count; i++) scales[i] = given[i];
        n = (int)count;
    } else {
        ONT_TRY(const_floats(node, 1, scales, ONT_MAX_RANK, &n));
    }
    if (n != r->in.rank) return ont_fail(ONT_EINVAL, "scales has %d entries for %d axes", n < 0 ? 0 : n, r->in.rank);
    for (int d = 0; d < n; d++) ONT_TRY(set_scale(r, d, scales[d], 1));
    return ONT_OK;
}

ont_status ont_resize_read(const ont_node *node, const ont_shape *x, ont_resize *r)
{
    int64_t version = ont_attr_int(node, "version", node->version);
    bool upsample = ONT_IS(node, Upsample) || ont_attr_int(node, "upsample", 0);
    *r = (ont_resize){.cubic_a = -0.75, .in = *x, .out = *x};
    for (int d = 0; d < x->rank; d++) r->scale[d] = 1, r->end[d] = 1, r->exact[d] = true;
    if (upsample && version >= 10)
        return ont_fail(ONT_EINVAL, "Upsample is not in opset %" PRId64 ": opset 9 is its last", version);
    ONT_TRY(read_mode(node, upsample, r));
    if (upsample || version < 11) {
        ONT_TRY(read_old(node, upsample, version, r));
    } else {
        ONT_TRY(read_attributes(node, r));
        ONT_TRY(read_sizes(node, r));
    }
    for (int d = 0; d < x->rank; d++)
        if (!r->in.dims[d] && r->out.dims[d])
            return ont_fail(ONT_EINVAL, "axis %d of the input is empty, but the result would have %" PRId64, d,
                            r->out.dims[d]);
    return ONT_OK;
}

/* ---- coordinates ---- */

/* The coordinate of output cell x, in cells of the input. */
static double coordinate(const ont_resize *r, int axis, int64_t x)
{
    const char *mode = r->coordinates;
    int64_t in = r->in.dims[axis], out = r->out.dims[axis];
    double scale = r->scale[axis], length = r->exact[axis] ? (double)out : (double)in * scale;
    double half = r->exact[axis] ? (double)((2 * x + 1) * in - out) / (2.0 * (double)out)
                                 : ((double)x + 0.5) / scale - 0.5;
    if (!strcmp(mode, "asymmetric")) return r->exact[axis] ? (double)(x * in) / (double)out : (double)x / scale;
    if (!strcmp(mode, "align_corners"))
        return out == 1 || length == 1 ? 0 : (double)x * (double)(in - 1) / (length - 1);
    if (!strcmp(mode, "pytorch_half_pixel")) return out > 1 ? half : 0;
    if (!strcmp(mode, "tf_half_pixel_for_nn")) return half + 0.5;
    if (!strcmp(mode, "half_pixel_symmetric")) return half + (double)in / 2 * (1 - (double)out / length);
    if (strcmp(mode, "tf_crop_and_resize")) return half;
    double extent = (r->end[axis] - r->start[axis]) * (double)(in - 1);
    return r->start[axis] * (double)(in - 1) + (out > 1 ? (double)x * extent / (double)(out - 1) : extent / 2);
}

/* Scales are float32: a coordinate within rounding error of a multiple of 1/2 is set to it. */
static double snapped(double x)
{
    double near = rint(2 * x) / 2;
    return fabs(x - near) <= fabs(x) * 0x1p-23 ? near : x;
}

static int64_t nearest_cell(const ont_resize *r, int axis, double x)
{
    if (!r->exact[axis]) x = snapped(x);
    if (r->simple_nearest) return (int64_t)(r->scale[axis] < 1 ? ceil(x) : floor(x));
    if (!strcmp(r->nearest, "floor")) return (int64_t)floor(x);
    if (!strcmp(r->nearest, "ceil")) return (int64_t)ceil(x);
    bool up = !strcmp(r->nearest, "round_prefer_ceil");
    return (int64_t)(up ? floor(x + 0.5) : ceil(x - 0.5));
}

/* ---- filters ---- */

static double filter(const ont_resize *r, double distance)
{
    double t = fabs(distance), a = r->cubic_a;
    if (r->mode == RESIZE_LINEAR) return t < 1 ? 1 - t : 0;
    if (t <= 1) return ((a + 2) * t - (a + 3)) * t * t + 1;
    return t < 2 ? ((a * t - 5 * a) * t + 8 * a) * t - 4 * a : 0;
}

/* The number of cells on either side that the filter covers; with antialiasing it is stretched where the axis
 * shrinks. */
static int64_t reach(const ont_resize *r, int axis)
{
    double stretch = r->antialias && r->scale[axis] < 1 ? 1 / r->scale[axis] : 1;
    return r->mode == RESIZE_NEAREST ? 1 : -(int64_t)floor(-(r->mode == RESIZE_LINEAR ? 1 : 2) * stretch);
}

/* Adds the taps of output o; cells beyond an edge are replaced by the cell at the edge, or are left out. */
static void add_taps(const ont_resize *r, int axis, int64_t o, ont_taps *t)
{
    double x = coordinate(r, axis, o), total = 0, all = 0;
    int64_t n = t->first[o], in = t->in, cells = reach(r, axis);
    double squeeze = r->antialias && r->scale[axis] < 1 ? r->scale[axis] : 1;
    t->first[o + 1] = n;
    if (t->outside && (t->outside[o] = x < 0 || x > (double)(in - 1))) return;
    if (r->mode == RESIZE_NEAREST) {
        int64_t cell = nearest_cell(r, axis, x);
        t->index[n] = cell < 0 ? 0 : cell >= in ? in - 1 : cell;
        t->weight[n] = 1;
        t->first[o + 1] = n + 1;
        return;
    }
    int64_t left = (int64_t)ceil(x) - 1; /* cell of the interval (left, left + 1] that has x: a whole coordinate is
                                          * at its right end */
    for (int64_t i = left - cells + 1; i <= left + cells; i++) {
        double weight = filter(r, ((double)i - x) * squeeze);
        int64_t cell = i < 0 ? 0 : i >= in ? in - 1 : i;
        all += weight;
        if (weight == 0 || (r->exclude_outside && cell != i)) continue;
        total += weight;
        if (n > t->first[o] && t->index[n - 1] == cell) {
            t->weight[n - 1] += weight;
        } else {
            t->index[n] = cell;
            t->weight[n++] = weight;
        }
    }
    double divisor = r->exclude_outside ? total : squeeze < 1 ? all : 1;
    for (int64_t i = t->first[o]; i < n; i++) t->weight[i] /= divisor != 0 ? divisor : 1;
    t->first[o + 1] = n;
}

static ont_status taps_alloc(ont_arena *arena, int64_t in, int64_t out, int64_t count, ont_taps *t)
{
    *t = (ont_taps){.in = in, .out = out};
    t->first = ont_arena_array(arena, (size_t)out + 1, sizeof *t->first);
    t->index = ont_arena_array(arena, (size_t)count + 1, sizeof *t->index);
    t->weight = ont_arena_array(arena, (size_t)count + 1, sizeof *t->weight);
    return t->first && t->index && t->weight ? ONT_OK : ONT_ENOMEM;
}

ont_status ont_resize_taps(const ont_resize *r, int axis, ont_arena *arena, ont_taps *taps)
{
    int64_t in = r->in.dims[axis], out = r->out.dims[axis], n_taps = 2 * reach(r, axis);
    if (n_taps < 1 || n_taps > MAX_TAPS)
        return ont_fail(ONT_EUNSUPPORTED, "the filter of axis %d covers %" PRId64 " cells, which is not supported",
                        axis, n_taps);
    if (n_taps > in) n_taps = in; /* cells beyond an edge are merged into the cell at the edge */
    if (n_taps < 1) n_taps = 1;
    ONT_TRY(taps_alloc(arena, in, out, out * n_taps, taps));
    if (!strcmp(r->coordinates, "tf_crop_and_resize")) {
        taps->outside = ont_arena_array(arena, (size_t)out + 1, sizeof *taps->outside);
        if (!taps->outside) return ONT_ENOMEM;
    }
    for (int64_t o = 0; o < out; o++) add_taps(r, axis, o, taps);
    return ONT_OK;
}

ont_status ont_taps_transpose(const ont_taps *taps, ont_arena *arena, ont_taps *out)
{
    int64_t n = taps->first[taps->out];
    ONT_TRY(taps_alloc(arena, taps->out, taps->in, n, out));
    for (int64_t i = 0; i < n; i++) out->first[taps->index[i] + 1]++;
    for (int64_t c = 0; c < taps->in; c++) out->first[c + 1] += out->first[c];
    int64_t *next = ont_arena_array(arena, (size_t)taps->in + 1, sizeof *next);
    if (!next) return ONT_ENOMEM;
    memcpy(next, out->first, (size_t)taps->in * sizeof *next);
    for (int64_t o = 0; o < taps->out; o++)
        for (int64_t i = taps->first[o]; i < taps->first[o + 1]; i++) {
            int64_t at = next[taps->index[i]]++;
            out->index[at] = o;
            out->weight[at] = taps->weight[i];
        }
    return ONT_OK;
}

bool ont_taps_identity(const ont_taps *taps)
{
    bool same = taps->in == taps->out;
    for (int64_t o = 0; o < taps->out && same; o++)
        same = taps->first[o + 1] == o + 1 && taps->first[o] == o && taps->index[o] == o && taps->weight[o] == 1;
    return same;
}
