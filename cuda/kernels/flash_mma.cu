/*
 * The forward pass of attention on tensor cores (flash_mma.cuh).
 */
#include "kernels/flash_mma.cuh"

/* A warp has MT * 16 queries. */

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
    enum { ROWS = 16 * MT * WARPS, PITCH = D + 8, STAGE = 2 * KEYS * PITCH };
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
        copy_rows<T, D, ROWS>(flash_matrix_of<const T>(f, ONT_FLASH_Q, f.q, bh), first_row, s_q);
        int next = shown_tile<ROWS, KEYS>(f, bh, first_row, 0, end), stage = 0;
        if (next < end) copy_pair<T, D, KEYS>(keys, values, next, s_k, s_v);
        wait_for_copies();
        uint32_t q[MT][D / 16][4], p[MT][KEYS / 8][2];
        float acc[MT][D / 8][4] = {};
        softmax_rows rows[MT];
        load_queries<T, D, MT>(s_q, q);
        for (int m = 0; m < MT; m++) rows[m] = {{-INFINITY, -INFINITY}, {0, 0}};
        for (int first = next; first < end; first = next, stage ^= 1) {
            COUNT_TILE();
            wait_for_copies();
            next = shown_tile<ROWS, KEYS>(f, bh, first_row, first + KEYS, end);
            const int other = (stage ^ 1) * STAGE;
            if (next < end) copy_pair<T, D, KEYS>(keys, values, next, s_k + other, s_v + other);
            float s[MT][KEYS / 8][4] = {};
            gemm_qk<T, D, MT, KEYS>(q, s_k + stage * STAGE, s);
            bool unmasked = tile_is_unmasked(f, warp_row, 16 * MT, first, KEYS);
            ONT_UNROLL
            for (int m = 0; m < MT; m++)
                online_softmax<T, D, KEYS>(f, batch, {warp_row + m * 16 + g, first + 2 * t, unmasked}, s[m], rows[m],
                                           acc[m], p[m]);
            gemm_pv<T, D, MT, KEYS>(p, s_v + stage * STAGE, acc);
        }
        ONT_UNROLL
        for (int m = 0; m < MT; m++) store_output<T, D>(f, bh, warp_row + m * 16, rows[m], acc[m]);
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

template <class T, int D, int MT, int KEYS> static int forward(const ont_flash_params *f, void *stream)
{
    size_t bytes = (size_t)(16 * MT * WARPS + 4 * KEYS) * (D + 8) * sizeof(T);
    int error = ONT_ALLOW_SHARED((flash_mma_kernel<T, D, MT, KEYS>), bytes);
    if (error) return error;
    return ONT_LAUNCH((flash_mma_kernel<T, D, MT, KEYS>), blocks_of(f->n_bh, f->seqlen_q, 16 * MT * WARPS), THREADS,
                      bytes, stream, *f);
}

template <class T> static int launch(const ont_flash_params *f, void *stream)
{
    bool small = f->head_dim <= 64 && f->head_dim_v <= 64;
    return small ? forward<T, 64, 2, 32>(f, stream) : forward<T, 128, 1, 64>(f, stream);
}

extern "C" int ont_launch_flash_mma(const ont_flash_params *f, void *stream)
{
    return f->dtype == ONT_FLOAT16 ? launch<ont_f16>(f, stream) : launch<ont_bf16>(f, stream);
}
