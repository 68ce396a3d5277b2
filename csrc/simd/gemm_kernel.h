/*
 * The inner part of large products on the calling thread, compiled once per instruction set: operands laid out in
 * panels, products of panels, and results put in their place. device/tiled.c cuts a product into such blocks; this
 * knows memory only.
 *
 * A panel holds `rows` rows of A, or `columns` columns of B, element k of all of them side by side, and is filled up
 * with zeros. Sums are float32, over k in order.
 */
#ifndef ONT_SIMD_GEMM_KERNEL_H
#define ONT_SIMD_GEMM_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What one panel after the other is laid out from: `count` rows of k elements, or with `across` the same as (k, count);
 * ld: elements between rows as stored. */
typedef struct ont_gemm_source {
    const void *x;
    int64_t ld, count, k;
    bool across;
    bool paired;  /* of B, for a product that is */
    float *sums; /* not NULL: (count), to which all of k is added; of float32 with `across` */
} ont_gemm_source;

/* A result's place: c (m, n) = alpha sums + row, which may be NULL. */
typedef struct ont_gemm_place {
    void *c;
    int64_t ldc;
    const void *row;
    float alpha;
    bool half, half_row; /* bfloat16, else float32 */
    bool stream;         /* past the caches */
    bool turned;         /* c is (n, m), and the row is added along m */
} ont_gemm_place;

/*
 * sums (m, n) = A B, or with `add` sums + A B; in the end, with `last`, put in its place. ld is a multiple of the
 * kernel's columns and at least n. B is laid out, and so is A where lda is 0: else it is read as it is stored, (m, k).
 */
typedef struct ont_gemm_block {
    int64_t m, n, k;
    const void *a, *b;
    int64_t lda;
    float *sums;
    int64_t ld;
    bool add, last;
    bool paired; /* a last panel of B with a quarter of its columns or less has two steps of k side by side, and sums
                    over even and odd k; only where A is read as it is stored */
    ont_gemm_place place;
} ont_gemm_block;

typedef struct ont_gemm_kernel {
    int rows, columns; /* of a panel */
    int step;          /* k is laid out in multiples of it */
    int chunk;         /* of k, about: what a panel holds at a time */
    int element, laid; /* bytes of an element as stored, and laid out */
    bool direct;       /* takes an A that is not laid out, turned places, and sums while it lays out */
    void (*lay_a)(const ont_gemm_source *s, void *panels);
    void (*lay_b)(const ont_gemm_source *s, void *panels);
    void (*multiply)(const ont_gemm_block *b);
} ont_gemm_kernel;

/* Of float32; NULL below AVX2. */
const ont_gemm_kernel *ont_simd_gemm(void);
/*
 * Float32 operands taken as sums of two bfloat16 each, three products of which are summed: 2^-16 of the operands' size
 * off. NULL without tiles (AMX).
 */
const ont_gemm_kernel *ont_simd_gemm_split(void);
/* Of bfloat16, to bfloat16 or float32; NULL where the processor does not multiply pairs of them. */
const ont_gemm_kernel *ont_simd_gemm_pairs(void);

#endif
