/*
 * Serialises a graph as ModelProto, for save_onnx and for tests: any graph, also one that passes have transformed.
 */
#ifndef ONT_ONNX_SAVE_H
#define ONT_ONNX_SAVE_H

#include "ir/graph.h"

/*
 * Nodes keep the order of the graph, constants become initializers, names are made unique. Each domain is imported with
 * the highest opset version among its nodes. *bytes is heap memory, to be freed by ont_free(). EUNSUPPORTED: a
 * subgraph.
 */
ont_status ont_onnx_save(const ont_graph *g, uint8_t **bytes, size_t *size) ONT_MUST_USE;

#endif
