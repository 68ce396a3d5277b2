/*
 * Which tiles of attention's scores bias and mask hide as a whole, for flash.cu and flash_mma.cu, which leave these
 * out: padding, and what a causal mask hides that is an operand. The host reads nothing.
 *
 * A tile is left out only where it would change no result:
 * - Its scores are below FAR, or hidden by the causal mask, so that their probabilities are 0.
 * - Each of its queries sees a key of another tile, or is masked. A row without one attends to all its keys, or is NaN.
 * - Its keys and values are finite, since 0 times another value is NaN; in the gradient, so are what its queries give.
 */
#include "kernels/flash.cuh"

enum { THREADS = 128, WARPS = THREADS / 32, QUERIES = ONT_FLASH_TILE_QUERIES, KEYS = ONT_FLASH_TILE_KEYS };
enum { CHUNK = 2 * WARPS }; /* key tiles of a block of flash_tiles_kernel */
/* Of the core's VisibleKeys, too: a score below it is far from any real one. */
#define FAR (-1e30f)

/* Batch indices with the same bias and masks: those along dims along which none of these varies. */
struct shared_masks {
    unsigned dims;
    int64_t n, n_each; /* matrices, and batch indices of each */
    bool one_row;      /* the same for all queries */
    uint8_t *tiles;    /* (n, query_tiles, key_tiles) */
};

/* What bias and mask make of a score of 0. */
ONT_DEVICE float masked_score(const ont_flash_params &f, const flash_batch &batch, int64_t i, int64_t j)
{
    if (flash_is_masked(f, batch, i, j)) return (float)f.mask_value;
    if (!f.bias) return 0;
    const ont_flash_layout &v = f.layout[ONT_FLASH_BIAS];
    return flash_load<float>(f.bias, f.bias_dtype, batch.bias + i * v.row_stride + j * v.col_stride);
}

/* NaN is visible. */
ONT_DEVICE bool is_visible(const ont_flash_params &f, const flash_batch &batch, int64_t i, int64_t j)
{
    return !(masked_score(f, batch, i, j) < FAR);
}

/* The queries of a tile, as bits, whose results are 0 whatever they see. */
ONT_DEVICE uint64_t queries_without_result(const ont_flash_params &f, const flash_batch &batch, int64_t first_row,
                                           int n)
{
    const int lane = (int)threadIdx.x & 31;
    uint64_t found = 0;
    for (int r = 0; r < n; r += 32) {
        bool masked = r + lane < n && flash_is_masked_row(f, batch.bh, first_row + r + lane);
        found |= (uint64_t)__ballot_sync(0xffffffffu, masked) << r;
    }
    return found;
}

/* The queries of a tile, as bits, that see a key of a tile; of queries with one row of masks, the first and the last.
 * A warp has a key each lane. */
ONT_DEVICE uint64_t queries_that_see(const ont_flash_params &f, const shared_masks &m, const flash_batch &batch,
                                     int64_t first_row, int n, int64_t first_key)
{
    int64_t j = first_key + ((int)threadIdx.x & 31);
    bool visible = m.one_row && j < f.seqlen_k && is_visible(f, batch, first_row, j);
    uint64_t found = 0;
    for (int r = 0; r < n; r += m.one_row && n > 1 ? n - 1 : 1) {
        bool inside = j < flash_visible_keys(f, first_row + r);
        if (!m.one_row) visible = inside && is_visible(f, batch, first_row + r, j);
        if (__ballot_sync(0xffffffffu, visible && inside)) found |= UINT64_C(1) << r;
    }
    return found;
}

/* A block has a tile of queries of one matrix, a warp of it every fourth tile of keys. */
__global__ void __launch_bounds__(THREADS) flash_mask_tiles_kernel(const ont_flash_params f, const shared_masks m)
{
    __shared__ uint64_t seeing[WARPS];
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    for (int64_t item = blockIdx.x; item < m.n * f.query_tiles; item += gridDim.x) {
        const int64_t first_row = item % f.query_tiles * QUERIES, left = f.seqlen_q - first_row;
        const int n = left < 0 ? 0 : left < QUERIES ? (int)left : QUERIES;
        const flash_batch batch = flash_batch_of(f, flash_bh(f, m.dims, item / f.query_tiles, 0));
        uint8_t *row = m.tiles + item * f.key_tiles;
        uint64_t sees = queries_without_result(f, batch, first_row, n);
        for (int k = warp; k < f.key_tiles; k += WARPS) {
            uint64_t found = queries_that_see(f, m, batch, first_row, n, (int64_t)k * KEYS);
            if (!lane) row[k] = found != 0;
            sees |= found;
        }
        if (!lane) seeing[warp] = sees;
        __syncthreads();
        for (int w = 0; w < WARPS; w++) sees |= seeing[w];
        const uint64_t all = n == QUERIES ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1, some = m.one_row ? all & 1 : all;
        for (int k = warp; k < f.key_tiles && (sees & some) != some; k += WARPS)
            if (!lane) row[k] = 1;
        __syncthreads();
    }
}

template <class T> ONT_DEVICE bool is_finite(T x) { return x - x == 0; }

/* Whether a warp finds rows [first, first + KEYS) of a matrix finite. */
template <class T> ONT_DEVICE bool rows_are_finite(const flash_matrix<const T> &m, int64_t first)
{
    bool fine = true;
    for (int r = 0; r < KEYS && first + r < m.n; r++)
        for (int c = (int)threadIdx.x & 31; c < m.size; c += 32)
            fine = fine && is_finite(ont_load(m.data + (first + r) * m.row_stride + c));
    return !__ballot_sync(0xffffffffu, !fine);
}

/* Whether a warp finds dy, y and the sums of a tile of queries finite. */
template <class C> ONT_DEVICE bool gradient_is_finite(const ont_flash_params &f, int64_t bh, int64_t first)
{
    bool fine = true;
    for (int r = (int)threadIdx.x & 31; r < QUERIES && first + r < f.seqlen_q; r += 32) {
        const int64_t row = bh * f.seqlen_q + first + r;
        fine = fine && is_finite(((const C *)f.delta)[row]) && is_finite(((const C *)f.stats)[2 * row + 1]);
    }
    return !__ballot_sync(0xffffffffu, !fine);
}

/* A block has CHUNK key tiles of one batch index, a warp of it a column of tiles at a time. */
template <class T>
__global__ void __launch_bounds__(THREADS) flash_tiles_kernel(const ont_flash_params f, const shared_masks m)
{
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const int64_t chunks = (f.key_tiles + CHUNK - 1) / CHUNK;
    for (int64_t item = blockIdx.x; item < f.n_bh * chunks; item += gridDim.x) {
        const int64_t at = item / chunks, matrix = at / m.n_each, bh = flash_bh(f, m.dims, matrix, at % m.n_each);
        const uint8_t *from = m.tiles + matrix * f.query_tiles * f.key_tiles;
        uint8_t *to = f.tiles + bh * f.query_tiles * f.key_tiles;
        const int begin = (int)(item % chunks) * CHUNK, end = begin + CHUNK < f.key_tiles ? begin + CHUNK : f.key_tiles;
        for (int k = begin + warp; k < end; k += WARPS) {
            bool hides = false;
            for (int i = lane; i < f.query_tiles; i += 32) hides = hides || !from[(int64_t)i * f.key_tiles + k];
            bool fine = !__ballot_sync(0xffffffffu, hides);
            fine = fine || (rows_are_finite(flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh), (int64_t)k * KEYS) &&
                            rows_are_finite(flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh), (int64_t)k * KEYS));
            for (int i = lane; i < f.query_tiles; i += 32)
                to[(int64_t)i * f.key_tiles + k] = !fine || from[(int64_t)i * f.key_tiles + k];
        }
        if (!f.dy) continue;
        __syncthreads();
        for (int i = warp; i < f.query_tiles; i += WARPS)
            if (!gradient_is_finite<typename ont_compute<T>::type>(f, bh, (int64_t)i * QUERIES))
                for (int k = begin + lane; k < end; k += 32) to[(int64_t)i * f.key_tiles + k] = 1;
        __syncthreads();
    }
}

/* ---- launchers ---- */

/* Layouts of operands that are not there are zero. */
static shared_masks masks_of(const ont_flash_params *f)
{
    shared_masks m = {};
    m.dims = ~0u;
    m.one_row = true;
    for (int i = ONT_FLASH_BIAS; i <= ONT_FLASH_MASKED_ROWS; i++) {
        m.dims &= flash_summed_dims(f, i);
        m.one_row = m.one_row && !f->layout[i].row_stride;
    }
    m.n = flash_count_dims(f, m.dims, false);
    m.n_each = flash_count_dims(f, m.dims, true);
    return m;
}

/* Masks with rows of their own are read for at least two heads: attention itself reads them for each. */
extern "C" size_t ont_flash_tiles_bytes(ont_flash_params *f, bool has_bias, bool has_mask)
{
    const shared_masks m = masks_of(f);
    f->query_tiles = f->key_tiles = 0;
    if ((!has_bias && (!has_mask || !(f->mask_value < FAR))) || (!m.one_row && m.n_each < 2)) return 0;
    if (f->dtype == ONT_FLOAT64 || f->seqlen_k <= KEYS) return 0;
    if (f->seqlen_q > INT32_MAX / 2 || f->seqlen_k > INT32_MAX / 2) return 0;
    f->query_tiles = (int32_t)((f->seqlen_q + 2 * QUERIES - 1) / (2 * QUERIES) * 2);
    f->key_tiles = (int32_t)((f->seqlen_k + 2 * KEYS - 1) / (2 * KEYS) * 2);
    const int64_t bytes = (f->n_bh + m.n) * f->query_tiles * f->key_tiles;
    return bytes <= INT32_MAX ? (size_t)bytes : 0;
}

template <class T> static int launch(const ont_flash_params *f, const shared_masks &m, void *stream)
{
    const int64_t chunks = (f->key_tiles + CHUNK - 1) / CHUNK;
    return ONT_LAUNCH(flash_tiles_kernel<T>, ont_blocks(f->n_bh * chunks, 1), THREADS, 0, stream, *f, m);
}

extern "C" int ont_launch_flash_tiles(const ont_flash_params *f, void *stream)
{
    shared_masks m = masks_of(f);
    m.tiles = f->tiles + f->n_bh * f->query_tiles * f->key_tiles;
    int error = ONT_LAUNCH(flash_mask_tiles_kernel, ont_blocks(m.n * f->query_tiles, 1), THREADS, 0, stream, *f, m);
    if (error) return error;
    switch (f->dtype) {
    case ONT_FLOAT32: return launch<float>(f, m, stream);
    case ONT_FLOAT16: return launch<ont_f16>(f, m, stream);
    default: return launch<ont_bf16>(f, m, stream);
    }
}

/* ---- VisibleKeys (csrc/ops/index/rows.c): which keys some query attends to ---- */

enum { SEES_NOTHING, SEES_SOME, SEES_ALL }; /* of a query: all its keys where it sees none of them */

/* n_keys: indices over the dims along which keys vary, n_others: over `others`, where masks vary but not keys; n_q:
 * queries that differ; inner: elements of a row of K's tensor */
struct key_work {
    unsigned others;
    int64_t n_keys, n_others, n_q, inner;
};

/* A warp has a query of one batch index. */
__global__ void __launch_bounds__(THREADS)
    visible_queries_kernel(const ont_flash_params f, int64_t n_q, uint8_t *sees)
{
    const int lane = (int)threadIdx.x & 31;
    for (int64_t item = blockIdx.x * (int64_t)WARPS + (threadIdx.x >> 5); item < f.n_bh * n_q;
         item += (int64_t)gridDim.x * WARPS) {
        const int64_t bh = item / n_q, i = item - bh * n_q, n = flash_visible_keys(f, i);
        const flash_batch batch = flash_batch_of(f, bh);
        bool visible = false, finite = false;
        for (int64_t first = 0; first < n && !visible; first += 32) {
            const int64_t j = first + lane;
            const float score = j < n ? masked_score(f, batch, i, j) : -INFINITY;
            finite = __ballot_sync(0xffffffffu, score > -INFINITY) != 0 || finite;
            visible = __ballot_sync(0xffffffffu, !(score < FAR)) != 0;
        }
        const bool nothing = flash_is_masked_row(f, bh, i) || (!visible && f.zero_nan && !finite);
        if (!lane) sees[item] = nothing ? SEES_NOTHING : visible ? SEES_SOME : SEES_ALL;
    }
}

/* A thread has a key of one index over the dims along which keys vary. */
__global__ void __launch_bounds__(THREADS)
    visible_keys_kernel(const ont_flash_params f, const key_work w, const uint8_t *sees, uint8_t *marks)
{
    const ont_flash_layout &k = f.layout[ONT_FLASH_K];
    ONT_FOR(item, w.n_keys * f.seqlen_k) {
        const int64_t matrix = item / f.seqlen_k, j = item - matrix * f.seqlen_k;
        bool found = false;
        for (int64_t other = 0; other < w.n_others && !found; other++) {
            const int64_t bh = flash_bh(f, w.others, matrix, other);
            const flash_batch batch = flash_batch_of(f, bh);
            for (int64_t i = 0; i < w.n_q && !found; i++) {
                const int how = j < flash_visible_keys(f, i) ? sees[bh * w.n_q + i] : (int)SEES_NOTHING;
                found = how == SEES_ALL || (how == SEES_SOME && is_visible(f, batch, i, j));
            }
        }
        const int64_t first = flash_offset(f, ONT_FLASH_K, flash_bh(f, w.others, matrix, 0));
        marks[(first + j * k.row_stride) / w.inner] = found;
    }
}

/* Along dims where neither keys nor masks vary, index 0 stands for all. */
static ont_flash_params without_repeats(const ont_flash_params *f, int64_t inner, unsigned *others)
{
    ont_flash_params p = *f;
    *others = 0;
    for (int d = 0; d < p.n_batch_dims; d++) {
        bool varies = false;
        for (int i = ONT_FLASH_BIAS; i <= ONT_FLASH_MASKED_ROWS; i++) varies |= p.layout[i].batch_stride[d] != 0;
        if (p.layout[ONT_FLASH_K].batch_stride[d] >= inner) continue;
        if (varies) {
            *others |= 1u << d;
            continue;
        }
        p.n_bh /= p.batch_dims[d] ? p.batch_dims[d] : 1;
        if (p.batch_dims[d]) p.batch_dims[d] = 1;
    }
    return p;
}

/* 1 where all queries of a sequence see the same keys. */
static int64_t distinct_queries(const ont_flash_params *f)
{
    bool one = !f->causal;
    for (int i = ONT_FLASH_BIAS; i <= ONT_FLASH_MASKED_ROWS; i++) one = one && !f->layout[i].row_stride;
    return one && f->seqlen_q > 1 ? 1 : f->seqlen_q;
}

extern "C" size_t ont_visible_keys_work(const ont_flash_params *f)
{
    return (size_t)(f->n_bh * distinct_queries(f));
}

extern "C" int ont_launch_visible_keys(const ont_flash_params *f, int64_t inner, void *work, uint8_t *marks,
                                       void *stream)
{
    key_work w = {0, 0, 0, distinct_queries(f), inner};
    const ont_flash_params p = without_repeats(f, inner, &w.others);
    w.n_keys = flash_count_dims(&p, w.others, false);
    w.n_others = flash_count_dims(&p, w.others, true);
    if (!p.n_bh || !p.seqlen_k) return 0;
    const int error = ONT_LAUNCH(visible_queries_kernel, ont_blocks(p.n_bh * w.n_q, WARPS), THREADS, 0, stream, p,
                                 w.n_q, (uint8_t *)work);
    if (error) return error;
    return ONT_LAUNCH(visible_keys_kernel, ont_blocks(w.n_keys * p.seqlen_k, THREADS), THREADS, 0, stream, p, w,
                      (const uint8_t *)work, marks);
}
