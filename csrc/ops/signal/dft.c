/*
 * DFT, STFT and MelWeightMatrix. A transform is a MatMul with a constant matrix over real and imaginary parts together,
 * so its gradient is a MatMul with the transpose.
 */
#include <inttypes.h>
#include <math.h>

#include "ops/support/compose.h"

enum { MAX_ENTRIES = 1 << 24, MAX_SAMPLES = 1 << 28 }; /* elements of a transform's matrix; samples of all frames */

typedef struct transform {
    int64_t given;      /* samples of the signal that are used, at most `length` */
    int64_t length;     /* N of the transform */
    int64_t bins;       /* frequencies in the result */
    int parts, results; /* of input and result: 1: real, 2: real and imaginary */
    bool inverse, onesided;
} transform;

/* ---- the matrix ---- */

/* The element of the matrix for input sample n, part p, and frequency k, part r: exp(-+ 2 pi i k n / N) in real
 * form. */
static double entry(const transform *t, int64_t n, int p, int64_t k, int r)
{
    /* k n mod N: an exact angle */
    double angle = 2 * M_PI * (double)(k * n % t->length) / (double)t->length, c = cos(angle), s = sin(angle);
    double scale = t->inverse ? 1 / (double)t->length : 1;
    if (t->inverse && t->onesided) /* the bins that are left out are the conjugates of these */
        return scale * (n == 0 || 2 * n == t->length ? 1 : 2) * (p ? -s : c);
    if (!t->inverse) s = -s;
    if (p == 0) return scale * (r ? s : c);
    return scale * (r ? c : -s);
}

/* Checked before allocation: lengths are numbers of the model, of any size. */
static ont_status check_matrix(const transform *t)
{
    int64_t most = MAX_ENTRIES / (t->parts * t->results);
    if (t->bins <= most && t->given <= most / (t->bins + (t->bins == 0))) return ONT_OK;
    return ont_fail(ONT_EUNSUPPORTED,
                    "a transform of %" PRId64 " x %d to %" PRId64 " x %d numbers: its matrix has more than %d entries",
                    t->given, t->parts, t->bins, t->results, MAX_ENTRIES);
}

/* x (..., given, parts) -> (..., bins, results) */
static ont_value *apply(ont_builder *b, const transform *t, ont_value *x)
{
    if (b->status != ONT_OK || !x) return NULL;
    int64_t rows = t->given * t->parts, columns = t->bins * t->results;
    double *m = ont_arena_array(&b->graph->arena, (size_t)(rows * columns) + 1, sizeof *m);
    if (!m) {
        ont_build_fail(b, ONT_ENOMEM, "out of memory");
        return NULL;
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            m[i * columns + j] = entry(t, i / t->parts, (int)(i % t->parts), j / t->results, (int)(j % t->results));
    ont_value *matrix = ont_build_numbers(b, x->dtype, &(ont_shape){.rank = 2, .dims = {rows, columns}}, m);
    ont_shape shape = x->shape, flat = {.rank = 2};
    flat.dims[0] = ont_shape_count_range(&shape, 0, shape.rank - 2);
    flat.dims[1] = rows;
    shape.dims[shape.rank - 2] = t->bins;
    shape.dims[shape.rank - 1] = t->results;
    ont_value *y = ont_build_matmul(b, ont_build_reshape(b, x, &flat), false, matrix, false, 1);
    return y ? ont_build_reshape(b, y, &shape) : NULL;
}

static ont_status check_signal(const ont_value *x)
{
    if (!ont_dtype_is_float(x->dtype)) return ont_fail(ONT_ETYPE, "the signal is %s", ont_dtype_name(x->dtype));
    if (x->shape.rank < 2)
        return ont_fail(ONT_EINVAL, "the signal has rank %d, at least 2 are expected", x->shape.rank);
    int64_t parts = x->shape.dims[x->shape.rank - 1];
    return parts == 1 || parts == 2 ? ONT_OK
                                    : ont_fail(ONT_EINVAL, "the last dim is %" PRId64 ", 1 or 2 is expected", parts);
}

/* Reads a whole number from a constant input; `otherwise` where it is absent. */
static ont_status whole(const ont_node *node, uint32_t index, int64_t otherwise, int64_t *value)
{
    int count;
    *value = otherwise;
    if (!ont_node_in(node, index)) return ONT_OK;
    ONT_TRY(ont_const_ints(node, (int)index, NULL, value, 1, &count));
    return count == 1 ? ONT_OK : ont_fail(ONT_EINVAL, "input %u has %d entries, one is expected", index, count);
}

/* ---- DFT ---- */

static ont_status read_dft(const ont_node *node, transform *t, int *axis)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(check_signal(x));
    int64_t given_axis;
    ONT_TRY(whole(node, 2, ont_attr_int(node, "axis", node->version < 20 ? 1 : -2), &given_axis));
    ONT_TRY(ont_shape_axis(given_axis, x->shape.rank, axis));
    if (*axis == x->shape.rank - 1) return ont_fail(ONT_EINVAL, "axis is the last dim, which holds the parts");
    int64_t dim = x->shape.dims[*axis];
    t->inverse = ont_attr_int(node, "inverse", 0) != 0;
    t->onesided = ont_attr_int(node, "onesided", 0) != 0;
    t->parts = (int)x->shape.dims[x->shape.rank - 1];
    bool real = t->inverse && t->onesided;
    ONT_TRY(whole(node, 1, real ? 2 * (dim - 1) : dim, &t->length));
    if (t->length < 1) return ont_fail(ONT_EINVAL, "dft_length is %" PRId64 ", at least 1 is expected", t->length);
    if (real && t->parts != 2) return ont_fail(ONT_EINVAL, "the inverse of a one-sided transform takes complex input");
    int64_t most = real ? t->length / 2 + 1 : t->length;
    t->given = dim < most ? dim : most;
    t->bins = t->onesided && !t->inverse ? t->length / 2 + 1 : t->length;
    t->results = real ? 1 : 2;
    return check_matrix(t);
}

static ont_status dft_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    transform t;
    int axis;
    ONT_TRY(read_dft(node, &t, &axis));
    ont_shape shape = ont_node_in(node, 0)->shape;
    shape.dims[axis] = t.bins;
    shape.dims[shape.rank - 1] = t.results;
    return ont_infer_out(node, 0, ont_node_in(node, 0)->dtype, &shape);
}

/* Swaps two dims. */
static ont_value *swap(ont_builder *b, ont_value *x, int i, int j)
{
    int64_t perm[ONT_MAX_RANK];
    if (i == j || !x) return x;
    for (int k = 0; k < ONT_MAX_RANK; k++) perm[k] = k;
    perm[i] = j;
    perm[j] = i;
    return ont_build_transpose(b, x, perm);
}

static void dft_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    transform t;
    int axis;
    b->status = read_dft(node, &t, &axis);
    if (b->status != ONT_OK) return;
    ont_value *x = ont_node_in(node, 0);
    int last = x->shape.rank - 2;
    x = swap(b, ont_build_slice(b, x, axis, 0, t.given, 1), axis, last);
    outputs[0] = swap(b, apply(b, &t, x), axis, last);
}

const ont_op ont_op_DFT = {.domain = "", .name = "DFT", .since = 17, .min_inputs = 1, .max_inputs = 3,
                           .nondiff_inputs = 6, .attributes = "axis:i inverse:i onesided:i", .infer = dft_infer,
                           .expand = dft_expand};

/* ---- STFT ---- */

static ont_status read_stft(const ont_node *node, transform *t, int64_t *step, int64_t *frames)
{
    ont_value *x;
    const ont_value *window = ont_node_in(node, 2);
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(check_signal(x));
    if (x->shape.rank != 3) return ont_fail(ONT_EINVAL, "the signal has rank %d, 3 is expected", x->shape.rank);
    if (window && (window->shape.rank != 1 || window->dtype != x->dtype))
        return ont_fail(ONT_EINVAL, "the window must be a vector of %s", ont_dtype_name(x->dtype));
    int64_t size = x->shape.dims[1];
    ONT_TRY(whole(node, 1, 0, step));
    ONT_TRY(whole(node, 3, window ? window->shape.dims[0] : size, &t->length));
    if (*step < 1 || t->length < 1 || t->length > size)
        return ont_fail(ONT_EINVAL,
                        "frames of %" PRId64 " samples, one every %" PRId64 ", are not possible in %" PRId64 " samples",
                        t->length, *step, size);
    if (window && window->shape.dims[0] != t->length)
        return ont_fail(ONT_EINVAL, "the window has %" PRId64 " entries, but a frame has %" PRId64,
                        window->shape.dims[0], t->length);
    *frames = (size - t->length) / *step + 1;
    t->inverse = false;
    t->onesided = ont_attr_int(node, "onesided", 1) != 0;
    t->parts = (int)x->shape.dims[2];
    if (t->onesided && t->parts == 2) return ont_fail(ONT_EINVAL, "a complex signal has no one-sided transform");
    t->given = t->length;
    t->bins = t->onesided ? t->length / 2 + 1 : t->length;
    t->results = 2;
    ONT_TRY(check_matrix(t));
    if (*frames <= MAX_SAMPLES / t->length) return ONT_OK;
    return ont_fail(ONT_EUNSUPPORTED,
                    "%" PRId64 " frames of %" PRId64 " samples have together more than %d, which is not supported",
                    *frames, t->length, MAX_SAMPLES);
}

static ont_status stft_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    transform t;
    int64_t step, frames;
    ONT_TRY(read_stft(node, &t, &step, &frames));
    const ont_value *x = ont_node_in(node, 0);
    ont_shape shape = ont_shape_of(4, (int64_t[]){x->shape.dims[0], frames, t.bins, 2});
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static void stft_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    transform t;
    int64_t step, frames;
    b->status = read_stft(node, &t, &step, &frames);
    if (b->status != ONT_OK) return;
    int64_t *at = ont_arena_array(&b->graph->arena, (size_t)(frames * t.length), sizeof *at);
    if (!at) {
        ont_build_fail(b, ONT_ENOMEM, "out of memory");
        return;
    }
    for (int64_t i = 0; i < frames * t.length; i++) at[i] = i / t.length * step + i % t.length;
    ont_value *index = ont_build_const_ints(b, at, (size_t)(frames * t.length)), *window = ont_node_in(node, 2);
    if (index) index = ont_build_reshape(b, index, &(ont_shape){.rank = 2, .dims = {frames, t.length}});
    ont_value *gather[] = {ont_node_in(node, 0), index};
    ont_node *taken = index ? ont_build_node(b, "", "Gather", gather, 2, 1) : NULL;
    if (taken) b->status = ont_attr_set_int(b->graph, taken, "axis", 1);
    ont_value *x = ont_build_done(b, taken); /* (B, frames, N, parts) */
    if (window && x)
        x = ont_build2(b, "Mul", x, ont_build_reshape(b, window, &(ont_shape){.rank = 2, .dims = {t.length, 1}}));
    outputs[0] = apply(b, &t, x);
}

const ont_op ont_op_STFT = {.domain = "", .name = "STFT", .since = 17, .min_inputs = 2, .max_inputs = 4,
                            .attributes = "onesided:i", .nondiff_inputs = 1 << 1 | 1 << 3, .infer = stft_infer,
                            .expand = stft_expand};

/* ---- MelWeightMatrix: triangles at equal distances on the mel scale, 2595 log10(1 + f / 700) ---- */

typedef struct mel {
    int64_t bins, length, rate;
    double low, high;
    ont_dtype dtype;
} mel;

static ont_status read_mel(const ont_node *node, mel *m)
{
    ONT_TRY(whole(node, 0, 0, &m->bins));
    ONT_TRY(whole(node, 1, 0, &m->length));
    ONT_TRY(whole(node, 2, 0, &m->rate));
    ONT_TRY(ont_const_scalar(node, 3, &m->low));
    ONT_TRY(ont_const_scalar(node, 4, &m->high));
    int64_t dtype = ont_attr_int(node, "output_datatype", ONT_FLOAT32);
    if (dtype <= 0 || dtype >= ONT_DTYPE_COUNT || !ont_dtype_size((ont_dtype)dtype))
        return ont_fail(ONT_EINVAL, "output_datatype is %" PRId64 ", which is not a supported dtype", dtype);
    m->dtype = (ont_dtype)dtype;
    if (m->bins < 1 || m->bins > 1 << 16 || m->length < 1 || m->length > 1 << 22 || m->rate < 1 || !(m->low >= 0) ||
        !(m->high > m->low) || m->bins * (m->length / 2 + 1) > MAX_ENTRIES)
        return ont_fail(ONT_EINVAL,
                        "no mel matrix has %" PRId64 " bins of %" PRId64 " samples at %" PRId64 " Hz from %g to %g",
                        m->bins, m->length, m->rate, m->low, m->high);
    return ONT_OK;
}

static ont_status mel_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    mel m;
    ONT_TRY(read_mel(node, &m));
    return ont_infer_out(node, 0, m.dtype, &(ont_shape){.rank = 2, .dims = {m.length / 2 + 1, m.bins}});
}

/* Frequency bin of edge i, of bins + 2 edges. */
static int64_t mel_edge(const mel *m, int64_t i)
{
    double low = 2595 * log1p(m->low / 700) / log(10), high = 2595 * log1p(m->high / 700) / log(10);
    double at = (double)i * ((high - low) / (double)(m->bins + 2)) + low, hertz = 700 * expm1(at / 2595 * log(10));
    double bin = floor((double)(m->length + 1) * hertz / (double)m->rate);
    int64_t bins = m->length / 2 + 1;
    return bin < (double)bins ? (int64_t)bin : bins;
}

static void mel_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    mel m;
    b->status = read_mel(node, &m);
    if (b->status != ONT_OK) return;
    int64_t rows = m.length / 2 + 1;
    double *w = ont_arena_array(&b->graph->arena, (size_t)(rows * m.bins), sizeof *w);
    if (!w) {
        ont_build_fail(b, ONT_ENOMEM, "out of memory");
        return;
    }
    for (int64_t i = 0; i < m.bins; i++) {
        int64_t left = mel_edge(&m, i), center = mel_edge(&m, i + 1), right = mel_edge(&m, i + 2);
        for (int64_t j = left; j <= center && j < rows; j++)
            w[j * m.bins + i] = center == left ? 1 : (double)(j - left) / (double)(center - left);
        for (int64_t j = center; j < right && j < rows; j++)
            w[j * m.bins + i] = (double)(right - j) / (double)(right - center);
    }
    outputs[0] = ont_build_numbers(b, m.dtype, &(ont_shape){.rank = 2, .dims = {rows, m.bins}}, w);
}

const ont_op ont_op_MelWeightMatrix = {.domain = "", .name = "MelWeightMatrix", .since = 17, .min_inputs = 5,
                                       .max_inputs = 5, .attributes = "output_datatype:i", .flags = ONT_OP_NO_GRAD,
                                       .infer = mel_infer, .expand = mel_expand};
