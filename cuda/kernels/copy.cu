/*
 * Copies between strided layouts (Transpose, Slice, Split, Concat, Expand and their gradients), Range and Trilu.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) copy_kernel(const ont_copy c, const char *from, char *to)
{
    ONT_FOR(i, c.count) {
        int64_t rest = i, at = c.from_offset, put = c.to_offset;
        for (int d = c.rank - 1; d >= 0; d--) {
            int64_t index = rest % c.dims[d];
            rest /= c.dims[d];
            at += index * c.from[d];
            put += index * c.to[d];
        }
        *(T *)(to + put) = *(const T *)(from + at);
    }
}

enum { TILE = 32, TILE_ROWS = 8 };

/* Dim `f` is contiguous in the source, the last dim in the target: tiles go through shared memory, so that both are
 * accessed in whole lines. */
template <class T>
__global__ void __launch_bounds__(TILE *TILE_ROWS)
    transpose_kernel(const ont_copy c, int f, int64_t others, const char *from, char *to)
{
    __shared__ T tile[TILE][TILE + 1];
    int last = c.rank - 1;
    int64_t tiles_f = (c.dims[f] + TILE - 1) / TILE, tiles_l = (c.dims[last] + TILE - 1) / TILE;
    for (int64_t piece = blockIdx.x; piece < others * tiles_f * tiles_l; piece += gridDim.x) {
        int64_t j = piece % tiles_l * TILE, i = piece / tiles_l % tiles_f * TILE, rest = piece / (tiles_l * tiles_f);
        int64_t at = c.from_offset, put = c.to_offset;
        for (int d = last - 1; d >= 0; d--) {
            if (d == f) continue;
            int64_t index = rest % c.dims[d];
            rest /= c.dims[d];
            at += index * c.from[d];
            put += index * c.to[d];
        }
        for (int r = (int)threadIdx.y; r < TILE; r += TILE_ROWS)
            if (j + r < c.dims[last] && i + threadIdx.x < c.dims[f])
                tile[r][threadIdx.x] =
                    *(const T *)(from + at + (j + r) * c.from[last] + (i + (int64_t)threadIdx.x) * c.from[f]);
        __syncthreads();
        for (int r = (int)threadIdx.y; r < TILE; r += TILE_ROWS)
            if (i + r < c.dims[f] && j + threadIdx.x < c.dims[last])
                *(T *)(to + put + (i + r) * c.to[f] + (j + (int64_t)threadIdx.x) * c.to[last]) = tile[threadIdx.x][r];
        __syncthreads();
    }
}

template <class T> static int launch_copy(const ont_copy *c, const void *from, void *to, void *stream)
{
    int last = c->rank - 1, f = -1;
    for (int d = 0; d < last; d++)
        if (c->from[d] == c->size && c->dims[d] >= 8) f = d;
    if (f >= 0 && c->to[last] == c->size && c->from[last] != c->size && c->dims[last] >= 8) {
        int64_t others = c->count / (c->dims[f] * c->dims[last]);
        int64_t tiles = others * ((c->dims[f] + TILE - 1) / TILE) * ((c->dims[last] + TILE - 1) / TILE);
        return ONT_LAUNCH(transpose_kernel<T>, ont_blocks(tiles, 1), dim3(TILE, TILE_ROWS), 0, stream, *c, f, others,
                          (const char *)from, (char *)to);
    }
    return ONT_LAUNCH(copy_kernel<T>, ont_blocks(c->count, ONT_THREADS), ONT_THREADS, 0, stream, *c, (const char *)from,
                      (char *)to);
}

struct pair16 {
    uint64_t low, high;
};

extern "C" int ont_launch_copy(const ont_copy *c, const void *from, void *to, void *stream)
{
    if (!c->count) return 0;
    switch (c->size) {
    case 1: return launch_copy<uint8_t>(c, from, to, stream);
    case 2: return launch_copy<uint16_t>(c, from, to, stream);
    case 4: return launch_copy<uint32_t>(c, from, to, stream);
    case 8: return launch_copy<uint64_t>(c, from, to, stream);
    default: return launch_copy<pair16>(c, from, to, stream);
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) range_kernel(const T *first, const T *step, T *out, int64_t n)
{
    ONT_FOR(i, n) out[i] = (T)(*first + (T)i * *step);
}

template <class T> static int launch_range(const void *first, const void *step, void *out, int64_t n, void *stream)
{
    return ONT_LAUNCH(range_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, (const T *)first,
                      (const T *)step, (T *)out, n);
}

extern "C" int ont_launch_range(int dtype, const void *first, const void *step, void *out, int64_t n, void *stream)
{
    if (!n) return 0;
    switch (dtype) {
    case ONT_FLOAT32: return launch_range<float>(first, step, out, n, stream);
    case ONT_FLOAT64: return launch_range<double>(first, step, out, n, stream);
    case ONT_INT32: return launch_range<int32_t>(first, step, out, n, stream);
    default: return launch_range<int64_t>(first, step, out, n, stream);
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) trilu_kernel(const ont_trilu s, const T *x, T *y)
{
    ONT_FOR(i, s.count) {
        int64_t row = i / s.columns % s.rows, column = i % s.columns;
        bool keep = s.upper ? column - row >= s.k : column - row <= s.k;
        y[i] = keep ? x[i] : (T)0;
    }
}

template <class T> static int launch_trilu(const ont_trilu *s, const void *x, void *y, void *stream)
{
    return ONT_LAUNCH(trilu_kernel<T>, ont_blocks(s->count, ONT_THREADS), ONT_THREADS, 0, stream, *s, (const T *)x,
                      (T *)y);
}

extern "C" int ont_launch_trilu(const ont_trilu *s, const void *x, void *y, void *stream)
{
    if (!s->count) return 0;
    switch (s->size) {
    case 1: return launch_trilu<uint8_t>(s, x, y, stream);
    case 2: return launch_trilu<uint16_t>(s, x, y, stream);
    case 4: return launch_trilu<uint32_t>(s, x, y, stream);
    default: return launch_trilu<uint64_t>(s, x, y, stream);
    }
}

struct stored_words {
    uint64_t word[4];
};

__global__ void store_kernel(uint64_t *to, const stored_words words, int n)
{
    if ((int)threadIdx.x < n) to[threadIdx.x] = words.word[threadIdx.x];
}

extern "C" int ont_launch_store(void *to, const uint64_t *words, int n, void *stream)
{
    stored_words given = {};
    for (int i = 0; i < n && i < 4; i++) given.word[i] = words[i];
    return ONT_LAUNCH(store_kernel, 1, 4, 0, stream, (uint64_t *)to, given, n);
}
