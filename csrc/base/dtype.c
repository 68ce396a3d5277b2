/*
 * Expansions of ONT_DTYPE_LIST.
 */
#include "base/dtype.h"

static const struct {
    const char *name;
    uint8_t bytes, dlcode, dlbits;
} table[ONT_DTYPE_COUNT] = {
#define X(name, number, bytes, text, dlcode, dlbits) [number] = {text, bytes, dlcode, dlbits},
    ONT_DTYPE_LIST(X)
#undef X
};

size_t ont_dtype_size(ont_dtype dtype)
{
    return (unsigned)dtype < ONT_DTYPE_COUNT ? table[dtype].bytes : 0;
}

int ont_dtype_bits(ont_dtype dtype)
{
    return dtype == ONT_UINT4 || dtype == ONT_INT4 || dtype == ONT_FLOAT4E2M1 ? 4
           : dtype == ONT_UINT2 || dtype == ONT_INT2 ? 2
           : dtype == ONT_FLOAT6E2M3 || dtype == ONT_FLOAT6E3M2 ? 6 : 8 * (int)ont_dtype_size(dtype);
}

const char *ont_dtype_name(ont_dtype dtype)
{
    return (unsigned)dtype < ONT_DTYPE_COUNT ? table[dtype].name : "?";
}

bool ont_dtype_is_float(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 || dtype == ONT_FLOAT16 || dtype == ONT_BFLOAT16;
}

bool ont_dtype_is_int(ont_dtype dtype)
{
    return (dtype >= ONT_UINT8 && dtype <= ONT_INT64) || dtype == ONT_UINT32 || dtype == ONT_UINT64;
}

bool ont_dtype_is_narrow_float(ont_dtype dtype)
{
    return ont_dtype_is_narrow(dtype) && dtype != ONT_UINT4 && dtype != ONT_INT4 && dtype != ONT_UINT2 &&
           dtype != ONT_INT2;
}

bool ont_dtype_is_narrow(ont_dtype dtype)
{
    return dtype >= ONT_FLOAT8E4M3FN && dtype <= ONT_FLOAT6E3M2;
}

ont_dtype ont_dtype_carrier(ont_dtype dtype)
{
    return dtype == ONT_INT4 || dtype == ONT_INT2 ? ONT_INT8
           : dtype >= ONT_UINT4 && dtype != ONT_FLOAT8E8M0 && ont_dtype_is_narrow(dtype) ? ONT_UINT8 : dtype;
}

bool ont_dtype_from_dlpack(uint8_t code, uint8_t bits, ont_dtype *dtype)
{
    for (unsigned i = 1; i < ONT_DTYPE_COUNT; i++) {
        if (table[i].bytes && table[i].dlcode == code && table[i].dlbits == bits) {
            *dtype = (ont_dtype)i;
            return true;
        }
    }
    return false;
}

void ont_dtype_to_dlpack(ont_dtype dtype, uint8_t *code, uint8_t *bits)
{
    dtype = ont_dtype_carrier(dtype);
    *code = table[dtype].dlcode;
    *bits = table[dtype].dlbits;
}
