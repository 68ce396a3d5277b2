/*
 * See shared.h. Used by device.c and by the emulation.
 */
#include "shared.h"

#include <pthread.h>
#include <string.h>

typedef struct free_block {
    struct free_block *next;
} free_block;

_Static_assert(sizeof(free_block) <= ONT_SHARED_BLOCK, "a free block holds the link to the next one");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* First in, first out: a kernel that is still running may write to a block that was given back a moment ago. */
static free_block *first, **end = &first;

static void append(void *block)
{
    *(free_block *)block = (free_block){NULL};
    *end = block;
    end = &((free_block *)block)->next;
}

static free_block *pop(void)
{
    free_block *block = first;
    if (!block) return NULL;
    first = block->next;
    if (!first) end = &first;
    return block;
}

ont_status ont_shared_take(ont_shared_page_fn new_page, void **block)
{
    ont_status status = ONT_OK;
    void *page = NULL;
    pthread_mutex_lock(&lock);
    if (!first) status = new_page(&page);
    for (size_t at = 0; page && at + ONT_SHARED_BLOCK <= ONT_SHARED_PAGE; at += ONT_SHARED_BLOCK)
        append((char *)page + at);
    *block = status == ONT_OK ? pop() : NULL;
    pthread_mutex_unlock(&lock);
    if (*block) memset(*block, 0, ONT_SHARED_BLOCK);
    return status;
}

void ont_shared_give(void *block)
{
    pthread_mutex_lock(&lock);
    append(block);
    pthread_mutex_unlock(&lock);
}
