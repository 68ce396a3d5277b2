/*
 * Software prefetch. The hardware prefetcher stops at the end of a page, which is every 4 KiB where pages are small. A
 * loop of little arithmetic over memory in no cache therefore prefetches a page ahead.
 */
#ifndef ONT_BASE_PREFETCH_H
#define ONT_BASE_PREFETCH_H

#include <stddef.h>
#include <stdint.h>

enum { ONT_PREFETCH_DISTANCE = 4096, ONT_CACHE_LINE = 64 }; /* bytes */

/* Prefetches `bytes` one page behind `at`, for reading. Addresses behind the end of an array are harmless. */
static inline void ont_prefetch_read(const void *at, size_t bytes)
{
    for (size_t line = 0; line < bytes; line += ONT_CACHE_LINE)
        __builtin_prefetch((const char *)at + ONT_PREFETCH_DISTANCE + line, 0);
}

/* The same for writing. */
static inline void ont_prefetch_write(const void *at, size_t bytes)
{
    for (size_t line = 0; line < bytes; line += ONT_CACHE_LINE)
        __builtin_prefetch((const char *)at + ONT_PREFETCH_DISTANCE + line, 1);
}

/* Prefetches the cache lines of `bytes` from `at` on into the L2 cache. Returns their number. */
static inline size_t ont_prefetch_lines(const void *at, size_t bytes)
{
    const char *line = (const char *)at - (uintptr_t)at % ONT_CACHE_LINE, *end = (const char *)at + bytes;
    size_t n = 0;
    for (; line < end; line += ONT_CACHE_LINE, n++) __builtin_prefetch(line, 0, 2);
    return n;
}

#endif
