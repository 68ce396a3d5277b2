/*
 * Assigns offsets to blocks with known live ranges: each block into the tightest gap, in several orders. See plan.h for
 * sources.
 */
#include <stdlib.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "plan/plan.h"

static size_t aligned(size_t bytes)
{
    return (bytes + ONT_PLAN_ALIGN - 1) & ~(size_t)(ONT_PLAN_ALIGN - 1);
}

/* MAX_COMPARISONS: of blocks, per initial order: about a millisecond. */
enum { N_ORDERS = 4, MAX_COMPARISONS = 1 << 20 };

typedef struct ordered {
    ont_plan_block *block;
    double weight[2]; /* sort keys, largest first */
} ordered;

static int by_weight(const void *a, const void *b)
{
    const ordered *x = a, *y = b;
    for (int i = 0; i < 2; i++)
        if (x->weight[i] != y->weight[i]) return x->weight[i] < y->weight[i] ? 1 : -1;
    if (x->block->first != y->block->first) return x->block->first < y->block->first ? -1 : 1;
    /* a total order, so that the plan does not depend on qsort() */
    return x->block < y->block ? -1 : x->block > y->block;
}

/* ENOMEM if the sum of all blocks, the longest possible plan, exceeds the address space. */
static ont_status check_total(const ont_plan_block *blocks, uint32_t n)
{
    size_t total = 0;
    for (uint32_t i = 0; i < n; i++)
        if (blocks[i].bytes > (size_t)PTRDIFF_MAX - ONT_PLAN_ALIGN ||
            __builtin_add_overflow(total, aligned(blocks[i].bytes), &total) || total > (size_t)PTRDIFF_MAX)
            return ont_fail(ONT_ENOMEM, "out of memory: the results of %u steps overflow the address space", n);
    return ONT_OK;
}

/* Offset of the tightest gap for `block` among the blocks of `placed` (sorted by offset) that are live with it. */
static size_t find_tightest_gap(const ont_plan_block *block, ont_plan_block *const *placed, uint32_t n)
{
    ONT_ASSERT(block->first <= block->last);
    size_t end = 0, best = SIZE_MAX, best_bytes = SIZE_MAX, needed = aligned(block->bytes);
    for (uint32_t i = 0; i < n; i++) {
        const ont_plan_block *other = placed[i];
        if (other->last < block->first || other->first > block->last) continue;
        if (other->offset > end && other->offset - end >= needed && other->offset - end < best_bytes) {
            best = end;
            best_bytes = other->offset - end;
        }
        size_t other_end = other->offset + aligned(other->bytes);
        if (other_end > end) end = other_end;
    }
    return best == SIZE_MAX ? end : best;
}

typedef struct assignment {
    ont_plan_block *blocks;
    uint32_t n, n_steps;
    ordered *order;
    ont_plan_block **placed;
    size_t *best; /* offsets of the shortest plan so far */
    size_t *live_bytes; /* live bytes by step */
    size_t total, target;
} assignment;

/*
 * Places all blocks in the current order and keeps the plan if it is the shortest so far. Returns the index of the
 * block that ends last.
 */
static uint32_t place_all(assignment *s)
{
    size_t end = 0;
    uint32_t topmost = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        ont_plan_block *block = s->order[i].block;
        block->offset = find_tightest_gap(block, s->placed, i);
        uint32_t at = i;
        for (; at && s->placed[at - 1]->offset > block->offset; at--) s->placed[at] = s->placed[at - 1];
        s->placed[at] = block;
        if (block->offset + aligned(block->bytes) > end) {
            end = block->offset + aligned(block->bytes);
            topmost = i;
        }
    }
    if (end < s->total) {
        s->total = end;
        for (uint32_t i = 0; i < s->n; i++) s->best[i] = s->blocks[i].offset;
    }
    return topmost;
}

/*
 * Initial order 0: by size; 1: by the maximum of live bytes in the block's live range, then by size; 2 and 3: by size
 * times length of the live range.
 */
static void sort_order(assignment *s, int which)
{
    for (uint32_t i = 0; i < s->n; i++) {
        ont_plan_block *b = &s->blocks[i];
        double size = (double)b->bytes, breadth = 0;
        for (uint32_t t = b->first; which == 1 && t <= b->last; t++)
            if ((double)s->live_bytes[t] > breadth) breadth = (double)s->live_bytes[t];
        s->order[i] = (ordered){.block = b, .weight = {size, 0}};
        if (which == 1) s->order[i] = (ordered){.block = b, .weight = {breadth, size}};
        if (which >= 2) s->order[i].weight[0] = size * (double)(b->last - b->first + 1);
    }
    if (s->n) qsort(s->order, s->n, sizeof *s->order, by_weight);
}

/*
 * Squeaky wheel optimization from each initial order: the block that ended last goes first in the next attempt; in the
 * last round half as far, which leaves what lives longest at the bottom.
 */
static void improve_by_squeaky_wheel(assignment *s)
{
    uint64_t squared = (uint64_t)s->n * s->n + 1;
    for (int which = 0; which < N_ORDERS && s->total > s->target && (!which || squared < MAX_COMPARISONS); which++) {
        sort_order(s, which);
        for (uint64_t work = 0; s->total > s->target && work <= MAX_COMPARISONS; work += squared) {
            uint32_t topmost = place_all(s), to = which == N_ORDERS - 1 ? topmost / 2 : 0;
            ordered moved = s->order[topmost];
            if (!topmost) break;
            for (uint32_t i = topmost; i > to; i--) s->order[i] = s->order[i - 1];
            s->order[to] = moved;
        }
    }
}

ont_status ont_plan_assign(ont_plan_block *blocks, uint32_t n, size_t *total)
{
    ONT_TRY(check_total(blocks, n));
    assignment s = {.blocks = blocks, .n = n, .total = SIZE_MAX};
    for (uint32_t i = 0; i < n; i++)
        if (blocks[i].last >= s.n_steps) s.n_steps = blocks[i].last + 1;
    s.order = ont_calloc((size_t)n + 1, sizeof *s.order);
    s.placed = ont_calloc((size_t)n + 1, sizeof *s.placed);
    s.best = ont_calloc((size_t)n + 1, sizeof *s.best);
    s.live_bytes = ont_calloc((size_t)s.n_steps + 1, sizeof *s.live_bytes);
    bool all = s.order && s.placed && s.best && s.live_bytes;
    if (all) {
        s.target = ont_plan_lower_bound(blocks, n, s.n_steps, s.live_bytes);
        s.target += s.target / 256; /* stop within 0.4% of the lower bound */
        improve_by_squeaky_wheel(&s);
        for (uint32_t i = 0; i < n; i++) blocks[i].offset = s.best[i];
        *total = n ? s.total : 0;
    }
    ont_free(s.order);
    ont_free(s.placed);
    ont_free(s.best);
    ont_free(s.live_bytes);
    return all ? ONT_OK : ONT_ENOMEM;
}

size_t ont_plan_lower_bound(const ont_plan_block *blocks, uint32_t n, uint32_t n_steps, size_t *per_step)
{
    ONT_ASSERT(!n || blocks);
    size_t peak = 0;
    for (uint32_t t = 0; t < n_steps; t++) per_step[t] = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t t = blocks[i].first; t <= blocks[i].last && t < n_steps; t++)
            per_step[t] += aligned(blocks[i].bytes);
    for (uint32_t t = 0; t < n_steps; t++)
        if (per_step[t] > peak) peak = per_step[t];
    return peak;
}
