/*
 * The native GEMM: the loops of Goto and van de Geijn around the macro-kernel of gemm_kernel.h, multithreaded.
 *
 * C is divided into a grid of tiles, one for each thread; a tile into blocks of MC x NC; k into blocks of KC. Packed
 * operands of a block stay in L2. Bias, scale and nontemporal stores are an epilogue without a pass of their own. The
 * grid depends on the shape alone, so that a thread computes the same rows of a weight's gradient as it reads of the
 * weight, which are then in its cache.
 *
 * Two variants avoid packing of the larger operand (float32 only):
 *   unpacked_a  A is not transposed, so a micro-kernel reads its rows as stored
 *   trans_c     C' = op(B)' op(A)' is computed, for B transposed and larger than A (the weight of a linear layer); also
 *               where the last panel of columns would be narrow, because rows of a micro-tile may be any number
 */
#ifndef ONT_DEVICE_GEMM_NATIVE_H
#define ONT_DEVICE_GEMM_NATIVE_H

#include "device/gemm.h"
#include "simd/gemm/gemm_kernel.h"

typedef enum ont_gemm_packing {
    ONT_GEMM_PACK_A_ONCE, /* all of a tile's A at once, B in blocks of NC columns */
    ONT_GEMM_PACK_B_ONCE, /* all of a tile's B at once, A in blocks of MC rows */
    ONT_GEMM_PACK_PER_KC, /* both in blocks of KC, again for each block of C */
} ont_gemm_packing;

/* A GEMM with its division into tiles and blocks. */
typedef struct ont_gemm_native {
    ont_gemm gemm; /* with `trans_c`: of the transposed problem, except ldc */
    const ont_gemm_kernel *kernel;
    ont_dtype out; /* of C: float32, or the dtype of A */
    bool trans_c, unpacked_a;
    bool interleave_tail; /* see ont_gemm_block */
    ont_gemm_packing packing;
    int64_t grid_m, grid_n; /* tiles; one for each thread */
    int64_t tile_m, tile_n; /* size of a tile, at most */
    int64_t mc, nc, kc;
    size_t a_bytes, b_bytes; /* packed A and B of a tile */
    size_t k_sum_bytes;      /* sums of A over one KC */
    size_t tile_bytes;       /* all scratch of a tile */
    bool nontemporal;
} ont_gemm_native;

/* At most `threads` tiles. Requires m, n, k > 0, and beta 0; or 1 with bfloat16 operands and float32 C. */
void ont_gemm_native_init(ont_gemm_native *t, const ont_gemm_kernel *kernel, const ont_gemm *g, ont_dtype out,
                          int threads);
size_t ont_gemm_native_work_bytes(const ont_gemm_native *t);
/*
 * C = alpha op(A) op(B) + bias (n), which may be NULL, + beta C; `work` has ont_gemm_native_work_bytes(). sums (m),
 * where not NULL, is op(A) summed over k while A is packed: only for kernels with `unpacked_a`, and A transposed.
 */
void ont_gemm_native_run(const ont_gemm_native *t, const void *a, const void *b, const void *bias, void *c, float *sums,
                         void *work);

#endif
