/*
 * AttributeProto to node attributes, and the many forms of a Constant node.
 */
#ifndef ONT_ONNX_ATTRIBUTE_H
#define ONT_ONNX_ATTRIBUTE_H

#include "ir/graph.h"
#include "onnx-ml.pb-c.h"

/*
 * `name` is given apart, because an attribute of a function's call goes by another name inside; the node has none of
 * that name yet. References are resolved before. EUNSUPPORTED names the attribute and its kind: subgraphs, sparse ...
 */
ont_status ont_onnx_attribute(const Onnx__AttributeProto *proto, const char *name, const char *what, ont_graph *g,
                              ont_node *node) ONT_MUST_USE;
/* value, value_float(s), value_int(s), as `name` says; contents go to the arena. */
ont_status ont_onnx_constant(const Onnx__AttributeProto *proto, const char *name, const char *what, ont_arena *arena,
                             ont_tensor *tensor) ONT_MUST_USE;

#endif
