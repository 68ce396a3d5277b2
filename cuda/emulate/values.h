/*
 * For the emulated libraries: elements of any float dtype as double, and work that is recorded instead of executed.
 */
#ifndef ONT_EMULATE_VALUES_H
#define ONT_EMULATE_VALUES_H

#include <string.h>

#include "core_shim.h"

bool ont_emulate_recording(void);
int ont_emulate_record(int (*work)(void *), void *context, void (*forget)(void *));

static inline double ont_emulate_get(ont_dtype dtype, const void *data, int64_t i)
{
    uint32_t bits;
    float x;
    _Float16 half;
    switch (dtype) {
    case ONT_FLOAT32: return (double)((const float *)data)[i];
    case ONT_FLOAT64: return ((const double *)data)[i];
    case ONT_FLOAT16: memcpy(&half, (const uint16_t *)data + i, 2); return (double)half;
    default:
        bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        memcpy(&x, &bits, 4);
        return (double)x;
    }
}

/* To the digits that tensor cores read of float32. */
static inline double ont_emulate_round_to_tf32(double value)
{
    float x = (float)value;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0x1000u) & ~0x1fffu;
    memcpy(&x, &bits, 4);
    return (double)x;
}

static inline void ont_emulate_put(ont_dtype dtype, void *data, int64_t i, double value)
{
    float single = (float)value;
    uint32_t bits;
    _Float16 half = (_Float16)single;
    memcpy(&bits, &single, 4);
    switch (dtype) {
    case ONT_FLOAT32: ((float *)data)[i] = single; break;
    case ONT_FLOAT64: ((double *)data)[i] = value; break;
    case ONT_FLOAT16: memcpy((uint16_t *)data + i, &half, 2); break;
    default: ((uint16_t *)data)[i] = single != single ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

#endif
