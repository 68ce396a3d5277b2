/*
 * Fused attention: softmax(scale Q K' + masks) V in one node, whose operands and result are strided views of row-major
 * tensors. passes/fuse_attention.c builds it, ops/fused_attention.c describes it, ops/flash.c runs it.
 *
 * Scores are [leads..., rows, columns]. Attributes, all stated by the pass:
 *   sizes      [rows, columns, size, v_size]
 *   leads      sizes of the dims before rows
 *   q k v y    [offset, stride per lead, stride of rows or columns] in elements; the last dim is contiguous
 *   bias keep  [offset, stride per lead, stride of rows, stride of columns]; empty: [offset, stride per lead, stride of
 * rows] shape      of the result, which the view y covers bias_shape the scores as the bias saw them: the shape of its
 * gradient scale, causal and diagonal (columns up to row + diagonal are seen), fill and keep_if (of keep), ratio and
 * rng_stream, zero_nan (rows of probabilities that are NaN count as empty: those whose scores are all -inf, or not
 * numbers)
 */
#ifndef ONT_OPS_FUSED_ATTENTION_H
#define ONT_OPS_FUSED_ATTENTION_H

#include "ops/op.h"

enum { ONT_ATTENTION_LEADS = 6 };
enum { ONT_ATTENTION_Q, ONT_ATTENTION_K, ONT_ATTENTION_V, ONT_ATTENTION_BIAS, ONT_ATTENTION_KEEP, ONT_ATTENTION_EMPTY,
       ONT_ATTENTION_INPUTS,                                          /* of the forward; its gradient's go on: */
       ONT_ATTENTION_Y = ONT_ATTENTION_INPUTS, ONT_ATTENTION_STATS, ONT_ATTENTION_DY };

typedef struct ont_matrix_view {
    int64_t offset, lead[ONT_ATTENTION_LEADS], row, column;
} ont_matrix_view;

typedef struct ont_attention {
    int n_leads;
    int64_t leads[ONT_ATTENTION_LEADS], count; /* count: their product */
    int64_t rows, columns, size, v_size;
    ont_matrix_view view[ONT_ATTENTION_INPUTS + 1]; /* by input; of the result: view[ONT_ATTENTION_Y] */
    double scale, fill;
    bool keep_if, causal, zero_nan;
    int64_t diagonal;
    bool drops;
    uint32_t threshold; /* of dropout's words */
    double keep_scale;
    uint64_t stream;
} ont_attention;

/* Names of the attributes that hold the views, by input. */
extern const char *const ont_attention_views[ONT_ATTENTION_INPUTS + 1];

/* From the attributes of a node, forward or gradient; EINVAL where one is missing. */
ont_status ont_attention_read(const ont_node *node, ont_attention *a) ONT_MUST_USE;

/* Offset in elements of the matrix number `l` of a view. */
static inline int64_t ont_attention_at(const ont_attention *a, int view, int64_t l)
{
    const ont_matrix_view *v = &a->view[view];
    int64_t at = v->offset;
    for (int d = a->n_leads - 1; d >= 0; d--) {
        at += l % a->leads[d] * v->lead[d];
        l /= a->leads[d];
    }
    return at;
}

/* Whether a row with this sum of exponentials is to be taken out: its probabilities would be NaN. */
static inline bool ont_attention_is_void(const ont_attention *a, double sum)
{
    return a->zero_nan && !(sum > 0);
}

/* Columns that a row sees. */
static inline int64_t ont_attention_visible(const ont_attention *a, int64_t row)
{
    if (!a->causal) return a->columns;
    int64_t n = row + a->diagonal + 1;
    return n < 0 ? 0 : n > a->columns ? a->columns : n;
}

/* Kernels: blocks with a library's products, in ops/flash.c; one row after the other, in ops/fused_attention_ref.c. */
const char *ont_attention_accept(const ont_node *node);
ont_status ont_flash_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_flash_run(const ont_call *call);
ont_status ont_flash_run_grad(const ont_call *call);
ont_status ont_attention_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_attention_run_ref(const ont_call *call);
ont_status ont_attention_run_grad_ref(const ont_call *call);
/* Elements of a gradient's output that the operands writing there cover. */
int64_t ont_attention_covered(const ont_attention *a, const int64_t *targets, int64_t target);
/* Zeroes gradients of which the operands' views are not the whole: nothing else writes there. */
void ont_attention_clear(const ont_call *call, const ont_attention *a, const int64_t *targets);

#endif
