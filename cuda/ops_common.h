/*
 * Shared by the operators of this folder: launch errors as statuses, operands that may be absent, and kernel tables.
 */
#ifndef ONT_CUDA_GLUE_H
#define ONT_CUDA_GLUE_H

#include "core_shim.h"
#include "kernels/kernels.h"

const char *ont_cuda_error_text(int error); /* in device.c, or in the emulation */

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

/* Whether 32 bits are too few to count the elements. */
static inline bool ont_is_long(const ont_value *v) { return ont_shape_count(&v->shape) > INT32_MAX; }

static inline bool ont_is_float32_or_64(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64;
}

/* The state that the reference kernel of the CPU has for the node. */
static inline ont_status ont_cpu_state(const ont_node *node, ont_arena *arena, const void **state)
{
    ont_prepared prepared = {0};
    ONT_TRY(node->op->kernels[node->op->n_kernels - 1].prepare(node, arena, &prepared));
    *state = prepared.state;
    return ONT_OK;
}

/* The device that is current: in device.c, or in the emulation. */
const ont_device *ont_cuda_device(void);

/* Copies a strided tensor to a row-major one: copy_strided() of the devices. */
ont_status ont_copy_strided_launch(const ont_device_strided *layout, const void *from, void *to, void *stream);

/* Whether the first input is float32, float64 or a 16-bit float; whether it is float32 or float64. */
const char *ont_cuda_accept_floats(const ont_node *node);
const char *ont_cuda_accept_wide(const ont_node *node);
const char *ont_cuda_accept_any(const ont_node *node);

extern const ont_kernel_list ont_cuda_lists[];
extern const size_t ont_cuda_n_lists;

/* For each family, the array of kernels and their number. */
#define ONT_CUDA_FAMILIES(X) X(elementwise) X(move) X(reduce) X(norm) X(softmax) X(loss) X(matmul) X(attention) \
    X(attention_grad) X(conv) X(pool) X(batchnorm) X(group_norm) X(pad) X(resize) X(index) X(grouped) X(recurrent) \
    X(rnn) X(nonzero) X(ctc) X(random) X(quantize) X(streamed_loss) \
    X(grid_sample) X(roi) X(columns) X(sort) X(det) X(pack) X(visible_keys)
#define X(family) extern const ont_kernel ont_cuda_##family##_kernels[];
ONT_CUDA_FAMILIES(X)
#undef X

#endif
