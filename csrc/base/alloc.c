/*
 * Heap allocation with a failure hook. See alloc.h.
 */
#include "base/alloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/asan.h"

static _Atomic int64_t fail_countdown = -1;
static atomic_bool fail_fired;
static _Atomic int64_t live_blocks;
static _Atomic int64_t live_bytes;

void ont_alloc_fail_after(int64_t countdown)
{
    atomic_store(&fail_fired, false);
    atomic_store(&fail_countdown, countdown);
}

bool ont_alloc_fail_fired(void)
{
    return atomic_load(&fail_fired);
}

int64_t ont_alloc_live(void)
{
    return atomic_load(&live_blocks);
}

int64_t ont_alloc_live_bytes(void)
{
    return atomic_load(&live_bytes);
}

/* Whether the test hook makes this allocation fail. */
static bool injected_failure(void)
{
    int64_t left = atomic_load_explicit(&fail_countdown, memory_order_relaxed);
    if (left < 0) return false;
    if (left > 0) {
        atomic_fetch_sub(&fail_countdown, 1);
        return false;
    }
    atomic_store(&fail_fired, true);
    return true;
}

static void *count_block(void *block, size_t bytes)
{
    if (!block) {
        ont_set_error("out of memory: %zu bytes", bytes);
        return NULL;
    }
    atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    return block;
}

void *ont_malloc(size_t bytes)
{
    return count_block(injected_failure() ? NULL : malloc(bytes ? bytes : 1), bytes);
}

void *ont_calloc(size_t count, size_t size)
{
    return count_block(injected_failure() ? NULL : calloc(count ? count : 1, size ? size : 1), count * size);
}

void *ont_realloc(void *block, size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || injected_failure()) {
        ont_set_error("out of memory: %zu items of %zu bytes", count, size);
        return NULL;
    }
    void *moved = realloc(block, bytes ? bytes : 1);
    if (!moved) {
        ont_set_error("out of memory: %zu bytes", bytes);
        return NULL;
    }
    if (!block) atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    return moved;
}

void ont_free(void *block)
{
    if (!block) return;
    atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
    free(block);
}

/*
 * Large blocks begin at a huge-page boundary and use huge pages for the part that fills whole ones: the remainder of a
 * last huge page would be zeroed and wasted, a tenth of the memory for gradients of some MiB.
 */
void *ont_buffer_alloc(size_t bytes)
{
    enum { HUGE_PAGE = 2 << 20, CACHE_LINE = 64 };
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : CACHE_LINE;
    size_t rounded;
    void *block;
    if (__builtin_add_overflow(bytes ? bytes : 1, CACHE_LINE - 1, &rounded) || injected_failure())
        return count_block(NULL, bytes);
    rounded = ONT_ASAN ? bytes : rounded & ~(size_t)(CACHE_LINE - 1);
    if (posix_memalign(&block, align, rounded)) block = NULL;
    if (!count_block(block, bytes)) return NULL;
    if (align == HUGE_PAGE)
        madvise(block, rounded & ~(size_t)(HUGE_PAGE - 1), MADV_HUGEPAGE); /* a hint: failure only costs speed */
    atomic_fetch_add_explicit(&live_bytes, (int64_t)bytes, memory_order_relaxed);
    return block;
}

void ont_buffer_free(void *block, size_t bytes)
{
    if (!block) return;
    atomic_fetch_sub_explicit(&live_bytes, (int64_t)bytes, memory_order_relaxed);
    ont_free(block);
}

void ont_buffer_advise_free(void *block, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)block;
    uintptr_t first = (at + page - 1) / page * page, last = (at + bytes) / page * page;
    if (first < last) madvise((void *)first, last - first, MADV_FREE); /* a hint as well */
}
