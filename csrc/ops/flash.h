/*
 * What the kernels of FusedAttention that work in blocks share: flash.c, whose products are a library's, and
 * flash_tiles.c, whose products are our own. Functions are in flash.c.
 */
#ifndef ONT_OPS_FLASH_H
#define ONT_OPS_FLASH_H

#include "device/gemm.h"
#include "ops/fused_attention.h"
#include "simd/attention.h"
#include "simd/attention_product.h"
#include "simd/simd.h"

typedef struct ont_flash {
    ont_attention a;
    size_t z;                       /* bytes of an element */
    ont_dtype dtype;
    const ont_gemm_provider *gemm;  /* one of the two does the products */
    const ont_tile_loops *tiles;
    const ont_tile_pairs *pairs;    /* tiles: of bfloat16, else NULL */
    const ont_attention_loops *loops;
    const ont_simd_table *simd;
    int64_t row_block, column_block;
    int64_t slots;                  /* pieces of scratch: no more threads than these work at once */
    size_t slot_bytes;
    bool resident;                  /* tiles: all columns of a lead stay packed */
    int64_t targets[4];             /* gradient: output of each operand, -1: none */
    /* Leads apart for every gradient wanted, and those that some of them share. */
    int64_t apart[ONT_ATTENTION_LEADS], shared[ONT_ATTENTION_LEADS], n_apart, n_shared;
} ont_flash;

/* Rows [i0, i0 + m) and columns [j0, j0 + n) of lead l. */
typedef struct ont_flash_block {
    int64_t l, i0, m, j0, n;
} ont_flash_block;

/* What follows from the node alone; products, blocks and scratch are the caller's to choose. */
ont_status ont_flash_begin(const ont_node *node, ont_arena *arena, ont_flash **state) ONT_MUST_USE;
/* Row i of lead l of a view. `base` may be NULL: an absent operand. */
char *ont_flash_row_at(const ont_flash *s, int view, const void *base, int64_t l, int64_t i);
/* Dropout's choice: word e of the stream for element e of the scores, into kept (m, n). */
void ont_flash_choose_kept(const ont_call *call, const ont_flash *s, const ont_flash_block *k, uint8_t *kept);
/* Masks of row r of a block. */
ont_attention_row ont_flash_row_of(const ont_call *call, const ont_flash *s, const ont_flash_block *k, int64_t r,
                                   const uint8_t *kept);
bool ont_flash_is_empty(const ont_call *call, const ont_flash *s, int64_t l, int64_t i);
void ont_flash_zero_rows(const ont_flash *s, int view, void *base, int64_t l, int64_t first, int64_t last,
                         int64_t width);
/* Whether lead l is the first that writes to its gradient through `view`. */
bool ont_flash_is_first(const ont_flash *s, int view, int64_t l);

/* What one piece of the gradient's work is: blocks of one lead, and the gradients it adds to, NULL where none. */
typedef struct ont_flash_piece {
    int64_t l, i0, i1, j0, j1;
    int64_t next; /* the lead that the same thread takes behind it, or -1 */
    void *dq, *dk, *dv, *dbias;
} ont_flash_piece;

/* Runs a piece in the scratch of a slot. */
typedef void ont_flash_run_piece(const ont_call *call, const ont_flash *s, const ont_flash_piece *p, int64_t slot);

/* The gradient as pieces over all threads: of whole leads, or where these are too few by columns and then by rows. */
ont_status ont_flash_backward(const ont_call *call, ont_flash_run_piece *run);

/*
 * The kernels of flash_tiles.c: float32 with vectors of eight and more, bfloat16 where the processor multiplies pairs
 * of it.
 */
const char *ont_flash_tiles_accept(const ont_node *node);
ont_status ont_flash_tiles_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_flash_tiles_prepare_grad(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_flash_tiles_run(const ont_call *call);
ont_status ont_flash_tiles_run_grad(const ont_call *call);

#endif
