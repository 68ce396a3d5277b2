/*
 * RNN, GRU and LSTM as one node on a device that has a kernel for the whole of it, which is cuDNN's.
 */
#ifndef ONT_OPS_RECURRENT_WHOLE_H
#define ONT_OPS_RECURRENT_WHOLE_H

#include "ops/op.h"
#include "simd/recurrent/recurrent.h"

/* Output of RNN, GRU and LSTM behind those of ONNX: bytes for the gradient, in a layout of the kernel's own. */
enum { ONT_RECURRENT_SAVED = 3 };

/* Inputs of RecurrentGrad: those of the node (B, H0 and C0 may be absent), two of its outputs, and the gradients of its
 * outputs. Its outputs are the gradients of X to C0. */
enum {
    ONT_RECURRENT_X, ONT_RECURRENT_W, ONT_RECURRENT_R, ONT_RECURRENT_B, ONT_RECURRENT_H0, ONT_RECURRENT_C0,
    ONT_RECURRENT_Y, ONT_RECURRENT_BYTES, ONT_RECURRENT_DY, ONT_RECURRENT_DH, ONT_RECURRENT_DC, ONT_RECURRENT_INPUTS
};

typedef struct ont_recurrent_form {
    int64_t steps, batch, in, hidden;
    int directions; /* 1: forwards in time; 2: both */
    ont_cell cell;
    ont_dtype dtype;
} ont_recurrent_form;

/* Reads a node with torch's activations, all sequences of full length and layout 0; else returns the reason why not. */
const char *ont_recurrent_read(const ont_node *node, ont_recurrent_form *form);
void ont_recurrent_grad(ont_grad *g);

#endif
