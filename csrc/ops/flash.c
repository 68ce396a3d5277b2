/*
 * FusedAttention and its gradient in blocks: products of rows of Q with columns of K go to a GEMM provider, the loops
 * of simd/attention.h run between them, and no buffer of rows times columns exists. Source: Dao, FlashAttention-2,
 * 2023.
 *
 * One matrix of the batch (a lead) is one unit of work. A K that several leads share (grouped queries) has one
 * gradient: those leads are run by one thread, one after the other, and the first of them zeroes it. With fewer units
 * than threads the gradient goes over blocks instead, once for K and V by columns, once for Q by rows.
 */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/parallel.h"
#include "device/gemm.h"
#include "ops/flash.h"

enum { BLOCK_ROWS = 256, BLOCK_COLUMNS = 256 };

typedef ont_flash flash_state;

/* Scratch of one thread. */
typedef struct scratch {
    char *scores, *gradient;        /* a block each */
    double *most, *sum, *delta;     /* per row of a block */
    uint8_t *kept;
} scratch;

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static scratch scratch_of(const flash_state *s, char *work, int64_t slot)
{
    size_t block = rounded((size_t)(s->row_block * s->column_block) * s->z),
           line = rounded((size_t)s->row_block * sizeof(double));
    char *at = work + (size_t)slot * s->slot_bytes;
    return (scratch){.scores = at, .gradient = at + block, .most = (double *)(void *)(at + 2 * block),
                     .sum = (double *)(void *)(at + 2 * block + line),
                     .delta = (double *)(void *)(at + 2 * block + 2 * line),
                     .kept = (uint8_t *)at + 2 * block + 3 * line};
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

ont_status ont_flash_begin(const ont_node *node, ont_arena *arena, ont_flash **state)
{
    ont_flash *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ont_flash){.dtype = ont_node_in(node, 0)->dtype};
    ONT_TRY(ont_attention_read(node, &s->a));
    s->z = ont_dtype_size(s->dtype);
    s->loops = ont_simd_attention(s->dtype == ONT_BFLOAT16 ? ONT_FLOAT32 : s->dtype); /* scores are float32 */
    s->simd = ont_simd();
    s->slots = ont_parallel_threads();
    size_t n = 0;
    const int64_t *targets = ont_attr_ints(node, "targets", &n);
    for (size_t i = 0; i < 4; i++) s->targets[i] = i < n ? targets[i] : -1;
    s->n_apart = s->n_shared = 1;
    for (int d = 0; d < s->a.n_leads; d++) {
        bool shared = false;
        for (int i = 0; i < 3; i++) shared |= s->targets[i] >= 0 && !s->a.view[i].lead[d];
        s->apart[d] = shared ? 1 : s->a.leads[d];
        s->shared[d] = shared ? s->a.leads[d] : 1;
        s->n_apart *= s->apart[d];
        s->n_shared *= s->shared[d];
    }
    *state = s;
    return ONT_OK;
}

ont_status ont_flash_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    flash_state *s;
    ONT_TRY(ont_flash_begin(node, arena, &s));
    s->row_block = least(s->a.rows, BLOCK_ROWS);
    s->column_block = least(s->a.columns, BLOCK_COLUMNS);
    ont_gemm typical = {.dtype = s->dtype, .trans_b = true, .m = s->row_block, .n = s->column_block, .k = s->a.size,
                        .lda = s->a.size, .ldb = s->a.size, .ldc = s->column_block, .alpha = s->a.scale};
    s->gemm = ont_gemm_choose(&typical, 0, NULL);
    size_t block = rounded((size_t)(s->row_block * s->column_block) * s->z),
           line = rounded((size_t)s->row_block * sizeof(double));
    s->slot_bytes = 2 * block + 3 * line + rounded((size_t)(s->row_block * s->column_block));
    out->state = s;
    out->work_bytes = s->slot_bytes * (size_t)s->slots;
    return ONT_OK;
}

/* ---- operands ---- */

char *ont_flash_row_at(const flash_state *s, int view, const void *base, int64_t l, int64_t i)
{
    size_t z = view == ONT_ATTENTION_KEEP || view == ONT_ATTENTION_EMPTY ? 1 : s->z;
    return base ? (char *)base + (ont_attention_at(&s->a, view, l) + i * s->a.view[view].row) * (int64_t)z : NULL;
}

static const void *input(const ont_call *call, uint32_t i)
{
    return i < call->node->n_inputs ? call->in[i] : NULL;
}

/* C = alpha op(A) op(B) + beta C; a leading dim that no row uses may be anything, BLAS wants it long enough. */
static void product(const flash_state *s, bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha,
                    const void *a, int64_t lda, const void *b, int64_t ldb, double beta, void *c, int64_t ldc)
{
    int64_t wa = ta ? m : k, wb = tb ? k : n;
    ont_gemm g = {.dtype = s->dtype, .trans_a = ta, .trans_b = tb, .m = m, .n = n, .k = k, .lda = lda < wa ? wa : lda,
                  .ldb = ldb < wb ? wb : ldb, .ldc = ldc < n ? n : ldc, .alpha = alpha, .beta = beta};
    s->gemm->run(&g, a, b, c);
}

static void scale_row(const flash_state *s, char *row, int64_t n, double factor)
{
    float single = (float)factor;
    const void *f = s->dtype == ONT_FLOAT32 ? (const void *)&single : &factor;
    s->simd->binary[ONT_LOOP_Mul][s->dtype](row, 1, f, 0, row, n, NULL);
}

static double number(const flash_state *s, const void *data, int64_t i)
{
    return s->dtype == ONT_FLOAT32 ? (double)((const float *)data)[i] : ((const double *)data)[i];
}

/* ---- a block ---- */

typedef ont_flash_block block;

/* Whole rows in one go where the block has them. */
void ont_flash_choose_kept(const ont_call *call, const flash_state *s, const block *k, uint8_t *kept)
{
    const ont_attention *a = &s->a;
    int64_t first = (k->l * a->rows + k->i0) * a->columns + k->j0;
    if (k->n == a->columns)
        s->simd->dropout(NULL, NULL, kept, first, k->m * k->n, call->seed, a->stream, a->threshold, 1);
    for (int64_t r = 0; k->n != a->columns && r < k->m; r++)
        s->simd->dropout(NULL, NULL, kept + r * k->n, first + r * a->columns, k->n, call->seed, a->stream, a->threshold,
                         1);
}

ont_attention_row ont_flash_row_of(const ont_call *call, const flash_state *s, const block *k, int64_t r,
                                   const uint8_t *kept)
{
    const ont_attention *a = &s->a;
    const ont_matrix_view *bias = &a->view[ONT_ATTENTION_BIAS], *keep = &a->view[ONT_ATTENTION_KEEP];
    int64_t i = k->i0 + r, visible = ont_attention_visible(a, i) - k->j0;
    ont_attention_row row = {.n = k->n, .visible = visible < 0 ? 0 : least(visible, k->n), .bias_step = bias->column,
                             .keep_step = keep->column, .keep_if = a->keep_if, .fill = a->fill,
                             .keep_scale = a->keep_scale};
    const char *b = ont_flash_row_at(s, ONT_ATTENTION_BIAS, input(call, ONT_ATTENTION_BIAS), k->l, i);
    const char *m = ont_flash_row_at(s, ONT_ATTENTION_KEEP, input(call, ONT_ATTENTION_KEEP), k->l, i);
    row.bias = b ? b + k->j0 * bias->column * (int64_t)s->z : NULL;
    row.keep = m ? (const uint8_t *)m + k->j0 * keep->column : NULL;
    row.kept = a->drops ? kept + r * k->n : NULL;
    return row;
}

static void scores_of(const ont_call *call, const flash_state *s, const block *k, char *scores)
{
    const ont_attention *a = &s->a;
    product(s, false, true, k->m, k->n, a->size, a->scale,
            ont_flash_row_at(s, ONT_ATTENTION_Q, call->in[0], k->l, k->i0), a->view[ONT_ATTENTION_Q].row,
            ont_flash_row_at(s, ONT_ATTENTION_K, call->in[1], k->l, k->j0), a->view[ONT_ATTENTION_K].row, 0, scores,
            k->n);
}

bool ont_flash_is_empty(const ont_call *call, const flash_state *s, int64_t l, int64_t i)
{
    const char *empty = ont_flash_row_at(s, ONT_ATTENTION_EMPTY, input(call, ONT_ATTENTION_EMPTY), l, i);
    return empty && *empty;
}

/* ---- forward ---- */

static void finish_rows(const ont_call *call, const flash_state *s, const block *k, const scratch *w)
{
    const ont_attention *a = &s->a;
    void *stats = call->node->n_outputs > 1 ? call->out[1] : NULL;
    char *y = ont_flash_row_at(s, ONT_ATTENTION_Y, call->out[0], k->l, k->i0);
    int64_t step = a->view[ONT_ATTENTION_Y].row * (int64_t)s->z;
    for (int64_t r = 0; r < k->m; r++, y += step) {
        int64_t at = (k->l * a->rows + k->i0 + r) * 2;
        if (ont_attention_is_void(a, w->sum[r]) || ont_flash_is_empty(call, s, k->l, k->i0 + r))
            memset(y, 0, (size_t)a->v_size * s->z);
        else
            scale_row(s, y, a->v_size, 1 / w->sum[r]);
        if (stats && s->dtype == ONT_FLOAT32) {
            ((float *)stats)[at] = (float)w->most[r];
            ((float *)stats)[at + 1] = (float)w->sum[r];
        } else if (stats) {
            ((double *)stats)[at] = w->most[r];
            ((double *)stats)[at + 1] = w->sum[r];
        }
    }
}

/* The result of rows [i0, i0 + m): first exp(scores - largest so far) V, in the end divided by the sum. */
static void forward_rows(const ont_call *call, const flash_state *s, block k, const scratch *w)
{
    const ont_attention *a = &s->a;
    int64_t columns = ont_attention_visible(a, k.i0 + k.m - 1), ldy = a->view[ONT_ATTENTION_Y].row;
    char *y = ont_flash_row_at(s, ONT_ATTENTION_Y, call->out[0], k.l, k.i0);
    for (int64_t r = 0; r < k.m; r++) {
        w->most[r] = -INFINITY;
        w->sum[r] = 0;
        if (!columns) memset(y + r * ldy * (int64_t)s->z, 0, (size_t)a->v_size * s->z);
    }
    for (k.j0 = 0; k.j0 < columns; k.j0 += s->column_block) {
        k.n = least(s->column_block, a->columns - k.j0);
        scores_of(call, s, &k, w->scores);
        if (a->drops) ont_flash_choose_kept(call, s, &k, w->kept);
        for (int64_t r = 0; r < k.m; r++) {
            double shrink;
            ont_attention_row row = ont_flash_row_of(call, s, &k, r, w->kept);
            s->loops->softmax(w->scores + r * k.n * (int64_t)s->z, &row, &w->most[r], &w->sum[r], &shrink);
            if (k.j0 && shrink != 1) scale_row(s, y + r * ldy * (int64_t)s->z, a->v_size, shrink);
        }
        product(s, false, false, k.m, a->v_size, k.n, 1, w->scores, k.n,
                ont_flash_row_at(s, ONT_ATTENTION_V, call->in[2], k.l, k.j0), a->view[ONT_ATTENTION_V].row,
                k.j0 ? 1 : 0, y, ldy);
    }
    finish_rows(call, s, &k, w);
}

static void forward_slots(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const flash_state *s = call->state;
    int64_t per_lead = (s->a.rows + s->row_block - 1) / s->row_block;
    for (int64_t slot = first; slot < last; slot++) {
        scratch w = scratch_of(s, call->work, slot);
        for (int64_t u = slot; u < s->a.count * per_lead; u += s->slots) {
            block k = {.l = u / per_lead, .i0 = u % per_lead * s->row_block};
            k.m = least(s->row_block, s->a.rows - k.i0);
            forward_rows(call, s, k, &w);
        }
    }
}

ont_status ont_flash_run(const ont_call *call)
{
    ont_parallel(((const flash_state *)call->state)->slots, 1, forward_slots, (void *)call);
    return ONT_OK;
}

/* ---- gradient ---- */

void ont_flash_zero_rows(const flash_state *s, int view, void *base, int64_t l, int64_t first, int64_t last,
                         int64_t width)
{
    char *row = ont_flash_row_at(s, view, base, l, first);
    int64_t step = s->a.view[view].row * (int64_t)s->z;
    for (int64_t r = first; row && r < last; r++, row += step) memset(row, 0, (size_t)width * s->z);
}

/* delta: sum over the row of probability times its gradient, which is the result's row times its gradient. */
static void begin_rows(const ont_call *call, const flash_state *s, const block *k, const scratch *w)
{
    const ont_attention *a = &s->a;
    const void *stats = call->in[ONT_ATTENTION_STATS];
    const char *y = ont_flash_row_at(s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_Y], k->l, k->i0);
    const char *dy = ont_flash_row_at(s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY], k->l, k->i0);
    int64_t step = a->view[ONT_ATTENTION_Y].row * (int64_t)s->z;
    for (int64_t r = 0; r < k->m; r++) {
        int64_t at = (k->l * a->rows + k->i0 + r) * 2;
        w->delta[r] = s->loops->dot(y + r * step, dy + r * step, a->v_size);
        w->most[r] = number(s, stats, at);
        w->sum[r] = number(s, stats, at + 1);
    }
}

static void block_grad(const ont_call *call, const flash_state *s, const block *k, const scratch *w,
                       const ont_flash_piece *p)
{
    const ont_attention *a = &s->a;
    const int64_t ldy = a->view[ONT_ATTENTION_Y].row;
    const char *dy = ont_flash_row_at(s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY], k->l, k->i0);
    scores_of(call, s, k, w->scores);
    product(s, false, true, k->m, k->n, a->v_size, 1, dy, ldy,
            ont_flash_row_at(s, ONT_ATTENTION_V, call->in[2], k->l, k->j0), a->view[ONT_ATTENTION_V].row, 0,
            w->gradient, k->n);
    if (a->drops) ont_flash_choose_kept(call, s, k, w->kept);
    for (int64_t r = 0; r < k->m; r++) {
        size_t bytes = (size_t)k->n * s->z;
        char *scores = w->scores + (size_t)r * bytes, *gradient = w->gradient + (size_t)r * bytes;
        ont_attention_row row = ont_flash_row_of(call, s, k, r, w->kept);
        if (ont_attention_is_void(a, w->sum[r]) || ont_flash_is_empty(call, s, k->l, k->i0 + r)) {
            memset(scores, 0, bytes);
            memset(gradient, 0, bytes);
        } else {
            s->loops->grad(scores, gradient, &row, w->most[r], w->sum[r], w->delta[r]);
        }
        if (p->dbias)
            memcpy((char *)p->dbias + ((k->l * a->rows + k->i0 + r) * a->columns + k->j0) * (int64_t)s->z, gradient,
                   bytes);
    }
    int64_t ldq = a->view[ONT_ATTENTION_Q].row, ldk = a->view[ONT_ATTENTION_K].row, ldv = a->view[ONT_ATTENTION_V].row;
    if (p->dv)
        product(s, true, false, k->n, a->v_size, k->m, 1, w->scores, k->n, dy, ldy, 1,
                ont_flash_row_at(s, ONT_ATTENTION_V, p->dv, k->l, k->j0), ldv);
    if (p->dq)
        product(s, false, false, k->m, a->size, k->n, a->scale, w->gradient, k->n,
                ont_flash_row_at(s, ONT_ATTENTION_K, call->in[1], k->l, k->j0), ldk, 1,
                ont_flash_row_at(s, ONT_ATTENTION_Q, p->dq, k->l, k->i0), ldq);
    if (p->dk)
        product(s, true, false, k->n, a->size, k->m, a->scale, w->gradient, k->n,
                ont_flash_row_at(s, ONT_ATTENTION_Q, call->in[0], k->l, k->i0), ldq, 1,
                ont_flash_row_at(s, ONT_ATTENTION_K, p->dk, k->l, k->j0), ldk);
}

static void run_piece(const ont_call *call, const flash_state *s, const ont_flash_piece *p, int64_t slot)
{
    const ont_attention *a = &s->a;
    scratch w = scratch_of(s, call->work, slot);
    if (ont_flash_is_first(s, ONT_ATTENTION_Q, p->l))
        ont_flash_zero_rows(s, ONT_ATTENTION_Q, p->dq, p->l, p->i0, p->i1, a->size);
    if (ont_flash_is_first(s, ONT_ATTENTION_K, p->l))
        ont_flash_zero_rows(s, ONT_ATTENTION_K, p->dk, p->l, p->j0, p->j1, a->size);
    if (ont_flash_is_first(s, ONT_ATTENTION_V, p->l))
        ont_flash_zero_rows(s, ONT_ATTENTION_V, p->dv, p->l, p->j0, p->j1, a->v_size);
    block k = {.l = p->l};
    for (k.i0 = p->i0; k.i0 < p->i1; k.i0 += s->row_block) {
        k.m = least(s->row_block, p->i1 - k.i0);
        int64_t columns = least(ont_attention_visible(a, k.i0 + k.m - 1), p->j1);
        begin_rows(call, s, &k, &w);
        for (int64_t r = 0; p->dbias && columns < p->j1 && r < k.m; r++) /* what is not visited below */
            memset((char *)p->dbias + ((k.l * a->rows + k.i0 + r) * a->columns + p->j0) * (int64_t)s->z, 0,
                   (size_t)(p->j1 - p->j0) * s->z);
        for (k.j0 = p->j0; k.j0 < columns; k.j0 += s->column_block) {
            k.n = least(s->column_block, p->j1 - k.j0);
            block_grad(call, s, &k, &w, p);
        }
    }
}

/* Lead number u of those apart, entry v of those that share its gradients. */
static int64_t lead_of(const flash_state *s, int64_t u, int64_t v)
{
    int64_t l = 0, step = 1;
    for (int d = s->a.n_leads - 1; d >= 0; d--) {
        l += (u % s->apart[d] + v % s->shared[d]) * step; /* one of the two is of size 1 */
        u /= s->apart[d];
        v /= s->shared[d];
        step *= s->a.leads[d];
    }
    return l;
}

bool ont_flash_is_first(const flash_state *s, int view, int64_t l)
{
    bool first = true;
    for (int d = s->a.n_leads - 1; d >= 0; d--) {
        first &= s->a.view[view].lead[d] || l % s->a.leads[d] == 0;
        l /= s->a.leads[d];
    }
    return first;
}

enum { PHASE_ALL, PHASE_COLUMNS, PHASE_ROWS };

typedef struct backward {
    const ont_call *call;
    ont_flash_run_piece *run;
    void *grads[4];
    int phase;
    int64_t blocks;            /* pieces per lead */
    atomic_int_least64_t next; /* unit */
} backward;

/* Piece `at` of lead u of those apart, and of each that shares its gradients; rows with most columns come first. */
static void run_unit(const backward *b, int64_t u, int64_t at, int64_t next, int64_t slot)
{
    const flash_state *s = b->call->state;
    for (int64_t v = 0; v < s->n_shared; v++) {
        ont_flash_piece p = {.l = lead_of(s, u, v), .i1 = s->a.rows, .j1 = s->a.columns, .next = -1};
        if (v + 1 < s->n_shared) p.next = lead_of(s, u, v + 1);
        else if (next < s->n_apart) p.next = lead_of(s, next, 0);
        if (b->phase != PHASE_COLUMNS) p.dq = b->grads[0];
        if (b->phase != PHASE_ROWS) p.dk = b->grads[1], p.dv = b->grads[2], p.dbias = b->grads[3];
        if (b->phase == PHASE_COLUMNS) p.j0 = at * s->column_block, p.j1 = least(s->a.columns, p.j0 + s->column_block);
        if (b->phase == PHASE_ROWS) {
            p.i0 = (b->blocks - 1 - at) * s->row_block;
            p.i1 = least(s->a.rows, p.i0 + s->row_block);
        }
        b->run(b->call, s, &p, slot);
    }
}

static void backward_slots(void *context, int64_t first, int64_t last)
{
    backward *b = context;
    int64_t units = ((const flash_state *)b->call->state)->n_apart * b->blocks;
    for (int64_t slot = first; slot < last; slot++)
        for (int64_t next, u = atomic_fetch_add(&b->next, 1); u < units; u = next) {
            next = atomic_fetch_add(&b->next, 1);
            run_unit(b, u / b->blocks, u % b->blocks, next / b->blocks, slot);
        }
}

static void run_phase(backward *b, int phase, int64_t blocks)
{
    b->phase = phase;
    b->blocks = blocks;
    atomic_store(&b->next, 0);
    ont_parallel(((const flash_state *)b->call->state)->slots, 1, backward_slots, b);
}

ont_status ont_flash_backward(const ont_call *call, ont_flash_run_piece *run)
{
    const flash_state *s = call->state;
    backward b = {.call = call, .run = run};
    for (int i = 0; i < 4; i++) b.grads[i] = s->targets[i] < 0 ? NULL : call->out[s->targets[i]];
    ont_attention_clear(call, &s->a, s->targets);
    int64_t rows = (s->a.rows + s->row_block - 1) / s->row_block,
            columns = (s->a.columns + s->column_block - 1) / s->column_block;
    if (s->n_apart >= least(s->slots, ont_parallel_threads()) || rows * columns == 1) {
        run_phase(&b, PHASE_ALL, 1);
        return ONT_OK;
    }
    if (b.grads[1] || b.grads[2] || b.grads[3]) run_phase(&b, PHASE_COLUMNS, columns);
    if (b.grads[0]) run_phase(&b, PHASE_ROWS, rows);
    return ONT_OK;
}

ont_status ont_flash_run_grad(const ont_call *call)
{
    return ont_flash_backward(call, run_piece);
}
