/*
 * Products of panels and what becomes of their sums: part of gemm_kernel.inc.c, once for float32 and once for pairs of
 * bfloat16. T(name) names the functions, MULTIPLY(sum, a, line) is one step of k, write() and put() are before it.
 */
INLINE void T(tile)(const ont_gemm_block *p, const float *a, const float *b, float *sums, const ont_gemm_place *to,
                    const ahead *next, const int rows)
{
    vec sum[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = (vec){0};
#define STEP \
    do { \
        vec b0 = load(b), b1 = load(b + LANES); \
        for (int r = 0; r < rows; r++) { \
            vec x = SPREAD(a + r); \
            sum[r][0] = MULTIPLY(sum[r][0], x, b0); \
            sum[r][1] = MULTIPLY(sum[r][1], x, b1); \
        } \
        a += ROWS; \
        b += COLUMNS; \
    } while (0)
    int64_t steps = p->k / DEPTH, k = 0, last = least(steps, next->lines_a);
    for (const float *line = next->a; k < last; k++, line += LINE) {
        __builtin_prefetch(line, 0, 2);
        STEP;
    }
    last = least(steps, k + next->lines_b);
    for (const float *line = next->b; k < last; k++, line += LINE) {
        __builtin_prefetch(line, 0, 2);
        STEP;
    }
#pragma GCC unroll 2
    for (; k < steps; k++) STEP;
#undef STEP
    if (p->add) /* chunks are summed apart: errors of a long sum stay small */
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) sum[r][v] += load(sums + r * p->ld + v * LANES);
    for (int r = 0; r < rows; r++)
        if (to) {
            T(write)(to, r, sum[r]);
        } else {
            store(sums + r * p->ld, sum[r][0]);
            store(sums + r * p->ld + LANES, sum[r][1]);
        }
}

#define TILE(rows) \
    static void T(tile_##rows)(const ont_gemm_block *p, const float *a, const float *b, float *sums, \
                               const ont_gemm_place *to, const ahead *next) \
    { \
        T(tile)(p, a, b, sums, to, next, rows); \
    }
#define NAME(rows) T(tile_##rows),
ALL_TILES(TILE)
static const tile_fn T(tiles)[] = {NULL, ALL_TILES(NAME)};
#undef TILE
#undef NAME

/* Panels of A pass by each panel of B; meanwhile the next of each come nearer. Whole tiles go to their place at once,
 * but what passes the caches goes in long rows. */
static void T(multiply)(const ont_gemm_block *p)
{
    int64_t steps = p->k / DEPTH, panels = (p->m + ROWS - 1) / ROWS, lines_a = steps * ROWS / LINE,
            lines_b = steps * COLUMNS / LINE, share = (lines_b + panels - 1) / panels,
            at_once = p->last && !p->place.stream ? p->n / COLUMNS * COLUMNS : 0;
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
            T(tiles)[least(ROWS, p->m - i)](p, a, b, p->sums + i * p->ld + j, j < at_once ? &to : NULL, &next);
        }
    }
    if (!p->last || at_once == p->n) return;
    ont_gemm_place rest = moved(&p->place, 0, at_once);
    T(put)(p->sums + at_once, p->ld, p->m, p->n - at_once, &rest);
}

#undef T
#undef DEPTH
#undef SPREAD
#undef MULTIPLY
