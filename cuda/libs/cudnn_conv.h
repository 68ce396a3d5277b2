/*
 * What cudnn.c and its emulation need of cuDNN, written from its documentation (the convolution functions of versions 8
 * and 9), so that the build does not need NVIDIA's headers. tests/cuda/facts.py compares every number, layout and
 * signature with those headers.
 */
#ifndef ONT_CUDA_CUDNN_CONV_H
#define ONT_CUDA_CUDNN_CONV_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#include "kernels/kernels.h"

enum { DATA_FLOAT = 0, DATA_HALF = 2, DATA_BFLOAT16 = 9, LAYOUT_NCHW = 0, CROSS_CORRELATION = 1 };
enum { MATH_DEFAULT = 0, MATH_TENSOR_OP = 1, MATH_FMA = 3, DETERMINISTIC = 1 };
enum { CUDNN_SUCCESS = 0, CUDNN_NOT_SUPPORTED = 3000, CUDNN_8_NOT_SUPPORTED = 9 };

typedef struct performance { /* the same for all three kinds */
    int algorithm, status;
    float time;
    size_t memory;
    int determinism, math, reserved[3];
} performance;

typedef int (*find_fn)(void *handle, void *a, void *b, void *conv, void *c, int wanted, int *n, performance *found);
typedef int (*run_fn)(void *handle, const void *alpha, void *da, const void *a, void *db, const void *b, void *conv,
                      int algorithm, void *work, size_t bytes, const void *beta, void *dc, void *c);

typedef struct cudnn_functions {
    int (*create)(void **handle);
    int (*set_stream)(void *handle, cudaStream_t stream);
    int (*tensor_create)(void **desc);
    int (*tensor_set)(void *desc, int type, int rank, const int *dims, const int *strides);
    int (*tensor_destroy)(void *desc);
    int (*filter_create)(void **desc);
    int (*filter_set)(void *desc, int type, int layout, int rank, const int *dims);
    int (*filter_destroy)(void *desc);
    int (*conv_create)(void **desc);
    int (*conv_set)(void *desc, int rank, const int *pad, const int *stride, const int *dilation, int mode, int type);
    int (*conv_groups)(void *desc, int groups);
    int (*conv_math)(void *desc, int math);
    int (*conv_destroy)(void *desc);
    find_fn find[3]; /* by ont_conv_kind, as run */
    run_fn run[3];
} cudnn_functions;

/* X(member of the table, name in the library) */
#define ONT_CUDNN_FUNCTIONS(X) \
    X(create, cudnnCreate) \
    X(set_stream, cudnnSetStream) \
    X(tensor_create, cudnnCreateTensorDescriptor) \
    X(tensor_set, cudnnSetTensorNdDescriptor) \
    X(tensor_destroy, cudnnDestroyTensorDescriptor) \
    X(filter_create, cudnnCreateFilterDescriptor) \
    X(filter_set, cudnnSetFilterNdDescriptor) \
    X(filter_destroy, cudnnDestroyFilterDescriptor) \
    X(conv_create, cudnnCreateConvolutionDescriptor) \
    X(conv_set, cudnnSetConvolutionNdDescriptor) \
    X(conv_groups, cudnnSetConvolutionGroupCount) \
    X(conv_math, cudnnSetConvolutionMathType) \
    X(conv_destroy, cudnnDestroyConvolutionDescriptor) \
    X(find[ONT_CONV_FORWARD], cudnnGetConvolutionForwardAlgorithm_v7) \
    X(find[ONT_CONV_GRAD_INPUT], cudnnGetConvolutionBackwardDataAlgorithm_v7) \
    X(find[ONT_CONV_GRAD_WEIGHT], cudnnGetConvolutionBackwardFilterAlgorithm_v7) \
    X(run[ONT_CONV_FORWARD], cudnnConvolutionForward) \
    X(run[ONT_CONV_GRAD_INPUT], cudnnConvolutionBackwardData) \
    X(run[ONT_CONV_GRAD_WEIGHT], cudnnConvolutionBackwardFilter)

#endif
