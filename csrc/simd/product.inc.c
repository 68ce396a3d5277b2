/*
 * The loop of small products, compiled once per instruction set with ONT_ISA naming it. See product.h. Vectors are the
 * compiler's; memory has no alignment beyond that of float. Sums of a tile stay in registers over all of k.
 */
#include "simd/product.h"

#include "simd/lanes.h"

enum { ROWS = 6 }; /* of a tile: twelve sums, or six */

/* Rows [i, i + rows) of C, `vectors` vectors from column j on. A's element (r, k) is a[r * step_m + k * step_k]. */
INLINE void tile(const ont_product_part *p, int64_t step_m, int64_t step_k, int64_t i, int64_t j, const int rows,
                 const int vectors)
{
    const float *a = p->a + i * step_m, *b = p->b + j;
    vec sum[ROWS][2];
    for (int v = 0; v < vectors; v++) {
        vec start = p->row ? load(p->row + j + v * LANES) : (vec){0};
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

INLINE void tiles_of_rows(const ont_product_part *p, int64_t step_m, int64_t step_k, int64_t j, const int vectors)
{
    int64_t i = 0;
    for (; i + ROWS <= p->m; i += ROWS) tile(p, step_m, step_k, i, j, ROWS, vectors);
    for (; i + 2 <= p->m; i += 2) tile(p, step_m, step_k, i, j, 2, vectors);
    if (i < p->m) tile(p, step_m, step_k, i, j, 1, vectors);
}

/* The last vector may overlap the one before: the same sums are made and stored again. */
static void one(const ont_product_part *p)
{
    int64_t step_m = p->trans_a ? 1 : p->lda, step_k = p->trans_a ? p->lda : 1, j = 0;
    for (; j + 2 * LANES <= p->n; j += 2 * LANES) tiles_of_rows(p, step_m, step_k, j, 2);
    if (j + LANES <= p->n) {
        tiles_of_rows(p, step_m, step_k, j, 1);
        j += LANES;
    }
    if (j < p->n) tiles_of_rows(p, step_m, step_k, p->n - LANES, 1);
}

INLINE void products(const ont_product_batch *p, const int64_t m, const int64_t n, const int64_t k,
                     const int64_t b_column)
{
    const float *a = p->a, *b = p->b;
    float *restrict c = p->c;
    for (int64_t i = 0; i < p->count; i++, a += p->next_a, b += p->next_b)
        for (int64_t r = 0; r < m; r++, c += n) {
            float sum[ONT_PRODUCT_FEW] = {0};
            for (int64_t t = 0; t < k; t++) {
                float x = a[r * p->a_row + t * p->a_column];
                for (int64_t j = 0; j < n; j++) sum[j] += x * b[t * p->b_row + j * b_column];
            }
            for (int64_t j = 0; j < n; j++) c[j] = p->alpha * sum[j];
        }
}

/* The compiler knows the number of columns, and of the usual matrices all sizes. */
INLINE void batch_of(const ont_product_batch *p, const int64_t b_column)
{
    bool square = p->m == p->n && p->k == p->n;
    switch (p->n) {
    case 1: products(p, p->m, 1, p->k, b_column); return;
    case 2: square ? products(p, 2, 2, 2, b_column) : products(p, p->m, 2, p->k, b_column); return;
    case 3: square ? products(p, 3, 3, 3, b_column) : products(p, p->m, 3, p->k, b_column); return;
    case 4: square ? products(p, 4, 4, 4, b_column) : products(p, p->m, 4, p->k, b_column); return;
    case 5: products(p, p->m, 5, p->k, b_column); return;
    case 6: products(p, p->m, 6, p->k, b_column); return;
    case 7: products(p, p->m, 7, p->k, b_column); return;
    default: products(p, p->m, 8, p->k, b_column); return;
    }
}

static void batch(const ont_product_batch *p)
{
    if (p->b_column == 1)
        batch_of(p, 1);
    else
        batch_of(p, p->b_column);
}

const ont_product_loops PASTE(ont_product_loops_, ONT_ISA) = {one, batch};
