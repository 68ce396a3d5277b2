/*
 * Operators that make a tensor from a few numbers: EyeLike and the windows. Their results are nearly always constants
 * of the program; one plain loop in double serves every dtype. A device has no kernels for them: there they are
 * expanded, into constants where they are small.
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

/* The part of a matrix of ones that is on diagonal k. */
static void eye_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    const ont_value *y = node->outputs[0];
    ont_value *at = ont_build_scalar(b, ONT_INT64, (double)ont_attr_int(node, "k", 0));
    outputs[0] = ont_build_full(b, y->dtype, &y->shape, 1);
    for (int64_t upper = 0; upper < 2 && b->status == ONT_OK; upper++) {
        ont_node *half = ont_build_node(b, "", "Trilu", (ont_value *[]){outputs[0], at}, 2, 1);
        if (half) b->status = ont_attr_set_int(b->graph, half, "upper", upper);
        outputs[0] = ont_build_done(b, half);
    }
}

static const ont_kernel eye_kernels[] = {{.name = "eye_like_ref", .accept = ont_accept_any, .run = eye_run}};
const ont_op ont_op_EyeLike = {.domain = "", .name = "EyeLike", .since = 9, .min_inputs = 1, .max_inputs = 1,
                               .flags = ONT_OP_NO_GRAD, .attributes = "dtype:i k:i", .infer = eye_infer,
                               .expand = eye_expand, ONT_KERNELS(eye_kernels)};

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

/* A window is a0 - a1 cos(turn) + a2 cos(2 turn), with a turn of 2 pi in `steps` samples. One sample is 1. */
typedef struct window {
    int64_t n, steps;
    double a0, a1, a2;
} window;

static window window_of(const ont_node *node)
{
    int64_t n = node->outputs[0]->shape.dims[0];
    window w = {n, ont_attr_int(node, "periodic", 1) ? n : n - 1, 0.5, 0.5, 0};
    if (ONT_IS(node, HammingWindow)) w.a0 = 25.0 / 46, w.a1 = 21.0 / 46;
    if (ONT_IS(node, BlackmanWindow)) w.a0 = 0.42, w.a2 = 0.08;
    return w;
}

#define TWO_PI 6.28318530717958647692

static ont_status window_run(const ont_call *call)
{
    const window w = window_of(call->node);
    for (int64_t i = 0; i < w.n; i++) {
        double turn = w.steps ? TWO_PI * (double)i / (double)w.steps : 0;
        double value = w.steps ? w.a0 - w.a1 * cos(turn) + w.a2 * cos(2 * turn) : 1;
        ont_number_put(call->out[0], call->node->outputs[0]->dtype, i, value);
    }
    return ONT_OK;
}

static void window_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
#define NUMBER(v) ont_build_scalar(b, ONT_FLOAT64, (v))
#define B(op, x, y) ont_build2(b, op, (x), (y))
    const window w = window_of(node);
    const ont_value *y = node->outputs[0];
    if (w.steps <= 0) {
        outputs[0] = ont_build_full(b, y->dtype, &y->shape, 1);
        return;
    }
    ont_value *i = ont_build3(b, "Range", NUMBER(0), NUMBER((double)w.n), NUMBER(1));
    ont_value *turn = B("Div", B("Mul", i, NUMBER(TWO_PI)), NUMBER((double)w.steps));
    ont_value *once = B("Mul", ont_build1(b, "Cos", turn), NUMBER(w.a1));
    ont_value *twice = B("Mul", ont_build1(b, "Cos", B("Mul", turn, NUMBER(2))), NUMBER(w.a2));
    outputs[0] = ont_build_cast(b, B("Add", B("Sub", NUMBER(w.a0), once), twice), y->dtype);
#undef B
#undef NUMBER
}

static const ont_kernel window_kernels[] = {{.name = "window_ref", .accept = ont_accept_any, .run = window_run}};
#define WINDOW(name_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = 17, .min_inputs = 1, .max_inputs = 1, \
                                   .flags = ONT_OP_NO_GRAD, .attributes = "output_datatype:i periodic:i", \
                                   .infer = window_infer, .expand = window_expand, ONT_KERNELS(window_kernels)}
WINDOW(HannWindow);
WINDOW(HammingWindow);
WINDOW(BlackmanWindow);
