/*
 * TensorProto to host contents.
 */
#ifndef ONT_ONNX_TENSOR_H
#define ONT_ONNX_TENSOR_H

#include "base/arena.h"
#include "base/shape.h"
#include "onnx-ml.pb-c.h"

/* Contents go to the arena. EINVAL where dims, dtype and data disagree; EUNSUPPORTED for strings and external data. */
ont_status ont_onnx_tensor(const Onnx__TensorProto *proto, const char *what, ont_arena *arena, ont_tensor *tensor)
    ONT_MUST_USE;
/* A number of TensorProto.DataType that the core knows; EINVAL or EUNSUPPORTED naming `what` otherwise. */
ont_status ont_onnx_dtype(int64_t number, const char *what, ont_dtype *dtype) ONT_MUST_USE;

#endif
