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

typedef void (*ont_product_loop)(const ont_product_part *p);

ont_product_loop ont_simd_product(void);

#endif
