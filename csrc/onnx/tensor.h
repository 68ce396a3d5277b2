/*
 * Reads a TensorProto into host memory.
 */
#ifndef ONT_ONNX_TENSOR_H
#define ONT_ONNX_TENSOR_H

#include "base/arena.h"
#include "base/shape.h"
#include "onnx-ml.pb-c.h"

/*
 * Elements are allocated in the arena. EINVAL if dims, dtype and data disagree; EUNSUPPORTED for strings and external
 * data.
 */
ont_status ont_onnx_tensor(const Onnx__TensorProto *proto, const char *what, ont_arena *arena, ont_tensor *tensor)
    ONT_MUST_USE;
/* Maps a TensorProto.DataType to a dtype; EINVAL or EUNSUPPORTED naming `what` if the core lacks it. */
ont_status ont_onnx_dtype(int64_t number, const char *what, ont_dtype *dtype) ONT_MUST_USE;

#endif
