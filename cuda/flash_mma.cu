/*
 * Attention on tensor cores: 16-bit floats, heads of up to 128 in multiples of 8. Four warps of 16 or 32 rows each;
 * scores and sums stay in registers, where the accumulators of one product are the left operand of the next. Tiles of
 * 64 by 64 (32 in the gradient of 128), rows 16 bytes apart from a power of two, so that ldmatrix meets no bank twice.
 *
 * Tile sizes are bounded by the 255 registers of a thread; README.md says which were close.
 * Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
 */
#include "flash.cuh"

#include "mma.cuh"

enum { THREADS = 128, WARPS = 4 };

ONT_DEVICE int lane_of() { return (int)threadIdx.x & 31; }
ONT_DEVICE int warp_of() { return (int)threadIdx.x >> 5; }
ONT_DEVICE float exp_of(float x) { return exp2f(x * 1.44269504088896341f); }

/* Rows [first, first + ROWS) of `n`, 16 bytes at a time, with zeros behind their ends. */
template <class T, int D, int ROWS>
ONT_DEVICE void load_rows(const T *from, int64_t step, int first, int n, int size, T *tile)
{
    enum { VECTORS = D / 8 };
    for (int e = (int)threadIdx.x; e < ROWS * VECTORS; e += THREADS) {
        int r = e / VECTORS, c = e % VECTORS * 8;
        ont_16bytes v = {{0, 0, 0, 0}};
        if (first + r < n && c < size) v = ont_load16(from + (int64_t)(first + r) * step + c);
        *(ont_16bytes *)(void *)(tile + r * (D + 8) + c) = v;
    }
}

/* The left operand: 16 rows from `row` on, columns 16 k to 16 k + 15. */
template <class T, int D> ONT_DEVICE void left_of(uint32_t *a, const T *tile, int row, int k)
{
    ont_ldmatrix4(a, tile + (row + (lane_of() & 15)) * (D + 8) + k * 16 + (lane_of() >> 4) * 8);
}
/* Two right operands, of rows of the tile as columns: 16 n to 16 n + 7 and the next eight. */
template <class T, int D> ONT_DEVICE void right_of_rows(uint32_t *b, const T *tile, int n, int k)
{
    ont_ldmatrix4(b, tile + (n * 16 + (lane_of() >> 4) * 8 + (lane_of() & 7)) * (D + 8) + k * 16 +
                         (lane_of() >> 3 & 1) * 8);
}
/* Two right operands, of rows 16 k to 16 k + 15 as they are: columns 16 n to 16 n + 7 and the next eight. */
template <class T, int D> ONT_DEVICE void right_of_columns(uint32_t *b, const T *tile, int n, int k)
{
    ont_ldmatrix4_trans(b, tile + (k * 16 + (lane_of() >> 3 & 1) * 8 + (lane_of() & 7)) * (D + 8) + n * 16 +
                               (lane_of() >> 4) * 8);
}

/* Over the four lanes that have the same rows. */
ONT_DEVICE float quad_max(float v)
{
    for (int lanes = 2; lanes; lanes >>= 1) {
        float other = __shfl_xor_sync(0xffffffffu, v, lanes);
        v = other > v ? other : v;
    }
    return v;
}
ONT_DEVICE float quad_sum(float v)
{
    for (int lanes = 2; lanes; lanes >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lanes);
    return v;
}

/*
 * Dropout's words of one accumulator: elements at[0], at[0] + 1 and at[1], at[1] + 1, where lane t has the columns 2t
 * and 2t + 1 of eight. Where blocks of four words are blocks of four columns, two lanes make one row's each and swap
 * halves.
 */
ONT_DEVICE void words_of(const ont_flash &f, const int64_t *at, bool aligned, uint32_t words[4])
{
    if (!aligned) {
        flash_words<2>(f, at[0], words);
        flash_words<2>(f, at[1], words + 2);
        return;
    }
    bool odd = lane_of() & 1;
    uint32_t block[4];
    ont_philox(*f.seed, f.stream, (uint64_t)(at[odd]) >> 2, block);
    uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? block[0] : block[2], 1);
    uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? block[1] : block[3], 1);
    words[0] = odd ? first : block[0];
    words[1] = odd ? second : block[1];
    words[2] = odd ? block[2] : first;
    words[3] = odd ? block[3] : second;
}

/*
 * The same with keys as rows: words[2 r + c] of query i + c and key j + 8 r. Four lanes (j, j + 1 ... from a multiple
 * of four on) make one block each, a query and a half of the rows, and transpose them.
 */
ONT_DEVICE void words_of_keys(const ont_flash &f, int64_t row, int j, bool aligned, uint32_t words[4])
{
    if (!aligned) {
        for (int e = 0; e < 4; e++) flash_words<1>(f, (row + e % 2) * f.columns + j + 8 * (e / 2), words + e);
        return;
    }
    int m = lane_of() >> 2 & 3; /* j is m beyond a multiple of four */
    ont_philox(*f.seed, f.stream, (uint64_t)((row + m % 2) * f.columns + (j - m) + 8 * (m / 2)) >> 2, words);
    for (int bit = 1; bit < 4; bit *= 2) { /* swaps words whose number has the bit for blocks that have it */
        bool has = m & bit;
        int low = bit == 1 ? 2 : 1;
        for (int pair = 0; pair < 2; pair++) {
            int a = pair * low, b = a + bit;
            uint32_t got = __shfl_xor_sync(0xffffffffu, has ? words[a] : words[b], bit * 4);
            if (has)
                words[a] = got;
            else
                words[b] = got;
        }
    }
}

/* Whether no element of a tile needs a look: all inside, seen and without masks. */
ONT_DEVICE bool is_plain(const ont_flash &f, int first_row, int rows, int first_key, int keys)
{
    return !f.bias && !f.keep && first_row + rows <= f.rows && first_key + keys <= f.columns &&
           (!f.causal || first_key + keys - 1 <= first_row + f.diagonal);
}

/* Two results side by side, 16 bits each. */
template <class T, int D>
ONT_DEVICE void put_pairs(T *to, int64_t step, int first, int n, int size, const float acc[D / 8][4], float low,
                          float high, bool zero_low, bool zero_high)
{
    int g = lane_of() >> 2, t = lane_of() & 3;
    for (int r = 0; r < 2; r++) {
        if (first + g + 8 * r >= n) continue;
        float factor = r ? high : low;
        bool zero = r ? zero_high : zero_low;
        ONT_UNROLL
        for (int k = 0; k < D / 8; k++)
            if (k * 8 < size)
                *(uint32_t *)(void *)(to + (int64_t)(first + g + 8 * r) * step + k * 8 + 2 * t) =
                    zero ? 0 : ont_pack<T>(acc[k][2 * r] * factor, acc[k][2 * r + 1] * factor);
    }
}

/* ---- forward: MT times 16 rows to a warp ---- */

template <class T, int D, int MT, int KEYS>
__global__ void __launch_bounds__(THREADS) flash_mma_kernel(const ont_flash f)
{
    enum { ROWS = 16 * MT * WARPS, PITCH = D + 8 };
    ONT_SHARED(T, shared);
    T *queries = shared, *keys = queries + ROWS * PITCH, *values = keys + KEYS * PITCH;
    int g = lane_of() >> 2, t = lane_of() & 3;
    int64_t tiles = (f.rows + ROWS - 1) / ROWS;
    bool aligned = f.columns % 4 == 0;
    for (int64_t item = blockIdx.x; item < f.count * tiles; item += gridDim.x) {
        int64_t lead = item / tiles;
        int rows = (int)f.rows, columns = (int)f.columns, first_row = (int)(tiles - 1 - item % tiles) * ROWS;
        int own_row = first_row + warp_of() * 16 * MT,
            end = (int)flash_visible(f, first_row + ROWS < rows ? first_row + ROWS - 1 : rows - 1);
        flash_masks masks = flash_masks_of(f, lead);
        const T *k_from = (const T *)f.k + flash_at(f, ONT_FLASH_K, lead),
                *v_from = (const T *)f.v + flash_at(f, ONT_FLASH_V, lead);
        __syncthreads(); /* the last item's tiles are no longer read */
        load_rows<T, D, ROWS>((const T *)f.q + flash_at(f, ONT_FLASH_Q, lead), f.view[ONT_FLASH_Q].row, first_row, rows,
                              (int)f.size, queries);
        __syncthreads();
        uint32_t q[MT][D / 16][4];
        float acc[MT][D / 8][4] = {}, most[MT][2], sum[MT][2];
        for (int m = 0; m < MT; m++) {
            for (int k = 0; k < D / 16; k++) left_of<T, D>(q[m][k], queries, (warp_of() * MT + m) * 16, k);
            for (int r = 0; r < 2; r++) most[m][r] = -INFINITY, sum[m][r] = 0;
        }
        for (int first = 0; first < end; first += KEYS) {
            __syncthreads();
            load_rows<T, D, KEYS>(k_from, f.view[ONT_FLASH_K].row, first, columns, (int)f.size, keys);
            load_rows<T, D, KEYS>(v_from, f.view[ONT_FLASH_V].row, first, columns, (int)f.v_size, values);
            __syncthreads();
            float s[MT][KEYS / 8][4] = {};
        ONT_UNROLL
            for (int k = 0; k < D / 16; k++)
        ONT_UNROLL
                for (int n = 0; n < KEYS / 16; n++) {
                    uint32_t b[4];
                    right_of_rows<T, D>(b, keys, n, k);
                    for (int m = 0; m < MT; m++) {
                        ont_mma<T>(s[m][2 * n], q[m][k], b);
                        ont_mma<T>(s[m][2 * n + 1], q[m][k], b + 2);
                    }
                }
            bool plain = is_plain(f, own_row, 16 * MT, first, KEYS);
            uint32_t p[MT][KEYS / 8][2];
        ONT_UNROLL
            for (int m = 0; m < MT; m++) {
                int i = own_row + m * 16 + g;
                float next[2] = {most[m][0], most[m][1]}, base[2], part[2] = {0, 0};
        ONT_UNROLL
                for (int n = 0; n < KEYS / 8; n++)
        ONT_UNROLL
                    for (int e = 0; e < 4; e++) {
                        int j = first + n * 8 + 2 * t + e % 2, row = i + 8 * (e / 2);
                        float x = s[m][n][e] * (float)f.scale;
                        if (!plain) x = row < rows && j < columns ? flash_score(f, masks, row, j, x) : -INFINITY;
                        s[m][n][e] = x;
                        next[e / 2] = x > next[e / 2] ? x : next[e / 2];
                    }
        ONT_UNROLL
                for (int r = 0; r < 2; r++) {
                    next[r] = quad_max(next[r]);
                    base[r] = next[r] == -INFINITY ? 0 : next[r];
                    float shrink = exp_of(most[m][r] - base[r]);
                    most[m][r] = next[r];
                    sum[m][r] *= shrink;
        ONT_UNROLL
                    for (int n = 0; n < D / 8; n++) {
                        acc[m][n][2 * r] *= shrink;
                        acc[m][n][2 * r + 1] *= shrink;
                    }
                }
        ONT_UNROLL
                for (int n = 0; n < KEYS / 8; n++) {
                    for (int e = 0; e < 4; e++) part[e / 2] += s[m][n][e] = exp_of(s[m][n][e] - base[e / 2]);
                    if (f.drops) {
                        int64_t at = (lead * f.rows + i) * f.columns + first + n * 8 + 2 * t,
                                both[2] = {at, at + 8 * f.columns};
                        uint32_t words[4];
                        words_of(f, both, aligned, words);
                        for (int e = 0; e < 4; e++)
                            if (words[e] < f.threshold) s[m][n][e] *= 0;
                    }
                    for (int r = 0; r < 2; r++) p[m][n][r] = ont_pack<T>(s[m][n][2 * r], s[m][n][2 * r + 1]);
                }
                for (int r = 0; r < 2; r++) sum[m][r] += part[r];
            }
        ONT_UNROLL
            for (int k = 0; k < KEYS / 16; k++)
        ONT_UNROLL
                for (int n = 0; n < D / 16; n++) {
                    uint32_t b[4];
                    right_of_columns<T, D>(b, values, n, k);
                    for (int m = 0; m < MT; m++) {
                        uint32_t a[4] = {p[m][2 * k][0], p[m][2 * k][1], p[m][2 * k + 1][0], p[m][2 * k + 1][1]};
                        ont_mma<T>(acc[m][2 * n], a, b);
                        ont_mma<T>(acc[m][2 * n + 1], a, b + 2);
                    }
                }
        }
        ONT_UNROLL
        for (int m = 0; m < MT; m++) {
            float factor[2];
            bool zero[2];
            for (int r = 0; r < 2; r++) {
                int i = own_row + m * 16 + g + 8 * r;
                float all = quad_sum(sum[m][r]);
                factor[r] = (f.drops ? (float)f.keep_scale : 1.0f) / all;
                zero[r] = i < rows && (flash_is_void(f, all) || flash_is_empty(f, lead, i));
                if (!f.stats || t || i >= rows) continue;
                ((float *)f.stats)[(lead * f.rows + i) * 2] = most[m][r];
                ((float *)f.stats)[(lead * f.rows + i) * 2 + 1] = all;
            }
            put_pairs<T, D>((T *)f.y + flash_at(f, ONT_FLASH_Y, lead), f.view[ONT_FLASH_Y].row, own_row + m * 16, rows,
                            (int)f.v_size, acc[m], factor[0], factor[1], zero[0], zero[1]);
        }
    }
}

/* ---- backward ---- */

struct query_facts { /* of a row: its probabilities are exp(score - most) * inverse */
    float most, inverse, delta;
    bool dead;
};

ONT_DEVICE query_facts facts_at(const ont_flash &f, int64_t lead, int i)
{
    query_facts x = {0, 1, 0, true};
    if (i >= f.rows) return x;
    const float *stats = (const float *)f.stats + (lead * f.rows + i) * 2;
    x.most = stats[0] == -INFINITY ? 0 : stats[0];
    x.inverse = 1 / stats[1];
    x.delta = ((const float *)f.delta)[lead * f.rows + i];
    x.dead = flash_is_void(f, stats[1]) || flash_is_empty(f, lead, i);
    return x;
}

/* s = rows of `left` times columns that are rows of `right`, from two pairs of tiles at once; `own` is the warp's first
 * row. */
template <class T, int D, int N>
ONT_DEVICE void two_products(const T *left, const T *right, float s[N / 8][4], const T *left2, const T *right2,
                             float s2[N / 8][4], int own)
{
        ONT_UNROLL
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[4], a2[4], b[4];
        left_of<T, D>(a, left, own, k);
        left_of<T, D>(a2, left2, own, k);
        ONT_UNROLL
        for (int n = 0; n < N / 16; n++) {
            right_of_rows<T, D>(b, right, n, k);
            ont_mma<T>(s[2 * n], a, b);
            ont_mma<T>(s[2 * n + 1], a, b + 2);
            right_of_rows<T, D>(b, right2, n, k);
            ont_mma<T>(s2[2 * n], a2, b);
            ont_mma<T>(s2[2 * n + 1], a2, b + 2);
        }
    }
}

/* acc += weights, accumulators of N columns, times the tile's N rows */
template <class T, int D, int N>
ONT_DEVICE void add_weighted(float acc[D / 8][4], const float w[N / 8][4], const T *tile)
{
        ONT_UNROLL
    for (int k = 0; k < N / 16; k++) {
        uint32_t a[4] = {ont_pack<T>(w[2 * k][0], w[2 * k][1]), ont_pack<T>(w[2 * k][2], w[2 * k][3]),
                         ont_pack<T>(w[2 * k + 1][0], w[2 * k + 1][1]), ont_pack<T>(w[2 * k + 1][2], w[2 * k + 1][3])};
        ONT_UNROLL
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            right_of_columns<T, D>(b, tile, n, k);
            ont_mma<T>(acc[2 * n], a, b);
            ont_mma<T>(acc[2 * n + 1], a, b + 2);
        }
    }
}

enum { OWN = 16 * WARPS }; /* rows, or keys, of a block */

template <class T, int D, int N>
__global__ void __launch_bounds__(THREADS) flash_mma_dq_kernel(const ont_flash f, unsigned mask, int64_t n_shared)
{
    enum { PITCH = D + 8 };
    ONT_SHARED(T, shared);
    T *queries = shared, *given = queries + OWN * PITCH, *keys = given + OWN * PITCH, *values = keys + N * PITCH;
    int g = lane_of() >> 2, t = lane_of() & 3, own = warp_of() * 16;
    int64_t tiles = (f.rows + OWN - 1) / OWN;
    bool aligned = f.columns % 4 == 0;
    for (int64_t item = blockIdx.x; item < f.count / n_shared * tiles; item += gridDim.x) {
        int rows = (int)f.rows, columns = (int)f.columns, first_row = (int)(tiles - 1 - item % tiles) * OWN,
            i = first_row + own + g;
        int end = (int)flash_visible(f, first_row + OWN < rows ? first_row + OWN - 1 : rows - 1);
        if (f.dbias) end = columns; /* which is zero where nothing is seen */
        float acc[D / 8][4] = {};
        for (int64_t other = 0; other < n_shared; other++) {
            int64_t lead = flash_lead(f, mask, item / tiles, other);
            flash_masks masks = flash_masks_of(f, lead);
            query_facts row[2] = {facts_at(f, lead, i), facts_at(f, lead, i + 8)};
            const T *k_from = (const T *)f.k + flash_at(f, ONT_FLASH_K, lead),
                    *v_from = (const T *)f.v + flash_at(f, ONT_FLASH_V, lead);
            __syncthreads();
            load_rows<T, D, OWN>((const T *)f.q + flash_at(f, ONT_FLASH_Q, lead), f.view[ONT_FLASH_Q].row, first_row,
                                 rows, (int)f.size, queries);
            load_rows<T, D, OWN>((const T *)f.dy + flash_at(f, ONT_FLASH_Y, lead), f.view[ONT_FLASH_Y].row, first_row,
                                 rows, (int)f.v_size, given);
            for (int first = 0; first < end; first += N) {
                __syncthreads();
                load_rows<T, D, N>(k_from, f.view[ONT_FLASH_K].row, first, columns, (int)f.size, keys);
                load_rows<T, D, N>(v_from, f.view[ONT_FLASH_V].row, first, columns, (int)f.v_size, values);
                __syncthreads();
                float s[N / 8][4] = {}, dp[N / 8][4] = {};
                two_products<T, D, N>(queries, keys, s, given, values, dp, own);
                bool plain = is_plain(f, first_row + own, 16, first, N);
        ONT_UNROLL
                for (int n = 0; n < N / 8; n++) {
                    uint32_t words[4];
                    int64_t at = (lead * f.rows + i) * f.columns + first + n * 8 + 2 * t,
                            both[2] = {at, at + 8 * f.columns};
                    if (f.drops) words_of(f, both, aligned, words);
        ONT_UNROLL
                    for (int e = 0; e < 4; e++) {
                        int j = first + n * 8 + 2 * t + e % 2, line = i + 8 * (e / 2);
                        const query_facts &x = row[e / 2];
                        float ds = 0, score = s[n][e] * (float)f.scale;
                        if (!x.dead && (plain || (j < columns && !flash_replaced(f, masks, line, j)))) {
                            if (!plain) score = flash_score(f, masks, line, j, score);
                            float kept = !f.drops ? 1 : words[e] >= f.threshold ? (float)f.keep_scale : 0.0f;
                            ds = exp_of(score - x.most) * x.inverse * (dp[n][e] * kept - x.delta);
                        }
                        if (f.dbias && line < rows && j < columns)
                            flash_put_number(f.dbias, f.bias_dtype, (lead * f.rows + line) * f.columns + j, ds);
                        s[n][e] = ds;
                    }
                }
                if (f.dq) add_weighted<T, D, N>(acc, s, keys);
            }
        }
        if (!f.dq) continue;
        int64_t at = flash_at(f, ONT_FLASH_Q, flash_lead(f, mask, item / tiles, 0));
        put_pairs<T, D>((T *)f.dq + at, f.view[ONT_FLASH_Q].row, first_row + own, rows, (int)f.size, acc,
                        (float)f.scale, (float)f.scale, false, false);
    }
}

/* A block has 64 keys, and goes over the queries of every lead that shares them; scores are transposed. */
template <class T, int D, int N>
__global__ void __launch_bounds__(THREADS) flash_mma_dkv_kernel(const ont_flash f, unsigned mask, int64_t n_shared)
{
    enum { PITCH = D + 8 };
    ONT_SHARED(T, shared);
    __shared__ query_facts facts[N];
    T *keys = shared, *values = keys + OWN * PITCH, *queries = values + OWN * PITCH, *given = queries + N * PITCH;
    int g = lane_of() >> 2, t = lane_of() & 3, own = warp_of() * 16;
    int64_t tiles = (f.columns + OWN - 1) / OWN;
    bool aligned = f.columns % 4 == 0;
    for (int64_t item = blockIdx.x; item < f.count / n_shared * tiles; item += gridDim.x) {
        int rows = (int)f.rows, columns = (int)f.columns, first_key = (int)(item % tiles) * OWN,
            j = first_key + own + g;
        int64_t begin = flash_first_row(f, first_key) / N * N;
        float dk[D / 8][4] = {}, dv[D / 8][4] = {};
        for (int64_t other = 0; other < n_shared; other++) {
            int64_t lead = flash_lead(f, mask, item / tiles, other);
            flash_masks masks = flash_masks_of(f, lead);
            const T *q_from = (const T *)f.q + flash_at(f, ONT_FLASH_Q, lead),
                    *dy_from = (const T *)f.dy + flash_at(f, ONT_FLASH_Y, lead);
            __syncthreads();
            load_rows<T, D, OWN>((const T *)f.k + flash_at(f, ONT_FLASH_K, lead), f.view[ONT_FLASH_K].row, first_key,
                                 columns, (int)f.size, keys);
            load_rows<T, D, OWN>((const T *)f.v + flash_at(f, ONT_FLASH_V, lead), f.view[ONT_FLASH_V].row, first_key,
                                 columns, (int)f.v_size, values);
            for (int first = begin < rows ? (int)begin : rows; first < rows; first += N) {
                __syncthreads();
                load_rows<T, D, N>(q_from, f.view[ONT_FLASH_Q].row, first, rows, (int)f.size, queries);
                load_rows<T, D, N>(dy_from, f.view[ONT_FLASH_Y].row, first, rows, (int)f.v_size, given);
                if (threadIdx.x < N) facts[threadIdx.x] = facts_at(f, lead, first + (int)threadIdx.x);
                __syncthreads();
                float s[N / 8][4] = {}, dp[N / 8][4] = {};
                two_products<T, D, N>(keys, queries, s, values, given, dp, own);
                bool plain = is_plain(f, first, N, first_key + own, 16);
        ONT_UNROLL
                for (int n = 0; n < N / 8; n++) {
                    uint32_t words[4];
                    if (f.drops) words_of_keys(f, lead * f.rows + first + n * 8 + 2 * t, j, aligned, words);
        ONT_UNROLL
                    for (int e = 0; e < 4; e++) {
                        int key = j + 8 * (e / 2), line = first + n * 8 + 2 * t + e % 2;
                        const query_facts x = facts[n * 8 + 2 * t + e % 2];
                        float ds = 0, p = 0, score = s[n][e] * (float)f.scale;
                        if (!x.dead && (plain || key < columns)) {
                            if (!plain) score = flash_score(f, masks, line, key, score);
                            float kept = !f.drops ? 1 : words[e] >= f.threshold ? (float)f.keep_scale : 0.0f;
                            p = exp_of(score - x.most) * x.inverse;
                            if (plain || !flash_replaced(f, masks, line, key)) ds = p * (dp[n][e] * kept - x.delta);
                            p *= kept;
                        }
                        s[n][e] = p;
                        dp[n][e] = ds;
                    }
                }
                if (f.dv) add_weighted<T, D, N>(dv, s, given);
                if (f.dk) add_weighted<T, D, N>(dk, dp, queries);
            }
        }
        int64_t lead = flash_lead(f, mask, item / tiles, 0);
        if (f.dk)
            put_pairs<T, D>((T *)f.dk + flash_at(f, ONT_FLASH_K, lead), f.view[ONT_FLASH_K].row, first_key + own,
                            columns, (int)f.size, dk, (float)f.scale, (float)f.scale, false, false);
        if (f.dv)
            put_pairs<T, D>((T *)f.dv + flash_at(f, ONT_FLASH_V, lead), f.view[ONT_FLASH_V].row, first_key + own,
                            columns, (int)f.v_size, dv, 1, 1, false, false);
    }
}

/* ---- launchers ---- */

static bool fits_vectors(const ont_flash *f, int view, const void *pointer)
{
    const ont_flash_view *v = &f->view[view];
    bool fits = (uintptr_t)pointer % 16 == 0 && v->offset % 8 == 0 && v->row % 8 == 0;
    for (int d = 0; d < f->n_leads; d++) fits = fits && v->lead[d] % 8 == 0;
    return fits;
}

extern "C" int ont_flash_has_mma(const ont_flash *f, int gradient)
{
    if ((f->dtype != ONT_FLOAT16 && f->dtype != ONT_BFLOAT16) || f->size % 8 || f->v_size % 8) return 0;
    if (f->size > 128 || f->v_size > 128 || f->rows > INT32_MAX / 2 || f->columns > INT32_MAX / 2 || !ont_has_mma())
        return 0;
    bool fits = fits_vectors(f, ONT_FLASH_Q, f->q) && fits_vectors(f, ONT_FLASH_K, f->k) &&
                fits_vectors(f, ONT_FLASH_V, f->v) && fits_vectors(f, ONT_FLASH_Y, f->y);
    if (gradient)
        fits = fits && fits_vectors(f, ONT_FLASH_Y, f->dy) && fits_vectors(f, ONT_FLASH_Q, f->dq) &&
               fits_vectors(f, ONT_FLASH_K, f->dk) && fits_vectors(f, ONT_FLASH_V, f->dv);
    return fits;
}

static unsigned blocks_of(int64_t leads, int64_t length,
                          int rows) { return ont_blocks(leads * ((length + rows - 1) / rows), 1); }

template <class T, int D, int MT, int KEYS> static int forward(const ont_flash *f, void *stream)
{
    size_t bytes = (size_t)(16 * MT * WARPS + 2 * KEYS) * (D + 8) * sizeof(T);
    int error = ONT_ALLOW_SHARED((flash_mma_kernel<T, D, MT, KEYS>), bytes);
    if (error) return error;
    return ONT_LAUNCH((flash_mma_kernel<T, D, MT, KEYS>), blocks_of(f->count, f->rows, 16 * MT * WARPS), THREADS, bytes,
                      stream, *f);
}

template <class T, int D, int N> static int keys_backward(const ont_flash *f, void *stream)
{
    size_t bytes = (size_t)(2 * OWN + 2 * N) * (D + 8) * sizeof(T);
    unsigned k = flash_shared_leads(f, ONT_FLASH_K), v = flash_shared_leads(f, ONT_FLASH_V);
    int error = ONT_ALLOW_SHARED((flash_mma_dkv_kernel<T, D, N>), bytes);
    for (int turn = 0; turn < 2 && !error; turn++) {
        ont_flash part = *f;
        bool both = k == v;
        if (!both) (turn ? part.dk : part.dv) = nullptr;
        unsigned mask = both || !turn ? k : v;
        if ((both && turn) || (!part.dk && !part.dv)) continue;
        error = ONT_LAUNCH((flash_mma_dkv_kernel<T, D, N>), blocks_of(flash_count(f, mask, false), f->columns, OWN),
                           THREADS, bytes, stream, part, mask, flash_count(f, mask, true));
    }
    return error;
}

template <class T, int D, int N> static int backward(const ont_flash *f, void *stream)
{
    size_t bytes = (size_t)(2 * OWN + 2 * N) * (D + 8) * sizeof(T);
    unsigned mask = f->dq ? flash_shared_leads(f, ONT_FLASH_Q) : 0;
    int error = ONT_ALLOW_SHARED((flash_mma_dq_kernel<T, D, N>), bytes);
    if (!error && (f->dq || f->dbias))
        error = ONT_LAUNCH((flash_mma_dq_kernel<T, D, N>), blocks_of(flash_count(f, mask, false), f->rows, OWN),
                           THREADS, bytes, stream, *f, mask, flash_count(f, mask, true));
    return error || (!f->dk && !f->dv) ? error : keys_backward<T, D, N>(f, stream);
}

template <class T> static int launch(const ont_flash *f, bool gradient, void *stream)
{
    bool small = f->size <= 64 && f->v_size <= 64;
    if (gradient) return small ? backward<T, 64, 64>(f, stream) : backward<T, 128, 32>(f, stream);
    return small ? forward<T, 64, 2, 32>(f, stream) : forward<T, 128, 1, 64>(f, stream);
}

extern "C" int ont_launch_flash_mma(const ont_flash *f, void *stream)
{
    return f->dtype == ONT_FLOAT16 ? launch<ont_f16>(f, false, stream) : launch<ont_bf16>(f, false, stream);
}

extern "C" int ont_launch_flash_mma_grad(const ont_flash *f, void *stream)
{
    return f->dtype == ONT_FLOAT16 ? launch<ont_f16>(f, true, stream) : launch<ont_bf16>(f, true, stream);
}
