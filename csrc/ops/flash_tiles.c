/*
 * FusedAttention and its gradient in blocks of float32 or bfloat16 with products of our own (simd/attention_product.h):
 * operands are laid out once in scratch, padded to whole vectors, and what a causal mask hides is left out tile by
 * tile. flash.c has the same with a library's products, and what both share. Source: Dao, FlashAttention-2, 2023.
 *
 * Forward, a unit of work is a block of rows; the gradient's is a lead, whose blocks of columns are taken one after the
 * other: gradients of K and V are summed in scratch, the one of Q in place. Units are taken as threads are free, the
 * longest first.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/fetch.h"
#include "base/parallel.h"
#include "ops/flash.h"

enum { BLOCK_ROWS = 128, BLOCK_COLUMNS = 384 }; /* two blocks of scores, and what they are made of, in a second cache */
enum { RESIDENT_FLOATS = 1 << 20 };
/* Of values in bfloat16: the gradient takes a row's sum of them from what was rounded, which over fewer is less exact
 * than the parts are (tests/graph/test_attention_tiles.py). */
enum { LEAST_VALUES = 16 };

enum { WISHES = 8, LINES = 16, NEAR_BYTES = 1 << 18 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t padded(int64_t n) { return (n + ONT_TILE_LANES - 1) / ONT_TILE_LANES * ONT_TILE_LANES; }

/* Blocks of about one size, a multiple of a vector. */
static int64_t block_of(int64_t n, int64_t longest)
{
    int64_t blocks = (n + longest - 1) / longest;
    return least(n, padded((n + blocks - 1) / blocks));
}

/*
 * What a thread's next unit of work reads and writes. Rows of a lead lie too far apart for what a processor asks for by
 * itself: where a unit is one block, some are asked for before each tile and each row of this one.
 */
typedef struct ahead {
    struct {
        const char *row;
        int64_t step, rows;
        size_t bytes;
    } wishes[WISHES];
    int n, at; /* `at`: the one whose row is next */
} ahead;

/*
 * Scratch of one thread; rows of size, v_size and columns are padded. Of bfloat16, operands are words of two (simd/
 * attention_product.h): along a row, or of two rows where they are summed over rows.
 */
typedef struct scratch {
    float *q, *dy;               /* of a block of rows; q times the scale */
    float *q_joined, *dy_joined; /* words: of two rows */
    float *keys, *values;        /* of columns: transposed, and as they are; in the gradient both transposed */
    float *plain;                /* keys of a block times the scale, as they are */
    float *scores, *gradient;    /* a block */
    float *narrow, *joined;      /* words: a block rounded, along rows and of two rows */
    float *line;                 /* words: of rows that are to be transposed, or two rows of float32 */
    float *y, *dq, *dk, *dv;     /* y, dq of a block of rows, dk, dv of a block of columns; words: dq of all rows;
                                  * NULL where they are summed where they go */
    double *most, *sum, *delta;  /* per row */
    uint8_t *kept;
    int64_t lead, packed;        /* which lead's columns are laid out, and how many */
    ahead *ahead;
} scratch;

/* `base` is NULL where only the bytes are wanted. */
typedef struct space {
    char *base;
    size_t used;
} space;

static void *take(space *room, int64_t count, size_t size)
{
    size_t at = room->used;
    room->used += ((size_t)count * size + 63) / 64 * 64;
    return room->base ? room->base + at : NULL;
}

/* Gradients of float32 in whole vectors are summed where they go. */
static bool is_direct(const ont_flash *s, int64_t size) { return !s->pairs && size == padded(size); }

static scratch scratch_of(const ont_flash *s, bool backward, space *room)
{
    int64_t m = s->row_block, n = padded(s->column_block), size = padded(s->a.size), v_size = padded(s->a.v_size);
    int64_t columns = s->resident ? n * ((s->a.columns + s->column_block - 1) / s->column_block) : n;
    int64_t rows = backward ? s->a.rows : m;
    scratch w = {.lead = -1};
    w.q = take(room, m * size, sizeof(float));
    w.keys = take(room, s->a.size * columns, sizeof(float));
    w.values = take(room, v_size * columns, sizeof(float));
    w.scores = take(room, m * n, sizeof(float));
    w.most = take(room, rows, sizeof(double));
    w.sum = take(room, rows, sizeof(double));
    if (s->pairs) {
        int64_t longest = size > v_size ? size : v_size;
        w.narrow = take(room, m * n / 2, sizeof(float));
        w.line = take(room, (n > 4 ? n : 4) * longest / 2, sizeof(float));
    }
    if (s->pairs && backward) {
        w.joined = take(room, (m + 1) / 2 * n, sizeof(float));
        w.q_joined = take(room, (m + 1) / 2 * size, sizeof(float));
        w.dy_joined = take(room, (m + 1) / 2 * v_size, sizeof(float));
    }
    if (s->a.drops) w.kept = take(room, m * n, 1);
    if (!backward) {
        w.y = take(room, m * v_size, sizeof(float));
    } else {
        w.dy = take(room, m * v_size, sizeof(float));
        w.plain = take(room, n * size, sizeof(float));
        w.gradient = take(room, m * n, sizeof(float));
        if (!is_direct(s, s->a.size)) {
            w.dq = take(room, (s->pairs ? rows : m) * size, sizeof(float));
            w.dk = take(room, n * size, sizeof(float));
        }
        if (!is_direct(s, s->a.v_size)) w.dv = take(room, n * v_size, sizeof(float));
        w.delta = take(room, rows, sizeof(double));
    }
    return w;
}

/* Sums over several leads would be rounded between them. */
static const char *refuses_pairs(const ont_node *node)
{
    ont_attention a;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (v && i != ONT_ATTENTION_STATS && v->dtype != ONT_BFLOAT16 && v->dtype != ONT_BOOL) return "dtypes differ";
    }
    if (!ont_simd_tile_pairs()) return "no products of bfloat16";
    if (ont_node_in(node, ONT_ATTENTION_BIAS)) return "a bias";
    if (ont_attention_read(node, &a) != ONT_OK || a.size % 2 || a.v_size % 2) return "odd sizes";
    if (a.v_size < LEAST_VALUES) return "few values a row";
    for (int d = 0; d < a.n_leads; d++)
        for (int i = 0; i < 3; i++)
            if (a.leads[d] > 1 && !a.view[i].lead[d]) return "shared operands";
    return getenv("ONNXTRAIN_GEMM") ? "ONNXTRAIN_GEMM names another" : NULL;
}

const char *ont_flash_tiles_accept(const ont_node *node)
{
    if (ont_node_in(node, ONT_ATTENTION_Q)->dtype == ONT_BFLOAT16) return refuses_pairs(node);
    if (ont_node_in(node, ONT_ATTENTION_Q)->dtype != ONT_FLOAT32) return "dtype";
    if (!ont_simd_tiles()) return "no products for this instruction set";
    return getenv("ONNXTRAIN_GEMM") ? "ONNXTRAIN_GEMM names another" : ont_attention_accept(node);
}

static ont_status prepare(const ont_node *node, ont_arena *arena, bool backward, ont_prepared *out)
{
    ont_flash *s;
    space room = {0};
    ONT_TRY(ont_flash_begin(node, arena, &s));
    s->tiles = ont_simd_tiles();
    s->pairs = s->dtype == ONT_BFLOAT16 ? ont_simd_tile_pairs() : NULL;
    s->row_block = block_of(s->a.rows, BLOCK_ROWS);
    s->column_block = block_of(s->a.columns, BLOCK_COLUMNS);
    s->resident = !backward && s->a.columns * (padded(s->a.size) + padded(s->a.v_size)) <= RESIDENT_FLOATS;
    (void)scratch_of(s, backward, &room);
    s->slot_bytes = room.used;
    out->state = s;
    out->work_bytes = s->slot_bytes * (size_t)s->slots;
    return ONT_OK;
}

ont_status ont_flash_tiles_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare(node, arena, false, out);
}

ont_status ont_flash_tiles_prepare_grad(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare(node, arena, true, out);
}

/* ---- operands and products of a block ---- */

static const void *rows_of(const ont_flash *s, int view, const void *base, int64_t l, int64_t i)
{
    return ont_flash_row_at(s, view, base, l, i);
}

/* All rows of a lead through a view, if there are any; `base` may be NULL. */
static void wish(ahead *a, const ont_flash *s, int view, const void *base, int64_t l, int64_t rows, int64_t size)
{
    if (!base || rows < 1) return;
    a->wishes[a->n].row = rows_of(s, view, base, l, 0);
    a->wishes[a->n].step = s->a.view[view].row * (int64_t)s->z;
    a->wishes[a->n].rows = rows;
    a->wishes[a->n++].bytes = (size_t)size * s->z;
}

/* Whether a lead is one block, and its operands find room in the cache beside those of the lead before. */
static bool asks_ahead(const ont_flash *s, int64_t next)
{
    int64_t row = (s->a.size + s->a.v_size) * (int64_t)s->z;
    return next >= 0 && s->a.rows <= s->row_block && s->a.columns <= s->column_block &&
           2 * (s->a.rows + s->a.columns) * row <= NEAR_BYTES;
}

/* Asks for some lines. */
static void ask(void *context)
{
    ahead *a = context;
    for (size_t lines = 0; lines < LINES && a->at < a->n;) {
        lines += ont_fetch_lines(a->wishes[a->at].row, a->wishes[a->at].bytes);
        a->wishes[a->at].row += a->wishes[a->at].step;
        if (!--a->wishes[a->at].rows) a->at++;
    }
}

/* Runs a product over block k; the part that its mask leaves, and the edge that attention_product.h speaks of. */
static void run_product(const ont_flash *s, const ont_flash_block *k, const scratch *w, ont_tile_part part,
                        ont_tile_product *p)
{
    p->meanwhile = w->ahead->n ? ask : NULL;
    p->context = w->ahead;
    p->edge = k->i0 + s->a.diagonal + 1 - k->j0;
    p->part = s->a.causal && p->edge < k->n ? part : ONT_TILE_ALL;
    (s->pairs ? s->pairs->product : s->tiles->product)(p);
}

/* Words of `n` elements that are summed over. */
static int64_t words(const ont_flash *s, int64_t n) { return s->pairs ? (n + 1) / 2 : n; }

/* scores (m, padded n) = rows (m, size) times columns (size, padded n); of pairs, times the factor */
static void scores_product(const ont_flash *s, const ont_flash_block *k, const scratch *w, const float *rows,
                           const float *columns, int64_t size, double factor, float *scores)
{
    ont_tile_product p = {.m = k->m, .n = padded(k->n), .k = words(s, size), .lda = words(s, padded(size)),
                          .ldb = padded(s->column_block), .ldc = padded(s->column_block),
                          .factor = s->pairs ? (float)factor : 1, .a = rows, .b = columns, .c = scores};
    run_product(s, k, w, ONT_TILE_RESULT_SEEN, &p);
}

/* Sums of some rows of a view: in scratch, rows padded, or in the gradient itself. */
typedef struct target {
    float *c;
    int64_t ld;
    bool add; /* to what is there */
} target;

/* c (m, size) = or += scores (m, n) times b (n, size) */
static void rows_product(const ont_flash *s, const ont_flash_block *k, const scratch *w, const float *scores,
                         const float *b, int64_t size, const target *to)
{
    ont_tile_product p = {.m = k->m, .n = padded(size), .k = words(s, k->n), .lda = words(s, padded(s->column_block)),
                          .ldb = padded(size), .ldc = to->ld, .add = to->add, .factor = 1, .a = scores, .b = b,
                          .c = to->c};
    run_product(s, k, w, ONT_TILE_SUM_SEEN, &p);
}

/* c (n, size) = or += scores' (n, m) times b (m, size); what follows is added */
static void columns_product(const ont_flash *s, const ont_flash_block *k, const scratch *w, const float *scores,
                            const float *b, int64_t size, target *to)
{
    ont_tile_product p = {.m = k->n, .n = padded(size), .k = words(s, k->m), .lda = padded(s->column_block),
                          .ldb = padded(size), .ldc = to->ld, .trans_a = true, .add = to->add, .factor = 1,
                          .a = scores, .b = b, .c = to->c};
    run_product(s, k, w, ONT_TILE_SUM_SEEING, &p);
    to->add = true;
}

/* Rows [i, i + n) of a view, as A of a product. */
static void lay(const ont_flash *s, int view, const void *base, int64_t l, int64_t i, int64_t n, int64_t size,
                double factor, float *y)
{
    const void *x = rows_of(s, view, base, l, i);
    if (s->pairs) s->pairs->copy(x, s->a.view[view].row, n, size, y, padded(size) / 2);
    else s->tiles->copy(x, s->a.view[view].row, n, size, (float)factor, y, padded(size));
}

/* The same as B of a product that sums over them. */
static void lay_summed(const ont_flash *s, int view, const void *base, int64_t l, int64_t i, int64_t n, int64_t size,
                       double factor, float *y)
{
    if (s->pairs) s->pairs->copy_joined(rows_of(s, view, base, l, i), s->a.view[view].row, n, size, y, padded(size));
    else lay(s, view, base, l, i, n, size, factor, y);
}

/* The same transposed, as B of a product that sums over the size. */
static void lay_transposed(const ont_flash *s, const scratch *w, int view, const void *base, int64_t l, int64_t i,
                           int64_t n, int64_t size, float *y)
{
    int64_t stride = s->a.view[view].row, ld = padded(s->column_block);
    if (s->pairs) lay(s, view, base, l, i, n, size, 1, w->line);
    s->tiles->transpose(s->pairs ? w->line : rows_of(s, view, base, l, i), s->pairs ? padded(size) / 2 : stride, n,
                        words(s, size), y, ld);
}

/* ---- forward ---- */

/* Lays the block's columns out, unless they are: keys transposed, values as they are. */
static void pack(const ont_call *call, const ont_flash *s, const ont_flash_block *k, scratch *w, const float **keys,
                 const float **values)
{
    const ont_attention *a = &s->a;
    int64_t ld = padded(s->column_block), at = s->resident ? k->j0 / s->column_block * ld : 0;
    float *to_keys = w->keys + at * a->size, *to_values = w->values + at * padded(a->v_size);
    *keys = to_keys;
    *values = to_values;
    if (w->lead != k->l || !s->resident) w->packed = 0;
    w->lead = k->l;
    if (s->resident && k->j0 < w->packed) return;
    lay_transposed(s, w, ONT_ATTENTION_K, call->in[1], k->l, k->j0, k->n, a->size, to_keys);
    lay_summed(s, ONT_ATTENTION_V, call->in[2], k->l, k->j0, k->n, a->v_size, 1, to_values);
    w->packed = k->j0 + k->n;
}

static void finish_rows(const ont_call *call, const ont_flash *s, const ont_flash_block *k, const scratch *w)
{
    const ont_attention *a = &s->a;
    float *stats = call->node->n_outputs > 1 ? call->out[1] : NULL;
    for (int64_t r = 0; r < k->m; r++) {
        int64_t at = (k->l * a->rows + k->i0 + r) * 2;
        char *y = ont_flash_row_at(s, ONT_ATTENTION_Y, call->out[0], k->l, k->i0 + r);
        float inverse = (float)(1 / w->sum[r]);
        float *row = w->y + r * padded(a->v_size);
        if (ont_attention_is_void(a, w->sum[r]) || ont_flash_is_empty(call, s, k->l, k->i0 + r))
            memset(y, 0, (size_t)a->v_size * s->z);
        else
            s->simd->binary[ONT_LOOP_Mul][ONT_FLOAT32](row, 1, &inverse, 0, s->pairs ? (void *)row : y, a->v_size,
                                                       NULL);
        if (s->pairs && !ont_attention_is_void(a, w->sum[r]) && !ont_flash_is_empty(call, s, k->l, k->i0 + r))
            s->simd->float_to_bfloat(row, y, a->v_size);
        if (!stats) continue;
        stats[at] = (float)w->most[r];
        stats[at + 1] = (float)w->sum[r];
    }
}

/* Scores of a block become exp(score - largest so far), and what the rows have so far is brought to the new largest. */
static void softmax_rows(const ont_call *call, const ont_flash *s, const ont_flash_block *k, const scratch *w)
{
    int64_t ld = padded(s->column_block), width = padded(s->a.v_size);
    if (s->a.drops) ont_flash_choose_kept(call, s, k, w->kept);
    for (int64_t r = 0; r < k->m; r++) {
        ask(w->ahead);
        double shrink;
        ont_attention_row row = ont_flash_row_of(call, s, k, r, w->kept);
        s->loops->softmax(w->scores + r * ld, &row, &w->most[r], &w->sum[r], &shrink);
        if (!k->j0 || shrink == 1) continue;
        float factor = (float)shrink, *y = w->y + r * width;
        s->simd->binary[ONT_LOOP_Mul][ONT_FLOAT32](y, 1, &factor, 0, y, width, NULL);
    }
    if (s->pairs) s->pairs->narrow(w->scores, ld, k->m, k->n, w->narrow, ld / 2);
}

/* The result of rows [i0, i0 + m): first exp(scores - largest so far) V, in the end divided by the sum. */
static void forward_rows(const ont_call *call, const ont_flash *s, ont_flash_block k, scratch *w)
{
    const ont_attention *a = &s->a;
    int64_t columns = ont_attention_visible(a, k.i0 + k.m - 1);
    for (int64_t r = 0; r < k.m; r++) {
        w->most[r] = -INFINITY;
        w->sum[r] = 0;
    }
    if (!columns) memset(w->y, 0, (size_t)(k.m * padded(a->v_size)) * sizeof(float));
    lay(s, ONT_ATTENTION_Q, call->in[0], k.l, k.i0, k.m, a->size, a->scale, w->q);
    for (k.j0 = 0; k.j0 < columns; k.j0 += s->column_block) {
        const float *keys, *values;
        k.n = least(s->column_block, a->columns - k.j0);
        pack(call, s, &k, w, &keys, &values);
        scores_product(s, &k, w, w->q, keys, a->size, a->scale, w->scores);
        softmax_rows(call, s, &k, w);
        rows_product(s, &k, w, s->pairs ? w->narrow : w->scores, values, a->v_size,
                     &(target){w->y, padded(a->v_size), k.j0 > 0});
    }
    finish_rows(call, s, &k, w);
}

static void wish_forward(const ont_call *call, const ont_flash *s, ahead *soon, int64_t l)
{
    wish(soon, s, ONT_ATTENTION_K, call->in[1], l, s->a.columns, s->a.size);
    wish(soon, s, ONT_ATTENTION_Q, call->in[0], l, s->a.rows, s->a.size);
    wish(soon, s, ONT_ATTENTION_V, call->in[2], l, s->a.columns, s->a.v_size);
    wish(soon, s, ONT_ATTENTION_Y, call->out[0], l, s->a.rows, s->a.v_size);
}

typedef struct forward {
    const ont_call *call;
    atomic_int_least64_t next; /* unit */
} forward;

static void forward_slots(void *context, int64_t first, int64_t last)
{
    forward *f = context;
    const ont_flash *s = f->call->state;
    int64_t per_lead = (s->a.rows + s->row_block - 1) / s->row_block, units = s->a.count * per_lead;
    for (int64_t slot = first; slot < last; slot++) {
        space room = {.base = (char *)f->call->work + (size_t)slot * s->slot_bytes};
        scratch w = scratch_of(s, false, &room);
        for (int64_t next, u = atomic_fetch_add(&f->next, 1); u < units; u = next) {
            next = atomic_fetch_add(&f->next, 1);
            ahead soon = {.n = 0};
            w.ahead = &soon;
            if (asks_ahead(s, next < units ? next : -1)) wish_forward(f->call, s, &soon, next);
            ont_flash_block k = {.l = u / per_lead, .i0 = (per_lead - 1 - u % per_lead) * s->row_block};
            k.m = least(s->row_block, s->a.rows - k.i0);
            forward_rows(f->call, s, k, &w);
        }
    }
}

ont_status ont_flash_tiles_run(const ont_call *call)
{
    forward f = {.call = call};
    ont_parallel(((const ont_flash *)call->state)->slots, 1, forward_slots, &f);
    return ONT_OK;
}

/* ---- gradient ---- */

/* delta: sum over the row of probability times its gradient, which is the result's row times its gradient. */
static void begin_piece(const ont_call *call, const ont_flash *s, const ont_flash_piece *p, const scratch *w)
{
    const ont_attention *a = &s->a;
    const float *stats = (const float *)call->in[ONT_ATTENTION_STATS] + p->l * a->rows * 2;
    float *wide = w->line, *wide_dy = s->pairs ? wide + padded(a->v_size) : NULL;
    for (int64_t i = p->i0; i < p->i1; i++) {
        const void *y = rows_of(s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_Y], p->l, i);
        const void *dy = rows_of(s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY], p->l, i);
        if (s->pairs) {
            s->simd->bfloat_to_float(y, wide, a->v_size);
            s->simd->bfloat_to_float(dy, wide_dy, a->v_size);
        }
        w->delta[i] = s->pairs ? s->loops->dot(wide, wide_dy, a->v_size) : s->loops->dot(y, dy, a->v_size);
        w->most[i] = (double)stats[2 * i];
        w->sum[i] = (double)stats[2 * i + 1];
    }
    if (s->pairs && p->dq)
        memset(w->dq + p->i0 * padded(a->size), 0, (size_t)((p->i1 - p->i0) * padded(a->size)) * sizeof(float));
}

/* The bias's gradient in row r of a block; NULL: zeros. */
static void put_bias(const ont_flash *s, const ont_flash_block *k, const ont_flash_piece *p, int64_t r,
                     const float *gradient)
{
    if (!p->dbias) return;
    float *to = (float *)p->dbias + (k->l * s->a.rows + k->i0 + r) * s->a.columns + k->j0;
    if (gradient) memcpy(to, gradient, (size_t)k->n * sizeof(float));
    else memset(to, 0, (size_t)k->n * sizeof(float));
}

/* Scores and gradients of probabilities become probabilities and gradients of scores. */
static void grad_rows(const ont_call *call, const ont_flash *s, const ont_flash_block *k, const scratch *w,
                      const ont_flash_piece *p)
{
    int64_t ld = padded(s->column_block);
    size_t bytes = (size_t)k->n * sizeof(float);
    if (s->a.drops) ont_flash_choose_kept(call, s, k, w->kept);
    for (int64_t r = 0; r < k->m; r++) {
        ask(w->ahead);
        int64_t i = k->i0 + r;
        float *scores = w->scores + r * ld, *gradient = w->gradient + r * ld;
        ont_attention_row row = ont_flash_row_of(call, s, k, r, w->kept);
        if (ont_attention_is_void(&s->a, w->sum[i]) || ont_flash_is_empty(call, s, k->l, i)) {
            memset(scores, 0, bytes);
            memset(gradient, 0, bytes);
        } else {
            s->loops->grad(scores, gradient, &row, w->most[i], w->sum[i], w->delta[i]);
        }
        put_bias(s, k, p, r, gradient);
    }
}

static target target_of(const ont_flash *s, float *sums, int view, void *base, int64_t l, int64_t i, int64_t size)
{
    if (!is_direct(s, size)) return (target){sums, padded(size), false};
    return (target){(float *)(void *)ont_flash_row_at(s, view, base, l, i), s->a.view[view].row,
                    !ont_flash_is_first(s, view, l)};
}

/* Sums of rows [i, i + n) go to the gradient through a view; of pairs, times the factor. */
static void put(const ont_flash *s, float *sums, int view, void *base, int64_t l, int64_t i, int64_t n, int64_t size,
                double factor, bool first)
{
    int64_t ld = padded(size);
    float f = (float)factor;
    if (!s->pairs)
        s->tiles->put(sums, ld, n, size, !first, (float *)(void *)ont_flash_row_at(s, view, base, l, i),
                      s->a.view[view].row);
    for (int64_t r = 0; s->pairs && r < n; r++, sums += ld) {
        if (f != 1) s->simd->binary[ONT_LOOP_Mul][ONT_FLOAT32](sums, 1, &f, 0, sums, size, NULL);
        s->simd->float_to_bfloat(sums, ont_flash_row_at(s, view, base, l, i + r), size);
    }
}

static void grad_of_q(const ont_flash *s, const ont_flash_block *k, const scratch *w, const float *rows,
                      const ont_flash_piece *p)
{
    int64_t size = s->a.size, ld = padded(size);
    if (s->pairs) {
        rows_product(s, k, w, rows, w->plain, size, &(target){w->dq + k->i0 * ld, ld, true});
        return;
    }
    if (is_direct(s, size)) {
        float *dq = (float *)(void *)ont_flash_row_at(s, ONT_ATTENTION_Q, p->dq, k->l, k->i0);
        rows_product(s, k, w, rows, w->plain, size, &(target){dq, s->a.view[ONT_ATTENTION_Q].row, true});
        return;
    }
    rows_product(s, k, w, rows, w->plain, size, &(target){w->dq, ld, false});
    put(s, w->dq, ONT_ATTENTION_Q, p->dq, k->l, k->i0, k->m, size, 1, false);
}

/* The products behind the rows; of bfloat16, of what the rows gave, rounded. */
static void products_behind(const ont_flash *s, const ont_flash_block *k, const scratch *w, const ont_flash_piece *p,
                            target *dk, target *dv)
{
    const ont_attention *a = &s->a;
    int64_t ld = padded(s->column_block);
    const float *rows = w->gradient, *columns = w->scores;
    if (s->pairs) s->pairs->narrow_joined(w->scores, ld, k->m, k->n, w->joined, ld), columns = w->joined;
    if (p->dv) columns_product(s, k, w, columns, s->pairs ? w->dy_joined : w->dy, a->v_size, dv);
    if (s->pairs) s->pairs->narrow_joined(w->gradient, ld, k->m, k->n, w->joined, ld);
    if (p->dk) columns_product(s, k, w, s->pairs ? w->joined : w->gradient, s->pairs ? w->q_joined : w->q, a->size, dk);
    if (!p->dq) return;
    if (s->pairs) s->pairs->narrow(w->gradient, ld, k->m, k->n, w->narrow, ld / 2), rows = w->narrow;
    grad_of_q(s, k, w, rows, p);
}

static void block_grad(const ont_call *call, const ont_flash *s, const ont_flash_block *k, const scratch *w,
                       const ont_flash_piece *p, target *dk, target *dv)
{
    const ont_attention *a = &s->a;
    const void *q = call->in[0], *dy = call->in[ONT_ATTENTION_DY];
    lay(s, ONT_ATTENTION_Q, q, k->l, k->i0, k->m, a->size, a->scale, w->q);
    lay(s, ONT_ATTENTION_Y, dy, k->l, k->i0, k->m, a->v_size, 1, w->dy);
    if (s->pairs && p->dk) lay_summed(s, ONT_ATTENTION_Q, q, k->l, k->i0, k->m, a->size, 1, w->q_joined);
    if (s->pairs && p->dv) lay_summed(s, ONT_ATTENTION_Y, dy, k->l, k->i0, k->m, a->v_size, 1, w->dy_joined);
    scores_product(s, k, w, w->q, w->keys, a->size, a->scale, w->scores);
    scores_product(s, k, w, w->dy, w->values, a->v_size, 1, w->gradient);
    grad_rows(call, s, k, w, p);
    products_behind(s, k, w, p, dk, dv);
}

/* The columns of a block: both transposed for the scores, the keys as they are for the gradient of Q. */
static void pack_columns(const ont_call *call, const ont_flash *s, const ont_flash_block *k, const scratch *w,
                         const ont_flash_piece *p)
{
    const ont_attention *a = &s->a;
    lay_transposed(s, w, ONT_ATTENTION_K, call->in[1], k->l, k->j0, k->n, a->size, w->keys);
    lay_transposed(s, w, ONT_ATTENTION_V, call->in[2], k->l, k->j0, k->n, a->v_size, w->values);
    if (p->dq) lay_summed(s, ONT_ATTENTION_K, call->in[1], k->l, k->j0, k->n, a->size, a->scale, w->plain);
}

/* A block's sums are complete: zeros, where nothing saw its columns. */
static void finish_columns(const ont_flash *s, const ont_flash_block *k, const target *t, int view, void *base,
                           int64_t size)
{
    if (!base) return;
    for (int64_t r = 0; r < k->n && !t->add; r++) memset(t->c + r * t->ld, 0, (size_t)size * sizeof(float));
    if (is_direct(s, size)) return;
    put(s, t->c, view, base, k->l, k->j0, k->n, size, view == ONT_ATTENTION_K ? s->a.scale : 1,
        ont_flash_is_first(s, view, k->l));
}

static void wish_backward(const ont_call *call, const ont_flash *s, const ont_flash_piece *p, ahead *soon)
{
    const ont_attention *a = &s->a;
    wish(soon, s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_Y], p->next, a->rows, a->v_size);
    wish(soon, s, ONT_ATTENTION_Y, call->in[ONT_ATTENTION_DY], p->next, a->rows, a->v_size);
    wish(soon, s, ONT_ATTENTION_K, call->in[1], p->next, a->columns, a->size);
    wish(soon, s, ONT_ATTENTION_V, call->in[2], p->next, a->columns, a->v_size);
    wish(soon, s, ONT_ATTENTION_Q, call->in[0], p->next, a->rows, a->size);
    wish(soon, s, ONT_ATTENTION_V, p->dv, p->next, a->columns, a->v_size);
    wish(soon, s, ONT_ATTENTION_K, p->dk, p->next, a->columns, a->size);
    wish(soon, s, ONT_ATTENTION_Q, p->dq, p->next, a->rows, a->size);
}

static void run_piece(const ont_call *call, const ont_flash *s, const ont_flash_piece *p, int64_t slot)
{
    const ont_attention *a = &s->a;
    space room = {.base = (char *)call->work + (size_t)slot * s->slot_bytes};
    scratch own = scratch_of(s, true, &room), *w = &own;
    ahead soon = {.n = 0};
    w->ahead = &soon;
    if (asks_ahead(s, p->next)) wish_backward(call, s, p, &soon);
    if (!s->pairs && ont_flash_is_first(s, ONT_ATTENTION_Q, p->l))
        ont_flash_zero_rows(s, ONT_ATTENTION_Q, p->dq, p->l, p->i0, p->i1, a->size);
    ont_flash_block k = {.l = p->l};
    begin_piece(call, s, p, w);
    for (k.j0 = p->j0; k.j0 < p->j1; k.j0 += s->column_block) {
        k.n = least(s->column_block, p->j1 - k.j0);
        pack_columns(call, s, &k, w, p);
        target dk = target_of(s, w->dk, ONT_ATTENTION_K, p->dk, k.l, k.j0, a->size),
               dv = target_of(s, w->dv, ONT_ATTENTION_V, p->dv, k.l, k.j0, a->v_size);
        for (k.i0 = p->i0; k.i0 < p->i1; k.i0 += s->row_block) {
            k.m = least(s->row_block, p->i1 - k.i0);
            if (ont_attention_visible(a, k.i0 + k.m - 1) > k.j0)
                block_grad(call, s, &k, w, p, &dk, &dv);
            else
                for (int64_t r = 0; r < k.m; r++) put_bias(s, &k, p, r, NULL);
        }
        finish_columns(s, &k, &dk, ONT_ATTENTION_K, p->dk, a->size);
        finish_columns(s, &k, &dv, ONT_ATTENTION_V, p->dv, a->v_size);
    }
    if (s->pairs && p->dq)
        put(s, w->dq + p->i0 * padded(a->size), ONT_ATTENTION_Q, p->dq, p->l, p->i0, p->i1 - p->i0, a->size, a->scale,
            true);
}

ont_status ont_flash_tiles_run_grad(const ont_call *call)
{
    return ont_flash_backward(call, run_piece);
}
