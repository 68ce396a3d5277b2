/*
 * Recycled tensor memory: outputs, gradients and copies of strided inputs live in blocks of a pool.
 *
 * A block goes back when its last reference is dropped, from any thread, with or without the GIL, also after the
 * session is gone: the pool lives as long as its last block. Fresh pages cost ten times a warm write, so blocks are
 * kept by exact size, up to what was once live at the same time; one that nobody asks for any more makes way. The pages
 * of a large block that came back between a forward and its backward, where a step holds most memory, are the system's
 * for the asking as soon as the pool takes memory from it. Such blocks are counted apart, else they would be kept in
 * the place of others that the step needs as well.
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
    /* private to the pool */
    void *owner;
    ont_pool *pool;
    int refs;
    /* where it is kept: */
    struct ont_block *newer, *older;
    bool idle, offered; /* the system may have its pages, and has been told */
    uint64_t since; /* how many were taken before it came back */
} ont_block;

typedef struct ont_pool_stats {
    size_t live_bytes, cached_bytes, peak_bytes;
    uint64_t taken, reused;
} ont_pool_stats;

/* On a device nothing is cached: its allocator does that, and knows the streams. */
ont_status ont_pool_create(const ont_device *device, ont_pool **pool) ONT_MUST_USE;
void ont_pool_unref(ont_pool *pool); /* cached blocks go now, live ones when they are dropped */
ont_status ont_pool_take(ont_pool *pool, ont_dtype dtype, const ont_shape *shape, ont_block **block) ONT_MUST_USE;
ont_block *ont_block_ref(ont_block *block);
void ont_block_unref(ont_block *block); /* NULL is fine */
/* A forward waits for its backward: +1 when it begins, -1 when it is done with. */
void ont_pool_open_runs(ont_pool *pool, int change);
void ont_pool_get_stats(ont_pool *pool, ont_pool_stats *stats);

#endif
