/*
 * Loads a serialised ModelProto into a graph. Called by py/session.c. Everything that a hostile file may contain is
 * refused here with ONT_EINVAL and its position, so that passes can rely on the invariants of graph.h.
 */
#ifndef ONT_ONNX_LOAD_H
#define ONT_ONNX_LOAD_H

#include "ir/graph.h"

/*
 * Operators are resolved against the table; a node with an unknown operator keeps `op` NULL, for the caller to report.
 * Constant nodes become constants, calls of the model's functions are inlined, random operators get a unique
 * "rng_stream", output 0 of every node is present. Graph outputs keep the dtype and shape that the model declares.
 * ONT_EUNSUPPORTED: external data, sparse or string tensors, inputs that are not tensors, a later ai.onnx opset.
 */
ont_status ont_onnx_load(const uint8_t *bytes, size_t size, ont_graph **graph) ONT_MUST_USE;

#endif
