/*
 * Convolutions for operators, behind a table: cuDNN (cudnn.c), or loops on the host where kernels are emulated.
 */
#ifndef ONT_CUDA_DNN_H
#define ONT_CUDA_DNN_H

#include "core_shim.h"
#include "kernels/kernels.h"

typedef struct ont_dnn {
    const char *name;
    /* NULL, or the reason why not. */
    const char *(*accept)(const ont_conv_shape *shape, ont_conv_kind kind);
    /* For the current device. */
    ont_status (*create)(const ont_conv_shape *shape, ont_conv_kind kind, void **plan);
    size_t (*work_bytes)(const void *plan);
    /* `kind` names the one of x, w and y that is written. */
    ont_status (*run)(void *plan, void *x, void *w, void *y, void *work, void *stream);
    void (*destroy)(void *plan);
} ont_dnn;

/* The table of this plugin; NULL where the library is not found. */
const ont_dnn *ont_dnn_get(void);

#endif
