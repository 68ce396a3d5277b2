/*
 * Operators that make a tensor from a few numbers: EyeLike and the windows. Their results are nearly always constants
 * of the program; one plain loop in double serves every dtype.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "ops/op.h"

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

static const ont_kernel eye_kernels[] = {{.name = "eye_like_ref", .accept = ont_accept_any, .run = eye_run}};
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
    if (!(size >= 0 && size < 0x1p40)) return ont_fail(ONT_EINVAL, "size is %g, expected 0 to 2^40", size);
    ont_shape shape = {.rank = 1, .dims = {(int64_t)size}};
    return ont_infer_out(node, 0, dtype, &shape);
}

static ont_status window_run(const ont_call *call)
{
    const ont_value *y = call->node->outputs[0];
    int64_t n = y->shape.dims[0], steps = ont_attr_int(call->node, "periodic", 1) ? n : n - 1;
    double a0 = 0.5, a1 = 0.5, a2 = 0;
    if (ONT_IS(call->node, HammingWindow)) a0 = 25.0 / 46, a1 = 21.0 / 46;
    if (ONT_IS(call->node, BlackmanWindow)) a0 = 0.42, a2 = 0.08;
    for (int64_t i = 0; i < n; i++) {
        double turn = steps ? 6.28318530717958647692 * (double)i / (double)steps : 0;
        double value = steps ? a0 - a1 * cos(turn) + a2 * cos(2 * turn) : 1; /* a window of one sample is 1 */
        ont_number_put(call->out[0], y->dtype, i, value);
    }
    return ONT_OK;
}

static const ont_kernel window_kernels[] = {{.name = "window_ref", .accept = ont_accept_any, .run = window_run}};
#define WINDOW(name_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 17, .min_inputs = 1, .max_inputs = 1, \
                                   .flags = ONT_OP_NO_GRAD, .attributes = "output_datatype:i periodic:i", \
                                   .infer = window_infer, ONT_KERNELS(window_kernels)}
WINDOW(HannWindow);
WINDOW(HammingWindow);
WINDOW(BlackmanWindow);
