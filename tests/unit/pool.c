/*
 * Unit tests of csrc/run/pool.c: which idle slab a run takes. Blocks are in tests of whole steps.
 */
#include "check.h"
#include "run/pool.h"

static ont_slab take(ont_pool *pool, size_t bytes)
{
    ont_slab slab;
    CHECK_OK(ont_pool_take_slab(pool, bytes, &slab));
    CHECK(slab.data && slab.bytes >= bytes);
    return slab;
}

TEST(pool_takes_the_smallest_slab_that_fits)
{
    ont_pool *pool;
    CHECK_OK(ont_pool_create(NULL, &pool));
    ont_slab small = take(pool, 1000), large = take(pool, 1 << 20);
    for (int order = 0; order < 2; order++) {
        ont_pool_give_slab(pool, order ? large : small);
        ont_pool_give_slab(pool, order ? small : large);
        ont_slab first = take(pool, 2000), second = take(pool, 500);
        CHECK(first.data == large.data && second.data == small.data);
        ont_pool_give_slab(pool, first);
        ont_pool_give_slab(pool, second);
        CHECK((first = take(pool, 500)).data == small.data);
        CHECK((second = take(pool, 500)).data == large.data); /* it fits, too */
    }
    ont_pool_give_slab(pool, small);
    ont_pool_give_slab(pool, large);
    ont_slab larger = take(pool, 4 << 20); /* in place of the large one */
    CHECK(take(pool, 1000).data == small.data);
    ont_pool_give_slab(pool, larger);
    ont_pool_give_slab(pool, small);
    ont_pool_unref(pool);
    CHECK_INT(ont_alloc_live(), 0);
}
