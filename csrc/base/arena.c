/*
 * Bump allocator. Blocks grow geometrically; an object larger than a block gets a block of its own.
 */
#include "base/arena.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/asan.h"
#include "base/assert.h"

typedef struct ont_arena_block {
    struct ont_arena_block *next;
    size_t used;
    size_t capacity;
    _Alignas(64) unsigned char bytes[];
} ont_arena_block;

enum { FIRST_BLOCK = 8 << 10, LARGEST_BLOCK = 1 << 20 };

void ont_arena_init(ont_arena *arena)
{
    *arena = (ont_arena){0};
}

void ont_arena_deinit(ont_arena *arena)
{
    for (ont_arena_block *block = arena->head, *next; block; block = next) {
        next = block->next;
        ont_free(block);
    }
    *arena = (ont_arena){0};
}

static size_t align_up(uintptr_t address, size_t align)
{
    return (size_t)(-address & (align - 1));
}

static bool add_block(ont_arena *arena, size_t at_least)
{
    size_t capacity = arena->head ? arena->head->capacity * 2 : FIRST_BLOCK;
    if (capacity > LARGEST_BLOCK) capacity = LARGEST_BLOCK;
    if (capacity < at_least) capacity = at_least;
    size_t total;
    if (__builtin_add_overflow(capacity, sizeof(ont_arena_block), &total)) {
        ont_set_error("out of memory: arena block of %zu bytes", capacity);
        return false;
    }
    ont_arena_block *block = ont_malloc(total);
    if (!block) return false;
    block->next = arena->head;
    block->used = 0;
    block->capacity = capacity;
    ONT_POISON(block->bytes, capacity);
    arena->head = block;
    return true;
}

void *ont_arena_alloc(ont_arena *arena, size_t bytes)
{
    ONT_ASSERT(arena);
    size_t align = bytes >= 1024 ? 64 : 16;
    size_t want;
    if (__builtin_add_overflow(bytes, align + ONT_REDZONE_BYTES, &want)) {
        ont_set_error("out of memory: %zu bytes", bytes);
        return NULL;
    }
    ont_arena_block *block = arena->head;
    if (!block || block->capacity - block->used < want) {
        if (!add_block(arena, want)) return NULL;
        block = arena->head;
    }
    size_t offset = block->used + align_up((uintptr_t)(block->bytes + block->used), align);
    block->used = offset + bytes + ONT_REDZONE_BYTES;
    ONT_UNPOISON(block->bytes + offset, bytes);
    arena->bytes += bytes;
    return memset(block->bytes + offset, 0, bytes);
}

void *ont_arena_array(ont_arena *arena, size_t count, size_t size)
{
    ONT_ASSERT(count == 0 || size);
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        ont_set_error("out of memory: %zu items of %zu bytes", count, size);
        return NULL;
    }
    return ont_arena_alloc(arena, bytes);
}

char *ont_arena_strndup(ont_arena *arena, const char *text, size_t length)
{
    char *copy = ont_arena_alloc(arena, length + 1);
    if (copy) memcpy(copy, text, length);
    return copy;
}

char *ont_arena_strdup(ont_arena *arena, const char *text)
{
    return ont_arena_strndup(arena, text, strlen(text));
}

char *ont_arena_format(ont_arena *arena, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *text = length < 0 ? NULL : ont_arena_alloc(arena, (size_t)length + 1);
    if (text) vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}
