/*
 * Small blocks of memory that host and device see, for the faults of programs. They are never freed, as plugins are
 * never closed: cudaHostAlloc() and cudaFreeHost() wait for the device, and would invalidate a graph that another part
 * of the process captures.
 */
#ifndef ONT_CUDA_SHARED_H
#define ONT_CUDA_SHARED_H

#include "core_shim.h"

enum { ONT_SHARED_BLOCK = 64, ONT_SHARED_PAGE = 8192 };

/* Allocates ONT_SHARED_PAGE zeroed bytes that both sides see, once for many blocks. */
typedef ont_status (*ont_shared_page_fn)(void **page);

/* A zeroed block of ONT_SHARED_BLOCK bytes: one that was given back longest ago, or a part of a page. Thread-safe. */
ont_status ont_shared_take(ont_shared_page_fn new_page, void **block);
void ont_shared_give(void *block);

#endif
