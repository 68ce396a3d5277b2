/*
 * Element types: one list of ONNX number, size and names, from which everything else is expanded.
 */
#ifndef ONT_BASE_DTYPE_H
#define ONT_BASE_DTYPE_H

#include "base/status.h"

/* name, number in ONNX's TensorProto.DataType, bytes, torch/ONNX-text name, DLPack code, DLPack bits */
#define ONT_DTYPE_LIST(X) \
    X(UNDEFINED, 0, 0, "undefined", 255, 0) \
    X(FLOAT32, 1, 4, "float", 2, 32) \
    X(UINT8, 2, 1, "uint8", 1, 8) \
    X(INT8, 3, 1, "int8", 0, 8) \
    X(UINT16, 4, 2, "uint16", 1, 16) \
    X(INT16, 5, 2, "int16", 0, 16) \
    X(INT32, 6, 4, "int32", 0, 32) \
    X(INT64, 7, 8, "int64", 0, 64) \
    X(STRING, 8, 0, "string", 255, 0) \
    X(BOOL, 9, 1, "bool", 6, 8) \
    X(FLOAT16, 10, 2, "float16", 2, 16) \
    X(FLOAT64, 11, 8, "double", 2, 64) \
    X(UINT32, 12, 4, "uint32", 1, 32) \
    X(UINT64, 13, 8, "uint64", 1, 64) \
    X(COMPLEX64, 14, 8, "complex64", 5, 64) \
    X(COMPLEX128, 15, 16, "complex128", 5, 128) \
    X(BFLOAT16, 16, 2, "bfloat16", 4, 16) \
    X(FLOAT8E4M3FN, 17, 1, "float8e4m3fn", 10, 8) \
    X(FLOAT8E4M3FNUZ, 18, 1, "float8e4m3fnuz", 11, 8) \
    X(FLOAT8E5M2, 19, 1, "float8e5m2", 12, 8) \
    X(FLOAT8E5M2FNUZ, 20, 1, "float8e5m2fnuz", 13, 8) \
    X(UINT4, 21, 1, "uint4", 255, 4) \
    X(INT4, 22, 1, "int4", 255, 4) \
    X(FLOAT4E2M1, 23, 1, "float4e2m1", 255, 4) \
    X(FLOAT8E8M0, 24, 1, "float8e8m0", 14, 8) \
    X(UINT2, 25, 1, "uint2", 255, 2) \
    X(INT2, 26, 1, "int2", 255, 2) \
    X(FLOAT6E2M3, 27, 1, "float6e2m3", 255, 6) \
    X(FLOAT6E3M2, 28, 1, "float6e3m2", 255, 6)

typedef enum ont_dtype {
#define X(name, number, bytes, text, dlcode, dlbits) ONT_##name = number,
    ONT_DTYPE_LIST(X)
#undef X
    ONT_DTYPE_COUNT = 29
} ont_dtype;

size_t ont_dtype_size(ont_dtype dtype);      /* bytes; 0 for undefined and string */
const char *ont_dtype_name(ont_dtype dtype); /* "float", "int64", ...; "?" for an unknown dtype */
/* bits of an element in a file, where 6, 4 and 2 bits are packed; not packed in memory */
int ont_dtype_bits(ont_dtype dtype);
static inline bool ont_dtype_is_half(ont_dtype dtype) { return dtype == ONT_BFLOAT16 || dtype == ONT_FLOAT16; }
bool ont_dtype_is_float(ont_dtype dtype);    /* float16, bfloat16, float32, float64: dtypes with gradients */
bool ont_dtype_is_int(ont_dtype dtype);      /* signed or unsigned integer, bool excluded */
bool ont_dtype_is_narrow_float(ont_dtype dtype);
/* float8, float6, float4, int4, int2: storage formats, one element per byte, without arithmetic */
bool ont_dtype_is_narrow(ont_dtype dtype);
ont_dtype ont_dtype_carrier(ont_dtype dtype); /* the dtype used for it in DLPack: int8 or uint8 below 8 bits */
bool ont_dtype_from_dlpack(uint8_t code, uint8_t bits, ont_dtype *dtype);
void ont_dtype_to_dlpack(ont_dtype dtype, uint8_t *code, uint8_t *bits);

#endif
