/*
 * Lets matmuls read transposed operands in place.
 */
#ifndef ONT_PASSES_FUSE_TRANSPOSE_H
#define ONT_PASSES_FUSE_TRANSPOSE_H

#include "ops/op.h"

/*
 * A Transpose of the last two dims that feeds MatMul, FusedMatMul or Gemm becomes its transA or transB; a MatMul
 * becomes a FusedMatMul. Unused transposes are removed. Shapes must be inferred.
 */
ont_status ont_pass_fuse_transpose(ont_graph *g) ONT_MUST_USE;

#endif
