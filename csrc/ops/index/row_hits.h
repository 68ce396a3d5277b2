/*
 * Indices of rows, sorted by row: each row of a result can then be written once, by one thread, and its sum has one
 * order whatever the number of threads.
 */
#ifndef ONT_OPS_ROW_HITS_H
#define ONT_OPS_ROW_HITS_H

#include "ops/index/gather.h"

/* A row in the upper half, the position of the index that names it in the lower: sorting hits is a stable sort. */
typedef uint64_t ont_row_hit;

static inline int64_t ont_hit_row(ont_row_hit h) { return (int64_t)(h >> 32); }
static inline int64_t ont_hit_position(ont_row_hit h) { return (int64_t)(h & UINT32_MAX); }

typedef struct ont_row_hits {
    const ont_row_hit *at; /* (count), sorted */
    int64_t count, rows;   /* indices, rows of the table */
    bool every_row;        /* work is counted in units: each hit is one, and with every_row each row too */
} ont_row_hits;

/* Bytes of work memory that ont_row_hits_sort() needs. */
static inline size_t ont_row_hits_bytes(int64_t count) { return (size_t)count * 2 * sizeof(ont_row_hit); }

/* Whether 32 bits count rows and indices. */
static inline bool ont_row_hits_fit(int64_t rows, int64_t count) { return rows <= UINT32_MAX && count <= UINT32_MAX; }

/* Radix sort of the indices that ont_gather_check() has accepted. `work`: ont_row_hits_bytes(s->count). */
ont_row_hits ont_row_hits_sort(const ont_gather *s, const void *indices, ont_row_hit *work, bool every_row);

static inline int64_t ont_row_hits_units(const ont_row_hits *h) { return h->count + (h->every_row ? h->rows : 0); }

/* Number of hits of rows before `row`. */
int64_t ont_row_hits_before(const ont_row_hits *h, int64_t row);
/* The first row whose work has its middle at unit `unit` or later. */
int64_t ont_row_hits_row_at(const ont_row_hits *h, int64_t unit);

#endif
