/*
 * Attention on tensor cores: 16-bit floats, head sizes of up to 128 in multiples of 8. Four warps have 16 or 32 rows
 * each. Scores and sums stay in registers, where the accumulators of one GEMM are the left operand of the next. Tiles
 * are 64 by 64 (64 by 32 in the gradient of head size 128). Rows in shared memory are padded by 16 bytes, so that
 * ldmatrix has no bank conflicts.
 *
 * The 255 registers of a thread bound the tile sizes; README.md has the numbers.
 * Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
 */
#include "kernels/flash.cuh"

#include "kernels/mma.cuh"

enum { THREADS = 128, WARPS = 4 };
enum { TILE_STRIDE = INT32_MAX / 64 }; /* the largest stride of a bias or mask, so that offsets in a tile are ints */

ONT_DEVICE int lane_of() { return (int)threadIdx.x & 31; }
ONT_DEVICE int warp_of() { return (int)threadIdx.x >> 5; }
#define LOG2_E 1.44269504088896341f

/* Loads rows [first, first + ROWS) of a matrix into a tile (ROWS, D + 8), padded with zeros; 16 bytes at a time. */
template <class T, int D, int ROWS> ONT_DEVICE void load_rows(const flash_matrix<const T> &from, int first, T *tile)
{
    enum { VECTORS = D / 8 };
    for (int e = (int)threadIdx.x; e < ROWS * VECTORS; e += THREADS) {
        int r = e / VECTORS, c = e % VECTORS * 8;
        ont_16bytes v = {{0, 0, 0, 0}};
        if (first + r < (int)from.n && c < from.size)
            v = ont_load16(from.data + (int64_t)(first + r) * from.row_stride + c);
        *(ont_16bytes *)(void *)(tile + r * (D + 8) + c) = v;
    }
}

/* Fragment A (16, 16) of m16n8k16: rows from `row` on, columns 16 k to 16 k + 15. */
template <class T, int D> ONT_DEVICE void load_a(uint32_t *a, const T *tile, int row, int k)
{
    ont_ldmatrix4(a, tile + (row + (lane_of() & 15)) * (D + 8) + k * 16 + (lane_of() >> 4) * 8);
}
/* Two fragments B (16, 8) of the transposed tile: columns 16 n to 16 n + 7 and the next eight are rows of the tile. */
template <class T, int D> ONT_DEVICE void load_b_trans(uint32_t *b, const T *tile, int n, int k)
{
    ont_ldmatrix4(b, tile + (n * 16 + (lane_of() >> 4) * 8 + (lane_of() & 7)) * (D + 8) + k * 16 +
                         (lane_of() >> 3 & 1) * 8);
}
/* Two fragments B (16, 8) of the tile: rows 16 k to 16 k + 15, columns 16 n to 16 n + 7 and the next eight. */
template <class T, int D> ONT_DEVICE void load_b(uint32_t *b, const T *tile, int n, int k)
{
    ont_ldmatrix4_trans(b, tile + (k * 16 + (lane_of() >> 3 & 1) * 8 + (lane_of() & 7)) * (D + 8) + n * 16 +
                               (lane_of() >> 4) * 8);
}

/* Reductions over the four lanes that have the same rows. */
ONT_DEVICE float quad_max(float v)
{
    for (int lanes = 2; lanes; lanes >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, lanes));
    return v;
}
ONT_DEVICE float quad_sum(float v)
{
    for (int lanes = 2; lanes; lanes >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lanes);
    return v;
}

/*
 * Random words of one accumulator: elements `at` and at + 1 of the scores, and the same eight rows on; lane t has
 * columns 2 t and 2 t + 1 of eight. Where seqlen_k is a multiple of 4, one Philox call gives four columns of a row: two
 * lanes draw one row each and swap halves.
 */
ONT_DEVICE void dropout_bits(const ont_flash_params &f, int64_t at, uint32_t random_bits[4])
{
    const int64_t below = at + 8 * f.seqlen_k;
    if (f.seqlen_k % 4) {
        flash_random_bits<2>(f, at, random_bits);
        flash_random_bits<2>(f, below, random_bits + 2);
        return;
    }
    bool odd = lane_of() & 1;
    uint32_t block[4];
    ont_philox(*f.seed, f.rng_stream, (uint64_t)(odd ? below : at) >> 2, block);
    uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? block[0] : block[2], 1);
    uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? block[1] : block[3], 1);
    random_bits[0] = odd ? first : block[0];
    random_bits[1] = odd ? second : block[1];
    random_bits[2] = odd ? block[2] : first;
    random_bits[3] = odd ? block[3] : second;
}

/*
 * The same for transposed scores: random_bits[2 r + c] belongs to query row + c and key j + 8 r. Four lanes, of keys j
 * to j + 3 from a multiple of four on, make one Philox call each, for one query and four keys, and transpose the words.
 */
ONT_DEVICE void dropout_bits_transposed(const ont_flash_params &f, int64_t row, int j, uint32_t random_bits[4])
{
    if (f.seqlen_k % 4) {
        for (int e = 0; e < 4; e++)
            flash_random_bits<1>(f, (row + e % 2) * f.seqlen_k + j + 8 * (e / 2), random_bits + e);
        return;
    }
    int m = lane_of() >> 2 & 3; /* j is m beyond a multiple of four */
    ont_philox(*f.seed, f.rng_stream, (uint64_t)((row + m % 2) * f.seqlen_k + (j - m) + 8 * (m / 2)) >> 2, random_bits);
    for (int bit = 1; bit < 4; bit *= 2) { /* a 4 x 4 transpose over lanes, one bit of the index at a time */
        bool has = m & bit;
        int low = bit == 1 ? 2 : 1;
        for (int pair = 0; pair < 2; pair++) {
            int a = pair * low, b = a + bit;
            uint32_t got = __shfl_xor_sync(0xffffffffu, has ? random_bits[a] : random_bits[b], bit * 4);
            if (has)
                random_bits[a] = got;
            else
                random_bits[b] = got;
        }
    }
}

/* Whether a score is scale * q k, but for the causal mask; and the largest score is that of the largest q k. */
ONT_DEVICE bool has_plain_scores(const ont_flash_params &f) { return !f.bias && !f.mask && f.scale > 0; }

/* Whether all elements of a tile are inside the scores and no bias or mask applies to them. */
ONT_DEVICE bool tile_is_unmasked(const ont_flash_params &f, int first_row, int n_rows, int first_key, int n_keys)
{
    return has_plain_scores(f) && first_row + n_rows <= f.seqlen_q && first_key + n_keys <= f.seqlen_k &&
           (!f.causal || first_key + n_keys - 1 <= first_row + f.causal_offset);
}

/* Bias and mask of a score. Those of others in its tile lie at offsets of 32 bits (TILE_STRIDE). */
struct score_masks {
    const char *bias;
    const uint8_t *mask;
};

ONT_DEVICE score_masks masks_of(const ont_flash_params &f, const flash_batch &batch, int i, int j)
{
    const ont_flash_layout &b = f.layout[ONT_FLASH_BIAS], &m = f.layout[ONT_FLASH_MASK];
    const int size = f.bias_dtype == ONT_FLOAT64 ? 8 : f.bias_dtype == ONT_FLOAT32 ? 4 : 2;
    return {f.bias ? (const char *)f.bias + (batch.bias + i * b.row_stride + j * b.col_stride) * size : nullptr,
            f.mask ? f.mask + (batch.mask + i * m.row_stride + j * m.col_stride) : nullptr};
}

/* The score of the query and key that are so many behind those of `masks`, without the causal mask. */
ONT_DEVICE float masked_score(const ont_flash_params &f, const score_masks &masks, int queries, int keys, float s,
                              bool &is_masked)
{
    const ont_flash_layout &b = f.layout[ONT_FLASH_BIAS], &m = f.layout[ONT_FLASH_MASK];
    is_masked = masks.mask && (masks.mask[queries * (int)m.row_stride + keys * (int)m.col_stride] != 0) !=
                                  (f.mask_polarity != 0);
    if (is_masked) return (float)f.mask_value;
    return masks.bias ? s + flash_load<float>(masks.bias, f.bias_dtype,
                                              queries * (int)b.row_stride + keys * (int)b.col_stride)
                      : s;
}

/* How many keys query i sees from key j on, which may be less than 0. */
ONT_DEVICE int keys_from(const ont_flash_params &f, int i, int j)
{
    return i < (int)f.seqlen_q ? (int)flash_visible_keys(f, i) - j : 0;
}

/* Stores 16 rows of accumulators times a factor, or zeros; a thread stores two neighbouring elements at once. */
template <class T, int D>
ONT_DEVICE void store_rows(const flash_matrix<T> &to, int first, const float acc[D / 8][4], const float factor[2],
                           const bool zero[2])
{
    int g = lane_of() >> 2, t = lane_of() & 3;
    ONT_UNROLL
    for (int r = 0; r < 2; r++) {
        if (first + g + 8 * r >= (int)to.n) continue;
        ONT_UNROLL
        for (int k = 0; k < D / 8; k++)
            if (k * 8 < to.size)
                *(uint32_t *)(void *)(to.data + (int64_t)(first + g + 8 * r) * to.row_stride + k * 8 + 2 * t) =
                    zero[r] ? 0 : ont_pack<T>(acc[k][2 * r] * factor[r], acc[k][2 * r + 1] * factor[r]);
    }
}

template <class T, int D>
ONT_DEVICE void store_grad_rows(const flash_matrix<T> &to, int first, const float acc[D / 8][4], float factor)
{
    const float factors[2] = {factor, factor};
    const bool zero[2] = {false, false};
    store_rows<T, D>(to, first, acc, factors, zero);
}

/* A lane's elements of scores (16, N): in each eight columns, (row, col), (row, col + 1) and the same of row + 8. */
struct score_position {
    int row, col;
    bool unmasked; /* tile_is_unmasked() */
};

/* ---- forward: a warp has MT * 16 queries ---- */

/* Plain scores are kept as q k, others as they are: what q k is multiplied by, a score in natural logarithm over what
 * is kept, and the same in base 2. */
struct score_units {
    float kept, natural, base_2;
};

ONT_DEVICE score_units units_of(const ont_flash_params &f)
{
    const float scale = (float)f.scale;
    return has_plain_scores(f) ? score_units{1, scale, scale * LOG2_E} : score_units{scale, 1, LOG2_E};
}

/* Rows g and g + 8 of 16 queries. max is over all lanes, sum over the keys of a lane. */
struct softmax_rows {
    float max[2], sum[2];
};

template <class T, int D, int MT> ONT_DEVICE void load_queries(const T *s_q, uint32_t q[MT][D / 16][4])
{
    for (int m = 0; m < MT; m++)
        for (int k = 0; k < D / 16; k++) load_a<T, D>(q[m][k], s_q, (warp_of() * MT + m) * 16, k);
}

/* s += q k^T */
template <class T, int D, int MT, int KEYS>
ONT_DEVICE void gemm_qk(const uint32_t q[MT][D / 16][4], const T *s_k, float s[MT][KEYS / 8][4])
{
    ONT_UNROLL
    for (int k = 0; k < D / 16; k++)
        ONT_UNROLL
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];
            load_b_trans<T, D>(b, s_k, n, k);
            for (int m = 0; m < MT; m++) {
                ont_mma<T>(s[m][2 * n], q[m][k], b);
                ont_mma<T>(s[m][2 * n + 1], q[m][k], b + 2);
            }
        }
}

/* acc += p v */
template <class T, int D, int MT, int KEYS>
ONT_DEVICE void gemm_pv(const uint32_t p[MT][KEYS / 8][2], const T *s_v, float acc[MT][D / 8][4])
{
    ONT_UNROLL
    for (int k = 0; k < KEYS / 16; k++)
        ONT_UNROLL
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            load_b<T, D>(b, s_v, n, k);
            for (int m = 0; m < MT; m++) {
                uint32_t a[4] = {p[m][2 * k][0], p[m][2 * k][1], p[m][2 * k + 1][0], p[m][2 * k + 1][1]};
                ont_mma<T>(acc[m][2 * n], a, b);
                ont_mma<T>(acc[m][2 * n + 1], a, b + 2);
            }
        }
}

/* Masks the scores of a tile that is not unmasked. */
template <int KEYS>
ONT_DEVICE void mask_scores(const ont_flash_params &f, const score_units &units, const flash_batch &batch,
                            const score_position &at, float s[KEYS / 8][4])
{
    ONT_UNROLL
    for (int r = 0; r < 2; r++) {
        const int visible = keys_from(f, at.row + 8 * r, at.col);
        const score_masks masks = masks_of(f, batch, at.row + 8 * r, at.col);
        ONT_UNROLL
        for (int n = 0; n < KEYS / 8; n++)
            ONT_UNROLL
            for (int c = 0; c < 2; c++) {
                float &x = s[n][2 * r + c];
                bool is_masked;
                if (n * 8 + c >= visible)
                    x = -INFINITY;
                else if (!has_plain_scores(f))
                    x = masked_score(f, masks, 0, n * 8 + c, x * units.kept, is_masked);
            }
    }
}

/* Scores become exp(score - max), with dropout but for its factor, as words p of two; acc, y so far, is rescaled. */
template <class T, int D, int KEYS>
ONT_DEVICE void online_softmax(const ont_flash_params &f, const flash_batch &batch, const score_position &at,
                               float s[KEYS / 8][4], softmax_rows &rows, float acc[D / 8][4], uint32_t p[KEYS / 8][2])
{
    const score_units units = units_of(f);
    float new_max[2] = {rows.max[0], rows.max[1]}, base[2], block_sum[2] = {0, 0};
    if (!at.unmasked) mask_scores<KEYS>(f, units, batch, at, s);
    ONT_UNROLL
    for (int n = 0; n < KEYS / 8; n++)
        for (int e = 0; e < 4; e++) new_max[e / 2] = fmaxf(new_max[e / 2], s[n][e]);
    ONT_UNROLL
    for (int r = 0; r < 2; r++) {
        new_max[r] = quad_max(new_max[r]);
        base[r] = new_max[r] == -INFINITY ? 0 : new_max[r];
        float rescale = ont_exp2((rows.max[r] - base[r]) * units.base_2);
        rows.max[r] = new_max[r];
        rows.sum[r] *= rescale;
        ONT_UNROLL
        for (int n = 0; n < D / 8; n++) {
            acc[n][2 * r] *= rescale;
            acc[n][2 * r + 1] *= rescale;
        }
    }
    ONT_UNROLL
    for (int n = 0; n < KEYS / 8; n++)
        for (int e = 0; e < 4; e++) block_sum[e / 2] += s[n][e] = ont_exp2((s[n][e] - base[e / 2]) * units.base_2);
    if (f.has_dropout)
        ONT_UNROLL
        for (int n = 0; n < KEYS / 8; n++) {
            uint32_t random_bits[4];
            dropout_bits(f, (batch.bh * f.seqlen_q + at.row) * f.seqlen_k + at.col + n * 8, random_bits);
            for (int e = 0; e < 4; e++)
                if (random_bits[e] < f.dropout_threshold) s[n][e] *= 0;
        }
    ONT_UNROLL
    for (int n = 0; n < KEYS / 8; n++)
        for (int r = 0; r < 2; r++) p[n][r] = ont_pack<T>(s[n][2 * r], s[n][2 * r + 1]);
    for (int r = 0; r < 2; r++) rows.sum[r] += block_sum[r];
}

/* Stores 16 rows of y, divided by their sums and times the factor of dropout, and the statistics of these rows. */
template <class T, int D>
ONT_DEVICE void store_output(const ont_flash_params &f, int64_t bh, int first, const softmax_rows &rows,
                             const float acc[D / 8][4])
{
    int g = lane_of() >> 2, t = lane_of() & 3;
    float factor[2];
    bool zero[2];
    for (int r = 0; r < 2; r++) {
        int i = first + g + 8 * r;
        float total = quad_sum(rows.sum[r]);
        factor[r] = (f.has_dropout ? (float)f.dropout_scale : 1.0f) / total;
        zero[r] = i < (int)f.seqlen_q && (flash_is_nan_row(f, total) || flash_is_masked_row(f, bh, i));
        if (!f.stats || t || i >= (int)f.seqlen_q) continue;
        ((float *)f.stats)[(bh * f.seqlen_q + i) * 2] = rows.max[r] * units_of(f).natural;
        ((float *)f.stats)[(bh * f.seqlen_q + i) * 2 + 1] = total;
    }
    store_rows<T, D>(flash_matrix_of<T>(f, ONT_FLASH_Y, f.y, bh), first, acc, factor, zero);
}

template <class T, int D, int MT, int KEYS>
__global__ void __launch_bounds__(THREADS) flash_mma_kernel(const ont_flash_params f)
{
    enum { ROWS = 16 * MT * WARPS, PITCH = D + 8 };
    ONT_SHARED(T, shared);
    T *s_q = shared, *s_k = s_q + ROWS * PITCH, *s_v = s_k + KEYS * PITCH;
    int g = lane_of() >> 2, t = lane_of() & 3;
    int64_t tiles = (f.seqlen_q + ROWS - 1) / ROWS;
    for (int64_t item = blockIdx.x; item < f.n_bh * tiles; item += gridDim.x) {
        int64_t bh = item / tiles;
        int seqlen_q = (int)f.seqlen_q, first_row = (int)(tiles - 1 - item % tiles) * ROWS;
        int warp_row = first_row + warp_of() * 16 * MT,
            end = (int)flash_visible_keys(f, first_row + ROWS < seqlen_q ? first_row + ROWS - 1 : seqlen_q - 1);
        flash_batch batch = flash_batch_of(f, bh);
        flash_matrix<const T> keys = flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh),
                              values = flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh);
        __syncthreads(); /* all warps have read the tiles of the previous item */
        load_rows<T, D, ROWS>(flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh), first_row, s_q);
        __syncthreads();
        uint32_t q[MT][D / 16][4], p[MT][KEYS / 8][2];
        float acc[MT][D / 8][4] = {};
        softmax_rows rows[MT];
        load_queries<T, D, MT>(s_q, q);
        for (int m = 0; m < MT; m++) rows[m] = {{-INFINITY, -INFINITY}, {0, 0}};
        for (int first = 0; first < end; first += KEYS) {
            if (flash_is_hidden<ROWS, KEYS>(f, bh, first_row, first)) continue;
            COUNT_TILE();
            __syncthreads();
            load_rows<T, D, KEYS>(keys, first, s_k);
            load_rows<T, D, KEYS>(values, first, s_v);
            __syncthreads();
            float s[MT][KEYS / 8][4] = {};
            gemm_qk<T, D, MT, KEYS>(q, s_k, s);
            bool unmasked = tile_is_unmasked(f, warp_row, 16 * MT, first, KEYS);
            ONT_UNROLL
            for (int m = 0; m < MT; m++)
                online_softmax<T, D, KEYS>(f, batch, {warp_row + m * 16 + g, first + 2 * t, unmasked}, s[m], rows[m],
                                           acc[m], p[m]);
            gemm_pv<T, D, MT, KEYS>(p, s_v, acc);
        }
        ONT_UNROLL
        for (int m = 0; m < MT; m++) store_output<T, D>(f, bh, warp_row + m * 16, rows[m], acc[m]);
    }
}

/* ---- backward ---- */

struct row_stats { /* of a row of scores: its probabilities are exp(score - row_max) * 2^log2_inverse */
    float row_max, log2_inverse, delta;
    bool is_masked;
};

ONT_DEVICE row_stats load_row_stats(const ont_flash_params &f, int64_t bh, int i)
{
    row_stats x = {0, 0, 0, true};
    if (i >= f.seqlen_q) return x;
    const float *stats = (const float *)f.stats + (bh * f.seqlen_q + i) * 2;
    x.row_max = stats[0] == -INFINITY ? 0 : stats[0];
    x.log2_inverse = -log2f(stats[1]);
    x.delta = ((const float *)f.delta)[bh * f.seqlen_q + i];
    x.is_masked = flash_is_nan_row(f, stats[1]) || flash_is_masked_row(f, bh, i);
    return x;
}

ONT_DEVICE float probability(const row_stats &x, float score)
{
    return ont_exp2((score - x.row_max) * LOG2_E + x.log2_inverse);
}

/* s = left right^T and s2 = left2 right2^T, for the 16 rows from warp_row on. */
template <class T, int D, int N>
ONT_DEVICE void two_gemms(const T *left, const T *right, float s[N / 8][4], const T *left2, const T *right2,
                          float s2[N / 8][4], int warp_row)
{
    ONT_UNROLL
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[4], a2[4], b[4];
        load_a<T, D>(a, left, warp_row, k);
        load_a<T, D>(a2, left2, warp_row, k);
        ONT_UNROLL
        for (int n = 0; n < N / 16; n++) {
            load_b_trans<T, D>(b, right, n, k);
            ont_mma<T>(s[2 * n], a, b);
            ont_mma<T>(s[2 * n + 1], a, b + 2);
            load_b_trans<T, D>(b, right2, n, k);
            ont_mma<T>(s2[2 * n], a2, b);
            ont_mma<T>(s2[2 * n + 1], a2, b + 2);
        }
    }
}

/* acc (16, D) += w (16, N), held as accumulators, * tile (N, D) */
template <class T, int D, int N>
ONT_DEVICE void add_gemm(float acc[D / 8][4], const float w[N / 8][4], const T *tile)
{
    ONT_UNROLL
    for (int k = 0; k < N / 16; k++) {
        uint32_t a[4] = {ont_pack<T>(w[2 * k][0], w[2 * k][1]), ont_pack<T>(w[2 * k][2], w[2 * k][3]),
                         ont_pack<T>(w[2 * k + 1][0], w[2 * k + 1][1]), ont_pack<T>(w[2 * k + 1][2], w[2 * k + 1][3])};
        ONT_UNROLL
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            load_b<T, D>(b, tile, n, k);
            ont_mma<T>(acc[2 * n], a, b);
            ont_mma<T>(acc[2 * n + 1], a, b + 2);
        }
    }
}

enum { BLOCK = 16 * WARPS }; /* queries or keys of a thread block */

/* Tiles of the operands in shared memory, with rows of D + 8. */
template <class T> struct shared_tiles {
    T *q, *dy, *k, *v;
};

/* Masks scaled scores of a tile that is not unmasked. Returns the bits 4 n + e of those whose gradients are 0. */
template <int N>
ONT_DEVICE unsigned mask_query_scores(const ont_flash_params &f, const flash_batch &batch, const score_position &at,
                                      const row_stats row[2], float s[N / 8][4])
{
    unsigned zeros = 0;
    ONT_UNROLL
    for (int r = 0; r < 2; r++) {
        const int visible = keys_from(f, at.row + 8 * r, at.col);
        const int inside = row[r].is_masked ? 0 : (int)f.seqlen_k - at.col;
        const score_masks masks = masks_of(f, batch, at.row + 8 * r, at.col);
        ONT_UNROLL
        for (int n = 0; n < N / 8; n++)
            ONT_UNROLL
            for (int c = 0; c < 2; c++) {
                float &x = s[n][2 * r + c];
                bool is_masked = n * 8 + c >= inside;
                if (!is_masked && !has_plain_scores(f)) x = masked_score(f, masks, 0, n * 8 + c, x, is_masked);
                if (n * 8 + c >= visible) x = -INFINITY;
                zeros |= (unsigned)is_masked << (4 * n + 2 * r + c);
            }
    }
    return zeros;
}

/* Writes 0 where `zeros` says so, and the gradient of the bias. */
template <int N>
ONT_DEVICE void finish_query_scores(const ont_flash_params &f, const flash_batch &batch, const score_position &at,
                                    unsigned zeros, float ds[N / 8][4])
{
    const int columns = (int)f.seqlen_k - at.col;
    ONT_UNROLL
    for (int n = 0; n < N / 8; n++)
        ONT_UNROLL
        for (int e = 0; e < 4; e++) {
            const int i = at.row + 8 * (e / 2), c = n * 8 + e % 2;
            if (zeros >> (4 * n + e) & 1) ds[n][e] = 0;
            if (f.dbias && i < (int)f.seqlen_q && c < columns)
                flash_store(f.dbias, f.bias_dtype, (batch.bh * f.seqlen_q + i) * f.seqlen_k + at.col + c, ds[n][e]);
        }
}

/* s, scores (16 queries, N keys) over scale, become their gradients; dp are those of the probabilities. */
template <int N>
ONT_DEVICE void grad_of_query_scores(const ont_flash_params &f, const flash_batch &batch, const score_position &at,
                                     const row_stats row[2], float s[N / 8][4], float dp[N / 8][4])
{
    unsigned zeros = 0;
    ONT_UNROLL
    for (int n = 0; n < N / 8; n++)
        for (int e = 0; e < 4; e++) s[n][e] *= (float)f.scale;
    if (!at.unmasked) zeros = mask_query_scores<N>(f, batch, at, row, s);
    if (f.has_dropout)
        ONT_UNROLL
        for (int n = 0; n < N / 8; n++) {
            uint32_t random_bits[4];
            dropout_bits(f, (batch.bh * f.seqlen_q + at.row) * f.seqlen_k + at.col + n * 8, random_bits);
            for (int e = 0; e < 4; e++) dp[n][e] *= flash_dropout_factor<float>(f, random_bits[e]);
        }
    ONT_UNROLL
    for (int n = 0; n < N / 8; n++)
        for (int e = 0; e < 4; e++) s[n][e] = probability(row[e / 2], s[n][e]) * (dp[n][e] - row[e / 2].delta);
    if (!at.unmasked) finish_query_scores<N>(f, batch, at, zeros, s);
}

/* Adds to acc what batch index bh gives to dQ of the block's queries. */
template <class T, int D, int N>
ONT_DEVICE void add_dq(const ont_flash_params &f, int64_t bh, int first_row, const shared_tiles<T> &tile,
                       float acc[D / 8][4])
{
    int g = lane_of() >> 2, t = lane_of() & 3, warp_row = warp_of() * 16, i = first_row + warp_row + g;
    int last_row = first_row + BLOCK < (int)f.seqlen_q ? first_row + BLOCK - 1 : (int)f.seqlen_q - 1;
    int end = f.dbias ? (int)f.seqlen_k /* dbias is 0 for keys behind the causal mask */
                      : (int)flash_visible_keys(f, last_row);
    flash_batch batch = flash_batch_of(f, bh);
    row_stats row[2] = {load_row_stats(f, bh, i), load_row_stats(f, bh, i + 8)};
    bool has_masked_rows = __ballot_sync(0xffffffffu, row[0].is_masked || row[1].is_masked);
    flash_matrix<const T> keys = flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh),
                          values = flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh);
    __syncthreads();
    load_rows<T, D, BLOCK>(flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh), first_row, tile.q);
    load_rows<T, D, BLOCK>(flash_matrix_of<const T>(f, ONT_FLASH_Y, f.dy, bh), first_row, tile.dy);
    for (int first = 0; first < end; first += N) {
        if (flash_is_hidden<BLOCK, N>(f, bh, first_row, first)) continue;
        COUNT_TILE();
        __syncthreads();
        load_rows<T, D, N>(keys, first, tile.k);
        load_rows<T, D, N>(values, first, tile.v);
        __syncthreads();
        float s[N / 8][4] = {}, dp[N / 8][4] = {};
        two_gemms<T, D, N>(tile.q, tile.k, s, tile.dy, tile.v, dp, warp_row);
        bool unmasked = !has_masked_rows && tile_is_unmasked(f, first_row + warp_row, 16, first, N);
        grad_of_query_scores<N>(f, batch, {i, first + 2 * t, unmasked}, row, s, dp);
        if (f.dq) add_gemm<T, D, N>(acc, s, tile.k);
    }
}

template <class T, int D, int N>
__global__ void __launch_bounds__(THREADS) flash_mma_dq_kernel(const ont_flash_params f, unsigned summed_dims,
                                                               int64_t n_summed)
{
    enum { PITCH = D + 8 };
    ONT_SHARED(T, shared);
    shared_tiles<T> tile = {shared, shared + BLOCK * PITCH, shared + 2 * BLOCK * PITCH,
                            shared + (2 * BLOCK + N) * PITCH};
    int64_t tiles = (f.seqlen_q + BLOCK - 1) / BLOCK;
    for (int64_t item = blockIdx.x; item < f.n_bh / n_summed * tiles; item += gridDim.x) {
        int first_row = (int)(tiles - 1 - item % tiles) * BLOCK;
        float acc[D / 8][4] = {};
        for (int64_t n = 0; n < n_summed; n++)
            add_dq<T, D, N>(f, flash_bh(f, summed_dims, item / tiles, n), first_row, tile, acc);
        if (!f.dq) continue;
        int64_t bh = flash_bh(f, summed_dims, item / tiles, 0);
        store_grad_rows<T, D>(flash_matrix_of<T>(f, ONT_FLASH_Q, f.dq, bh), first_row + warp_of() * 16, acc,
                              (float)f.scale);
    }
}

/* Statistics of N queries in shared memory, and whether each 32 of them have masked rows. */
template <int N> struct query_stats {
    row_stats row[N];
    unsigned masked[N / 32];
};

template <int N>
ONT_DEVICE void load_query_stats(const ont_flash_params &f, int64_t bh, int first, query_stats<N> &stats)
{
    if (threadIdx.x >= N) return;
    const row_stats x = load_row_stats(f, bh, first + (int)threadIdx.x);
    const unsigned masked = __ballot_sync(0xffffffffu, x.is_masked);
    stats.row[threadIdx.x] = x;
    if (!lane_of()) stats.masked[warp_of()] = masked;
}

/* Masks scaled scores (16 keys, N queries) of a tile that is not unmasked: at.row is a key, at.col a query. Returns the
 * bits 4 n + e of those whose gradients are 0. */
template <int N>
ONT_DEVICE unsigned mask_key_scores(const ont_flash_params &f, const flash_batch &batch, const score_position &at,
                                    float s[N / 8][4])
{
    unsigned zeros = 0;
    ONT_UNROLL
    for (int r = 0; r < 2; r++) {
        const int j = at.row + 8 * r, queries = j < (int)f.seqlen_k ? (int)f.seqlen_q - at.col : 0;
        const int hidden = f.causal ? (int)(j - f.causal_offset) - at.col : 0;
        const score_masks masks = masks_of(f, batch, at.col, j);
        ONT_UNROLL
        for (int n = 0; n < N / 8; n++)
            ONT_UNROLL
            for (int c = 0; c < 2; c++) {
                float &x = s[n][2 * r + c];
                bool is_masked = n * 8 + c >= queries;
                if (!is_masked && !has_plain_scores(f)) x = masked_score(f, masks, n * 8 + c, 0, x, is_masked);
                if (n * 8 + c < hidden) x = -INFINITY;
                zeros |= (unsigned)is_masked << (4 * n + 2 * r + c);
            }
    }
    return zeros;
}

/* s, scores (16 keys, N queries) over scale, become probabilities after dropout, and dp, the gradients of the
 * probabilities, those of the scores. `stats` has the N queries from at.col on; at.row is a key. */
template <int N>
ONT_DEVICE void grad_of_key_scores(const ont_flash_params &f, const flash_batch &batch, const score_position &at,
                                   const row_stats *stats, float s[N / 8][4], float dp[N / 8][4])
{
    const row_stats *row = stats + 2 * (lane_of() & 3);
    unsigned zeros = 0, dropped = 0;
    ONT_UNROLL
    for (int n = 0; n < N / 8; n++)
        for (int e = 0; e < 4; e++) s[n][e] *= (float)f.scale;
    if (!at.unmasked) zeros = mask_key_scores<N>(f, batch, at, s);
    if (f.has_dropout)
        ONT_UNROLL
        for (int n = 0; n < N / 8; n++) {
            uint32_t random_bits[4];
            dropout_bits_transposed(f, batch.bh * f.seqlen_q + at.col + n * 8, at.row, random_bits);
            for (int e = 0; e < 4; e++) {
                dp[n][e] *= flash_dropout_factor<float>(f, random_bits[e]);
                dropped |= (unsigned)(random_bits[e] < f.dropout_threshold) << (4 * n + e);
            }
        }
    ONT_UNROLL
    for (int n = 0; n < N / 8; n++)
        ONT_UNROLL
        for (int c = 0; c < 2; c++) {
            const row_stats x = row[n * 8 + c];
            for (int e = c; e < 4; e += 2) {
                s[n][e] = probability(x, s[n][e]);
                dp[n][e] = s[n][e] * (dp[n][e] - x.delta);
            }
        }
    if (!at.unmasked)
        ONT_UNROLL
        for (int n = 0; n < N / 8; n++)
            for (int e = 0; e < 4; e++) {
                if (row[n * 8 + e % 2].is_masked) s[n][e] = dp[n][e] = 0;
                if (zeros >> (4 * n + e) & 1) dp[n][e] = 0;
            }
    if (f.has_dropout)
        ONT_UNROLL
        for (int n = 0; n < N / 8; n++)
            for (int e = 0; e < 4; e++) s[n][e] *= dropped >> (4 * n + e) & 1 ? 0 : (float)f.dropout_scale;
}

/* Adds to dk and dv what batch index bh gives to the block's keys. Scores are transposed: (keys, queries). */
template <class T, int D, int N>
ONT_DEVICE void add_dkv(const ont_flash_params &f, int64_t bh, int first_key, const shared_tiles<T> &tile,
                        query_stats<N> &stats, float dk[D / 8][4], float dv[D / 8][4])
{
    int g = lane_of() >> 2, t = lane_of() & 3, warp_row = warp_of() * 16, seqlen_q = (int)f.seqlen_q;
    int64_t begin = flash_first_query(f, first_key) / N * N;
    const uint8_t *column = flash_tile_column(f, bh, first_key);
    flash_batch batch = flash_batch_of(f, bh);
    flash_matrix<const T> queries = flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh),
                          dy = flash_matrix_of<const T>(f, ONT_FLASH_Y, f.dy, bh);
    __syncthreads();
    load_rows<T, D, BLOCK>(flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh), first_key, tile.k);
    load_rows<T, D, BLOCK>(flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh), first_key, tile.v);
    for (int first = begin < seqlen_q ? (int)begin : seqlen_q; first < seqlen_q; first += N) {
        if (flash_is_hidden_from<BLOCK>(f, column, first)) continue;
        COUNT_TILE();
        __syncthreads();
        load_rows<T, D, N>(queries, first, tile.q);
        load_rows<T, D, N>(dy, first, tile.dy);
        load_query_stats<N>(f, bh, first, stats);
        __syncthreads();
        float s[N / 8][4] = {}, dp[N / 8][4] = {};
        two_gemms<T, D, N>(tile.k, tile.q, s, tile.v, tile.dy, dp, warp_row);
        bool unmasked = !(stats.masked[0] | stats.masked[N / 32 - 1]) &&
                        tile_is_unmasked(f, first, N, first_key + warp_row, 16);
        grad_of_key_scores<N>(f, batch, {first_key + warp_row + g, first + 2 * t, unmasked}, stats.row, s, dp);
        if (f.dv) add_gemm<T, D, N>(dv, s, tile.dy);
        if (f.dk) add_gemm<T, D, N>(dk, dp, tile.q);
    }
}

/* A thread block has 64 keys, and sums over the queries of every batch index that reads these keys. */
template <class T, int D, int N>
__global__ void __launch_bounds__(THREADS) flash_mma_dkv_kernel(const ont_flash_params f, unsigned summed_dims,
                                                                int64_t n_summed)
{
    enum { PITCH = D + 8 };
    ONT_SHARED(T, shared);
    __shared__ query_stats<N> stats;
    shared_tiles<T> tile = {shared + 2 * BLOCK * PITCH, shared + (2 * BLOCK + N) * PITCH, shared,
                            shared + BLOCK * PITCH};
    int64_t tiles = (f.seqlen_k + BLOCK - 1) / BLOCK;
    for (int64_t item = blockIdx.x; item < f.n_bh / n_summed * tiles; item += gridDim.x) {
        int first_key = (int)(item % tiles) * BLOCK, warp_key = first_key + warp_of() * 16;
        float dk[D / 8][4] = {}, dv[D / 8][4] = {};
        for (int64_t n = 0; n < n_summed; n++)
            add_dkv<T, D, N>(f, flash_bh(f, summed_dims, item / tiles, n), first_key, tile, stats, dk, dv);
        int64_t bh = flash_bh(f, summed_dims, item / tiles, 0);
        if (f.dk)
            store_grad_rows<T, D>(flash_matrix_of<T>(f, ONT_FLASH_K, f.dk, bh), warp_key, dk, (float)f.scale);
        if (f.dv) store_grad_rows<T, D>(flash_matrix_of<T>(f, ONT_FLASH_V, f.dv, bh), warp_key, dv, 1);
    }
}

/* ---- launchers ---- */

static bool fits_vectors(const ont_flash_params *f, int operand, const void *pointer)
{
    const ont_flash_layout *v = &f->layout[operand];
    bool fits = (uintptr_t)pointer % 16 == 0 && v->offset % 8 == 0 && v->row_stride % 8 == 0;
    for (int d = 0; d < f->n_batch_dims; d++) fits = fits && v->batch_stride[d] % 8 == 0;
    return fits;
}

/* Whether masked_score() may compute offsets in 32 bits. */
static bool fits_tile(const ont_flash_params *f, int operand)
{
    const ont_flash_layout *v = &f->layout[operand];
    return v->row_stride <= TILE_STRIDE && v->col_stride <= TILE_STRIDE;
}

extern "C" int ont_flash_has_mma(const ont_flash_params *f, int gradient)
{
    if ((f->dtype != ONT_FLOAT16 && f->dtype != ONT_BFLOAT16) || f->head_dim % 8 || f->head_dim_v % 8) return 0;
    if (f->head_dim > 128 || f->head_dim_v > 128 || f->seqlen_q > INT32_MAX / 2 || f->seqlen_k > INT32_MAX / 2 ||
        !ont_has_mma())
        return 0;
    bool fits = fits_vectors(f, ONT_FLASH_Q, f->q) && fits_vectors(f, ONT_FLASH_K, f->k) &&
                fits_vectors(f, ONT_FLASH_V, f->v) && fits_vectors(f, ONT_FLASH_Y, f->y) &&
                (!f->bias || fits_tile(f, ONT_FLASH_BIAS)) && (!f->mask || fits_tile(f, ONT_FLASH_MASK));
    if (gradient)
        fits = fits && fits_vectors(f, ONT_FLASH_Y, f->dy) && fits_vectors(f, ONT_FLASH_Q, f->dq) &&
               fits_vectors(f, ONT_FLASH_K, f->dk) && fits_vectors(f, ONT_FLASH_V, f->dv);
    return fits;
}

static unsigned blocks_of(int64_t n_bh, int64_t length, int rows)
{
    return ont_blocks(n_bh * ((length + rows - 1) / rows), 1);
}

template <class T, int D, int MT, int KEYS> static int forward(const ont_flash_params *f, void *stream)
{
    size_t bytes = (size_t)(16 * MT * WARPS + 2 * KEYS) * (D + 8) * sizeof(T);
    int error = ONT_ALLOW_SHARED((flash_mma_kernel<T, D, MT, KEYS>), bytes);
    if (error) return error;
    return ONT_LAUNCH((flash_mma_kernel<T, D, MT, KEYS>), blocks_of(f->n_bh, f->seqlen_q, 16 * MT * WARPS), THREADS,
                      bytes, stream, *f);
}

template <class T, int D, int N> static int backward_kv(const ont_flash_params *f, void *stream)
{
    size_t bytes = (size_t)(2 * BLOCK + 2 * N) * (D + 8) * sizeof(T);
    unsigned k = flash_summed_dims(f, ONT_FLASH_K), v = flash_summed_dims(f, ONT_FLASH_V);
    int error = ONT_ALLOW_SHARED((flash_mma_dkv_kernel<T, D, N>), bytes);
    for (int pass = 0; pass < 2 && !error; pass++) {
        ont_flash_params params = *f;
        bool both = k == v;
        if (!both) (pass ? params.dk : params.dv) = nullptr;
        unsigned summed_dims = both || !pass ? k : v;
        if ((both && pass) || (!params.dk && !params.dv)) continue;
        error = ONT_LAUNCH((flash_mma_dkv_kernel<T, D, N>), blocks_of(flash_count_dims(f, summed_dims, false),
                                                                      f->seqlen_k, BLOCK), THREADS, bytes, stream,
                           params, summed_dims, flash_count_dims(f, summed_dims, true));
    }
    return error;
}

template <class T, int D, int N> static int backward(const ont_flash_params *f, void *stream)
{
    size_t bytes = (size_t)(2 * BLOCK + 2 * N) * (D + 8) * sizeof(T);
    unsigned summed_dims = f->dq ? flash_summed_dims(f, ONT_FLASH_Q) : 0;
    ont_flash_params params = *f;
    if (f->dbias) params.tiles = nullptr; /* its zeros are written tile by tile */
    int error = ONT_ALLOW_SHARED((flash_mma_dq_kernel<T, D, N>), bytes);
    if (!error && (f->dq || f->dbias))
        error = ONT_LAUNCH((flash_mma_dq_kernel<T, D, N>), blocks_of(flash_count_dims(f, summed_dims, false),
                                                                     f->seqlen_q, BLOCK), THREADS, bytes, stream,
                           params, summed_dims, flash_count_dims(f, summed_dims, true));
    return error || (!f->dk && !f->dv) ? error : backward_kv<T, D, N>(f, stream);
}

template <class T> static int launch(const ont_flash_params *f, bool gradient, void *stream)
{
    bool small = f->head_dim <= 64 && f->head_dim_v <= 64;
    if (gradient) return small ? backward<T, 64, 64>(f, stream) : backward<T, 128, 32>(f, stream);
    return small ? forward<T, 64, 2, 32>(f, stream) : forward<T, 128, 1, 64>(f, stream);
}

extern "C" int ont_launch_flash_mma(const ont_flash_params *f, void *stream)
{
    return f->dtype == ONT_FLOAT16 ? launch<ont_f16>(f, false, stream) : launch<ont_bf16>(f, false, stream);
}

extern "C" int ont_launch_flash_mma_grad(const ont_flash_params *f, void *stream)
{
    return f->dtype == ONT_FLOAT16 ? launch<ont_f16>(f, true, stream) : launch<ont_bf16>(f, true, stream);
}
