/*
 * The single-threaded part of the native GEMM, compiled once per instruction set: packing of operands into panels, and
 * the macro-kernel that multiplies packed panels. device/gemm_native.c splits a GEMM into such blocks. Loop order: Goto
 * and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008. MC, NC, KC, MR, NR, KR are named as in
 * BLIS.
 *
 * A panel holds MR rows of op(A), or NR columns of op(B). For each k it stores the MR (NR) elements next to each other;
 * missing rows or columns are zero. Accumulators are float32, summed over k in increasing order.
 */
#ifndef ONT_SIMD_GEMM_KERNEL_H
#define ONT_SIMD_GEMM_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An operand to pack: `count` rows of op(A), or columns of op(B), with k elements each. */
typedef struct ont_gemm_pack_source {
    const void *x; /* (count, k), or (k, count) with `mn_major` */
    int64_t ld;    /* elements between stored rows */
    int64_t count, k;
    bool mn_major; /* elements of one k are contiguous: A transposed, or B not transposed */
    bool interleave_tail; /* B only: see ont_gemm_block */
    float *k_sums; /* (count), or NULL: the elements are added to it over k. Only float32 with `mn_major`. */
} ont_gemm_pack_source;

/* c (m, n) = alpha * accumulators + bias, or with `adds_to_c` the old c plus that */
typedef struct ont_gemm_epilogue {
    void *c; /* (m, n), or (n, m) with `trans_c` */
    int64_t ldc;
    const void *bias; /* along a row of c as stored: (n), or (m) with `trans_c`; may be NULL */
    float alpha;
    bool c_is_bf16, bias_is_bf16; /* bfloat16; float32 otherwise */
    bool nontemporal; /* stores bypass the caches */
    bool trans_c;
    bool adds_to_c; /* only with bfloat16 operands and float32 c, without `nontemporal` */
} ont_gemm_epilogue;

/*
 * One call of the macro-kernel: acc = op(A) op(B), plus the old acc with `accumulate`. With `last_k`, this is the last
 * block of k, and the epilogue writes the result.
 */
typedef struct ont_gemm_block {
    int64_t m, n, k;
    const void *a; /* packed panels; as stored, (m, k), where lda is not 0 */
    const void *b; /* packed panels */
    int64_t lda;   /* 0: A is packed */
    float *acc;    /* (m, n) */
    int64_t ld_acc; /* a multiple of NR, at least n */
    bool accumulate, last_k;
    /*
     * Only with unpacked A: a last panel of B with at most NR / 4 columns stores two steps of k next to each other, so
     * that one vector holds both. Even and odd k are summed separately, then added.
     */
    bool interleave_tail;
    ont_gemm_epilogue epilogue;
} ont_gemm_block;

typedef struct ont_gemm_kernel {
    int mr, nr; /* rows of a panel of A, columns of a panel of B */
    int kr;     /* k is packed in multiples of it */
    int kc;     /* preferred block of k */
    int element_size, packed_size; /* bytes of an element as stored, and packed */
    bool is_full; /* supports unpacked A, trans_c and k_sums */
    void (*pack_a)(const ont_gemm_pack_source *s, void *panels);
    void (*pack_b)(const ont_gemm_pack_source *s, void *panels);
    void (*multiply)(const ont_gemm_block *b); /* the macro-kernel */
} ont_gemm_kernel;

/* float32; NULL without AVX2. */
const ont_gemm_kernel *ont_simd_gemm(void);
/*
 * float32 emulated by three bfloat16 products: each operand is split into a high and a low bfloat16, and the product of
 * the low parts is dropped. Relative error of an operand: 2^-16. NULL without AMX.
 */
const ont_gemm_kernel *ont_simd_gemm_bf16x3(void);
/* bfloat16 operands, bfloat16 or float32 result; NULL without AVX512-BF16. */
const ont_gemm_kernel *ont_simd_gemm_bf16(void);

#endif
