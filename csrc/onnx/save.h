/*
 * From a graph to a serialised ModelProto, for save_onnx and for tests: any graph, also one that passes have worked on.
 */
#ifndef ONT_ONNX_SAVE_H
#define ONT_ONNX_SAVE_H

#include "ir/graph.h"

/*
 * Nodes in the order of the graph, constants as initializers, names made unique. Each domain is imported with the
 * highest version that one of its nodes has. *bytes is heap memory: ont_free() it. EUNSUPPORTED: a subgraph.
 */
ont_status ont_onnx_save(const ont_graph *g, uint8_t **bytes, size_t *size) ONT_MUST_USE;

#endif
