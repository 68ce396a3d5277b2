/*
 * The time that a library's algorithm takes, for base/autotune.h.
 */
#ifndef ONT_CUDA_TIMING_H
#define ONT_CUDA_TIMING_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

/* Milliseconds of three launches between two events, after a warm-up; negative where one fails. Synchronises. */
static inline double ont_cuda_time(int (*launch)(const void *call, int candidate), const void *call, int candidate,
                                   cudaStream_t stream)
{
    cudaEvent_t begin, end;
    float ms = -1;
    if (launch(call, candidate)) return -1;
    if (cudaEventCreate(&begin) != cudaSuccess) return -1;
    if (cudaEventCreate(&end) == cudaSuccess) {
        bool fine = cudaEventRecord(begin, stream) == cudaSuccess;
        for (int i = 0; i < 3; i++) fine = fine && !launch(call, candidate);
        fine = fine && cudaEventRecord(end, stream) == cudaSuccess && cudaEventSynchronize(end) == cudaSuccess;
        if (!fine || cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) ms = -1;
        cudaEventDestroy(end);
    }
    cudaEventDestroy(begin);
    return (double)ms;
}

#endif
