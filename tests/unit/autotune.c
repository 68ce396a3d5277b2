/*
 * Unit tests of csrc/base/autotune.c.
 */
#include "base/autotune.h"

#include "base/clock.h"
#include "check.h"

typedef struct trial {
    double times[4];
    int calls[4], last;
    bool in_turn;
} trial;

static double next_time(void *context, int candidate)
{
    trial *t = context;
    t->in_turn &= candidate == (t->last + 1) % 3;
    t->last = candidate;
    int call = t->calls[candidate]++;
    return t->times[candidate] < 0 ? -1 : call == 0 ? 1 : t->times[candidate] + call; /* the first run is the fastest */
}

TEST(autotune_takes_turns_and_drops_the_warm_up)
{
    trial t = {.times = {30, 20, -1}, .last = 2, .in_turn = true};
    double found[3];
    ont_tune_times(3, 4, next_time, &t, found);
    CHECK(t.in_turn);
    for (int i = 0; i < 3; i++) CHECK_INT(t.calls[i], 4);
    CHECK_INT(found[0], 31);
    CHECK_INT(found[1], 21);
    CHECK_INT(found[2], -1);
}

static double given_time(void *context, int candidate)
{
    return ((const double *)context)[candidate];
}

TEST(autotune_takes_the_fastest_that_can_be_used)
{
    CHECK_INT(ont_tune_fastest(3, given_time, (double[]){3, -1, 2}), 2);
    CHECK_INT(ont_tune_fastest(3, given_time, (double[]){2, 2, 3}), 0);
    CHECK_INT(ont_tune_fastest(2, given_time, (double[]){-1, -1}), -1);
}

static double wait_a_while(void *context, int candidate)
{
    double start = ont_seconds();
    while (ont_seconds() - start < 0.03) ++*(int *)context;
    return 1 + candidate;
}

TEST(autotune_stops_slow_candidates_after_two_rounds)
{
    int spins = 0;
    double start = ont_seconds(), found[1];
    ont_tune_times(1, 1000, wait_a_while, &spins, found);
    CHECK(ont_seconds() - start < 10);
    CHECK_INT(found[0], 1);
}

typedef struct entry {
    int64_t key[2];
    int choice;
} entry;

TEST(autotune_keeps_the_first_entry_of_a_key_until_it_is_full)
{
    static entry entries[2];
    static ont_tune_cache cache = ONT_TUNE_CACHE(entries);
    CHECK(!ont_tune_find(&cache, (int64_t[]){1, 2}));
    entry *first = ont_tune_keep(&cache, &(entry){{1, 2}, 7}), *again = ont_tune_keep(&cache, &(entry){{1, 2}, 8});
    CHECK(first && first == again && first == ont_tune_find(&cache, (int64_t[]){1, 2}));
    CHECK_INT(first->choice, 7);
    CHECK(ont_tune_keep(&cache, &(entry){{1, 3}, 9}) == &entries[1]);
    CHECK(!ont_tune_keep(&cache, &(entry){{2, 2}, 1}) && !ont_tune_find(&cache, (int64_t[]){2, 2}));
    CHECK_INT(ont_tune_count(&cache), 2);
}
