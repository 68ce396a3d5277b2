/*
 * ConvTranspose, normalised: pads, auto_pad, output_shape and output_padding become explicit padding and an
 * output_padding smaller than the stride. That form (ours:ConvTranspose) is the input gradient of a convolution, in
 * conv.c. Output cells that no window reaches are zeros, padded around its result before the bias is added.
 */
#include <inttypes.h>
#include <string.h>

#include "ops/support/compose.h"
#include "ops/support/window.h"

typedef struct sizes {
    int rank;
    int64_t out[ONT_WINDOW_RANK];
    int64_t pads[2 * ONT_WINDOW_RANK], extra[ONT_WINDOW_RANK];  /* of the normalised node */
    int64_t before[ONT_WINDOW_RANK], after[ONT_WINDOW_RANK];    /* zeros around its result */
} sizes;

static ont_status read_list(const ont_node *node, const char *name, int64_t otherwise, int64_t least, int n,
                            int64_t *out)
{
    int given;
    ONT_TRY(ont_const_ints(node, -1, name, out, n, &given));
    if (given >= 0 && given != n) return ont_fail(ONT_EINVAL, "%s has %d entries, expected %d", name, given, n);
    for (int i = 0; i < n; i++) {
        if (given < 0) out[i] = otherwise;
        if (out[i] < least || out[i] > INT32_MAX) return ont_fail(ONT_EINVAL, "%s[%d] is %" PRId64, name, i, out[i]);
    }
    return ONT_OK;
}

/* Sets how many cells of dim d are cut off the full result at the front and the back; negative: zeros are added. */
static void split_padding(sizes *s, int d, int64_t full, int64_t stride, int64_t front, int64_t behind)
{
    s->out[d] = full - front - behind;
    s->pads[d] = front > 0 ? front : 0;
    s->before[d] = front < 0 ? -front : 0;
    s->pads[s->rank + d] = behind > 0 ? behind : 0;
    bool small = behind < 0 && -behind < stride;
    s->extra[d] = small ? -behind : 0;
    s->after[d] = behind < 0 && !small ? -behind : 0;
}

static ont_status read_sizes(const ont_node *node, const ont_shape *x, const ont_shape *w, sizes *s)
{
    enum { N = ONT_WINDOW_RANK };
    int64_t strides[N], dilations[N], extra[N], pads[2 * N], wanted[N], given[N + 2];
    int n_given;
    const char *auto_pad = ont_attr_string(node, "auto_pad", "NOTSET");
    bool upper = !strcmp(auto_pad, "SAME_UPPER"), same = upper || !strcmp(auto_pad, "SAME_LOWER");
    bool valid = !strcmp(auto_pad, "VALID");
    if (!same && !valid && strcmp(auto_pad, "NOTSET"))
        return ont_fail(ONT_EINVAL, "auto_pad is '%s', expected NOTSET, VALID, SAME_UPPER or SAME_LOWER", auto_pad);
    *s = (sizes){.rank = x->rank - 2};
    if (s->rank < 1 || s->rank > N)
        return ont_fail(ONT_EUNSUPPORTED, "%d spatial dims, 1 to %d are supported", s->rank, N);
    if (w->rank != x->rank) return ont_fail(ONT_EINVAL, "weight has rank %d, input %d", w->rank, x->rank);
    ONT_TRY(read_list(node, "strides", 1, 1, s->rank, strides));
    ONT_TRY(read_list(node, "dilations", 1, 1, s->rank, dilations));
    ONT_TRY(read_list(node, "output_padding", 0, 0, s->rank, extra));
    ONT_TRY(read_list(node, "pads", 0, 0, 2 * s->rank, pads));
    ONT_TRY(ont_const_ints(node, -1, "output_shape", given, N + 2, &n_given));
    if (n_given == s->rank + 2)
        memmove(given, given + 2, (size_t)s->rank * sizeof *given); /* drop the batch and channel dims */
    if (n_given >= 0 && n_given != s->rank && n_given != s->rank + 2)
        return ont_fail(ONT_EINVAL, "output_shape has %d entries, expected %d", n_given, s->rank);
    for (int d = 0; d < s->rank; d++) {
        int64_t in = x->dims[d + 2], kernel = w->dims[d + 2];
        if (in < 1 || in > INT32_MAX || kernel < 1 || kernel > INT32_MAX)
            return ont_fail(ONT_EUNSUPPORTED, "spatial dim %d has %" PRId64 " cells, the kernel %" PRId64, d, in,
                            kernel);
        int64_t full = (in - 1) * strides[d] + (kernel - 1) * dilations[d] + 1;
        int64_t padded = valid ? 0 : pads[d] + pads[s->rank + d];
        wanted[d] = n_given >= 0 ? given[d] : same ? in * strides[d] : full + extra[d] - padded;
        if (wanted[d] < 1)
            return ont_fail(ONT_EINVAL, "the result has %" PRId64 " cells in spatial dim %d", wanted[d], d);
        if (n_given < 0 && !same) {
            int64_t front = valid ? 0 : pads[d];
            split_padding(s, d, full, strides[d], front, full - front - wanted[d]);
            continue;
        }
        /* The padding follows from the size; its odd cell is at the front unless SAME_UPPER. A size beyond the full
         * result is padded with zeros. */
        int64_t total = full + extra[d] - wanted[d], half = total > 0 ? total / 2 : 0;
        int64_t front = upper || total <= 0 ? half : total - half;
        split_padding(s, d, full, strides[d], front, full - front - wanted[d]);
    }
    return ONT_OK;
}

static ont_status infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *w;
    sizes s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &w));
    ONT_TRY(read_sizes(node, &x->shape, &w->shape, &s));
    int64_t groups = ont_attr_int(node, "group", 1);
    if (groups < 1 || groups > INT32_MAX) return ont_fail(ONT_EINVAL, "group is %" PRId64, groups);
    const ont_value *bias = ont_node_in(node, 2);
    ont_shape shape = {.rank = x->shape.rank, .dims = {x->shape.dims[0], w->shape.dims[1] * groups}};
    if (bias && (bias->dtype != x->dtype || bias->shape.rank != 1 || bias->shape.dims[0] != shape.dims[1]))
        return ont_fail(ONT_EINVAL, "weight or bias does not fit the input: dtype or number of channels differs");
    for (int d = 0; d < s.rank; d++) shape.dims[d + 2] = s.out[d];
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_value *zeros_around(ont_builder *b, ont_value *y, const sizes *s)
{
    for (int d = 0; d < s->rank && y; d++) {
        ont_shape front = y->shape, behind = y->shape;
        front.dims[d + 2] = s->before[d];
        behind.dims[d + 2] = s->after[d];
        ont_value *pieces[3];
        uint32_t n = 0;
        if (s->before[d]) pieces[n++] = ont_build_full(b, y->dtype, &front, 0);
        pieces[n++] = y;
        if (s->after[d]) pieces[n++] = ont_build_full(b, y->dtype, &behind, 0);
        y = ont_build_concat(b, pieces, n, d + 2);
    }
    return y;
}

static void expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0), *w = ont_node_in(node, 1), *bias = ont_node_in(node, 2);
    sizes s;
    b->status = read_sizes(node, &x->shape, &w->shape, &s);
    if (b->status != ONT_OK) return;
    bool around = false;
    for (int d = 0; d < s.rank; d++) around |= s.before[d] || s.after[d];
    ont_node *plain = ont_build_node(b, ONT_DOMAIN, "ConvTranspose", (ont_value *[]){x, w, bias},
                                     bias && !around ? 3 : 2, 1);
    static const char *const kept[] = {"strides", "dilations", "kernel_shape"};
    for (size_t i = 0; i < sizeof kept / sizeof *kept && b->status == ONT_OK; i++) {
        size_t n;
        const int64_t *values = ont_attr_ints(node, kept[i], &n);
        if (values) b->status = ont_attr_set_ints(b->graph, plain, kept[i], values, n);
    }
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, plain, "group", ont_attr_int(node, "group", 1));
    if (b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, plain, "pads", s.pads, 2 * (size_t)s.rank);
    if (b->status == ONT_OK) b->status = ont_attr_set_ints(b->graph, plain, "output_padding", s.extra, (size_t)s.rank);
    ont_value *y = ont_build_done(b, plain);
    if (around) {
        y = zeros_around(b, y, &s);
        ont_shape one = {.rank = s.rank + 1, .dims = {bias ? bias->shape.dims[0] : 0, 1, 1, 1}};
        if (bias && b->status == ONT_OK) y = ont_build2(b, "Add", y, ont_build_reshape(b, bias, &one));
    }
    outputs[0] = y;
}

const ont_op ont_op_ConvTranspose = {.domain = "", .name = "ConvTranspose", .since = 1, .min_inputs = 2,
                                     .max_inputs = 3,
                                     .attributes = "auto_pad:s dilations:I group:i kernel_shape:I output_padding:I "
                                                   "output_shape:I pads:I strides:I",
                                     .infer = infer, .expand = expand};
