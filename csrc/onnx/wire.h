/*
 * A look at the wire before protobuf-c reads it: it recurses once a nested message and allocates what lengths promise.
 */
#ifndef ONT_ONNX_WIRE_H
#define ONT_ONNX_WIRE_H

#include <protobuf-c/protobuf-c.h>

#include "base/status.h"

enum { ONT_WIRE_DEPTH = 64 };

/*
 * Iterative walk of nested messages: EINVAL for depth beyond ONT_WIRE_DEPTH, bad tags, lengths past the end, strings
 * that are not UTF-8 or hold a NUL.
 */
ont_status ont_wire_check(const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t size) ONT_MUST_USE;

#endif
