/*
 * The steps of one direction of a recurrent layer by the own kernels: for RecurrentSteps, and for rnn_check.c.
 */
#ifndef ONT_CUDA_RECURRENT_H
#define ONT_CUDA_RECURRENT_H

#include "libs/blas.h"
#include "ops_common.h"

enum { ONT_STEPS_PARTS = 4 };

typedef struct ont_steps {
    ont_cell_step cell;
    int64_t steps, wide;     /* wide: gates * H */
    bool reverse, gradient;
    bool separate;           /* of the gradient: that of the products is no output */
    const ont_blas *blas;
    void *step, *weight;     /* plans; weight: of the gradient of R, or NULL */
    size_t element, part[ONT_STEPS_PARTS], plan_bytes;
} ont_steps;

/* x (T, B, wide), R (wide, H), h0 and c0 (B, H) or NULL, lengths (int64) and bias (H) or NULL; h, c, saved and y may be
 * NULL. */
typedef struct ont_steps_operands {
    const void *x, *r, *h0, *c0, *lengths, *bias;
    void *y, *h, *c, *saved, *work, *stream;
} ont_steps_operands;

/* lengths, dy, dh and dc may be NULL. Results that are NULL are not wanted; dc0: LSTM; dbias and
 * dproducts, the gradients of the products: GRU. */
typedef struct ont_steps_grad_operands {
    const void *saved, *r, *lengths, *dy, *dh, *dc;
    void *dx, *dr, *dh0, *dc0, *dbias, *dproducts, *work, *stream;
} ont_steps_grad_operands;

/* Without plans: sizes and the products' dtypes. reverse: backwards in time. */
ont_steps ont_steps_of(ont_cell cell, ont_dtype dtype, int64_t steps, int64_t batch, int64_t hidden, bool reverse,
                       bool gradient);
const char *ont_steps_refusal(const ont_steps *s);
ont_status ont_steps_prepare(ont_steps *s, bool weight, size_t *work_bytes);
void ont_steps_release(void *steps);
ont_status ont_steps_run(const ont_steps *s, const ont_device *device, const ont_steps_operands *o);
ont_status ont_steps_grad_run(const ont_steps *s, const ont_device *device, const ont_steps_grad_operands *o);

#endif
