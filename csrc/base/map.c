/*
 * Name map. See map.h. Linear probing, at most 3/4 full.
 *
 * Names come from untrusted models, and names chosen to collide would make loading quadratic. They are hashed by
 * SipHash-1-3 with a random key per process. Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF",
 * Indocrypt 2012.
 */
#include "base/map.h"

#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/alloc.h"
#include "base/assert.h"

static uint64_t secret[2];

static void draw_secret(void)
{
    if (getrandom(secret, sizeof secret, GRND_NONBLOCK) == (ssize_t)sizeof secret) return;
    /* Fallback without the system's generator: the clock and load addresses. */
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    secret[0] ^= (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec;
    secret[1] ^= (uint64_t)(uintptr_t)&now ^ (uint64_t)(uintptr_t)&draw_secret << 16;
}

static inline uint64_t rotate(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

static inline void sip_round(uint64_t v[4])
{
    v[0] += v[1];
    v[2] += v[3];
    v[1] = rotate(v[1], 13) ^ v[0];
    v[3] = rotate(v[3], 16) ^ v[2];
    v[0] = rotate(v[0], 32);
    v[2] += v[1];
    v[0] += v[3];
    v[1] = rotate(v[1], 17) ^ v[2];
    v[3] = rotate(v[3], 21) ^ v[0];
    v[2] = rotate(v[2], 32);
}

static uint64_t hash(const char *name)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, draw_secret);
    size_t length = strlen(name), whole = length & ~(size_t)7;
    uint64_t v[4] = {secret[0] ^ 0x736f6d6570736575u, secret[1] ^ 0x646f72616e646f6du, secret[0] ^ 0x6c7967656e657261u,
                     secret[1] ^ 0x7465646279746573u};
    for (size_t at = 0; at <= whole; at += 8) {
        uint64_t word = 0;
        memcpy(&word, name + at, at < whole ? 8 : length - whole);
        if (at == whole) word |= (uint64_t)length << 56;
        v[3] ^= word;
        sip_round(v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for (int i = 0; i < 3; i++) sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static struct ont_map_slot *find(const ont_map *map, const char *key)
{
    size_t mask = map->capacity - 1;
    for (size_t i = hash(key) & mask;; i = (i + 1) & mask) {
        struct ont_map_slot *slot = &map->slots[i];
        if (!slot->key || !strcmp(slot->key, key)) return slot;
    }
}

void ont_map_deinit(ont_map *map)
{
    ont_free(map->slots);
    *map = (ont_map){0};
}

void *ont_map_get(const ont_map *map, const char *key)
{
    ONT_ASSERT(key);
    return map->capacity ? find(map, key)->value : NULL;
}

static ont_status grow(ont_map *map)
{
    ont_map bigger = {.capacity = map->capacity ? map->capacity * 2 : 64};
    bigger.slots = ont_calloc(bigger.capacity, sizeof *bigger.slots);
    if (!bigger.slots) return ONT_ENOMEM;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->slots[i].key) *find(&bigger, map->slots[i].key) = map->slots[i];
    bigger.used = map->used;
    ont_free(map->slots);
    *map = bigger;
    return ONT_OK;
}

ont_status ont_map_put(ont_map *map, const char *key, void *value)
{
    ONT_ASSERT(key);
    if (map->used + 1 > map->capacity / 4 * 3) ONT_TRY(grow(map));
    struct ont_map_slot *slot = find(map, key);
    if (!slot->key) {
        slot->key = key;
        map->used++;
    }
    slot->value = value;
    return ONT_OK;
}
