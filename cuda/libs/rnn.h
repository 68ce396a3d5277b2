/*
 * A layer of an RNN, GRU or LSTM by cuDNN, in one direction or both, as plans that are kept by shape for the life of
 * the process. ops/rnn_check.c compares the results of a new plan with those of the own kernels.
 */
#ifndef ONT_CUDA_RNN_H
#define ONT_CUDA_RNN_H

#include "core_shim.h"
#include "kernels/kernels.h"
#include "libs/verdict.h"

typedef struct ont_rnn_shape { /* compared by its bytes */
    int64_t steps, batch, in, hidden;
    int32_t directions, cell, dtype, has_bias; /* cell: ont_cell */
} ont_rnn_shape;

typedef struct ont_rnn_plan ont_rnn_plan;

/* Bytes of the weights in cuDNN's layout, of work memory, and of what forward saves for the gradient. */
typedef struct ont_rnn_bytes {
    size_t weights, work, saved;
} ont_rnn_bytes;

/* W (D, gates * H, in), R (D, gates * H, H), B (D, 2 * gates * H) in the order of ONNX; NULL: absent. */
typedef struct ont_rnn_weights {
    void *w, *r, *b;
} ont_rnn_weights;

/*
 * x (T, B, in), y (T, B, D * H), states (D, B, H); `space` is the weights in cuDNN's layout. Initial states that are
 * NULL are zeros, results that are NULL are not wanted. Without `saved` there is no gradient.
 */
typedef struct ont_rnn_operands {
    const void *x, *h, *c;
    void *y, *last_h, *last_c, *space, *work, *saved, *stream;
} ont_rnn_operands;

/* The gradient changes `saved`. dy and dx are needed, `dspace` only for the gradients of the weights. */
typedef struct ont_rnn_grad_operands {
    const void *x, *h, *c, *y, *dy, *dlast_h, *dlast_c;
    void *dx, *dh, *dc, *space, *dspace, *work, *saved, *stream;
} ont_rnn_grad_operands;

/* NULL and the plan for the current device, or the reason why there is none. */
const char *ont_rnn_plan_get(const ont_rnn_shape *shape, ont_rnn_plan **plan);
ont_rnn_bytes ont_rnn_plan_bytes(const ont_rnn_plan *plan);
/* The copies from ONNX's order to cuDNN's, or back. */
ont_status ont_rnn_plan_parts(const ont_rnn_plan *plan, const ont_rnn_weights *weights, void *space, bool back,
                              ont_rnn_parts *parts);
ont_status ont_rnn_plan_forward(const ont_rnn_plan *plan, const ont_rnn_operands *operands);
ont_status ont_rnn_plan_backward(const ont_rnn_plan *plan, const ont_rnn_grad_operands *operands);
ont_verdict ont_rnn_plan_verdict(const ont_rnn_plan *plan);
void ont_rnn_plan_judge(ont_rnn_plan *plan, ont_verdict verdict);

#endif
