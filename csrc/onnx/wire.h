/*
 * Validates the wire format before protobuf-c reads it, which recurses per nested message and allocates the lengths
 * that the file states.
 */
#ifndef ONT_ONNX_WIRE_H
#define ONT_ONNX_WIRE_H

#include <protobuf-c/protobuf-c.h>

#include "base/status.h"

enum { ONT_WIRE_DEPTH = 64 };

/*
 * Iterates over nested messages: EINVAL for nesting beyond ONT_WIRE_DEPTH, bad tags, lengths past the end, strings that
 * are not UTF-8 or contain a NUL.
 */
ont_status ont_wire_check(const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t size) ONT_MUST_USE;

#endif
