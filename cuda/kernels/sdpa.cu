/*
 * Row statistics of attention in the forms of the own kernels and of cuDNN, and the difference of two tensors by row.
 */
#include "kernels/launch.cuh"

#include "kernels/sdpa.h"

__global__ void __launch_bounds__(ONT_THREADS) stats_to_lse_kernel(const float *stats, float *lse, int64_t n)
{
    ONT_FOR(i, n) lse[i] = stats[2 * i] + logf(stats[2 * i + 1]);
}

__global__ void __launch_bounds__(ONT_THREADS) lse_to_stats_kernel(const float *lse, float *stats, int64_t n)
{
    ONT_FOR(i, n)
    {
        stats[2 * i] = lse[i];
        stats[2 * i + 1] = 1;
    }
}

enum { THREADS = 128, WARPS = 4 };

/* A warp takes a row. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    row_differences_kernel(const T *got, const T *want, float *differences, int64_t rows, int64_t n)
{
    int lane = (int)threadIdx.x & 31;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5); row < rows;
         row += (int64_t)gridDim.x * WARPS) {
        float difference = 0, size = 0;
        for (int64_t c = lane; c < n; c += 32) {
            float expected = ont_load(want + row * n + c), d = ont_load(got + row * n + c) - expected;
            difference += d * d;
            size += expected * expected;
        }
        difference = ont_warp_sum(difference);
        size = ont_warp_sum(size);
        if (lane) continue;
        differences[2 * row] = difference;
        differences[2 * row + 1] = size;
    }
}

/* ---- launchers ---- */

extern "C" int ont_launch_stats_to_lse(const float *stats, float *lse, int64_t n, void *stream)
{
    return ONT_LAUNCH(stats_to_lse_kernel, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, stats, lse, n);
}

extern "C" int ont_launch_lse_to_stats(const float *lse, float *stats, int64_t n, void *stream)
{
    return ONT_LAUNCH(lse_to_stats_kernel, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, lse, stats, n);
}

template <class T>
static int row_differences(const void *got, const void *want, float *differences, int64_t rows, int64_t n, void *stream)
{
    return ONT_LAUNCH(row_differences_kernel<T>, ont_blocks(rows, WARPS), THREADS, 0, stream, (const T *)got,
                      (const T *)want, differences, rows, n);
}

extern "C" int ont_launch_row_differences(int dtype, const void *got, const void *want, float *differences,
                                          int64_t rows, int64_t n, void *stream)
{
    switch (dtype) {
    case ONT_FLOAT32: return row_differences<float>(got, want, differences, rows, n, stream);
    case ONT_FLOAT16: return row_differences<ont_f16>(got, want, differences, rows, n, stream);
    default: return row_differences<ont_bf16>(got, want, differences, rows, n, stream);
    }
}
