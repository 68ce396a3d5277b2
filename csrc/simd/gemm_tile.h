/*
 * Products of tiles and what becomes of their sums: part of gemm_kernel.inc.c, for float32 with A in panels and as it
 * is stored (STORED), and for pairs of bfloat16. T(name) names the functions, MULTIPLY(sum, a, line) is one step of k,
 * W(write) and W(put) are before it.
 */
#if STORED
#define ALONG_ROWS const float *row[(ROWS + 2) / 3]; for (int g = 0; 3 * g < ROWS; g++) row[g] = a + 3 * g * p->lda
#define ELEMENT(r) (row[(r) / 3] + (r) % 3 * p->lda) /* addresses of a register and its double */
#define NEXT_ELEMENTS for (int g = 0; 3 * g < rows; g++) row[g]++
#else
#define ALONG_ROWS (void)0
#define ELEMENT(r) (a + (r))
#define NEXT_ELEMENTS a += ROWS
#endif

INLINE void T(tile)(const ont_gemm_block *p, const float *a, const float *b, float *sums, const ont_gemm_place *to,
                    const ahead *next, const int rows, const int vectors)
{
    ALONG_ROWS;
    vec sum[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
#define STEP \
    do { \
        vec b0 = load(b), b1 = vectors > 1 ? load(b + LANES) : b0; \
        for (int r = 0; r < rows; r++) { \
            vec x = SPREAD(ELEMENT(r)); \
            sum[r][0] = MULTIPLY(sum[r][0], x, b0); \
            if (vectors > 1) sum[r][1] = MULTIPLY(sum[r][1], x, b1); \
        } \
        NEXT_ELEMENTS; \
        b += COLUMNS; \
    } while (0)
    int64_t steps = p->k / DEPTH, k = 0;
    if (to) { /* the lines that will be written come while sums are made, those of a row at each step */
        const int64_t size = to->half ? 2 : 4, width = (to->turned ? rows : COLUMNS) * size;
        const char *c = to->c;
        for (int64_t last = least(steps, to->turned ? COLUMNS : rows); k < last; k++, c += to->ldc * size) {
            __builtin_prefetch(c, 1);
            __builtin_prefetch(c + width / 2, 1);
            __builtin_prefetch(c + width - 1, 1);
            STEP;
        }
    }
#if STORED
    (void)next;
#else
    int64_t last = least(steps, k + next->lines_a);
    for (const float *line = next->a; k < last; k++, line += LINE) {
        __builtin_prefetch(line, 0, 2);
        STEP;
    }
    last = least(steps, k + next->lines_b);
    for (const float *line = next->b; k < last; k++, line += LINE) {
        __builtin_prefetch(line, 0, 2);
        STEP;
    }
#endif
#pragma GCC unroll 4
    for (; k < steps; k++) STEP;
#undef STEP
    if (p->add) /* chunks are summed apart: errors of a long sum stay small */
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] += load(sums + r * p->ld + v * LANES);
#if STORED
    if (to && to->turned) {
        write_turned(to, sum, rows);
        return;
    }
#endif
    for (int r = 0; r < rows; r++)
        if (to) {
            W(write)(to, r, sum[r]);
        } else {
            for (int v = 0; v < vectors; v++) store(sums + r * p->ld + v * LANES, sum[r][v]);
        }
}

#define TILE(rows) \
    static void T(tile_##rows)(const ont_gemm_block *p, const float *a, const float *b, float *sums, \
                               const ont_gemm_place *to, const ahead *next) \
    { \
        T(tile)(p, a, b, sums, to, next, rows, 2); \
    } \
    static void T(narrow_##rows)(const ont_gemm_block *p, const float *a, const float *b, float *sums, \
                                 const ont_gemm_place *to, const ahead *next) \
    { \
        (void)to; \
        T(tile)(p, a, b, sums, NULL, next, rows, 1); \
    }
#define NAME(rows) T(tile_##rows),
#define NARROW(rows) T(narrow_##rows),
ALL_TILES(TILE)
/* By the number of vectors, less one, and of rows: a last panel that is no more than half full costs half. */
static const tile_fn T(tiles)[2][ROWS + 1] = {{NULL, ALL_TILES(NARROW)}, {NULL, ALL_TILES(NAME)}};
#undef TILE
#undef NAME
#undef NARROW

#if STORED
/* Two elements of A, side by side in all of a vector. */
INLINE vec T(pair)(const float *a, int64_t n)
{
    typedef int64_t words __attribute__((vector_size(sizeof(vec))));
    int64_t both = 0;
    memcpy(&both, a, (size_t)n * sizeof *a);
    return (vec)(both + (words){0});
}

/* Columns of which two steps of k make a vector: sums over even k lie beside those over odd k. */
INLINE void T(rest_tile)(const ont_gemm_block *p, const float *a, const float *b, float *sums, const int rows)
{
    ALONG_ROWS;
    vec sum[ROWS];
    for (int r = 0; r < rows; r++) sum[r] = (vec){0};
    int64_t k = 0;
#pragma GCC unroll 4
    for (; k + 2 <= p->k; k += 2, b += LANES) {
        vec line = load(b);
        for (int r = 0; r < rows; r++) sum[r] = MULTIPLY(sum[r], T(pair)(ELEMENT(r), 2), line);
        for (int g = 0; 3 * g < rows; g++) row[g] += 2;
    }
    for (int r = 0; r < rows; r++) {
        if (k < p->k) sum[r] = MULTIPLY(sum[r], T(pair)(ELEMENT(r), 1), load(b));
        float *to = sums + r * p->ld;
        for (int j = 0; j < REST; j++) to[j] = sum[r][2 * j] + sum[r][2 * j + 1] + (p->add ? to[j] : 0);
    }
}

#define REST_TILE(rows) \
    static void T(rest_##rows)(const ont_gemm_block *p, const float *a, const float *b, float *sums, \
                               const ont_gemm_place *to, const ahead *next) \
    { \
        (void)to, (void)next; \
        T(rest_tile)(p, a, b, sums, rows); \
    }
#define NAME(rows) T(rest_##rows),
ALL_TILES(REST_TILE)
static const tile_fn T(rests)[ROWS + 1] = {NULL, ALL_TILES(NAME)};
#undef REST_TILE
#undef NAME

/* Each tile's rows of A stay in the first cache, and all panels of B pass by. */
static void T(multiply)(const ont_gemm_block *p)
{
    int64_t whole = p->last && !p->place.stream ? p->n / COLUMNS * COLUMNS : 0;
    for (int64_t i = 0; i < p->m; i += ROWS) {
        const float *a = (const float *)p->a + i * p->lda;
        int64_t rows = least(ROWS, p->m - i);
        for (int64_t j = 0; j < p->n; j += COLUMNS) {
            ont_gemm_place to = moved(&p->place, i, j);
            const tile_fn tile = p->paired && p->n - j <= REST ? T(rests)[rows] : T(tiles)[p->n - j > LANES][rows];
            tile(p, a, (const float *)p->b + j * p->k, p->sums + i * p->ld + j, j < whole ? &to : NULL, NULL);
        }
    }
    if (!p->last || whole == p->n) return;
    ont_gemm_place rest = moved(&p->place, 0, whole);
    (p->place.turned ? put_turned : W(put))(p->sums + whole, p->ld, p->m, p->n - whole, &rest);
}
#else
/* Panels of A pass by each panel of B; meanwhile the next of each come nearer. Whole tiles go to their place at once,
 * but what passes the caches goes in long rows. */
static void T(multiply)(const ont_gemm_block *p)
{
    int64_t steps = p->k / DEPTH, panels = (p->m + ROWS - 1) / ROWS, lines_a = steps * ROWS / LINE,
            lines_b = steps * COLUMNS / LINE, share = (lines_b + panels - 1) / panels,
            at_once = p->last && !p->place.stream && !p->place.turned ? p->n / COLUMNS * COLUMNS : 0;
    for (int64_t j = 0; j < p->n; j += COLUMNS) {
        const float *b = (const float *)p->b + j * steps;
        for (int64_t i = 0, panel = 0; i < p->m; i += ROWS, panel++) {
            const float *a = (const float *)p->a + i * steps;
            ont_gemm_place to = moved(&p->place, i, j);
            ahead next = {0};
            if (!j && i + ROWS < p->m) next.a = a + ROWS * steps, next.lines_a = lines_a;
            if (j + COLUMNS < p->n)
                next.b = b + COLUMNS * steps + panel * share * LINE,
                next.lines_b = least(share, lines_b - panel * share);
            const tile_fn tile = T(tiles)[p->n - j > LANES][least(ROWS, p->m - i)];
            tile(p, a, b, p->sums + i * p->ld + j, j < at_once ? &to : NULL, &next);
        }
    }
    if (!p->last || at_once == p->n) return;
    ont_gemm_place rest = moved(&p->place, 0, at_once);
    (p->place.turned ? put_turned : W(put))(p->sums + at_once, p->ld, p->m, p->n - at_once, &rest);
}

#endif

#undef ALONG_ROWS
#undef ELEMENT
#undef NEXT_ELEMENTS
#undef W
#undef STORED
#undef T
#undef DEPTH
#undef SPREAD
#undef MULTIPLY
