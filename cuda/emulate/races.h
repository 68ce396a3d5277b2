/*
 * The race detector of emulated launches (races.cc), called by the scheduler (emulate.cc) alone. In a build without
 * ONT_RACES all of it is empty.
 */
#ifndef ONT_CUDA_RACES_H
#define ONT_CUDA_RACES_H

#include <stddef.h>

#ifdef ONT_RACES
/* `emulator`: memory of the scheduler, which kernels read as their indices. */
void ont_races_launch(const void *emulator, size_t bytes);
/* `shared`: the block's dynamic shared memory. */
void ont_races_block(unsigned long block, unsigned threads, const void *shared, size_t bytes);
/* The thread that runs from now on, and its stack; NULL: none. */
void ont_races_switch(unsigned thread, const char *stack, size_t bytes);
void ont_races_barrier(void);
/* __syncwarp of the lanes in `mask` of the warp that begins with thread `first`. */
void ont_races_warp_barrier(unsigned first, unsigned mask);
/* The thread begins to copy to shared memory; it has waited for that, and read `from`, unless NULL. */
void ont_races_copy(void *to, size_t bytes, const void *code);
void ont_races_copied(void *to, const void *from, size_t bytes, const void *code);
/* The first race of this launch, or else the first read of shared memory that was not written; NULL: none. */
const char *ont_races_found(void);
#else
static inline void ont_races_launch(const void *, size_t) {}
static inline void ont_races_block(unsigned long, unsigned, const void *, size_t) {}
static inline void ont_races_switch(unsigned, const char *, size_t) {}
static inline void ont_races_barrier(void) {}
static inline void ont_races_warp_barrier(unsigned, unsigned) {}
static inline void ont_races_copy(void *, size_t, const void *) {}
static inline void ont_races_copied(void *, const void *, size_t, const void *) {}
static inline const char *ont_races_found(void) { return nullptr; }
#endif

#endif
