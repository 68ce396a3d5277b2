/*
 * Maps names to pointers: open addressing, keys borrowed. For the loader and the verifier; never used during a step.
 */
#ifndef ONT_BASE_MAP_H
#define ONT_BASE_MAP_H

#include "base/status.h"

typedef struct ont_map {
    struct ont_map_slot {
        const char *key;
        void *value;
    } *slots;
    size_t capacity, used; /* capacity is a power of two */
} ont_map;

void ont_map_deinit(ont_map *map); /* a zeroed map is empty */
void *ont_map_get(const ont_map *map, const char *key); /* NULL: absent */
/* Inserts or replaces; value must not be NULL. */
ont_status ont_map_put(ont_map *map, const char *key, void *value) ONT_MUST_USE;

#endif
