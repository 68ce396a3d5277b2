/*
 * NonZero in two operators: CountNonZero, whose result gives the shape, and NonZeroOf, the coordinates in order of the
 * elements. Both count the elements of each tile first; a scan of these counts says where each tile writes.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/units.cuh"

enum { TILE = 4 * ONT_THREADS };

struct nonzero_dims {
    divisor size[ONT_NONZERO_RANK];
};

static inline int64_t tiles_of(const ont_nonzero *s) { return (s->n + TILE - 1) / TILE; }

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) count_tiles_kernel(const ont_nonzero s, const T *x, int32_t *counts)
{
    __shared__ int32_t scratch[32];
    for (int64_t tile = blockIdx.x; tile * TILE < s.n; tile += gridDim.x) {
        int32_t count = 0;
        for (int64_t i = tile * TILE + threadIdx.x; i < s.n && i < (tile + 1) * TILE; i += blockDim.x)
            count += (x[i] & (T)s.mask) != 0;
        count = ont_block_sum(count, scratch);
        if (!threadIdx.x) counts[tile] = count;
    }
}

/* One block. */
__global__ void __launch_bounds__(ONT_THREADS) total_kernel(int64_t tiles, const int32_t *counts, int64_t *total)
{
    __shared__ int32_t scratch[32];
    int32_t sum = 0;
    for (int64_t i = threadIdx.x; i < tiles; i += blockDim.x) sum += counts[i];
    sum = ont_block_sum(sum, scratch);
    if (!threadIdx.x) *total = sum;
}

ONT_DEVICE void write_coordinates(const ont_nonzero &s, const nonzero_dims &dims, uint32_t i, int64_t *column)
{
    for (int d = s.rank - 1; d >= 0; d--) column[d * s.found] = split(&i, dims.size[d]);
}

/* out (rank, found). Another number of elements than were counted is reported. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    coordinates_kernel(const ont_nonzero s, const nonzero_dims dims, const T *x, const int32_t *starts, int64_t *out)
{
    __shared__ int32_t in_warps[ONT_THREADS / 32];
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    for (int64_t tile = blockIdx.x; tile * TILE < s.n; tile += gridDim.x) {
        int64_t start = starts[tile];
        for (int64_t first = tile * TILE; first < s.n && first < (tile + 1) * TILE; first += blockDim.x) {
            const int64_t i = first + threadIdx.x;
            const bool here = i < s.n && (x[i] & (T)s.mask) != 0;
            const unsigned set = __ballot_sync(0xffffffffu, here);
            if (!lane) in_warps[warp] = ont_count_bits(set);
            __syncthreads();
            int64_t at = start + ont_count_bits(set & ((1u << lane) - 1));
            for (int w = 0; w < warps; w++) {
                if (w < warp) at += in_warps[w];
                start += in_warps[w];
            }
            if (here && at < s.found) write_coordinates(s, dims, (uint32_t)i, out + at);
            __syncthreads();
        }
        const bool last = (tile + 1) * TILE >= s.n;
        if (last && !threadIdx.x && start != s.found) ont_report(s.fault, ONT_FAULT_COUNT, s.step, start, 0, s.found);
    }
}

extern "C" size_t ont_nonzero_work(const ont_nonzero *s) { return (size_t)tiles_of(s) * sizeof(int32_t); }

static int count_tiles(const ont_nonzero *s, const void *x, int32_t *counts, void *stream)
{
    const unsigned blocks = ont_blocks(tiles_of(s), 1);
#define COUNT(type) ONT_LAUNCH(count_tiles_kernel<type>, blocks, ONT_THREADS, 0, stream, *s, (const type *)x, counts)
    if (!s->n) return 0;
    switch (s->size) {
    case 1: return COUNT(uint8_t);
    case 2: return COUNT(uint16_t);
    case 4: return COUNT(uint32_t);
    default: return COUNT(uint64_t);
    }
#undef COUNT
}

extern "C" int ont_launch_count_nonzero(const ont_nonzero *s, const void *x, int64_t *total, void *work, void *stream)
{
    const int error = count_tiles(s, x, (int32_t *)work, stream);
    if (error) return error;
    return ONT_LAUNCH(total_kernel, 1, ONT_THREADS, 0, stream, tiles_of(s), (const int32_t *)work, total);
}

extern "C" int ont_launch_nonzero(const ont_nonzero *s, const void *x, int64_t *out, void *work, void *stream)
{
    const unsigned blocks = ont_blocks(tiles_of(s), 1);
    ont_scan scan = {1, tiles_of(s), 1, 0, 1, 0, ONT_INT32}; /* exclusive sums */
    nonzero_dims dims = {};
    for (int d = 0; d < s->rank; d++) dims.size[d] = divisor_of((uint32_t)s->dims[d]);
    if (!s->n) return 0;
    int error = count_tiles(s, x, (int32_t *)work, stream);
    if (!error) error = ont_launch_scan(&scan, work, work, stream);
    if (error) return error;
#define RUN(type) \
    ONT_LAUNCH(coordinates_kernel<type>, blocks, ONT_THREADS, 0, stream, *s, dims, (const type *)x, \
               (const int32_t *)work, out)
    switch (s->size) {
    case 1: return RUN(uint8_t);
    case 2: return RUN(uint16_t);
    case 4: return RUN(uint32_t);
    default: return RUN(uint64_t);
    }
#undef RUN
}
