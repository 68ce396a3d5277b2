/*
 * Reads a FusedAttention or FusedAttentionGrad node: attributes, the rows that are left out, and which elements of the
 * gradients Q, K and V write. Kernels and passes call it; it knows neither kernels nor the operator's descriptor.
 */
#include <math.h>
#include <string.h>

#include "ops/attention/fused_attention.h"
#include "ops/random/random.h"

const char *const ont_attention_layout_names[] = {"q", "k", "v", "bias", "mask", "masked_rows", "y"};

/* ---- attributes ---- */

static ont_status read_layout(const ont_node *node, int which, ont_attention *a)
{
    size_t n, tail = which == ONT_ATTENTION_BIAS || which == ONT_ATTENTION_MASK ? 2 : 1;
    const int64_t *values = ont_attr_ints(node, ont_attention_layout_names[which], &n);
    ont_matrix_layout *layout = &a->layout[which];
    if (!values) return ONT_OK; /* check_layouts() reports those that are missing */
    if (n != 1 + (size_t)a->n_batch_dims + tail)
        return ont_fail(ONT_EINVAL, "attribute %s has %zu entries, expected %zu", ont_attention_layout_names[which], n,
                        1 + (size_t)a->n_batch_dims + tail);
    layout->offset = values[0];
    for (int d = 0; d < a->n_batch_dims; d++) layout->batch_stride[d] = values[1 + d];
    layout->row_stride = values[1 + a->n_batch_dims];
    layout->col_stride = tail == 2 ? values[2 + a->n_batch_dims] : 1;
    return ONT_OK;
}

static void read_dropout(const ont_node *node, ont_attention *a)
{
    double ratio = ont_attr_float(node, "ratio", 0);
    bool all = ratio >= 1;
    a->has_dropout = ratio > 0;
    a->dropout_threshold = all ? UINT32_MAX : (uint32_t)(ratio * 0x1p32);
    a->dropout_scale = all ? 0 : (double)(float)(1 / (1 - ratio)); /* rounded as in Dropout */
    a->rng_stream = ont_random_stream(node);
}

ont_status ont_attention_read(const ont_node *node, ont_attention *a)
{
    size_t n_sizes, n_batch_dims;
    const int64_t *sizes = ont_attr_ints(node, "sizes", &n_sizes),
                  *batch_dims = ont_attr_ints(node, "batch_dims", &n_batch_dims);
    *a = (ont_attention){.n_bh = 1, .n_batch_dims = (int)n_batch_dims};
    if (n_sizes != 4 || n_batch_dims > ONT_ATTENTION_BATCH_DIMS)
        return ont_fail(ONT_EINVAL, "%zu sizes and %zu batch_dims, expected 4 and at most %d", n_sizes,
                        n_batch_dims, ONT_ATTENTION_BATCH_DIMS);
    for (size_t d = 0; d < n_batch_dims; d++) a->n_bh *= a->batch_dims[d] = batch_dims[d];
    a->seqlen_q = a->scores_q = sizes[0];
    a->seqlen_k = a->scores_k = sizes[1];
    const ont_value *q_rows = ont_node_in(node, ONT_ATTENTION_Q_ROWS),
                    *k_rows = ont_node_in(node, ONT_ATTENTION_K_ROWS);
    if (q_rows) a->packed_q = ont_shape_count(&q_rows->shape);
    if (k_rows) a->packed_k = ont_shape_count(&k_rows->shape);
    a->head_dim = sizes[2];
    a->head_dim_v = sizes[3];
    for (int i = 0; i <= ONT_ATTENTION_Y; i++) ONT_TRY(read_layout(node, i, a));
    a->scale = ont_attr_float(node, "scale", 1);
    a->mask_value = ont_attr_float(node, "mask_value", -INFINITY);
    a->mask_polarity = ont_attr_int(node, "mask_polarity", 1) != 0;
    a->causal = ont_attr_int(node, "causal", 0) != 0;
    a->zero_nan = ont_attr_int(node, "zero_nan", 0) != 0;
    a->causal_offset = ont_attr_int(node, "causal_offset", 0);
    read_dropout(node, a);
    return ONT_OK;
}

/* ---- rows that are left out ---- */

bool ont_attention_is_packed(const ont_attention *a, int which)
{
    return which == ONT_ATTENTION_Q || which == ONT_ATTENTION_Y ? a->packed_q > 0
         : which == ONT_ATTENTION_K || which == ONT_ATTENTION_V ? a->packed_k > 0 : false;
}

/* Number of packed rows in front of row number `row`; all but the spare ones for INT64_MAX. */
static int64_t rows_before(const int64_t *rows, int64_t n, int64_t row)
{
    int64_t low = 0, high = n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        bool spare = middle && rows[middle] <= rows[0];
        if (spare || rows[middle] >= row) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Lets row 0 of an operand be the `first` packed one, which is in sequence number `sequence`. */
static void start_at(ont_attention *at, int which, int64_t sequence, int64_t first)
{
    ont_matrix_layout *layout = &at->layout[which];
    layout->offset += first * layout->row_stride - sequence * layout->batch_stride[0];
}

void ont_attention_of_sequence(const ont_call *call, const ont_attention *a, int64_t bh, ont_attention *at)
{
    int64_t sequence = bh / (a->n_bh / a->batch_dims[0]);
    *at = *a;
    if (a->packed_q) {
        const int64_t *rows = call->in[ONT_ATTENTION_Q_ROWS];
        int64_t first = rows_before(rows, a->packed_q, sequence * a->scores_q);
        at->seqlen_q = rows_before(rows, a->packed_q, (sequence + 1) * a->scores_q) - first;
        at->query_rows = rows + first;
        at->first_row = sequence * a->scores_q;
        start_at(at, ONT_ATTENTION_Q, sequence, first);
        start_at(at, ONT_ATTENTION_Y, sequence, first);
    }
    if (a->packed_k) {
        const int64_t *rows = call->in[ONT_ATTENTION_K_ROWS];
        int64_t first = rows_before(rows, a->packed_k, sequence * a->scores_k);
        at->seqlen_k = rows_before(rows, a->packed_k, (sequence + 1) * a->scores_k) - first;
        int64_t span = at->seqlen_k ? rows[first + at->seqlen_k - 1] - rows[first] + 1 : 0;
        at->key_rows = span > at->seqlen_k ? rows + first : NULL;
        at->first_key = at->seqlen_k ? rows[first] - sequence * a->scores_k : 0;
        start_at(at, ONT_ATTENTION_K, sequence, first);
        start_at(at, ONT_ATTENTION_V, sequence, first);
        for (int i = ONT_ATTENTION_BIAS; i <= ONT_ATTENTION_MASK; i++)
            at->layout[i].offset += at->first_key * a->layout[i].col_stride;
    }
}

void ont_attention_zero_spare(const ont_call *call, const ont_attention *a, int operand, void *data)
{
    if (!data || !ont_attention_is_packed(a, operand)) return;
    bool queries = operand == ONT_ATTENTION_Q || operand == ONT_ATTENTION_Y;
    int64_t n = queries ? a->packed_q : a->packed_k;
    int64_t used = rows_before(call->in[queries ? ONT_ATTENTION_Q_ROWS : ONT_ATTENTION_K_ROWS], n, INT64_MAX);
    size_t row = (size_t)a->layout[operand].row_stride * ont_dtype_size(ont_node_in(call->node, 0)->dtype);
    memset((char *)data + (size_t)used * row, 0, (size_t)(n - used) * row);
}

/* ---- gradients and dtypes ---- */

int64_t ont_attention_covered(const ont_attention *a, const int64_t *targets, int64_t target)
{
    int64_t sum = 0;
    for (int i = 0; i < 3; i++) {
        if (targets[i] != target) continue;
        int64_t packed = i == ONT_ATTENTION_Q ? a->packed_q : a->packed_k;
        int64_t n = (packed ? packed : i == ONT_ATTENTION_Q ? a->seqlen_q : a->seqlen_k) *
                    (i == ONT_ATTENTION_V ? a->head_dim_v : a->head_dim);
        for (int d = packed ? 1 : 0; d < a->n_batch_dims; d++)
            n *= a->layout[i].batch_stride[d] ? a->batch_dims[d] : 1;
        sum += n;
    }
    return sum;
}

void ont_attention_zero_uncovered(const ont_call *call, const ont_attention *a, const int64_t *targets)
{
    for (uint32_t i = 0; i < call->node->n_outputs; i++) {
        const ont_value *out = call->node->outputs[i];
        if (!out || targets[3] == (int64_t)i) continue;
        int64_t n = ont_shape_count(&out->shape);
        if (ont_attention_covered(a, targets, i) < n) memset(call->out[i], 0, (size_t)n * ont_dtype_size(out->dtype));
    }
    for (int i = 0; i < 3; i++)
        if (targets[i] >= 0) ont_attention_zero_spare(call, a, i, call->out[targets[i]]);
    if (targets[3] < 0 || (!a->packed_q && !a->packed_k)) return;
    const ont_value *bias = call->node->outputs[targets[3]];
    memset(call->out[targets[3]], 0, (size_t)ont_shape_count(&bias->shape) * ont_dtype_size(bias->dtype));
}

/* Float32 or float64, the same for all float inputs; passes/promote.c casts others to float32. */
const char *ont_attention_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, ONT_ATTENTION_Q)->dtype;
    if (dtype != ONT_FLOAT32 && dtype != ONT_FLOAT64) return "dtype";
    for (uint32_t i = 0; i < node->n_inputs && i < ONT_ATTENTION_Q_ROWS; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (v && v->dtype != dtype && v->dtype != ONT_BOOL) return "dtypes differ";
    }
    return NULL;
}
