/*
 * GEMM over blocks of attention in float32 on the calling thread, compiled once per instruction set.
 * flash_native.c calls it with operands packed in scratch: contiguous, within the L2 cache, rows padded to whole
 * vectors.
 */
#ifndef ONT_SIMD_ATTENTION_GEMM_H
#define ONT_SIMD_ATTENTION_GEMM_H

#include <stdbool.h>
#include <stdint.h>

enum { ONT_ATTENTION_LANES = 16 }; /* float32 in the longest vector of any instruction set; rows are padded to it */

/*
 * Which operand is the block of scores under a causal mask: its masked part is not computed (C), or not summed, being
 * zero (A). Row r of the scores sees columns below r + causal_end.
 */
typedef enum ont_causal_operand {
    ONT_CAUSAL_NONE,    /* no mask in this block: all of it is computed */
    ONT_CAUSAL_C,       /* C = Q K^T, (queries, keys) */
    ONT_CAUSAL_A,       /* A = P, (queries, keys) */
    ONT_CAUSAL_A_TRANS, /* A = P^T, (keys, queries) */
} ont_causal_operand;

/*
 * C (m, n) = factor * A B, or factor * (C + A B) with `add`. A is (m, k), or stored as (k, m) with `trans_a`; B is
 * (k, n). n is a multiple of ONT_ATTENTION_LANES. lda, ldb, ldc: elements from row to row as stored.
 */
typedef struct ont_attention_gemm {
    int64_t m, n, k, lda, ldb, ldc;
    bool trans_a, add;
    ont_causal_operand causal;
    int64_t causal_end;
    float factor;
    const float *a, *b;
    float *c;
    void (*overlap)(void *context); /* called before each tile, for prefetches; may be NULL */
    void *context;
} ont_attention_gemm;

typedef struct ont_attention_gemm_f32 {
    void (*gemm)(const ont_attention_gemm *p);
    /* y (width, ld) = x^T, x (rows, width) with `stride` from row to row; columns from `rows` up to a multiple of
     * ONT_ATTENTION_LANES are 0. */
    void (*transpose)(const float *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld);
    /* y (rows, ld) = factor * x; each row is padded with 0 up to a multiple of ONT_ATTENTION_LANES. */
    void (*copy)(const float *x, int64_t stride, int64_t rows, int64_t width, float factor, float *y, int64_t ld);
    /* y (rows, width), `stride` from row to row, = x (rows, ld); += with `add`. */
    void (*store)(const float *x, int64_t ld, int64_t rows, int64_t width, bool add, float *y, int64_t stride);
} ont_attention_gemm_f32;

/*
 * The same for bfloat16 operands with float32 sums, by vdpbf16ps. A 32-bit word holds two elements that follow each
 * other along k: of one row, or, with `vnni` in the name, of two rows. `gemm` counts k, lda and ldb in words, and
 * causal_end in elements.
 */
typedef struct ont_attention_gemm_bf16 {
    void (*gemm)(const ont_attention_gemm *p);
    /* y (rows, ld) words = x (rows, width), padded with 0; width is even */
    void (*copy)(const uint16_t *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld);
    /* y (ceil(rows / 2), ld) words of two rows = x (rows, width), padded with 0; ld is a multiple of
     * ONT_ATTENTION_LANES */
    void (*copy_vnni)(const uint16_t *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld);
    /* The same with x float32, rounded to bfloat16; `width` is rounded up to a vector, with 0 behind it. */
    void (*to_bf16)(const float *x, int64_t ldx, int64_t rows, int64_t width, float *y, int64_t ld);
    void (*to_bf16_vnni)(const float *x, int64_t ldx, int64_t rows, int64_t width, float *y, int64_t ld);
} ont_attention_gemm_bf16;

/* NULL where the processor has no AVX512-BF16. */
const ont_attention_gemm_bf16 *ont_simd_attention_gemm_bf16(void);
const ont_attention_gemm_f32 *ont_simd_attention_gemm_f32(void);

#endif
