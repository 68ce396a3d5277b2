/*
 * The k lowest of a row, selected and ordered exactly as libstdc++ does. So ties give the same elements as torch.topk
 * on the CPU, which decides the routing of a mixture of experts and which elements get gradients.
 */
#ifndef ONT_OPS_INTROSELECT_H
#define ONT_OPS_INTROSELECT_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ont_ranked {
    int64_t rank, at;
} ont_ranked;

/* Moves the k lowest ranks of n to the front, 0 <= k <= n; sorted with `sorted`, or where k <= n / 64. */
void ont_lowest_first(ont_ranked *x, int64_t n, int64_t k, bool sorted);

#endif
