/*
 * AttributeProto to node attributes, and the many forms of a Constant node.
 */
#ifndef ONT_ONNX_ATTRIBUTE_H
#define ONT_ONNX_ATTRIBUTE_H

#include "ir/graph.h"
#include "onnx-ml.pb-c.h"

/*
 * Adds an attribute to `node`, which must not have one of that name. `name` is passed separately because an attribute
 * of a function's call has another name inside the function. References must be resolved. EUNSUPPORTED names the
 * attribute and its type: subgraphs, sparse ...
 */
ont_status ont_onnx_attribute(const Onnx__AttributeProto *proto, const char *name, const char *what, ont_graph *g,
                              ont_node *node) ONT_MUST_USE;
/* Reads value, value_float(s) or value_int(s), depending on `name`; elements are allocated in the arena. */
ont_status ont_onnx_constant(const Onnx__AttributeProto *proto, const char *name, const char *what, ont_arena *arena,
                             ont_tensor *tensor) ONT_MUST_USE;

#endif
