/*
 * Heap allocation with a failure hook and a count of live blocks.
 *
 * All of the core allocates through these functions (or through an arena, which does), so that a test can make the n-th
 * allocation fail and can check that nothing leaks. Functions return NULL after ont_fail(ONT_ENOMEM, ...).
 */
#ifndef ONT_BASE_ALLOC_H
#define ONT_BASE_ALLOC_H

#include "base/status.h"

void *ont_malloc(size_t bytes);
void *ont_calloc(size_t count, size_t size);               /* NULL if count * size overflows */
void *ont_realloc(void *block, size_t count, size_t size); /* on failure the old block stays valid */
void ont_free(void *block);

/* Tensor memory, 64-byte aligned; huge pages are advised from 2 MiB on. Uninitialised. */
void *ont_buffer_alloc(size_t bytes);
void ont_buffer_free(void *block, size_t bytes);
/*
 * Discards the data and advises the system that it may reclaim the pages (MADV_FREE); pages that it has not reclaimed
 * can be reused at no cost.
 */
void ont_buffer_advise_free(void *block, size_t bytes);

/*
 * Test hook: the allocation `countdown` calls from now fails, and every later one; a negative number disables the hook.
 */
void ont_alloc_fail_after(int64_t countdown);
bool ont_alloc_fail_fired(void);
int64_t ont_alloc_live(void); /* number of live blocks, buffers included */
int64_t ont_alloc_live_bytes(void); /* bytes of live buffers */

#endif
