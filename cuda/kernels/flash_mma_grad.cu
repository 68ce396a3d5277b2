/*
 * The gradient of attention on tensor cores (flash_mma.cuh): dQ and the gradient of the bias in one kernel, dK and dV
 * in another.
 */
#include "kernels/flash_mma.cuh"

/*
 * dropout_bits() for transposed scores: random_bits[2 r + c] belongs to query row + c and key j + 8 r. Four lanes, of
 * keys j to j + 3 from a multiple of four on, make one Philox call each, for one query and four keys, and transpose the
 * words.
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

template <class T, int D>
ONT_DEVICE void store_grad_rows(const flash_matrix<T> &to, int first, const float acc[D / 8][4], float factor)
{
    const float factors[2] = {factor, factor};
    const bool zero[2] = {false, false};
    store_rows<T, D>(to, first, acc, factors, zero);
}

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
    enum { STAGE = 2 * N * (D + 8) };
    int g = lane_of() >> 2, t = lane_of() & 3, warp_row = warp_of() * 16, i = first_row + warp_row + g;
    int last_row = first_row + BLOCK < (int)f.seqlen_q ? first_row + BLOCK - 1 : (int)f.seqlen_q - 1;
    int end = f.dbias ? (int)f.seqlen_k /* dbias is 0 for keys behind the causal mask */
                      : (int)flash_visible_keys(f, last_row);
    flash_batch batch = flash_batch_of(f, bh);
    row_stats row[2] = {load_row_stats(f, bh, i), load_row_stats(f, bh, i + 8)};
    bool has_masked_rows = __ballot_sync(0xffffffffu, row[0].is_masked || row[1].is_masked);
    flash_matrix<const T> keys = flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh),
                          values = flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh);
    int next = shown_tile<BLOCK, N>(f, bh, first_row, 0, end), stage = 0;
    __syncthreads();
    copy_rows<T, D, BLOCK>(flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh), first_row, tile.q);
    copy_rows<T, D, BLOCK>(flash_matrix_of<const T>(f, ONT_FLASH_Y, f.dy, bh), first_row, tile.dy);
    if (next < end) copy_pair<T, D, N>(keys, values, next, tile.k, tile.v);
    for (int first = next; first < end; first = next, stage ^= 1) {
        COUNT_TILE();
        wait_for_copies();
        next = shown_tile<BLOCK, N>(f, bh, first_row, first + N, end);
        const int other = (stage ^ 1) * STAGE;
        if (next < end) copy_pair<T, D, N>(keys, values, next, tile.k + other, tile.v + other);
        float s[N / 8][4] = {}, dp[N / 8][4] = {};
        two_gemms<T, D, N>(tile.q, tile.k + stage * STAGE, s, tile.dy, tile.v + stage * STAGE, dp, warp_row);
        bool unmasked = !has_masked_rows && tile_is_unmasked(f, first_row + warp_row, 16, first, N);
        grad_of_query_scores<N>(f, batch, {i, first + 2 * t, unmasked}, row, s, dp);
        if (f.dq) add_gemm<T, D, N>(acc, s, tile.k + stage * STAGE);
    }
    ont_copy_wait(); /* no tile was shown: nothing else has waited */
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

/* The first tile of queries from `first` on that is not hidden from a block's keys; seqlen_q or more: none. */
template <int KEYS, int N>
ONT_DEVICE int shown_queries(const ont_flash_params &f, const uint8_t *column, int first)
{
    while (first < (int)f.seqlen_q && flash_is_hidden_from<KEYS>(f, column, first)) first += N;
    return first;
}

/* Adds to dk and dv what batch index bh gives to the block's keys. Scores are transposed: (keys, queries). */
template <class T, int D, int N>
ONT_DEVICE void add_dkv(const ont_flash_params &f, int64_t bh, int first_key, const shared_tiles<T> &tile,
                        query_stats<N> stats[2], float dk[D / 8][4], float dv[D / 8][4])
{
    enum { STAGE = 2 * N * (D + 8) };
    int g = lane_of() >> 2, t = lane_of() & 3, warp_row = warp_of() * 16, seqlen_q = (int)f.seqlen_q;
    int64_t begin = flash_first_query(f, first_key) / N * N;
    const uint8_t *column = flash_tile_column(f, bh, first_key);
    int next = shown_queries<BLOCK, N>(f, column, begin < seqlen_q ? (int)begin : seqlen_q), stage = 0;
    flash_batch batch = flash_batch_of(f, bh);
    flash_matrix<const T> queries = flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh),
                          dy = flash_matrix_of<const T>(f, ONT_FLASH_Y, f.dy, bh);
    __syncthreads();
    copy_rows<T, D, BLOCK>(flash_matrix_of<const T>(f, ONT_FLASH_K, f.k, bh), first_key, tile.k);
    copy_rows<T, D, BLOCK>(flash_matrix_of<const T>(f, ONT_FLASH_V, f.v, bh), first_key, tile.v);
    if (next < seqlen_q) {
        copy_pair<T, D, N>(queries, dy, next, tile.q, tile.dy);
        load_query_stats<N>(f, bh, next, stats[0]);
    }
    for (int first = next; first < seqlen_q; first = next, stage ^= 1) {
        const T *q = tile.q + stage * STAGE, *dy_tile = tile.dy + stage * STAGE;
        const query_stats<N> &own = stats[stage];
        COUNT_TILE();
        wait_for_copies();
        next = shown_queries<BLOCK, N>(f, column, first + N);
        const int other = (stage ^ 1) * STAGE;
        if (next < seqlen_q) {
            copy_pair<T, D, N>(queries, dy, next, tile.q + other, tile.dy + other);
            load_query_stats<N>(f, bh, next, stats[stage ^ 1]);
        }
        float s[N / 8][4] = {}, dp[N / 8][4] = {};
        two_gemms<T, D, N>(tile.k, q, s, tile.v, dy_tile, dp, warp_row);
        bool unmasked = !(own.masked[0] | own.masked[N / 32 - 1]) &&
                        tile_is_unmasked(f, first, N, first_key + warp_row, 16);
        grad_of_key_scores<N>(f, batch, {first_key + warp_row + g, first + 2 * t, unmasked}, own.row, s, dp);
        if (f.dv) add_gemm<T, D, N>(dv, s, dy_tile);
        if (f.dk) add_gemm<T, D, N>(dk, dp, q);
    }
    ont_copy_wait(); /* no tile was shown: nothing else has waited */
}

/* A thread block has 64 keys, and sums over the queries of every batch index that reads these keys. */
template <class T, int D, int N>
__global__ void __launch_bounds__(THREADS) flash_mma_dkv_kernel(const ont_flash_params f, unsigned summed_dims,
                                                                int64_t n_summed)
{
    enum { PITCH = D + 8 };
    ONT_SHARED(T, shared);
    __shared__ query_stats<N> stats[2];
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

template <class T, int D, int N> static int backward(const ont_flash_params *f, void *stream)
{
    size_t bytes = (size_t)(2 * BLOCK + 4 * N) * (D + 8) * sizeof(T);
    int error = ONT_ALLOW_SHARED((flash_mma_dq_kernel<T, D, N>), bytes);
    if (!error) error = ONT_ALLOW_SHARED((flash_mma_dkv_kernel<T, D, N>), bytes);
    if (error) return error;
    return flash_launch_grads(
        f,
        [&](const ont_flash_params &params, unsigned summed_dims, int64_t n_bh, int64_t n_summed) {
            return ONT_LAUNCH((flash_mma_dq_kernel<T, D, N>), blocks_of(n_bh, f->seqlen_q, BLOCK), THREADS, bytes,
                              stream, params, summed_dims, n_summed);
        },
        [&](const ont_flash_params &params, unsigned summed_dims, int64_t n_bh, int64_t n_summed) {
            return ONT_LAUNCH((flash_mma_dkv_kernel<T, D, N>), blocks_of(n_bh, f->seqlen_k, BLOCK), THREADS, bytes,
                              stream, params, summed_dims, n_summed);
        });
}

template <class T> static int launch(const ont_flash_params *f, void *stream)
{
    bool small = f->head_dim <= 64 && f->head_dim_v <= 64;
    return small ? backward<T, 64, 64>(f, stream) : backward<T, 128, 32>(f, stream);
}

extern "C" int ont_launch_flash_mma_grad(const ont_flash_params *f, void *stream)
{
    return f->dtype == ONT_FLOAT16 ? launch<ont_f16>(f, stream) : launch<ont_bf16>(f, stream);
}
