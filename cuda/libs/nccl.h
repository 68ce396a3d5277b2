/*
 * Collectives over memory of CUDA devices (device/comm.h) by NCCL.
 */
#ifndef ONT_CUDA_NCCL_H
#define ONT_CUDA_NCCL_H

#include "device/comm.h"
#include "core_shim.h"

/* NULL where the library is not found. */
const ont_comm_ops *ont_nccl_get(void);

#endif
