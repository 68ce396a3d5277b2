/*
 * Treats denormal floats as zero while our kernels run: on many processors arithmetic with denormals is a hundred times
 * slower, and a badly scaled model is full of them. The mode belongs to a thread and is restored afterwards.
 *
 * OpenMP's workers do not persist: a region with fewer threads ends the others, and threads created later inherit the
 * mode of the thread that opens the region. So no mode set in a worker is assumed to last.
 */
#ifndef ONT_BASE_DENORMALS_H
#define ONT_BASE_DENORMALS_H

#include "base/status.h"

/* Whether ont_denormals_flush() has an effect; enabled by default. */
void ont_denormals_enable(bool on);

/* What ont_denormals_flush() has changed on the calling thread. */
typedef struct ont_float_modes {
    uint32_t mode, caller; /* see denormals.c */
    bool team;
} ont_float_modes;

/*
 * Enables flushing on the calling thread, and with `team` also on the threads of its OpenMP team, which libraries use;
 * threads of ont_parallel() inherit the mode of their caller anyway. *before is the argument for
 * ont_denormals_restore(), on the same thread. A callback of a backward may run another program: pairs of both calls
 * nest.
 */
void ont_denormals_flush(bool team, ont_float_modes *before);
void ont_denormals_restore(ont_float_modes before);

/*
 * Call before an OpenMP region is opened, by a library too. If only the calling thread flushes, it gets its original
 * mode back, so that no worker is created that flushes for good. Pass the result to ont_float_mode_set() after the
 * region.
 */
uint32_t ont_denormals_pause(void);

/* Reads and writes the thread's floating-point mode. */
uint32_t ont_float_mode(void);
void ont_float_mode_set(uint32_t mode);

#endif
