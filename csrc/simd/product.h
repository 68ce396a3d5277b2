/*
 * Products of small float32 matrices on the calling thread, compiled once per instruction set: where calling a library
 * costs as much as the arithmetic. ops/matmul_small.c calls them; they know memory, no nodes.
 */
#ifndef ONT_SIMD_PRODUCT_H
#define ONT_SIMD_PRODUCT_H

#include <stdbool.h>
#include <stdint.h>

enum { ONT_PRODUCT_LANES = 16 }; /* the longest vector of any set */

/*
 * C (m, n) = A B + row, n >= ONT_PRODUCT_LANES; A is (m, k), or with `trans_a` stored as (k, m), B is (k, n); ld:
 * elements between rows as stored; row (n) may be NULL. k may be 0.
 */
typedef struct ont_product_part {
    int64_t m, n, k, lda, ldb, ldc;
    bool trans_a;
    const float *a, *b, *row;
    float *c;
} ont_product_part;

/*
 * `count` products C (m, n) = alpha A B, one behind the other, n <= ONT_PRODUCT_FEW. A's element (r, k) is
 * a[r * a_row + k * a_column], B's (k, j) b[k * b_row + j * b_column]; next: elements to the next matrix, 0 for the
 * same.
 */
enum { ONT_PRODUCT_FEW = 8 };
typedef struct ont_product_batch {
    int64_t m, n, k, a_row, a_column, b_row, b_column, count, next_a, next_b;
    float alpha;
    const float *a, *b;
    float *c;
} ont_product_batch;

typedef void (*ont_product_loop)(const ont_product_part *p);
typedef void (*ont_product_batch_loop)(const ont_product_batch *p);

typedef struct ont_product_loops {
    ont_product_loop one;
    ont_product_batch_loop batch;
} ont_product_loops;

const ont_product_loops *ont_simd_product(void);

#endif
