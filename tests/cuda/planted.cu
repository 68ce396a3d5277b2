/*
 * Kernels with and without a fault, for the tests of the emulation: a data race, of which each has the barrier that it
 * needs, or lacks it; an access that is not aligned; a read of shared memory that was not written. ont_planted runs one
 * of them and returns what the launch reported, or "".
 */
#include "kernels/mma.cuh"

#include <stdlib.h>

enum { BLOCKS = 4, N = 64, PART = 4 * N }; /* PART: of the output, a block's */

template <bool FINE> __global__ void write_then_read(float *out)
{
    out += blockIdx.x * PART;
    __shared__ float values[N];
    int t = (int)threadIdx.x;
    values[t] = (float)t;
    if (FINE) __syncthreads();
    out[t] = values[N - 1 - t];
}

/* The second round overwrites what the first still reads. */
template <bool FINE> __global__ void read_then_write(float *out)
{
    out += blockIdx.x * PART;
    ONT_SHARED(float, values);
    int t = (int)threadIdx.x;
    for (int round = 0; round < 2; round++) {
        values[t] = (float)(t + round);
        __syncthreads();
        out[t] = values[N - 1 - t];
        if (FINE) __syncthreads();
    }
}

/* Without the barrier at its begin, ont_block_sum would have this race at its second call. */
template <bool FINE> __global__ void two_sums(float *out)
{
    out += blockIdx.x * PART;
    __shared__ float sums[2];
    for (int round = 0; round < 2; round++) {
        float sum = ont_warp_sum(1.0f);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        out[threadIdx.x] = sums[0] + sums[1];
        if (FINE) __syncthreads();
    }
}

template <bool FINE> __global__ void within_a_warp(float *out)
{
    out += blockIdx.x * PART;
    __shared__ float values[N];
    int t = (int)threadIdx.x;
    values[t] = (float)t;
    if (FINE) __syncwarp();
    out[t] = values[t ^ 1];
}

/* A shuffle orders no memory. */
template <bool FINE> __global__ void shuffle_as_barrier(float *out)
{
    out += blockIdx.x * PART;
    __shared__ float values[N];
    int t = (int)threadIdx.x;
    values[t] = (float)t;
    if (FINE) __syncwarp();
    float other = __shfl_xor_sync(0xffffffffu, 1.0f, 16);
    out[t] = values[t ^ 1] + other;
}

/* A warp's barrier orders its own lanes, and of them those in the mask. */
template <bool FINE> __global__ void barrier_of_a_part(float *out)
{
    out += blockIdx.x * PART;
    __shared__ float values[N];
    int t = (int)threadIdx.x;
    values[t] = (float)t;
    __syncwarp(t % 32 < 16 ? 0x0000ffffu : 0xffff0000u);
    out[t] = values[t ^ (FINE ? 15 : 31)];
}

template <bool FINE> __global__ void warp_barrier_between_warps(float *out)
{
    out += blockIdx.x * PART;
    __shared__ float values[N];
    int t = (int)threadIdx.x;
    values[t] = (float)t;
    __syncwarp();
    out[t] = values[t ^ (FINE ? 31 : 32)];
}

template <bool FINE> __global__ void between_blocks(float *out)
{
    if (threadIdx.x == 0) out[FINE ? blockIdx.x : blockIdx.x / 2] = 1;
}

template <bool FINE> __global__ void blocks_that_read(float *out)
{
    float *at = out + (FINE ? blockIdx.x * PART : 0) + threadIdx.x, before = *at;
    out[blockIdx.x * PART + N + threadIdx.x] = before;
    if (FINE || blockIdx.x == 2) *at = before + 1;
}

template <bool FINE> __global__ void atomic_and_plain(float *out)
{
    out += blockIdx.x * PART;
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    if (FINE) __syncthreads();
    if (threadIdx.x == 40) out[0] = (float)count;
}

/* Neighbours of a byte are other locations. */
template <bool FINE> __global__ void bytes(float *out)
{
    ((unsigned char *)(out + blockIdx.x * PART))[threadIdx.x / (FINE ? 1 : 2)] = 1;
}

template <bool FINE> __global__ void copies_of_16_bytes(float *out)
{
    out += blockIdx.x * PART;
    __shared__ float values[4 * N];
    int t = (int)threadIdx.x;
    for (int k = 0; k < 4; k++) values[4 * t + k] = (float)k;
    if (FINE) __syncthreads();
    memcpy(out + 4 * t, values + 4 * (N - 1 - t), 16);
}

/* A copy of cp.async is read behind a barrier; the threads of the kernel with the fault wait for it afterwards. */
template <bool FINE> __global__ void a_copy_under_way(float *out)
{
    out += blockIdx.x * PART;
    ONT_SHARED(float, values);
    int t = (int)threadIdx.x;
    if (t % 4 == 0) ont_copy16_async(values + t, out + N + t, true);
    if (FINE) ont_copy_wait();
    __syncthreads();
    out[t] = values[t];
    ont_copy_wait();
}

/* A copy overwrites what other threads still read. */
template <bool FINE> __global__ void a_copy_too_early(float *out)
{
    out += blockIdx.x * PART;
    ONT_SHARED(float, values);
    int t = (int)threadIdx.x;
    values[t] = 1;
    __syncthreads();
    out[t] = values[N - 1 - t];
    if (FINE) __syncthreads();
    if (t % 4 == 0) ont_copy16_async(values + t, out + N + t, true);
    ont_copy_wait();
}

/* ---- other faults ---- */

struct __align__(16) four {
    float v[4];
};

template <bool FINE> __global__ void a_vector(float *out)
{
    four *at = (four *)(void *)(out + blockIdx.x * PART + (FINE ? 0 : 2)); /* out is at a multiple of 16 */
    if (threadIdx.x == 0) *at = four{{1, 2, 3, 4}};
}

template <bool FINE> __global__ void a_number(float *out)
{
    if (threadIdx.x == 0) *(double *)(void *)(out + blockIdx.x * PART + (FINE ? 2 : 1)) = 1;
}

/* What the block before has left, or the launch before. */
template <bool FINE> __global__ void an_array(float *out)
{
    out += blockIdx.x * PART;
    __shared__ float values[N];
    int t = (int)threadIdx.x;
    if (FINE || t % 2) values[t] = (float)t;
    __syncthreads();
    out[t] = values[N - 1 - t];
}

template <bool FINE> __global__ void shared_memory(float *out)
{
    out += blockIdx.x * PART;
    ONT_SHARED(float, values);
    int t = (int)threadIdx.x;
    if (FINE || t != 7) values[t] = (float)t;
    out[t] = values[t];
}

template <bool FINE> __global__ void a_count(float *out)
{
    out += blockIdx.x * PART;
    __shared__ int count;
    if (FINE && threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = (float)count;
}

template <bool FINE> __global__ void a_copy_without_wait(float *out)
{
    ONT_SHARED(float, values);
    if (threadIdx.x == 0) ont_copy16_async(values, nullptr, false);
    if (FINE) ont_copy_wait();
    out[blockIdx.x * PART + threadIdx.x] = 1;
}

#define OTHERS(X) X(a_vector) X(a_number) X(an_array) X(shared_memory) X(a_count) X(a_copy_without_wait)

#define PLANTED(X) \
    X(write_then_read) X(read_then_write) X(two_sums) X(within_a_warp) X(shuffle_as_barrier) X(barrier_of_a_part) \
    X(warp_barrier_between_warps) X(between_blocks) X(blocks_that_read) X(atomic_and_plain) X(bytes) \
    X(copies_of_16_bytes) X(a_copy_under_way) X(a_copy_too_early)

extern "C" __attribute__((visibility("default"))) const char *ont_planted(const char *name, int fine)
{
    static float *out = (float *)aligned_alloc(16, BLOCKS * PART * sizeof *out);
    int error = -1;
    memset(out, 0, BLOCKS * PART * sizeof *out);
#define RUN(kernel) \
    if (!strcmp(name, #kernel)) \
        error = fine ? ONT_LAUNCH(kernel<true>, BLOCKS, N, N * sizeof(float), nullptr, out) \
                     : ONT_LAUNCH(kernel<false>, BLOCKS, N, N * sizeof(float), nullptr, out);
    PLANTED(RUN)
    OTHERS(RUN)
    return error < 0 ? "no such kernel" : error ? ont_emulate_error() : "";
}

#define NAME(kernel) #kernel " "
extern "C" __attribute__((visibility("default"))) const char *ont_planted_names(void)
{
    return PLANTED(NAME);
}

extern "C" __attribute__((visibility("default"))) const char *ont_planted_others(void)
{
    return OTHERS(NAME);
}
