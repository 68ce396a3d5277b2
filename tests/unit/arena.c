/*
 * An arena gives zeroed, aligned blocks that are apart, and refuses what it cannot hold.
 */
#include "base/arena.h"
#include "check.h"

TEST(arena_blocks_are_zeroed_aligned_and_apart)
{
    enum { N = 2000 };
    static struct {
        unsigned char *at;
        size_t bytes;
    } made[N];
    ont_arena arena;
    ont_arena_init(&arena);
    size_t total = 0;
    for (int i = 0; i < N; i++) {
        size_t bytes = (size_t)check_between(0, i % 50 ? 200 : 40000);
        unsigned char *at = ont_arena_alloc(&arena, bytes);
        CHECK(at != NULL);
        CHECK_INT((uintptr_t)at % (bytes >= 1024 ? 64 : 16), 0);
        for (size_t k = 0; k < bytes; k++) CHECK(at[k] == 0);
        memset(at, i % 255 + 1, bytes);
        made[i].at = at;
        made[i].bytes = bytes;
        total += bytes;
    }
    CHECK_INT(arena.bytes, total);
    for (int i = 0; i < N; i++)
        for (size_t k = 0; k < made[i].bytes; k++) CHECK(made[i].at[k] == i % 255 + 1);
    ont_arena_deinit(&arena);
    CHECK_INT(ont_alloc_live(), 0);
    CHECK_INT(arena.bytes, 0);
}

TEST(arena_larger_than_a_block)
{
    ont_arena arena;
    ont_arena_init(&arena);
    unsigned char *large = ont_arena_alloc(&arena, 3 << 20), *small = ont_arena_alloc(&arena, 16);
    CHECK(large && small);
    memset(large, 1, 3 << 20);
    CHECK(!small[0] && !small[15]);
    ont_arena_deinit(&arena);
}

TEST(arena_refuses_what_overflows)
{
    ont_arena arena;
    ont_arena_init(&arena);
    volatile size_t huge = SIZE_MAX;
    CHECK(ont_arena_alloc(&arena, huge) == NULL);
    CHECK(ont_arena_alloc(&arena, huge - 64) == NULL);
    CHECK(ont_arena_array(&arena, huge / 8, 16) == NULL);
    CHECK(ont_arena_alloc(&arena, 8) != NULL); /* still of use */
    ont_arena_deinit(&arena);
}

TEST(arena_survives_a_failed_allocation)
{
    ont_arena arena;
    ont_arena_init(&arena);
    char *first = ont_arena_strdup(&arena, "first");
    ont_alloc_fail_after(0);
    CHECK(ont_arena_alloc(&arena, 1 << 20) == NULL);
    ont_alloc_fail_after(-1);
    CHECK_TEXT(first, "first");
    CHECK(ont_arena_alloc(&arena, 1 << 20) != NULL);
    ont_arena_deinit(&arena);
}

TEST(arena_text)
{
    ont_arena arena;
    ont_arena_init(&arena);
    CHECK_TEXT(ont_arena_strdup(&arena, ""), "");
    CHECK_TEXT(ont_arena_strndup(&arena, "abcdef", 3), "abc");
    CHECK_TEXT(ont_arena_format(&arena, "%s_%d%%", "node", 12), "node_12%");
    ont_arena_deinit(&arena);
}
