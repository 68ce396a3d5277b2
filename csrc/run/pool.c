/*
 * Recycled tensor memory. See pool.h. One mutex: blocks are taken a few hundred times a step at the most.
 */
#include "run/pool.h"

#include <pthread.h>

#include "base/alloc.h"

enum {
    LARGE_BLOCK = 16 << 20, /* the system may have its pages if it came back while a run waits for its backward */
    STALE = 2,              /* times as many blocks as were live at once */
};

typedef struct shelf {
    ont_block *newest, *oldest; /* that came back */
    size_t bytes;
} shelf;

struct ont_pool {
    pthread_mutex_t lock;
    const ont_device *device;
    shelf cached, idle; /* the latter is not in the statistics: memory that nobody has to do without */
    ont_pool_stats stats;
    uint64_t refs;       /* the owner's, and one a live block */
    uint64_t live, peak; /* blocks */
    int open_runs;
};

ont_status ont_pool_create(const ont_device *device, ont_pool **pool)
{
    ont_pool *p = ont_calloc(1, sizeof *p);
    if (!p) return ONT_ENOMEM;
    pthread_mutex_init(&p->lock, NULL);
    p->refs = 1;
    p->device = device;
    *pool = p;
    return ONT_OK;
}

static void block_free(ont_block *block)
{
    if (block->device)
        block->device->ops->free(block->device, &(ont_memory){block->data, block->owner},
                                  block->bytes ? block->bytes : 1);
    else
        ont_buffer_free(block->data, block->bytes);
    ont_free(block);
}

static void blocks_free(ont_block *list)
{
    for (ont_block *older; list; list = older) {
        older = list->older;
        block_free(list);
    }
}

/* ---- shelves ---- */

static shelf *shelf_of(ont_pool *pool, const ont_block *block)
{
    return block->idle ? &pool->idle : &pool->cached;
}

static void put_on(shelf *s, ont_block *block)
{
    block->newer = NULL;
    block->older = s->newest;
    *(s->newest ? &s->newest->newer : &s->oldest) = block;
    s->newest = block;
    s->bytes += block->bytes;
}

static void take_off(shelf *s, ont_block *block)
{
    *(block->newer ? &block->newer->older : &s->newest) = block->older;
    *(block->older ? &block->older->newer : &s->oldest) = block->newer;
    s->bytes -= block->bytes;
}

/* Takes off a block of exactly that size; NULL where there is none. */
static ont_block *find_on(shelf *s, size_t bytes)
{
    ont_block *block = s->newest;
    while (block && block->bytes != bytes) block = block->older;
    if (block) take_off(s, block);
    return block;
}

/* Whether a block that comes back is kept: what fits under the peak was needed at once before and will be again. */
static bool fits(const ont_pool *pool, const shelf *s, const ont_block *block)
{
    return !pool->device && pool->stats.live_bytes + s->bytes + block->bytes <= pool->stats.peak_bytes;
}

/*
 * Takes off the oldest block, if so many were taken since it came back that some step would have asked for it: its
 * shape is gone. NULL: there is none.
 */
static ont_block *take_stale(const ont_pool *pool, shelf *s)
{
    ont_block *oldest = s->oldest;
    if (!oldest || pool->stats.taken - oldest->since <= STALE * pool->peak) return NULL;
    take_off(s, oldest);
    return oldest;
}

/*
 * What was offered before lies behind what was not. Only memory that nobody has had yet may find too little left, and a
 * step that takes none goes without the calls: 0.7 ms for 77 MiB in huge pages, each of which is a message to the other
 * cores.
 */
static void offer_idle(ont_pool *pool)
{
    for (ont_block *block = pool->idle.newest; block && !block->offered; block = block->older) {
        ont_buffer_idle(block->data, block->bytes);
        block->offered = true;
    }
}

/* ---- pools ---- */

static void pool_destroy(ont_pool *pool)
{
    blocks_free(pool->cached.newest);
    blocks_free(pool->idle.newest);
    pthread_mutex_destroy(&pool->lock);
    ont_free(pool);
}

void ont_pool_unref(ont_pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    ont_block *cached = pool->cached.newest, *idle = pool->idle.newest;
    pool->cached = pool->idle = (shelf){0};
    pool->stats.peak_bytes = 0; /* nobody will take again: keep nothing */
    bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->lock);
    blocks_free(cached);
    blocks_free(idle);
    if (last) pool_destroy(pool);
}

static ont_status block_alloc(const ont_device *device, ont_block *block)
{
    block->device = device;
    if (!device) {
        block->data = ont_buffer_alloc(block->bytes);
        return block->data ? ONT_OK : ONT_ENOMEM;
    }
    ont_memory memory = {0};
    ONT_TRY(device->ops->alloc(device, block->bytes ? block->bytes : 1, &memory));
    block->data = memory.data;
    block->owner = memory.owner;
    return ONT_OK;
}

ont_status ont_pool_take(ont_pool *pool, ont_dtype dtype, const ont_shape *shape, ont_block **result)
{
    size_t bytes;
    ONT_TRY(ont_shape_bytes(shape, dtype, &bytes));
    pthread_mutex_lock(&pool->lock);
    ont_block *block = find_on(&pool->cached, bytes);
    if (!block) block = find_on(&pool->idle, bytes);
    if (block) pool->stats.reused++;
    else offer_idle(pool);
    pthread_mutex_unlock(&pool->lock);
    if (!block) {
        block = ont_calloc(1, sizeof *block);
        if (!block) return ONT_ENOMEM;
        block->bytes = bytes;
        ont_status status = block_alloc(pool->device, block);
        if (status != ONT_OK) {
            ont_free(block);
            return status;
        }
    }
    block->pool = pool;
    block->refs = 1;
    block->dtype = dtype;
    block->shape = *shape;
    pthread_mutex_lock(&pool->lock);
    pool->refs++;
    pool->stats.taken++;
    pool->stats.live_bytes += bytes;
    if (++pool->live > pool->peak) pool->peak = pool->live;
    if (pool->stats.live_bytes > pool->stats.peak_bytes) pool->stats.peak_bytes = pool->stats.live_bytes;
    pthread_mutex_unlock(&pool->lock);
    *result = block;
    return ONT_OK;
}

ont_block *ont_block_ref(ont_block *block)
{
    __atomic_fetch_add(&block->refs, 1, __ATOMIC_RELAXED);
    return block;
}

void ont_block_unref(ont_block *block)
{
    if (!block || __atomic_sub_fetch(&block->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    ont_pool *pool = block->pool;
    pthread_mutex_lock(&pool->lock);
    pool->stats.live_bytes -= block->bytes;
    pool->live--;
    block->idle = pool->open_runs && block->bytes >= LARGE_BLOCK;
    shelf *to = shelf_of(pool, block);
    ont_block *away = NULL, *stale;
    while (!pool->device && !fits(pool, to, block) && (stale = take_stale(pool, to))) {
        stale->older = away;
        away = stale;
    }
    if (fits(pool, to, block)) {
        block->offered = false;
        block->since = pool->stats.taken;
        put_on(to, block);
    } else {
        block->older = away;
        away = block;
    }
    bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->lock);
    blocks_free(away);
    if (last) pool_destroy(pool);
}

void ont_pool_open_runs(ont_pool *pool, int change)
{
    pthread_mutex_lock(&pool->lock);
    pool->open_runs += change;
    pthread_mutex_unlock(&pool->lock);
}

void ont_pool_get_stats(ont_pool *pool, ont_pool_stats *stats)
{
    pthread_mutex_lock(&pool->lock);
    *stats = pool->stats;
    stats->cached_bytes = pool->cached.bytes;
    pthread_mutex_unlock(&pool->lock);
}
