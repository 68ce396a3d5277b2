/*
 * Unit tests of csrc/base: allocation and its hook, arena, dtypes, shapes, map, status, parallel loops and denormals.
 */
#include <inttypes.h>
#include <omp.h>
#include <pthread.h>

#include "base/arena.h"
#include "base/denormals.h"
#include "base/map.h"
#include "base/parallel.h"
#include "base/shape.h"
#include "check.h"

TEST(check_of_the_harness)
{
    bool condition_that_fails = getenv("ONNXTRAIN_UNIT_FAIL") == NULL;
    CHECK(condition_that_fails);
}

/* ---- alloc ---- */

TEST(alloc_hook_fails_the_nth_and_all_later)
{
    void *kept[3];
    ont_alloc_fail_after(3);
    for (int i = 0; i < 3; i++) CHECK((kept[i] = ont_malloc(8)) != NULL);
    CHECK(!ont_alloc_fail_fired());
    CHECK(ont_malloc(8) == NULL);
    CHECK(strstr(ont_error_message(), "out of memory"));
    CHECK(ont_alloc_fail_fired());
    CHECK(ont_calloc(2, 8) == NULL && ont_realloc(NULL, 1, 8) == NULL && ont_strdup("x") == NULL);
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

/* ---- arena ---- */

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

/* ---- dtypes ---- */

TEST(dtype_dlpack_round_trip)
{
    for (int d = 0; d <= ONT_DTYPE_COUNT; d++) {
        uint8_t code = 0, bits = 0;
        ont_dtype back = ONT_UNDEFINED;
        size_t size = ont_dtype_size((ont_dtype)d);
        if (d == ONT_UNDEFINED || d == ONT_STRING || d == ONT_DTYPE_COUNT) {
            CHECK_INT(size, 0);
            continue;
        }
        ont_dtype_to_dlpack((ont_dtype)d, &code, &bits);
        CHECK(ont_dtype_from_dlpack(code, bits, &back));
        CHECK_INT(back, ont_dtype_carrier((ont_dtype)d));
        CHECK(back == (ont_dtype)d || (ont_dtype_is_narrow((ont_dtype)d) && ont_dtype_bits((ont_dtype)d) < 8));
        CHECK_INT(bits, size * 8);
        CHECK(!(ont_dtype_is_float((ont_dtype)d) && ont_dtype_is_int((ont_dtype)d)));
    }
    ont_dtype left = ONT_INT8;
    CHECK(!ont_dtype_from_dlpack(2, 7, &left) && !ont_dtype_from_dlpack(99, 32, &left));
    CHECK_INT(left, ONT_INT8);
    CHECK_TEXT(ont_dtype_name(ONT_DTYPE_COUNT), "?");
}

/* ---- shapes ---- */

static ont_shape shape(int rank, const int64_t *dims)
{
    return ont_shape_of(rank, dims);
}
#define SHAPE(...) shape(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), (int64_t[]){__VA_ARGS__})

TEST(shape_bytes)
{
    ont_shape scalar = {0}, plain = SHAPE(2, 3, 4), empty = SHAPE(5, 0, 7);
    size_t bytes = 0;
    CHECK_OK(ont_shape_bytes(&scalar, ONT_FLOAT64, &bytes));
    CHECK_INT(bytes, 8);
    CHECK_OK(ont_shape_bytes(&plain, ONT_INT16, &bytes));
    CHECK_INT(bytes, 48);
    CHECK_OK(ont_shape_bytes(&empty, ONT_FLOAT32, &bytes));
    CHECK_INT(bytes, 0);
    CHECK_INT(ont_shape_count(&scalar), 1);
    CHECK_INT(ont_shape_count(&plain), 24);
    CHECK_INT(ont_shape_count(&empty), 0);
    CHECK_INT(ont_shape_count_range(&plain, 1, 3), 12);
    CHECK_INT(ont_shape_count_range(&plain, 2, 2), 1);
}

TEST(shape_bytes_that_overflow)
{
    const int64_t m = INT64_MAX;
    ont_shape bad[] = {SHAPE(m), SHAPE(m, m), SHAPE(1ll << 31, 1ll << 31, 2), SHAPE(0, m, m), SHAPE(m, 0, m),
                       SHAPE(1ll << 62, 4), SHAPE(3, m / 2)};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        size_t bytes = 77;
        CHECK_FAILS(ont_shape_bytes(&bad[i], ONT_FLOAT32, &bytes), ONT_EINVAL, "overflows");
        CHECK_INT(bytes, 77);
    }
    size_t bytes = 77;
    ont_shape negative = SHAPE(2, -1), symbol = SHAPE(ONT_DIM_SYMBOL(3)), one = SHAPE(1);
    CHECK_FAILS(ont_shape_bytes(&negative, ONT_FLOAT32, &bytes), ONT_EINVAL, "negative or unknown");
    CHECK_FAILS(ont_shape_bytes(&symbol, ONT_FLOAT32, &bytes), ONT_EINVAL, "negative or unknown");
    CHECK_FAILS(ont_shape_bytes(&one, ONT_STRING, &bytes), ONT_ETYPE, "string");
    CHECK_FAILS(ont_shape_bytes(&one, ONT_UNDEFINED, &bytes), ONT_ETYPE, "undefined");
    CHECK_INT(bytes, 77);
}

/* Random sizes with and without overflow, against 128-bit arithmetic. */
TEST(shape_bytes_against_wide_arithmetic)
{
    for (int round = 0; round < 20000; round++) {
        ont_shape s = {.rank = (int32_t)check_between(0, ONT_MAX_RANK)};
        unsigned __int128 total = 4;
        bool fits = true;
        for (int i = 0; i < s.rank; i++) {
            s.dims[i] = (int64_t)(check_random() >> check_between(1, 62));
            if (!s.dims[i]) s.dims[i] = 1;
            if (fits) total *= (unsigned __int128)s.dims[i];
            fits = fits && total <= INT64_MAX / 2;
        }
        size_t bytes = 0;
        ont_status status = ont_shape_bytes(&s, ONT_FLOAT32, &bytes);
        CHECK_INT(status, fits ? ONT_OK : ONT_EINVAL);
        if (fits) CHECK_INT(bytes, (size_t)total);
    }
}

TEST(shape_strides_and_axis)
{
    ont_shape s = SHAPE(2, 3, 4);
    int64_t strides[ONT_MAX_RANK];
    int axis = 9;
    ont_shape_strides(&s, strides);
    CHECK(strides[0] == 12 && strides[1] == 4 && strides[2] == 1);
    for (int i = -3; i < 3; i++) {
        CHECK_OK(ont_shape_axis(i, 3, &axis));
        CHECK_INT(axis, i < 0 ? i + 3 : i);
    }
    CHECK_FAILS(ont_shape_axis(3, 3, &axis), ONT_EINVAL, "axis 3 is out of range for rank 3");
    CHECK_FAILS(ont_shape_axis(-4, 3, &axis), ONT_EINVAL, "axis -4");
    CHECK_FAILS(ont_shape_axis(0, 0, &axis), ONT_EINVAL, "rank 0");
    CHECK_FAILS(ont_shape_axis(INT64_MIN, 3, &axis), ONT_EINVAL, "out of range");
    CHECK_INT(axis, 2);
}

/* The element at each index of the result, found by both ways of counting. */
TEST(shape_broadcast_against_indexing)
{
    for (int round = 0; round < 3000; round++) {
        ont_shape to = {.rank = (int32_t)check_between(0, 5)}, from = {0};
        for (int i = 0; i < to.rank; i++) to.dims[i] = check_between(0, 4);
        from.rank = (int32_t)check_between(0, to.rank);
        for (int i = 0; i < from.rank; i++) {
            int64_t dim = to.dims[to.rank - from.rank + i];
            from.dims[i] = check_between(0, 1) ? dim : 1;
        }
        ont_shape result;
        CHECK_OK(ont_shape_broadcast(&from, &to, &result));
        CHECK(ont_shape_equal(&result, &to));
        result = from;
        CHECK_OK(ont_shape_broadcast(&result, &to, &result)); /* the result may be an operand */
        CHECK(ont_shape_equal(&result, &to));
        int64_t strides[ONT_MAX_RANK], own[ONT_MAX_RANK], all[ONT_MAX_RANK], n = ont_shape_count(&to);
        ont_shape_broadcast_strides(&from, &to, strides);
        ont_shape_strides(&from, own);
        ont_shape_strides(&to, all);
        for (int64_t flat = 0; flat < n; flat++) {
            int64_t got = 0, want = 0;
            for (int i = 0; i < to.rank; i++) {
                int64_t index = flat / all[i] % to.dims[i];
                int at = i - (to.rank - from.rank);
                got += index * strides[i];
                if (at >= 0) want += (from.dims[at] == 1 ? 0 : index) * own[at];
            }
            CHECK_INT(got, want);
        }
    }
    ont_shape a = SHAPE(2, 3), b = SHAPE(4, 3), out = SHAPE(9);
    CHECK_FAILS(ont_shape_broadcast(&a, &b, &out), ONT_EINVAL, "[2, 3] and [4, 3] do not broadcast");
    CHECK_INT(out.dims[0], 9);
}

TEST(shape_text_fits_its_buffer)
{
    char text[ONT_SHAPE_TEXT];
    ont_shape most = {.rank = ONT_MAX_RANK}, none = {0}, mixed = SHAPE(2, -1, ONT_DIM_SYMBOL(0), 0);
    for (int i = 0; i < ONT_MAX_RANK; i++) most.dims[i] = INT64_MAX;
    CHECK_INT(strlen(ont_shape_text(&most, text)), 2 + 19 * ONT_MAX_RANK + 2 * (ONT_MAX_RANK - 1));
    CHECK_TEXT(ont_shape_text(&none, text), "[]");
    CHECK_TEXT(ont_shape_text(&mixed, text), "[2, ?, ?, 0]");
    CHECK(!ont_shape_is_static(&mixed) && ont_shape_is_static(&most) && ont_shape_is_static(&none));
    for (int k = 0; k < 5000; k += 99) CHECK_INT(ONT_DIM_SYMBOL_INDEX(ONT_DIM_SYMBOL(k)), k);
}

/* ---- map ---- */

TEST(map_agrees_with_a_list)
{
    enum { N = 3000 };
    static char keys[N][24];
    static int values[N];
    bool put[N] = {false};
    ont_map map = {0};
    CHECK(ont_map_get(&map, "nothing") == NULL);
    for (int i = 0; i < N; i++) snprintf(keys[i], sizeof keys[i], "%.*s%d", i % 17, "abcdefghijklmnopq", i);
    size_t used = 0;
    for (int round = 0; round < 3 * N; round++) {
        int i = (int)check_between(0, N - 1);
        char copy[24];
        strcpy(copy, keys[i]); /* found by contents, not by address */
        CHECK(ont_map_get(&map, copy) == (put[i] ? (void *)&values[i] : NULL));
        CHECK_OK(ont_map_put(&map, keys[i], &values[i]));
        used += !put[i];
        put[i] = true;
        CHECK_INT(map.used, used);
    }
    for (int i = 0; i < N; i++) CHECK(ont_map_get(&map, keys[i]) == (put[i] ? (void *)&values[i] : NULL));
    CHECK(map.used * 4 <= map.capacity * 3 && !(map.capacity & (map.capacity - 1)));
    ont_map_deinit(&map);
    CHECK(ont_map_get(&map, keys[0]) == NULL);
}

TEST(map_replaces_a_value)
{
    ont_map map = {0};
    int a, b;
    CHECK_OK(ont_map_put(&map, "", &a));
    CHECK_OK(ont_map_put(&map, "", &b));
    CHECK(ont_map_get(&map, "") == &b);
    CHECK_INT(map.used, 1);
    ont_map_deinit(&map);
}

TEST(map_keeps_its_contents_where_it_cannot_grow)
{
    static char keys[200][8];
    ont_map map = {0};
    int n = 0;
    ont_alloc_fail_after(1); /* the first table is had, the next is not */
    for (; n < 200; n++) {
        snprintf(keys[n], sizeof keys[n], "k%d", n);
        if (ont_map_put(&map, keys[n], keys[n]) != ONT_OK) break;
    }
    ont_alloc_fail_after(-1);
    CHECK_INT(n, 48);
    CHECK_INT(map.used, 48);
    for (int i = 0; i < n; i++) CHECK(ont_map_get(&map, keys[i]) == keys[i]);
    CHECK_OK(ont_map_put(&map, keys[n], keys[n]));
    CHECK(ont_map_get(&map, keys[n]) == keys[n] && ont_map_get(&map, keys[0]) == keys[0]);
    ont_map_deinit(&map);
}

/* Prints the order of the table; test_unit.py compares it between processes. */
TEST(map_order)
{
    static char keys[64][8];
    ont_map map = {0};
    for (int i = 0; i < 64; i++) {
        snprintf(keys[i], sizeof keys[i], "name%d", i);
        CHECK_OK(ont_map_put(&map, keys[i], keys[i]));
    }
    for (size_t i = 0; i < map.capacity; i++)
        if (map.slots[i].key) printf("%s ", map.slots[i].key);
    ont_map_deinit(&map);
}

/* ---- status ---- */

TEST(status_context_goes_in_front)
{
    CHECK_INT(ont_fail(ONT_EINVAL, "K is %d", 64), ONT_EINVAL);
    CHECK_TEXT(ont_error_message(), "K is 64");
    CHECK_INT(ont_context(ONT_EINVAL, "Gemm '%s'", "fc1"), ONT_EINVAL);
    CHECK_INT(ont_context(ONT_EINVAL, "model"), ONT_EINVAL);
    CHECK_TEXT(ont_error_message(), "model: Gemm 'fc1': K is 64");
    CHECK_INT(ont_context(ONT_OK, "nothing"), ONT_OK);
    CHECK_TEXT(ont_error_message(), "model: Gemm 'fc1': K is 64");
    CHECK_TEXT(ont_status_name(ONT_EUNSUPPORTED), "EUNSUPPORTED");
    CHECK_TEXT(ont_status_name((ont_status)99), "?");
}

TEST(status_long_messages_are_cut)
{
    static char lots[10000];
    memset(lots, 'x', sizeof lots - 1);
    (void)ont_fail(ONT_EINVAL, "%s", lots);
    size_t most = strlen(ont_error_message());
    CHECK(most > 1000 && most < sizeof lots - 1);
    for (int i = 0; i < 20; i++) (void)ont_context(ONT_EINVAL, "%s", lots);
    CHECK(strlen(ont_error_message()) <= most);
    for (int i = 0; i < 100; i++) (void)ont_context(ONT_EINVAL, "deep");
    CHECK(!strncmp(ont_error_message(), "deep: deep: ", 12));
}

static void *fail_elsewhere(void *unused)
{
    (void)unused;
    CHECK_TEXT(ont_error_message(), "");
    (void)ont_fail(ONT_EINVAL, "the other thread's");
    return NULL;
}

TEST(status_message_is_the_threads_own)
{
    pthread_t thread;
    (void)ont_fail(ONT_EINVAL, "ours");
    CHECK(!pthread_create(&thread, NULL, fail_elsewhere, NULL));
    CHECK(!pthread_join(thread, NULL));
    CHECK_TEXT(ont_error_message(), "ours");
}

/* ---- parallel ---- */

typedef struct cover {
    int64_t n, grain;
    unsigned char *seen;
} cover;

static void cover_range(void *context, int64_t first, int64_t last)
{
    const cover *c = context;
    CHECK(0 <= first && first < last && last <= c->n);
    CHECK(last - first >= c->grain || last - first == c->n);
    for (int64_t i = first; i < last; i++) c->seen[i]++;
}

TEST(parallel_covers_each_item_once)
{
    static const int64_t sizes[] = {0, 1, 7, 64, 1000, 4096, 10007}, grains[] = {1, 3, 64, 1000, 100000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t j = 0; j < sizeof grains / sizeof *grains; j++) {
            cover c = {sizes[i], grains[j], ont_calloc((size_t)sizes[i], 1)};
            CHECK(c.seen != NULL);
            ont_parallel(c.n, c.grain, cover_range, &c);
            for (int64_t k = 0; k < c.n; k++) CHECK_INT(c.seen[k], 1);
            ont_free(c.seen);
        }
    CHECK(ont_parallel_threads() >= 1);
}

/* ---- denormals ---- */

enum { FLUSHES = 1 << 15 }; /* a bit of a mode */

static int workers_that_flush(void)
{
    int n = 0;
#pragma omp parallel reduction(+ : n)
    n += omp_get_thread_num() && ont_float_mode() & FLUSHES;
    return n;
}

/* Flushing as a callback of a backward does that runs another program, in its caller's own mode. */
static void flush_within(bool outer_team, bool inner_team)
{
    ont_float_modes outer, inner;
    uint32_t own = ont_float_mode();
    ont_denormals_flush(outer_team, &outer);
    uint32_t flushing = ont_float_mode();
    ont_float_mode_set(own);
    ont_denormals_flush(inner_team, &inner);
    ont_denormals_restore(inner);
    CHECK_INT(ont_float_mode(), own);
    ont_float_mode_set(flushing);
    CHECK_INT(ont_denormals_pause(), flushing);
    CHECK_INT(ont_float_mode(), outer_team ? flushing : own); /* new threads of a team inherit it */
    ont_float_mode_set(flushing);
    ont_denormals_restore(outer);
    CHECK_INT(ont_float_mode(), own);
}

TEST(denormals_are_flushed_within_a_flush)
{
    uint32_t own = ont_float_mode();
    omp_set_num_threads(3);
    CHECK_INT(workers_that_flush(), 0);
    for (int caller = 0; caller < 2; caller++) { /* torch.set_flush_denormal() speaks of the caller alone */
        ont_float_mode_set(own | (caller ? FLUSHES : 0));
        for (int k = 0; k < 4; k++) {
            flush_within(k & 1, k & 2);
            CHECK_INT(workers_that_flush(), 0);
        }
    }
    ont_float_mode_set(own);
}
