/*
 * Matrix products read transposed operands as they lie in memory.
 */
#ifndef ONT_PASSES_FUSE_TRANSPOSE_H
#define ONT_PASSES_FUSE_TRANSPOSE_H

#include "ops/op.h"

/*
 * A Transpose of the last two dims that feeds MatMul, FusedMatMul or Gemm becomes transA or transB of it; a MatMul
 * becomes a FusedMatMul. Transposes that nobody reads any more are removed. Shapes must be inferred.
 */
ont_status ont_pass_fuse_transpose(ont_graph *g) ONT_MUST_USE;

#endif
