#include "base/autotune.h"

#include <string.h>

#include "base/clock.h"

static const double CANDIDATE_SECONDS = 0.02; /* after this long for each, no further round begins */

void ont_tune_times(int candidates, int rounds, ont_tune_measure measure, void *context, double *times)
{
    double start = ont_seconds();
    for (int i = 0; i < candidates; i++) times[i] = -1;
    for (int round = 0; round < rounds; round++) {
        if (round > 1 && ont_seconds() - start > CANDIDATE_SECONDS * candidates) return;
        for (int i = 0; i < candidates; i++) {
            double time = measure(context, i);
            if (round && time >= 0 && (times[i] < 0 || time < times[i])) times[i] = time;
        }
    }
}

int ont_tune_fastest(int candidates, ont_tune_measure measure, void *context)
{
    int fastest = -1;
    double least = 0;
    for (int i = 0; i < candidates; i++) {
        double time = measure(context, i);
        if (time >= 0 && (fastest < 0 || time < least)) fastest = i, least = time;
    }
    return fastest;
}

static void *find(const ont_tune_cache *cache, const void *key)
{
    char *entry = cache->entries;
    for (size_t i = 0; i < cache->n; i++, entry += cache->entry_bytes)
        if (!memcmp(entry, key, cache->key_bytes)) return entry;
    return NULL;
}

void *ont_tune_find(ont_tune_cache *cache, const void *key)
{
    pthread_mutex_lock(&cache->lock);
    void *found = find(cache, key);
    pthread_mutex_unlock(&cache->lock);
    return found;
}

void *ont_tune_keep(ont_tune_cache *cache, const void *entry)
{
    pthread_mutex_lock(&cache->lock);
    void *kept = find(cache, entry);
    if (!kept && cache->n < cache->capacity) {
        kept = (char *)cache->entries + cache->n++ * cache->entry_bytes;
        memcpy(kept, entry, cache->entry_bytes);
    }
    pthread_mutex_unlock(&cache->lock);
    return kept;
}

size_t ont_tune_count(ont_tune_cache *cache)
{
    pthread_mutex_lock(&cache->lock);
    size_t n = cache->n;
    pthread_mutex_unlock(&cache->lock);
    return n;
}
