/*
 * Dropout for devices: how random bits decide, and the packed description of the random words that PyTorch's CUDA
 * kernel draws, in place of a stream of our own.
 */
#ifndef ONT_OPS_DROPOUT_H
#define ONT_OPS_DROPOUT_H

#include "ops/op.h"

/* Bits of a layout: 0 to 39 the first block of four words, 40 to 59 the number of thread blocks minus 1, 60 and 61 log2
 * of the vector size. */
enum { ONT_LAYOUT_BLOCKS = 40, ONT_LAYOUT_LANES = 60, ONT_LAYOUT_THREADS = 256 };
#define ONT_LAYOUT_TORCH (UINT64_C(1) << 63)

/* For 0 < ratio <= 1: an element is dropped where its random word is below `threshold`, else multiplied by `scale`. */
typedef struct ont_dropout_rule {
    uint32_t threshold; /* UINT32_MAX where the ratio is 1 */
    double scale;       /* rounded to float32 for our own streams, or where the elements have no more precision */
} ont_dropout_rule;
ont_dropout_rule ont_dropout_rule_of(const ont_node *node, double ratio);

/* The largest number of thread blocks that PyTorch launches for random numbers on the graph's device; 0: not known, or
 * the CPU. */
int32_t ont_random_blocks(const ont_graph *g);

#endif
