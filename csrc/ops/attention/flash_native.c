/*
 * FusedAttention and its gradient in float32 or bfloat16 over the GEMM of attention_gemm.h. Operands are packed
 * once into scratch, padded to whole vectors; tiles that a causal mask hides are skipped. No buffer of (seqlen_q,
 * seqlen_k) exists. Source: Dao, FlashAttention-2, 2023.
 *
 * Forward, a work item is a block of queries. The gradient's is a batch index: it takes one block of keys after the
 * other, sums dK and dV of the block in scratch, and adds to dQ in place. Free threads take the next item; the longest
 * items come first.
 */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/parallel.h"
#include "base/prefetch.h"
#include "ops/attention/flash.h"

/* Queries and keys in a block, at most: two blocks of scores and their operands fit in an L2 cache. */
enum { BLOCK_Q = 128, BLOCK_K = 384 };
enum { KV_RESIDENT_FLOATS = 1 << 20 }; /* K and V of one batch index stay packed up to this size */
/* Least head_dim_v in bfloat16: delta is a sum of y * dy over rounded y, and over fewer elements its error exceeds the
 * rounding of the operands (tests/graph/test_flash_native.py). */
enum { MIN_HEAD_DIM_V = 16 };
/* Ranges of a queue, cache lines prefetched at once, and the size up to which two work items share an L2 cache. */
enum { PREFETCH_RANGES = 8, PREFETCH_LINES = 16, PREFETCH_MAX_BYTES = 1 << 18 };

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t round_up(int64_t n) { return (n + ONT_ATTENTION_LANES - 1) / ONT_ATTENTION_LANES * ONT_ATTENTION_LANES; }

/* Size of blocks: at most about `longest`, all about equal, a multiple of a vector. */
static int64_t block_size(int64_t n, int64_t longest)
{
    int64_t blocks = (n + longest - 1) / longest;
    return min_i64(n, round_up((n + blocks - 1) / blocks));
}

/*
 * Memory that the next work item of a thread reads and writes. Its rows lie too far apart for the hardware prefetcher.
 * Where an item is a single block, some lines of the next one are prefetched before each tile and each row of scores.
 */
typedef struct prefetch_queue {
    struct {
        const char *next_row;
        int64_t row_bytes, rows_left; /* row_bytes: from row to row */
        size_t bytes;                 /* of a row */
    } ranges[PREFETCH_RANGES];
    int n, at; /* `at`: the range whose row is next */
} prefetch_queue;

/*
 * Scratch of one slot. D, DV and N are head_dim, head_dim_v and block_k, rounded up to whole vectors; M is block_q. In
 * bfloat16, packed operands are 32-bit words of two elements (attention_gemm.h): of one row, or, in those called
 * _vnni, of two rows.
 */
typedef struct scratch {
    float *q, *dy;            /* (M, D), in float32 times the scale, and (M, DV) */
    float *q_vnni, *dy_vnni;  /* bfloat16, gradient: (ceil(M / 2), D) and (ceil(M / 2), DV) */
    float *k_packed;          /* K^T (D, N), for each block of keys where kv_resident */
    float *v_packed;          /* forward: V (N, DV), for each block of keys where kv_resident; gradient: V^T (DV, N) */
    float *k_scaled;          /* gradient: K (N, D), in float32 times the scale */
    float *scores;            /* (M, N): scores, then probabilities */
    float *gradient;          /* (M, N): gradient of the probabilities, then of the scores */
    float *p_bf16, *p_vnni;   /* bfloat16: a block (M, N) rounded, in words of one row and of two rows */
    float *row_buffer;        /* bfloat16: rows to be transposed; y and dy, or the bias, of one row in float32 */
    /* Sums: (M, DV), (M, D) or in bfloat16 (seqlen_q, D), (N, D), (N, DV). NULL where the output holds the sums. */
    float *y, *dq, *dk, *dv;
    double *row_max, *row_sum; /* forward: (M); gradient: (seqlen_q) */
    float *delta;             /* gradient: (seqlen_q) */
    uint8_t *dropout_mask;    /* (M, N) */
    int64_t packed_bh;        /* the batch index whose K and V are packed, or -1 */
    int64_t packed_keys;      /* number of its keys that are packed */
    prefetch_queue *prefetch;
} scratch;

/* Hands out parts of a slot; with base NULL, it adds up their sizes. */
typedef struct scratch_space {
    char *base;
    size_t used;
} scratch_space;

static void *reserve(scratch_space *space, int64_t count, size_t size)
{
    size_t at = space->used;
    space->used += ((size_t)count * size + 63) / 64 * 64;
    return space->base ? space->base + at : NULL;
}

/* Whether gradients with rows of `size` elements are added up in the output itself: float32 in whole vectors. */
static bool sums_in_place(const ont_flash_state *s, int64_t size) { return !s->gemm_bf16 && size == round_up(size); }

static scratch scratch_of(const ont_flash_state *s, bool backward, scratch_space *space)
{
    int64_t m = s->block_q, n = round_up(s->block_k), size = round_up(s->a.head_dim),
        head_dim_v = round_up(s->a.head_dim_v);
    int64_t columns = s->kv_resident ? n * ((s->a.seqlen_k + s->block_k - 1) / s->block_k) : n;
    int64_t rows = backward ? s->a.seqlen_q : m;
    scratch w = {.packed_bh = -1};
    w.q = reserve(space, m * size, sizeof(float));
    w.k_packed = reserve(space, s->a.head_dim * columns, sizeof(float));
    w.v_packed = reserve(space, head_dim_v * columns, sizeof(float));
    w.scores = reserve(space, m * n, sizeof(float));
    w.row_max = reserve(space, rows, sizeof(double));
    w.row_sum = reserve(space, rows, sizeof(double));
    if (s->gemm_bf16) {
        int64_t longest = size > head_dim_v ? size : head_dim_v;
        w.p_bf16 = reserve(space, m * n / 2, sizeof(float));
        w.row_buffer = reserve(space, (n > 4 ? n : 4) * longest / 2, sizeof(float));
    }
    if (s->gemm_bf16 && backward) {
        w.p_vnni = reserve(space, (m + 1) / 2 * n, sizeof(float));
        w.q_vnni = reserve(space, (m + 1) / 2 * size, sizeof(float));
        w.dy_vnni = reserve(space, (m + 1) / 2 * head_dim_v, sizeof(float));
    }
    if (s->a.has_dropout) w.dropout_mask = reserve(space, m * n, 1);
    if (!backward) {
        w.y = reserve(space, m * head_dim_v, sizeof(float));
    } else {
        w.dy = reserve(space, m * head_dim_v, sizeof(float));
        w.k_scaled = reserve(space, n * size, sizeof(float));
        w.gradient = reserve(space, m * n, sizeof(float));
        if (!sums_in_place(s, s->a.head_dim)) {
            w.dq = reserve(space, (s->gemm_bf16 ? rows : m) * size, sizeof(float));
            w.dk = reserve(space, n * size, sizeof(float));
        }
        if (!sums_in_place(s, s->a.head_dim_v)) w.dv = reserve(space, n * head_dim_v, sizeof(float));
        w.delta = reserve(space, rows, sizeof(float));
    }
    return w;
}

/* Why bfloat16 is refused. Gradients that are sums over several batch indices would be rounded after each of them. */
static const char *refuse_bf16(const ont_node *node)
{
    ont_attention a;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (v && i != ONT_ATTENTION_STATS && i < ONT_ATTENTION_Q_ROWS && v->dtype != ONT_BFLOAT16 &&
            v->dtype != ONT_BOOL)
            return "dtypes differ";
    }
    if (!ont_simd_attention_gemm_bf16()) return "no AVX512-BF16";
    if (ont_attention_read(node, &a) != ONT_OK || a.head_dim % 2 || a.head_dim_v % 2) return "odd head size";
    if (a.head_dim_v < MIN_HEAD_DIM_V) return "small head size of V";
    for (int d = 0; d < a.n_batch_dims; d++)
        for (int i = 0; i < 3; i++)
            if (a.batch_dims[d] > 1 && !a.layout[i].batch_stride[d]) return "operands shared by batch indices";
    return NULL;
}

const char *ont_flash_native_accept(const ont_node *node)
{
    if (ont_node_in(node, ONT_ATTENTION_Q)->dtype == ONT_BFLOAT16) return refuse_bf16(node);
    if (ont_node_in(node, ONT_ATTENTION_Q)->dtype != ONT_FLOAT32) return "dtype";
    return ont_attention_accept(node);
}

static ont_status prepare(const ont_node *node, ont_arena *arena, bool backward, ont_prepared *out)
{
    ont_flash_state *s;
    scratch_space space = {0};
    ONT_TRY(ont_flash_state_init(node, arena, &s));
    s->gemm_f32 = ont_simd_attention_gemm_f32();
    s->gemm_bf16 = ont_node_in(node, 0)->dtype == ONT_BFLOAT16 ? ont_simd_attention_gemm_bf16() : NULL;
    s->block_q = block_size(s->a.seqlen_q, BLOCK_Q);
    s->block_k = block_size(s->a.seqlen_k, BLOCK_K);
    s->kv_resident = !backward &&
                     s->a.seqlen_k * (round_up(s->a.head_dim) + round_up(s->a.head_dim_v)) <= KV_RESIDENT_FLOATS;
    (void)scratch_of(s, backward, &space);
    s->slot_bytes = space.used;
    ont_flash_add_gather(s);
    out->state = s;
    out->work_bytes = s->slot_bytes * (size_t)s->slots;
    return ONT_OK;
}

ont_status ont_flash_native_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare(node, arena, false, out);
}

ont_status ont_flash_native_prepare_grad(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare(node, arena, true, out);
}

/* ---- operands and GEMMs of a block ---- */

static const void *row_at(const ont_flash_state *s, int operand, const void *base, int64_t bh, int64_t i)
{
    return ont_flash_row_at(s, operand, base, bh, i);
}

/* Queues the matrix of an operand at batch index bh: `rows` rows of `size` elements. `base` may be NULL. */
static void prefetch_add(prefetch_queue *a, const ont_flash_state *s, int operand, const void *base, int64_t bh,
                         int64_t rows, int64_t size)
{
    if (!base || rows < 1) return;
    a->ranges[a->n].next_row = row_at(s, operand, base, bh, 0);
    a->ranges[a->n].row_bytes = s->a.layout[operand].row_stride * (int64_t)s->elem_size;
    a->ranges[a->n].rows_left = rows;
    a->ranges[a->n++].bytes = (size_t)size * s->elem_size;
}

/*
 * Whether batch index `next_bh` exists, has its rows where s says, is a single block, and fits in the L2 cache beside
 * the current one, `bh`.
 */
static bool can_prefetch(const ont_flash_state *s, int64_t bh, int64_t next_bh)
{
    bool packed = s->a.packed_q || s->a.packed_k;
    if (packed && bh * s->a.batch_dims[0] / s->a.n_bh != next_bh * s->a.batch_dims[0] / s->a.n_bh) return false;
    int64_t row = (s->a.head_dim + s->a.head_dim_v) * (int64_t)s->elem_size;
    return next_bh >= 0 && s->a.seqlen_q <= s->block_q && s->a.seqlen_k <= s->block_k &&
           2 * (s->a.seqlen_q + s->a.seqlen_k) * row <= PREFETCH_MAX_BYTES;
}

/* Prefetches about PREFETCH_LINES cache lines of a queue. */
static void prefetch_some(void *context)
{
    prefetch_queue *a = context;
    for (size_t lines = 0; lines < PREFETCH_LINES && a->at < a->n;) {
        lines += ont_prefetch_lines(a->ranges[a->at].next_row, a->ranges[a->at].bytes);
        a->ranges[a->at].next_row += a->ranges[a->at].row_bytes;
        if (!--a->ranges[a->at].rows_left) a->at++;
    }
}

/* Runs a GEMM over a block. `causal`: the operand that is the scores, of which the causal mask hides a part. */
static void run_gemm(const ont_flash_state *s, const ont_flash_block *blk, const scratch *w, ont_causal_operand causal,
                     ont_attention_gemm *p)
{
    p->overlap = w->prefetch->n ? prefetch_some : NULL;
    p->context = w->prefetch;
    p->causal_end = blk->i0 + s->a.causal_offset + 1 - blk->j0;
    p->causal = s->a.causal && p->causal_end < blk->n ? causal : ONT_CAUSAL_NONE;
    (s->gemm_bf16 ? s->gemm_bf16->gemm : s->gemm_f32->gemm)(p);
}

/* Words along k that hold `n` elements. */
static int64_t word_count(const ont_flash_state *s, int64_t n) { return s->gemm_bf16 ? (n + 1) / 2 : n; }

/* rows (m, size) and columns (size, N), both packed */
typedef struct score_operands {
    const float *rows, *columns;
    int64_t size;
    double factor;
} score_operands;

/* scores (M, N) = rows * columns; times the factor in bfloat16 alone, whose rows are not scaled */
static void gemm_scores(const ont_flash_state *s, const ont_flash_block *blk, const scratch *w,
                        const score_operands *x, float *scores)
{
    ont_attention_gemm p = {.m = blk->m, .n = round_up(blk->n), .k = word_count(s, x->size),
                            .lda = word_count(s, round_up(x->size)), .ldb = round_up(s->block_k),
                            .ldc = round_up(s->block_k), .factor = s->gemm_bf16 ? (float)x->factor : 1, .a = x->rows,
                            .b = x->columns, .c = scores};
    run_gemm(s, blk, w, ONT_CAUSAL_C, &p);
}

/* Where a GEMM adds up rows of a gradient: in scratch, or in the output itself. */
typedef struct accumulator {
    float *c;
    int64_t ld;
    bool add; /* to the values there; else they are overwritten */
} accumulator;

/* to (m, size) = or += scores (m, n) * b (n, size) */
static void gemm_rows(const ont_flash_state *s, const ont_flash_block *blk, const scratch *w, const float *scores,
                      const float *b, int64_t size, const accumulator *to)
{
    ont_attention_gemm p = {.m = blk->m, .n = round_up(size), .k = word_count(s, blk->n),
                            .lda = word_count(s, round_up(s->block_k)), .ldb = round_up(size), .ldc = to->ld,
                            .add = to->add, .factor = 1, .a = scores, .b = b, .c = to->c};
    run_gemm(s, blk, w, ONT_CAUSAL_A, &p);
}

/* to (n, size) = or += scores^T (n, m) * b (m, size); the next call adds */
static void gemm_keys(const ont_flash_state *s, const ont_flash_block *blk, const scratch *w, const float *scores,
                      const float *b, int64_t size, accumulator *to)
{
    ont_attention_gemm p = {.m = blk->n, .n = round_up(size), .k = word_count(s, blk->m), .lda = round_up(s->block_k),
                            .ldb = round_up(size), .ldc = to->ld, .trans_a = true, .add = to->add, .factor = 1,
                            .a = scores, .b = b, .c = to->c};
    run_gemm(s, blk, w, ONT_CAUSAL_A_TRANS, &p);
    to->add = true;
}

/* Rows [i, i + n) of an operand's matrix at batch index bh. */
typedef struct operand_rows {
    int operand; /* ONT_ATTENTION_Q, K, V or Y; Y also for dY */
    const void *base;
    int64_t bh, i, n;
} operand_rows;

static operand_rows query_rows(const ont_flash_block *blk, int operand, const void *base)
{
    return (operand_rows){operand, base, blk->bh, blk->i0, blk->m};
}

static operand_rows key_rows(const ont_flash_block *blk, int operand, const void *base)
{
    return (operand_rows){operand, base, blk->bh, blk->j0, blk->n};
}

static int64_t row_size(const ont_flash_state *s, int operand)
{
    return operand == ONT_ATTENTION_Q || operand == ONT_ATTENTION_K ? s->a.head_dim : s->a.head_dim_v;
}

/* Packs rows as A of a GEMM; times the factor in float32. */
static void pack_a(const ont_flash_state *s, operand_rows x, double factor, float *y)
{
    const void *first = row_at(s, x.operand, x.base, x.bh, x.i);
    int64_t stride = s->a.layout[x.operand].row_stride, size = row_size(s, x.operand);
    if (s->gemm_bf16) s->gemm_bf16->copy(first, stride, x.n, size, y, round_up(size) / 2);
    else s->gemm_f32->copy(first, stride, x.n, size, (float)factor, y, round_up(size));
}

/* Packs rows as B of a GEMM that sums over these rows. */
static void pack_b(const ont_flash_state *s, operand_rows x, double factor, float *y)
{
    int64_t size = row_size(s, x.operand);
    if (s->gemm_bf16)
        s->gemm_bf16->copy_vnni(row_at(s, x.operand, x.base, x.bh, x.i), s->a.layout[x.operand].row_stride, x.n, size,
                                y, round_up(size));
    else pack_a(s, x, factor, y);
}

/* Packs rows transposed, as B of a GEMM that sums over the elements of a row. */
static void pack_b_trans(const ont_flash_state *s, const scratch *w, operand_rows x, float *y)
{
    int64_t stride = s->a.layout[x.operand].row_stride, size = row_size(s, x.operand), ld = round_up(s->block_k);
    if (s->gemm_bf16) pack_a(s, x, 1, w->row_buffer);
    s->gemm_f32->transpose(s->gemm_bf16 ? w->row_buffer : row_at(s, x.operand, x.base, x.bh, x.i),
                           s->gemm_bf16 ? round_up(size) / 2 : stride, x.n, word_count(s, size), y, ld);
}

/* Bias and masks of row r of a block, valid until the next call with this w. */
static ont_attention_row row_masks(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk,
                                   int64_t r, const scratch *w)
{
    ont_attention_row row = ont_flash_row_masks(call, s, blk, r, w->dropout_mask);
    if (!s->gemm_bf16 || !row.bias) return row;
    s->simd->bfloat_to_float(row.bias, w->row_buffer, row.bias_stride ? blk->n : 1);
    row.bias = w->row_buffer;
    return row;
}

/* ---- forward ---- */

/* Packs the block's K^T and V unless they are packed already. */
static void pack_kv(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk, scratch *w,
                    const float **k_packed, const float **v_packed)
{
    const ont_attention *a = &s->a;
    int64_t ld = round_up(s->block_k), at = s->kv_resident ? blk->j0 / s->block_k * ld : 0;
    float *k_block = w->k_packed + at * a->head_dim, *v_block = w->v_packed + at * round_up(a->head_dim_v);
    *k_packed = k_block;
    *v_packed = v_block;
    if (w->packed_bh != blk->bh || !s->kv_resident) w->packed_keys = 0;
    w->packed_bh = blk->bh;
    if (s->kv_resident && blk->j0 < w->packed_keys) return;
    pack_b_trans(s, w, key_rows(blk, ONT_ATTENTION_K, call->in[1]), k_block);
    pack_b(s, key_rows(blk, ONT_ATTENTION_V, call->in[2]), 1, v_block);
    w->packed_keys = blk->j0 + blk->n;
}

static void store_rows(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk, const scratch *w)
{
    const ont_attention *a = &s->a;
    float *stats = call->node->n_outputs > 1 ? call->out[1] : NULL;
    for (int64_t r = 0; r < blk->m; r++) {
        int64_t at = (blk->bh * a->scores_q + blk->i0 + r) * 2;
        char *y = ont_flash_row_at(s, ONT_ATTENTION_Y, call->out[0], blk->bh, blk->i0 + r);
        float inverse = (float)(1 / w->row_sum[r]);
        float *row = w->y + r * round_up(a->head_dim_v);
        if (ont_attention_row_is_masked(a, w->row_sum[r]) || ont_flash_is_masked_row(call, s, blk->bh, blk->i0 + r))
            memset(y, 0, (size_t)a->head_dim_v * s->elem_size);
        else
            s->simd->binary[ONT_LOOP_Mul][ONT_FLOAT32](row, 1, &inverse, 0, s->gemm_bf16 ? (void *)row : y,
                                                       a->head_dim_v, NULL);
        if (s->gemm_bf16 && !ont_attention_row_is_masked(a, w->row_sum[r]) &&
            !ont_flash_is_masked_row(call, s, blk->bh, blk->i0 + r))
            s->simd->float_to_bfloat(row, y, a->head_dim_v);
        if (!stats) continue;
        stats[at] = (float)w->row_max[r];
        stats[at + 1] = (float)w->row_sum[r];
    }
}

/* Scores of a block become exp(score - row_max); y so far is rescaled to the new row_max. */
static void softmax_rows(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk, const scratch *w)
{
    int64_t ld = round_up(s->block_k), width = round_up(s->a.head_dim_v);
    if (s->a.has_dropout) ont_flash_dropout_mask(call, s, blk, w->dropout_mask);
    for (int64_t r = 0; r < blk->m; r++) {
        prefetch_some(w->prefetch);
        double rescale;
        ont_attention_row row = row_masks(call, s, blk, r, w);
        s->loops->softmax(w->scores + r * ld, &row, &w->row_max[r], &w->row_sum[r], &rescale);
        if (!blk->j0 || rescale == 1) continue;
        float factor = (float)rescale, *y = w->y + r * width;
        s->simd->binary[ONT_LOOP_Mul][ONT_FLOAT32](y, 1, &factor, 0, y, width, NULL);
    }
    if (s->gemm_bf16) s->gemm_bf16->to_bf16(w->scores, ld, blk->m, blk->n, w->p_bf16, ld / 2);
}

/* y of queries [i0, i0 + m): sum of exp(scores - row_max) V over blocks of keys, divided by row_sum at the end. */
static void forward_rows(const ont_call *call, const ont_flash_state *s, ont_flash_block blk, scratch *w)
{
    const ont_attention *a = &s->a;
    int64_t columns = ont_attention_visible_keys(a, blk.i0 + blk.m - 1);
    for (int64_t r = 0; r < blk.m; r++) {
        w->row_max[r] = -INFINITY;
        w->row_sum[r] = 0;
    }
    if (!columns) memset(w->y, 0, (size_t)(blk.m * round_up(a->head_dim_v)) * sizeof(float));
    pack_a(s, query_rows(&blk, ONT_ATTENTION_Q, call->in[0]), a->scale, w->q);
    for (blk.j0 = 0; blk.j0 < columns; blk.j0 += s->block_k) {
        const float *k_packed, *v_packed;
        blk.n = min_i64(s->block_k, a->seqlen_k - blk.j0);
        pack_kv(call, s, &blk, w, &k_packed, &v_packed);
        gemm_scores(s, &blk, w, &(score_operands){w->q, k_packed, a->head_dim, a->scale}, w->scores);
        softmax_rows(call, s, &blk, w);
        gemm_rows(s, &blk, w, s->gemm_bf16 ? w->p_bf16 : w->scores, v_packed, a->head_dim_v,
                  &(accumulator){w->y, round_up(a->head_dim_v), blk.j0 > 0});
    }
    store_rows(call, s, &blk, w);
}

/* Queues the next work item's operands in the order of their use. */
static void prefetch_forward(const ont_call *call, const ont_flash_state *s, prefetch_queue *prefetch, int64_t bh)
{
    prefetch_add(prefetch, s, ONT_ATTENTION_K, call->in[1], bh, s->a.seqlen_k, s->a.head_dim);
    prefetch_add(prefetch, s, ONT_ATTENTION_Q, call->in[0], bh, s->a.seqlen_q, s->a.head_dim);
    prefetch_add(prefetch, s, ONT_ATTENTION_V, call->in[2], bh, s->a.seqlen_k, s->a.head_dim_v);
    prefetch_add(prefetch, s, ONT_ATTENTION_Y, call->out[0], bh, s->a.seqlen_q, s->a.head_dim_v);
}

typedef struct forward {
    const ont_call *call;
    atomic_int_least64_t next; /* work item */
} forward;

static void forward_slots(void *context, int64_t first, int64_t last)
{
    forward *f = context;
    const ont_flash_state *s = f->call->state;
    int64_t blocks_per_bh = (s->a.seqlen_q + s->block_q - 1) / s->block_q, items = s->a.n_bh * blocks_per_bh;
    for (int64_t slot = first; slot < last; slot++) {
        scratch_space space = {.base = (char *)f->call->work + (size_t)slot * s->slot_bytes};
        scratch w = scratch_of(s, false, &space);
        for (int64_t next, index = atomic_fetch_add(&f->next, 1); index < items; index = next) {
            next = atomic_fetch_add(&f->next, 1);
            prefetch_queue prefetch = {.n = 0};
            w.prefetch = &prefetch;
            ont_flash_block blk = {.bh = index / blocks_per_bh,
                                   .i0 = (blocks_per_bh - 1 - index % blocks_per_bh) * s->block_q};
            ont_flash_state packed;
            const ont_flash_state *at = ont_flash_at(f->call, s, blk.bh, slot, &packed);
            int64_t next_bh = next < items && blocks_per_bh == 1 ? next : -1;
            if (can_prefetch(at, blk.bh, next_bh)) prefetch_forward(f->call, at, &prefetch, next_bh);
            blk.m = min_i64(s->block_q, at->a.seqlen_q - blk.i0);
            if (blk.m > 0) forward_rows(f->call, at, blk, &w);
        }
    }
}

ont_status ont_flash_native_run(const ont_call *call)
{
    forward f = {.call = call};
    const ont_flash_state *s = call->state;
    ont_attention_zero_spare(call, &s->a, ONT_ATTENTION_Y, call->out[0]);
    ont_parallel(s->slots, 1, forward_slots, &f);
    return ONT_OK;
}

/* ---- gradient ---- */

/* row_max and row_sum of the forward; delta: sum of probability * gradient over a row, which equals sum of y * dy. */
static void load_row_stats(const ont_call *call, const ont_flash_state *s, const ont_flash_work_item *item,
                           const scratch *w)
{
    const ont_attention *a = &s->a;
    const float *stats = (const float *)call->in[ONT_ATTENTION_STATS] + item->bh * a->scores_q * 2;
    float *y_f32 = w->row_buffer, *dy_f32 = s->gemm_bf16 ? y_f32 + round_up(a->head_dim_v) : NULL;
    for (int64_t i = item->i0; i < item->i1; i++) {
        const void *y = row_at(s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_Y], item->bh, i);
        const void *dy = row_at(s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY], item->bh, i);
        if (s->gemm_bf16) {
            s->simd->bfloat_to_float(y, y_f32, a->head_dim_v);
            s->simd->bfloat_to_float(dy, dy_f32, a->head_dim_v);
        }
        w->delta[i] = s->gemm_bf16 ? s->loops->dot(y_f32, dy_f32, a->head_dim_v) : s->loops->dot(y, dy, a->head_dim_v);
        w->row_max[i] = (double)stats[2 * i];
        w->row_sum[i] = (double)stats[2 * i + 1];
    }
    if (s->gemm_bf16 && item->dq)
        memset(w->dq + item->i0 * round_up(a->head_dim), 0,
               (size_t)((item->i1 - item->i0) * round_up(a->head_dim)) * sizeof(float));
}

/* w->scores become probabilities; w->gradient, of the probabilities, becomes that of the scores. */
static void grad_rows(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk, const scratch *w,
                      const ont_flash_work_item *item)
{
    int64_t ld = round_up(s->block_k);
    size_t bytes = (size_t)blk->n * sizeof(float);
    if (s->a.has_dropout) ont_flash_dropout_mask(call, s, blk, w->dropout_mask);
    for (int64_t r = 0; r < blk->m; r++) {
        prefetch_some(w->prefetch);
        int64_t i = blk->i0 + r;
        float *scores = w->scores + r * ld, *gradient = w->gradient + r * ld;
        ont_attention_row row = row_masks(call, s, blk, r, w);
        if (ont_attention_row_is_masked(&s->a, w->row_sum[i]) || ont_flash_is_masked_row(call, s, blk->bh, i)) {
            memset(scores, 0, bytes);
            memset(gradient, 0, bytes);
        } else {
            s->loops->grad(scores, gradient, &row, w->row_max[i], w->row_sum[i], w->delta[i]);
        }
        if (!item->dbias) continue;
        if (s->gemm_bf16) s->simd->float_to_bfloat(gradient, w->row_buffer, blk->n);
        ont_flash_store_dbias(s, blk, r, s->gemm_bf16 ? w->row_buffer : gradient, item->dbias);
    }
}

static accumulator accumulator_of(const ont_flash_state *s, float *sums, int operand, void *base, int64_t bh, int64_t i,
                                  int64_t size)
{
    if (!sums_in_place(s, size)) return (accumulator){sums, round_up(size), false};
    return (accumulator){(float *)(void *)ont_flash_row_at(s, operand, base, bh, i), s->a.layout[operand].row_stride,
                         !ont_flash_is_first_writer(s, operand, bh)};
}

/* Stores sums to rows of a gradient; in bfloat16, times the factor. */
static void store_sums(const ont_flash_state *s, float *sums, operand_rows to, double factor, bool first)
{
    int64_t size = row_size(s, to.operand), ld = round_up(size);
    float f = (float)factor;
    if (!s->gemm_bf16)
        s->gemm_f32->store(sums, ld, to.n, size, !first,
                           (float *)(void *)ont_flash_row_at(s, to.operand, to.base, to.bh, to.i),
                           s->a.layout[to.operand].row_stride);
    for (int64_t r = 0; s->gemm_bf16 && r < to.n; r++, sums += ld) {
        if (f != 1) s->simd->binary[ONT_LOOP_Mul][ONT_FLOAT32](sums, 1, &f, 0, sums, size, NULL);
        s->simd->float_to_bfloat(sums, ont_flash_row_at(s, to.operand, to.base, to.bh, to.i + r), size);
    }
}

static void gemm_dq(const ont_flash_state *s, const ont_flash_block *blk, const scratch *w, const float *rows,
                    const ont_flash_work_item *item)
{
    int64_t size = s->a.head_dim, ld = round_up(size);
    if (s->gemm_bf16) {
        gemm_rows(s, blk, w, rows, w->k_scaled, size, &(accumulator){w->dq + blk->i0 * ld, ld, true});
        return;
    }
    if (sums_in_place(s, size)) {
        float *dq = (float *)(void *)ont_flash_row_at(s, ONT_ATTENTION_Q, item->dq, blk->bh, blk->i0);
        gemm_rows(s, blk, w, rows, w->k_scaled, size,
                  &(accumulator){dq, s->a.layout[ONT_ATTENTION_Q].row_stride, true});
        return;
    }
    gemm_rows(s, blk, w, rows, w->k_scaled, size, &(accumulator){w->dq, ld, false});
    store_sums(s, w->dq, query_rows(blk, ONT_ATTENTION_Q, item->dq), 1, false);
}

/* dV += P^T dY, dK += dS^T Q, dQ += dS K, with P and dS rounded in bfloat16. */
static void gemm_grads(const ont_flash_state *s, const ont_flash_block *blk, const scratch *w,
                       const ont_flash_work_item *item, accumulator *dk, accumulator *dv)
{
    const ont_attention *a = &s->a;
    int64_t ld = round_up(s->block_k);
    const float *rows = w->gradient, *columns = w->scores;
    if (s->gemm_bf16) s->gemm_bf16->to_bf16_vnni(w->scores, ld, blk->m, blk->n, w->p_vnni, ld), columns = w->p_vnni;
    if (item->dv) gemm_keys(s, blk, w, columns, s->gemm_bf16 ? w->dy_vnni : w->dy, a->head_dim_v, dv);
    if (s->gemm_bf16) s->gemm_bf16->to_bf16_vnni(w->gradient, ld, blk->m, blk->n, w->p_vnni, ld);
    if (item->dk) gemm_keys(s, blk, w, s->gemm_bf16 ? w->p_vnni : w->gradient, s->gemm_bf16 ? w->q_vnni : w->q,
                            a->head_dim, dk);
    if (!item->dq) return;
    if (s->gemm_bf16) s->gemm_bf16->to_bf16(w->gradient, ld, blk->m, blk->n, w->p_bf16, ld / 2), rows = w->p_bf16;
    gemm_dq(s, blk, w, rows, item);
}

static void block_grad(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk, const scratch *w,
                       const ont_flash_work_item *item, accumulator *dk, accumulator *dv)
{
    const ont_attention *a = &s->a;
    operand_rows q = query_rows(blk, ONT_ATTENTION_Q, call->in[0]),
                 dy = query_rows(blk, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY]);
    pack_a(s, q, a->scale, w->q);
    pack_a(s, dy, 1, w->dy);
    if (s->gemm_bf16 && item->dk) pack_b(s, q, 1, w->q_vnni);
    if (s->gemm_bf16 && item->dv) pack_b(s, dy, 1, w->dy_vnni);
    gemm_scores(s, blk, w, &(score_operands){w->q, w->k_packed, a->head_dim, a->scale}, w->scores);
    gemm_scores(s, blk, w, &(score_operands){w->dy, w->v_packed, a->head_dim_v, 1}, w->gradient);
    grad_rows(call, s, blk, w, item);
    gemm_grads(s, blk, w, item, dk, dv);
}

/* Packs the block's K^T for the scores, V^T for the gradient of the probabilities, and K for dQ. */
static void pack_kv_for_grad(const ont_call *call, const ont_flash_state *s, const ont_flash_block *blk,
                             const scratch *w, const ont_flash_work_item *item)
{
    operand_rows k = key_rows(blk, ONT_ATTENTION_K, call->in[1]), v = key_rows(blk, ONT_ATTENTION_V, call->in[2]);
    pack_b_trans(s, w, k, w->k_packed);
    pack_b_trans(s, w, v, w->v_packed);
    if (item->dq) pack_b(s, k, s->a.scale, w->k_scaled);
}

/* Stores dK or dV of a block of keys: zeros where no query saw them. */
static void store_dk_dv(const ont_flash_state *s, const ont_flash_block *blk, const accumulator *t, int operand,
                        void *base, int64_t size)
{
    if (!base) return;
    for (int64_t r = 0; r < blk->n && !t->add; r++) memset(t->c + r * t->ld, 0, (size_t)size * sizeof(float));
    if (sums_in_place(s, size)) return;
    store_sums(s, t->c, key_rows(blk, operand, base), operand == ONT_ATTENTION_K ? s->a.scale : 1,
               ont_flash_is_first_writer(s, operand, blk->bh));
}

static void prefetch_backward(const ont_call *call, const ont_flash_state *s, const ont_flash_work_item *item,
                              prefetch_queue *prefetch)
{
    const ont_attention *a = &s->a;
    prefetch_add(prefetch, s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_Y], item->next_bh, a->seqlen_q, a->head_dim_v);
    prefetch_add(prefetch, s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY], item->next_bh, a->seqlen_q, a->head_dim_v);
    prefetch_add(prefetch, s, ONT_ATTENTION_K, call->in[1], item->next_bh, a->seqlen_k, a->head_dim);
    prefetch_add(prefetch, s, ONT_ATTENTION_V, call->in[2], item->next_bh, a->seqlen_k, a->head_dim_v);
    prefetch_add(prefetch, s, ONT_ATTENTION_Q, call->in[0], item->next_bh, a->seqlen_q, a->head_dim);
    prefetch_add(prefetch, s, ONT_ATTENTION_V, item->dv, item->next_bh, a->seqlen_k, a->head_dim_v);
    prefetch_add(prefetch, s, ONT_ATTENTION_K, item->dk, item->next_bh, a->seqlen_k, a->head_dim);
    prefetch_add(prefetch, s, ONT_ATTENTION_Q, item->dq, item->next_bh, a->seqlen_q, a->head_dim);
}

static void run_work_item(const ont_call *call, const ont_flash_state *s, const ont_flash_work_item *item, int64_t slot)
{
    const ont_attention *a = &s->a;
    scratch_space space = {.base = (char *)call->work + (size_t)slot * s->slot_bytes};
    scratch buffers = scratch_of(s, true, &space), *w = &buffers;
    prefetch_queue prefetch = {.n = 0};
    w->prefetch = &prefetch;
    if (can_prefetch(s, item->bh, item->next_bh)) prefetch_backward(call, s, item, &prefetch);
    if (!s->gemm_bf16 && ont_flash_is_first_writer(s, ONT_ATTENTION_Q, item->bh))
        ont_flash_zero_rows(s, ONT_ATTENTION_Q, item->dq, item->bh, item->i0, item->i1, a->head_dim);
    ont_flash_block blk = {.bh = item->bh};
    load_row_stats(call, s, item, w);
    for (blk.j0 = item->j0; blk.j0 < item->j1; blk.j0 += s->block_k) {
        blk.n = min_i64(s->block_k, item->j1 - blk.j0);
        pack_kv_for_grad(call, s, &blk, w, item);
        accumulator dk = accumulator_of(s, w->dk, ONT_ATTENTION_K, item->dk, blk.bh, blk.j0, a->head_dim),
               dv = accumulator_of(s, w->dv, ONT_ATTENTION_V, item->dv, blk.bh, blk.j0, a->head_dim_v);
        for (blk.i0 = item->i0; blk.i0 < item->i1; blk.i0 += s->block_q) {
            blk.m = min_i64(s->block_q, item->i1 - blk.i0);
            if (ont_attention_visible_keys(a, blk.i0 + blk.m - 1) > blk.j0)
                block_grad(call, s, &blk, w, item, &dk, &dv);
            else
                for (int64_t r = 0; item->dbias && r < blk.m; r++)
                    ont_flash_store_dbias(s, &blk, r, NULL, item->dbias);
        }
        store_dk_dv(s, &blk, &dk, ONT_ATTENTION_K, item->dk, a->head_dim);
        store_dk_dv(s, &blk, &dv, ONT_ATTENTION_V, item->dv, a->head_dim_v);
    }
    if (s->gemm_bf16 && item->dq)
        store_sums(s, w->dq + item->i0 * round_up(a->head_dim),
                   (operand_rows){ONT_ATTENTION_Q, item->dq, item->bh, item->i0, item->i1 - item->i0}, a->scale, true);
}

ont_status ont_flash_native_run_grad(const ont_call *call)
{
    return ont_flash_backward(call, run_work_item);
}
