/*
 * Denormal floats as zero, while our kernels run: on many processors arithmetic with them is a hundred times slower,
 * and a badly scaled model is full of them. The setting is a thread's; what it was before is put back.
 *
 * OpenMP's workers do not stay: a region of fewer threads ends the others, and who comes later has the mode of the
 * thread that opens the region. So nothing that a worker was told is expected of it afterwards.
 */
#ifndef ONT_BASE_DENORMALS_H
#define ONT_BASE_DENORMALS_H

#include "base/status.h"

/* Whether ont_denormals_flush() does anything; on at first. */
void ont_denormals_enable(bool on);

/*
 * Flushes on the calling thread, and with `team` on the threads of its OpenMP team too, which libraries use; threads of
 * ont_parallel() follow their caller anyway. *before is for ont_denormals_restore(), on the same thread.
 */
void ont_denormals_flush(bool team, uint32_t *before);
void ont_denormals_restore(uint32_t before);

/*
 * Before a region of OpenMP is opened, by a library too: a caller that flushes alone has its own mode meanwhile, so
 * that no worker is made that flushes ever after. Hand the result to ont_float_mode_set() after the region.
 */
uint32_t ont_denormals_pause(void);

/* The thread's mode as a word, and back. */
uint32_t ont_float_mode(void);
void ont_float_mode_set(uint32_t mode);

#endif
