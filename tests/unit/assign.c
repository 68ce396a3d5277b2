/*
 * Unit tests of csrc/plan/assign.c: offsets against their definition and brute force.
 */
#include "check.h"
#include "plan/plan.h"

static size_t aligned(size_t bytes)
{
    return (bytes + ONT_PLAN_ALIGN - 1) / ONT_PLAN_ALIGN * ONT_PLAN_ALIGN;
}

static bool together(const ont_plan_block *a, const ont_plan_block *b)
{
    return a->first <= b->last && b->first <= a->last;
}

static uint32_t random_blocks(ont_plan_block *blocks, uint32_t most, uint32_t n_steps, size_t most_bytes)
{
    uint32_t n = (uint32_t)check_between(1, most);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t a = (uint32_t)check_between(0, n_steps - 1), b = (uint32_t)check_between(0, n_steps - 1);
        size_t bytes = (size_t)check_between(0, 3) ? (size_t)check_between(1, (int64_t)most_bytes)
                                                   : 64u << check_between(0, 4);
        blocks[i] = (ont_plan_block){.bytes = bytes, .first = a < b ? a : b, .last = a < b ? b : a, .offset = 1};
    }
    return n;
}

static void check_assignment(const ont_plan_block *blocks, uint32_t n, size_t total)
{
    size_t end = 0;
    for (uint32_t i = 0; i < n; i++) {
        const ont_plan_block *a = &blocks[i];
        CHECK_INT(a->offset % ONT_PLAN_ALIGN, 0);
        if (a->offset + aligned(a->bytes) > end) end = a->offset + aligned(a->bytes);
        for (uint32_t j = 0; j < i; j++) {
            const ont_plan_block *b = &blocks[j];
            CHECK(!together(a, b) || a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset);
        }
    }
    CHECK_INT(total, end);
}

/* By definition: for each step, the live bytes. */
static size_t bound_by_definition(const ont_plan_block *blocks, uint32_t n, uint32_t n_steps)
{
    size_t most = 0;
    for (uint32_t t = 0; t < n_steps; t++) {
        size_t now = 0;
        for (uint32_t i = 0; i < n; i++)
            if (blocks[i].first <= t && t <= blocks[i].last) now += aligned(blocks[i].bytes);
        if (now > most) most = now;
    }
    return most;
}

TEST(assign_no_two_live_blocks_overlap)
{
    enum { MOST = 120, STEPS = 40 };
    static ont_plan_block blocks[MOST];
    size_t per_step[STEPS];
    double ratio = 0;
    int rounds = 400;
    for (int round = 0; round < rounds; round++) {
        uint32_t n = random_blocks(blocks, MOST, STEPS, round % 2 ? 300 : 100000);
        size_t total = 0, sum = 0;
        CHECK_OK(ont_plan_assign(blocks, n, &total));
        check_assignment(blocks, n, total);
        size_t bound = ont_plan_lower_bound(blocks, n, STEPS, per_step);
        CHECK_INT(bound, bound_by_definition(blocks, n, STEPS));
        for (uint32_t i = 0; i < n; i++) sum += aligned(blocks[i].bytes);
        CHECK(bound <= total && total <= sum);
        ratio += (double)total / (double)bound / rounds;
    }
    printf("bytes over lower bound, mean of %d: %.4f\n", rounds, ratio);
    CHECK(ratio < 1.02);
}

/*
 * The least total that any packing has. A best packing, its blocks taken by offset and each pushed down as far as those
 * before it allow, is no higher: so the best of all orders, each block at the lowest offset that is free, is the least.
 */
static size_t best_total(ont_plan_block *blocks, uint32_t n, uint32_t placed, size_t end, size_t best)
{
    if (end >= best) return best;
    if (placed == n) return end;
    for (uint32_t k = placed; k < n; k++) {
        ont_plan_block chosen = blocks[k];
        blocks[k] = blocks[placed];
        chosen.offset = 0;
        for (bool moved = true; moved;) {
            moved = false;
            for (uint32_t i = 0; i < placed; i++) {
                const ont_plan_block *b = &blocks[i];
                if (!together(&chosen, b) || chosen.offset + aligned(chosen.bytes) <= b->offset ||
                    b->offset + aligned(b->bytes) <= chosen.offset)
                    continue;
                chosen.offset = b->offset + aligned(b->bytes);
                moved = true;
            }
        }
        blocks[placed] = chosen;
        size_t top = chosen.offset + aligned(chosen.bytes);
        best = best_total(blocks, n, placed + 1, top > end ? top : end, best);
        blocks[placed] = blocks[k];
        blocks[k] = chosen;
    }
    return best;
}

TEST(assign_against_brute_force)
{
    enum { MOST = 7, STEPS = 8 };
    ont_plan_block blocks[MOST], copy[MOST];
    double ratio = 0;
    int rounds = 300, optimal = 0;
    for (int round = 0; round < rounds; round++) {
        uint32_t n = random_blocks(blocks, MOST, STEPS, 1000);
        size_t total = 0;
        memcpy(copy, blocks, sizeof copy);
        CHECK_OK(ont_plan_assign(blocks, n, &total));
        size_t best = best_total(copy, n, 0, 0, SIZE_MAX);
        CHECK(bound_by_definition(blocks, n, STEPS) <= best && best <= total);
        CHECK(total <= 2 * best);
        optimal += total == best;
        ratio += (double)total / (double)best / rounds;
    }
    printf("bytes over the best, mean of %d: %.4f; %d are best\n", rounds, ratio, optimal);
    CHECK(ratio < 1.05 && optimal > rounds * 3 / 4);
}

TEST(assign_small_cases)
{
    size_t total = 7;
    CHECK_OK(ont_plan_assign(NULL, 0, &total));
    CHECK_INT(total, 0);
    ont_plan_block one = {.bytes = 1, .first = 3, .last = 3, .offset = 9};
    CHECK_OK(ont_plan_assign(&one, 1, &total));
    CHECK(total == 64 && one.offset == 0);
    /* The hole of 64 that the large blocks leave at steps 2 and 3 is the tightest one for the small block. */
    ont_plan_block fit[] = {{256, 0, 9, 0}, {192, 0, 1, 0}, {128, 2, 3, 0}, {64, 2, 3, 0}};
    CHECK_OK(ont_plan_assign(fit, 4, &total));
    CHECK(total == 448 && fit[2].offset == 256 && fit[3].offset == 384);
    ont_alloc_fail_after(0);
    CHECK_INT(ont_plan_assign(fit, 4, &total), ONT_ENOMEM);
    ont_alloc_fail_after(1);
    CHECK_INT(ont_plan_assign(fit, 4, &total), ONT_ENOMEM);
    ont_alloc_fail_after(-1);
    CHECK_INT(total, 448);
}
