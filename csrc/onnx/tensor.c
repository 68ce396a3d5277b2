/*
 * Reads a TensorProto into host memory: raw bytes, or the typed field that the specification assigns to each dtype.
 */
#include "onnx/tensor.h"

#include <inttypes.h>
#include <string.h>

#include "base/number.h"

enum { LAST_ONNX_DTYPE = 28 }; /* of TensorProto.DataType */

ont_status ont_onnx_dtype(int64_t number, const char *what, ont_dtype *dtype)
{
    if (number <= 0 || number >= ONT_DTYPE_COUNT || !ont_dtype_size((ont_dtype)number))
        return number > 0 && number <= LAST_ONNX_DTYPE
                   ? ont_fail(ONT_EUNSUPPORTED, "%s: dtype number %" PRId64 " is not supported", what, number)
                   : ont_fail(ONT_EINVAL, "%s: dtype number %" PRId64 " does not exist", what, number);
    *dtype = (ont_dtype)number;
    return ONT_OK;
}

static ont_status tensor_shape(const Onnx__TensorProto *proto, const char *what, ont_shape *shape)
{
    if (proto->n_dims > ONT_MAX_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "%s: rank %zu, at most %d", what, proto->n_dims, ONT_MAX_RANK);
    *shape = ont_shape_of((int)proto->n_dims, proto->dims);
    return ONT_OK;
}

static ont_status wrong_count(const char *what, const char *field, size_t got, int64_t expected)
{
    return ont_fail(ONT_EINVAL, "%s: %s has %zu entries, its dims ask for %" PRId64, what, field, got, expected);
}

/* Normalises bools: kernels rely on 0 or 1, but a file may contain any byte. */
static void normalise_bools(ont_tensor *t)
{
    uint8_t *bytes = t->data;
    for (size_t i = 0; i < t->bytes; i++) bytes[i] = bytes[i] != 0;
}

/* int32_data holds all dtypes of at most 32 bits; 16-bit floats as bit patterns. */
static void narrow(const int32_t *from, int64_t n, size_t size, void *to)
{
    for (int64_t i = 0; i < n; i++) {
        if (size == 1) ((uint8_t *)to)[i] = (uint8_t)from[i];
        if (size == 2) ((uint16_t *)to)[i] = (uint16_t)from[i];
        if (size == 4) ((int32_t *)to)[i] = from[i];
    }
}

/*
 * Unpacks elements below 8 bits, first element in the lowest bits, to one per byte; `t->data` holds the packed ones at
 * its start.
 */
static void unpack(ont_tensor *t)
{
    int bits = ont_dtype_bits(t->dtype);
    uint8_t *data = t->data;
    /* from the end: bytes are read before they are overwritten */
    for (int64_t i = ont_shape_count(&t->shape) - 1; i >= 0; i--) {
        int64_t at = i * bits;
        int shift = (int)(at % 8), v = data[at / 8] >> shift;
        if (shift + bits > 8) v |= data[at / 8 + 1] << (8 - shift);
        v &= (1 << bits) - 1;
        if (ont_dtype_is_narrow_float(t->dtype))
            data[i] = (uint8_t)v;
        else
            ont_integer_put(data, t->dtype, i, v);
    }
}

static ont_status typed_data(const Onnx__TensorProto *proto, const char *what, ont_tensor *t)
{
    int64_t n = ont_shape_count(&t->shape);
    size_t have;
    const void *from;
    const char *field;
    switch (t->dtype) {
    case ONT_FLOAT32:
    case ONT_COMPLEX64:
        have = proto->n_float_data, from = proto->float_data, field = "float_data";
        break;
    case ONT_FLOAT64:
    case ONT_COMPLEX128:
        have = proto->n_double_data, from = proto->double_data, field = "double_data";
        break;
    case ONT_INT64: have = proto->n_int64_data, from = proto->int64_data, field = "int64_data"; break;
    case ONT_UINT32:
    case ONT_UINT64: have = proto->n_uint64_data, from = proto->uint64_data, field = "uint64_data"; break;
    default: have = proto->n_int32_data, from = proto->int32_data, field = "int32_data"; break;
    }
    if (ont_dtype_bits(t->dtype) < 6) n = (n * ont_dtype_bits(t->dtype) + 7) / 8;
    bool complex = t->dtype == ONT_COMPLEX64 || t->dtype == ONT_COMPLEX128;
    if (have != (size_t)n * (complex ? 2 : 1)) return wrong_count(what, field, have, complex ? 2 * n : n);
    if (t->dtype == ONT_UINT32)
        for (int64_t i = 0; i < n; i++) ((uint32_t *)t->data)[i] = (uint32_t)proto->uint64_data[i];
    else if (!strcmp(field, "int32_data"))
        narrow(proto->int32_data, n, ont_dtype_size(t->dtype), t->data);
    else if (t->bytes)
        memcpy(t->data, from, t->bytes);
    return ONT_OK;
}

ont_status ont_onnx_tensor(const Onnx__TensorProto *proto, const char *what, ont_arena *arena, ont_tensor *tensor)
{
    ont_tensor t = {0};
    if (proto->has_data_location && proto->data_location == ONNX__TENSOR_PROTO__DATA_LOCATION__EXTERNAL)
        return ont_fail(ONT_EUNSUPPORTED, "%s: external data is not read", what);
    if (proto->segment) return ont_fail(ONT_EUNSUPPORTED, "%s: segmented tensors are not read", what);
    ONT_TRY(ont_onnx_dtype(proto->has_data_type ? proto->data_type : 0, what, &t.dtype));
    ONT_TRY(tensor_shape(proto, what, &t.shape));
    ONT_TRY(ont_context(ont_shape_bytes(&t.shape, t.dtype, &t.bytes), "%s", what));
    /* The data are in the file, so a larger size is invalid; checked before anything is allocated. */
    bool packed = ont_dtype_bits(t.dtype) < 8;
    size_t bits = (size_t)ont_dtype_bits(t.dtype),
           stored = packed ? t.bytes / 8 * bits + (t.bytes % 8 * bits + 7) / 8 : t.bytes;
    if (proto->has_raw_data) {
        if (proto->raw_data.len != stored)
            return ont_fail(ONT_EINVAL, "%s: raw_data has %zu bytes, its dims ask for %zu", what, proto->raw_data.len,
                            stored);
    } else {
        size_t have = proto->n_float_data + proto->n_double_data + proto->n_int32_data + proto->n_int64_data +
                      proto->n_uint64_data;
        packed = packed && bits != 6; /* typed data have one 6-bit element per entry */
        int64_t count = packed ? (int64_t)stored : ont_shape_count(&t.shape);
        if (have < (size_t)count) return wrong_count(what, "its data", have, count);
    }
    t.data = ont_arena_alloc(arena, t.bytes ? t.bytes : 1);
    if (!t.data) return ONT_ENOMEM;
    if (!proto->has_raw_data)
        ONT_TRY(typed_data(proto, what, &t));
    else if (stored)
        memcpy(t.data, proto->raw_data.data, stored);
    if (packed) unpack(&t);
    if (t.dtype == ONT_BOOL) normalise_bools(&t);
    *tensor = t;
    return ONT_OK;
}
