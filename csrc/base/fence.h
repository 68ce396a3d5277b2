/*
 * Which bytes may be touched, for AddressSanitizer: memory that is handed out in pieces (an arena, the slab of a run)
 * is one block to it. Nothing in other builds.
 */
#ifndef ONT_BASE_FENCE_H
#define ONT_BASE_FENCE_H

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

enum { ONT_FENCED = 1, ONT_FENCE_BYTES = 32 }; /* the latter: between neighbours */
#define ONT_FENCE(data, bytes) __asan_poison_memory_region(data, bytes)
#define ONT_OPEN(data, bytes) __asan_unpoison_memory_region(data, bytes)
#else
enum { ONT_FENCED = 0, ONT_FENCE_BYTES = 0 };
#define ONT_FENCE(data, bytes) ((void)(data), (void)(bytes))
#define ONT_OPEN(data, bytes) ((void)(data), (void)(bytes))
#endif

#endif
