/*
 * Formulas of the update rules: from hyperparameters and a step count to the coefficients of the loops in
 * optim_rules.h. g is the gradient (negated to maximise, unscaled, clipped), p the parameter, t the step, counted
 * from 1. Everything that does not depend on the element is computed here, in double.
 */
#include <math.h>
#include <string.h>

#include "optim/optim.h"

/*
 * Adam: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; decoupled decay: Loshchilov and Hutter,
 * "Decoupled Weight Decay Regularization", ICLR 2019; AMSGrad: Reddi, Kale and Kumar, ICLR 2018.
 *     m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g g        c1 = 1 - b1^t, c2 = 1 - b2^t
 *     L2:            g += wd p at first; p -= lr sqrt(c2) / c1 * m / (sqrt(v) + eps)
 *     transformers:  p -= lr sqrt(c2) / c1 * m / (sqrt(v) + eps), then p -= lr wd p
 *     torch:         p -= lr wd p, then p -= lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)
 *     torch, L2:     g += wd p at first; then as torch
 * sqrt(v) / sqrt(c2) + eps is (sqrt(v) + eps sqrt(c2)) / sqrt(c2), so that one loop serves all.
 */
enum { LR, BETA1, BETA2, EPS, DECAY, ADAM_MODE, ADAM_CORRECT, ADAM_AMSGRAD };
enum { ADAM_L2, ADAM_TRANSFORMERS, ADAM_TORCH, ADAM_TORCH_L2 };

static uint32_t adam_needs(const double *h)
{
    return h[ADAM_AMSGRAD] != 0 ? 7 : 3;
}

static void moments(const double *h, ont_update *u)
{
    *u = (ont_update){.keep_before = 1, .keep_after = 1, .beta1 = h[BETA1], .beta2 = h[BETA2],
                      .one_minus_beta1 = 1 - h[BETA1], .one_minus_beta2 = 1 - h[BETA2]};
}

static void adam_fill(const double *h, double step, bool first, ont_update *u)
{
    (void)first;
    int mode = (int)h[ADAM_MODE];
    double c1 = h[ADAM_CORRECT] != 0 ? 1 - pow(h[BETA1], step) : 1;
    double root = h[ADAM_CORRECT] != 0 ? sqrt(1 - pow(h[BETA2], step)) : 1;
    moments(h, u);
    u->rate = h[LR] * root / c1;
    u->eps = mode == ADAM_TORCH || mode == ADAM_TORCH_L2 ? h[EPS] * root : h[EPS];
    if (mode == ADAM_L2 || mode == ADAM_TORCH_L2) u->l2 = h[DECAY];
    if (mode == ADAM_TRANSFORMERS) u->keep_after = 1 - h[LR] * h[DECAY];
    if (mode == ADAM_TORCH) u->keep_before = 1 - h[LR] * h[DECAY];
    u->flags = h[ADAM_AMSGRAD] != 0 ? ONT_UPDATE_AMSGRAD : 0;
}

/*
 * LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2
 * with phi the identity: u = m / c1 / (sqrt(v / c2) + eps) + wd p, p -= lr |p| / |u| u, over each tensor; a norm that
 * is zero leaves the ratio at 1, whatever its limits are.
 */
enum { LAMB_CORRECT = 5, LAMB_MIN, LAMB_MAX };

static uint32_t two_needed(const double *h)
{
    (void)h;
    return 3;
}

static void lamb_fill(const double *h, double step, bool first, ont_update *u)
{
    (void)first;
    double c1 = h[LAMB_CORRECT] != 0 ? 1 - pow(h[BETA1], step) : 1;
    double root = h[LAMB_CORRECT] != 0 ? sqrt(1 - pow(h[BETA2], step)) : 1;
    moments(h, u);
    u->correct = root / c1;
    u->eps = h[EPS] * root;
    u->rate = h[LR];
    u->decay = h[DECAY];
    u->ratio_min = h[LAMB_MIN];
    u->ratio_max = h[LAMB_MAX];
}

/*
 * SGD as torch.optim.SGD has it: g += wd p; b = momentum b + (1 - dampening) g, at the first step b = g; then
 * p -= lr b, or with Nesterov's momentum (Sutskever et al., ICML 2013) p -= lr (g + momentum b).
 */
enum { SGD_MOMENTUM = 1, SGD_DAMPENING, SGD_DECAY, SGD_NESTEROV };

static uint32_t sgd_needs(const double *h)
{
    return h[SGD_MOMENTUM] != 0;
}

static void sgd_fill(const double *h, double step, bool first, ont_update *u)
{
    (void)step;
    *u = (ont_update){.keep_before = 1, .keep_after = 1, .rate = h[LR], .l2 = h[SGD_DECAY]};
    u->beta1 = first ? 0 : h[SGD_MOMENTUM];
    u->one_minus_beta1 = first ? 1 : 1 - h[SGD_DAMPENING];
    u->beta2 = h[SGD_MOMENTUM];
    u->flags = (h[SGD_MOMENTUM] != 0 ? ONT_UPDATE_MOMENTUM : 0) | (h[SGD_NESTEROV] != 0 ? ONT_UPDATE_NESTEROV : 0);
}

/*
 * Adagrad: Duchi, Hazan and Singer, JMLR 2011, as torch.optim.Adagrad has it: g += wd p; s += g g;
 * p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps).
 */
enum { ADAGRAD_LR_DECAY = 1, ADAGRAD_EPS, ADAGRAD_DECAY };

static uint32_t one_needed(const double *h)
{
    (void)h;
    return 1;
}

static void adagrad_fill(const double *h, double step, bool first, ont_update *u)
{
    (void)first;
    *u = (ont_update){.keep_before = 1, .keep_after = 1, .l2 = h[ADAGRAD_DECAY], .eps = h[ADAGRAD_EPS]};
    u->rate = h[LR] / (1 + (step - 1) * h[ADAGRAD_LR_DECAY]);
}

/*
 * Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2:
 * p -= lr wd p; p -= lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g.
 */
enum { LION_DECAY = 3 };

static void lion_fill(const double *h, double step, bool first, ont_update *u)
{
    (void)step;
    (void)first;
    moments(h, u);
    u->rate = h[LR];
    u->keep_before = 1 - h[LR] * h[LION_DECAY];
}

static const ont_optim_rule rules[] = {
    {"adam", ONT_RULE_ADAM, ONT_RULE_ADAM, 8, "lr, beta1, beta2, eps, weight_decay, mode, bias_correction, amsgrad",
     {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, true, adam_needs, adam_fill},
    {"lamb", ONT_RULE_LAMB, ONT_RULE_LAMB_APPLY, 8,
     "lr, beta1, beta2, eps, weight_decay, bias_correction, ratio_min, ratio_max",
     {"exp_avg", "exp_avg_sq"}, true, two_needed, lamb_fill},
    {"sgd", ONT_RULE_SGD, ONT_RULE_SGD, 5, "lr, momentum, dampening, weight_decay, nesterov",
     {"momentum_buffer"}, false, sgd_needs, sgd_fill},
    {"adagrad", ONT_RULE_ADAGRAD, ONT_RULE_ADAGRAD, 4, "lr, lr_decay, eps, weight_decay",
     {"sum"}, true, one_needed, adagrad_fill},
    {"lion", ONT_RULE_LION, ONT_RULE_LION, 4, "lr, beta1, beta2, weight_decay",
     {"exp_avg"}, false, one_needed, lion_fill},
};

const ont_optim_rule *ont_optim_find_rule(const char *name)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (!strcmp(rules[i].name, name)) return &rules[i];
    return NULL;
}
