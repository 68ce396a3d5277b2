/*
 * NonZero in two operators: CountNonZero, whose result gives the shape, and NonZeroOf, the coordinates in order of the
 * elements. Both count the elements of each tile first; a scan of these counts says where each tile writes. CountRows
 * and SelectRows (csrc/ops/index/rows.h) are the same of a vector of marks.
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

/*
 * Calls visit(i, here, at) for each element i of a tile: whether it is not zero, and how many in front of it are not.
 * `start` are in front of the tile; returns how many are up to its end. Every thread of the block calls it.
 */
template <class T, class F>
ONT_DEVICE int64_t visit_tile(const ont_nonzero &s, const T *x, int64_t tile, int64_t start, const F &visit)
{
    __shared__ int32_t in_warps[ONT_THREADS / 32];
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
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
        if (i < s.n) visit(i, here, at);
        __syncthreads();
    }
    return start;
}

/* out (rank, found). Another number of elements than were counted is reported. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    coordinates_kernel(const ont_nonzero s, const nonzero_dims dims, const T *x, const int32_t *starts, int64_t *out)
{
    for (int64_t tile = blockIdx.x; tile * TILE < s.n; tile += gridDim.x) {
        const int64_t end = visit_tile(s, x, tile, starts[tile], [&](int64_t i, bool here, int64_t at) {
            if (here && at < s.found) write_coordinates(s, dims, (uint32_t)i, out + at);
        });
        const bool last = (tile + 1) * TILE >= s.n;
        if (last && !threadIdx.x && end != s.found) ont_report(s.fault, ONT_FAULT_COUNT, s.step, end, 0, s.found);
    }
}

/* rows (found), of which *total are written, and inverse (n), or NULL. More marks than `found` are reported. */
__global__ void __launch_bounds__(ONT_THREADS)
    select_rows_kernel(const ont_nonzero s, const uint8_t *marks, const int32_t *starts, int64_t *rows,
                       int64_t *inverse, int32_t *total)
{
    for (int64_t tile = blockIdx.x; tile * TILE < s.n; tile += gridDim.x) {
        const int64_t end = visit_tile(s, marks, tile, starts[tile], [&](int64_t i, bool here, int64_t at) {
            if (inverse) inverse[i] = here ? at : -1;
            if (here && at < s.found) rows[at] = i;
        });
        if ((tile + 1) * TILE < s.n || threadIdx.x) continue;
        *total = (int32_t)end;
        if (end > s.found) ont_report(s.fault, ONT_FAULT_COUNT, s.step, end, 0, s.found);
    }
}

/* The entries of `rows` behind the marked ones repeat the first, or are 0 where no row is marked. */
__global__ void __launch_bounds__(ONT_THREADS) spare_rows_kernel(int64_t count, const int32_t *total, int64_t *rows)
{
    const int64_t found = *total;
    ONT_FOR(i, count) {
        if (i >= found) rows[i] = found ? rows[0] : 0;
    }
}

/* One thread: a count of n rows, rounded up as ont_rows_bucket() does. */
__global__ void __launch_bounds__(1) round_count_kernel(uint32_t n, uint32_t step, int64_t *count)
{
    const uint32_t bucket = ((uint32_t)*count + step - 1) / step * step;
    *count = 10 * (uint64_t)bucket >= 9 * (uint64_t)n ? n : bucket ? bucket : 1;
}

extern "C" size_t ont_nonzero_work(const ont_nonzero *s) { return (size_t)(tiles_of(s) + 1) * sizeof(int32_t); }

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

/* What is in front of each tile. */
static int start_tiles(const ont_nonzero *s, const void *x, int32_t *starts, void *stream)
{
    ont_scan scan = {1, tiles_of(s), 1, 0, 1, 0, ONT_INT32}; /* exclusive sums */
    const int error = count_tiles(s, x, starts, stream);
    return error ? error : ont_launch_scan(&scan, starts, starts, stream);
}

extern "C" int ont_launch_nonzero(const ont_nonzero *s, const void *x, int64_t *out, void *work, void *stream)
{
    const unsigned blocks = ont_blocks(tiles_of(s), 1);
    nonzero_dims dims = {};
    for (int d = 0; d < s->rank; d++) dims.size[d] = divisor_of((uint32_t)s->dims[d]);
    if (!s->n) return 0;
    const int error = start_tiles(s, x, (int32_t *)work, stream);
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

extern "C" int ont_launch_count_rows(const ont_nonzero *s, int64_t step, const void *marks, int64_t *count, void *work,
                                     void *stream)
{
    const int error = ont_launch_count_nonzero(s, marks, count, work, stream);
    return error ? error : ONT_LAUNCH(round_count_kernel, 1, 1, 0, stream, (uint32_t)s->n, (uint32_t)step, count);
}

extern "C" int ont_launch_select_rows(const ont_nonzero *s, const void *marks, int64_t *rows, int64_t *inverse,
                                      void *work, void *stream)
{
    int32_t *starts = (int32_t *)work, *total = starts + tiles_of(s);
    if (!s->n) return 0;
    int error = start_tiles(s, marks, starts, stream);
    if (!error)
        error = ONT_LAUNCH(select_rows_kernel, ont_blocks(tiles_of(s), 1), ONT_THREADS, 0, stream, *s,
                           (const uint8_t *)marks, starts, rows, inverse, total);
    if (error) return error;
    return ONT_LAUNCH(spare_rows_kernel, ont_blocks(s->found, ONT_THREADS), ONT_THREADS, 0, stream, s->found, total,
                      rows);
}
