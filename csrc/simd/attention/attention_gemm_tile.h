/*
 * The micro-kernel of attention_gemm.inc.c, which includes this file for float32 and for bfloat16. The includer defines
 *   T(name)                    adds the suffix of the dtype
 *   K_PER_WORD                 elements along k in a 32-bit word: 1 for float32, 2 for bfloat16
 *   MULTIPLY(sum, x, b_row)    sum + x * b_row
 */
/* C[i .. i + rows)[j .. j + vectors * LANES). */
INLINE void T(tile)(const ont_attention_gemm *p, int64_t i, int64_t j, const int rows, const int vectors,
                    const bool trans)
{
    int64_t k_begin = p->causal == ONT_CAUSAL_A_TRANS
                          ? min_i64(p->k, max_i64(0, i - p->causal_end + 1) / K_PER_WORD)
                          : 0;
    int64_t k_end = p->causal == ONT_CAUSAL_A
                        ? min_i64(p->k, (i + rows - 1 + p->causal_end + K_PER_WORD - 1) / K_PER_WORD)
                        : p->k;
    const float *a = p->a + (trans ? i + k_begin * p->lda : i * p->lda + k_begin), *b = p->b + j + k_begin * p->ldb;
    float *c = p->c + i * p->ldc + j;
    if (p->overlap) p->overlap(p->context);
    vec sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = p->add ? load(c + r * p->ldc + v * LANES) : (vec){0};
    const int64_t stride_m = trans ? 1 : p->lda, stride_k = trans ? p->lda : 1;
    for (int64_t k = k_begin; k < k_end; k++, a += stride_k, b += p->ldb) {
        vec b_row[VECTORS];
        for (int v = 0; v < vectors; v++) b_row[v] = load(b + v * LANES);
        for (int r = 0; r < rows; r++) {
            vec x = broadcast(a + r * stride_m);
            for (int v = 0; v < vectors; v++) sum[r][v] = MULTIPLY(sum[r][v], x, b_row[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(c + r * p->ldc + v * LANES, p->factor * sum[r][v]);
}

/* One panel of columns: tiles of `rows` rows, and the remaining rows in smaller ones. */
INLINE void T(panel)(const ont_attention_gemm *p, int64_t j, const int rows, const int vectors, const bool trans)
{
    /* No query above row i sees the panel's keys. */
    int64_t i = p->causal == ONT_CAUSAL_C ? min_i64(p->m, max_i64(0, j - p->causal_end + 1)) : 0;
    for (; i + rows <= p->m && p->m - i != rows + 2; i += rows) T(tile)(p, i, j, rows, vectors, trans);
    for (; i + 4 <= p->m; i += 4) T(tile)(p, i, j, 4, vectors, trans);
    for (; i + 2 <= p->m; i += 2) T(tile)(p, i, j, 2, vectors, trans);
    if (i < p->m) T(tile)(p, i, j, 1, vectors, trans);
}

INLINE void T(panels)(const ont_attention_gemm *p, const bool trans)
{
    int64_t j = 0;
    for (; j + VECTORS * LANES <= p->n; j += VECTORS * LANES) T(panel)(p, j, 6, VECTORS, trans);
#if defined(__AVX512F__)
    if (j + 3 * LANES <= p->n) T(panel)(p, j, 8, 3, trans);
    else if (j + 2 * LANES <= p->n) T(panel)(p, j, 12, 2, trans);
    else if (j < p->n) T(panel)(p, j, 12, 1, trans);
#endif
}

static void T(gemm)(const ont_attention_gemm *p)
{
    if (p->trans_a) T(panels)(p, true);
    else T(panels)(p, false);
}

#undef T
#undef K_PER_WORD
#undef MULTIPLY
