/*
 * Attention without stored probabilities, for any float dtype and head size: tiles of 32 queries by 32 keys in shared
 * memory, two by four scores to a thread. dQ and dK, dV come from two kernels: no two thread blocks add to one element,
 * so the result does not depend on their order. flash_mma.cu has the sizes and dtypes that fit tensor cores.
 * Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", NeurIPS 2022.
 */
#include "kernels/flash.cuh"

enum { TILE = 32, THREADS = 128, WARPS = THREADS / 32, PITCH = TILE + 4, VECTOR = 4 };

/* Whether hidden tiles are left out: the registers of float64 do not suffice. */
template <class C> static constexpr bool SKIPS = sizeof(C) < 8;

template <class C> struct alignas(16) vector4 {
    C x[VECTOR];
};

ONT_DEVICE int row_group() { return (int)threadIdx.x >> 3; }   /* r: rows 2 r and 2 r + 1 of a tile */
ONT_DEVICE int column_group() { return (int)threadIdx.x & 7; } /* c: columns 4 c to 4 c + 3 */
/* Where row j of a tile lies that is an operand of gemm_nt() by columns: neighbouring lanes read neighbouring rows. */
ONT_DEVICE int swizzled_row(int j) { return (j & 3) * 8 + (j >> 2); }

static __host__ __device__ inline int pitch_of(int64_t head_dim, int64_t head_dim_v)
{
    return ((int)(head_dim > head_dim_v ? head_dim : head_dim_v) + VECTOR - 1) / VECTOR * VECTOR + VECTOR;
}

/* Tiles (TILE, pitch) of the operands in shared memory, and p (TILE, PITCH): the left operand of add_gemm(). */
template <class C> struct shared_tiles {
    C *q, *k, *v, *dy, *p;
    int pitch;
};

template <class C> ONT_DEVICE shared_tiles<C> tiles_in(C *shared, const ont_flash_params &f, bool gradient)
{
    int pitch = pitch_of(f.head_dim, f.head_dim_v), size = TILE * pitch;
    shared_tiles<C> tiles = {shared, shared + size, shared + 2 * size, shared + 3 * size,
                             shared + (gradient ? 4 : 3) * size, pitch};
    return tiles;
}

/* Loads rows [first, first + TILE) of a matrix into a tile, padded with zeros. */
template <class T, class C>
ONT_DEVICE void load_tile(const flash_matrix<const T> &from, int64_t first, int pitch, bool swizzled, C *tile)
{
    for (int r = (int)threadIdx.x >> 5; r < TILE; r += WARPS) {
        const T *row = from.data + (first + r) * from.row_stride;
        C *to = tile + (swizzled ? swizzled_row(r) : r) * pitch;
        for (int c = (int)threadIdx.x & 31; c < pitch; c += 32)
            to[c] = first + r < from.n && c < from.size ? ont_load(&row[c]) : (C)0;
    }
}

/* s = lhs rhs^T: a thread has two rows of lhs and four rows of rhs, which is swizzled. */
template <class C> ONT_DEVICE void gemm_nt(const C *lhs, const C *rhs, int size, int pitch, C s[2][VECTOR])
{
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < VECTOR; k++) s[r][k] = 0;
    for (int c = 0; c < size; c += VECTOR) {
        vector4<C> a[2];
        for (int r = 0; r < 2; r++) a[r] = *(const vector4<C> *)(lhs + (2 * row_group() + r) * pitch + c);
        ONT_UNROLL
        for (int k = 0; k < VECTOR; k++) {
            vector4<C> b = *(const vector4<C> *)(rhs + (k * 8 + column_group()) * pitch + c);
            ONT_UNROLL
            for (int r = 0; r < 2; r++)
                for (int e = 0; e < VECTOR; e++) s[r][k] += a[r].x[e] * b.x[e];
        }
    }
}

/* acc += s_p * tile: a thread has two rows of s_p (TILE, PITCH), and four of every 32 columns of the swizzled tile. */
template <int NV, class C>
ONT_DEVICE void add_gemm(C acc[2][NV][VECTOR], const C *s_p, const C *tile, int size, int pitch)
{
    for (int j = 0; j < TILE; j++) {
        C w[2];
        for (int r = 0; r < 2; r++) w[r] = s_p[(2 * row_group() + r) * PITCH + j];
        ONT_UNROLL
        for (int n = 0; n < NV; n++) {
            int c = VECTOR * column_group() + 32 * n;
            if (c >= size) continue;
            vector4<C> v = *(const vector4<C> *)(tile + swizzled_row(j) * pitch + c);
            ONT_UNROLL
            for (int r = 0; r < 2; r++)
                for (int e = 0; e < VECTOR; e++) acc[r][n][e] += w[r] * v.x[e];
        }
    }
}

/* Stores a thread's part of s_p (TILE, PITCH). One warp alone writes and reads a row: a warp barrier is enough. */
template <class C> ONT_DEVICE void store_s_p(C *s_p, const C w[2][VECTOR])
{
    __syncwarp();
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < VECTOR; k++) s_p[(2 * row_group() + r) * PITCH + VECTOR * column_group() + k] = w[r][k];
    __syncwarp();
}

/* Stores a thread's two rows of a tile times a factor, or zeros. */
template <class T, int NV, class C>
ONT_DEVICE void store_rows(const flash_matrix<T> &to, int64_t first, const C acc[2][NV][VECTOR], const C factor[2],
                           const bool zero[2])
{
    for (int r = 0; r < 2; r++) {
        int64_t i = first + 2 * row_group() + r;
        if (i >= to.n) continue;
        ONT_UNROLL
        for (int v = 0; v < NV; v++)
            for (int e = 0; e < VECTOR; e++) {
                int c = VECTOR * column_group() + 32 * v + e;
                if (c < to.size) ont_store(&to.data[i * to.row_stride + c], zero[r] ? (C)0 : acc[r][v][e] * factor[r]);
            }
    }
}

template <class T, int NV, class C>
ONT_DEVICE void store_grad_rows(const flash_matrix<T> &to, int64_t first, const C acc[2][NV][VECTOR])
{
    const C one[2] = {1, 1};
    const bool zero[2] = {false, false};
    store_rows<T, NV>(to, first, acc, one, zero);
}

/* Reductions over the eight lanes that have the same rows. */
template <class C> ONT_DEVICE C reduce_max(C v)
{
    for (int lanes = 4; lanes; lanes >>= 1) {
        C other = __shfl_xor_sync(0xffffffffu, v, lanes);
        v = other > v ? other : v;
    }
    return v;
}
template <class C> ONT_DEVICE C reduce_sum(C v)
{
    for (int lanes = 4; lanes; lanes >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lanes);
    return v;
}

/* ---- forward ---- */

template <class C> struct softmax_row {
    C max, sum; /* over the keys so far; sum: of exp(score - max) */
};

/* Four scores of query i from key j on become exp(score - max), with dropout; acc, y so far, is rescaled. */
template <int NV, class C>
ONT_DEVICE void online_softmax(const ont_flash_params &f, const flash_batch &batch, int64_t i, int64_t j, C s[VECTOR],
                               softmax_row<C> &row, C acc[NV][VECTOR])
{
    C new_max = row.max;
    for (int k = 0; k < VECTOR; k++) {
        bool inside = i < f.seqlen_q && j + k < f.seqlen_k;
        s[k] = inside ? flash_score(f, batch, i, j + k, s[k] * (C)f.scale) : -(C)INFINITY;
        new_max = s[k] > new_max ? s[k] : new_max;
    }
    new_max = reduce_max(new_max);
    C base = new_max == -(C)INFINITY ? (C)0 : new_max, rescale = vexp(row.max - base), block_sum = 0;
    uint32_t random_bits[VECTOR];
    if (f.has_dropout) flash_random_bits<VECTOR>(f, (batch.bh * f.seqlen_q + i) * f.seqlen_k + j, random_bits);
    for (int k = 0; k < VECTOR; k++) {
        C e = vexp(s[k] - base);
        block_sum += e;
        s[k] = f.has_dropout ? e * flash_dropout_factor<C>(f, random_bits[k]) : e;
    }
    row.sum = row.sum * rescale + reduce_sum(block_sum);
    row.max = new_max;
    for (int n = 0; n < NV; n++)
        for (int e = 0; e < VECTOR; e++) acc[n][e] *= rescale;
}

/* Stores a thread's rows of y, divided by their sums, and the statistics of these rows. */
template <class T, int NV, class C>
ONT_DEVICE void store_output(const ont_flash_params &f, int64_t bh, int64_t first_row, const softmax_row<C> row[2],
                             const C acc[2][NV][VECTOR])
{
    C inverse[2];
    bool zero[2];
    for (int r = 0; r < 2; r++) {
        int64_t i = first_row + 2 * row_group() + r;
        inverse[r] = 1 / row[r].sum;
        zero[r] = i < f.seqlen_q && (flash_is_nan_row(f, row[r].sum) || flash_is_masked_row(f, bh, i));
        if (!f.stats || column_group() || i >= f.seqlen_q) continue;
        ((C *)f.stats)[(bh * f.seqlen_q + i) * 2] = row[r].max;
        ((C *)f.stats)[(bh * f.seqlen_q + i) * 2 + 1] = row[r].sum;
    }
    store_rows<T, NV>(flash_matrix_of<T>(f, ONT_FLASH_Y, f.y, bh), first_row, acc, inverse, zero);
}

template <class T, int NV> __global__ void __launch_bounds__(THREADS, 2) flash_kernel(const ont_flash_params f)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    shared_tiles<C> tile = tiles_in(shared, f, false);
    int64_t tiles = (f.seqlen_q + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.n_bh * tiles; item += gridDim.x) {
        int64_t bh = item / tiles,
                first_row = (tiles - 1 - item % tiles) * TILE; /* the last queries, with the most keys, first */
        int64_t end = flash_visible_keys(f, first_row + TILE < f.seqlen_q ? first_row + TILE - 1 : f.seqlen_q - 1);
        flash_batch batch = flash_batch_of(f, bh);
        C acc[2][NV][VECTOR] = {};
        softmax_row<C> row[2] = {{-(C)INFINITY, 0}, {-(C)INFINITY, 0}};
        __syncthreads(); /* all warps have read the tiles of the previous item */
        load_tile(flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh), first_row, tile.pitch, false, tile.q);
        for (int64_t first = 0; first < end; first += TILE) {
            if (SKIPS<C> && flash_is_hidden<TILE, TILE>(f, bh, (int)first_row, (int)first)) continue;
            COUNT_TILE();
            __syncthreads();
            load_tile(flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh), first, tile.pitch, true, tile.k);
            load_tile(flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh), first, tile.pitch, true, tile.v);
            __syncthreads();
            C s[2][VECTOR];
            gemm_nt(tile.q, tile.k, (int)f.head_dim, tile.pitch, s);
            for (int r = 0; r < 2; r++)
                online_softmax<NV>(f, batch, first_row + 2 * row_group() + r, first + VECTOR * column_group(), s[r],
                                   row[r], acc[r]);
            store_s_p(tile.p, s);
            add_gemm<NV>(acc, tile.p, tile.v, (int)f.head_dim_v, tile.pitch);
        }
        store_output<T, NV>(f, bh, first_row, row, acc);
    }
}

/* ---- backward ---- */

/* delta = sum of y * dy over a row, which equals the sum of probability * gradient. A warp takes a row. */
template <class T> __global__ void __launch_bounds__(THREADS) flash_delta_kernel(const ont_flash_params f)
{
    typedef typename ont_compute<T>::type C;
    int lane = (int)threadIdx.x & 31;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5); row < f.n_bh * f.seqlen_q;
         row += (int64_t)gridDim.x * WARPS) {
        int64_t at = flash_offset(f, ONT_FLASH_Y, row / f.seqlen_q) +
                     row % f.seqlen_q * f.layout[ONT_FLASH_Y].row_stride;
        C delta = 0;
        for (int64_t c = lane; c < f.head_dim_v; c += 32)
            delta += ont_load((const T *)f.y + at + c) * ont_load((const T *)f.dy + at + c);
        delta = ont_warp_sum(delta);
        if (!lane) ((C *)f.delta)[row] = delta;
    }
}

/* Statistics of a row of scores: its probabilities are exp(score - row_max) / row_sum. */
template <class C> struct row_stats {
    C row_max, row_sum, delta;
    bool is_masked; /* masked, or outside the matrix: no gradient */
};

template <class C> ONT_DEVICE row_stats<C> load_row_stats(const ont_flash_params &f, int64_t bh, int64_t i)
{
    row_stats<C> x = {0, 1, 0, true};
    if (i >= f.seqlen_q) return x;
    const C *stats = (const C *)f.stats + (bh * f.seqlen_q + i) * 2;
    x.row_max = stats[0] == -(C)INFINITY ? (C)0 : stats[0];
    x.row_sum = stats[1];
    x.delta = ((const C *)f.delta)[bh * f.seqlen_q + i];
    x.is_masked = flash_is_nan_row(f, x.row_sum) || flash_is_masked_row(f, bh, i);
    return x;
}

/* s, four scores of each of two queries from key j on, become their gradients; dp are those of the probabilities. */
template <class C>
ONT_DEVICE void grad_of_query_scores(const ont_flash_params &f, const flash_batch &batch, int64_t first_row, int64_t j,
                                     const row_stats<C> row[2], C s[2][VECTOR], const C dp[2][VECTOR])
{
    for (int r = 0; r < 2; r++) {
        int64_t i = first_row + 2 * row_group() + r, at = (batch.bh * f.seqlen_q + i) * f.seqlen_k + j;
        uint32_t random_bits[VECTOR] = {};
        if (f.has_dropout) flash_random_bits<VECTOR>(f, at, random_bits);
        for (int k = 0; k < VECTOR; k++) {
            C ds = 0;
            if (!row[r].is_masked && j + k < f.seqlen_k && !flash_is_masked(f, batch, i, j + k)) {
                C score = flash_score(f, batch, i, j + k, s[r][k] * (C)f.scale);
                C p = vexp(score - row[r].row_max) / row[r].row_sum;
                ds = p * (dp[r][k] * flash_dropout_factor<C>(f, random_bits[k]) - row[r].delta);
            }
            if (f.dbias && i < f.seqlen_q && j + k < f.seqlen_k) flash_store(f.dbias, f.bias_dtype, at + k, ds);
            s[r][k] = ds * (C)f.scale;
        }
    }
}

/* Adds to acc what batch index bh gives to dQ of the tile's queries. */
template <class T, int NV, class C>
ONT_DEVICE void add_dq(const ont_flash_params &f, int64_t bh, int64_t first_row, const shared_tiles<C> &tile,
                       C acc[2][NV][VECTOR])
{
    flash_batch batch = flash_batch_of(f, bh);
    int64_t end = flash_visible_keys(f, first_row + TILE < f.seqlen_q ? first_row + TILE - 1 : f.seqlen_q - 1);
    if (f.dbias) end = f.seqlen_k; /* dbias is 0 for keys behind the causal mask */
    row_stats<C> row[2];
    for (int r = 0; r < 2; r++) row[r] = load_row_stats<C>(f, bh, first_row + 2 * row_group() + r);
    __syncthreads();
    load_tile(flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh), first_row, tile.pitch, false, tile.q);
    load_tile(flash_matrix_of<const T>(f, ONT_FLASH_Y, f.dy, bh), first_row, tile.pitch, false, tile.dy);
    for (int64_t first = 0; first < end; first += TILE) {
        if (SKIPS<C> && flash_is_hidden<TILE, TILE>(f, bh, (int)first_row, (int)first)) continue;
        COUNT_TILE();
        __syncthreads();
        load_tile(flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh), first, tile.pitch, true, tile.k);
        load_tile(flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh), first, tile.pitch, true, tile.v);
        __syncthreads();
        C s[2][VECTOR], dp[2][VECTOR];
        gemm_nt(tile.q, tile.k, (int)f.head_dim, tile.pitch, s);
        gemm_nt(tile.dy, tile.v, (int)f.head_dim_v, tile.pitch, dp);
        grad_of_query_scores(f, batch, first_row, first + VECTOR * column_group(), row, s, dp);
        store_s_p(tile.p, s);
        if (f.dq) add_gemm<NV>(acc, tile.p, tile.k, (int)f.head_dim, tile.pitch);
    }
}

template <class T, int NV>
__global__ void __launch_bounds__(THREADS, 2) flash_dq_kernel(const ont_flash_params f, unsigned summed_dims,
                                                              int64_t n_summed)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    shared_tiles<C> tile = tiles_in(shared, f, true);
    int64_t tiles = (f.seqlen_q + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.n_bh / n_summed * tiles; item += gridDim.x) {
        int64_t first_row = (tiles - 1 - item % tiles) * TILE;
        C acc[2][NV][VECTOR] = {};
        for (int64_t n = 0; n < n_summed; n++)
            add_dq<T, NV>(f, flash_bh(f, summed_dims, item / tiles, n), first_row, tile, acc);
        if (!f.dq) continue;
        int64_t bh = flash_bh(f, summed_dims, item / tiles, 0);
        store_grad_rows<T, NV>(flash_matrix_of<T>(f, ONT_FLASH_Q, f.dq, bh), first_row, acc);
    }
}

/* s, scores of two keys from j on and four queries from i on, become their gradients, and p the probabilities after
 * dropout; dp are the gradients of the probabilities. */
template <class C>
ONT_DEVICE void grad_of_key_scores(const ont_flash_params &f, const flash_batch &batch, int64_t first_row, int64_t j,
                                   C s[2][VECTOR], const C dp[2][VECTOR], C p[2][VECTOR])
{
    for (int k = 0; k < VECTOR; k++) {
        int64_t i = first_row + k;
        row_stats<C> row = load_row_stats<C>(f, batch.bh, i);
        uint32_t random_bits[2] = {};
        if (f.has_dropout) flash_random_bits<2>(f, (batch.bh * f.seqlen_q + i) * f.seqlen_k + j, random_bits);
        for (int r = 0; r < 2; r++) {
            p[r][k] = 0;
            C ds = 0;
            if (!row.is_masked && j + r < f.seqlen_k) {
                C dropout = flash_dropout_factor<C>(f, random_bits[r]);
                C score = flash_score(f, batch, i, j + r, s[r][k] * (C)f.scale);
                C e = vexp(score - row.row_max) / row.row_sum;
                p[r][k] = e * dropout;
                if (!flash_is_masked(f, batch, i, j + r)) ds = e * (dp[r][k] * dropout - row.delta) * (C)f.scale;
            }
            s[r][k] = ds;
        }
    }
}

/* Adds to dk and dv what batch index bh gives to the tile's keys, over its queries from `begin` on. */
template <class T, int NV, class C>
ONT_DEVICE void add_dkv(const ont_flash_params &f, int64_t bh, int64_t first_key, int64_t begin,
                        const shared_tiles<C> &tile, C dk[2][NV][VECTOR], C dv[2][NV][VECTOR])
{
    const uint8_t *column = flash_tile_column(f, bh, (int)first_key);
    flash_batch batch = flash_batch_of(f, bh);
    __syncthreads();
    load_tile(flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh), first_key, tile.pitch, false, tile.k);
    load_tile(flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh), first_key, tile.pitch, false, tile.v);
    for (int64_t first = begin; first < f.seqlen_q; first += TILE) {
        if (SKIPS<C> && flash_is_hidden_from<TILE>(f, column, (int)first)) continue;
        COUNT_TILE();
        __syncthreads();
        load_tile(flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh), first, tile.pitch, true, tile.q);
        load_tile(flash_matrix_of<const T>(f, ONT_FLASH_Y, f.dy, bh), first, tile.pitch, true, tile.dy);
        __syncthreads();
        C s[2][VECTOR], dp[2][VECTOR], p[2][VECTOR];
        gemm_nt(tile.k, tile.q, (int)f.head_dim, tile.pitch, s);
        gemm_nt(tile.v, tile.dy, (int)f.head_dim_v, tile.pitch, dp);
        grad_of_key_scores(f, batch, first + VECTOR * column_group(), first_key + 2 * row_group(), s, dp, p);
        if (f.dv) {
            store_s_p(tile.p, p);
            add_gemm<NV>(dv, tile.p, tile.dy, (int)f.head_dim_v, tile.pitch);
        }
        if (f.dk) {
            store_s_p(tile.p, s);
            add_gemm<NV>(dk, tile.p, tile.q, (int)f.head_dim, tile.pitch);
        }
    }
}

/* A thread block has 32 keys, and sums over the queries of every batch index that reads these keys. */
template <class T, int NV>
__global__ void __launch_bounds__(THREADS, 2) flash_dkv_kernel(const ont_flash_params f, unsigned summed_dims,
                                                               int64_t n_summed)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    shared_tiles<C> tile = tiles_in(shared, f, true);
    int64_t tiles = (f.seqlen_k + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.n_bh / n_summed * tiles; item += gridDim.x) {
        int64_t first_key = item % tiles * TILE, begin = flash_first_query(f, first_key) / TILE * TILE;
        C dk[2][NV][VECTOR] = {}, dv[2][NV][VECTOR] = {};
        for (int64_t n = 0; n < n_summed; n++)
            add_dkv<T, NV>(f, flash_bh(f, summed_dims, item / tiles, n), first_key, begin, tile, dk, dv);
        int64_t bh = flash_bh(f, summed_dims, item / tiles, 0);
        if (f.dk) store_grad_rows<T, NV>(flash_matrix_of<T>(f, ONT_FLASH_K, f.dk, bh), first_key, dk);
        if (f.dv) store_grad_rows<T, NV>(flash_matrix_of<T>(f, ONT_FLASH_V, f.dv, bh), first_key, dv);
    }
}

/* ---- launchers ---- */

static size_t shared_bytes(const ont_flash_params *f, int gradient)
{
    size_t z = f->dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float);
    return (size_t)((gradient ? 4 : 3) * TILE * pitch_of(f->head_dim, f->head_dim_v) + TILE * PITCH) * z;
}

extern "C" int ont_flash_fits(const ont_flash_params *f, int gradient)
{
    int64_t longest = f->head_dim > f->head_dim_v ? f->head_dim : f->head_dim_v;
    return longest <= (f->dtype == ONT_FLOAT64 ? 128 : ONT_FLASH_MAX_HEAD_DIM) &&
           shared_bytes(f, gradient) <= ont_shared_limit();
}

static unsigned blocks_of(int64_t n_bh, int64_t length) { return ont_blocks(n_bh * ((length + TILE - 1) / TILE), 1); }

template <class T, int NV> static int forward(const ont_flash_params *f, void *stream)
{
    size_t bytes = shared_bytes(f, 0);
    int error = ONT_ALLOW_SHARED((flash_kernel<T, NV>), bytes);
    return error ? error : ONT_LAUNCH((flash_kernel<T, NV>), blocks_of(f->n_bh, f->seqlen_q), THREADS, bytes, stream,
                                      *f);
}

template <class T, int NV> static int backward(const ont_flash_params *f, void *stream)
{
    size_t bytes = shared_bytes(f, 1);
    int error = ONT_ALLOW_SHARED((flash_dq_kernel<T, NV>), bytes);
    if (!error) error = ONT_ALLOW_SHARED((flash_dkv_kernel<T, NV>), bytes);
    if (error) return error;
    return flash_launch_grads(
        f,
        [&](const ont_flash_params &params, unsigned summed_dims, int64_t n_bh, int64_t n_summed) {
            return ONT_LAUNCH((flash_dq_kernel<T, NV>), blocks_of(n_bh, f->seqlen_q), THREADS, bytes, stream, params,
                              summed_dims, n_summed);
        },
        [&](const ont_flash_params &params, unsigned summed_dims, int64_t n_bh, int64_t n_summed) {
            return ONT_LAUNCH((flash_dkv_kernel<T, NV>), blocks_of(n_bh, f->seqlen_k), THREADS, bytes, stream, params,
                              summed_dims, n_summed);
        });
}

template <class T> static int delta_of(const ont_flash_params *f, void *stream)
{
    return ONT_LAUNCH(flash_delta_kernel<T>, ont_blocks(f->n_bh * f->seqlen_q, WARPS), THREADS, 0, stream, *f);
}

template <class T> static int launch(const ont_flash_params *f, bool gradient, void *stream)
{
    int64_t longest = f->head_dim > f->head_dim_v ? f->head_dim : f->head_dim_v;
    if constexpr (sizeof(T) == 4)
        if (longest <= 64) return (gradient ? backward<T, 2> : forward<T, 2>)(f, stream);
    if constexpr (sizeof(T) < 8)
        if (longest > 128) return (gradient ? backward<T, 8> : forward<T, 8>)(f, stream);
    return (gradient ? backward<T, 4> : forward<T, 4>)(f, stream);
}

extern "C" int ont_launch_flash(const ont_flash_params *f, void *stream)
{
    int error = f->tiles ? ont_launch_flash_tiles(f, stream) : 0;
    if (error) return error;
    if (ont_flash_has_mma(f, 0)) return ont_launch_flash_mma(f, stream);
    switch (f->dtype) {
    case ONT_FLOAT32: return launch<float>(f, false, stream);
    case ONT_FLOAT64: return launch<double>(f, false, stream);
    case ONT_FLOAT16: return launch<ont_f16>(f, false, stream);
    default: return launch<ont_bf16>(f, false, stream);
    }
}

extern "C" int ont_launch_flash_grad(const ont_flash_params *f, void *stream)
{
    int error;
    switch (f->dtype) {
    case ONT_FLOAT32: error = delta_of<float>(f, stream); break;
    case ONT_FLOAT64: error = delta_of<double>(f, stream); break;
    case ONT_FLOAT16: error = delta_of<ont_f16>(f, stream); break;
    default: error = delta_of<ont_bf16>(f, stream);
    }
    if (!error && f->tiles) error = ont_launch_flash_tiles(f, stream);
    if (error) return error;
    if (ont_flash_has_mma(f, 1)) return ont_launch_flash_mma_grad(f, stream);
    switch (f->dtype) {
    case ONT_FLOAT32: return launch<float>(f, true, stream);
    case ONT_FLOAT64: return launch<double>(f, true, stream);
    case ONT_FLOAT16: return launch<ont_f16>(f, true, stream);
    default: return launch<ont_bf16>(f, true, stream);
    }
}
