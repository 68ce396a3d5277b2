/*
 * The lowest entries of a row, chosen and ordered as libstdc++ does. Among equal entries it picks exactly those that
 * torch.topk picks on the CPU, which decide the routes of a mixture of experts and where gradients go.
 */
#ifndef ONT_OPS_INTROSELECT_H
#define ONT_OPS_INTROSELECT_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ont_ranked {
    int64_t rank, at;
} ont_ranked;

/* Moves the k lowest of n ranks to the front, 0 <= k <= n; in order where `sorted`, or where k is at most n / 64. */
void ont_lowest_first(ont_ranked *x, int64_t n, int64_t k, bool sorted);

#endif
