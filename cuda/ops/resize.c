/*
 * Resize, Upsample and their gradient on a device: the lists of taps of the resized axes as tables for the kernel.
 */
#include <string.h>

#include "ops_common.h"

typedef struct resize_state {
    ont_resample kernel;
    uint64_t *tables; /* sent to scratch memory at each run */
    size_t words, capacity;
} resize_state;

static bool is_resize_grad(const ont_node *node) { return *node->op->domain; }

static ont_status read_resize(const ont_node *node, ont_resize *r)
{
    return ont_resize_read(node, &(is_resize_grad(node) ? node->outputs[0] : ont_node_in(node, 0))->shape, r);
}

/* The taps of an axis by the positions of the result. */
static ont_status read_taps(const ont_node *node, const ont_resize *r, int axis, ont_arena *arena, ont_taps *taps,
                            const bool **outside)
{
    ont_taps own;
    ONT_TRY(ont_resize_taps(r, axis, arena, &own));
    *outside = is_resize_grad(node) ? NULL : own.outside;
    if (is_resize_grad(node)) return ont_taps_transpose(&own, arena, taps);
    *taps = own;
    return ONT_OK;
}

/* The kernel goes through at most three axes whose size or cells change. */
static bool is_resized(const ont_resize *r, int d)
{
    bool between = !strcmp(r->coordinates, "tf_half_pixel_for_nn") && r->in.dims[d] > 1; /* half a cell apart */
    return between || r->in.dims[d] != r->out.dims[d] || r->scale[d] != 1 || r->start[d] != 0 || r->end[d] != 1;
}

static const char *resize_accept(const ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    ont_resize r;
    int axes = 0;
    if (read_resize(node, &r) != ONT_OK) return "sizes";
    if (ont_is_long(x) || ont_is_long(node->outputs[0])) return "2^31 elements or more";
    for (int d = 0; d < r.in.rank; d++) axes += is_resized(&r, d);
    if (axes > ONT_RESAMPLE_AXES) return "more than three axes are resized";
    if (ont_dtype_is_float(x->dtype)) return NULL;
    bool nearest = r.mode == RESIZE_NEAREST && strcmp(r.coordinates, "tf_crop_and_resize") != 0;
    size_t size = ont_dtype_size(x->dtype);
    return nearest && !is_resize_grad(node) && (size == 1 || size == 2 || size == 4 || size == 8) ? NULL : "dtype";
}

static size_t int_words(int64_t n) { return ((size_t)n + 1) / 2; }

/* Writes the tables of one resized axis; of the third, if `taps` is NULL, one tap of weight 1. */
static void add_tables(resize_state *s, int axis, const ont_taps *taps, const bool *outside)
{
    int64_t one_first[] = {0, 1}, zero = 0;
    double one = 1;
    const ont_taps trivial = {.out = 1, .first = one_first, .index = &zero, .weight = &one};
    const ont_taps *t = taps ? taps : &trivial;
    int64_t n = t->first[t->out];
    ont_resample *k = &s->kernel;
    k->first[axis] = (int64_t)s->words;
    for (int64_t i = 0; i <= t->out; i++) ((int32_t *)(s->tables + s->words))[i] = (int32_t)t->first[i];
    s->words += int_words(t->out + 1);
    k->index[axis] = (int64_t)s->words;
    for (int64_t i = 0; i < n; i++) ((int32_t *)(s->tables + s->words))[i] = (int32_t)t->index[i];
    s->words += int_words(n);
    k->weight[axis] = (int64_t)s->words;
    memcpy(s->tables + s->words, t->weight, (size_t)n * sizeof(double));
    s->words += (size_t)n;
    k->outside[axis] = outside ? (int64_t)s->words : -1;
    for (int64_t i = 0; outside && i < t->out; i++) ((int32_t *)(s->tables + s->words))[i] = outside[i];
    s->words += outside ? int_words(t->out) : 0;
}

static size_t table_words(const ont_taps *t, const bool *outside)
{
    int64_t n = t->first[t->out];
    return int_words(t->out + 1) + int_words(n) + (size_t)n + (outside ? int_words(t->out) : 0);
}

/* Dims of the result; neighbouring dims that are not resized are one. */
static void lay_out(const ont_shape *in, const ont_shape *to, const bool *resized, ont_resample *k)
{
    int64_t strides[ONT_MAX_RANK];
    int axes = 0;
    ont_shape_strides(in, strides);
    k->count = ont_shape_count(to);
    for (int d = 0; d < to->rank; d++) {
        bool joins = !resized[d] && k->rank && k->axis[k->rank - 1] < 0;
        int at = joins ? k->rank - 1 : k->rank++;
        k->dims[at] = joins ? k->dims[at] * to->dims[d] : to->dims[d];
        k->stride[at] = strides[d];
        k->axis[at] = resized[d] ? axes : -1;
        if (resized[d]) k->axis_stride[axes++] = strides[d];
    }
}

static ont_status resize_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0);
    resize_state *s = ont_arena_alloc(arena, sizeof *s);
    ont_taps taps[ONT_RESAMPLE_AXES];
    const bool *outside[ONT_RESAMPLE_AXES];
    bool resized[ONT_MAX_RANK];
    ont_resize r;
    int axes = 0;
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_resize(node, &r));
    s->capacity = 3 * ONT_RESAMPLE_AXES;
    for (int d = 0; d < r.in.rank; d++) {
        resized[d] = is_resized(&r, d);
        if (!resized[d]) continue;
        ONT_TRY(read_taps(node, &r, d, arena, &taps[axes], &outside[axes]));
        s->capacity += table_words(&taps[axes], outside[axes]);
        axes++;
    }
    s->kernel = (ont_resample){.dtype = x->dtype, .size = (int32_t)ont_dtype_size(x->dtype),
                               .copies = !ont_dtype_is_float(x->dtype), .extrapolation = r.extrapolation};
    lay_out(&x->shape, &node->outputs[0]->shape, resized, &s->kernel);
    s->tables = ont_arena_array(arena, s->capacity, sizeof *s->tables);
    if (!s->tables) return ONT_ENOMEM;
    for (int a = 0; a < ONT_RESAMPLE_AXES; a++)
        add_tables(s, a, a < axes ? &taps[a] : NULL, a < axes ? outside[a] : NULL);
    out->state = s;
    out->work_bytes = s->capacity * sizeof(uint64_t);
    return ONT_OK;
}

static ont_status resize_run(const ont_call *call)
{
    const resize_state *s = call->state;
    ONT_TRY(ont_launched(ont_launch_upload(call->work, s->tables, s->words, call->stream)));
    return ont_launched(ont_launch_resample(&s->kernel, call->work, call->in[0], call->out[0], call->stream));
}

const ont_kernel ont_cuda_resize_kernels[1] = {
    {.name = "cuda_resize", .accept = resize_accept, .prepare = resize_prepare, .run = resize_run},
};
