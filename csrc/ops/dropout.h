/*
 * Dropout's choice as devices need it: how a word of random bits decides, and the packed layout by which a node draws
 * the words of torch's CUDA kernel in place of a stream of ours.
 */
#ifndef ONT_OPS_DROPOUT_H
#define ONT_OPS_DROPOUT_H

#include "ops/op.h"

/* Bits of a layout: 0 to 39 the first block of four words, 40 to 59 blocks of threads less one, 60 and 61 log2 of the
 * lanes. */
enum { ONT_LAYOUT_BLOCKS = 40, ONT_LAYOUT_LANES = 60, ONT_LAYOUT_THREADS = 256 };
#define ONT_LAYOUT_TORCH (UINT64_C(1) << 63)

/* With 0 < ratio <= 1: words below `threshold` drop, what is left is multiplied by `scale`. */
typedef struct ont_dropout_rule {
    uint32_t threshold; /* the largest word where the ratio is 1 */
    double scale;       /* rounded to float32 where the numbers are ours, or the elements' type has no more */
} ont_dropout_rule;
ont_dropout_rule ont_dropout_rule_of(const ont_node *node, double ratio);

/* Blocks of threads that torch launches at most where it draws random numbers on the graph's device; 0: not known, or
 * the CPU. */
int32_t ont_random_blocks(const ont_graph *g);

#endif
