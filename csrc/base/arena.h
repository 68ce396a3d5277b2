/*
 * Bump allocator: many small objects with one lifetime, released together. A graph owns one, a program owns one.
 */
#ifndef ONT_BASE_ARENA_H
#define ONT_BASE_ARENA_H

#include "base/status.h"

typedef struct ont_arena {
    struct ont_arena_block *head;
    size_t bytes; /* allocated so far */
} ont_arena;

void ont_arena_init(ont_arena *arena);
void ont_arena_deinit(ont_arena *arena);

/* Zeroed and 64-byte aligned when large (>= 1 KiB), else 16. NULL after ont_fail(ONT_ENOMEM). */
void *ont_arena_alloc(ont_arena *arena, size_t bytes);
void *ont_arena_array(ont_arena *arena, size_t count, size_t size);
char *ont_arena_strdup(ont_arena *arena, const char *text);
char *ont_arena_strndup(ont_arena *arena, const char *text, size_t length);
char *ont_arena_format(ont_arena *arena, const char *format, ...) ONT_PRINTF(2, 3);

#endif
