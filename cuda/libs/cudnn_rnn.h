/*
 * What rnn.c and its emulation need of cuDNN's recurrent layers (version 9), written from its documentation.
 * tests/cuda/facts.py compares every number and signature with NVIDIA's headers.
 */
#ifndef ONT_CUDA_CUDNN_RNN_H
#define ONT_CUDA_CUDNN_RNN_H

#include "libs/cudnn_conv.h"

enum { DATA_DOUBLE = 1 };
enum { RNN_ALGO_STANDARD = 0, RNN_RELU = 0, RNN_TANH = 1, RNN_LSTM = 2, RNN_GRU = 3 };
enum { RNN_NO_BIAS = 0, RNN_DOUBLE_BIAS = 2, RNN_UNIDIRECTIONAL = 0, RNN_BIDIRECTIONAL = 1, RNN_LINEAR_INPUT = 0 };
enum { RNN_SEQ_MAJOR_UNPACKED = 0, RNN_PADDED_IO_ENABLED = 1 };
enum { RNN_INFERENCE = 0, RNN_TRAINING = 1, RNN_WGRAD_ADD = 0 };

typedef struct cudnn_rnn_functions {
    size_t (*version)(void);
    int (*set_stream)(void *handle, cudaStream_t stream);
    int (*tensor_create)(void **desc);
    int (*tensor_set)(void *desc, int type, int rank, const int *dims, const int *strides);
    int (*tensor_destroy)(void *desc);
    int (*dropout_create)(void **desc);
    int (*dropout_set)(void *desc, void *handle, float dropout, void *states, size_t bytes, unsigned long long seed);
    int (*dropout_destroy)(void *desc);
    int (*data_create)(void **desc);
    int (*data_set)(void *desc, int type, int layout, int steps, int batch, int width, const int *lengths, void *fill);
    int (*data_destroy)(void *desc);
    int (*rnn_create)(void **desc);
    int (*rnn_set)(void *desc, int algorithm, int cell, int bias, int directions, int input, int type, int compute,
                   int math, int32_t in, int32_t hidden, int32_t projection, int32_t layers, void *dropout,
                   uint32_t flags);
    int (*rnn_destroy)(void *desc);
    int (*weight_bytes)(void *handle, void *rnn, size_t *bytes);
    int (*temporary_bytes)(void *handle, void *rnn, int mode, void *x, size_t *work, size_t *reserve);
    int (*weight_part)(void *handle, void *rnn, int32_t layer, size_t bytes, const void *weights, int32_t part,
                       void *matrix_desc, void **matrix, void *bias_desc, void **bias);
    int (*forward)(void *handle, void *rnn, int mode, const int32_t *lengths, void *x_desc, const void *x, void *y_desc,
                   void *y, void *h_desc, const void *hx, void *hy, void *c_desc, const void *cx, void *cy,
                   size_t weight_bytes, const void *weights, size_t work_bytes, void *work, size_t reserve_bytes,
                   void *reserve);
    int (*backward_data)(void *handle, void *rnn, const int32_t *lengths, void *y_desc, const void *y, const void *dy,
                         void *x_desc, void *dx, void *h_desc, const void *hx, const void *dhy, void *dhx, void *c_desc,
                         const void *cx, const void *dcy, void *dcx, size_t weight_bytes, const void *weights,
                         size_t work_bytes, void *work, size_t reserve_bytes, void *reserve);
    int (*backward_weights)(void *handle, void *rnn, int add, const int32_t *lengths, void *x_desc, const void *x,
                            void *h_desc, const void *hx, void *y_desc, const void *y, size_t weight_bytes,
                            void *dweights, size_t work_bytes, void *work, size_t reserve_bytes, void *reserve);
} cudnn_rnn_functions;

/* X(member of the table, name in the library) */
#define ONT_CUDNN_RNN_FUNCTIONS(X) \
    X(version, cudnnGetVersion) \
    X(set_stream, cudnnSetStream) \
    X(tensor_create, cudnnCreateTensorDescriptor) \
    X(tensor_set, cudnnSetTensorNdDescriptor) \
    X(tensor_destroy, cudnnDestroyTensorDescriptor) \
    X(dropout_create, cudnnCreateDropoutDescriptor) \
    X(dropout_set, cudnnSetDropoutDescriptor) \
    X(dropout_destroy, cudnnDestroyDropoutDescriptor) \
    X(data_create, cudnnCreateRNNDataDescriptor) \
    X(data_set, cudnnSetRNNDataDescriptor) \
    X(data_destroy, cudnnDestroyRNNDataDescriptor) \
    X(rnn_create, cudnnCreateRNNDescriptor) \
    X(rnn_set, cudnnSetRNNDescriptor_v8) \
    X(rnn_destroy, cudnnDestroyRNNDescriptor) \
    X(weight_bytes, cudnnGetRNNWeightSpaceSize) \
    X(temporary_bytes, cudnnGetRNNTempSpaceSizes) \
    X(weight_part, cudnnGetRNNWeightParams) \
    X(forward, cudnnRNNForward) \
    X(backward_data, cudnnRNNBackwardData_v8) \
    X(backward_weights, cudnnRNNBackwardWeights_v8)

#endif
