/*
 * Keys by which elements are sorted and selected.
 */
#ifndef ONT_CUDA_ORDER_CUH
#define ONT_CUDA_ORDER_CUH

#include "kernels/launch.cuh"

/* Unsigned numbers in the order of the elements; both zeros have one, and NaN the largest. */
ONT_DEVICE uint64_t ascending(uint64_t v) { return v; }
ONT_DEVICE uint64_t ascending(int64_t v) { return (uint64_t)v ^ UINT64_C(1) << 63; }
ONT_DEVICE uint32_t ascending(uint32_t v) { return v; }
ONT_DEVICE uint32_t ascending(int32_t v) { return (uint32_t)v ^ UINT32_C(1) << 31; }
ONT_DEVICE uint32_t ascending(float v)
{
    uint32_t bits;
    if (v == 0) v = 0;
    memcpy(&bits, &v, sizeof bits);
    return v != v ? ~UINT32_C(0) : bits >> 31 ? ~bits : bits | UINT32_C(1) << 31;
}
ONT_DEVICE uint64_t ascending(double v)
{
    uint64_t bits;
    if (v == 0) v = 0;
    memcpy(&bits, &v, sizeof bits);
    return v != v ? ~UINT64_C(0) : bits >> 63 ? ~bits : bits | UINT64_C(1) << 63;
}

#endif
