/*
 * What the operators of this folder share: launches as statuses, operands that may be absent, and their tables.
 */
#ifndef ONT_CUDA_GLUE_H
#define ONT_CUDA_GLUE_H

#include "core_shim.h"
#include "kernels.h"

const char *ont_cuda_error_text(int error); /* by the device: cuda.c, or the emulation */

static inline ont_status ont_launched(int error)
{
    return error ? ont_fail(ONT_ESTATE, "a kernel was not launched: %s", ont_cuda_error_text(error)) : ONT_OK;
}

static inline const void *ont_operand(const ont_call *call, uint32_t index)
{
    return index < call->node->n_inputs ? call->in[index] : NULL;
}

static inline void *ont_result(const ont_call *call, uint32_t index)
{
    return index < call->node->n_outputs ? call->out[index] : NULL;
}

static inline bool ont_is_float32_or_64(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64;
}

/* A strided tensor made row-major: the devices' copy_strided(). */
ont_status ont_copy_strided_launch(const ont_device_strided *layout, const void *from, void *to, void *stream);

/* float32, float64 and the 16-bit ones, by the first input; float32 and float64 alone. */
const char *ont_cuda_accept_floats(const ont_node *node);
const char *ont_cuda_accept_wide(const ont_node *node);
const char *ont_cuda_accept_any(const ont_node *node);

extern const ont_kernel_list ont_cuda_lists[];
extern const size_t ont_cuda_n_lists;

/* One array a family, and how many. */
#define ONT_CUDA_FAMILIES(X) X(elementwise) X(move) X(reduce) X(norm) X(softmax) X(loss) X(matmul) X(attention) \
    X(conv) X(pool) X(batchnorm)
#define X(family) extern const ont_kernel ont_cuda_##family##_kernels[];
ONT_CUDA_FAMILIES(X)
#undef X

#endif
