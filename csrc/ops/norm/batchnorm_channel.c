/*
 * One channel of batch normalisation: its statistics, coefficients and gradients, for the kernels by channels and those
 * by rows. It knows neither.
 */
#include <math.h>

#include "ops/norm/batchnorm.h"

void *ont_bn_result(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

const void *ont_bn_operand(const ont_call *call, uint32_t index)
{
    return index < call->node->n_inputs ? call->in[index] : NULL;
}

double ont_bn_read(const void *data, int64_t c, bool f32)
{
    return f32 ? (double)((const float *)data)[c] : ((const double *)data)[c];
}

void ont_bn_write(void *data, int64_t c, bool f32, double value)
{
    if (!data) return;
    if (f32)
        ((float *)data)[c] = (float)value;
    else
        ((double *)data)[c] = value;
}

ont_channel ont_bn_settle(const ont_call *call, int64_t c, double mean, double var)
{
    const ont_batchnorm *s = call->state;
    double old_mean = ont_bn_read(call->in[BN_RUNNING_MEAN], c, s->f32),
           old_var = ont_bn_read(call->in[BN_RUNNING_VAR], c, s->f32);
    if (s->training) {
        double keep = s->momentum, take = 1 - keep;
        ont_bn_write(ont_bn_result(call, BN_NEW_MEAN), c, s->f32, keep * old_mean + take * mean);
        ont_bn_write(ont_bn_result(call, BN_NEW_VAR), c, s->f32, keep * old_var + take * var);
    } else {
        mean = old_mean;
        var = old_var;
    }
    double inv = 1 / sqrt(var + s->eps);
    if (s->f32) inv = (double)(float)inv; /* the precision that the gradient reads */
    ont_bn_write(ont_bn_result(call, BN_SAVED_MEAN), c, s->f32, mean);
    ont_bn_write(ont_bn_result(call, BN_SAVED_INV), c, s->f32, inv);
    return (ont_channel){mean, inv * ont_bn_read(call->in[BN_SCALE], c, s->f32),
                         ont_bn_read(call->in[BN_BIAS], c, s->f32)};
}

ont_relu_mask ont_bn_mask(const ont_call *call)
{
    return ont_bn_operand(call, BN_GRAD_Y)      ? ONT_MASK_Y
           : ont_bn_operand(call, BN_GRAD_BIAS) ? ONT_MASK_V
                                                : ONT_MASK_NONE;
}

ont_channel ont_bn_grad_channel(const ont_call *call, int64_t c)
{
    const ont_batchnorm *s = call->state;
    const void *bias = ont_bn_operand(call, BN_GRAD_BIAS);
    double inv = ont_bn_read(call->in[BN_GRAD_INV], c, s->f32);
    return (ont_channel){ont_bn_read(call->in[BN_GRAD_MEAN], c, s->f32),
                         inv * ont_bn_read(call->in[BN_GRAD_SCALE], c, s->f32),
                         bias ? ont_bn_read(bias, c, s->f32) : 0};
}

void ont_bn_grad_settle(const ont_call *call, int64_t c, double *sum, double *dot)
{
    const ont_batchnorm *s = call->state;
    double inv = ont_bn_read(call->in[BN_GRAD_INV], c, s->f32), count = (double)(s->n * s->d);
    ont_bn_write(ont_bn_result(call, 1), c, s->f32, count > 0 ? *dot * inv : 0); /* 0 * NaN is NaN */
    ont_bn_write(ont_bn_result(call, 2), c, s->f32, *sum);
    *sum = s->training ? *sum / count : 0;
    *dot = s->training ? *dot * inv * inv / count : 0;
}
