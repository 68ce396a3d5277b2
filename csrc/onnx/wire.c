/*
 * Wire-format check. See wire.h; the format is https://protobuf.dev/programming-guides/encoding.
 */
#include "onnx/wire.h"

#include <string.h>

typedef struct frame {
    const ProtobufCMessageDescriptor *type;
    const uint8_t *end;
} frame;

/* Reads a varint; false if it runs past `end` or exceeds ten bytes. */
static bool read_varint(const uint8_t **at, const uint8_t *end, uint64_t *value)
{
    uint64_t result = 0;
    for (int shift = 0; shift < 70 && *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        if (shift < 64) result |= (uint64_t)(byte & 127) << shift;
        if (!(byte & 128)) {
            *value = result;
            return true;
        }
    }
    return false;
}

/* Skips a field of fixed size or a varint; false if it runs past the end or the wire type is unknown. */
static bool skip_scalar(uint32_t wire_type, const uint8_t **at, const uint8_t *end)
{
    uint64_t ignored;
    size_t bytes = wire_type == 1 ? 8 : 4;
    if (wire_type == 0) return read_varint(at, end, &ignored);
    if ((wire_type != 1 && wire_type != 5) || (size_t)(end - *at) < bytes) return false;
    *at += bytes;
    return true;
}

/* Length of the UTF-8 sequence at `at`; 0 if invalid: overlong forms, surrogates, and code points above U+10FFFF. */
static size_t utf8_length(const uint8_t *at, size_t left)
{
    if (at[0] < 0x80) return 1;
    size_t length = at[0] >= 0xf0 ? 4 : at[0] >= 0xe0 ? 3 : 2;
    if (at[0] < 0xc2 || at[0] > 0xf4 || length > left) return 0;
    for (size_t i = 1; i < length; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
    if ((at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xed && at[1] > 0x9f)) return 0;
    if ((at[0] == 0xf0 && at[1] < 0x90) || (at[0] == 0xf4 && at[1] > 0x8f)) return 0;
    return length;
}

/* Whether the bytes are UTF-8 without NUL: names become C strings, error messages and Python strings. */
static bool is_text(const uint8_t *bytes, size_t size)
{
    if (size && memchr(bytes, 0, size)) return false;
    for (size_t i = 0, length; i < size; i += length)
        if (!(length = utf8_length(bytes + i, size - i))) return false;
    return true;
}

ont_status ont_wire_check(const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t size)
{
    frame stack[ONT_WIRE_DEPTH];
    int depth = 0;
    const uint8_t *at = bytes;
    stack[0] = (frame){type, bytes + size};
    for (;;) {
        while (depth >= 0 && at == stack[depth].end) depth--;
        if (depth < 0) return ONT_OK;
        const frame *top = &stack[depth];
        uint64_t tag, length;
        if (!read_varint(&at, top->end, &tag) || !(tag >> 3) || tag >> 32)
            return ont_fail(ONT_EINVAL, "model: bad field tag in %s at byte %zu", top->type->name,
                            (size_t)(at - bytes));
        uint32_t wire_type = (uint32_t)tag & 7;
        if (wire_type != 2) {
            if (!skip_scalar(wire_type, &at, top->end))
                return ont_fail(ONT_EINVAL, "model: truncated or malformed field %u of %s at byte %zu",
                                (uint32_t)(tag >> 3), top->type->name, (size_t)(at - bytes));
            continue;
        }
        if (!read_varint(&at, top->end, &length) || length > (uint64_t)(top->end - at))
            return ont_fail(ONT_EINVAL, "model: field %u of %s at byte %zu is longer than what is left",
                            (uint32_t)(tag >> 3), top->type->name, (size_t)(at - bytes));
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field(top->type, (unsigned)(tag >> 3));
        if (field && field->type == PROTOBUF_C_TYPE_STRING && !is_text(at, (size_t)length))
            return ont_fail(ONT_EINVAL, "model: %s of %s at byte %zu is not text in UTF-8", field->name,
                            top->type->name, (size_t)(at - bytes));
        if (!field || field->type != PROTOBUF_C_TYPE_MESSAGE) {
            at += length;
            continue;
        }
        if (depth + 1 == ONT_WIRE_DEPTH)
            return ont_fail(ONT_EINVAL, "model: messages are nested deeper than %d at byte %zu", ONT_WIRE_DEPTH,
                            (size_t)(at - bytes));
        stack[++depth] = (frame){field->descriptor, at + length};
    }
}
