/*
 * One element of any dtype in memory, as the bits that ont_cast() and ont_value() of math.cuh take.
 */
#ifndef ONT_CUDA_BITS_CUH
#define ONT_CUDA_BITS_CUH

ONT_DEVICE uint64_t ont_read_bits(const void *p, int64_t at, int size)
{
    switch (size) {
    case 1: return ((const uint8_t *)p)[at];
    case 2: return ((const uint16_t *)p)[at];
    case 4: return ((const uint32_t *)p)[at];
    default: return ((const uint64_t *)p)[at];
    }
}

ONT_DEVICE void ont_write_bits(void *p, int64_t at, int dtype, uint64_t v)
{
    switch (dtype) {
    case ONT_FLOAT64:
    case ONT_INT64:
    case ONT_UINT64: ((uint64_t *)p)[at] = v; break;
    case ONT_FLOAT32:
    case ONT_INT32:
    case ONT_UINT32: ((uint32_t *)p)[at] = (uint32_t)v; break;
    case ONT_INT8:
    case ONT_UINT8:
    case ONT_BOOL: ((uint8_t *)p)[at] = (uint8_t)v; break;
    default: ((uint16_t *)p)[at] = (uint16_t)v;
    }
}

#endif
