/*
 * Handles of cuDNN, which convolutions (cudnn.c) and graphs (dnn_graph.c) share.
 */
#ifndef ONT_CUDA_CUDNN_H
#define ONT_CUDA_CUDNN_H

#include "core_shim.h"

ont_status ont_cudnn_handle(int *device, void **handle); /* the current device and its handle */
void ont_cudnn_lock(void);                               /* a handle has one stream: one call at a time */
void ont_cudnn_unlock(void);

#endif
