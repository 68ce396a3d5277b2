/*
 * The native GEMM. See gemm_native.h.
 */
#include "device/gemm_native.h"

#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/parallel.h"

enum {
    MC = 112,                     /* about: accumulators of a block go through L2 once per KC */
    TRANS_C_MC = 224,             /* with trans_c: rows of a block become a row segment of C */
    PACKED_BYTES = 4 << 20,       /* up to this size, a tile's operand is packed at once and re-read from the LLC */
    PACKED_TOTAL_BYTES = 64 << 20, /* the same for the operands of all tiles */
    NONTEMPORAL_BYTES = 16 << 20, /* a C of this size does not stay in any cache */
    LINE = 64,
};

static int64_t l2_cache_bytes(void)
{
    long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return ont_max(512 << 10, ont_min(bytes, 2 << 20));
}

/* ---- division into tiles and blocks ---- */

/*
 * Tiles as square as possible, so that little of A and B is packed by several threads. But where the outputs of a
 * weight are its stored rows (columns of C with B transposed, rows of C with A transposed or with trans_c), threads
 * divide those if there are enough.
 */
static void choose_grid(ont_gemm_native *t, int64_t threads)
{
    const ont_gemm *g = &t->gemm;
    int64_t mr = t->kernel->mr, nr = t->kernel->nr, best = INT64_MAX;
    int64_t max_m = ont_ceil_div(g->m, mr), max_n = ont_ceil_div(g->n, nr);
    t->grid_m = t->grid_n = 1;
    if (g->trans_b && !g->trans_a && !t->trans_c && max_n >= 4 * threads) {
        t->grid_n = threads;
    } else if (t->trans_c && !t->unpacked_a) {
        t->grid_n = ont_min(threads, max_n);
    } else if ((t->trans_c || (g->trans_a && !g->trans_b)) && max_m >= 4 * threads) {
        t->grid_m = threads;
    } else {
        int64_t b_cost = t->unpacked_a ? 3 : 1; /* packing B costs more than reading A */
        for (int64_t m = 1; m <= threads; m++) {
            int64_t n = threads / m, cost;
            if (m * n != threads || m > max_m || n > max_n) continue;
            cost = ont_ceil_div(g->m, m) + b_cost * ont_ceil_div(g->n, n);
            if (cost < best) best = cost, t->grid_m = m, t->grid_n = n;
        }
    }
    t->tile_m = ont_round_up(ont_ceil_div(g->m, t->grid_m), mr);
    t->tile_n = ont_round_up(ont_ceil_div(g->n, t->grid_n), nr);
    t->grid_m = ont_ceil_div(g->m, t->tile_m);
    t->grid_n = ont_ceil_div(g->n, t->tile_n);
}

/* The size of equal blocks of at most `limit`, a multiple of `panel`. */
static int64_t even_blocks(int64_t size, int64_t limit, int64_t panel)
{
    limit = ont_max(limit / panel * panel, panel);
    return ont_round_up(ont_ceil_div(size, ont_ceil_div(size, limit)), panel);
}

static void choose_blocks(ont_gemm_native *t)
{
    const ont_gemm_kernel *kernel = t->kernel;
    int64_t k = ont_round_up(t->gemm.k, kernel->kr), cache = l2_cache_bytes();
    int64_t acc = cache / 8 / (int64_t)sizeof(float); /* elements of a block's accumulators */
    int64_t packed = cache / (t->unpacked_a ? 2 : 4) / kernel->packed_size; /* elements of a packed block */
    int64_t m = t->tile_m, n = t->tile_n;
    bool longer = t->unpacked_a || (kernel->is_full && k <= 2 * kernel->kc);
    t->kc = even_blocks(k, longer ? 2 * kernel->kc : kernel->kc, ont_max(kernel->kr, 16));
    t->kc = ont_min(t->kc, k);
    int64_t whole = ont_min(PACKED_BYTES, PACKED_TOTAL_BYTES / (t->grid_m * t->grid_n));
    bool a_once = t->unpacked_a || m * k * kernel->packed_size <= whole;
    bool b_once = n * k * kernel->packed_size <= whole;
    if ((k > 2 * t->kc && m * n <= 4 * acc) || (!a_once && !b_once)) {
        t->packing = ONT_GEMM_PACK_PER_KC;
        t->mc = even_blocks(m, t->unpacked_a ? 1024 : 512, kernel->mr);
        t->nc = even_blocks(n, 4 * acc / t->mc, kernel->nr);
    } else if (a_once && (n >= m || !b_once)) {
        t->packing = ONT_GEMM_PACK_A_ONCE;
        t->mc = even_blocks(m, t->trans_c && !t->unpacked_a ? TRANS_C_MC : MC, kernel->mr);
        t->nc = even_blocks(n, ont_min(packed / k, acc / t->mc), kernel->nr);
    } else {
        t->packing = ONT_GEMM_PACK_B_ONCE;
        t->mc = even_blocks(m, ont_min(packed / k, 2 * MC), kernel->mr);
        t->nc = even_blocks(n, acc / t->mc, kernel->nr);
    }
}

/*
 * Whether to compute C' with B, which is transposed and larger than A, as the unpacked operand. Where m > k,
 * transposing C would cost more than packing B.
 */
static bool prefers_trans_c(const ont_gemm_native *t)
{
    const ont_gemm *g = &t->gemm;
    return t->unpacked_a && g->trans_b && g->n > g->m && g->k >= g->m && g->m >= t->kernel->nr / 2;
}

/* Both operands are packed, and the last panel of columns would be at most a quarter full: computing C' avoids it. */
static bool has_narrow_tail(const ont_gemm_native *t)
{
    const ont_gemm *g = &t->gemm;
    int64_t nr = t->kernel->nr, rest = g->n % nr;
    return t->kernel->is_full && g->trans_a && !g->trans_b && g->n > nr && g->n <= TRANS_C_MC && rest &&
           rest <= nr / 4 && g->m >= 16 * g->n;
}

/* Afterwards A and B name the operands of the transposed problem. */
static void transpose_problem(ont_gemm_native *t)
{
    ont_gemm *g = &t->gemm, old = t->gemm;
    t->trans_c = true;
    g->m = old.n, g->n = old.m;
    g->lda = old.ldb, g->ldb = old.lda;
}

void ont_gemm_native_init(ont_gemm_native *t, const ont_gemm_kernel *kernel, const ont_gemm *g, ont_dtype out,
                          int threads)
{
    *t = (ont_gemm_native){.gemm = *g, .kernel = kernel, .out = out,
                           .unpacked_a = kernel->is_full && !g->trans_a};
    bool wide = prefers_trans_c(t);
    t->interleave_tail = t->unpacked_a && !wide; /* not by trans_c: rounding must not depend on `threads` */
    if (wide ? g->n > threads * g->m : has_narrow_tail(t)) transpose_problem(t);
    choose_grid(t, threads);
    choose_blocks(t);
    int64_t k = ont_round_up(g->k, kernel->kr);
    bool a_once = t->packing == ONT_GEMM_PACK_A_ONCE, b_once = t->packing == ONT_GEMM_PACK_B_ONCE;
    int64_t a = a_once ? t->tile_m * k : t->mc * (b_once ? k : t->kc),
            b = b_once ? t->tile_n * k : t->nc * (a_once ? k : t->kc);
    t->a_bytes = t->unpacked_a ? 0 : (size_t)ont_round_up(a * kernel->packed_size, LINE);
    t->b_bytes = (size_t)ont_round_up(b * kernel->packed_size, LINE);
    t->tile_bytes = t->a_bytes + t->b_bytes + (size_t)(t->mc * t->nc) * sizeof(float) + LINE;
    int64_t summed = t->trans_c ? t->tile_n : t->tile_m;
    t->k_sum_bytes =
        kernel->is_full && !t->unpacked_a ? (size_t)ont_round_up(summed * (int64_t)sizeof(float), LINE) : 0;
    t->tile_bytes += t->k_sum_bytes;
    t->nontemporal = (!t->unpacked_a || t->trans_c) &&
                     (double)g->m * (double)g->n * (double)ont_dtype_size(out) >= NONTEMPORAL_BYTES;
}

size_t ont_gemm_native_work_bytes(const ont_gemm_native *t)
{
    return (size_t)(t->grid_m * t->grid_n) * (size_t)ont_round_up((int64_t)t->tile_bytes, LINE);
}

/* ---- run ---- */

/* Rows of op(A), or columns of op(B), and the packed range of them: over all of k, or over one KC. */
typedef struct operand {
    const char *x;
    int64_t ld, panel; /* panel: MR or NR */
    bool mn_major;     /* stored (k, rows or columns) */
    void (*pack)(const ont_gemm_pack_source *s, void *panels);
    char *packed;
    int64_t first, count; /* the packed range */
    float *sums;          /* over k, of all rows; or NULL */
    float *kc_sums;       /* scratch: sums over one KC */
} operand;

typedef struct thread_tile {
    const ont_gemm_native *t;
    operand a, b;
    const char *bias;
    char *c;
    float *acc;
} thread_tile;

static const char *source_at(const ont_gemm_native *t, const operand *o, int64_t first, int64_t k)
{
    return o->x + (o->mn_major ? k * o->ld + first : first * o->ld + k) * t->kernel->element_size;
}

/* Elements [k, k + depth) of rows or columns [first, first + count). */
static void pack(const ont_gemm_native *t, const operand *o, int64_t first, int64_t count, int64_t k, int64_t depth,
                 char *to)
{
    ont_gemm_pack_source s = {.x = source_at(t, o, first, k), .ld = o->ld, .count = count, .k = depth,
                              .mn_major = o->mn_major, .interleave_tail = t->interleave_tail};
    if (o->sums) {
        s.k_sums = k ? o->kc_sums : o->sums + first;
        memset(s.k_sums, 0, (size_t)count * sizeof *s.k_sums);
    }
    o->pack(&s, to);
    for (int64_t i = 0; o->sums && k && i < count; i++) o->sums[first + i] += o->kc_sums[i];
}

/* All of k, in blocks of KC. */
static void pack_all(const ont_gemm_native *t, operand *o, int64_t first, int64_t count)
{
    o->first = first;
    o->count = ont_round_up(count, o->panel);
    for (int64_t k = 0; k < t->gemm.k; k += t->kc)
        pack(t, o, first, count, k, ont_min(t->kc, t->gemm.k - k), o->packed + k * o->count * t->kernel->packed_size);
}

/* The panel of `first` that pack_all() wrote for the block of `depth` elements from k on. */
static const char *packed_at(const ont_gemm_native *t, const operand *o, int64_t first, int64_t k, int64_t depth)
{
    return o->packed + (k * o->count + (first - o->first) * depth) * t->kernel->packed_size;
}

/* Rows [i, i + rows) and columns [j, j + columns) of C. */
static void run_block(thread_tile *p, int64_t i, int64_t rows, int64_t j, int64_t columns)
{
    const ont_gemm_native *t = p->t;
    const ont_gemm *g = &t->gemm;
    const ont_gemm_kernel *kernel = t->kernel;
    ont_gemm_block b = {.m = rows, .n = columns, .acc = p->acc, .ld_acc = ont_round_up(columns, kernel->nr),
                        .interleave_tail = t->interleave_tail};
    bool c_is_bf16 = t->out == ONT_BFLOAT16, per_kc = t->packing == ONT_GEMM_PACK_PER_KC;
    int64_t row = t->trans_c ? j : i, column = t->trans_c ? i : j;
    b.epilogue = (ont_gemm_epilogue){.c = p->c + (row * g->ldc + column) * (c_is_bf16 ? 2 : 4), .ldc = g->ldc,
                                     .alpha = (float)g->alpha,
                                     .bias = p->bias ? p->bias + column * kernel->element_size : NULL,
                                     .c_is_bf16 = c_is_bf16, .bias_is_bf16 = kernel->element_size == 2,
                                     .nontemporal = t->nontemporal && g->beta == 0, .trans_c = t->trans_c,
                                     .adds_to_c = g->beta != 0};
    for (int64_t k = 0; k < g->k; k += t->kc) {
        int64_t depth = ont_min(t->kc, g->k - k);
        b.k = ont_round_up(depth, kernel->kr);
        b.accumulate = k > 0;
        b.last_k = k + depth == g->k;
        if (per_kc && !t->unpacked_a) pack(t, &p->a, i, rows, k, depth, p->a.packed);
        if (per_kc) pack(t, &p->b, j, columns, k, depth, p->b.packed);
        b.lda = t->unpacked_a ? p->a.ld : 0;
        b.a = t->unpacked_a ? source_at(t, &p->a, i, k) : per_kc ? p->a.packed : packed_at(t, &p->a, i, k, b.k);
        b.b = per_kc ? p->b.packed : packed_at(t, &p->b, j, k, b.k);
        kernel->multiply(&b);
    }
}

static void run_tile(thread_tile *p, int64_t first_m, int64_t last_m, int64_t first_n, int64_t last_n)
{
    const ont_gemm_native *t = p->t;
    if (t->packing == ONT_GEMM_PACK_B_ONCE) {
        pack_all(t, &p->b, first_n, last_n - first_n);
        for (int64_t i = first_m; i < last_m; i += t->mc) {
            int64_t rows = ont_min(t->mc, last_m - i);
            if (!t->unpacked_a) pack_all(t, &p->a, i, rows);
            for (int64_t j = first_n; j < last_n; j += t->nc)
                run_block(p, i, rows, j, ont_min(t->nc, last_n - j));
        }
        return;
    }
    if (t->packing == ONT_GEMM_PACK_A_ONCE && !t->unpacked_a) pack_all(t, &p->a, first_m, last_m - first_m);
    for (int64_t j = first_n; j < last_n; j += t->nc) {
        int64_t columns = ont_min(t->nc, last_n - j);
        if (t->packing == ONT_GEMM_PACK_A_ONCE) pack_all(t, &p->b, j, columns);
        for (int64_t i = first_m; i < last_m; i += t->mc) run_block(p, i, ont_min(t->mc, last_m - i), j, columns);
        p->a.sums = NULL; /* complete: all of A has been packed once */
    }
}

typedef struct job {
    thread_tile common;
    char *work;
} job;

static void run_tiles(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_gemm_native *t = j->common.t;
    for (int64_t index = first; index < last; index++) {
        thread_tile p = j->common;
        int64_t m = index / t->grid_n * t->tile_m, n = index % t->grid_n * t->tile_n;
        p.a.packed = j->work + (size_t)index * (size_t)ont_round_up((int64_t)t->tile_bytes, LINE);
        p.b.packed = p.a.packed + t->a_bytes;
        p.a.kc_sums = p.b.kc_sums = (float *)(void *)(p.b.packed + t->b_bytes);
        p.acc = (float *)(void *)(p.b.packed + t->b_bytes + t->k_sum_bytes);
        if (n) p.a.sums = NULL; /* the first tile of the same rows sums them */
        run_tile(&p, m, ont_min(m + t->tile_m, t->gemm.m), n, ont_min(n + t->tile_n, t->gemm.n));
    }
}

void ont_gemm_native_run(const ont_gemm_native *t, const void *a, const void *b, const void *bias, void *c, float *sums,
                         void *work)
{
    const ont_gemm *g = &t->gemm;
    const ont_gemm_kernel *kernel = t->kernel;
    ONT_ASSERT(g->beta == 0 || (g->beta == 1 && kernel->element_size == 2 && t->out == ONT_FLOAT32));
    job j = {{.t = t, .bias = bias, .c = c,
              .a = {.x = t->trans_c ? b : a, .ld = g->lda, .panel = kernel->mr, .mn_major = g->trans_a,
                    .pack = kernel->pack_a, .sums = t->trans_c ? NULL : sums},
              .b = {.x = t->trans_c ? a : b, .ld = g->ldb, .panel = kernel->nr, .mn_major = !g->trans_b,
                    .pack = kernel->pack_b, .sums = t->trans_c ? sums : NULL}},
             work};
    ont_parallel(t->grid_m * t->grid_n, 1, run_tiles, &j);
}
