/*
 * Attention on tensor cores: 16-bit floats, head sizes of up to 128 in multiples of 8. Four warps have 16 or 32 rows
 * each. Scores and sums stay in registers, where the accumulators of one GEMM are the left operand of the next. Tiles
 * are 64 by 64 (64 by 32 in the gradient of head size 128). Rows in shared memory are padded by 16 bytes, so that
 * ldmatrix has no bank conflicts. Tiles of the operands that a loop is over have two stages: while one is multiplied,
 * cp.async copies the next.
 *
 * The 255 registers of a thread bound the tile sizes; README.md has the numbers.
 * flash_mma.cu has forward, flash_mma_grad.cu the gradient.
 * Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
 */
#ifndef ONT_CUDA_FLASH_MMA_CUH
#define ONT_CUDA_FLASH_MMA_CUH

#include "kernels/flash.cuh"

#include "kernels/mma.cuh"

enum { THREADS = 128, WARPS = 4 };
enum { TILE_STRIDE = INT32_MAX / 64 }; /* the largest stride of a bias or mask, so that offsets in a tile are ints */

ONT_DEVICE int lane_of() { return (int)threadIdx.x & 31; }
ONT_DEVICE int warp_of() { return (int)threadIdx.x >> 5; }
#define LOG2_E 1.44269504088896341f

/* Begins to copy rows [first, first + ROWS) of a matrix into a tile (ROWS, D + 8), padded with zeros; 16 bytes at a
 * time. All threads wait for their copies and then at a barrier. */
template <class T, int D, int ROWS> ONT_DEVICE void copy_rows(const flash_matrix<const T> &from, int first, T *tile)
{
    enum { VECTORS = D / 8, STEP = THREADS / VECTORS };
    static_assert(ROWS % STEP == 0, "each thread copies as many vectors");
    const int row = (int)threadIdx.x / VECTORS, column = (int)threadIdx.x % VECTORS * 8;
    const T *source = from.data + (int64_t)(first + row) * from.row_stride + column;
    ONT_UNROLL
    for (int r = 0; r < ROWS; r += STEP)
        ont_copy16_async(tile + (row + r) * (D + 8) + column, source + r * from.row_stride,
                         first + row + r < (int)from.n && column < from.size);
}

/* Begins to copy the same rows of two matrices. */
template <class T, int D, int ROWS>
ONT_DEVICE void copy_pair(const flash_matrix<const T> &a, const flash_matrix<const T> &b, int first, T *tile_a,
                          T *tile_b)
{
    copy_rows<T, D, ROWS>(a, first, tile_a);
    copy_rows<T, D, ROWS>(b, first, tile_b);
}

/* The first tile of keys from `first` on that is not hidden from a block's rows; `end` or more: none. */
template <int ROWS, int KEYS>
ONT_DEVICE int shown_tile(const ont_flash_params &f, int64_t bh, int first_row, int first, int end)
{
    while (first < end && flash_is_hidden<ROWS, KEYS>(f, bh, first_row, first)) first += KEYS;
    return first;
}

/* The copies of all threads are there, and what they read before may be overwritten. */
ONT_DEVICE void wait_for_copies()
{
    ont_copy_wait();
    __syncthreads();
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

/* A lane's elements of scores (16, N): in each eight columns, (row, col), (row, col + 1) and the same of row + 8. */
struct score_position {
    int row, col;
    bool unmasked; /* tile_is_unmasked() */
};

static inline unsigned blocks_of(int64_t n_bh, int64_t length, int rows)
{
    return ont_blocks(n_bh * ((length + rows - 1) / rows), 1);
}

#endif
