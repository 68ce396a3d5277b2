/*
 * Memory asked for before it is needed. A processor's own prefetching ends at a page, and where pages are small that is
 * every 4 KiB: a loop of little arithmetic over memory that no cache holds asks a page ahead.
 */
#ifndef ONT_BASE_FETCH_H
#define ONT_BASE_FETCH_H

#include <stddef.h>
#include <stdint.h>

enum { ONT_FETCH_PAGE = 4096, ONT_FETCH_LINE = 64 }; /* bytes */

/* `bytes` a page behind `at`, to be read. What lies beyond an array does no harm. */
static inline void ont_fetch_ahead(const void *at, size_t bytes)
{
    for (size_t line = 0; line < bytes; line += ONT_FETCH_LINE)
        __builtin_prefetch((const char *)at + ONT_FETCH_PAGE + line, 0);
}

/* The same, to be written. */
static inline void ont_fetch_to_write(const void *at, size_t bytes)
{
    for (size_t line = 0; line < bytes; line += ONT_FETCH_LINE)
        __builtin_prefetch((const char *)at + ONT_FETCH_PAGE + line, 1);
}

/* The lines of `bytes` from `at` on, into the second cache. Returns how many there are. */
static inline size_t ont_fetch_lines(const void *at, size_t bytes)
{
    const char *line = (const char *)at - (uintptr_t)at % ONT_FETCH_LINE, *end = (const char *)at + bytes;
    size_t n = 0;
    for (; line < end; line += ONT_FETCH_LINE, n++) __builtin_prefetch(line, 0, 2);
    return n;
}

#endif
