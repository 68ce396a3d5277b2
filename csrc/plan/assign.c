/*
 * Offsets for blocks with known lifetimes: greedy by size, best fit. See plan.h for the source.
 */
#include <stdlib.h>

#include "base/alloc.h"
#include "plan/plan.h"

static size_t aligned(size_t bytes)
{
    return (bytes + ONT_PLAN_ALIGN - 1) & ~(size_t)(ONT_PLAN_ALIGN - 1);
}

static int by_size(const void *a, const void *b)
{
    const ont_plan_block *x = *(ont_plan_block *const *)a, *y = *(ont_plan_block *const *)b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x < y ? -1 : x > y; /* total order, so that a plan does not depend on qsort */
}

/* Whether all blocks after one another, the longest that a plan can be, still have addresses. */
static ont_status check_total(const ont_plan_block *blocks, uint32_t n)
{
    size_t total = 0;
    for (uint32_t i = 0; i < n; i++)
        if (blocks[i].bytes > (size_t)PTRDIFF_MAX - ONT_PLAN_ALIGN ||
            __builtin_add_overflow(total, aligned(blocks[i].bytes), &total) || total > (size_t)PTRDIFF_MAX)
            return ont_fail(ONT_ENOMEM, "out of memory: the results of %u steps overflow the address space", n);
    return ONT_OK;
}

/* Offset of the tightest gap that holds `block` among `placed` (sorted by offset) that are alive with it. */
static size_t best_gap(const ont_plan_block *block, ont_plan_block *const *placed, uint32_t n)
{
    size_t end = 0, best = SIZE_MAX, best_gap_bytes = SIZE_MAX, want = aligned(block->bytes);
    for (uint32_t i = 0; i < n; i++) {
        const ont_plan_block *other = placed[i];
        if (other->last < block->first || other->first > block->last) continue;
        if (other->offset > end && other->offset - end >= want && other->offset - end < best_gap_bytes) {
            best = end;
            best_gap_bytes = other->offset - end;
        }
        size_t other_end = other->offset + aligned(other->bytes);
        if (other_end > end) end = other_end;
    }
    return best == SIZE_MAX ? end : best;
}

ont_status ont_plan_assign(ont_plan_block *blocks, uint32_t n, size_t *total)
{
    ONT_TRY(check_total(blocks, n));
    ont_plan_block **order = ont_calloc(n ? n : 1, sizeof *order);
    ont_plan_block **placed = ont_calloc(n ? n : 1, sizeof *placed);
    if (!order || !placed) {
        ont_free(order);
        ont_free(placed);
        return ONT_ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++) order[i] = &blocks[i];
    if (n) qsort(order, n, sizeof *order, by_size);
    size_t end = 0;
    for (uint32_t i = 0; i < n; i++) {
        ont_plan_block *block = order[i];
        block->offset = best_gap(block, placed, i);
        uint32_t at = i;
        for (; at && placed[at - 1]->offset > block->offset; at--) placed[at] = placed[at - 1];
        placed[at] = block;
        if (block->offset + aligned(block->bytes) > end) end = block->offset + aligned(block->bytes);
    }
    ont_free(order);
    ont_free(placed);
    *total = end;
    return ONT_OK;
}

size_t ont_plan_lower_bound(const ont_plan_block *blocks, uint32_t n, uint32_t n_steps, size_t *per_step)
{
    size_t most = 0;
    for (uint32_t t = 0; t < n_steps; t++) per_step[t] = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t t = blocks[i].first; t <= blocks[i].last && t < n_steps; t++) per_step[t] += aligned(blocks[i].bytes);
    for (uint32_t t = 0; t < n_steps; t++)
        if (per_step[t] > most) most = per_step[t];
    return most;
}
