/*
 * The product of attention_product.inc.c, once for float32 and once for pairs of bfloat16: T(name), STEP (elements of a
 * sum in a word) and MULTIPLY(sum, x, line) say which. Included by nothing else.
 */
/* Rows [i, i + rows) of C, `vectors` vectors from column j on. */
INLINE void T(tile)(const ont_tile_product *p, int64_t i, int64_t j, const int rows, const int vectors,
                    const bool trans)
{
    int64_t first = p->part == ONT_TILE_SUM_SEEING ? least(p->k, most(0, i - p->edge + 1) / STEP) : 0;
    int64_t last = p->part == ONT_TILE_SUM_SEEN ? least(p->k, (i + rows - 1 + p->edge + STEP - 1) / STEP) : p->k;
    const float *a = p->a + (trans ? i + first * p->lda : i * p->lda + first), *b = p->b + j + first * p->ldb;
    float *c = p->c + i * p->ldc + j;
    if (p->meanwhile) p->meanwhile(p->context);
    vec sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = p->add ? load(c + r * p->ldc + v * LANES) : (vec){0};
    const int64_t step_m = trans ? 1 : p->lda, step_k = trans ? p->lda : 1;
    for (int64_t k = first; k < last; k++, a += step_k, b += p->ldb) {
        vec line[VECTORS];
        for (int v = 0; v < vectors; v++) line[v] = load(b + v * LANES);
        for (int r = 0; r < rows; r++) {
            vec x = spread(a + r * step_m);
            for (int v = 0; v < vectors; v++) sum[r][v] = MULTIPLY(sum[r][v], x, line[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(c + r * p->ldc + v * LANES, p->factor * sum[r][v]);
}

/* One panel of columns: tiles of `rows` rows, and what is left in smaller ones. */
INLINE void T(panel)(const ont_tile_product *p, int64_t j, const int rows, const int vectors, const bool trans)
{
    /* Rows above this one do not see the panel. */
    int64_t i = p->part == ONT_TILE_RESULT_SEEN ? least(p->m, most(0, j - p->edge + 1)) : 0;
    for (; i + rows <= p->m && p->m - i != rows + 2; i += rows) T(tile)(p, i, j, rows, vectors, trans);
    for (; i + 4 <= p->m; i += 4) T(tile)(p, i, j, 4, vectors, trans);
    for (; i + 2 <= p->m; i += 2) T(tile)(p, i, j, 2, vectors, trans);
    if (i < p->m) T(tile)(p, i, j, 1, vectors, trans);
}

INLINE void T(panels)(const ont_tile_product *p, const bool trans)
{
    int64_t j = 0;
    for (; j + VECTORS * LANES <= p->n; j += VECTORS * LANES) T(panel)(p, j, 6, VECTORS, trans);
#if defined(__AVX512F__)
    if (j + 3 * LANES <= p->n) T(panel)(p, j, 8, 3, trans);
    else if (j + 2 * LANES <= p->n) T(panel)(p, j, 12, 2, trans);
    else if (j < p->n) T(panel)(p, j, 12, 1, trans);
#endif
}

static void T(product)(const ont_tile_product *p)
{
    if (p->trans_a) T(panels)(p, true);
    else T(panels)(p, false);
}

#undef T
#undef STEP
#undef MULTIPLY
