/*
 * Small GEMMs, compiled once per instruction set; ONT_ISA names it. See gemm_small.h. Accumulators of a micro-tile stay
 * in registers over all of k.
 */
#include "simd/gemm/gemm_small.h"

#include "simd/lanes.h"

enum { MR = 6 }; /* rows of a micro-tile, whose columns are one or two vectors */

/* Rows [i, i + rows) of C, `vectors` vectors from column j on. op(A)[r][k] is a[r * step_m + k * step_k]. */
INLINE void microkernel(const ont_gemm_small *p, int64_t step_m, int64_t step_k, int64_t i, int64_t j, const int rows,
                        const int vectors)
{
    const float *a = p->a + i * step_m, *b = p->b + j;
    vec sum[MR][2];
    for (int v = 0; v < vectors; v++) {
        vec start = p->bias ? load(p->bias + j + v * LANES) : (vec){0};
        for (int r = 0; r < rows; r++) sum[r][v] = start;
    }
    for (int64_t k = 0; k < p->k; k++, a += step_k, b += p->ldb) {
        vec b0 = load(b), b1 = vectors > 1 ? load(b + LANES) : b0;
        for (int r = 0; r < rows; r++) {
            float x = a[r * step_m];
            sum[r][0] += x * b0;
            if (vectors > 1) sum[r][1] += x * b1;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(p->c + (i + r) * p->ldc + j + v * LANES, sum[r][v]);
}

/* All rows of C, `vectors` vectors from column j on. */
INLINE void column_of_tiles(const ont_gemm_small *p, int64_t step_m, int64_t step_k, int64_t j, const int vectors)
{
    int64_t i = 0;
    for (; i + MR <= p->m; i += MR) microkernel(p, step_m, step_k, i, j, MR, vectors);
    for (; i + 2 <= p->m; i += 2) microkernel(p, step_m, step_k, i, j, 2, vectors);
    if (i < p->m) microkernel(p, step_m, step_k, i, j, 1, vectors);
}

/* The last vector may overlap the one before: the same elements are computed and stored twice. */
static void single(const ont_gemm_small *p)
{
    int64_t step_m = p->trans_a ? 1 : p->lda, step_k = p->trans_a ? p->lda : 1, j = 0;
    for (; j + 2 * LANES <= p->n; j += 2 * LANES) column_of_tiles(p, step_m, step_k, j, 2);
    if (j + LANES <= p->n) {
        column_of_tiles(p, step_m, step_k, j, 1);
        j += LANES;
    }
    if (j < p->n) column_of_tiles(p, step_m, step_k, p->n - LANES, 1);
}

INLINE void batch_with_sizes(const ont_gemm_batch *p, const int64_t m, const int64_t n, const int64_t k,
                             const int64_t b_column)
{
    const float *a = p->a, *b = p->b;
    float *restrict c = p->c;
    for (int64_t i = 0; i < p->count; i++, a += p->next_a, b += p->next_b)
        for (int64_t r = 0; r < m; r++, c += n) {
            float sum[ONT_GEMM_BATCH_MAX_N] = {0};
            for (int64_t t = 0; t < k; t++) {
                float x = a[r * p->a_row + t * p->a_column];
                for (int64_t j = 0; j < n; j++) sum[j] += x * b[t * p->b_row + j * b_column];
            }
            for (int64_t j = 0; j < n; j++) c[j] = p->alpha * sum[j];
        }
}

/* Constant n, and constant m, n, k for square matrices up to 4, let the compiler unroll. */
INLINE void batch_by_size(const ont_gemm_batch *p, const int64_t b_column)
{
    bool square = p->m == p->n && p->k == p->n;
    switch (p->n) {
    case 1: batch_with_sizes(p, p->m, 1, p->k, b_column); return;
    case 2: square ? batch_with_sizes(p, 2, 2, 2, b_column) : batch_with_sizes(p, p->m, 2, p->k, b_column); return;
    case 3: square ? batch_with_sizes(p, 3, 3, 3, b_column) : batch_with_sizes(p, p->m, 3, p->k, b_column); return;
    case 4: square ? batch_with_sizes(p, 4, 4, 4, b_column) : batch_with_sizes(p, p->m, 4, p->k, b_column); return;
    case 5: batch_with_sizes(p, p->m, 5, p->k, b_column); return;
    case 6: batch_with_sizes(p, p->m, 6, p->k, b_column); return;
    case 7: batch_with_sizes(p, p->m, 7, p->k, b_column); return;
    default: batch_with_sizes(p, p->m, 8, p->k, b_column); return;
    }
}

static void batch(const ont_gemm_batch *p)
{
    if (p->b_column == 1)
        batch_by_size(p, 1);
    else
        batch_by_size(p, p->b_column);
}

const ont_gemm_small_kernels PASTE(ont_gemm_small_kernels_, ONT_ISA) = {single, batch};
