/*
 * Shared by the kernels of batch normalisation: batchnorm.c goes channel by channel, batchnorm_rows.c row by row.
 */
#ifndef ONT_OPS_BATCHNORM_H
#define ONT_OPS_BATCHNORM_H

#include "ops/op.h"
#include "simd/norm/batchnorm.h"

enum { BN_X, BN_SCALE, BN_BIAS, BN_RUNNING_MEAN, BN_RUNNING_VAR, BN_RESIDUAL }; /* inputs */
enum { BN_Y, BN_NEW_MEAN, BN_NEW_VAR, BN_SAVED_MEAN, BN_SAVED_INV };               /* outputs */
enum { /* inputs of the gradient, whose outputs are dx, dscale and dbias */
    BN_GRAD_X, BN_GRAD_SCALE, BN_GRAD_MEAN, BN_GRAD_INV, BN_GRAD_DY, BN_GRAD_Y, BN_GRAD_BIAS,
};

typedef struct ont_batchnorm {
    int64_t n, c, d;
    double eps, momentum;
    bool f32; /* what is per channel; else float64 */
    bool training, relu;
    size_t size; /* of an element of x, y and their gradients: 2 for bfloat16, beside float32 channels */
    const ont_batchnorm_loops *loops;
    /* batchnorm_rows.c: (rows, width), a row being `fold` images; the last row has `last` elements. */
    int64_t fold, width, rows, last;
} ont_batchnorm;

/* batchnorm_channel.c */

/* Input or output `index`; NULL where it is absent. */
const void *ont_bn_operand(const ont_call *call, uint32_t index);
void *ont_bn_result(const ont_call *call, uint32_t index);
/* Entry c of an array of float32 (f32) or float64; write() does nothing where the array is NULL. */
double ont_bn_read(const void *list, int64_t c, bool f32);
void ont_bn_write(void *list, int64_t c, bool f32, double value);

/*
 * Forward of channel c from the mean and variance of its batch, which inference mode ignores: writes running and saved
 * statistics, and returns the coefficients of the normalisation.
 */
ont_channel ont_bn_settle(const ont_call *call, int64_t c, double mean, double var);
/*
 * Backward of channel c: its coefficients; then, from *sum of dy and *dot of dy * (x - mean), writes dscale and dbias
 * and turns them into dx's terms: *sum is subtracted from each dy, and *dot times (x - mean).
 */
ont_channel ont_bn_grad_channel(const ont_call *call, int64_t c);
void ont_bn_grad_settle(const ont_call *call, int64_t c, double *sum, double *dot);
ont_relu_mask ont_bn_mask(const ont_call *call);

/* The kernels by rows. ont_bn_rows_prepare() takes the state that the kernels by channels have set up. */
const char *ont_bn_rows_accept(const ont_node *node);
void ont_bn_rows_prepare(ont_batchnorm *s, ont_prepared *out);
ont_status ont_bn_rows_forward(const ont_call *call);
ont_status ont_bn_rows_backward(const ont_call *call);

#endif
