/*
 * Gather along an axis, and its gradient in a deterministic order: indices and their positions are sorted by a stable
 * radix sort; each run of equal indices is then summed in pieces of fixed length, in the order of positions.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/units.cuh"

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
        out[i] = v < 0 ? T() : data[(o * g.table + v) * g.inner + column];
    }
}

/* Fewer than 2^31 units of output. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    short_gather_kernel(const ont_gather g, const divisor inner, const divisor count, const T *data,
                        const void *indices, T *out)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, row = quotient(i, inner), o = quotient(row, count);
    if (o >= g.outer) return;
    int64_t v = index_at(g, indices, row - o * count.value);
    out[i] = v < 0 ? T() : data[(o * g.table + v) * g.inner + (i - row * inner.value)];
}

template <class T>
static int launch_gather(const ont_gather *g, const void *data, const void *indices, void *out, void *stream)
{
    int64_t n = g->outer * g->count * g->inner;
    if (n < INT32_MAX - ONT_THREADS)
        return ONT_LAUNCH(short_gather_kernel<T>, blocks_of_units(n), ONT_THREADS, 0, stream, *g,
                          divisor_of((uint32_t)g->inner), divisor_of((uint32_t)g->count), (const T *)data, indices,
                          (T *)out);
    return ONT_LAUNCH(gather_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *g, (const T *)data,
                      indices, (T *)out);
}

extern "C" int ont_launch_gather(const ont_gather *given, const void *data, const void *indices, void *out,
                                 void *stream)
{
    ont_gather g = *given;
    if (!g.outer || !g.count || !g.inner) return 0;
    widen_units(&g.size, &g.inner, data, out);
    switch (g.size) {
    case 1: return launch_gather<uint8_t>(&g, data, indices, out, stream);
    case 2: return launch_gather<uint16_t>(&g, data, indices, out, stream);
    case 4: return launch_gather<uint32_t>(&g, data, indices, out, stream);
    case 8: return launch_gather<uint64_t>(&g, data, indices, out, stream);
    default: return launch_gather<unit<pair16>::type>(&g, data, indices, out, stream);
    }
}

/* ---- stable radix sort of (index, position): a warp for each tile of items, a pass for each byte of the key ---- */

enum { SORT_TILE = 512, DIGITS = 256, SCAN_THREADS = 256 };

typedef ont_pair pair;

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
            if (here) sorted[start + ont_count_bits(below)] = items[i];
            __syncthreads();
            if (here && !below)
                next[digit] = start + ont_count_bits(same); /* the lowest lane with this digit advances the offset */
            __syncthreads();
        }
        __syncthreads();
    }
}

static inline int64_t tiles_of(int64_t count) { return (count + SORT_TILE - 1) / SORT_TILE; }

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

extern "C" size_t ont_sort_work(int64_t count)
{
    return (size_t)(2 * count) * sizeof(pair) + (size_t)(DIGITS * tiles_of(count)) * sizeof(int32_t);
}

extern "C" int ont_launch_sort(int64_t count, int64_t table, const int32_t *keys, void *work, const ont_pair **sorted,
                               void *stream)
{
    ont_gather g = {};
    g.count = count;
    g.table = table;
    pair *items = (pair *)work, *last = items;
    const int error = count ? sort_indices(&g, keys, items, items + count, (int32_t *)(items + 2 * count), &last,
                                           stream)
                            : 0;
    *sorted = last;
    return error;
}

/*
 * ---- sums ----
 *
 * The sorted positions are cut into pieces of equal length, so that a run of many equal indices is shared by many
 * blocks. A run within one piece is complete after the first kernel. Of any other run, the first kernel stores the
 * sum over each piece, and the second kernel adds these partial sums in the order of the pieces.
 */

enum { PIECE = 32, AHEAD = 4, JOIN_COLUMNS = 32, JOIN_ROWS = 8 };

static inline int64_t pieces_of(int64_t count) { return (count + PIECE - 1) / PIECE; }

/* Partial sums of a piece: of the run that began before it, and of the run that begins in it and goes on behind it. */
enum { PART_HEAD, PART_TAIL, PARTS };

struct piece {
    const pair *rows;
    int n;
    bool continued, goes_on; /* whether the first run began before, and whether the last one goes on behind */
};

/* Adds the rows of one piece, and stores the sum of each run. */
template <class T, class C>
ONT_DEVICE void add_piece(const ont_gather &g, const piece &p, const T *dy, T *out, C *partial)
{
    const pair *rows = p.rows;
    int n = p.n;
    C sum = 0;
    bool head = p.continued;
    for (int first = 0; first < n; first += AHEAD) {
        C value[AHEAD]; /* loaded ahead of the sums, which depend on one another */
        ONT_UNROLL
        for (int k = 0; k < AHEAD; k++)
            value[k] = first + k < n ? ont_load(&dy[rows[first + k].position * g.inner]) : (C)0;
        ONT_UNROLL
        for (int k = 0; k < AHEAD; k++) {
            int i = first + k, key = i < n ? rows[i].key : 0;
            if (i >= n || key >= g.table) break;
            sum += value[k];
            if (i + 1 < n && rows[i + 1].key == key) continue;
            if (head)
                partial[PART_HEAD * g.inner] = sum;
            else if (i + 1 == n && p.goes_on)
                partial[PART_TAIL * g.inner] = sum;
            else
                ont_store(&out[key * g.inner], sum);
            sum = 0;
            head = false;
        }
    }
}

/* partial (outer, pieces, PARTS, inner) */
template <class T, class C>
__global__ void __launch_bounds__(ONT_THREADS)
    pieces_kernel(const ont_gather g, const pair *sorted, const T *dy, T *out, C *partial)
{
    __shared__ pair rows[PIECE];
    int64_t chunks = (g.inner + blockDim.x - 1) / blockDim.x, pieces = (g.count + PIECE - 1) / PIECE;
    for (int64_t item = blockIdx.x; item < g.outer * pieces * chunks; item += gridDim.x) {
        int64_t column = item % chunks * blockDim.x + threadIdx.x, block = item / chunks, o = block / pieces;
        int64_t first = block % pieces * PIECE, end = first + PIECE < g.count ? first + PIECE : g.count;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < end - first; i += (int)blockDim.x) rows[i] = sorted[first + i];
        __syncthreads();
        if (column >= g.inner) continue;
        const piece p = {rows, (int)(end - first), first && sorted[first - 1].key == rows[0].key,
                         end < g.count && sorted[end].key == rows[end - first - 1].key};
        add_piece<T, C>(g, p, dy + o * g.count * g.inner + column, out + o * g.table * g.inner + column,
                        partial + block * PARTS * g.inner + column);
    }
}

/* The number of items from `first` on that have its key. */
ONT_DEVICE int64_t length_of_run(const pair *sorted, int64_t first, int64_t count)
{
    int64_t low = first, high = count; /* sorted[low] has the key, and sorted[high] has not */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (sorted[middle].key == sorted[first].key)
            low = middle;
        else
            high = middle;
    }
    return high - first;
}

/* A block for each piece and each group of columns; it has work if a run begins in the piece and goes on behind it. */
template <class T, class C>
__global__ void __launch_bounds__(JOIN_COLUMNS *JOIN_ROWS)
    join_kernel(const ont_gather g, const pair *sorted, const C *partial, T *out)
{
    __shared__ C sums[JOIN_ROWS][JOIN_COLUMNS];
    int64_t chunks = (g.inner + JOIN_COLUMNS - 1) / JOIN_COLUMNS, pieces = (g.count + PIECE - 1) / PIECE;
    for (int64_t item = blockIdx.x; item < g.outer * pieces * chunks; item += gridDim.x) {
        int64_t column = item % chunks * JOIN_COLUMNS + threadIdx.x, block = item / chunks, o = block / pieces;
        int64_t piece = block % pieces, last = piece * PIECE + PIECE - 1;
        if (last + 1 >= g.count) continue;
        int32_t key = sorted[last].key;
        bool before = piece && sorted[piece * PIECE - 1].key == key;
        if (key >= g.table || before || sorted[last + 1].key != key) continue; /* alike in all threads of the block */
        int64_t others = (length_of_run(sorted, last + 1, g.count) + PIECE - 1) / PIECE;
        C sum = 0;
        if (column < g.inner) {
            const C *at = partial + block * PARTS * g.inner + column;
            if (!threadIdx.y) sum = at[PART_TAIL * g.inner];
            for (int64_t i = threadIdx.y; i < others; i += JOIN_ROWS) sum += at[(i + 1) * PARTS * g.inner];
        }
        sums[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (!threadIdx.y && column < g.inner) {
            for (int r = 1; r < JOIN_ROWS; r++) sum += sums[r][threadIdx.x];
            ont_store(&out[(o * g.table + key) * g.inner + column], sum);
        }
        __syncthreads();
    }
}

static inline size_t partial_bytes(const ont_gather *g)
{
    size_t each = g->dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float);
    return (size_t)(g->outer * pieces_of(g->count) * PARTS * g->inner) * each;
}

extern "C" size_t ont_gather_grad_work(const ont_gather *g)
{
    return partial_bytes(g) + ont_sort_work(g->count) + 64;
}

template <class T>
static int launch_grad(const ont_gather *g, const void *dy, const void *indices, void *out, void *work, void *stream)
{
    typedef typename ont_compute<T>::type C;
    C *partial = (C *)work;
    pair *items = (pair *)((char *)work + partial_bytes(g)), *sorted;
    int error = sort_indices(g, indices, items, items + g->count, (int32_t *)(items + 2 * g->count), &sorted, stream);
    if (error) return error;
    int64_t blocks = g->outer * pieces_of(g->count);
    unsigned threads = ont_row_threads(g->inner);
    error = ONT_LAUNCH((pieces_kernel<T, C>), ont_blocks(blocks * ((g->inner + threads - 1) / threads), 1), threads, 0,
                       stream, *g, (const pair *)sorted, (const T *)dy, (T *)out, partial);
    if (error || g->count <= PIECE) return error;
    return ONT_LAUNCH((join_kernel<T, C>), ont_blocks(blocks * ((g->inner + JOIN_COLUMNS - 1) / JOIN_COLUMNS), 1),
                      dim3(JOIN_COLUMNS, JOIN_ROWS), 0, stream, *g, (const pair *)sorted, (const C *)partial,
                      (T *)out);
}

extern "C" int ont_launch_gather_grad(const ont_gather *g, const void *dy, const void *indices, void *out, void *work,
                                      void *stream)
{
    if (!g->outer || !g->count || !g->table || !g->inner) return 0;
    switch (g->dtype) {
    case ONT_FLOAT32: return launch_grad<float>(g, dy, indices, out, work, stream);
    case ONT_FLOAT64: return launch_grad<double>(g, dy, indices, out, work, stream);
    case ONT_FLOAT16: return launch_grad<ont_f16>(g, dy, indices, out, work, stream);
    default: return launch_grad<ont_bf16>(g, dy, indices, out, work, stream);
    }
}
