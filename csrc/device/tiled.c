/*
 * Large float32 products in parts, blocks and chunks. See tiled.h.
 */
#include "device/tiled.h"

#include <string.h>
#include <unistd.h>

#include "base/parallel.h"

enum {
    BLOCK_ROWS = 112,    /* about as many: sums of a block pass the second cache once a chunk */
    TURNED_ROWS = 224,   /* of a result whose rows these become a part of */
    WHOLE = 4 << 20,     /* bytes of an operand that a part lays out whole: it is read again from the last cache */
    ALL_WHOLE = 64 << 20, /* of all parts' */
    STREAM = 16 << 20,   /* bytes of a result that no cache keeps */
    LINE = 64,
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t padded(int64_t a, int64_t step) { return ceiling(a, step) * step; }

static int64_t second_cache(void)
{
    long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return most(512 << 10, least(bytes, 2 << 20));
}

/* ---- cuts ---- */

/*
 * As nearly square parts as there are, so that little of A and B is laid out by more than one; but where a weight has
 * its outputs as rows (C's columns with B transposed, C's rows with A transposed, or turned), threads share these if
 * there are enough.
 */
static void cut_parts(ont_tiled *t, int64_t threads)
{
    const ont_gemm *g = &t->gemm;
    int64_t rows = t->kernel->rows, columns = t->kernel->columns, best = INT64_MAX;
    int64_t most_m = ceiling(g->m, rows), most_n = ceiling(g->n, columns);
    t->parts_m = t->parts_n = 1;
    if (g->trans_b && !g->trans_a && !t->turned && most_n >= 4 * threads) {
        t->parts_n = threads;
    } else if (t->turned && !t->direct) {
        t->parts_n = least(threads, most_n);
    } else if ((t->turned || (g->trans_a && !g->trans_b)) && most_m >= 4 * threads) {
        t->parts_m = threads;
    } else {
        int64_t laying = t->direct ? 3 : 1; /* B is laid out, which costs more than reading A */
        for (int64_t m = 1; m <= threads; m++) {
            int64_t n = threads / m, sides;
            if (m * n != threads || m > most_m || n > most_n) continue;
            sides = ceiling(g->m, m) + laying * ceiling(g->n, n);
            if (sides < best) best = sides, t->parts_m = m, t->parts_n = n;
        }
    }
    t->part_m = padded(ceiling(g->m, t->parts_m), rows);
    t->part_n = padded(ceiling(g->n, t->parts_n), columns);
    t->parts_m = ceiling(g->m, t->part_m);
    t->parts_n = ceiling(g->n, t->part_n);
}

/* Even blocks of at most `limit`, in whole panels. */
static int64_t even(int64_t size, int64_t limit, int64_t panel)
{
    limit = most(limit / panel * panel, panel);
    return padded(ceiling(size, ceiling(size, limit)), panel);
}

static void cut_blocks(ont_tiled *t)
{
    const ont_gemm_kernel *kernel = t->kernel;
    int64_t k = padded(t->gemm.k, kernel->step), cache = second_cache(), sums = cache / 8 / (int64_t)sizeof(float),
            laid = cache / (t->direct ? 2 : 4) / kernel->laid;
    int64_t m = t->part_m, n = t->part_n;
    bool longer = t->direct || (kernel->direct && k <= 2 * kernel->chunk);
    t->chunk = even(k, longer ? 2 * kernel->chunk : kernel->chunk, most(kernel->step, 16));
    t->chunk = least(t->chunk, k);
    int64_t whole = least(WHOLE, ALL_WHOLE / (t->parts_m * t->parts_n));
    bool whole_a = t->direct || m * k * kernel->laid <= whole, whole_b = n * k * kernel->laid <= whole;
    if ((k > 2 * t->chunk && m * n <= 4 * sums) || (!whole_a && !whole_b)) {
        t->order = ONT_TILED_CHUNKS;
        t->block_m = even(m, t->direct ? 1024 : 512, kernel->rows);
        t->block_n = even(n, 4 * sums / t->block_m, kernel->columns);
    } else if (whole_a && (n >= m || !whole_b)) {
        t->order = ONT_TILED_COLUMNS;
        t->block_m = even(m, t->turned && !t->direct ? TURNED_ROWS : BLOCK_ROWS, kernel->rows);
        t->block_n = even(n, least(laid / k, sums / t->block_m), kernel->columns);
    } else {
        t->order = ONT_TILED_ROWS;
        t->block_m = even(m, least(laid / k, 2 * BLOCK_ROWS), kernel->rows);
        t->block_n = even(n, sums / t->block_m, kernel->columns);
    }
}

/*
 * Whether the transposed result may be computed. A linear layer's weight is larger than its input: it becomes the
 * operand that is read as it is stored. Where the input has more rows than k, turning the result would be more work
 * than laying out the weight.
 */
static bool may_be_turned(const ont_tiled *t)
{
    const ont_gemm *g = &t->gemm;
    return t->direct && g->trans_b && g->n > g->m && g->k >= g->m && g->m >= t->kernel->columns / 2;
}

/* Where both are laid out, columns of which the last panel has a quarter or less become rows: of these a tile may have
 * any number. */
static bool has_better_rows(const ont_tiled *t)
{
    const ont_gemm *g = &t->gemm;
    int64_t columns = t->kernel->columns, rest = g->n % columns;
    return t->kernel->direct && g->trans_a && !g->trans_b && g->n > columns && g->n <= TURNED_ROWS && rest &&
           rest <= columns / 4 && g->m >= 16 * g->n;
}

/* From here on it is the transposed result's operands that are A and B. */
static void turn(ont_tiled *t)
{
    ont_gemm *g = &t->gemm, by = t->gemm;
    t->turned = true;
    g->m = by.n, g->n = by.m;
    g->lda = by.ldb, g->ldb = by.lda;
}

void ont_tiled_cut(ont_tiled *t, const ont_gemm_kernel *kernel, const ont_gemm *g, ont_dtype out, int threads)
{
    *t = (ont_tiled){.gemm = *g, .kernel = kernel, .out = out, .direct = kernel->direct && !g->trans_a};
    bool wide = may_be_turned(t);
    t->paired = t->direct && !wide; /* any number of threads has the same sums */
    if (wide ? g->n > threads * g->m : has_better_rows(t)) turn(t);
    cut_parts(t, threads);
    cut_blocks(t);
    int64_t k = padded(g->k, kernel->step);
    bool columns = t->order == ONT_TILED_COLUMNS, rows = t->order == ONT_TILED_ROWS;
    int64_t a = columns ? t->part_m * k : t->block_m * (rows ? k : t->chunk),
            b = rows ? t->part_n * k : t->block_n * (columns ? k : t->chunk);
    t->a_bytes = t->direct ? 0 : (size_t)padded(a * kernel->laid, LINE);
    t->b_bytes = (size_t)padded(b * kernel->laid, LINE);
    t->part_bytes = t->a_bytes + t->b_bytes + (size_t)(t->block_m * t->block_n) * sizeof(float) + LINE;
    int64_t summed = t->turned ? t->part_n : t->part_m;
    t->sum_bytes = kernel->direct && !t->direct ? (size_t)padded(summed * (int64_t)sizeof(float), LINE) : 0;
    t->part_bytes += t->sum_bytes;
    t->stream = (!t->direct || t->turned) && (double)g->m * (double)g->n * (double)ont_dtype_size(out) >= STREAM;
}

size_t ont_tiled_work_bytes(const ont_tiled *t)
{
    return (size_t)(t->parts_m * t->parts_n) * (size_t)padded((int64_t)t->part_bytes, LINE);
}

/* ---- run ---- */

/* A by its rows, or B by its columns, and what of it is laid out: some of them, of all of k or of a chunk. */
typedef struct operand {
    const char *x;
    int64_t ld, panel;
    bool across; /* stored (k, count) */
    void (*lay)(const ont_gemm_source *s, void *panels);
    char *laid;
    int64_t first, count;
    float *sums, *chunk; /* along k, of all of them or NULL, and scratch for those of a chunk */
} operand;

typedef struct part {
    const ont_tiled *t;
    operand a, b;
    const char *row;
    char *c;
    float *sums;
} part;

static const char *stored_at(const ont_tiled *t, const operand *o, int64_t first, int64_t k)
{
    return o->x + (o->across ? k * o->ld + first : first * o->ld + k) * t->kernel->element;
}

static void lay(const ont_tiled *t, const operand *o, int64_t first, int64_t count, int64_t k, int64_t depth, char *to)
{
    ont_gemm_source s = {.x = stored_at(t, o, first, k), .ld = o->ld, .count = count, .k = depth, .across = o->across,
                         .paired = t->paired};
    if (o->sums) {
        s.sums = k ? o->chunk : o->sums + first;
        memset(s.sums, 0, (size_t)count * sizeof *s.sums);
    }
    o->lay(&s, to);
    for (int64_t i = 0; o->sums && k && i < count; i++) o->sums[first + i] += o->chunk[i];
}

/* All of k, chunk by chunk. */
static void lay_all(const ont_tiled *t, operand *o, int64_t first, int64_t count)
{
    o->first = first;
    o->count = padded(count, o->panel);
    for (int64_t k = 0; k < t->gemm.k; k += t->chunk)
        lay(t, o, first, count, k, least(t->chunk, t->gemm.k - k), o->laid + k * o->count * t->kernel->laid);
}

/* Where panels lie that were laid out so, of a chunk of `depth`. */
static const char *laid_at(const ont_tiled *t, const operand *o, int64_t first, int64_t k, int64_t depth)
{
    return o->laid + (k * o->count + (first - o->first) * depth) * t->kernel->laid;
}

static void block(part *p, int64_t i, int64_t rows, int64_t j, int64_t columns)
{
    const ont_tiled *t = p->t;
    const ont_gemm *g = &t->gemm;
    const ont_gemm_kernel *kernel = t->kernel;
    ont_gemm_block b = {.m = rows, .n = columns, .sums = p->sums, .ld = padded(columns, kernel->columns),
                        .paired = t->paired};
    bool half = t->out == ONT_BFLOAT16, chunks = t->order == ONT_TILED_CHUNKS;
    int64_t row = t->turned ? j : i, column = t->turned ? i : j;
    b.place = (ont_gemm_place){.c = p->c + (row * g->ldc + column) * (half ? 2 : 4), .ldc = g->ldc,
                               .alpha = (float)g->alpha, .row = p->row ? p->row + column * kernel->element : NULL,
                               .half = half, .half_row = kernel->element == 2, .stream = t->stream,
                               .turned = t->turned};
    for (int64_t k = 0; k < g->k; k += t->chunk) {
        int64_t depth = least(t->chunk, g->k - k);
        b.k = padded(depth, kernel->step);
        b.add = k > 0;
        b.last = k + depth == g->k;
        if (chunks && !t->direct) lay(t, &p->a, i, rows, k, depth, p->a.laid);
        if (chunks) lay(t, &p->b, j, columns, k, depth, p->b.laid);
        b.lda = t->direct ? p->a.ld : 0;
        b.a = t->direct ? stored_at(t, &p->a, i, k) : chunks ? p->a.laid : laid_at(t, &p->a, i, k, b.k);
        b.b = chunks ? p->b.laid : laid_at(t, &p->b, j, k, b.k);
        kernel->multiply(&b);
    }
}

static void region(part *p, int64_t first_m, int64_t last_m, int64_t first_n, int64_t last_n)
{
    const ont_tiled *t = p->t;
    if (t->order == ONT_TILED_ROWS) {
        lay_all(t, &p->b, first_n, last_n - first_n);
        for (int64_t i = first_m; i < last_m; i += t->block_m) {
            int64_t rows = least(t->block_m, last_m - i);
            if (!t->direct) lay_all(t, &p->a, i, rows);
            for (int64_t j = first_n; j < last_n; j += t->block_n)
                block(p, i, rows, j, least(t->block_n, last_n - j));
        }
        return;
    }
    if (t->order == ONT_TILED_COLUMNS && !t->direct) lay_all(t, &p->a, first_m, last_m - first_m);
    for (int64_t j = first_n; j < last_n; j += t->block_n) {
        int64_t columns = least(t->block_n, last_n - j);
        if (t->order == ONT_TILED_COLUMNS) lay_all(t, &p->b, j, columns);
        for (int64_t i = first_m; i < last_m; i += t->block_m) block(p, i, least(t->block_m, last_m - i), j, columns);
        p->a.sums = NULL; /* all of A has been laid out once */
    }
}

typedef struct job {
    part common;
    char *work;
} job;

static void parts(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_tiled *t = j->common.t;
    for (int64_t index = first; index < last; index++) {
        part p = j->common;
        int64_t m = index / t->parts_n * t->part_m, n = index % t->parts_n * t->part_n;
        p.a.laid = j->work + (size_t)index * (size_t)padded((int64_t)t->part_bytes, LINE);
        p.b.laid = p.a.laid + t->a_bytes;
        p.a.chunk = p.b.chunk = (float *)(void *)(p.b.laid + t->b_bytes);
        p.sums = (float *)(void *)(p.b.laid + t->b_bytes + t->sum_bytes);
        if (n) p.a.sums = NULL; /* the first part of the same rows sums them */
        region(&p, m, least(m + t->part_m, t->gemm.m), n, least(n + t->part_n, t->gemm.n));
    }
}

void ont_tiled_run(const ont_tiled *t, const void *a, const void *b, const void *row, void *c, float *sums, void *work)
{
    const ont_gemm *g = &t->gemm;
    const ont_gemm_kernel *kernel = t->kernel;
    job j = {{.t = t, .row = row, .c = c,
              .a = {.x = t->turned ? b : a, .ld = g->lda, .panel = kernel->rows, .across = g->trans_a,
                    .lay = kernel->lay_a, .sums = t->turned ? NULL : sums},
              .b = {.x = t->turned ? a : b, .ld = g->ldb, .panel = kernel->columns, .across = !g->trans_b,
                    .lay = kernel->lay_b, .sums = t->turned ? sums : NULL}},
             work};
    ont_parallel(t->parts_m * t->parts_n, 1, parts, &j);
}
