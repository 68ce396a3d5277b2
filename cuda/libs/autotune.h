/*
 * Autotuning: the fastest of several algorithms for one kind of call, measured once and cached by a key.
 */
#ifndef ONT_CUDA_TUNE_H
#define ONT_CUDA_TUNE_H

#include "core_shim.h"

/* Time of one candidate, in any unit; negative: it cannot be used. */
typedef double (*ont_tune_measure)(void *context, int candidate);

typedef struct ont_tuner ont_tuner;

ont_status ont_tuner_create(ont_tuner **tuner);
void ont_tuner_destroy(ont_tuner *tuner);
/* The cached choice; -1: not measured yet. Keys are compared byte by byte: zero their padding. */
int ont_tuner_find(ont_tuner *tuner, const void *key, size_t bytes);
/* Measures all candidates and caches the fastest; EUNSUPPORTED where none can be used. */
ont_status ont_tuner_choose(ont_tuner *tuner, const void *key, size_t bytes, int candidates, ont_tune_measure measure,
                            void *context, int *choice);

#endif
