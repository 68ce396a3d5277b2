/*
 * Kernels that the elementwise descriptor files share.
 */
#ifndef ONT_OPS_ELEMENTWISE_H
#define ONT_OPS_ELEMENTWISE_H

#include "ops/op.h"
#include "simd/simd.h"

extern const ont_kernel ont_unary_kernels[2];  /* by the operator's name, see simd.h */
extern const ont_kernel ont_binary_kernels[2];

#endif
