/*
 * Denormal floats as zero, while our kernels run: on many processors arithmetic with them is a hundred times slower,
 * and a badly scaled model is full of them. The setting is a thread's; what it was before is put back.
 */
#ifndef ONT_BASE_DENORMALS_H
#define ONT_BASE_DENORMALS_H

#include "base/status.h"

/* Whether ont_denormals_flush() does anything; on at first. */
void ont_denormals_enable(bool on);

/*
 * Flushes on the calling thread, and with `team` on the threads of its OpenMP team too, which libraries use; threads of
 * ont_parallel() follow their caller anyway. *before is for ont_denormals_restore().
 */
void ont_denormals_flush(bool team, uint32_t *before);
void ont_denormals_restore(uint32_t before);

/* The thread's mode as a word, and back: for ont_parallel(). */
uint32_t ont_float_mode(void);
void ont_float_mode_set(uint32_t mode);

#endif
