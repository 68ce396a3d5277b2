/*
 * GroupedMatMul and its gradient: products of groups of rows, whose ends are in device memory. Tiles of 64 by 64 on
 * ordinary arithmetic units; every block finds its group from the ends, so that the host need not know them.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

enum { TILE = 64, DEPTH = 16, EACH = 4 }; /* EACH by EACH results for each of 16 by 16 threads */

/* C (m, n) = A B over k terms; offsets of element (i, j) are i * first + j * second. */
struct product {
    int64_t m, n, k;
    int64_t a_row, a_term, b_term, b_column, c_row;
};

template <class T>
ONT_DEVICE void multiply_tile(const product &p, const T *a, const T *b, T *c, int64_t row, int64_t column)
{
    typedef typename ont_compute<T>::type A;
    __shared__ A lhs[DEPTH][TILE + 1], rhs[DEPTH][TILE + 1];
    const int self = (int)threadIdx.x, down = self / (TILE / EACH), across = self % (TILE / EACH);
    A sum[EACH][EACH] = {};
    for (int64_t first = 0; first < p.k; first += DEPTH) {
        __syncthreads();
        for (int i = self; i < TILE * DEPTH; i += (int)blockDim.x) {
            /* neighbouring threads read neighbouring elements */
            const int at_a = p.a_term == 1 ? i / DEPTH : i % TILE, term_a = p.a_term == 1 ? i % DEPTH : i / TILE;
            const int at_b = p.b_term == 1 ? i / DEPTH : i % TILE, term_b = p.b_term == 1 ? i % DEPTH : i / TILE;
            const bool has_a = row + at_a < p.m && first + term_a < p.k;
            const bool has_b = column + at_b < p.n && first + term_b < p.k;
            lhs[term_a][at_a] = has_a ? ont_load(&a[(row + at_a) * p.a_row + (first + term_a) * p.a_term]) : (A)0;
            rhs[term_b][at_b] = has_b ? ont_load(&b[(first + term_b) * p.b_term + (column + at_b) * p.b_column]) : (A)0;
        }
        __syncthreads();
        for (int term = 0; term < DEPTH; term++)
            ONT_UNROLL
            for (int i = 0; i < EACH; i++)
                ONT_UNROLL
                for (int j = 0; j < EACH; j++)
                    sum[i][j] += lhs[term][down + i * (TILE / EACH)] * rhs[term][across + j * (TILE / EACH)];
    }
    ONT_UNROLL
    for (int i = 0; i < EACH; i++)
        ONT_UNROLL
        for (int j = 0; j < EACH; j++) {
            const int64_t y = row + down + i * (TILE / EACH), x = column + across + j * (TILE / EACH);
            if (y < p.m && x < p.n) ont_store(&c[y * p.c_row + x], sum[i][j]);
        }
}

/* The end of a group that begins at `from`, reported where it is out of range. */
ONT_DEVICE int64_t end_of(const ont_grouped &s, const void *ends, int64_t group, int64_t from)
{
    const int64_t end = s.wide ? ((const int64_t *)ends)[group] : ((const int32_t *)ends)[group];
    if (end >= from && end <= s.rows) return end;
    ont_report(s.fault, ONT_FAULT_INDEX, s.step, end, group, s.rows + 1);
    return from;
}

/* x (rows, k), w (groups, k, n), or (groups, n, k) with `trans`. A block for each tile of rows of a group and each tile
 * of columns; the rows behind the last group, a group without terms, give zeros. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    grouped_kernel(const ont_grouped s, const T *x, const T *w, const void *ends, T *y, int64_t column_tiles)
{
    const int64_t tile = blockIdx.x / column_tiles, column = blockIdx.x - tile * column_tiles;
    int64_t from = 0, tiles = 0, group = 0, end = 0;
    for (; group <= s.groups; group++, from = end) {
        end = group < s.groups ? end_of(s, ends, group, from) : s.rows;
        const int64_t own = (end - from + TILE - 1) / TILE;
        if (tile < tiles + own) break;
        tiles += own;
    }
    if (group > s.groups) return; /* all threads of the block alike */
    const bool none = group == s.groups;
    const product p = {end - from, s.n, none ? 0 : s.k, s.k, 1, s.trans ? 1 : s.n, s.trans ? s.k : 1, s.n};
    multiply_tile<T>(p, x + from * s.k, w + (none ? 0 : group * s.k * s.n), y + from * s.n, (tile - tiles) * TILE,
                     column * TILE);
}

/* lhs (rows, k), rhs (rows, n) to (groups, k, n): in each group, lhs transposed times rhs */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    grouped_grad_kernel(const ont_grouped s, const T *lhs, const T *rhs, const void *ends, T *out, int64_t row_tiles,
                        int64_t column_tiles)
{
    const int64_t each = row_tiles * column_tiles, group = blockIdx.x / each, tile = blockIdx.x - group * each;
    const int64_t row = tile / column_tiles, column = tile - row * column_tiles;
    int64_t from = 0, end = 0;
    for (int64_t g = 0; g <= group; g++) {
        from = end;
        end = end_of(s, ends, g, from);
    }
    const product p = {s.k, s.n, end - from, 1, s.k, s.n, 1, s.n};
    multiply_tile<T>(p, lhs + from * s.k, rhs + from * s.n, out + group * s.k * s.n, row * TILE, column * TILE);
}

static inline int64_t tiles_of(int64_t n) { return (n + TILE - 1) / TILE; }

extern "C" int64_t ont_grouped_blocks(const ont_grouped *s, int gradient)
{
    return gradient ? s->groups * tiles_of(s->k) * tiles_of(s->n) : (s->rows / TILE + s->groups + 1) * tiles_of(s->n);
}

template <class T>
static int launch(const ont_grouped *s, int gradient, const void *const *in, void *out, void *stream)
{
    const unsigned blocks = (unsigned)ont_grouped_blocks(s, gradient);
    if (!blocks) return 0;
    if (gradient)
        return ONT_LAUNCH(grouped_grad_kernel<T>, blocks, ONT_THREADS, 0, stream, *s, (const T *)in[0],
                          (const T *)in[1], in[2], (T *)out, tiles_of(s->k), tiles_of(s->n));
    return ONT_LAUNCH(grouped_kernel<T>, blocks, ONT_THREADS, 0, stream, *s, (const T *)in[0], (const T *)in[1], in[2],
                      (T *)out, tiles_of(s->n));
}

extern "C" int ont_launch_grouped(const ont_grouped *s, int gradient, const void *const *in, void *out, void *stream)
{
    switch (s->dtype) {
    case ONT_FLOAT32: return launch<float>(s, gradient, in, out, stream);
    case ONT_FLOAT64: return launch<double>(s, gradient, in, out, stream);
    case ONT_FLOAT16: return launch<ont_f16>(s, gradient, in, out, stream);
    default: return launch<ont_bf16>(s, gradient, in, out, stream);
    }
}
