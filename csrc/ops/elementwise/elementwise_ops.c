/*
 * Descriptors and gradients of unary and binary operators; Pow, Min and Max are in elementwise_rows.c.
 */
#include <string.h>

#include "ops/elementwise/elementwise.h"

/* Descriptors with the shared kernels; _WITH takes a list of attributes. */
#define UNARY(domain_, name_, since_, grad_) UNARY_WITH(domain_, name_, since_, grad_, "")
#define UNARY_WITH(domain_, name_, since_, grad_, attributes_) \
    const ont_op ont_op_##name_ = {.domain = domain_, .name = #name_, .since = since_, .min_inputs = 1, \
                                   .max_inputs = 1, \
                                   .attributes = attributes_, .infer = ont_infer_same, .grad = grad_, \
                                   .tile = ont_unary_tile, .loop = ONT_LOOP_##name_, \
                                   .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_unary_kernels)}
/* In our domain; models may use them. */
#define UNARY_OURS(name_, grad_) \
    const ont_op ont_op_##name_ = {.domain = ONT_DOMAIN, .name = #name_, .since = 1, .min_inputs = 1, .max_inputs = 1, \
                                   .flags = ONT_OP_PUBLIC, .attributes = "", .infer = ont_infer_same, .grad = grad_, \
                                   .tile = ont_unary_tile, .loop = ONT_LOOP_##name_, \
                                   .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_unary_kernels)}
#define UNARY_FLAT(name_, since_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = since_, .min_inputs = 1, .max_inputs = 1, \
                                   .flags = ONT_OP_NO_GRAD | ONT_OP_ZERO_DERIVATIVE, .attributes = "", \
                                   .infer = ont_infer_same, .tile = ont_unary_tile, .loop = ONT_LOOP_##name_, \
                                   .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_unary_kernels)}
#define BINARY(domain_, name_, since_, grad_) BINARY_WITH(domain_, name_, since_, grad_, "")
#define BINARY_WITH(domain_, name_, since_, grad_, attributes_) \
    const ont_op ont_op_##name_ = {.domain = domain_, .name = #name_, .since = since_, .min_inputs = 2, \
                                   .max_inputs = 2, \
                                   .attributes = attributes_, .infer = ont_infer_broadcast, .grad = grad_, \
                                   .tile = ont_binary_tile, .loop = ONT_LOOP_##name_, \
                                   .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_binary_kernels)}
#define COMPARE(name_, since_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = since_, .min_inputs = 2, .max_inputs = 2, \
                                   .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = ont_infer_compare, \
                                   .tile = ont_binary_tile, .loop = ONT_LOOP_##name_, \
                                   .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_binary_kernels)}

#define U(op, x) ont_build1(&g->b, op, (x))
#define B(op, x, y) ont_build2(&g->b, op, (x), (y))
#define SCALAR(value) ont_build_scalar(&g->b, I(0)->dtype, (value))

/* A gradient operator of our domain that takes the forward node's attributes. */
static ont_value *with_attributes(ont_grad *g, const char *op_type, ont_value *x, ont_value *dy)
{
    ont_node *node = ont_build_node(&g->b, ONT_DOMAIN, op_type, (ont_value *[]){x, dy}, 2, 1);
    if (node) g->b.status = ont_attr_copy_all(g->b.graph, node, g->node);
    return ont_build_done(&g->b, node);
}

/* ---- unary gradients; y = O(0), dy = GO(0) ---- */

static void neg_grad(ont_grad *g) { GI(0, U("Neg", GO(0))); }
static void abs_grad(ont_grad *g) { GI(0, B("ours:AbsGrad", I(0), GO(0))); }
static void sqrt_grad(ont_grad *g) { GI(0, B("Div", B("Mul", GO(0), SCALAR(0.5)), O(0))); }
static void reciprocal_grad(ont_grad *g) { GI(0, U("Neg", B("Mul", GO(0), B("Mul", O(0), O(0))))); }
static void exp_grad(ont_grad *g) { GI(0, B("Mul", GO(0), O(0))); }
static void log_grad(ont_grad *g) { GI(0, B("Div", GO(0), I(0))); }
static void log1p_grad(ont_grad *g) { GI(0, B("Div", GO(0), B("Add", I(0), SCALAR(1)))); }
static void expm1_grad(ont_grad *g) { GI(0, B("Mul", GO(0), B("Add", O(0), SCALAR(1)))); }
static void lgamma_grad(ont_grad *g) { GI(0, B("Mul", GO(0), U("ours:Digamma", I(0)))); }
static void digamma_grad(ont_grad *g) { GI(0, B("Mul", GO(0), U("ours:Trigamma", I(0)))); }
static void logit_grad(ont_grad *g) { GI(0, B("ours:LogitGrad", I(0), GO(0))); }
static void erf_grad(ont_grad *g) { GI(0, B("ours:ErfGrad", I(0), GO(0))); }
static void erfc_grad(ont_grad *g) { GI(0, U("Neg", B("ours:ErfGrad", I(0), GO(0)))); }
static void tanh_grad(ont_grad *g) { GI(0, B("ours:TanhGrad", O(0), GO(0))); }
static void sigmoid_grad(ont_grad *g) { GI(0, B("ours:SigmoidGrad", O(0), GO(0))); }
static void relu_grad(ont_grad *g) { GI(0, B("ours:ReluGrad", O(0), GO(0))); }
static void leaky_relu_grad(ont_grad *g) { GI(0, with_attributes(g, "LeakyReluGrad", I(0), GO(0))); }
static void elu_grad(ont_grad *g) { GI(0, with_attributes(g, "EluGrad", I(0), GO(0))); }
static void selu_grad(ont_grad *g) { GI(0, with_attributes(g, "SeluGrad", I(0), GO(0))); }
static void hard_sigmoid_grad(ont_grad *g) { GI(0, with_attributes(g, "HardSigmoidGrad", I(0), GO(0))); }
static void gelu_grad(ont_grad *g) { GI(0, with_attributes(g, "GeluGrad", I(0), GO(0))); }
static void softplus_grad(ont_grad *g) { GI(0, B("ours:SoftplusGrad", I(0), GO(0))); }
static void hard_swish_grad(ont_grad *g) { GI(0, B("ours:HardSwishGrad", I(0), GO(0))); }
static void sin_grad(ont_grad *g) { GI(0, B("Mul", GO(0), U("Cos", I(0)))); }
static void cos_grad(ont_grad *g) { GI(0, U("Neg", B("Mul", GO(0), U("Sin", I(0))))); }
static void tan_grad(ont_grad *g) { GI(0, B("Mul", GO(0), B("Add", SCALAR(1), B("Mul", O(0), O(0))))); }
static void sinh_grad(ont_grad *g) { GI(0, B("Mul", GO(0), U("Cosh", I(0)))); }
static void cosh_grad(ont_grad *g) { GI(0, B("Mul", GO(0), U("Sinh", I(0)))); }

/* 1 - x^2, 1 + x^2 and x^2 - 1 */
#define SQUARE B("Mul", I(0), I(0))
static void atan_grad(ont_grad *g) { GI(0, B("Div", GO(0), B("Add", SCALAR(1), SQUARE))); }
static void asin_grad(ont_grad *g) { GI(0, B("Div", GO(0), U("Sqrt", B("Sub", SCALAR(1), SQUARE)))); }
static void acos_grad(ont_grad *g) { GI(0, U("Neg", B("Div", GO(0), U("Sqrt", B("Sub", SCALAR(1), SQUARE))))); }
static void asinh_grad(ont_grad *g) { GI(0, B("Div", GO(0), U("Sqrt", B("Add", SQUARE, SCALAR(1))))); }
static void acosh_grad(ont_grad *g) { GI(0, B("Div", GO(0), U("Sqrt", B("Sub", SQUARE, SCALAR(1))))); }
static void atanh_grad(ont_grad *g) { GI(0, B("Div", GO(0), B("Sub", SCALAR(1), SQUARE))); }

/* half the root of pi, times exp(y^2) */
static void erfinv_grad(ont_grad *g)
{
    ont_value *slope = U("Exp", B("Mul", O(0), O(0)));
    GI(0, B("Mul", GO(0), B("Mul", SCALAR(0.88622692545275801365), slope)));
}

/* d/dx x / (1 + |x|) = 1 / (1 + |x|)^2 */
static void softsign_grad(ont_grad *g)
{
    ont_value *d = B("Add", SCALAR(1), U("Abs", I(0)));
    GI(0, B("Div", GO(0), B("Mul", d, d)));
}

/* y = x t, t = tanh(softplus x): dy/dx = t + x (1 - t^2) sigmoid(x) */
static void mish_grad(ont_grad *g)
{
    ont_value *t = U("Tanh", U("Softplus", I(0)));
    ont_value *slope = B("Mul", B("Mul", I(0), U("Sigmoid", I(0))), B("Sub", SCALAR(1), B("Mul", t, t)));
    GI(0, B("Mul", GO(0), B("Add", t, slope)));
}

UNARY("", Neg, 6, neg_grad);
UNARY("", Abs, 6, abs_grad);
UNARY("", Sqrt, 6, sqrt_grad);
UNARY("", Reciprocal, 6, reciprocal_grad);
UNARY("", Exp, 6, exp_grad);
UNARY("", Log, 6, log_grad);
UNARY("", Erf, 9, erf_grad);
UNARY("", Tanh, 6, tanh_grad);
UNARY("", Sigmoid, 6, sigmoid_grad);
UNARY("", Relu, 6, relu_grad);
UNARY_OURS(Log1p, log1p_grad);
UNARY_OURS(Expm1, expm1_grad);
UNARY_OURS(Lgamma, lgamma_grad);
UNARY_OURS(Digamma, digamma_grad);
UNARY_OURS(Trigamma, NULL);
UNARY_OURS(Erfc, erfc_grad);
UNARY_OURS(Erfinv, erfinv_grad);
UNARY_OURS(Logit, logit_grad);
UNARY_WITH("", LeakyRelu, 6, leaky_relu_grad, "alpha:f");
UNARY_WITH("", Elu, 6, elu_grad, "alpha:f");
UNARY_WITH("", Selu, 6, selu_grad, "alpha:f gamma:f");
UNARY_WITH("", HardSigmoid, 6, hard_sigmoid_grad, "alpha:f beta:f");
UNARY("", HardSwish, 14, hard_swish_grad);

static ont_status gelu_infer(ont_graph *g, ont_node *node)
{
    const char *form = ont_attr_string(node, "approximate", "none");
    if (strcmp(form, "none") && strcmp(form, "tanh"))
        return ont_fail(ONT_EUNSUPPORTED, "attribute approximate is '%s', expected none or tanh", form);
    return ont_infer_same(g, node);
}

const ont_op ont_op_Gelu = {.domain = "", .name = "Gelu", .since = 20, .min_inputs = 1, .max_inputs = 1,
                            .attributes = "approximate:s", .infer = gelu_infer, .grad = gelu_grad,
                            .tile = ont_unary_tile, .loop = ONT_LOOP_GeluErf,
                            .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_unary_kernels)};
UNARY("", Softplus, 1, softplus_grad);
UNARY("", Softsign, 1, softsign_grad);
UNARY("", Mish, 18, mish_grad);
UNARY("", Sin, 7, sin_grad);
UNARY("", Cos, 7, cos_grad);
UNARY("", Tan, 7, tan_grad);
UNARY("", Asin, 7, asin_grad);
UNARY("", Acos, 7, acos_grad);
UNARY("", Atan, 7, atan_grad);
UNARY("", Sinh, 9, sinh_grad);
UNARY("", Cosh, 9, cosh_grad);
UNARY("", Asinh, 9, asinh_grad);
UNARY("", Acosh, 9, acosh_grad);
UNARY("", Atanh, 9, atanh_grad);
UNARY_FLAT(Sign, 9);
UNARY_FLAT(Floor, 6);
UNARY_FLAT(Ceil, 6);
UNARY_FLAT(Round, 11);

/* ---- binary gradients; the caller sums them over broadcast dims ---- */

static void add_grad(ont_grad *g)
{
    GI(0, GO(0));
    GI(1, GO(0));
}

static void sub_grad(ont_grad *g)
{
    GI(0, GO(0));
    if (WANTS(1)) GI(1, U("Neg", GO(0)));
}

static void mul_grad(ont_grad *g)
{
    if (WANTS(0)) GI(0, B("Mul", GO(0), I(1)));
    if (WANTS(1)) GI(1, B("Mul", GO(0), I(0)));
}

static void div_grad(ont_grad *g)
{
    if (WANTS(0)) GI(0, B("Div", GO(0), I(1)));
    if (WANTS(1)) GI(1, U("Neg", B("Div", B("Mul", GO(0), O(0)), I(1))));
}

/* atan2(y, x): (x, -y) dy / (x^2 + y^2); 0 where the denominator is 0, as in torch */
static void atan2_grad(ont_grad *g)
{
    ont_value *square = B("Add", B("Mul", I(0), I(0)), B("Mul", I(1), I(1))), *zero = SCALAR(0);
    ont_value *inverse = ont_build3(&g->b, "Where", B("Equal", square, zero), zero, U("Reciprocal", square));
    if (WANTS(0)) GI(0, B("Mul", GO(0), B("Mul", I(1), inverse)));
    if (WANTS(1)) GI(1, B("Mul", GO(0), B("Mul", U("Neg", I(0)), inverse)));
}

BINARY("", Add, 7, add_grad);
BINARY("", Sub, 7, sub_grad);
BINARY("", Mul, 7, mul_grad);
BINARY("", Div, 7, div_grad);
const ont_op ont_op_Atan2 = {.domain = ONT_DOMAIN, .name = "Atan2", .since = 1, .min_inputs = 2, .max_inputs = 2,
                             .flags = ONT_OP_PUBLIC, .attributes = "", .infer = ont_infer_broadcast, .grad = atan2_grad,
                             .tile = ont_binary_tile, .loop = ONT_LOOP_Atan2,
                             .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_binary_kernels)};
COMPARE(Equal, 7);
COMPARE(Greater, 7);
COMPARE(Less, 7);
COMPARE(GreaterOrEqual, 12);
COMPARE(LessOrEqual, 12);

/* ---- gradient operators: (x or y, dy) -> dx; without a gradient of their own ---- */

BINARY(ONT_DOMAIN, AbsGrad, 1, NULL);
BINARY(ONT_DOMAIN, LogitGrad, 1, NULL);
BINARY(ONT_DOMAIN, ErfGrad, 1, NULL);
BINARY(ONT_DOMAIN, TanhGrad, 1, NULL);
BINARY(ONT_DOMAIN, SigmoidGrad, 1, NULL);
BINARY(ONT_DOMAIN, ReluGrad, 1, NULL);
BINARY_WITH(ONT_DOMAIN, LeakyReluGrad, 1, NULL, "alpha:f");
BINARY_WITH(ONT_DOMAIN, EluGrad, 1, NULL, "alpha:f");
BINARY_WITH(ONT_DOMAIN, SeluGrad, 1, NULL, "alpha:f gamma:f");
BINARY_WITH(ONT_DOMAIN, HardSigmoidGrad, 1, NULL, "alpha:f beta:f");
BINARY(ONT_DOMAIN, HardSwishGrad, 1, NULL);
const ont_op ont_op_GeluGrad = {.domain = ONT_DOMAIN, .name = "GeluGrad", .since = 1, .min_inputs = 2, .max_inputs = 2,
                                .attributes = "approximate:s", .infer = ont_infer_broadcast, .tile = ont_binary_tile,
                                .loop = ONT_LOOP_GeluErfGrad,
                                .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(ont_binary_kernels)};
BINARY(ONT_DOMAIN, SoftplusGrad, 1, NULL);
