/*
 * Domain ai.onnx.preview.training: Adagrad, Adam and Momentum by expansion, over any number of tensors; and Gradient,
 * which passes/infer.c replaces by the derivative that it asks for.
 */
#include <math.h>
#include <string.h>

#include "ops/op.h"

#define TRAINING "ai.onnx.preview.training"
#define U(op, x) ont_build1(b, op, (x))
#define B(op, x, y) ont_build2(b, op, (x), (y))
#define FAIL(code, ...) \
    do { \
        ont_build_fail(b, code, __VA_ARGS__); \
        return; \
    } while (0)

/* Inputs that the three have in common: rate R, step count T, then tensors, their gradients, and one or two kinds of
 * state. */
typedef struct optimiser {
    ont_builder *b;
    ont_node *node;
    uint32_t n;        /* number of tensors */
    ont_value *rate, *step;
    ont_dtype dtype;
} optimiser;

static bool begin(ont_builder *b, ont_node *node, uint32_t kinds, optimiser *o)
{
    *o = (optimiser){.b = b, .node = node, .n = (node->n_inputs - 2) / kinds, .rate = ont_node_in(node, 0),
                       .step = ont_node_in(node, 1)};
    bool whole = o->n && (node->n_inputs - 2) % kinds == 0;
    for (uint32_t i = 0; i < node->n_inputs && whole; i++) whole = ont_node_in(node, i) != NULL;
    for (uint32_t i = 0; i < o->n && whole; i++)
        for (uint32_t k = 1; k < kinds && whole; k++)
            whole = ont_shape_equal(&ont_node_in(node, 2 + i)->shape, &ont_node_in(node, 2 + k * o->n + i)->shape);
    if (!whole) ont_build_fail(b, ONT_EINVAL, "inputs must be R, T and %u lists of tensors of the same shapes", kinds);
    if (b->status != ONT_OK) return false;
    o->dtype = ont_node_in(node, 2)->dtype;
    o->rate = ont_build_cast(b, o->rate, o->dtype);
    o->step = ont_build_cast(b, o->step, o->dtype);
    return b->status == ONT_OK;
}

static ont_value *number(const optimiser *o, double value)
{
    return ont_build_scalar(o->b, o->dtype, value);
}

/* Tensor i of kind k: 0 the tensors themselves, 1 their gradients, from 2 on their states. */
static ont_value *of_kind(const optimiser *o, uint32_t k, uint32_t i)
{
    return ont_node_in(o->node, 2 + k * o->n + i);
}

/* The gradient plus the gradient of the L2 penalty. */
static ont_value *regular(const optimiser *o, uint32_t i)
{
    ont_builder *b = o->b;
    return B("Add", B("Mul", number(o, ont_attr_float(o->node, "norm_coefficient", 0)), of_kind(o, 0, i)),
             of_kind(o, 1, i));
}

/* a x + c y */
static ont_value *blend(const optimiser *o, ont_value *a, ont_value *x, ont_value *c, ont_value *y)
{
    ont_builder *b = o->b;
    return B("Add", B("Mul", a, x), B("Mul", c, y));
}

/* Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods, JMLR 2011. */
static void adagrad_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    optimiser o;
    if (!begin(b, node, 3, &o)) return;
    ont_value *decay = B("Add", number(&o, 1), B("Mul", o.step, number(&o, ont_attr_float(node, "decay_factor", 0))));
    ont_value *rate = B("Div", o.rate, decay), *eps = number(&o, ont_attr_float(node, "epsilon", 0));
    for (uint32_t i = 0; i < o.n; i++) {
        ont_value *grad = regular(&o, i), *sum = B("Add", of_kind(&o, 2, i), B("Mul", grad, grad));
        outputs[i] = B("Sub", of_kind(&o, 0, i), B("Div", B("Mul", rate, grad), B("Add", U("Sqrt", sum), eps)));
        outputs[o.n + i] = sum;
    }
}

/* Source: Kingma and Ba, Adam, ICLR 2015. The bias correction is applied to the rate, from step 1 on. */
static void adam_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    optimiser o;
    if (!begin(b, node, 4, &o)) return;
    ont_value *one = number(&o, 1), *alpha = number(&o, ont_attr_float(node, "alpha", 0.9)),
        *beta = number(&o, ont_attr_float(node, "beta", 0.999));
    ont_value *steps = ont_build3(b, "Where", B("Greater", o.step, number(&o, 0)), o.step, one);
    ont_value *correction = B("Div", U("Sqrt", B("Sub", one, B("Pow", beta, steps))),
                              B("Sub", one, B("Pow", alpha, steps)));
    ont_value *rate = ont_build3(b, "Where", B("Greater", o.step, number(&o, 0)), B("Mul", o.rate, correction), o.rate);
    ont_value *keep = number(&o, 1 - ont_attr_float(node, "norm_coefficient_post", 0)),
        *eps = number(&o, ont_attr_float(node, "epsilon", 0));
    for (uint32_t i = 0; i < o.n; i++) {
        ont_value *grad = regular(&o, i);
        ont_value *mean = blend(&o, alpha, of_kind(&o, 2, i), B("Sub", one, alpha), grad);
        ont_value *square = blend(&o, beta, of_kind(&o, 3, i), B("Sub", one, beta), B("Mul", grad, grad));
        ont_value *move = B("Div", B("Mul", rate, mean), B("Add", U("Sqrt", square), eps));
        outputs[i] = B("Mul", keep, B("Sub", of_kind(&o, 0, i), move));
        outputs[o.n + i] = mean;
        outputs[2 * o.n + i] = square;
    }
}

/* Source: Sutskever et al., On the importance of initialization and momentum, ICML 2013. */
static void momentum_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    optimiser o;
    const char *mode = ont_attr_string(node, "mode", "");
    bool nesterov = !strcmp(mode, "nesterov");
    if (!nesterov && strcmp(mode, "standard"))
        FAIL(ONT_EINVAL, "attribute mode is '%s', expected standard or nesterov", mode);
    if (!begin(b, node, 3, &o)) return;
    ont_value *alpha = number(&o, ont_attr_float(node, "alpha", 0)), *beta = number(&o,
            ont_attr_float(node, "beta", 0));
    ont_value *taken = ont_build3(b, "Where", B("Greater", o.step, number(&o, 0)), beta, number(&o, 1));
    for (uint32_t i = 0; i < o.n; i++) {
        ont_value *grad = regular(&o, i), *velocity = blend(&o, alpha, of_kind(&o, 2, i), taken, grad);
        ont_value *move = nesterov ? B("Add", grad, B("Mul", alpha, velocity)) : velocity;
        outputs[i] = B("Sub", of_kind(&o, 0, i), B("Mul", o.rate, move));
        outputs[o.n + i] = velocity;
    }
}

#define OPTIMISER(name_, least_, attributes_, expand_) \
    const ont_op ont_op_Training##name_ = {.domain = TRAINING, .name = #name_, .since = 1, .min_inputs = least_, \
                                           .max_inputs = 65536, .attributes = attributes_, .expand = expand_}
OPTIMISER(Adagrad, 5, "decay_factor:f epsilon:f norm_coefficient:f", adagrad_expand);
OPTIMISER(Adam, 6, "alpha:f beta:f epsilon:f norm_coefficient:f norm_coefficient_post:f", adam_expand);
OPTIMISER(Momentum, 5, "alpha:f beta:f mode:s norm_coefficient:f", momentum_expand);

const ont_op ont_op_Gradient = {.domain = TRAINING, .name = "Gradient", .since = 1, .min_inputs = 1,
                                .max_inputs = 65536,
                                .flags = ONT_OP_GRADIENT | ONT_OP_NO_GRAD, .attributes = "xs:S y:s zs:S"};
