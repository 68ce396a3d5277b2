/*
 * Products of blocks of attention in float32 on the calling thread, compiled once per instruction set.
 * ops/flash_tiles.c calls them with operands that it laid out in scratch: contiguous, short of a core's second cache,
 * rows padded to whole vectors.
 */
#ifndef ONT_SIMD_ATTENTION_PRODUCT_H
#define ONT_SIMD_ATTENTION_PRODUCT_H

#include <stdbool.h>
#include <stdint.h>

enum { ONT_TILE_LANES = 16 }; /* the longest vector of any set */

/*
 * What of a causal block is computed. Row r of the scores sees columns below r + edge; what is left out of sums is zero
 * in A, what is left out of the result is not written.
 */
typedef enum ont_tile_part {
    ONT_TILE_ALL,
    ONT_TILE_RESULT_SEEN, /* C is the scores */
    ONT_TILE_SUM_SEEN,    /* A is the scores: m counts rows */
    ONT_TILE_SUM_SEEING,  /* A is the scores, transposed: m counts columns */
} ont_tile_part;

/*
 * C (m, n) = factor A B, or factor (C + A B) with `add`. n is a multiple of ONT_TILE_LANES; A is (m, k), or with
 * `trans_a` stored as (k, m); B is (k, n). ld: elements between rows as stored.
 */
typedef struct ont_tile_product {
    int64_t m, n, k, lda, ldb, ldc;
    bool trans_a, add;
    ont_tile_part part;
    int64_t edge;
    float factor;
    const float *a, *b;
    float *c;
    void (*meanwhile)(void *context); /* called before each tile; may be NULL */
    void *context;
} ont_tile_product;

typedef struct ont_tile_loops {
    void (*product)(const ont_tile_product *p);
    /* y (width, ld) = transposed x of `rows` rows `stride` apart; columns from `rows` up to a multiple of
     * ONT_TILE_LANES are 0. */
    void (*transpose)(const float *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld);
    /* y (rows, ld) = factor x, the rest of each row up to a multiple of ONT_TILE_LANES 0. */
    void (*copy)(const float *x, int64_t stride, int64_t rows, int64_t width, float factor, float *y, int64_t ld);
    /* y of `rows` rows `stride` apart += x (rows, ld), or = where not `add`. */
    void (*put)(const float *x, int64_t ld, int64_t rows, int64_t width, bool add, float *y, int64_t stride);
} ont_tile_loops;

/*
 * The same for bfloat16 with sums in float32, where the processor multiplies pairs. A word is two elements that follow
 * each other along k: of a row, or with `joined` in the name, of two rows. Products count k, A and B in words; edge
 * counts elements.
 */
typedef struct ont_tile_pairs {
    void (*product)(const ont_tile_product *p);
    /* y (rows, ld) = x, the rest of each row 0; a row of x has no odd element */
    void (*copy)(const uint16_t *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld);
    /* y (rows / 2 rounded up, ld) = x, the rest 0; ld is a multiple of ONT_TILE_LANES */
    void (*copy_joined)(const uint16_t *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld);
    /* The same of float32, rounded: up to `width` rounded up to a vector of x, 0 from width on */
    void (*narrow)(const float *x, int64_t ldx, int64_t rows, int64_t width, float *y, int64_t ld);
    void (*narrow_joined)(const float *x, int64_t ldx, int64_t rows, int64_t width, float *y, int64_t ld);
} ont_tile_pairs;

/* NULL where the processor has no such products. */
const ont_tile_pairs *ont_simd_tile_pairs(void);
/* Loops of the running instruction set; NULL where a library's products are faster. */
const ont_tile_loops *ont_simd_tiles(void);

#endif
