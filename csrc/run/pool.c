/*
 * Pool of tensor memory. See pool.h for the states of a block. One mutex is enough: a step takes at most a few hundred
 * blocks.
 */
#include "run/pool.h"

#include <pthread.h>
#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"

enum {
    RECLAIMABLE_BYTES = 16 << 20, /* minimum size of a reclaimable block */
    IDLE_SLABS = 2, /* one for training, one for overlapping forwards */
    EVICTION_AGE = 2, /* in allocations since the block was freed, as a multiple of the peak number of live blocks */
};

typedef struct block_list {
    ont_block *head, *tail; /* most and least recently freed */
    size_t bytes;
} block_list;

struct ont_pool {
    pthread_mutex_t lock;
    const ont_device *device;
    block_list cached, reclaimable; /* reclaimable blocks are not counted as cached memory */
    ont_pool_stats stats;
    uint64_t refs;                     /* one of the owner, one of each live block */
    uint64_t live_blocks, peak_blocks; /* numbers of blocks */
    int open_runs;
    ont_slab slabs[IDLE_SLABS];
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
        block->device->ops->free(block->device, &block->memory, block->bytes ? block->bytes : 1);
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

/* ---- invariants ---- */

#ifdef NDEBUG
static void pool_check(const ont_pool *pool)
{
    (void)pool;
}
#else
/* A list is linked both ways, from the most to the least recently freed block, and knows its bytes. */
static void list_check(const ont_pool *pool, const block_list *s, bool reclaimable)
{
    size_t bytes = 0;
    const ont_block *newer = NULL;
    for (const ont_block *block = s->head; block; newer = block, block = block->older) {
        ONT_ASSERT(block->newer == newer);
        ONT_ASSERT(!newer || newer->freed_at >= block->freed_at);
        ONT_ASSERT(block->pool == pool && block->refs == 0);
        ONT_ASSERT(block->reclaimable == reclaimable && (reclaimable || !block->advised));
        bytes += block->bytes;
    }
    ONT_ASSERT(s->tail == newer);
    ONT_ASSERT(s->bytes == bytes);
}

/* With the lock, wherever lists or counts change: what holds for a pool at rest. */
static void pool_check(const ont_pool *pool)
{
    list_check(pool, &pool->cached, false);
    list_check(pool, &pool->reclaimable, true);
    ONT_ASSERT(pool->refs >= pool->live_blocks); /* the owner's is one more, until it is gone */
    ONT_ASSERT(pool->live_blocks <= pool->peak_blocks);
    ONT_ASSERT(pool->live_blocks || !pool->stats.live_bytes);
    ONT_ASSERT(!pool->device || (!pool->cached.head && !pool->reclaimable.head));
    ONT_ASSERT(pool->open_runs >= 0);
    for (int i = 0; i < IDLE_SLABS; i++) ONT_ASSERT(pool->slabs[i].data || !pool->slabs[i].bytes);
}
#endif

/* ---- LRU lists ---- */

static block_list *list_of(ont_pool *pool, const ont_block *block)
{
    return block->reclaimable ? &pool->reclaimable : &pool->cached;
}

static void list_push(block_list *s, ont_block *block)
{
    ONT_ASSERT(!s->head || !s->head->newer);
    block->newer = NULL;
    block->older = s->head;
    *(s->head ? &s->head->newer : &s->tail) = block;
    s->head = block;
    s->bytes += block->bytes;
}

static void list_remove(block_list *s, ont_block *block)
{
    ONT_ASSERT(block->newer || s->head == block);
    ONT_ASSERT(block->older || s->tail == block);
    ONT_ASSERT(s->bytes >= block->bytes);
    *(block->newer ? &block->newer->older : &s->head) = block->older;
    *(block->older ? &block->older->newer : &s->tail) = block->newer;
    s->bytes -= block->bytes;
}

/* Removes and returns the most recently freed block of exactly that size; NULL if there is none. */
static ont_block *list_pop_size(block_list *s, size_t bytes)
{
    ont_block *block = s->head;
    while (block && block->bytes != bytes) block = block->older;
    if (block) list_remove(s, block);
    return block;
}

/*
 * Whether a freed block is cached: while live + cached bytes are hardly more than the historical peak of live bytes.
 * Without the 1/32, a count of eight bytes that was freed before the gradients came would leave the last gradient out.
 */
static bool may_cache(const ont_pool *pool, const block_list *s, const ont_block *block)
{
    size_t most = pool->stats.peak_bytes + pool->stats.peak_bytes / 32;
    return !pool->device && pool->stats.live_bytes + s->bytes + block->bytes <= most;
}

/*
 * Removes and returns the least recently freed block if it is older than EVICTION_AGE: steps no longer use its size.
 * NULL otherwise.
 */
static ont_block *list_pop_stale(const ont_pool *pool, block_list *s)
{
    ont_block *tail = s->tail;
    if (!tail || pool->stats.taken - tail->freed_at <= EVICTION_AGE * pool->peak_blocks) return NULL;
    list_remove(s, tail);
    return tail;
}

/*
 * Applies MADV_FREE to the reclaimable blocks, up to the first one that has it already. Called only before an
 * allocation from the system: a step that allocates nothing avoids the calls, which take 0.7 ms for 77 MiB in huge
 * pages (TLB shootdowns).
 */
static void advise_reclaimable(ont_pool *pool)
{
    for (ont_block *block = pool->reclaimable.head; block && !block->advised; block = block->older) {
        ont_buffer_advise_free(block->data, block->bytes);
        block->advised = true;
    }
}

/* ---- pools ---- */

static void pool_destroy(ont_pool *pool)
{
    blocks_free(pool->cached.head);
    blocks_free(pool->reclaimable.head);
    pthread_mutex_destroy(&pool->lock);
    ont_free(pool);
}

void ont_pool_unref(ont_pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    ont_block *cached = pool->cached.head, *reclaimable = pool->reclaimable.head;
    pool->cached = pool->reclaimable = (block_list){0};
    pool->stats.peak_bytes = 0; /* no allocation will follow: cache nothing from now on */
    ont_slab slabs[IDLE_SLABS];
    memcpy(slabs, pool->slabs, sizeof slabs);
    memset(pool->slabs, 0, sizeof pool->slabs);
    bool last = --pool->refs == 0;
    pool_check(pool);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < IDLE_SLABS; i++)
        if (slabs[i].data) ont_buffer_free(slabs[i].data, slabs[i].bytes);
    blocks_free(cached);
    blocks_free(reclaimable);
    if (last) pool_destroy(pool);
}

static ont_status block_alloc(const ont_device *device, ont_dtype dtype, ont_block *block)
{
    block->device = device;
    if (!device) {
        block->data = ont_buffer_alloc(block->bytes);
        return block->data ? ONT_OK : ONT_ENOMEM;
    }
    ONT_TRY(device->ops->alloc(device, block->bytes ? block->bytes : 1, dtype, &block->memory));
    block->data = block->memory.data;
    return ONT_OK;
}

ont_status ont_pool_take(ont_pool *pool, ont_dtype dtype, const ont_shape *shape, ont_block **result)
{
    size_t bytes;
    ONT_TRY(ont_shape_bytes(shape, dtype, &bytes));
    pthread_mutex_lock(&pool->lock);
    pool_check(pool);
    ont_block *block = list_pop_size(&pool->cached, bytes);
    if (!block) block = list_pop_size(&pool->reclaimable, bytes);
    if (block) pool->stats.reused++;
    else advise_reclaimable(pool);
    pool_check(pool);
    pthread_mutex_unlock(&pool->lock);
    if (!block) {
        block = ont_calloc(1, sizeof *block);
        if (!block) return ONT_ENOMEM;
        block->bytes = bytes;
        ont_status status = block_alloc(pool->device, dtype, block);
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
    if (++pool->live_blocks > pool->peak_blocks) pool->peak_blocks = pool->live_blocks;
    if (pool->stats.live_bytes > pool->stats.peak_bytes) pool->stats.peak_bytes = pool->stats.live_bytes;
    pool_check(pool);
    pthread_mutex_unlock(&pool->lock);
    *result = block;
    return ONT_OK;
}

ont_block *ont_block_ref(ont_block *block)
{
    ONT_ASSERT(block->refs > 0);
    __atomic_fetch_add(&block->refs, 1, __ATOMIC_RELAXED);
    return block;
}

void ont_block_unref(ont_block *block)
{
    ONT_ASSERT(!block || block->refs > 0);
    if (!block || __atomic_sub_fetch(&block->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    ont_pool *pool = block->pool;
    pthread_mutex_lock(&pool->lock);
    pool_check(pool);
    pool->stats.live_bytes -= block->bytes;
    pool->live_blocks--;
    block->reclaimable = pool->open_runs && block->bytes >= RECLAIMABLE_BYTES;
    block_list *list = list_of(pool, block);
    ont_block *to_free = NULL, *evicted_block;
    while (!pool->device && !may_cache(pool, list, block) && (evicted_block = list_pop_stale(pool, list))) {
        evicted_block->older = to_free;
        to_free = evicted_block;
    }
    if (may_cache(pool, list, block)) {
        block->advised = false;
        block->freed_at = pool->stats.taken;
        list_push(list, block);
    } else {
        block->older = to_free;
        to_free = block;
    }
    bool last = --pool->refs == 0;
    pool_check(pool);
    pthread_mutex_unlock(&pool->lock);
    blocks_free(to_free);
    if (last) pool_destroy(pool);
}

void ont_pool_open_runs(ont_pool *pool, int change)
{
    pthread_mutex_lock(&pool->lock);
    pool->open_runs += change;
    pool_check(pool);
    pthread_mutex_unlock(&pool->lock);
}

/* Whether slab a serves a request better than b: the smallest that fits, or the largest, which takes its place. */
static bool is_better_slab(const ont_slab *a, const ont_slab *b, size_t bytes)
{
    bool fits = a->bytes >= bytes, other_fits = b->bytes >= bytes;
    if (fits != other_fits) return fits;
    return fits ? a->bytes < b->bytes : a->bytes > b->bytes;
}

ont_status ont_pool_take_slab(ont_pool *pool, size_t bytes, ont_slab *slab)
{
    *slab = (ont_slab){0};
    int best = -1;
    pthread_mutex_lock(&pool->lock);
    for (int i = 0; i < IDLE_SLABS; i++)
        if (pool->slabs[i].data && (best < 0 || is_better_slab(&pool->slabs[i], &pool->slabs[best], bytes))) best = i;
    if (best >= 0) {
        *slab = pool->slabs[best];
        pool->slabs[best] = (ont_slab){0};
    }
    pthread_mutex_unlock(&pool->lock);
    if (slab->data && slab->bytes >= bytes) return ONT_OK;
    if (slab->data) ont_buffer_free(slab->data, slab->bytes);
    slab->bytes = bytes + bytes / 32; /* the next batch may need a little more */
    slab->data = ont_buffer_alloc(slab->bytes);
    return slab->data ? ONT_OK : ONT_ENOMEM;
}

void ont_pool_give_slab(ont_pool *pool, ont_slab slab)
{
    pthread_mutex_lock(&pool->lock);
    for (int i = 0; i < IDLE_SLABS && slab.data; i++)
        if (!pool->slabs[i].data) {
            pool->slabs[i] = slab;
            slab.data = NULL;
        }
    pthread_mutex_unlock(&pool->lock);
    if (slab.data) ont_buffer_free(slab.data, slab.bytes);
}

void ont_pool_get_stats(ont_pool *pool, ont_pool_stats *stats)
{
    pthread_mutex_lock(&pool->lock);
    *stats = pool->stats;
    stats->cached_bytes = pool->cached.bytes;
    pthread_mutex_unlock(&pool->lock);
}
