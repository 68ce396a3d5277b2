/*
 * A map finds what was put into it, also where it could not grow.
 */
#include "base/map.h"
#include "check.h"

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
