/*
 * Whether a plan of cuDNN for a recurrent layer (libs/rnn.h) computes what the own kernels compute.
 */
#ifndef ONT_CUDA_OPS_RNN_H
#define ONT_CUDA_OPS_RNN_H

#include "libs/rnn.h"

/* At the first node with a plan, runs both on random operands and keeps the verdict. NULL, or the reason against it. */
const char *ont_rnn_check(const ont_node *node, ont_rnn_plan *plan, const ont_rnn_shape *shape);

#endif
