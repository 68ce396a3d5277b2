/*
 * Convolutions of tensors in channels last (NHWC) by cuDNN's graph API, as plans that are kept by shape for the life of
 * the process. Their first results are compared with those of the own kernels by the caller (ont_conv_plan_judge).
 */
#ifndef ONT_CUDA_CONV_GRAPH_H
#define ONT_CUDA_CONV_GRAPH_H

#include "core_shim.h"
#include "kernels/kernels.h"
#include "libs/verdict.h"

typedef struct ont_conv_plan ont_conv_plan;

/* What `kind` writes is the result, the others are read. bias: NULL, or one element for each output channel. */
typedef struct ont_conv_operands {
    void *x, *w, *y, *bias, *work, *stream;
} ont_conv_operands;

/* Behind the convolution. A Relu has a bias in front of it. */
typedef enum ont_conv_epilogue { ONT_CONV_PLAIN, ONT_CONV_BIAS, ONT_CONV_BIAS_RELU } ont_conv_epilogue;

/* NULL and the plan for the current device, or the reason why there is none. */
const char *ont_conv_plan_get(const ont_conv_shape *shape, ont_conv_kind kind, ont_conv_epilogue epilogue,
                              ont_conv_plan **plan);
size_t ont_conv_plan_work_bytes(const ont_conv_plan *plan);
/*
 * Returns 0, or cuDNN's error code. The first call with `may_measure` times the plan's kernels, which waits for the
 * device, and the fastest one stays. A kernel that cuDNN refuses is left for the next one.
 */
int ont_conv_plan_run(ont_conv_plan *plan, const ont_conv_operands *operands, bool may_measure);
ont_verdict ont_conv_plan_verdict(const ont_conv_plan *plan);
void ont_conv_plan_judge(ont_conv_plan *plan, ont_verdict verdict);

#endif
