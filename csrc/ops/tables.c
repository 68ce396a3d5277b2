/*
 * Operators that make a tensor from a few numbers: EyeLike, the windows, MelWeightMatrix. Their results are constants of
 * the program nearly always; one plain loop with the arithmetic of double serves every dtype.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "ops/op.h"

static const char *accept_any(const ont_node *node)
{
    (void)node;
    return NULL;
}

static ont_status number_type(const ont_node *node, const char *attr, ont_dtype otherwise, ont_dtype *dtype)
{
    int64_t given = ont_attr_int(node, attr, otherwise);
    bool known = given > 0 && given < ONT_DTYPE_COUNT;
    *dtype = known ? (ont_dtype)given : ONT_UNDEFINED;
    if (known && (ont_dtype_is_float(*dtype) || ont_dtype_is_int(*dtype) || *dtype == ONT_BOOL)) return ONT_OK;
    return ont_fail(ONT_EUNSUPPORTED, "attribute %s is %" PRId64 ", a number type is expected", attr, given);
}

/* ---- EyeLike ---- */

static ont_status eye_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ont_dtype dtype;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(number_type(node, "dtype", x->dtype, &dtype));
    if (x->shape.rank != 2) return ont_fail(ONT_EINVAL, "the input has rank %d, 2 is expected", x->shape.rank);
    return ont_infer_out(node, 0, dtype, &x->shape);
}

static ont_status eye_run(const ont_call *call)
{
    const ont_value *y = call->node->outputs[0];
    int64_t rows = y->shape.dims[0], cols = y->shape.dims[1], k = ont_attr_int(call->node, "k", 0);
    memset(call->out[0], 0, (size_t)(rows * cols) * ont_dtype_size(y->dtype));
    for (int64_t r = 0; r < rows; r++)
        if (r + k >= 0 && r + k < cols) ont_number_put(call->out[0], y->dtype, r * cols + r + k, 1);
    return ONT_OK;
}

static const ont_kernel eye_kernels[] = {{.name = "eye_like_ref", .accept = accept_any, .run = eye_run}};
const ont_op ont_op_EyeLike = {.domain = "", .name = "EyeLike", .since = 9, .min_inputs = 1, .max_inputs = 1,
                               .flags = ONT_OP_NO_GRAD, .attributes = "dtype:i k:i", .infer = eye_infer,
                               ONT_KERNELS(eye_kernels)};

/* ---- windows: a sum of cosines ---- */

static ont_status window_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    double size;
    ont_dtype dtype;
    ONT_TRY(ont_const_scalar(node, 0, &size));
    ONT_TRY(number_type(node, "output_datatype", ONT_FLOAT32, &dtype));
    if (!(size >= 0 && size < 0x1p40)) return ont_fail(ONT_EINVAL, "size is %g", size);
    ont_shape shape = {.rank = 1, .dims = {(int64_t)size}};
    return ont_infer_out(node, 0, dtype, &shape);
}

static ont_status window_run(const ont_call *call)
{
    const ont_value *y = call->node->outputs[0];
    const char *name = call->node->op->name;
    int64_t n = y->shape.dims[0], steps = ont_attr_int(call->node, "periodic", 1) ? n : n - 1;
    double a0 = 0.5, a1 = 0.5, a2 = 0;
    if (!strcmp(name, "HammingWindow")) a0 = 25.0 / 46, a1 = 21.0 / 46;
    if (!strcmp(name, "BlackmanWindow")) a0 = 0.42, a2 = 0.08;
    for (int64_t i = 0; i < n; i++) {
        double turn = steps ? 6.28318530717958647692 * (double)i / (double)steps : 0;
        double value = steps ? a0 - a1 * cos(turn) + a2 * cos(2 * turn) : 1; /* a window of one sample is 1 */
        ont_number_put(call->out[0], y->dtype, i, value);
    }
    return ONT_OK;
}

static const ont_kernel window_kernels[] = {{.name = "window_ref", .accept = accept_any, .run = window_run}};
#define WINDOW(name_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 17, .min_inputs = 1, .max_inputs = 1, \
                                   .flags = ONT_OP_NO_GRAD, .attributes = "output_datatype:i periodic:i", \
                                   .infer = window_infer, ONT_KERNELS(window_kernels)}
WINDOW(HannWindow);
WINDOW(HammingWindow);
WINDOW(BlackmanWindow);

/* ---- MelWeightMatrix: triangles over the bins of a spectrum, their edges evenly spaced on the mel scale ---- */

typedef struct mel {
    int64_t bands, bins, dft, rate;
    double low, high;
} mel;

static ont_status mel_config(const ont_node *node, mel *m)
{
    double given[5];
    for (uint32_t i = 0; i < 5; i++) ONT_TRY(ont_const_scalar(node, i, &given[i]));
    if (!(given[0] >= 0 && given[0] < 0x1p31 && given[1] >= 0 && given[1] < 0x1p31 && given[2] >= 1 && given[2] < 0x1p31))
        return ont_fail(ONT_EINVAL, "num_mel_bins %g, dft_length %g, sample_rate %g", given[0], given[1], given[2]);
    if (!(given[3] >= 0 && given[4] >= given[3]))
        return ont_fail(ONT_EINVAL, "edges %g and %g hertz", given[3], given[4]);
    *m = (mel){(int64_t)given[0], (int64_t)given[1] / 2 + 1, (int64_t)given[1], (int64_t)given[2], given[3], given[4]};
    return ONT_OK;
}

/* Bin of edge i of bands + 2. */
static int64_t mel_edge(const mel *m, int64_t i)
{
    double low = 2595 * log10(1 + m->low / 700), high = 2595 * log10(1 + m->high / 700);
    double at = low + (double)i * (high - low) / (double)(m->bands + 2);
    return (int64_t)floor((double)(m->dft + 1) * (700 * (pow(10, at / 2595) - 1)) / (double)m->rate);
}

static ont_status mel_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    mel m;
    ont_dtype dtype;
    ONT_TRY(mel_config(node, &m));
    ONT_TRY(number_type(node, "output_datatype", ONT_FLOAT32, &dtype));
    if (m.bands && mel_edge(&m, m.bands + 1) > m.bins)
        return ont_fail(ONT_EINVAL, "the upper edge %g lies above half the sample rate %" PRId64, m.high, m.rate);
    ont_shape shape = ont_shape_of(2, (int64_t[]){m.bins, m.bands});
    return ont_infer_out(node, 0, dtype, &shape);
}

static ont_status mel_run(const ont_call *call)
{
    const ont_value *y = call->node->outputs[0];
    mel m;
    ONT_TRY(mel_config(call->node, &m));
    memset(call->out[0], 0, (size_t)ont_shape_count(&y->shape) * ont_dtype_size(y->dtype));
    for (int64_t b = 0; b < m.bands; b++) {
        int64_t left = mel_edge(&m, b), centre = mel_edge(&m, b + 1), right = mel_edge(&m, b + 2);
        for (int64_t j = left; j < right || j == centre; j++) {
            double rise = centre == left ? 1 : (double)(j - left) / (double)(centre - left);
            double fall = right == centre ? 1 : (double)(right - j) / (double)(right - centre);
            if (j < m.bins) ont_number_put(call->out[0], y->dtype, j * m.bands + b, j < centre ? rise : fall);
        }
    }
    return ONT_OK;
}

static const ont_kernel mel_kernels[] = {{.name = "mel_weight_matrix_ref", .accept = accept_any, .run = mel_run}};
const ont_op ont_op_MelWeightMatrix = {.domain = "", .name = "MelWeightMatrix", .since = 17, .min_inputs = 5,
                                       .max_inputs = 5, .flags = ONT_OP_NO_GRAD, .attributes = "output_datatype:i",
                                       .infer = mel_infer, ONT_KERNELS(mel_kernels)};
