/*
 * Choice among the algorithms of a library for one kind of call: measured once, and remembered by the call's
 * description.
 */
#ifndef ONT_CUDA_TUNE_H
#define ONT_CUDA_TUNE_H

#include "core_shim.h"

/* Seconds of candidate i; negative: it cannot be used. */
typedef double (*ont_tune_measure)(void *context, int candidate);

typedef struct ont_tuner ont_tuner;

ont_status ont_tuner_create(ont_tuner **tuner);
void ont_tuner_destroy(ont_tuner *tuner);
/* -1 where it is not measured yet. Keys are compared byte by byte: zero their padding. */
int ont_tuner_find(ont_tuner *tuner, const void *key, size_t bytes);
/* Measures every candidate and remembers the fastest; ONT_EUNSUPPORTED where none can be used. */
ont_status ont_tuner_choose(ont_tuner *tuner, const void *key, size_t bytes, int candidates, ont_tune_measure measure,
                            void *context, int *choice);

#endif
