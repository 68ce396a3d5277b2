/*
 * Heap allocation with a failure hook and a count of what is live.
 *
 * All of the core allocates through here (or through an arena, which does), so that a test can make the n-th
 * allocation fail and can assert that nothing leaks. Functions return NULL after ont_fail(ONT_ENOMEM, ...).
 */
#ifndef ONT_BASE_ALLOC_H
#define ONT_BASE_ALLOC_H

#include "base/status.h"

void *ont_malloc(size_t bytes);
void *ont_calloc(size_t count, size_t size);               /* refuses a product that overflows */
void *ont_realloc(void *block, size_t count, size_t size); /* the old block stays valid on failure */
void ont_free(void *block);
char *ont_strdup(const char *text);

/* 64-byte aligned tensor memory; huge pages are advised from 2 MiB on. Contents are undefined. */
void *ont_buffer_alloc(size_t bytes);
void ont_buffer_free(void *block, size_t bytes);
/*
 * The same straight from the system, zeroed, and back to it at once: for what is needed once. What the heap had given
 * would stay with it, and make it keep as large blocks from then on.
 */
void *ont_pages_alloc(size_t bytes);
void ont_pages_free(void *block, size_t bytes);
/* Contents are lost from now on: the system takes the pages where it needs them, and those that it left cost nothing
 * again. */
void ont_buffer_advise_free(void *block, size_t bytes);

/* Test hook: the allocation `countdown` calls from now fails, and every one after it; negative turns it off. */
void ont_alloc_fail_after(int64_t countdown);
bool ont_alloc_fail_fired(void);
int64_t ont_alloc_live(void); /* blocks now allocated, buffers included */
int64_t ont_alloc_live_bytes(void); /* bytes of live buffers */

#endif
