/*
 * Convolutions as operators ask for them, behind a table: cuDNN (cudnn.c), or loops on the host where kernels are
 * emulated.
 */
#ifndef ONT_CUDA_DNN_H
#define ONT_CUDA_DNN_H

#include "core_shim.h"
#include "kernels.h"

typedef struct ont_dnn {
    const char *name;
    /* NULL, or why not. */
    const char *(*accept)(const ont_conv_shape *shape, ont_conv_kind kind);
    /* Of the device that is current. */
    ont_status (*create)(const ont_conv_shape *shape, ont_conv_kind kind, void **plan);
    size_t (*work_bytes)(const void *plan);
    /* The one of x, w and y that the kind names is written. */
    ont_status (*run)(void *plan, void *x, void *w, void *y, void *work, void *stream);
    void (*destroy)(void *plan);
} ont_dnn;

/* The one of this plugin; NULL where the library was not found. */
const ont_dnn *ont_dnn_get(void);

#endif
