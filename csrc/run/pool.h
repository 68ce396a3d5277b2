/*
 * Pool of tensor memory: outputs, gradients and contiguous copies of strided inputs are blocks of the pool.
 *
 * A block is freed when its last reference is dropped, on any thread, with or without the GIL, also after the session
 * is gone: the pool lives as long as its last block.
 *
 * States of a block:
 *   - live: referenced;
 *   - cached: free, resident, in an LRU list, reused by exact size, since freshly mapped pages cost ten times a write
 *     to resident ones. A freed block is cached if live + cached bytes stay within the historical peak of live bytes.
 *     If they would not, cached blocks that were not reused for a long time (EVICTION_AGE in pool.c) are evicted first;
 *   - reclaimable: free and large (RECLAIMABLE_BYTES in pool.c), freed between a forward and its backward, when a step
 *     holds the most memory. Kept in an LRU list of its own, under the same limit, so that it does not displace cached
 *     blocks. When the pool next allocates from the system, it advises the kernel that these pages may be reclaimed
 *     (MADV_FREE).
 */
#ifndef ONT_RUN_POOL_H
#define ONT_RUN_POOL_H

#include "base/shape.h"
#include "device/device.h"

typedef struct ont_pool ont_pool;

typedef struct ont_block {
    void *data;
    size_t bytes;
    ont_dtype dtype;
    ont_shape shape;
    const ont_device *device; /* NULL: the CPU */
    ont_memory memory;        /* on a device */
    /* Private to the pool: */
    ont_pool *pool;
    int refs;
    /* Position in one of the pool's LRU lists: */
    struct ont_block *newer, *older;
    bool reclaimable, advised; /* in the list of reclaimable blocks; MADV_FREE was applied */
    uint64_t freed_at; /* stats.taken when it was freed */
} ont_block;

typedef struct ont_pool_stats {
    size_t live_bytes, cached_bytes, peak_bytes;
    uint64_t taken, reused;
} ont_pool_stats;

/*
 * On a device nothing is cached: torch's allocator does that, and it knows the streams. The statistics do not count
 * what the caller of a session on a device holds: those tensors are torch's own.
 */
ont_status ont_pool_create(const ont_device *device, ont_pool **pool) ONT_MUST_USE;
void ont_pool_unref(ont_pool *pool); /* cached blocks are freed now, live ones when their last reference is dropped */
ont_status ont_pool_take(ont_pool *pool, ont_dtype dtype, const ont_shape *shape, ont_block **block) ONT_MUST_USE;
ont_block *ont_block_ref(ont_block *block);
void ont_block_unref(ont_block *block); /* NULL is ignored */
/* Number of runs between forward and backward: +1 when a run begins, -1 when it ends. */
void ont_pool_open_runs(ont_pool *pool, int change);
/*
 * Slabs shared by programs that differ only in their number of packed rows, on the CPU: idle ones are kept for
 * whichever of them runs next, so that many programs need the memory of one.
 */
typedef struct ont_slab {
    void *data; /* NULL: none */
    size_t bytes;
} ont_slab;

ont_status ont_pool_take_slab(ont_pool *pool, size_t bytes, ont_slab *slab) ONT_MUST_USE; /* of at least so many */
void ont_pool_give_slab(ont_pool *pool, ont_slab slab);
void ont_pool_get_stats(ont_pool *pool, ont_pool_stats *stats);

#endif
