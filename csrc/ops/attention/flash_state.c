/*
 * The functions of flash.h: what the kernels of FusedAttention prepare from the node, the bias and masks of a block's
 * rows, and the division of the gradient among threads. It knows no kernel.
 *
 * A work item of the gradient is a batch index. Where several batch indices read the same K and V (grouped queries),
 * one thread takes them in order, and the first one stores the gradients that the others add to. ont_flash_backward()
 * says what happens with fewer batch indices than threads.
 */
#include <stdatomic.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/attention/flash.h"

static size_t round_up_64(size_t bytes) { return (bytes + 63) / 64 * 64; }
static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

ont_status ont_flash_state_init(const ont_node *node, ont_arena *arena, ont_flash_state **state)
{
    ont_flash_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_flash_state){.elem_size = ont_dtype_size(ont_node_in(node, 0)->dtype)};
    ONT_TRY(ont_attention_read(node, &s->a));
    s->loops = ont_simd_attention();
    s->simd = ont_simd();
    s->slots = ont_parallel_threads();
    size_t n = 0;
    const int64_t *targets = ont_attr_ints(node, "targets", &n);
    for (size_t i = 0; i < 4; i++) s->targets[i] = i < n ? targets[i] : -1;
    s->n_parallel = s->n_summed = 1;
    for (int d = 0; d < s->a.n_batch_dims; d++) {
        bool shared = false;
        for (int i = 0; i < 3; i++) shared |= s->targets[i] >= 0 && !s->a.layout[i].batch_stride[d];
        s->parallel_dims[d] = shared ? 1 : s->a.batch_dims[d];
        s->summed_dims[d] = shared ? s->a.batch_dims[d] : 1;
        s->n_parallel *= s->parallel_dims[d];
        s->n_summed *= s->summed_dims[d];
    }
    *state = s;
    return ONT_OK;
}

/* ---- operands ---- */

/* Bytes of one part of s->gather: a row of a block. */
static size_t gather_part(const ont_flash_state *s, size_t size) { return round_up_64((size_t)s->block_k * size); }

void ont_flash_add_gather(ont_flash_state *s)
{
    if (!s->a.packed_k) return;
    s->gather_bytes = gather_part(s, s->elem_size) + gather_part(s, 1) + round_up_64((size_t)s->a.scores_k);
    s->slot_bytes += s->gather_bytes;
}

const ont_flash_state *ont_flash_at(const ont_call *call, const ont_flash_state *s, int64_t bh, int64_t slot,
                                    ont_flash_state *at)
{
    if (!s->a.packed_q && !s->a.packed_k) return s;
    *at = *s;
    at->gather = (char *)call->work + (size_t)(slot + 1) * s->slot_bytes - s->gather_bytes;
    ont_attention_of_sequence(call, &s->a, bh, &at->a);
    return at;
}

char *ont_flash_row_at(const ont_flash_state *s, int operand, const void *base, int64_t bh, int64_t i)
{
    size_t elem_size = operand == ONT_ATTENTION_MASK || operand == ONT_ATTENTION_MASKED_ROWS ? 1 : s->elem_size;
    return base ? (char *)base + (ont_attention_offset(&s->a, operand, bh) + i * s->a.layout[operand].row_stride) *
                                     (int64_t)elem_size
                : NULL;
}

static const void *input(const ont_call *call, uint32_t i)
{
    return i < call->node->n_inputs ? call->in[i] : NULL;
}

/* ---- a block ---- */

/* Element of the scores, (n_bh, scores_q, scores_k), at row r and column 0 of a block. */
static int64_t element(const ont_flash_state *s, const ont_flash_block *b, int64_t r)
{
    const ont_attention *a = &s->a;
    int64_t row = b->bh * a->scores_q + ont_attention_position(a, b->i0 + r);
    return row * a->scores_k + a->first_key + ont_attention_column(a, b->j0);
}

/* Column c of a block, counted from its first one in the scores. */
static int64_t column_of(const ont_flash_state *s, const ont_flash_block *b, int64_t c)
{
    return ont_attention_column(&s->a, b->j0 + c) - ont_attention_column(&s->a, b->j0);
}

/* One call where the block has whole rows of scores. */
void ont_flash_dropout_mask(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk,
                            uint8_t *dropout_mask)
{
    const ont_attention *a = &s->a;
    const ont_dropout_params dropout = {.key = call->seed, .stream = a->rng_stream,
                                        .threshold = a->dropout_threshold, .scale = 1};
    bool whole = blk->n == a->scores_k && !a->query_rows;
    uint8_t *span = a->key_rows ? (uint8_t *)s->gather + gather_part(s, s->elem_size) + gather_part(s, 1) : NULL;
    if (whole) s->simd->dropout(&dropout, NULL, NULL, dropout_mask, element(s, blk, 0), blk->m * blk->n);
    for (int64_t r = 0; !whole && r < blk->m; r++) {
        uint8_t *row = dropout_mask + r * blk->n;
        s->simd->dropout(&dropout, NULL, NULL, span ? span : row, element(s, blk, r),
                         column_of(s, blk, blk->n - 1) + 1);
        for (int64_t c = 0; span && c < blk->n; c++) row[c] = span[column_of(s, blk, c)];
    }
}

/* Lets a row read bias and mask of keys between which there are gaps. */
static void gather_columns(const ont_flash_state *s, const ont_flash_block *blk, ont_attention_row *row)
{
    char *bias = s->gather;
    uint8_t *mask = (uint8_t *)bias + gather_part(s, s->elem_size);
    for (int64_t c = 0; c < blk->n; c++) {
        int64_t column = column_of(s, blk, c);
        if (row->bias && row->bias_stride)
            memcpy(bias + c * (int64_t)s->elem_size, (const char *)row->bias + column * (int64_t)s->elem_size,
                   s->elem_size);
        if (row->mask && row->mask_stride) mask[c] = row->mask[column];
    }
    if (row->bias && row->bias_stride) row->bias = bias;
    if (row->mask && row->mask_stride) row->mask = mask;
}

ont_attention_row ont_flash_row_masks(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk,
                                      int64_t r, const uint8_t *dropout_mask)
{
    const ont_attention *a = &s->a;
    const ont_matrix_layout *bias = &a->layout[ONT_ATTENTION_BIAS], *mask = &a->layout[ONT_ATTENTION_MASK];
    int64_t visible = ont_attention_visible_keys(a, blk->i0 + r) - blk->j0;
    int64_t i = ont_attention_position(a, blk->i0 + r);
    ont_attention_row row = {.n = blk->n, .n_visible = visible < 0 ? 0 : min_i64(visible, blk->n),
                             .bias_stride = bias->col_stride, .mask_stride = mask->col_stride,
                             .mask_polarity = a->mask_polarity, .mask_value = a->mask_value,
                             .dropout_scale = a->dropout_scale};
    const char *b = ont_flash_row_at(s, ONT_ATTENTION_BIAS, input(call, ONT_ATTENTION_BIAS), blk->bh, i);
    const char *m = ont_flash_row_at(s, ONT_ATTENTION_MASK, input(call, ONT_ATTENTION_MASK), blk->bh, i);
    int64_t j0 = ont_attention_column(a, blk->j0);
    row.bias = b ? b + j0 * bias->col_stride * (int64_t)s->elem_size : NULL;
    row.mask = m ? (const uint8_t *)m + j0 * mask->col_stride : NULL;
    row.dropout_mask = a->has_dropout ? dropout_mask + r * blk->n : NULL;
    if (a->key_rows) gather_columns(s, blk, &row);
    return row;
}

void ont_flash_store_dbias(const ont_flash_state *s, const ont_flash_block *blk, int64_t r, const void *gradient,
                           void *dbias)
{
    size_t size = s->elem_size;
    char *to = (char *)dbias + element(s, blk, r) * (int64_t)size;
    if (!gradient && !s->a.key_rows) memset(to, 0, (size_t)blk->n * size);
    else if (gradient && !s->a.key_rows) memcpy(to, gradient, (size_t)blk->n * size);
    else if (gradient) /* all was zeroed before */
        for (int64_t c = 0; c < blk->n; c++)
            memcpy(to + column_of(s, blk, c) * (int64_t)size, (const char *)gradient + c * (int64_t)size, size);
}

bool ont_flash_is_masked_row(const ont_call *call, const ont_flash_state *s, int64_t bh, int64_t i)
{
    const char *masked = ont_flash_row_at(s, ONT_ATTENTION_MASKED_ROWS, input(call, ONT_ATTENTION_MASKED_ROWS), bh,
                                          ont_attention_position(&s->a, i));
    return masked && *masked;
}

/* ---- gradient ---- */

void ont_flash_zero_rows(const ont_flash_state *s, int operand, void *base, int64_t bh, int64_t first, int64_t last,
                         int64_t width)
{
    char *row = ont_flash_row_at(s, operand, base, bh, first);
    int64_t row_bytes = s->a.layout[operand].row_stride * (int64_t)s->elem_size;
    for (int64_t r = first; row && r < last; r++, row += row_bytes) memset(row, 0, (size_t)width * s->elem_size);
}

/* The batch index at an index over parallel_dims and one over summed_dims. */
static int64_t bh_of(const ont_flash_state *s, int64_t index, int64_t sum_index)
{
    int64_t bh = 0, stride = 1;
    for (int d = s->a.n_batch_dims - 1; d >= 0; d--) {
        bh += (index % s->parallel_dims[d] + sum_index % s->summed_dims[d]) * stride; /* one of the two dims is 1 */
        index /= s->parallel_dims[d];
        sum_index /= s->summed_dims[d];
        stride *= s->a.batch_dims[d];
    }
    return bh;
}

bool ont_flash_is_first_writer(const ont_flash_state *s, int operand, int64_t bh)
{
    bool first = true;
    for (int d = s->a.n_batch_dims - 1; d >= 0; d--) {
        first &= s->a.layout[operand].batch_stride[d] || bh % s->a.batch_dims[d] == 0;
        bh /= s->a.batch_dims[d];
    }
    return first;
}

enum { PHASE_ALL, PHASE_KEYS, PHASE_QUERIES };

typedef struct backward {
    const ont_call *call;
    ont_flash_run_item *run;
    void *grads[4];
    int phase;
    int64_t blocks;            /* work items for each parallel index */
    atomic_int_least64_t next; /* work item, over n_parallel * blocks */
} backward;

/*
 * Runs block number `at` at parallel index `index` for each summed index. `next`: the parallel index of the thread's
 * next work item. Blocks of the last queries come first, since these see the most keys under a causal mask.
 */
static void run_summed_items(const backward *b, int64_t index, int64_t at, int64_t next, int64_t slot)
{
    const ont_flash_state *s = b->call->state;
    for (int64_t sum_index = 0; sum_index < s->n_summed; sum_index++) {
        ont_flash_work_item item = {.bh = bh_of(s, index, sum_index), .i1 = s->a.seqlen_q, .j1 = s->a.seqlen_k,
                                    .next_bh = -1};
        if (sum_index + 1 < s->n_summed) item.next_bh = bh_of(s, index, sum_index + 1);
        else if (next < s->n_parallel) item.next_bh = bh_of(s, next, 0);
        if (b->phase != PHASE_KEYS) item.dq = b->grads[0];
        if (b->phase != PHASE_QUERIES) item.dk = b->grads[1], item.dv = b->grads[2], item.dbias = b->grads[3];
        if (b->phase == PHASE_KEYS) item.j0 = at * s->block_k, item.j1 = min_i64(s->a.seqlen_k, item.j0 + s->block_k);
        if (b->phase == PHASE_QUERIES) {
            item.i0 = (b->blocks - 1 - at) * s->block_q;
            item.i1 = min_i64(s->a.seqlen_q, item.i0 + s->block_q);
        }
        ont_flash_state packed;
        const ont_flash_state *own = ont_flash_at(b->call, s, item.bh, slot, &packed);
        item.i1 = min_i64(item.i1, own->a.seqlen_q);
        item.j1 = min_i64(item.j1, own->a.seqlen_k);
        item.i0 = min_i64(item.i0, item.i1);
        item.j0 = min_i64(item.j0, item.j1);
        b->run(b->call, own, &item, slot);
    }
}

static void backward_slots(void *context, int64_t first, int64_t last)
{
    backward *b = context;
    int64_t items = ((const ont_flash_state *)b->call->state)->n_parallel * b->blocks;
    for (int64_t slot = first; slot < last; slot++)
        for (int64_t next, index = atomic_fetch_add(&b->next, 1); index < items; index = next) {
            next = atomic_fetch_add(&b->next, 1);
            run_summed_items(b, index / b->blocks, index % b->blocks, next / b->blocks, slot);
        }
}

static void run_phase(backward *b, int phase, int64_t blocks)
{
    b->phase = phase;
    b->blocks = blocks;
    atomic_store(&b->next, 0);
    ont_parallel(((const ont_flash_state *)b->call->state)->slots, 1, backward_slots, b);
}

ont_status ont_flash_backward(const ont_call *call, ont_flash_run_item *run)
{
    const ont_flash_state *s = call->state;
    backward b = {.call = call, .run = run};
    for (int i = 0; i < 4; i++) b.grads[i] = s->targets[i] < 0 ? NULL : call->out[s->targets[i]];
    ont_attention_zero_uncovered(call, &s->a, s->targets);
    int64_t q_blocks = (s->a.seqlen_q + s->block_q - 1) / s->block_q,
            k_blocks = (s->a.seqlen_k + s->block_k - 1) / s->block_k;
    if (s->n_parallel >= min_i64(s->slots, ont_parallel_threads()) || q_blocks * k_blocks == 1) {
        run_phase(&b, PHASE_ALL, 1);
        return ONT_OK;
    }
    if (b.grads[1] || b.grads[2] || b.grads[3]) run_phase(&b, PHASE_KEYS, k_blocks);
    if (b.grads[0]) run_phase(&b, PHASE_QUERIES, q_blocks);
    return ONT_OK;
}
