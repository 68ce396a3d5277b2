/*
 * Attention without stored probabilities, for any float dtype and head size: tiles of 32 queries by 32 keys in shared
 * memory, two by four scores to a thread. dQ and dK, dV come from two kernels: no two thread blocks add to one element,
 * so the result does not depend on their order. flash_mma.cu has the sizes and dtypes that fit tensor cores.
 * Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", NeurIPS 2022.
 */
#include "kernels/flash.cuh"

enum { TILE = 32, THREADS = 128, WARPS = THREADS / 32, PITCH = TILE + 4, VECTOR = 4 };

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

/* Loads rows [first, first + TILE) of `n` into shared memory, (TILE, pitch), padded with zeros. */
template <class T, class C>
ONT_DEVICE void load_tile(const T *from, int64_t row_stride, int64_t first, int64_t n, int size, int pitch,
                          bool swizzled, C *tile)
{
    for (int r = (int)threadIdx.x >> 5; r < TILE; r += WARPS) {
        const T *row = from + (first + r) * row_stride;
        C *to = tile + (swizzled ? swizzled_row(r) : r) * pitch;
        for (int c = (int)threadIdx.x & 31; c < pitch; c += 32)
            to[c] = first + r < n && c < size ? ont_load(&row[c]) : (C)0;
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

template <class T, int NV, class C>
ONT_DEVICE void store_rows(T *to, int64_t row_stride, int64_t first, int64_t n, int size, const C acc[2][NV][VECTOR],
                           const C factor[2], const bool zero[2])
{
    for (int r = 0; r < 2; r++) {
        int64_t i = first + 2 * row_group() + r;
        if (i >= n) continue;
        ONT_UNROLL
        for (int v = 0; v < NV; v++)
            for (int e = 0; e < VECTOR; e++) {
                int c = VECTOR * column_group() + 32 * v + e;
                if (c < size) ont_store(&to[i * row_stride + c], zero[r] ? (C)0 : acc[r][v][e] * factor[r]);
            }
    }
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

template <class T, int NV> __global__ void __launch_bounds__(THREADS, 2) flash_kernel(const ont_flash_params f)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    int head_dim = (int)f.head_dim, head_dim_v = (int)f.head_dim_v, pitch = pitch_of(head_dim, head_dim_v);
    C *s_q = shared, *s_k = s_q + TILE * pitch, *s_v = s_k + TILE * pitch, *s_p = s_v + TILE * pitch;
    int64_t tiles = (f.seqlen_q + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.n_bh * tiles; item += gridDim.x) {
        int64_t bh = item / tiles,
                first_row = (tiles - 1 - item % tiles) * TILE; /* the last queries, with the most keys, first */
        int64_t end = flash_visible_keys(f, first_row + TILE < f.seqlen_q ? first_row + TILE - 1 : f.seqlen_q - 1);
        flash_masks masks = flash_masks_of(f, bh);
        C acc[2][NV][VECTOR] = {}, row_max[2] = {-(C)INFINITY, -(C)INFINITY}, row_sum[2] = {0, 0};
        __syncthreads(); /* all warps have read the tiles of the previous item */
        load_tile((const T *)f.q + flash_offset(f, ONT_FLASH_Q, bh), f.layout[ONT_FLASH_Q].row_stride, first_row,
                  f.seqlen_q, head_dim, pitch, false, s_q);
        for (int64_t first = 0; first < end; first += TILE) {
            __syncthreads();
            load_tile((const T *)f.k + flash_offset(f, ONT_FLASH_K, bh), f.layout[ONT_FLASH_K].row_stride, first,
                      f.seqlen_k, head_dim, pitch, true, s_k);
            load_tile((const T *)f.v + flash_offset(f, ONT_FLASH_V, bh), f.layout[ONT_FLASH_V].row_stride, first,
                      f.seqlen_k, head_dim_v, pitch, true, s_v);
            __syncthreads();
            C s[2][VECTOR];
            gemm_nt(s_q, s_k, head_dim, pitch, s);
            for (int r = 0; r < 2; r++) {
                int64_t i = first_row + 2 * row_group() + r, j = first + VECTOR * column_group();
                C new_max = row_max[r];
                for (int k = 0; k < VECTOR; k++) {
                    bool inside = i < f.seqlen_q && j + k < f.seqlen_k;
                    s[r][k] = inside ? flash_score(f, masks, i, j + k, s[r][k] * (C)f.scale) : -(C)INFINITY;
                    new_max = s[r][k] > new_max ? s[r][k] : new_max;
                }
                new_max = reduce_max(new_max);
                C base = new_max == -(C)INFINITY ? (C)0 : new_max, rescale = vexp(row_max[r] - base), block_sum = 0;
                uint32_t random_bits[VECTOR];
                if (f.has_dropout) flash_random_bits<VECTOR>(f, (bh * f.seqlen_q + i) * f.seqlen_k + j, random_bits);
                for (int k = 0; k < VECTOR; k++) {
                    C e = vexp(s[r][k] - base);
                    block_sum += e;
                    s[r][k] = !f.has_dropout                          ? e
                              : random_bits[k] >= f.dropout_threshold ? e * (C)f.dropout_scale
                                                                      : e * (C)0;
                }
                row_sum[r] = row_sum[r] * rescale + reduce_sum(block_sum);
                row_max[r] = new_max;
                for (int n = 0; n < NV; n++)
                    for (int e = 0; e < VECTOR; e++) acc[r][n][e] *= rescale;
            }
            store_s_p(s_p, s);
            add_gemm<NV>(acc, s_p, s_v, head_dim_v, pitch);
        }
        C inverse[2];
        bool zero[2];
        for (int r = 0; r < 2; r++) {
            int64_t i = first_row + 2 * row_group() + r;
            inverse[r] = 1 / row_sum[r];
            zero[r] = i < f.seqlen_q && (flash_is_nan_row(f, row_sum[r]) || flash_is_masked_row(f, bh, i));
            if (!f.stats || column_group() || i >= f.seqlen_q) continue;
            ((C *)f.stats)[(bh * f.seqlen_q + i) * 2] = row_max[r];
            ((C *)f.stats)[(bh * f.seqlen_q + i) * 2 + 1] = row_sum[r];
        }
        store_rows<T, NV>((T *)f.y + flash_offset(f, ONT_FLASH_Y, bh), f.layout[ONT_FLASH_Y].row_stride, first_row,
                          f.seqlen_q, head_dim_v, acc, inverse, zero);
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

template <class T, int NV>
__global__ void __launch_bounds__(THREADS, 2) flash_dq_kernel(const ont_flash_params f, unsigned summed_dims,
                                                              int64_t n_summed)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    int head_dim = (int)f.head_dim, head_dim_v = (int)f.head_dim_v, pitch = pitch_of(head_dim, head_dim_v);
    C *s_q = shared, *s_dy = s_q + TILE * pitch, *s_k = s_dy + TILE * pitch, *s_v = s_k + TILE * pitch,
      *s_p = s_v + TILE * pitch;
    int64_t tiles = (f.seqlen_q + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.n_bh / n_summed * tiles; item += gridDim.x) {
        int64_t first_row = (tiles - 1 - item % tiles) * TILE;
        int64_t end = flash_visible_keys(f, first_row + TILE < f.seqlen_q ? first_row + TILE - 1 : f.seqlen_q - 1);
        if (f.dbias) end = f.seqlen_k; /* dbias is 0 for keys behind the causal mask */
        C acc[2][NV][VECTOR] = {};
        for (int64_t sum_index = 0; sum_index < n_summed; sum_index++) {
            int64_t bh = flash_bh(f, summed_dims, item / tiles, sum_index);
            flash_masks masks = flash_masks_of(f, bh);
            row_stats<C> row[2];
            for (int r = 0; r < 2; r++) row[r] = load_row_stats<C>(f, bh, first_row + 2 * row_group() + r);
            __syncthreads();
            load_tile((const T *)f.q + flash_offset(f, ONT_FLASH_Q, bh), f.layout[ONT_FLASH_Q].row_stride, first_row,
                      f.seqlen_q, head_dim, pitch, false, s_q);
            load_tile((const T *)f.dy + flash_offset(f, ONT_FLASH_Y, bh), f.layout[ONT_FLASH_Y].row_stride, first_row,
                      f.seqlen_q, head_dim_v, pitch, false, s_dy);
            for (int64_t first = 0; first < end; first += TILE) {
                __syncthreads();
                load_tile((const T *)f.k + flash_offset(f, ONT_FLASH_K, bh), f.layout[ONT_FLASH_K].row_stride, first,
                          f.seqlen_k, head_dim, pitch, true, s_k);
                load_tile((const T *)f.v + flash_offset(f, ONT_FLASH_V, bh), f.layout[ONT_FLASH_V].row_stride, first,
                          f.seqlen_k, head_dim_v, pitch, true, s_v);
                __syncthreads();
                C s[2][VECTOR], dp[2][VECTOR];
                gemm_nt(s_q, s_k, head_dim, pitch, s);
                gemm_nt(s_dy, s_v, head_dim_v, pitch, dp);
                for (int r = 0; r < 2; r++) {
                    int64_t i = first_row + 2 * row_group() + r, j = first + VECTOR * column_group();
                    uint32_t random_bits[VECTOR];
                    if (f.has_dropout)
                        flash_random_bits<VECTOR>(f, (bh * f.seqlen_q + i) * f.seqlen_k + j, random_bits);
                    for (int k = 0; k < VECTOR; k++) {
                        C ds = 0;
                        if (!row[r].is_masked && j + k < f.seqlen_k && !flash_is_masked(f, masks, i, j + k)) {
                            C p = vexp(flash_score(f, masks, i, j + k, s[r][k] * (C)f.scale) - row[r].row_max) /
                                  row[r].row_sum;
                            C dropout = !f.has_dropout                          ? (C)1
                                        : random_bits[k] >= f.dropout_threshold ? (C)f.dropout_scale
                                                                                : (C)0;
                            ds = p * (dp[r][k] * dropout - row[r].delta);
                        }
                        if (f.dbias && i < f.seqlen_q && j + k < f.seqlen_k)
                            flash_store(f.dbias, f.bias_dtype, (bh * f.seqlen_q + i) * f.seqlen_k + j + k, ds);
                        s[r][k] = ds * (C)f.scale;
                    }
                }
                store_s_p(s_p, s);
                if (f.dq) add_gemm<NV>(acc, s_p, s_k, head_dim, pitch);
            }
        }
        C one[2] = {1, 1};
        bool zero[2] = {false, false};
        if (!f.dq) continue;
        int64_t at = flash_offset(f, ONT_FLASH_Q, flash_bh(f, summed_dims, item / tiles, 0));
        store_rows<T, NV>((T *)f.dq + at, f.layout[ONT_FLASH_Q].row_stride, first_row, f.seqlen_q, head_dim, acc, one,
                          zero);
    }
}

/* A thread block has 32 keys, and sums over the queries of every batch index that reads these keys. */
template <class T, int NV>
__global__ void __launch_bounds__(THREADS, 2) flash_dkv_kernel(const ont_flash_params f, unsigned summed_dims,
                                                               int64_t n_summed)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    int head_dim = (int)f.head_dim, head_dim_v = (int)f.head_dim_v, pitch = pitch_of(head_dim, head_dim_v);
    C *s_k = shared, *s_v = s_k + TILE * pitch, *s_q = s_v + TILE * pitch, *s_dy = s_q + TILE * pitch,
      *s_p = s_dy + TILE * pitch;
    int64_t tiles = (f.seqlen_k + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.n_bh / n_summed * tiles; item += gridDim.x) {
        int64_t first_key = item % tiles * TILE, begin = flash_first_query(f, first_key) / TILE * TILE,
                j0 = first_key + 2 * row_group();
        C dk[2][NV][VECTOR] = {}, dv[2][NV][VECTOR] = {};
        for (int64_t sum_index = 0; sum_index < n_summed; sum_index++) {
            int64_t bh = flash_bh(f, summed_dims, item / tiles, sum_index);
            flash_masks masks = flash_masks_of(f, bh);
            __syncthreads();
            load_tile((const T *)f.k + flash_offset(f, ONT_FLASH_K, bh), f.layout[ONT_FLASH_K].row_stride, first_key,
                      f.seqlen_k, head_dim, pitch, false, s_k);
            load_tile((const T *)f.v + flash_offset(f, ONT_FLASH_V, bh), f.layout[ONT_FLASH_V].row_stride, first_key,
                      f.seqlen_k, head_dim_v, pitch, false, s_v);
            for (int64_t first = begin; first < f.seqlen_q; first += TILE) {
                __syncthreads();
                load_tile((const T *)f.q + flash_offset(f, ONT_FLASH_Q, bh), f.layout[ONT_FLASH_Q].row_stride, first,
                          f.seqlen_q, head_dim, pitch, true, s_q);
                load_tile((const T *)f.dy + flash_offset(f, ONT_FLASH_Y, bh), f.layout[ONT_FLASH_Y].row_stride, first,
                          f.seqlen_q, head_dim_v, pitch, true, s_dy);
                __syncthreads();
                C s[2][VECTOR], dp[2][VECTOR], p[2][VECTOR];
                gemm_nt(s_k, s_q, head_dim, pitch, s);
                gemm_nt(s_v, s_dy, head_dim_v, pitch, dp);
                for (int k = 0; k < VECTOR; k++) {
                    int64_t i = first + VECTOR * column_group() + k;
                    row_stats<C> row = load_row_stats<C>(f, bh, i);
                    uint32_t random_bits[2];
                    if (f.has_dropout) flash_random_bits<2>(f, (bh * f.seqlen_q + i) * f.seqlen_k + j0, random_bits);
                    for (int r = 0; r < 2; r++) {
                        p[r][k] = 0;
                        C ds = 0;
                        if (!row.is_masked && j0 + r < f.seqlen_k) {
                            C dropout = !f.has_dropout                          ? (C)1
                                        : random_bits[r] >= f.dropout_threshold ? (C)f.dropout_scale
                                                                                : (C)0;
                            C score = flash_score(f, masks, i, j0 + r, s[r][k] * (C)f.scale);
                            C e = vexp(score - row.row_max) / row.row_sum;
                            p[r][k] = e * dropout;
                            if (!flash_is_masked(f, masks, i, j0 + r))
                                ds = e * (dp[r][k] * dropout - row.delta) * (C)f.scale;
                        }
                        s[r][k] = ds;
                    }
                }
                if (f.dv) {
                    store_s_p(s_p, p);
                    add_gemm<NV>(dv, s_p, s_dy, head_dim_v, pitch);
                }
                if (f.dk) {
                    store_s_p(s_p, s);
                    add_gemm<NV>(dk, s_p, s_q, head_dim, pitch);
                }
            }
        }
        C one[2] = {1, 1};
        bool zero[2] = {false, false};
        int64_t bh = flash_bh(f, summed_dims, item / tiles, 0);
        if (f.dk)
            store_rows<T, NV>((T *)f.dk + flash_offset(f, ONT_FLASH_K, bh), f.layout[ONT_FLASH_K].row_stride, first_key,
                              f.seqlen_k, head_dim, dk, one, zero);
        if (f.dv)
            store_rows<T, NV>((T *)f.dv + flash_offset(f, ONT_FLASH_V, bh), f.layout[ONT_FLASH_V].row_stride, first_key,
                              f.seqlen_k, head_dim_v, dv, one, zero);
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

/* dK and dV in one launch where they are summed over the same batch dims, else in two. */
template <class T, int NV> static int backward_kv(const ont_flash_params *f, void *stream)
{
    size_t bytes = shared_bytes(f, 1);
    unsigned k = flash_summed_dims(f, ONT_FLASH_K), v = flash_summed_dims(f, ONT_FLASH_V);
    int error = ONT_ALLOW_SHARED((flash_dkv_kernel<T, NV>), bytes);
    for (int pass = 0; pass < 2 && !error; pass++) {
        ont_flash_params params = *f;
        bool both = k == v;
        if (!both) (pass ? params.dk : params.dv) = nullptr;
        unsigned summed_dims = both || !pass ? k : v;
        if ((both && pass) || (!params.dk && !params.dv)) continue;
        error = ONT_LAUNCH((flash_dkv_kernel<T, NV>), blocks_of(flash_count_dims(f, summed_dims, false), f->seqlen_k),
                           THREADS, bytes, stream, params, summed_dims, flash_count_dims(f, summed_dims, true));
    }
    return error;
}

template <class T, int NV> static int backward(const ont_flash_params *f, void *stream)
{
    size_t bytes = shared_bytes(f, 1);
    unsigned summed_dims = f->dq ? flash_summed_dims(f, ONT_FLASH_Q) : 0;
    int error = ONT_ALLOW_SHARED((flash_dq_kernel<T, NV>), bytes);
    if (!error && (f->dq || f->dbias))
        error = ONT_LAUNCH((flash_dq_kernel<T, NV>), blocks_of(flash_count_dims(f, summed_dims, false), f->seqlen_q),
                           THREADS, bytes, stream, *f, summed_dims, flash_count_dims(f, summed_dims, true));
    return error || (!f->dk && !f->dv) ? error : backward_kv<T, NV>(f, stream);
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
    if (error) return error;
    if (ont_flash_has_mma(f, 1)) return ont_launch_flash_mma_grad(f, stream);
    switch (f->dtype) {
    case ONT_FLOAT32: return launch<float>(f, true, stream);
    case ONT_FLOAT64: return launch<double>(f, true, stream);
    case ONT_FLOAT16: return launch<ont_f16>(f, true, stream);
    default: return launch<ont_bf16>(f, true, stream);
    }
}
