/*
 * FusedAttention: softmax(scale * Q K^T + attn_bias, masked) V as one node. passes/fuse_attention.c builds it,
 * ops/attention/fused_attention.c describes it, ops/attention/flash_native.c runs it.
 *
 * The scores are (batch_dims..., seqlen_q, seqlen_k). Operands and result are strided matrices inside larger row-major
 * tensors, so that Q, K and V are read where they lie before they were split, transposed and repeated.
 *
 * Attributes, all set by the pass:
 *   sizes           [seqlen_q, seqlen_k, head_dim, head_dim_v]
 *   batch_dims      the dims of the scores before seqlen_q, such as [batch, heads]; at least one
 *   q, k, v, y      layout: [offset, a stride for each batch dim, row stride], in elements; the last dim is contiguous
 *   bias, mask      layout: [offset, a stride for each batch dim, row stride, column stride]
 *   masked_rows     layout: [offset, a stride for each batch dim, row stride]
 *   shape           of the result tensor, which layout y covers
 *   bias_shape      of the bias before it was broadcast to the scores: the shape of its gradient
 *   scale           factor of Q K^T
 *   causal, causal_offset   query i attends to keys j <= i + causal_offset
 *   mask_value, mask_polarity   where mask differs from mask_polarity, the score becomes mask_value
 *   ratio, rng_stream   dropout on the probabilities
 *   zero_nan        a row whose probabilities would be NaN (its scores are all -inf, or one is NaN) counts as masked
 *
 * A row of the scores that is masked as a whole (masked_rows, zero_nan) gives a row of zeros and no gradient.
 *
 * passes/pack_rows.c leaves out rows of the sequences, which are batch_dims[0]. Input q_rows has the row of each
 * packed row of Q and Y, numbered sequence * seqlen_q + position, in ascending order; entries behind the last one
 * repeat the first. k_rows has those of K and V. Layouts are those before packing; bias, mask, masked_rows and the
 * random words of dropout are read at the rows' positions. Spare rows of results are 0.
 */
#ifndef ONT_OPS_FUSED_ATTENTION_H
#define ONT_OPS_FUSED_ATTENTION_H

#include "ops/op.h"

enum { ONT_ATTENTION_BATCH_DIMS = 6 }; /* at most */
enum { ONT_ATTENTION_Q, ONT_ATTENTION_K, ONT_ATTENTION_V, ONT_ATTENTION_BIAS, ONT_ATTENTION_MASK,
       ONT_ATTENTION_MASKED_ROWS, ONT_ATTENTION_INPUTS,
       /* further inputs of FusedAttentionGrad */
       ONT_ATTENTION_Y = ONT_ATTENTION_INPUTS, ONT_ATTENTION_STATS, ONT_ATTENTION_DY,
       /* further inputs of both where rows are left out */
       ONT_ATTENTION_Q_ROWS, ONT_ATTENTION_K_ROWS, ONT_ATTENTION_ALL_INPUTS };

/* A matrix for each index of the batch dims; strides in elements. */
typedef struct ont_matrix_layout {
    int64_t offset, batch_stride[ONT_ATTENTION_BATCH_DIMS], row_stride, col_stride;
} ont_matrix_layout;

typedef struct ont_attention {
    int n_batch_dims;
    int64_t batch_dims[ONT_ATTENTION_BATCH_DIMS], n_bh; /* n_bh: their product, batch * heads */
    int64_t seqlen_q, seqlen_k, head_dim, head_dim_v;
    int64_t scores_q, scores_k;   /* as seqlen_q and seqlen_k, also in ont_attention_of_sequence() */
    int64_t packed_q, packed_k;   /* rows of Q and K where rows are left out, else 0 */
    /*
     * Of ont_attention_of_sequence(). query_rows[i]: the row that query i had before rows were packed, where position 0
     * was first_row; NULL: not packed. key_rows[i]: the same of key i; NULL: there is no gap between keys, of which the
     * first one is at position first_key.
     */
    const int64_t *query_rows, *key_rows;
    int64_t first_row, first_key;
    /*
     * By input, and of the result at ONT_ATTENTION_Y. The matrices: q (seqlen_q, head_dim), k (seqlen_k, head_dim),
     * v (seqlen_k, head_dim_v), bias and mask (seqlen_q, seqlen_k), masked_rows (seqlen_q, 1),
     * y (seqlen_q, head_dim_v).
     */
    ont_matrix_layout layout[ONT_ATTENTION_INPUTS + 1];
    double scale, mask_value;
    bool mask_polarity, causal, zero_nan;
    int64_t causal_offset;
    bool has_dropout;
    uint32_t dropout_threshold; /* a probability is kept where its 32 random bits are at least this */
    double dropout_scale;       /* of kept probabilities: 1 / (1 - ratio) */
    uint64_t rng_stream;
} ont_attention;

/* All of them, as descriptors declare attributes. */
#define ONT_ATTENTION_ATTRIBUTES \
    "sizes:I batch_dims:I q:I k:I v:I y:I bias:I mask:I masked_rows:I shape:I bias_shape:I scale:f causal:i " \
    "causal_offset:i mask_value:f mask_polarity:i ratio:f rng_stream:i zero_nan:i"

/* Names of the attributes that hold the layouts, by input. */
extern const char *const ont_attention_layout_names[ONT_ATTENTION_INPUTS + 1];

/* Reads the attributes of a node, forward or gradient; ONT_EINVAL where one is missing. */
ont_status ont_attention_read(const ont_node *node, ont_attention *a) ONT_MUST_USE;

/* Offset in elements of the matrix at index `bh` over all batch dims. */
static inline int64_t ont_attention_offset(const ont_attention *a, int operand, int64_t bh)
{
    const ont_matrix_layout *v = &a->layout[operand];
    int64_t at = v->offset;
    for (int d = a->n_batch_dims - 1; d >= 0; d--) {
        at += bh % a->batch_dims[d] * v->batch_stride[d];
        bh /= a->batch_dims[d];
    }
    return at;
}

/* Whether a row with this sum of exponentials is masked because its probabilities would be NaN. */
static inline bool ont_attention_row_is_masked(const ont_attention *a, double row_sum)
{
    return a->zero_nan && !(row_sum > 0);
}

/* Number of keys that query `row` attends to under the causal mask: keys 0 to the result - 1. */
static inline int64_t ont_attention_visible_keys(const ont_attention *a, int64_t row)
{
    if (!a->causal) return a->seqlen_k;
    int64_t n = row + a->causal_offset + 1;
    return n < 0 ? 0 : n > a->seqlen_k ? a->seqlen_k : n;
}

/* Position of query i in its sequence. */
static inline int64_t ont_attention_position(const ont_attention *a, int64_t i)
{
    return a->query_rows ? a->query_rows[i] - a->first_row : i;
}

/* Position of key j behind that of key 0. */
static inline int64_t ont_attention_column(const ont_attention *a, int64_t j)
{
    return a->key_rows ? a->key_rows[j] - a->key_rows[0] : j;
}

/* Whether rows of an operand are left out. */
bool ont_attention_is_packed(const ont_attention *a, int operand);
/*
 * The attention of batch index bh where rows are left out: its own numbers of queries and keys, and offsets with which
 * row 0 of each operand is the first of its sequence, and column 0 of bias and mask key 0.
 */
void ont_attention_of_sequence(const ont_call *call, const ont_attention *a, int64_t bh, ont_attention *at);
/* Zeroes the spare packed rows of an operand's tensor, or of its gradient. */
void ont_attention_zero_spare(const ont_call *call, const ont_attention *a, int operand, void *data);

/* Number of elements of output `target` of the gradient that Q, K and V with that target write. */
int64_t ont_attention_covered(const ont_attention *a, const int64_t *targets, int64_t target);
/* Zeroes each output of the gradient that Q, K and V do not write as a whole. */
void ont_attention_zero_uncovered(const ont_call *call, const ont_attention *a, const int64_t *targets);
/* Why a kernel of float32 and float64 declines a node, or NULL. */
const char *ont_attention_accept(const ont_node *node);

#endif
