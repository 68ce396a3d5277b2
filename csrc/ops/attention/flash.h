/*
 * Shared by the kernels of FusedAttention: flash_native.c, which takes a block of queries and a block of keys at a time
 * over simd/attention/attention_gemm.h, and the reference. Functions are in flash_state.c. Source: Dao,
 * FlashAttention-2, 2023.
 */
#ifndef ONT_OPS_FLASH_H
#define ONT_OPS_FLASH_H

#include "ops/attention/fused_attention.h"
#include "simd/attention/attention.h"
#include "simd/attention/attention_gemm.h"
#include "simd/simd.h"

typedef struct ont_flash_state {
    ont_attention a;
    size_t elem_size;               /* bytes */
    const ont_attention_gemm_f32 *gemm_f32;   /* flash_native.c */
    const ont_attention_gemm_bf16 *gemm_bf16; /* flash_native.c: set where operands are bfloat16, else NULL */
    const ont_attention_loops *loops;
    const ont_simd_table *simd;
    int64_t block_q, block_k;       /* queries and keys in a block, at most */
    size_t gather_bytes;            /* at the end of a slot: where keys have gaps, see gather */
    char *gather;                   /* ont_flash_at(): a row's bias and mask (block_k), dropout mask (scores_k) */
    int64_t slots;                  /* scratch slots, one for each thread; at most this many threads work at once */
    size_t slot_bytes;
    bool kv_resident;               /* flash_native.c, forward: K and V of a batch index stay packed, all seqlen_k */
    int64_t targets[4];             /* gradient: output index of the gradient of Q, K, V and bias; -1: none */
    /*
     * Gradient: batch_dims = parallel_dims * summed_dims, entry by entry. A dim is summed where a wanted gradient is a
     * sum over it, as over the query heads of a group (GQA): one thread goes over it, in order.
     */
    int64_t parallel_dims[ONT_ATTENTION_BATCH_DIMS], summed_dims[ONT_ATTENTION_BATCH_DIMS], n_parallel, n_summed;
} ont_flash_state;

/* Queries [i0, i0 + m) and keys [j0, j0 + n) at batch index bh. */
typedef struct ont_flash_block {
    int64_t bh, i0, m, j0, n;
} ont_flash_block;

/* Sets what follows from the node alone; the caller sets GEMMs, block sizes and slot_bytes. */
ont_status ont_flash_state_init(const ont_node *node, ont_arena *arena, ont_flash_state **state) ONT_MUST_USE;
/* Adds s->gather to slot_bytes. */
void ont_flash_add_gather(ont_flash_state *s);
/*
 * The state of batch index bh: s itself if no rows are packed, else *at, a copy of s for that sequence
 * (ont_attention_of_sequence()) with the gather memory of the slot. Pass the result as `s` to the functions below.
 */
const ont_flash_state *ont_flash_at(const ont_call *call, const ont_flash_state *s, int64_t bh, int64_t slot,
                                    ont_flash_state *at);
/* Row i of an operand's matrix at batch index bh; NULL where `base` is, for an absent operand. */
char *ont_flash_row_at(const ont_flash_state *s, int operand, const void *base, int64_t bh, int64_t i);
/*
 * Dropout mask (m, n) of a block: 1 where a probability is kept. Element e of the scores, (n_bh, scores_q, scores_k),
 * takes random word e of the node's stream.
 */
void ont_flash_dropout_mask(const ont_call *call, const ont_flash_state *s, const ont_flash_block *b,
                            uint8_t *dropout_mask);
/* Bias and masks of row r of a block, valid until the next call with this s. */
ont_attention_row ont_flash_row_masks(const ont_call *call, const ont_flash_state *s, const ont_flash_block *b,
                                      int64_t r, const uint8_t *dropout_mask);
/* Whether input masked_rows masks query i. */
bool ont_flash_is_masked_row(const ont_call *call, const ont_flash_state *s, int64_t bh, int64_t i);
/* Stores row r of a block of the bias's gradient, (n_bh, scores_q, scores_k); zeros where `gradient` is NULL. */
void ont_flash_store_dbias(const ont_flash_state *s, const ont_flash_block *b, int64_t r, const void *gradient,
                           void *dbias);
/* Zeroes `width` elements of rows [first, last) of an operand's gradient. */
void ont_flash_zero_rows(const ont_flash_state *s, int operand, void *base, int64_t bh, int64_t first, int64_t last,
                         int64_t width);
/* Whether bh is the first of the batch indices whose gradients through an operand's layout are summed. */
bool ont_flash_is_first_writer(const ont_flash_state *s, int operand, int64_t bh);

/* Work item of the gradient: queries [i0, i1) and keys [j0, j1) at batch index bh. */
typedef struct ont_flash_work_item {
    int64_t bh, i0, i1, j0, j1;
    int64_t next_bh; /* batch index of the next item of the same thread, or -1 */
    void *dq, *dk, *dv, *dbias; /* outputs that this item adds to, or NULL */
} ont_flash_work_item;

/* Runs a work item with the scratch of a slot. */
typedef void ont_flash_run_item(const ont_call *call, const ont_flash_state *s, const ont_flash_work_item *w,
                                int64_t slot);

/*
 * Divides the gradient among threads: an item for each parallel batch index or, where these are fewer than threads,
 * first an item for each block of keys (dK, dV, dbias), then one for each block of queries (dQ).
 */
ont_status ont_flash_backward(const ont_call *call, ont_flash_run_item *run);

/* flash_native.c: float32, and bfloat16 with AVX512-BF16. */
const char *ont_flash_native_accept(const ont_node *node);
ont_status ont_flash_native_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_flash_native_prepare_grad(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_flash_native_run(const ont_call *call);
ont_status ont_flash_native_run_grad(const ont_call *call);

/* fused_attention_ref.c: float32 and float64. */
ont_status ont_attention_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_attention_run_ref(const ont_call *call);
ont_status ont_attention_run_grad_ref(const ont_call *call);

#endif
