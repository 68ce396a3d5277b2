/*
 * Shared by the attention kernels: offsets of matrices, batch indices whose gradients are summed, masked scores, and
 * the random bits of dropout.
 */
#ifndef ONT_CUDA_FLASH_CUH
#define ONT_CUDA_FLASH_CUH

#include "kernels/launch.cuh"

#include "kernels/flash.h"
#include "kernels/math.cuh"

/* A block computes a tile of scores. The emulation counts them. */
#ifdef ONT_EMULATE
void ont_emulate_count_tile(void);
#define COUNT_TILE() (threadIdx.x ? (void)0 : ont_emulate_count_tile())
#else
#define COUNT_TILE() ((void)0)
#endif

/* Offset in elements of an operand's matrix at index bh over all batch dims. */
ONT_DEVICE int64_t flash_offset(const ont_flash_params &f, int operand, int64_t bh)
{
    int64_t at = f.layout[operand].offset;
    for (int d = f.n_batch_dims - 1; d >= 0; d--) {
        at += bh % f.batch_dims[d] * f.layout[operand].batch_stride[d];
        bh /= f.batch_dims[d];
    }
    return at;
}

/* The matrix of an operand at one batch index: (n, size), with rows row_stride elements apart. */
template <class T> struct flash_matrix {
    T *data;
    int64_t row_stride, n;
    int size;
};

template <class T>
ONT_DEVICE flash_matrix<T> flash_matrix_of(const ont_flash_params &f, int operand, const void *base, int64_t bh)
{
    bool has_keys = operand == ONT_FLASH_K || operand == ONT_FLASH_V;
    bool has_values = operand == ONT_FLASH_V || operand == ONT_FLASH_Y;
    flash_matrix<T> m = {(T *)base + flash_offset(f, operand, bh), f.layout[operand].row_stride,
                         has_keys ? f.seqlen_k : f.seqlen_q, (int)(has_values ? f.head_dim_v : f.head_dim)};
    return m;
}

/*
 * An operand with stride 0 along a batch dim has one gradient for all of its indices, which one thread block sums.
 * summed_dims has the bit of each such dim. Returns the batch index at an index over the other dims (parallel) and one
 * over the summed dims (summed).
 */
ONT_DEVICE int64_t flash_bh(const ont_flash_params &f, unsigned summed_dims, int64_t parallel, int64_t summed)
{
    int64_t bh = 0, step = 1;
    for (int d = f.n_batch_dims - 1; d >= 0; d--) {
        int64_t *from = summed_dims >> d & 1 ? &summed : &parallel;
        bh += *from % f.batch_dims[d] * step;
        *from /= f.batch_dims[d];
        step *= f.batch_dims[d];
    }
    return bh;
}

static inline unsigned flash_summed_dims(const ont_flash_params *f, int operand)
{
    unsigned summed_dims = 0;
    for (int d = 0; d < f->n_batch_dims; d++)
        if (!f->layout[operand].batch_stride[d]) summed_dims |= 1u << d;
    return summed_dims;
}

static inline int64_t flash_count_dims(const ont_flash_params *f, unsigned summed_dims, bool summed)
{
    int64_t n = 1;
    for (int d = 0; d < f->n_batch_dims; d++)
        if ((summed_dims >> d & 1) == (unsigned)summed) n *= f->batch_dims[d];
    return n;
}

/*
 * Launches the gradient: dQ and the bias's, if wanted, by launch_q, then dK and dV by launch_kv, together where they
 * are summed over the same batch dims, else one after the other. Both functions are given the parameters, the summed
 * dims, the number of indices over the other dims and of those over the summed ones. 0, or an error code.
 */
template <class Q, class KV>
static int flash_launch_grads(const ont_flash_params *f, const Q &launch_q, const KV &launch_kv)
{
    auto launch = [](const auto &one, const ont_flash_params &params, unsigned summed_dims) {
        return one(params, summed_dims, flash_count_dims(&params, summed_dims, false),
                   flash_count_dims(&params, summed_dims, true));
    };
    const unsigned k = flash_summed_dims(f, ONT_FLASH_K), v = flash_summed_dims(f, ONT_FLASH_V);
    ont_flash_params params = *f;
    if (f->dbias) params.tiles = nullptr; /* its zeros are written tile by tile */
    int error = f->dq || f->dbias ? launch(launch_q, params, f->dq ? flash_summed_dims(f, ONT_FLASH_Q) : 0) : 0;
    params = *f;
    if (k != v) params.dv = nullptr;
    if (!error && (params.dk || params.dv)) error = launch(launch_kv, params, k);
    if (error || k == v || !f->dv) return error;
    params = *f;
    params.dk = nullptr;
    return launch(launch_kv, params, v);
}

/* Number of keys that query i attends to: keys 0 to the result - 1. */
ONT_DEVICE int64_t flash_visible_keys(const ont_flash_params &f, int64_t i)
{
    if (!f.causal) return f.seqlen_k;
    int64_t n = i + f.causal_offset + 1;
    return n < 0 ? 0 : n > f.seqlen_k ? f.seqlen_k : n;
}

/* The first query that attends to key j. */
ONT_DEVICE int64_t flash_first_query(const ont_flash_params &f, int64_t j)
{
    int64_t i = f.causal ? j - f.causal_offset : 0;
    return i < 0 ? 0 : i;
}

template <class C> ONT_DEVICE C flash_load(const void *p, int dtype, int64_t i)
{
    switch (dtype) {
    case ONT_FLOAT32: return (C)((const float *)p)[i];
    case ONT_FLOAT64: return (C)((const double *)p)[i];
    case ONT_FLOAT16: return (C)ont_load((const ont_f16 *)p + i);
    default: return (C)ont_load((const ont_bf16 *)p + i);
    }
}

template <class C> ONT_DEVICE void flash_store(void *p, int dtype, int64_t i, C v)
{
    switch (dtype) {
    case ONT_FLOAT32: ((float *)p)[i] = (float)v; break;
    case ONT_FLOAT64: ((double *)p)[i] = (double)v; break;
    case ONT_FLOAT16: ont_store((ont_f16 *)p + i, (float)v); break;
    default: ont_store((ont_bf16 *)p + i, (float)v);
    }
}

/* A batch index, with the offsets of its bias and its mask in elements. */
struct flash_batch {
    int64_t bh, bias, mask;
};

ONT_DEVICE flash_batch flash_batch_of(const ont_flash_params &f, int64_t bh)
{
    flash_batch b = {bh, f.bias ? flash_offset(f, ONT_FLASH_BIAS, bh) : 0,
                     f.mask ? flash_offset(f, ONT_FLASH_MASK, bh) : 0};
    return b;
}

ONT_DEVICE bool flash_is_masked(const ont_flash_params &f, const flash_batch &batch, int64_t i, int64_t j)
{
    if (!f.mask) return false;
    const ont_flash_layout &v = f.layout[ONT_FLASH_MASK];
    return (f.mask[batch.mask + i * v.row_stride + j * v.col_stride] != 0) != (f.mask_polarity != 0);
}

/* The score of query i and key j, both in range: s = scale * q_i k_j, with bias and masks applied. */
template <class C>
ONT_DEVICE C flash_score(const ont_flash_params &f, const flash_batch &batch, int64_t i, int64_t j, C s)
{
    if (f.bias) {
        const ont_flash_layout &v = f.layout[ONT_FLASH_BIAS];
        s += flash_load<C>(f.bias, f.bias_dtype, batch.bias + i * v.row_stride + j * v.col_stride);
    }
    if (flash_is_masked(f, batch, i, j)) s = (C)f.mask_value;
    return f.causal && j > i + f.causal_offset ? -(C)INFINITY : s;
}

/* Whether a tile of scores adds nothing to any result. The same for all threads of a block. */
template <int QUERIES, int KEYS> ONT_DEVICE bool flash_is_hidden(const ont_flash_params &f, int64_t bh, int i, int j)
{
    if (!f.tiles) return false;
    int at = ((int)bh * f.query_tiles + i / ONT_FLASH_TILE_QUERIES) * f.key_tiles + j / ONT_FLASH_TILE_KEYS;
    int visible = 0;
    ONT_UNROLL
    for (int r = 0; r < QUERIES; r += ONT_FLASH_TILE_QUERIES, at += f.key_tiles)
        visible |= KEYS > ONT_FLASH_TILE_KEYS ? *(const uint16_t *)(const void *)(f.tiles + at) : f.tiles[at];
    return !visible;
}

/* The same in two steps, for the loop over queries of dK and dV, where it takes fewer registers. */
ONT_DEVICE const uint8_t *flash_tile_column(const ont_flash_params &f, int64_t bh, int j)
{
    return (const uint8_t *)((uintptr_t)f.tiles + (unsigned)((int)bh * f.query_tiles * f.key_tiles +
                                                             j / ONT_FLASH_TILE_KEYS));
}
template <int KEYS> ONT_DEVICE bool flash_is_hidden_from(const ont_flash_params &f, const uint8_t *column, int i)
{
    if (!f.tiles) return false;
    const uint8_t *tile = column + i / ONT_FLASH_TILE_QUERIES * f.key_tiles;
    return !(KEYS > ONT_FLASH_TILE_KEYS ? *(const uint16_t *)(const void *)tile : *tile);
}

/* N random words of the node's stream from word `at` on. Philox gives four words a call. */
template <int N> ONT_DEVICE void flash_random_bits(const ont_flash_params &f, int64_t at, uint32_t *random_bits)
{
    uint32_t block[4];
    int64_t known = -1;
    ONT_UNROLL
    for (int n = 0; n < N; n++) {
        if ((at + n) >> 2 != known) {
            known = (at + n) >> 2;
            ont_philox(*f.seed, f.rng_stream, (uint64_t)known, block);
        }
        int word = (int)(at + n) & 3;
        random_bits[n] = word == 0 ? block[0] : word == 1 ? block[1] : word == 2 ? block[2] : block[3];
    }
}

/* Whether a row with this sum of exponentials is masked because its probabilities would be NaN. */
template <class C> ONT_DEVICE bool flash_is_nan_row(const ont_flash_params &f, C row_sum)
{
    return f.zero_nan && !(row_sum > 0);
}

/* Whether input masked_rows masks query i. */
ONT_DEVICE bool flash_is_masked_row(const ont_flash_params &f, int64_t bh, int64_t i)
{
    return f.masked_rows && f.masked_rows[flash_offset(f, ONT_FLASH_MASKED_ROWS, bh) + i *
                                          f.layout[ONT_FLASH_MASKED_ROWS].row_stride];
}

/* What dropout multiplies a probability by. */
template <class C> ONT_DEVICE C flash_dropout_factor(const ont_flash_params &f, uint32_t random_bits)
{
    return !f.has_dropout ? (C)1 : random_bits >= f.dropout_threshold ? (C)f.dropout_scale : (C)0;
}

#endif
