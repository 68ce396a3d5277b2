/*
 * Allocation counts blocks and bytes, aligns buffers and fails where its hook says.
 */
#include "check.h"

TEST(alloc_hook_fails_the_nth_and_all_later)
{
    void *kept[3];
    ont_alloc_fail_after(3);
    for (int i = 0; i < 3; i++) CHECK((kept[i] = ont_malloc(8)) != NULL);
    CHECK(!ont_alloc_fail_fired());
    CHECK(ont_malloc(8) == NULL);
    CHECK(strstr(ont_error_message(), "out of memory"));
    CHECK(ont_alloc_fail_fired());
    CHECK(ont_calloc(2, 8) == NULL && ont_realloc(NULL, 1, 8) == NULL);
    CHECK(ont_buffer_alloc(64) == NULL && ont_buffer_alloc(4 << 20) == NULL);
    ont_alloc_fail_after(-1);
    CHECK(!ont_alloc_fail_fired());
    void *again = ont_malloc(8);
    CHECK(again != NULL);
    CHECK_INT(ont_alloc_live(), 4);
    for (int i = 0; i < 3; i++) ont_free(kept[i]);
    ont_free(again);
    CHECK_INT(ont_alloc_live(), 0);
}

TEST(alloc_realloc_keeps_the_block_on_failure)
{
    char *block = ont_malloc(4);
    CHECK(block != NULL);
    memcpy(block, "abc", 4);
    ont_alloc_fail_after(0);
    CHECK(ont_realloc(block, 100, 1) == NULL);
    ont_alloc_fail_after(-1);
    CHECK(ont_realloc(block, SIZE_MAX, 2) == NULL); /* the product overflows */
    CHECK_TEXT(block, "abc");
    CHECK_INT(ont_alloc_live(), 1);
    block = ont_realloc(block, 10, 10);
    CHECK(block != NULL);
    CHECK_TEXT(block, "abc");
    CHECK_INT(ont_alloc_live(), 1);
    ont_free(block);
}

TEST(alloc_refuses_sizes_that_overflow)
{
    volatile size_t huge = SIZE_MAX; /* hidden from the compiler's own check */
    CHECK(ont_calloc(huge / 2 + 1, 2) == NULL);
    CHECK(ont_calloc(huge, huge) == NULL);
    CHECK(ont_buffer_alloc(huge) == NULL && ont_buffer_alloc(huge - 100) == NULL);
    CHECK_INT(ont_alloc_live_bytes(), 0);
}

TEST(alloc_nothing_is_something)
{
    void *a = ont_malloc(0), *b = ont_calloc(0, 8), *c = ont_buffer_alloc(0);
    CHECK(a && b && c && a != b);
    ont_free(a);
    ont_free(b);
    ont_buffer_free(c, 0);
    ont_free(NULL);
    ont_buffer_free(NULL, 0);
}

TEST(alloc_buffers_are_aligned_and_counted)
{
    enum { SMALL = 100, LARGE = 5 << 20 };
    unsigned char *small = ont_buffer_alloc(SMALL), *large = ont_buffer_alloc(LARGE);
    CHECK(small && large);
    CHECK_INT((uintptr_t)small % 64, 0);
    CHECK_INT((uintptr_t)large % (2 << 20), 0);
    CHECK_INT(ont_alloc_live_bytes(), SMALL + LARGE);
    memset(small, 1, SMALL);
    memset(large, 1, LARGE);
    ont_buffer_free(small, SMALL);
    ont_buffer_free(large, LARGE);
    CHECK_INT(ont_alloc_live_bytes(), 0);
}
