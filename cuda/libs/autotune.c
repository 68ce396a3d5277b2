/*
 * See autotune.h. The cache is a list: a model has few GEMM shapes.
 */
#include "libs/autotune.h"

#include <pthread.h>
#include <string.h>

typedef struct entry {
    struct entry *next;
    size_t bytes;
    int choice;
    unsigned char key[];
} entry;

struct ont_tuner {
    pthread_mutex_t lock;
    entry *first;
};

ont_status ont_tuner_create(ont_tuner **tuner)
{
    ont_tuner *t = ont_calloc(1, sizeof *t);
    if (!t) return ONT_ENOMEM;
    pthread_mutex_init(&t->lock, NULL);
    *tuner = t;
    return ONT_OK;
}

void ont_tuner_destroy(ont_tuner *t)
{
    for (entry *e = t ? t->first : NULL, *next; e; e = next) {
        next = e->next;
        ont_free(e);
    }
    if (t) pthread_mutex_destroy(&t->lock);
    ont_free(t);
}

int ont_tuner_find(ont_tuner *t, const void *key, size_t bytes)
{
    int choice = -1;
    pthread_mutex_lock(&t->lock);
    for (const entry *e = t->first; e && choice < 0; e = e->next)
        if (e->bytes == bytes && !memcmp(e->key, key, bytes)) choice = e->choice;
    pthread_mutex_unlock(&t->lock);
    return choice;
}

ont_status ont_tuner_choose(ont_tuner *t, const void *key, size_t bytes, int candidates, ont_tune_measure measure,
                            void *context, int *choice)
{
    int best = ont_tuner_find(t, key, bytes);
    double best_time = 0;
    if (best >= 0) {
        *choice = best;
        return ONT_OK;
    }
    for (int i = 0; i < candidates; i++) {
        double time = measure(context, i);
        if (time < 0 || (best >= 0 && time >= best_time)) continue;
        best = i;
        best_time = time;
    }
    if (best < 0) return ont_fail(ONT_EUNSUPPORTED, "none of %d algorithms can be used", candidates);
    entry *e = ont_malloc(sizeof *e + bytes);
    if (!e) return ONT_ENOMEM;
    e->bytes = bytes;
    e->choice = best;
    memcpy(e->key, key, bytes);
    pthread_mutex_lock(&t->lock);
    e->next = t->first;
    t->first = e;
    pthread_mutex_unlock(&t->lock);
    *choice = best;
    return ONT_OK;
}
