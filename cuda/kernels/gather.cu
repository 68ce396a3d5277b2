/*
 * Gather along an axis, and its gradient in a deterministic order: indices and their positions are sorted by a stable
 * radix sort; each run of equal indices is then one sum, in the order of positions.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

ONT_DEVICE int64_t raw_index(const ont_gather &g, const void *indices, int64_t i)
{
    return g.wide ? ((const int64_t *)indices)[i] : ((const int32_t *)indices)[i];
}

/* The index counted from the front; -1, and a reported fault, where it is out of range. */
ONT_DEVICE int64_t index_at(const ont_gather &g, const void *indices, int64_t i)
{
    int64_t given = raw_index(g, indices, i), v = given < 0 ? given + g.table : given;
    if (v >= 0 && v < g.table && (given >= 0 || g.from_end)) return v;
    ont_report(g.fault, ONT_FAULT_INDEX, g.step, given, i, g.table);
    return -1;
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    gather_kernel(const ont_gather g, const T *data, const void *indices, T *out)
{
    int64_t n = g.outer * g.count * g.inner;
    ONT_FOR(i, n) {
        int64_t column = i % g.inner, row = i / g.inner, o = row / g.count, v = index_at(g, indices, row % g.count);
        out[i] = v < 0 ? (T)0 : data[(o * g.table + v) * g.inner + column];
    }
}

template <class T>
static int launch_gather(const ont_gather *g, const void *data, const void *indices, void *out, void *stream)
{
    return ONT_LAUNCH(gather_kernel<T>, ont_blocks(g->outer * g->count * g->inner, ONT_THREADS), ONT_THREADS, 0, stream,
                      *g, (const T *)data, indices, (T *)out);
}

extern "C" int ont_launch_gather(const ont_gather *g, const void *data, const void *indices, void *out, void *stream)
{
    if (!g->outer || !g->count || !g->inner) return 0;
    switch (g->size) {
    case 1: return launch_gather<uint8_t>(g, data, indices, out, stream);
    case 2: return launch_gather<uint16_t>(g, data, indices, out, stream);
    case 4: return launch_gather<uint32_t>(g, data, indices, out, stream);
    default: return launch_gather<uint64_t>(g, data, indices, out, stream);
    }
}

/* ---- stable radix sort of (index, position): a warp for each tile of items, a pass for each byte of the key ---- */

enum { SORT_TILE = 512, DIGITS = 256, SCAN_THREADS = 256 };

struct pair {
    int32_t key, position;
};

__global__ void __launch_bounds__(ONT_THREADS) sort_load_kernel(const ont_gather g, const void *indices, pair *items)
{
    ONT_FOR(i, g.count) {
        int64_t v = index_at(g, indices, i);
        items[i].key = v < 0 ? (int32_t)g.table : (int32_t)v; /* indices out of range sort last, and are left out */
        items[i].position = (int32_t)i;
    }
}

/* counts (DIGITS, tiles) */
__global__ void __launch_bounds__(32)
    sort_count_kernel(const pair *items, int64_t n, int shift, int64_t tiles, int32_t *counts)
{
    __shared__ int32_t histogram[DIGITS];
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int d = (int)threadIdx.x; d < DIGITS; d += 32) histogram[d] = 0;
        __syncthreads();
        for (int64_t i = tile * SORT_TILE + threadIdx.x; i < n && i < (tile + 1) * SORT_TILE; i += 32)
            atomicAdd(&histogram[items[i].key >> shift & (DIGITS - 1)], 1);
        __syncthreads();
        for (int d = (int)threadIdx.x; d < DIGITS; d += 32) counts[d * tiles + tile] = histogram[d];
        __syncthreads();
    }
}

/* Exclusive prefix sums in place, by one block: n is 256 for every 512 indices. */
__global__ void __launch_bounds__(SCAN_THREADS) sort_scan_kernel(int32_t *values, int64_t n)
{
    __shared__ int32_t sums[SCAN_THREADS];
    int32_t base = 0;
    int self = (int)threadIdx.x;
    for (int64_t first = 0; first < n; first += SCAN_THREADS) {
        int64_t i = first + self;
        int32_t own = i < n ? values[i] : 0;
        sums[self] = own;
        __syncthreads();
        for (int distance = 1; distance < SCAN_THREADS; distance *= 2) {
            int32_t before = self >= distance ? sums[self - distance] : 0;
            __syncthreads();
            sums[self] += before;
            __syncthreads();
        }
        if (i < n) values[i] = base + sums[self] - own;
        base += sums[SCAN_THREADS - 1];
        __syncthreads();
    }
}

ONT_DEVICE int count_bits(unsigned v)
{
    int n = 0;
    for (; v; v &= v - 1) n++;
    return n;
}

/* 32 items at a time, so that equal digits keep their order: a lane goes behind the equal ones of lower lanes. */
__global__ void __launch_bounds__(32)
    sort_scatter_kernel(const pair *items, int64_t n, int shift, int64_t tiles, const int32_t *offsets, pair *sorted)
{
    __shared__ int32_t next[DIGITS];
    unsigned lane = threadIdx.x;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int d = (int)lane; d < DIGITS; d += 32) next[d] = offsets[d * tiles + tile];
        __syncthreads();
        for (int64_t first = tile * SORT_TILE; first < n && first < (tile + 1) * SORT_TILE; first += 32) {
            int64_t i = first + lane;
            bool here = i < n;
            int digit = here ? items[i].key >> shift & (DIGITS - 1) : 0;
            unsigned same = __ballot_sync(0xffffffffu, here);
            for (int bit = 0; bit < 8; bit++) {
                unsigned set = __ballot_sync(0xffffffffu, here && (digit >> bit & 1));
                same &= digit >> bit & 1 ? set : ~set;
            }
            unsigned below = same & ((1u << lane) - 1);
            int32_t start = here ? next[digit] : 0;
            if (here) sorted[start + count_bits(below)] = items[i];
            __syncthreads();
            if (here && !below)
                next[digit] = start + count_bits(same); /* the lowest lane with this digit advances the offset */
            __syncthreads();
        }
        __syncthreads();
    }
}

static inline int64_t tiles_of(int64_t count) { return (count + SORT_TILE - 1) / SORT_TILE; }

extern "C" size_t ont_gather_grad_work(int64_t count)
{
    return (size_t)(2 * count) * sizeof(pair) + (size_t)(DIGITS * tiles_of(count)) * sizeof(int32_t) + 64;
}

static int sort_indices(const ont_gather *g, const void *indices, pair *items, pair *other, int32_t *counts,
                        pair **sorted, void *stream)
{
    int64_t tiles = tiles_of(g->count);
    int error =
        ONT_LAUNCH(sort_load_kernel, ont_blocks(g->count, ONT_THREADS), ONT_THREADS, 0, stream, *g, indices, items);
    for (int shift = 0; !error && shift < 32 && (g->table >> shift || !shift); shift += 8) {
        error = ONT_LAUNCH(sort_count_kernel, ont_blocks(tiles, 1), 32, 0, stream, (const pair *)items, g->count, shift,
                           tiles, counts);
        if (!error) error = ONT_LAUNCH(sort_scan_kernel, 1, SCAN_THREADS, 0, stream, counts, DIGITS * tiles);
        if (!error)
            error = ONT_LAUNCH(sort_scatter_kernel, ont_blocks(tiles, 1), 32, 0, stream, (const pair *)items, g->count,
                               shift, tiles, (const int32_t *)counts, other);
        pair *swap = items;
        items = other;
        other = swap;
    }
    *sorted = items;
    return error;
}

/* ---- sums: the thread at the start of a run adds it up ---- */

template <class T> __global__ void __launch_bounds__(ONT_THREADS) zero_kernel(T *out, int64_t n)
{
    ONT_FOR(i, n) ont_store(&out[i], 0);
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) runs_kernel(const ont_gather g, const pair *sorted, const T *dy, T *out)
{
    typedef typename ont_compute<T>::type C;
    for (int64_t item = blockIdx.x; item < g.outer * g.count;
         item += gridDim.x) { /* gridDim.y is at most 65535, outer may be more */
        int64_t o = item / g.count, first = item % g.count;
        int32_t key = sorted[first].key;
        if (key >= g.table || (first && sorted[first - 1].key == key)) continue;
        for (int64_t column = threadIdx.x; column < g.inner; column += blockDim.x) {
            C sum = 0;
            for (int64_t i = first; i < g.count && sorted[i].key == key; i++)
                sum += ont_load(&dy[(o * g.count + sorted[i].position) * g.inner + column]);
            ont_store(&out[(o * g.table + key) * g.inner + column], sum);
        }
    }
}

template <class T>
static int launch_grad(const ont_gather *g, const void *dy, const void *indices, void *out, void *work, void *stream)
{
    int64_t n = g->outer * g->table * g->inner;
    int error = ONT_LAUNCH(zero_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, (T *)out, n);
    if (error || !g->count) return error;
    pair *items = (pair *)work, *sorted;
    error = sort_indices(g, indices, items, items + g->count, (int32_t *)(items + 2 * g->count), &sorted, stream);
    if (error) return error;
    return ONT_LAUNCH(runs_kernel<T>, ont_blocks(g->outer * g->count, 1), ont_row_threads(g->inner), 0, stream, *g,
                      (const pair *)sorted, (const T *)dy, (T *)out);
}

extern "C" int ont_launch_gather_grad(const ont_gather *g, const void *dy, const void *indices, void *out, void *work,
                                      void *stream)
{
    if (!g->outer || !g->table || !g->inner) return 0;
    switch (g->dtype) {
    case ONT_FLOAT32: return launch_grad<float>(g, dy, indices, out, work, stream);
    case ONT_FLOAT64: return launch_grad<double>(g, dy, indices, out, work, stream);
    case ONT_FLOAT16: return launch_grad<ont_f16>(g, dy, indices, out, work, stream);
    default: return launch_grad<ont_bf16>(g, dy, indices, out, work, stream);
    }
}
