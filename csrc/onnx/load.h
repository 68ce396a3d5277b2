/*
 * From a serialised ModelProto to a graph. Called by py/session.c; everything a hostile file can hold is refused here
 * with ONT_EINVAL that names the place, so that the passes may rely on what graph.h says.
 */
#ifndef ONT_ONNX_LOAD_H
#define ONT_ONNX_LOAD_H

#include "ir/graph.h"

/*
 * Operators are resolved against the table; a node with an unknown one keeps `op` NULL, for the caller to name.
 * Constant nodes become constants, calls of the model's functions their bodies, random operators get a unique
 * "rng_stream", a node's output 0 is always there. Graph outputs keep the dtype and shape that the model declares.
 * ONT_EUNSUPPORTED: external data, sparse or string tensors, inputs that are no tensors, a later ai.onnx opset.
 */
ont_status ont_onnx_load(const uint8_t *bytes, size_t size, ont_graph **graph) ONT_MUST_USE;

#endif
