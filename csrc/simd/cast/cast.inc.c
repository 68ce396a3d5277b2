/*
 * The loops of casts, compiled once per instruction set; ONT_ISA names it. See cast.h.
 */
#include "simd/cast/cast.h"

#include "base/number.h"
#include "simd/macros.h"

/* ont_f64_to_i32() and ont_f64_to_i64() in the float's own type, written out so that the compiler vectorises them. */
#define LOW_32(to, v) (to)((v) >= -0x1p31f && (v) < 0x1p31f ? (int32_t)(v) : INT32_MIN)
#define LOW_64(to, v) (to)((v) >= -0x1p63f && (v) < 0x1p63f ? (int64_t)(v) : INT64_MIN)
#define FROM_FLOAT(to, v) \
    _Generic((to)0, float: (to)(v), double: (to)(v), bool: (to)(v), uint64_t: (to)ont_f64_to_u64((double)(v)), \
             uint32_t: LOW_64(to, v), uint8_t: LOW_64(to, v), int64_t: LOW_64(to, v), default: LOW_32(to, v))
#define CONVERT(to, v) _Generic((v), float: FROM_FLOAT(to, v), double: FROM_FLOAT(to, v), default: (to)(v))

#define LOOP(to_name, to, from_name, from) \
    static void from_name##_to_##to_name(const void *x, void *y, int64_t n) \
    { \
        const from *restrict in = x; \
        to *restrict out = y; \
        for (int64_t i = 0; i < n; i++) out[i] = CONVERT(to, in[i]); \
    }
#define EACH_FROM(X, to_name, to) \
    X(to_name, to, FLOAT32, float) X(to_name, to, FLOAT64, double) X(to_name, to, INT64, int64_t) \
    X(to_name, to, INT32, int32_t) X(to_name, to, INT16, int16_t) X(to_name, to, INT8, int8_t) \
    X(to_name, to, UINT64, uint64_t) X(to_name, to, UINT32, uint32_t) X(to_name, to, UINT16, uint16_t) \
    X(to_name, to, UINT8, uint8_t) X(to_name, to, BOOL, bool)
EACH_FROM(LOOP, FLOAT32, float)
EACH_FROM(LOOP, FLOAT64, double)
EACH_FROM(LOOP, INT64, int64_t)
EACH_FROM(LOOP, INT32, int32_t)
EACH_FROM(LOOP, INT16, int16_t)
EACH_FROM(LOOP, INT8, int8_t)
EACH_FROM(LOOP, UINT64, uint64_t)
EACH_FROM(LOOP, UINT32, uint32_t)
EACH_FROM(LOOP, UINT16, uint16_t)
EACH_FROM(LOOP, UINT8, uint8_t)
EACH_FROM(LOOP, BOOL, bool)

#define ENTRY(to_name, to, from_name, from) [ONT_##from_name] = from_name##_to_##to_name,
#define ROW(to_name) [ONT_##to_name] = {EACH_FROM(ENTRY, to_name, )}
const ont_cast_loops PASTE(ont_cast_loops_, ONT_ISA)[ONT_DTYPE_COUNT] = {
    ROW(FLOAT32), ROW(FLOAT64), ROW(INT64),  ROW(INT32), ROW(INT16), ROW(INT8),
    ROW(UINT64),  ROW(UINT32),  ROW(UINT16), ROW(UINT8), ROW(BOOL),
};
