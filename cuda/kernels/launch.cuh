/*
 * Included first by every kernel file: CUDA, or its emulation on the host; the launch macro; 16-bit floats; and reports
 * of invalid values. Kernels use nothing of CUDA that is not named here or in emulate/emulate.h.
 */
#ifndef ONT_CUDA_LAUNCH_CUH
#define ONT_CUDA_LAUNCH_CUH

#ifdef ONT_EMULATE
#include "emulate/emulate.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#define ONT_SHARED(type, name) \
    extern __shared__ __align__(16) unsigned char ont_shared_bytes[]; \
    type *name = reinterpret_cast<type *>(ont_shared_bytes)
#define ONT_LAUNCH(kernel, grid, block, shared, stream, ...) \
    (kernel<<<(grid), (block), (shared), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__), \
     static_cast<int>(cudaGetLastError())) /* clears the error, so that no later call finds it */
/* Called before a launch with more than 48 KiB of shared memory; 0, or an error. It is cheap, and allowed during a
 * graph capture. */
#define ONT_ALLOW_SHARED(kernel, bytes) \
    ((bytes) <= 49152 ? 0 : static_cast<int>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, \
                                                                  static_cast<int>(bytes))))
static inline size_t ont_shared_limit()
{
    int device = 0, bytes = 49152;
    if (cudaGetDevice(&device) == cudaSuccess)
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return (size_t)bytes;
}
#endif

#include "device/device.h"

#ifdef ONT_EMULATE
#define ONT_UNROLL
#else
#define ONT_UNROLL _Pragma("unroll")
#endif
#define ONT_DEVICE static __device__ __forceinline__

/* ---- 16-bit floats: storage alone; arithmetic is in float ---- */

struct ont_f16 {
    uint16_t bits;
};
struct ont_bf16 {
    uint16_t bits;
};

#ifdef ONT_EMULATE
static inline float ont_f16_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023, bits;
    if (exponent == 31)
        bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else {
        float value = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline uint16_t ont_float_to_f16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* from half-way above the largest number on */
    if (rest < 0x38800000) { /* denormal: rint rounds to even */
        float value;
        memcpy(&value, &rest, 4);
        return (uint16_t)(sign | (uint32_t)rintf(value * 0x1p24f));
    }
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | ((rest - 0x38000000) >> 13));
}
static inline uint16_t ont_float_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
/* One instruction from compute capability 8.0 on. Of NaN it makes 0x7fff. */
ONT_DEVICE float ont_f16_to_float(uint16_t h) { return __half2float(__ushort_as_half(h)); }
ONT_DEVICE uint16_t ont_float_to_f16(float x) { return __half_as_ushort(__float2half_rn(x)); }
ONT_DEVICE uint16_t ont_float_to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
#endif

ONT_DEVICE float ont_bf16_to_float(uint16_t h) { return __int_as_float((int)((uint32_t)h << 16)); }

/* Conversion between storage and the type of the arithmetic. */
template <class T> struct ont_compute { typedef T type; };
template <> struct ont_compute<ont_f16> { typedef float type; };
template <> struct ont_compute<ont_bf16> { typedef float type; };
ONT_DEVICE float ont_load(const float *p) { return *p; }
ONT_DEVICE double ont_load(const double *p) { return *p; }
ONT_DEVICE float ont_load(const ont_f16 *p) { return ont_f16_to_float(p->bits); }
ONT_DEVICE float ont_load(const ont_bf16 *p) { return ont_bf16_to_float(p->bits); }
ONT_DEVICE void ont_store(float *p, float v) { *p = v; }
ONT_DEVICE void ont_store(double *p, double v) { *p = v; }
ONT_DEVICE void ont_store(ont_f16 *p, float v) { p->bits = ont_float_to_f16(v); }
ONT_DEVICE void ont_store(ont_bf16 *p, float v) { p->bits = ont_float_to_bf16(v); }

/* ---- exponentials ---- */

/* 2 to the power of a, by one instruction: with a relative error of about 2^-22, and 0 below 2^-126. */
ONT_DEVICE float ont_exp2(float a)
{
#ifdef ONT_EMULATE
    return exp2f(a);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
    return y;
#endif
}

/* ---- sizes of launches ---- */

enum { ONT_THREADS = 256, ONT_MAX_BLOCKS = 65535 * 16 };

static inline unsigned ont_blocks(int64_t n, int64_t per_block)
{
    int64_t blocks = (n + per_block - 1) / per_block;
    const int64_t limit = ONT_MAX_BLOCKS;
    return (unsigned)(blocks < 1 ? 1 : blocks > limit ? limit : blocks);
}

/* Grid-stride loop: `i` runs over [0, n) for any grid. */
#define ONT_FOR(i, n) \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (int64_t)gridDim.x * blockDim.x)

/* ---- sums and maxima over a warp, over a block ---- */

template <class T> ONT_DEVICE T ont_warp_sum(T v)
{
    for (int lanes = 16; lanes; lanes >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lanes);
    return v;
}
template <class T> ONT_DEVICE T ont_larger(T a, T b) { return a > b || a != a ? a : b; }
template <class T> ONT_DEVICE T ont_warp_max(T v)
{
    for (int lanes = 16; lanes; lanes >>= 1) v = ont_larger(v, __shfl_xor_sync(0xffffffffu, v, lanes));
    return v;
}
/* All threads get the result. blockDim.x is a multiple of 32; `scratch` has 32 entries. Begins and ends with a
 * barrier. */
template <class T> ONT_DEVICE T ont_block_sum(T v, T *scratch)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    v = ont_warp_sum(v);
    __syncthreads();
    if (!lane) scratch[warp] = v;
    __syncthreads();
    T sum = 0;
    for (int w = 0; w < warps; w++) sum += scratch[w]; /* in order, so that every thread gets the same bits */
    return sum;
}
template <class T> ONT_DEVICE T ont_block_max(T v, T *scratch)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    v = ont_warp_max(v);
    __syncthreads();
    if (!lane) scratch[warp] = v;
    __syncthreads();
    T max_value = scratch[0];
    for (int w = 1; w < warps; w++) max_value = ont_larger(max_value, scratch[w]);
    return max_value;
}

ONT_DEVICE int ont_count_bits(unsigned v)
{
    int n = 0;
    for (; v; v &= v - 1) n++;
    return n;
}

/* Threads for a row of n: a multiple of 32, at most 256 (in the emulation 64, for the duration of tests). */
static inline unsigned ont_row_threads(int64_t n)
{
#ifdef ONT_EMULATE
    return n <= 32 ? 32 : 64;
#else
    return n <= 32 ? 32 : n <= 128 ? 64 : n <= 512 ? 128 : 256;
#endif
}

/* ---- invalid values ---- */

ONT_DEVICE void ont_report(ont_fault *fault, int32_t code, int32_t step, int64_t value, int64_t position, int64_t limit)
{
    if (!fault || atomicCAS((int *)&fault->code, 0, -1) != 0) return; /* -1 while the other fields are written */
    fault->step = step;
    fault->value = value;
    fault->position = position;
    fault->limit = limit;
    __threadfence_system();
    atomicExch((int *)&fault->code, (int)code);
}

#endif
