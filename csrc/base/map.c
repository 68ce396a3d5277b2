/*
 * Name map. See map.h. FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv), linear probing, at most 3/4 full.
 */
#include "base/map.h"

#include <string.h>

#include "base/alloc.h"

static uint64_t hash(const char *key)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *key; key++) h = (h ^ (unsigned char)*key) * 0x100000001b3u;
    return h;
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
    if (map->used + 1 > map->capacity / 4 * 3) ONT_TRY(grow(map));
    struct ont_map_slot *slot = find(map, key);
    if (!slot->key) {
        slot->key = key;
        map->used++;
    }
    slot->value = value;
    return ONT_OK;
}
