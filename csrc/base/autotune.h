/*
 * Autotuning: candidates for one kind of call are timed once, and what was found is cached under a key.
 *
 * A cache is a static array of entries, whose first member is the key; keys are compared byte by byte, so padding is
 * zeroed. Entries stay where they are, and their keys do not change. No lock is held while anything is timed: if two
 * threads time the same kind, the entry that is kept first is the one that both use.
 */
#ifndef ONT_BASE_AUTOTUNE_H
#define ONT_BASE_AUTOTUNE_H

#include <pthread.h>
#include <stddef.h>

/* Time of one run of a candidate, in any unit; negative: it cannot be used. */
typedef double (*ont_tune_measure)(void *context, int candidate);

/*
 * times[i]: the least time of candidate i in `rounds` runs, or negative if it cannot be used. Candidates take turns,
 * so that noise of the machine meets all of them. The first round is a warm-up; from the third on, none begins once 20
 * ms for each candidate have passed.
 */
void ont_tune_times(int candidates, int rounds, ont_tune_measure measure, void *context, double *times);
/* The candidate with the least time, measured once each; -1: none can be used. */
int ont_tune_fastest(int candidates, ont_tune_measure measure, void *context);

typedef struct ont_tune_cache {
    pthread_mutex_t lock;
    void *entries;
    size_t n, capacity, entry_bytes, key_bytes;
} ont_tune_cache;

#define ONT_TUNE_CACHE(array) \
    {.lock = PTHREAD_MUTEX_INITIALIZER, .entries = (array), .capacity = sizeof(array) / sizeof *(array), \
     .entry_bytes = sizeof *(array), .key_bytes = sizeof (array)->key}

/* The entry with this key, or NULL. */
void *ont_tune_find(ont_tune_cache *cache, const void *key);
/* Adds a copy of the entry. Returns the one with its key: that copy, or an earlier one; NULL if the cache is full. */
void *ont_tune_keep(ont_tune_cache *cache, const void *entry);
/* How many entries there are: the first ones of the array. */
size_t ont_tune_count(ont_tune_cache *cache);

#endif
