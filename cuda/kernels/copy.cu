/*
 * Copies between strided layouts (Transpose, Slice, Split, Concat, Expand and their gradients), Rotate, Range and
 * Trilu.
 */
#include "kernels/launch.cuh"

#include "kernels/chunks.cuh"
#include "kernels/kernels.h"
#include "kernels/units.cuh"

/* A copy of fewer than 2^31 units, whose strides and offsets count units. */
struct short_copy {
    int32_t rank;
    uint32_t count;
    divisor dims[12];
    int32_t from[12], to[12];
};

/* Rank is a constant, so that the indices stay in registers; 0 stands for any. */
template <class T, int RANK>
__global__ void __launch_bounds__(ONT_THREADS) short_copy_kernel(const short_copy c, const T *from, T *to)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, rest = i;
    if (i >= c.count) return;
    int32_t at = 0, put = 0;
    ONT_UNROLL
    for (int d = (RANK ? RANK : c.rank) - 1; d > 0; d--) {
        int32_t index = (int32_t)split(&rest, c.dims[d]);
        at += index * c.from[d];
        put += index * c.to[d];
    }
    to[put + (int32_t)rest * c.to[0]] = from[at + (int32_t)rest * c.from[0]];
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    copy_kernel(const ont_copy c, const wide_dims dims, const char *from, char *to)
{
    ONT_KEEP_LOOP
    ONT_FOR(i, c.count) {
        uint64_t rest = (uint64_t)i;
        int64_t at = c.from_offset, put = c.to_offset;
        for (int d = c.rank - 1; d > 0; d--) {
            int64_t index = split(&rest, dims.size[d]);
            at += index * c.from[d];
            put += index * c.to[d];
        }
        *(T *)(to + put + (int64_t)rest * c.to[0]) = *(const T *)(from + at + (int64_t)rest * c.from[0]);
    }
}

/* Leaves out dims of 1, and joins neighbours that are one dim on both sides. At least one dim is left. */
static ont_copy merged(const ont_copy *c)
{
    ont_copy m = *c;
    m.rank = 0;
    for (int d = 0; d < c->rank; d++) {
        int last = m.rank - 1;
        if (c->dims[d] == 1) continue;
        if (last >= 0 && m.from[last] == c->from[d] * c->dims[d] && m.to[last] == c->to[d] * c->dims[d]) {
            m.dims[last] *= c->dims[d];
        } else {
            last = m.rank++;
            m.dims[last] = c->dims[d];
        }
        m.from[last] = c->from[d];
        m.to[last] = c->to[d];
    }
    if (!m.rank) m.dims[m.rank++] = 1, m.from[0] = m.to[0] = c->size;
    return m;
}

/* Joins elements of the last dim to units of up to 16 bytes, as far as dims, strides and addresses are multiples. */
static void widen(ont_copy *c, const void *from, const void *to)
{
    int last = c->rank - 1;
    if (c->from[last] != c->size || c->to[last] != c->size) return;
    while (c->size < 16 && c->dims[last] % 2 == 0) {
        uint64_t all = (uint64_t)from | (uint64_t)to | (uint64_t)c->from_offset | (uint64_t)c->to_offset;
        for (int d = 0; d < last; d++) all |= (uint64_t)c->from[d] | (uint64_t)c->to[d];
        if (all % (uint64_t)(2 * c->size)) return;
        c->size *= 2;
        c->dims[last] /= 2;
        c->count /= 2;
        c->from[last] = c->to[last] = c->size;
    }
}

/* False where the units or their distances need more than 31 bits, or an address is no multiple of a unit. */
static bool shorten(const ont_copy *c, const void *from, const void *to, short_copy *s)
{
    uint64_t start = (uint64_t)from + (uint64_t)c->from_offset, target = (uint64_t)to + (uint64_t)c->to_offset;
    int64_t reach_from = 0, reach_to = 0;
    if (start % (uint64_t)c->size || target % (uint64_t)c->size) return false;
    s->rank = c->rank;
    s->count = (uint32_t)c->count;
    for (int d = 0; d < c->rank; d++) {
        int64_t from = c->from[d] / c->size, to = c->to[d] / c->size;
        if (c->from[d] % c->size || c->to[d] % c->size) return false;
        reach_from += (from < 0 ? -from : from) * (c->dims[d] - 1);
        reach_to += (to < 0 ? -to : to) * (c->dims[d] - 1);
        if (c->count > INT32_MAX || reach_from > INT32_MAX || reach_to > INT32_MAX) return false;
        s->dims[d] = divisor_of((uint32_t)c->dims[d]);
        s->from[d] = c->dims[d] > 1 ? (int32_t)from : 0;
        s->to[d] = c->dims[d] > 1 ? (int32_t)to : 0;
    }
    return true;
}

enum { TILE = 32, TILE_ROWS = 8, PAIR_TILE = 64 };

/* The copy, and how many tiles dim f and the last have, beside the sizes of the others. */
struct tiled_copy {
    ont_copy c;
    int32_t f;
    int64_t tiles;
    wide_dims dims;
};

/* Of a tile: its first items in dim f and the last, and both addresses in the other dims. */
struct tile_place {
    int64_t i, j;
    const char *from;
    char *to;
};

ONT_DEVICE tile_place place_of(const tiled_copy &t, int64_t tile, int edge, const char *from, char *to)
{
    uint64_t rest = (uint64_t)tile;
    tile_place p = {0, split(&rest, t.dims.size[t.c.rank - 1]) * edge, from + t.c.from_offset, to + t.c.to_offset};
    p.i = split(&rest, t.dims.size[t.f]) * edge;
    for (int d = t.c.rank - 2; d >= 0; d--) {
        if (d == t.f) continue;
        int64_t index = split(&rest, t.dims.size[d]);
        p.from += index * t.c.from[d];
        p.to += index * t.c.to[d];
    }
    return p;
}

/* Dim `f` is contiguous in the source, the last dim in the target: tiles go through shared memory, so that both are
 * accessed in whole lines. */
template <class T>
__global__ void __launch_bounds__(TILE *TILE_ROWS)
    transpose_kernel(const tiled_copy t, const char *from, char *to)
{
    __shared__ T tile[TILE][TILE + 1];
    const ont_copy &c = t.c;
    const int f = t.f, last = c.rank - 1;
    for (int64_t piece = blockIdx.x; piece < t.tiles; piece += gridDim.x) {
        const tile_place p = place_of(t, piece, TILE, from, to);
        const int64_t i = p.i, j = p.j;
        for (int r = (int)threadIdx.y; r < TILE; r += TILE_ROWS)
            if (j + r < c.dims[last] && i + threadIdx.x < c.dims[f])
                tile[r][threadIdx.x] = *(const T *)(p.from + (j + r) * c.from[last] + (i + threadIdx.x) * c.from[f]);
        __syncthreads();
        for (int r = (int)threadIdx.y; r < TILE; r += TILE_ROWS)
            if (i + r < c.dims[f] && j + threadIdx.x < c.dims[last])
                *(T *)(p.to + (i + r) * c.to[f] + (j + threadIdx.x) * c.to[last]) = tile[threadIdx.x][r];
        __syncthreads();
    }
}

/* The same for 16-bit elements, two in each access: dims f and last are even, and all distances multiples of 4. */
__global__ void __launch_bounds__(TILE *TILE_ROWS)
    transpose_pairs_kernel(const tiled_copy t, const char *from, char *to)
{
    __shared__ uint32_t tile[PAIR_TILE][PAIR_TILE / 2 + 1];
    const ont_copy &c = t.c;
    const int f = t.f, last = c.rank - 1, x = (int)threadIdx.x;
    for (int64_t piece = blockIdx.x; piece < t.tiles; piece += gridDim.x) {
        const tile_place p = place_of(t, piece, PAIR_TILE, from, to);
        const int64_t i = p.i, j = p.j;
        ONT_UNROLL
        for (int k = 0; k < PAIR_TILE; k += TILE_ROWS) {
            int r = k + (int)threadIdx.y;
            if (j + r < c.dims[last] && i + 2 * x < c.dims[f])
                tile[r][x] = *(const uint32_t *)(p.from + (j + r) * c.from[last] + (i + 2 * x) * 2);
        }
        __syncthreads();
        ONT_UNROLL
        for (int k = 0; k < PAIR_TILE; k += TILE_ROWS) {
            int r = k + (int)threadIdx.y, shift = r % 2 * 16;
            if (i + r >= c.dims[f] || j + 2 * x >= c.dims[last]) continue;
            uint32_t low = tile[2 * x][r / 2] >> shift & 0xffff, high = tile[2 * x + 1][r / 2] >> shift & 0xffff;
            *(uint32_t *)(p.to + (i + r) * c.to[f] + (j + 2 * x) * 2) = low | high << 16;
        }
        __syncthreads();
    }
}

static bool fits_pairs(const ont_copy *c, int f, const void *from, const void *to)
{
    int last = c->rank - 1;
    uint64_t all = (uint64_t)from | (uint64_t)to | (uint64_t)c->from_offset | (uint64_t)c->to_offset;
    for (int d = 0; d <= last; d++) all |= (d == f ? 0 : (uint64_t)c->from[d]) | (d == last ? 0 : (uint64_t)c->to[d]);
    return c->size == 2 && all % 4 == 0 && c->dims[f] % 2 == 0 && c->dims[last] % 2 == 0;
}

template <class T> static int launch_transpose(const ont_copy *c, int f, const void *from, void *to, void *stream)
{
    bool pairs = fits_pairs(c, f, from, to);
    int64_t edge = pairs ? PAIR_TILE : TILE, counts[12];
    tiled_copy t = {*c, f, 1, {}};
    for (int d = 0; d < c->rank; d++) {
        counts[d] = d == f || d == c->rank - 1 ? (c->dims[d] + edge - 1) / edge : c->dims[d];
        t.tiles *= counts[d];
    }
    t.dims = wide_dims_of(counts, c->rank);
    return ONT_LAUNCH((pairs ? transpose_pairs_kernel : transpose_kernel<T>), ont_blocks(t.tiles, 1),
                      dim3(TILE, TILE_ROWS), 0, stream, t, (const char *)from, (char *)to);
}

template <class U> static int launch_short(const short_copy *s, const void *from, void *to, void *stream)
{
    unsigned blocks = blocks_of_units(s->count);
    const U *source = (const U *)from;
    U *target = (U *)to;
    switch (s->rank) {
    case 1: return ONT_LAUNCH((short_copy_kernel<U, 1>), blocks, ONT_THREADS, 0, stream, *s, source, target);
    case 2: return ONT_LAUNCH((short_copy_kernel<U, 2>), blocks, ONT_THREADS, 0, stream, *s, source, target);
    case 3: return ONT_LAUNCH((short_copy_kernel<U, 3>), blocks, ONT_THREADS, 0, stream, *s, source, target);
    case 4: return ONT_LAUNCH((short_copy_kernel<U, 4>), blocks, ONT_THREADS, 0, stream, *s, source, target);
    default: return ONT_LAUNCH((short_copy_kernel<U, 0>), blocks, ONT_THREADS, 0, stream, *s, source, target);
    }
}

template <class T> static int launch_copy(const ont_copy *c, const void *from, void *to, void *stream)
{
    int last = c->rank - 1, f = -1;
    short_copy s;
    for (int d = 0; d < last; d++)
        if (c->from[d] == c->size && c->dims[d] >= 8) f = d;
    if (f >= 0 && c->to[last] == c->size && c->from[last] != c->size && c->dims[last] >= 8)
        return launch_transpose<T>(c, f, from, to, stream);
    if (shorten(c, from, to, &s))
        return launch_short<typename unit<T>::type>(&s, (const char *)from + c->from_offset,
                                                    (char *)to + c->to_offset, stream);
    return ONT_LAUNCH(copy_kernel<T>, ont_blocks(c->count, ONT_THREADS), ONT_THREADS, 0, stream, *c,
                      wide_dims_of(c->dims, c->rank), (const char *)from, (char *)to);
}

extern "C" int ont_launch_copy(const ont_copy *given, const void *from, void *to, void *stream)
{
    if (!given->count) return 0;
    ont_copy c = merged(given);
    widen(&c, from, to);
    switch (c.size) {
    case 1: return launch_copy<uint8_t>(&c, from, to, stream);
    case 2: return launch_copy<uint16_t>(&c, from, to, stream);
    case 4: return launch_copy<uint32_t>(&c, from, to, stream);
    case 8: return launch_copy<uint64_t>(&c, from, to, stream);
    default: return launch_copy<pair16>(&c, from, to, stream);
    }
}

/*
 * ---- Rotate (rotary position embedding) ----
 *
 * y = x * cos + (-b, a) * sin for each row x = (a, b) of two halves, or with `back` the transpose of that map, which is
 * its gradient. y may be x.
 */

/* rows (dims) of units of V elements; strides of the angles' rows in elements */
struct rotation {
    int32_t rank, back;
    uint32_t count;
    divisor half, dims[12];
    uint32_t cos[12], sin[12];
};

/* x, y (rows, 2, half), computed in the type of the angles; one thread for the same V elements of both halves */
template <class T, class C, int V>
__global__ void __launch_bounds__(ONT_THREADS)
    rotate_kernel(const rotation r, const T *x, const C *cos, const C *sin, T *y)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, row = quotient(i, r.half), half = r.half.value * V;
    if (i >= r.count) return;
    uint32_t column = (i - row * r.half.value) * V, at = row * 2 * half + column, rest = row, c = column, s = column;
    for (int d = r.rank - 1; d >= 0; d--) {
        uint32_t index = split(&rest, r.dims[d]);
        c += index * r.cos[d];
        s += index * r.sin[d];
    }
    C a[V], b[V], cos_a[V], cos_b[V], sin_a[V], sin_b[V];
    load_chunk(x + at, a);
    load_chunk(x + at + half, b);
    load_chunk(cos + c, cos_a);
    load_chunk(cos + c + half, cos_b);
    load_chunk(sin + s, sin_a);
    load_chunk(sin + s + half, sin_b);
    ONT_UNROLL
    for (int k = 0; k < V; k++) {
        C p = a[k], q = b[k];
        a[k] = p * cos_a[k] + (r.back ? q * sin_b[k] : -q * sin_a[k]);
        b[k] = q * cos_b[k] + (r.back ? -p * sin_a[k] : p * sin_b[k]);
    }
    store_chunk(y + at, a);
    store_chunk(y + at + half, b);
}

template <class T, class C, int V>
static int launch_units(const ont_rotate *s, const void *const *in, void *out, void *stream)
{
    rotation r = {s->rank, s->back, (uint32_t)(s->rows * s->half / V), divisor_of((uint32_t)(s->half / V)), {}, {}, {}};
    for (int d = 0; d < s->rank; d++) {
        r.dims[d] = divisor_of((uint32_t)s->dims[d]);
        r.cos[d] = (uint32_t)s->cos[d];
        r.sin[d] = (uint32_t)s->sin[d];
    }
    return ONT_LAUNCH((rotate_kernel<T, C, V>), blocks_of_units(r.count), ONT_THREADS, 0, stream, r, (const T *)in[0],
                      (const C *)in[1], (const C *)in[2], (T *)out);
}

/* In accesses of 16 bytes where these fit. The strides of the angles are multiples of a row. */
template <class T, class C>
static int launch_rotate(const ont_rotate *s, const void *const *in, void *out, void *stream)
{
    enum { V = 16 / sizeof(T) };
    const void *const all[] = {in[0], in[1], in[2], out};
    return are_aligned(all, 4) && s->half % V == 0 ? launch_units<T, C, V>(s, in, out, stream)
                                                   : launch_units<T, C, 1>(s, in, out, stream);
}

extern "C" int ont_launch_rotate(const ont_rotate *s, const void *const *in, void *out, void *stream)
{
    if (!s->rows || !s->half) return 0;
    switch (s->dtype) {
    case ONT_FLOAT64: return launch_rotate<double, double>(s, in, out, stream);
    case ONT_FLOAT16: return launch_rotate<ont_f16, float>(s, in, out, stream);
    case ONT_BFLOAT16: return launch_rotate<ont_bf16, float>(s, in, out, stream);
    default: return launch_rotate<float, float>(s, in, out, stream);
    }
}

/* ---- Range, Trilu, stored words ---- */

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

__global__ void __launch_bounds__(4) store_kernel(uint64_t *to, const stored_words words, int n)
{
    if ((int)threadIdx.x < n) to[threadIdx.x] = words.word[threadIdx.x];
}

extern "C" int ont_launch_store(void *to, const uint64_t *words, int n, void *stream)
{
    stored_words given = {};
    for (int i = 0; i < n && i < 4; i++) given.word[i] = words[i];
    return ONT_LAUNCH(store_kernel, 1, 4, 0, stream, (uint64_t *)to, given, n);
}
