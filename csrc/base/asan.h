/*
 * Poisons memory for AddressSanitizer, to which an arena or the slab of a run is one block. No effect in other builds.
 */
#ifndef ONT_BASE_ASAN_H
#define ONT_BASE_ASAN_H

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

enum { ONT_ASAN = 1, ONT_REDZONE_BYTES = 32 }; /* redzone between adjacent allocations */
#define ONT_POISON(data, bytes) __asan_poison_memory_region(data, bytes)
#define ONT_UNPOISON(data, bytes) __asan_unpoison_memory_region(data, bytes)
#else
enum { ONT_ASAN = 0, ONT_REDZONE_BYTES = 0 };
#define ONT_POISON(data, bytes) ((void)(data), (void)(bytes))
#define ONT_UNPOISON(data, bytes) ((void)(data), (void)(bytes))
#endif

#endif
