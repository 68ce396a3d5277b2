/*
 * The lowest of a row, as the C++ library of GNU picks and orders them: among equals exactly those that torch's topk
 * has on the CPU, where they are routes of a mixture of experts, and where gradients go.
 */
#ifndef ONT_OPS_INTROSELECT_H
#define ONT_OPS_INTROSELECT_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ont_ranked {
    int64_t rank, at;
} ont_ranked;

/* Moves the k lowest ranks of n to the front, 0 <= k <= n; in order where `sorted`, or k is at most n / 64. */
void ont_lowest_first(ont_ranked *x, int64_t n, int64_t k, bool sorted);

#endif
